"""Table I of the FISM paper: seconds until the stopping rule holds, on the location problem; compared with C.

The dimension n is in {10, 50, 100}, and there are m in {500, 1000, 5000, 10000} balls. IR-IG, and FISM with S in {1, 2,
4, 8} clients, have ten runs each, with new balls, anchor and start. γ_k = 1/k^0.8, λ_k = 1/k^0.1 (here divided by m),
the tolerance is 1e-5, and the precision float32. Seconds are processor time in the engine's compiled rounds, without
compilation. Every process uses one core, so this is also the running time unless other programs use the core. All
methods for one (n, m) run in the same process, in turn. Numbers in parentheses are the paper's.

The second table compares whole rounds, without the stopping rule, with the loop fism_loop.c, compiled by `cc -O3
-march=native`. It has the best milliseconds per round.
"""

import copy
import ctypes
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, in_process, row, turns
from fedbilevel.engines.engine import first_carry
from fedbilevel.tasks import location

QUICK = {"runs": 1, "largest": 1000}
# XLA compiles a loop as one piece if a pass through its body reads and writes fewer bytes than this number (1024 by
# default); otherwise every operation of every pass is dispatched separately.
SMALL_LOOPS = "--xla_backend_extra_options=xla_cpu_small_while_loop_byte_threshold=1000000"
METHODS = {"IR-IG": 1, "S = 1": 1, "S = 2": 2, "S = 4": 4, "S = 8": 8}  # numbers of clients
DIMS, TARGETS, ROUNDS = (10, 50, 100), (500, 1000, 5000, 10000), 20_000
PAPER = {  # seconds, in the order of METHODS
    (10, 500): (16.92, 15.96, 5.95, 2.34, 1.39),
    (10, 1000): (42.88, 40.51, 13.47, 5.31, 2.76),
    (10, 5000): (374.42, 351.27, 120.96, 42.67, 18.12),
    (10, 10000): (849.49, 800.44, 295.64, 104.30, 38.62),
    (50, 500): (15.78, 14.77, 6.13, 3.37, 2.77),
    (50, 1000): (35.47, 33.20, 12.46, 5.06, 2.96),
    (50, 5000): (318.56, 298.60, 106.08, 36.96, 15.26),
    (50, 10000): (808.79, 760.02, 277.83, 98.70, 36.61),
    (100, 500): (17.33, 16.17, 8.31, 4.74, 3.91),
    (100, 1000): (34.73, 32.44, 12.90, 5.95, 4.10),
    (100, 5000): (292.83, 276.16, 97.92, 35.52, 14.08),
    (100, 10000): (768.78, 724.63, 256.56, 89.95, 35.93),
}


def method(name: str, m: int, tolerance: float | None) -> Any:
    cls = fb.IRIG if name == "IR-IG" else fb.FISM
    return cls(lr=1.0, lr_decay=0.8, regularization=1 / m, regularization_decay=0.1, tolerance=tolerance)


def prepared(name: str, n: int, m: int, tolerance: float | None, seed: int) -> tuple[Any, Any, Any, Any]:
    """Use one core. Return a run of the engine before its first round, its carry, the anchor, and the task."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    task = location(dim=n, targets=m, clients=METHODS[name], layout="scattered", seed=seed)
    anchor = -jax.grad(task.problem.outer)(np.zeros_like(task.x0), None, None)  # H = ½‖x − a‖²
    algorithm = method(name, m, tolerance)
    carry = first_carry(algorithm, task.problem, task.clients, task.x0, None)
    run = fb.Local().start(algorithm, task.problem, task.clients, len(task.clients), jax.random.key(0), carry)
    return run, carry, anchor, task


def play(run: Any, carry: Any, rounds: int) -> tuple[Any, float]:
    """Run at most `rounds` rounds, fewer if the algorithm has finished. Return the carry and the seconds."""
    began = time.process_time()
    while int(carry.round) < rounds and not run.algorithm.finished(carry.state):
        carry = run.advance(carry, rounds - int(carry.round)).carry
    jax.block_until_ready(carry)
    return carry, time.process_time() - began


def cells(n: int, m: int, runs: int) -> dict[str, list[tuple[float, int]]]:
    """Return the seconds and the rounds of every run of every method, for one (n, m)."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in METHODS}
    for seed, name in itertools.product(range(runs), METHODS):
        run, carry, _, _ = prepared(name, n, m, 1e-5, seed)
        play(run, copy.deepcopy(carry), 1)  # compiles
        carry, seconds = play(run, carry, ROUNDS)
        found[name].append((seconds, int(carry.round)))
    return found


