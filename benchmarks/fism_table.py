"""FISM compared with IR-IG on the location problem, until the stopping rule holds; and its rounds compared with C.

The dimension is n, and there are m balls. γ_k = 1/k^0.8, λ_k = 1/k^0.1 (here divided by m), the tolerance is 1e-5, and
the precision float32. For n = 10 and m = 10,000, a cell of Table I of the FISM paper, IR-IG and FISM with eight clients
have ten runs each, with new balls, anchor and start. Seconds are processor time in the engine's compiled rounds,
without compilation. Every process uses one core, so this is also the running time unless other programs use the core.

The second table compares whole rounds, without the stopping rule, with the loop fism_loop.c, compiled by `cc -O3
-march=native`. It has the best milliseconds per round.
"""

import copy
import ctypes
import itertools
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time
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
METHODS = {"IR-IG": 1, "S = 1": 1, "S = 8": 8}  # numbers of clients
DIMS, TARGETS, ROUNDS = (10, 50, 100), (1000, 10_000), 20_000


def prepared(name: str, n: int, m: int, tolerance: float | None, seed: int) -> tuple[Any, Any, Any, Any]:
    """Use one core. Return a run of the engine before its first round, its carry, the anchor, and the task."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    task = location(dim=n, targets=m, clients=METHODS[name], layout="scattered", seed=seed)
    anchor = -jax.grad(task.problem.outer)(np.zeros_like(task.x0), None, None)  # H = ½‖x − a‖²
    kind = fb.IRIG if name == "IR-IG" else fb.FISM
    algorithm = kind(lr=1.0, lr_decay=0.8, regularization=1 / m, regularization_decay=0.1, tolerance=tolerance)
    carry = first_carry(algorithm, task.problem, task.clients, task.x0, None)
    run = fb.Local().start(algorithm, task.problem, task.clients, len(task.clients), jax.random.key(0), carry)
    return run, carry, anchor, task


def play(run: Any, carry: Any, rounds: int) -> tuple[Any, float]:
    """Run at most `rounds` rounds, fewer if the algorithm has finished. Return the carry and the seconds."""
    began = process_time()
    while int(carry.round) < rounds and not run.algorithm.finished(carry.state):
        carry = run.advance(carry, rounds - int(carry.round)).carry
    jax.block_until_ready(carry)
    return carry, process_time() - began


def until_the_end(n: int, m: int, runs: int) -> dict[str, list[tuple[float, int]]]:
    """Return the seconds and the rounds of every run of IR-IG and of FISM with eight clients."""
    found: dict[str, list[tuple[float, int]]] = {"IR-IG": [], "S = 8": []}
    for seed, name in itertools.product(range(runs), found):
        run, carry, _, _ = prepared(name, n, m, 1e-5, seed)
        play(run, copy.deepcopy(carry), 1)  # compiles
        carry, seconds = play(run, carry, ROUNDS)
        assert int(carry.round) < ROUNDS, "a run did not end"
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
        began = process_time()
        loop(name, n, m, rounds, task, anchor)
        return process_time() - began

    contenders = {"engine": lambda: play(run, copy.deepcopy(start), rounds)[1], "loop": of_loop}
    return [1e3 * min(seconds) / rounds for seconds in turns(contenders, passes).values()], gap


def main(runs: int = 10, largest: int = max(TARGETS)) -> None:
    measure = {"environment": {"XLA_FLAGS": SMALL_LOOPS}}
    found = in_process(until_the_end, DIMS[0], largest, runs, **measure)
    head("n", "m", "method", "seconds", "of IR-IG's", "rounds")
    means = {name: np.mean(each, axis=0) for name, each in found.items()}
    for name, (seconds, rounds) in means.items():
        row(DIMS[0], largest, name, f"{seconds:.3f}", f"{seconds / means['IR-IG'][0]:.2f}", f"{rounds:.0f}")
    head("n", "m", "method", "library, ms", "loop in C, ms", "ratio", "largest difference of x")
    for n, m, name in itertools.product(DIMS, TARGETS, METHODS):
        if m <= largest:
            ms, gap = in_process(beside_loop, name, n, m, **measure)
            row(n, m, name, *(f"{one:.3f}" for one in ms), f"{ms[0] / ms[1]:.2f}", f"{gap:.0e}")
