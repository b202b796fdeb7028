"""Sweeps: the same run with other values of its fields, and which of them are best on a holdout.

A `PointPlayer` runs a point with a seed: by `solve` for `fedbilevel.sweep`, in a folder for the command `fedbilevel
sweep`. Both have the points in common (`product`, `made`), the order of play (`played`), the table (`row_of`, `Sweep`),
and the rule that test data do not decide (`require_holdout`). A search has the player, the table and the rule.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.card import Card, Shown, counted
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import (
    CheckpointError,
    ConfigurationError,
    InUse,
    NumericalError,
    is_count,
    is_number,
    refuse_together,
    require,
    require_count,
    unknown,
)
from fedbilevel.core.metrics import mean_and_sd
from fedbilevel.core.problem import Problem
from fedbilevel.core.tables import with_values
from fedbilevel.core.tree import PyTree
from fedbilevel.display import Display
from fedbilevel.engines.history import LOSSES, History, Result, Row
from fedbilevel.engines.progress import Guarded, showing
from fedbilevel.engines.saver import FORCE
from fedbilevel.engines.solve import solve

T = TypeVar("T")
PointValues = Mapping[str, Any]
"""The values of the swept fields, by their dotted paths."""
PRUNED = "pruned after"  # as the error of a run that was ended early begins, since others were better by then
ENDS = ("mean", "worst", "best", "p10")  # of a metric that is measured on each client
POLL = 0.1  # seconds, until a run that another process plays is looked at again


class PointPlayer(Protocol):
    """What runs the points of a sweep."""

    def make(self, point: PointValues) -> Any:
        """Make the algorithm, or the spec, of a point; a ConfigurationError where the point is refused."""

    def run(self, number: int, point: PointValues, seed: int, display: Guarded) -> History:
        """Run a point, which has this number in its sweep, with a seed; return what the run has measured."""


def sweep(
    algorithm: Algorithm | Callable[..., Algorithm],
    problem: Problem,
    clients: Clients,
    x0: PyTree,
    y0: PyTree = None,
    *,
    grid: Mapping[str, Sequence[Any]],
    select: str,
    seeds: Sequence[int] = (0,),
    select_on_test: bool = False,
    folder: str | Path | None = None,
    progress: bool | Display | None = None,
    **given: Any,
) -> Sweep:
    """Run an algorithm with every combination of some values of its fields, and find the best.

    Args:
        algorithm: an algorithm, whose fields are replaced by their dotted paths, parts' fields too; or a function that
            makes the algorithm from the values of a point, given as keyword arguments, and is called for each run.
        problem, clients, x0, y0, progress: see `fedbilevel.solve`.
        grid: the values of each field, e.g. {"server_lr.x": [0.01, 0.1], "local_steps": [1, 5]}; every combination is a
            point.
        select: the metric whose last value decides, as a mean over the seeds; a loss, too ("outer_loss").
        seeds: every point is run with each, as `key` of `solve`.
        select_on_test: allow a metric with "test" in its name to decide.
        folder: where each run has a checkpoint. The same call goes on with what is there, and so do several processes
            side by side.
        given: the other arguments of `fedbilevel.solve`: rounds, metrics, cohort, callbacks, … A run may end before
            its rounds by a callback, such as `stop_when("exchanges", above=300)`.

    Returns:
        The sweep. A run that diverged or was refused is a row that says why. A warning says where the best point lies
        on the edge of the grid.

    Raises:
        ConfigurationError: no such field, metric or value; or every run is refused.
        CheckpointError: a checkpoint in the folder cannot be written, or is that of another run.
    """
    points = product(grid)
    require_seeds(seeds)
    known = [name for name in inspect.signature(solve).parameters if name not in ("key", "checkpoint", "resume")]
    for name in given:
        if name not in known:
            raise unknown("argument of fedbilevel.sweep", name, known)
    require_count("rounds", given.get("rounds"))
    for name in ("metrics", "metrics_per_client"):
        fits = isinstance(given.get(name) or {}, Mapping)
        require(fits, name, given.get(name), "functions by name")
    each_client = [f"{name}.{end}" for name in given.get("metrics_per_client") or () for end in ENDS]
    require_holdout(
        select, select_on_test, "Measure held-out data and select on that metric, or say select_on_test=True"
    )
    require_known(select, [*(given.get("metrics") or ()), *each_client, *LOSSES])
    player = Solving(
        make=_maker(algorithm, list(grid)),
        solve=partial(solve, problem=problem, clients=clients, x0=x0, y0=y0, **given),
        points=len(points),
        folder=folder,
    )
    made(points, player.make)
    return played(player, points, seeds, select, progress)


@dataclasses.dataclass(frozen=True)
class Solving:
    """Runs so many points by `solve`, with checkpoints in a folder if one is given."""

    make: Callable[[PointValues], Algorithm]
    solve: Callable[..., Result]
    points: int
    folder: str | Path | None

    def run(self, number: int, point: PointValues, seed: int, display: Guarded) -> History:
        display.begin(f"point {number + 1} of {self.points}, seed {seed}")
        file = self.folder and Path(self.folder) / f"point-{number:03d}-seed-{seed}.npz"
        kept: dict[str, Any] = {"checkpoint": file, "resume": "auto"} if file else {}
        try:
            return self.solve(self.make(point), key=seed, progress=display, **kept).history
        except CheckpointError as error:  # to go on by force would mix the points of two sweeps
            if FORCE not in str(error):
                raise
            raise CheckpointError(str(error).replace(FORCE, "choose another folder")) from error


def _maker(
    algorithm: Algorithm | Callable[..., Algorithm], fields: Sequence[str]
) -> Callable[[PointValues], Algorithm]:
    """Return what makes the algorithm of a point."""
    if isinstance(algorithm, Algorithm):
        return partial(with_values, algorithm)
    build: Callable[..., Algorithm] = algorithm
    require(callable(build), "algorithm", build, "an algorithm, or a function that makes it from a point")
    parameters = inspect.signature(build).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        for name in fields:
            if name not in parameters:
                raise unknown("argument of the function that makes the algorithm", name, parameters)

    def make(point: PointValues) -> Algorithm:
        found = build(**point)
        require(isinstance(found, Algorithm), "algorithm", found, "an algorithm, as its function has made it")
        return found

    return make


def product(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combine every value of a field with every value of the others; the last field changes first.

    Raises:
        ConfigurationError: there are no fields; a field has no values, a value twice, or comes after a part of itself.
    """
    require(isinstance(grid, Mapping) and bool(grid), "grid", grid, "lists of values by the dotted paths of fields")
    for name, values in grid.items():
        some = isinstance(values, Collection) and not isinstance(values, str | Mapping) and len(values) > 0
        require(some, f"grid of {name}", values, "a list of one value or more")
        plain = [value.tolist() if hasattr(value, "tolist") else value for value in values]  # NumPy's and JAX's
        for i, value in enumerate(plain):
            if any(value is other or (value == other) is True for other in plain[:i]):
                raise ConfigurationError(f"grid of {name}: {value!r} is there twice")
    for part, whole in itertools.combinations(grid, 2):
        if part.startswith(f"{whole}."):
            raise ConfigurationError(
                f"{part} is a part of {whole}, whose values would replace its own: name {whole} first, or one of them"
            )
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def made(points: Sequence[PointValues], make: Callable[[PointValues], T]) -> list[T | ConfigurationError]:
    """Make something of each point, or keep the error with which `make` refuses the point.

    Raises:
        ConfigurationError: values are refused in every point that has them: slips, rather than unlucky combinations.
    """
    found: list[T | ConfigurationError] = []
    for point in points:
        try:
            found.append(make(point))
        except ConfigurationError as error:
            found.append(error)
    slips: dict[str, ConfigurationError] = {}
    for name, value in dict.fromkeys((name, repr(value)) for point in points for name, value in point.items()):
        of_value = [one for one, point in zip(found, points, strict=True) if repr(point.get(name)) == value]
        errors = [one for one in of_value if isinstance(one, ConfigurationError)]
        if len(errors) == len(of_value):
            slips |= {str(mistake): mistake for mistake in errors[0].wrong}
    refuse_together(slips.values())
    return found