def hand_compiled(folder: str) -> Callable[..., np.ndarray]:
    """Return the function (name, n, m, rounds, task, anchor) -> x that fism_loop.c computes."""
    library = Path(folder, "loop.so")
    source = str(Path(__file__).with_name("fism_loop.c"))
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(library), source, "-lm"]
    subprocess.run(command, check=True)
    function = ctypes.CDLL(str(library)).fism_rounds

    def walk(name: str, n: int, m: int, rounds: int, task: Any, anchor: Any) -> np.ndarray:
        balls = task.clients.inner.values
        arrays = [np.ascontiguousarray(a, np.float32) for a in (balls["center"], balls["radius"], anchor, task.x0)]
        x = arrays[-1] = arrays[-1].copy()
        steps = [ctypes.c_float(v) for v in (1.0, 0.8, 1 / m, 0.1)]
        pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in arrays]
        function(n, m, METHODS[name], int(name == "IR-IG"), rounds, *steps, *pointers)
        return x

    return walk


def beside_loop(name: str, n: int, m: int, passes: int = 15) -> tuple[list[float], float]:
    """Return the best milliseconds per round of the engine and the loop, in turn, and the largest difference of x."""
    rounds = max(10, 100_000 // m)
    with tempfile.TemporaryDirectory() as folder:
        loop = hand_compiled(folder)
    run, start, anchor, task = prepared(name, n, m, None, 0)
    ours, _ = play(run, copy.deepcopy(start), rounds)  # compiles
    theirs = loop(name, n, m, rounds, task, anchor)
    gap = float(np.max(np.abs(np.asarray(ours.state.x) - theirs)))
    # Steps are almost nonexpansive, and each step rounds entries of at most 10. So rounding errors add up at most like
    # a random walk.
    assert gap <= np.sqrt(rounds * m) * 10 * np.finfo(np.float32).eps, gap

    def of_loop() -> float:
        began = time.process_time()
        loop(name, n, m, rounds, task, anchor)
        return time.process_time() - began

    contenders = {"engine": lambda: play(run, copy.deepcopy(start), rounds)[1], "loop": of_loop}
    return [1e3 * min(seconds) / rounds for seconds in turns(contenders, passes).values()], gap


def main(runs: int = 10, largest: int = max(TARGETS)) -> None:
    flags = {"XLA_FLAGS": SMALL_LOOPS}
    head("n", "m", *(f"{name}: s; over IR-IG's; rounds" for name in METHODS))
    for size in ((n, m) for n in DIMS for m in TARGETS if m <= largest):
        found = in_process(cells, *size, runs, environment=flags)
        assert max(rounds for of_method in found.values() for _, rounds in of_method) < ROUNDS, "some did not end"
        means = [np.mean(found[name], axis=0) for name in METHODS]
        paper, base = PAPER[size], means[0][0]
        shown = [
            f"{seconds:.3f} ({there}); {seconds / base:.2f} ({there / paper[0]:.2f}); {rounds:.0f}"
            for (seconds, rounds), there in zip(means, paper, strict=True)
        ]
        row(*size, *shown)
    head("n", "m", "method", "library, ms", "loop in C, ms", "ratio", "largest difference of x")
    for n, m, name in itertools.product(DIMS, (1000, 10000), ("IR-IG", "S = 1", "S = 8")):
        if m <= largest:
            ms, gap = in_process(beside_loop, name, n, m, environment=flags)
            row(n, m, name, *(f"{one:.3f}" for one in ms), f"{ms[0] / ms[1]:.2f}", f"{gap:.0e}")
