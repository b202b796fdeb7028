"""Functions that all benchmarks share: calls in turn, processes of their own, medians, intervals, and tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
Measured = TypeVar("Measured")


def turns(contenders: Mapping[str, Callable[[], Measured]], passes: int) -> dict[str, list[Measured]]:
    """Call the contenders in turn, A B A B …, so that other work of the machine affects all of them equally.

    Returns:
        The results of each contender's calls, by contender.
    """
    measured: dict[str, list[Measured]] = {name: [] for name in contenders}
    for _ in range(passes):
        for name, contender in contenders.items():
            measured[name].append(contender())
    return measured


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes, by the clock."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def round_ms(seconds: Sequence[float], rounds: int) -> float:
    """Return the milliseconds of a round: the median over the stretches of a run, but for the first, which warms up.

    Args:
        seconds: the column of the history with the seconds at the ends of stretches.
        rounds: the number of rounds of a stretch.
    """
    return 1e3 * float(np.median(np.diff(np.asarray(seconds, float))[1:])) / rounds


def in_process(
    function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None, limit: float = 3600
) -> Any:
    """Call a benchmark's function in a process of its own, without XLA's cache of programs on disk.

    The process finds the time at which it was started in the environment variable STARTED, in seconds since 1970.

    Args:
        function: a function at the top level of a module, whose arguments and result can be written as JSON.
        environment: environment variables to set.
        limit: the number of seconds after which the process is killed.

    Raises:
        subprocess.TimeoutExpired: the limit was reached.
        subprocess.CalledProcessError: the call failed; its error is on stderr.
    """
    command = [sys.executable, "-m", "benchmarks.harness", function.__module__, function.__name__]
    done = subprocess.run(
        [*command, json.dumps(arguments)],
        check=True,
        cwd=ROOT,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", "STARTED": str(time.time()), **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        timeout=limit,
    )
    return json.loads(done.stdout.splitlines()[-1])


def medians(measured: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each measure over the passes."""
    return {name: median(one[name] for one in measured) for name in measured[0]}


def spread(values: Iterable[float], form: str) -> str:
    """Return a text with the median, the least and the largest of some values."""
    values = list(values)
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def interval(values: np.ndarray, shared: float | np.ndarray = 0.0) -> np.ndarray:
    """Return half of the 95 % Student interval of the means over the first axis, such as over splits or seeds.

    If splits divide the same samples again, they are not independent. Then `shared` is the number of test samples
    divided by the number of training samples. The variance of the mean over J splits is s²(1/J + shared), by Nadeau and
    Bengio (Machine Learning 52, 2003), in place of s²/J.
    """
    from scipy.stats import t as student  # here, since contenders are timed with what they import

    count = len(values)
    return student.ppf(0.975, count - 1) * values.std(0, ddof=1) * np.sqrt(1 / count + shared)


def estimate(values: np.ndarray, shared: float = 0.0, form: str = "+.4f") -> str:
    """Return a text with the mean of values, such as differences, and half of its 95 % interval."""
    return f"{values.mean():{form}} ± {interval(values, shared):{form.lstrip('+')}}"


def head(*columns: str) -> None:
    """Print the head of a table in Markdown, after an empty line."""
    print()
    row(*columns)
    row(*["---"] * len(columns))


def row(*cells: object) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def compare(
    label: Iterable[object],
    found: Mapping[str, np.ndarray],
    to: str,
    forms: Sequence[str],
    shared: Any = 0.0,
    last: Mapping[str, str] | None = None,
) -> None:
    """Print a row for each method: the mean of each measure, and its paired difference to a method.

    Args:
        label: the cells that come before the method's name.
        found: by method, an array (splits, measures).
        to: the method to which the differences are; its own are left out.
        forms: the format of each measure.
        shared: as in `interval`, for all measures or for each.
        last: the text of a cell at the end of the row, by method. None: rows have no such cell.
    """
    each = np.broadcast_to(shared, len(forms))
    for name, of in found.items():
        cells = []
        for values, base, form, own in zip(of.T, found[to].T, forms, each, strict=True):
            cells += [f"{values.mean():{form}}", "" if name == to else estimate(values - base, own, f"+{form}")]
        row(*label, name, *cells, *([] if last is None else [last.get(name, "")]))


if __name__ == "__main__":
    module, name, given = sys.argv[1:]
    print(json.dumps(getattr(import_module(module), name)(*json.loads(given))))