def require_seeds(seeds: Sequence[int]) -> None:
    """Refuse an empty list of seeds, a seed that is given twice, and what is no seed."""
    fits = isinstance(seeds, Collection) and not isinstance(seeds, str) and len(seeds) > 0
    fits = fits and all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds) and len(set(seeds)) == len(seeds)
    require(fits, "seeds", seeds, "one or more whole numbers, all different")


def require_known(select: str, metrics: Collection[str]) -> None:
    """Refuse a metric that is not measured."""
    if select not in metrics:
        raise unknown("metric to select on", select, metrics)


def measured_on_test(metric: str) -> bool:
    """Tell whether a metric's name says that it is measured on test data: a word in it begins with "test", as in
    test_accuracy, acc_on_tests or accuracyTest, and not within a word, as in "fastest"."""
    return re.search(r"(?<![a-z])test|Test|TEST", metric) is not None


def require_holdout(select: str, on_test: bool, advice: str) -> None:
    """Refuse to choose by test data, unless that is said explicitly; `advice` says what to do."""
    if measured_on_test(select) and not on_test:
        raise ConfigurationError(
            f"{select} is measured on test data: chosen by it, a setting looks better than it is. {advice}"
        )


def played(
    player: PointPlayer,
    points: Sequence[PointValues],
    seeds: Sequence[int],
    select: str,
    progress: bool | Display | None = False,
    said: Callable[[Mapping[str, Any]], None] = lambda row: None,
) -> Sweep:
    """Run every point with every seed, seed after seed, so that the points of a seed share its task.

    A run that another process plays is looked at again after the others.

    Args:
        progress: see `fedbilevel.solve`.
        said: called with each run that has ended: a row of `Sweep.trials`.

    Raises:
        ConfigurationError: every run is refused, such as for its number of rounds.
    """
    larger, wrong = False, []
    found: dict[tuple[int, int], dict[str, Any]] = {}
    waiting = deque(itertools.product(seeds, range(len(points))))
    with showing(progress) as display:
        while waiting:
            seed, number = waiting.popleft()
            try:
                history = player.run(number, points[number], seed, display)
                row = row_of(history, seed, select)
                larger = history.larger_is_better(select)
            except InUse:
                waiting.append((seed, number))
                time.sleep(POLL)
                continue
            except (ConfigurationError, NumericalError) as error:
                row = {"seed": seed, "error": str(error)}
                wrong += [error] if isinstance(error, ConfigurationError) else []
            found[number, seed] = row
            said({**points[number], **row})
    if len(wrong) == len(found):
        raise wrong[0]
    runs = [[found[number, seed] for seed in seeds] for number in range(len(points))]
    ended = Sweep.of(player, points, runs, select, larger)
    for text in on_edge(points, ended.best or {}):
        warnings.warn(text, stacklevel=3)
    return ended


