"""SimFBO, FedNest and LFedNest compared with serial PyTorch loops, and with the machine's rate of matrix products.

The settings are the rows simfbo-mnist, fednest-mnist and lfednest-mnist of floor.py. FedNest and LFedNest have the
setting of FedNest's published scripts. Every contender, and NumPy's matrix product, is a process of its own, measured
in turn. First, the library and PyTorch must end at the same numbers on a small problem, in float64 and with all
samples. PyTorch is installed in `.venv-peers/torch` the first time.

The counted work of SimFBO is the matrix products that every formulation needs: forward and backward through the first
layer for each of the two losses, 4 · 2·64·784·200 FLOP, and the same products with the head, 4 · 2·64·200·10 FLOP. The
counted work of the others is the least possible number of products with the first layer: forward once for each training
sample of the cohort and once for each validation batch, and backward for the two batches of the hypergradient, with
2·784·200 FLOP per sample.
"""

import subprocess
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import fedbilevel as fb
from benchmarks import floor
from benchmarks.contest import python_with
from benchmarks.harness import head, in_process, round_ms, row, turns
from benchmarks.machine import gemm_rate
from benchmarks.peers.problems import RIDGE

ENGINES = {"XLA's defaults": (1, False), "tune_cpu(1)": (1, True), "tune_cpu(2)": (2, True)}  # name: (devices, tuned)
THREADS = {"simfbo": ("",), "fednest": ("1", "2"), "lfednest": ("1", "2")}  # PyTorch's threads; "": its own choice
APART = 1e-10  # the largest allowed difference after the rounds of the check; they move entries by 1e-3 or more
SAMPLES, PIXELS, HIDDEN, CLASSES = 300, 784, 200, 10
QUICK = {"methods": ["simfbo"], "passes": 1, "timed": 2}


def setting(method: str) -> floor.Setting:
    return floor.ROWS[f"{method}-mnist"]


def library(method: str, engine: str, timed: int) -> float:
    """Measure the library in this process, in milliseconds per round."""
    devices, tuned = ENGINES[engine]
    if tuned:
        fb.tune_cpu(devices)
    play = floor.of_library(setting(method), floor.problem_of(setting(method), np.float32))
    seconds = play(1.0, 0, 3 * timed, engine=fb.Local(devices=devices), eval_every=timed).history["seconds"]
    return round_ms(seconds, timed)


def write(s: floor.Setting, dtype: str, file: str) -> None:
    """Write a problem in the form that torch_loops.py reads."""
    p = floor.problem_of(s, np.dtype(dtype))
    data = {f"{name}_{key}s": a for name in ("inner", "outer") for key, a in p.data[name].items()}
    start = {"x_w": p.x[0]["weight"], "x_b": p.x[0]["bias"], "y_w": p.y["weight"], "y_b": p.y["bias"]}
    numbers = {"local_steps": s.local_steps, "terms": s.terms, "batch_size": s.batch or 0}
    np.savez(file, **data, **start, **numbers, steps=s.steps, ridge=RIDGE, cohort=s.cohort or len(p.weights))


def small(method: str, problem: str) -> dict[str, Any]:
    """Write a small problem. Return the numbers at which the library ends."""
    s = floor.small(f"{method}-mnist")
    write(s, "float64", problem)
    end = floor.of_library(s, floor.problem_of(s, np.float64))(1.0, 0, floor.CHECKED)
    return {"x_w": end.x[0]["weight"].tolist(), "y_w": end.y["weight"].tolist()}


def peer(method: str, problem: str, rounds: int, threads: str = "") -> dict[str, Any]:
    """Run PyTorch. Return its numbers at the end, and the milliseconds per round."""
    result = str(Path(problem).with_name("result.npz"))
    command = [python_with("torch"), str(Path(__file__).with_name("torch_loops.py")), method, problem, result]
    subprocess.run([*command, str(rounds), *filter(None, [threads])], check=True)
    return dict(np.load(result))


def check(method: str, folder: Path) -> float:
    """Return the largest difference of the numbers at which the library and PyTorch end."""
    problem = str(folder / "small.npz")
    ours = in_process(small, method, problem, environment={"JAX_ENABLE_X64": "1"})
    theirs = peer(method, problem, floor.CHECKED, "1")
    apart = max(float(np.max(np.abs(theirs[name] - end))) for name, end in ours.items())
    assert apart < APART, f"PyTorch does not compute what the library does: {apart}"
    return apart


def flop(s: floor.Setting) -> float:
    """Return the counted floating-point operations of a round: see the docstring of the module."""
    if s.kind == "simfbo":
        return s.cohort * s.local_steps * 4 * 2 * s.batch * HIDDEN * (PIXELS + CLASSES)
    return s.cohort * (SAMPLES + s.batch * (4 if s.kind == "fednest" else 3)) * 2 * PIXELS * HIDDEN


def compare(method: str, passes: int, timed: int, folder: Path) -> None:
    """Measure all contenders for one method, and print the table."""
    apart, problem = check(method, folder), str(folder / "problem.npz")
    write(setting(method), "float32", problem)
    contenders: dict[str, Any] = {"NumPy": gemm_rate}
    contenders |= {engine: partial(in_process, library, method, engine, timed) for engine in ENGINES}
    for threads in THREADS[method]:
        run = partial(peer, method, problem, timed, threads)
        contenders[f"PyTorch, threads={threads or 'its own choice'}"] = lambda run=run: float(run()["ms"])
    measured = turns(contenders, passes)
    rates = measured.pop("NumPy")
    print(f"\n{method}: NumPy float32 1024³ {', '.join(f'{rate:.0f}' for rate in rates)} GFLOP/s")
    print(f"PyTorch and the library end at the same numbers, up to {apart:.0e}")
    torch = min((ms for name, ms in measured.items() if name.startswith("PyTorch")), key=min)
    head("contender", "ms a round: least", "median", "GFLOP/s", "of NumPy's best", "× PyTorch: least", "median")
    for name, ms in measured.items():
        rate = flop(setting(method)) / min(ms) / 1e6
        cells = f"{min(ms):.1f}", f"{median(ms):.1f}", f"{rate:.0f}", f"{rate / max(rates):.2f}"
        row(name, *cells, f"{min(torch) / min(ms):.2f}", f"{median(torch) / median(ms):.2f}")


def main(methods: tuple[str, ...] = tuple(THREADS), passes: int = 3, timed: int = 20) -> None:
    for method in methods:
        with tempfile.TemporaryDirectory() as folder:
            compare(method, passes, timed, Path(folder))