def on_edge(points: Sequence[PointValues], best: PointValues) -> Iterator[str]:
    """Say of each field whose best value is the least or the largest number of its grid that it may lie beyond."""
    for name, value in best.items():
        values = [point[name] for point in points if is_number(point[name])]
        smallest = value == 1 and is_count(value)  # of all counts
        if is_number(value) and min(values) < max(values) and value in (min(values), max(values)) and not smallest:
            yield f"the best {name}, {value}, lies on the edge of the grid: better ones may lie beyond it"


def row_of(history: History, seed: int, select: str) -> dict[str, Any]:
    """Return what a run has for the table of a sweep; a metric to select on that is not finite is an error.

    Raises:
        ConfigurationError: the metric is not measured.
    """
    last = in_table(history.rows[-1])
    require_known(select, last)
    return {"seed": seed, "error": "" if math.isfinite(last[select]) else f"{select} is {last[select]}", **last}


def in_table(row: Row) -> dict[str, Any]:
    """Return what a row of a history has for the table of a sweep: all but the seconds of this machine."""
    return {name: value for name, value in row.items() if name != "seconds"}


@dataclasses.dataclass(repr=False)
class Sweep(Shown):
    """What came of a sweep.

    Attributes:
        fields: the names of the swept fields.
        select: the metric that decides, as a mean over the seeds.
        larger_is_better: whether a larger value of it is.
        trials: a row for each run, by point and seed: the values, "seed", "error", and the last row of its history but
            for the seconds of this machine.
        rows: a row for each point, best first and those that failed last: the values, the metric's mean, its sample
            standard deviation "sd", the means "rounds" and "exchanges", and "error", empty unless a run failed.
        spent: "rounds" and "exchanges" of all runs together, pruned ones up to their ends, but for those that failed.
        algorithm: with the values of the best point (of the command line, its spec); None where every point failed.
        others: how many more runs are in the folder, of the command line's: of other points or seeds, played before.
    """

    fields: list[str]
    select: str
    larger_is_better: bool
    trials: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    spent: dict[str, float]
    algorithm: Any
    others: int = 0

    @classmethod
    def of(
        cls,
        player: PointPlayer,
        points: Sequence[PointValues],
        runs: Sequence[Sequence[Mapping[str, Any]]],
        select: str,
        larger: bool,
    ) -> Sweep:
        """Make the table of some points, from the rows of the runs of each."""
        rows = [standing(point, of, select) for point, of in zip(points, runs, strict=True)]
        sign = -1 if larger else 1
        order = sorted(range(len(rows)), key=lambda i: (rows[i][select] is None, sign * (rows[i][select] or 0.0)))
        best = player.make(points[order[0]]) if order and rows[order[0]][select] is not None else None
        fields = list(dict.fromkeys(name for point in points for name in point))
        trials = [{**point, **row, **point} for point, of in zip(points, runs, strict=True) for row in of]
        spent = {name: sum(row.get(column, 0) for of in runs for row in of) for name, column in COSTS.items()}
        return cls(fields, select, larger, trials, [rows[i] for i in order], spent, best)

    @property
    def best(self) -> dict[str, Any] | None:
        """The values of the best point; None where every point failed."""
        return None if self.algorithm is None else {name: self.rows[0][name] for name in self.fields}

    @property
    def chosen_on(self) -> str:
        """The metric that chose, which way is better, and a warning where it was measured on test data."""
        way = "larger" if self.larger_is_better else "smaller"
        return f"{self.select}, {way} is better{', SELECTED ON TEST DATA' * measured_on_test(self.select)}"

    @property
    def effort(self) -> str:
        """The number of runs and what they cost, in a sentence that papers can quote."""
        seeds, errors = len({row["seed"] for row in self.trials}), [row["error"] for row in self.trials if row["error"]]
        early = sum(error.startswith(PRUNED) for error in errors)
        ends = {"pruned": early, "failed": len(errors) - early}
        said = "".join(f", {count:,} {end}" for end, count in ends.items() if count)
        of = f"{counted(len(self.rows), 'point')} × {counted(seeds, 'seed')}"
        cost = f"in all {self.spent['rounds']:,.0f} rounds, {self.spent['exchanges']:,.0f} exchanges"
        beside = f"; beside {counted(self.others, 'other run')} in this folder" if self.others else ""
        return f"{counted(len(self.trials), 'run')} ({of}){said}; {cost}{beside}"

    def card(self) -> Card:
        values = ", ".join(f"{name} = {value}" for name, value in (self.best or {}).items())
        lines = {
            "best": values or "none: every point failed",
            self.select: "–"
            if self.best is None
            else mean_and_sd(self.select, self.rows[0][self.select], self.rows[0]["sd"]),
            "chosen on": self.chosen_on,
            "runs": self.effort,
            "more": "rows, best, algorithm, trials",
        }
        return Card(f"Sweep over {', '.join(self.fields)}", lines)


COSTS = {"rounds": "round", "exchanges": "exchanges"}
"""The costs in a point's row, by the columns of its runs' histories."""


def standing(point: PointValues, runs: Sequence[Mapping[str, Any]], select: str) -> dict[str, Any]:
    """Sum up how a point did, from the rows of its runs: means over the seeds; or why it failed, and with which."""
    errors = {run["seed"]: run["error"] for run in runs if run["error"]}
    if errors:
        several = f"seed{'s' * (len(errors) > 1)} {', '.join(map(str, errors))}: " if len(runs) > 1 else ""
        error = f"{several}{next(iter(errors.values()))}"
        return {**point, select: None, "sd": None, **dict.fromkeys(COSTS), "error": error, **point}
    metric = [run[select] for run in runs]
    spread = statistics.stdev(metric) if len(metric) > 1 else None
    costs = {name: statistics.fmean(run[column] for run in runs) for name, column in COSTS.items()}
    costs |= {"epsilon": max(run["epsilon"] for run in runs)} if all("epsilon" in run for run in runs) else {}
    return {**point, select: statistics.fmean(metric), "sd": spread, **costs, "error": "", **point}
