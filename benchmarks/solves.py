"""One `solve` after the other in a process: the processor time of a second one, and whether memory stays the same.

A second `solve` with another step and seed reuses the programs of the first, so it compiles nothing. For the memory,
each `solve` has a problem of its own, with new losses (which close over arrays), samples, start and metrics. The first
calls load code and fill caches of a fixed size.
"""

import gc
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, row
from fedbilevel.tasks import quadratic

SAMPLES = np.random.default_rng(0).normal(size=(4, 5, 3))
QUICK = {"passes": 1, "solves": 4, "every": 2}


def fit(x: Any, y: Any, batch: Any) -> Any:
    return jnp.mean((batch @ y - jnp.sum(x)) ** 2)


def ridge(x: Any, y: Any, batch: Any) -> Any:
    return fit(x, y, batch) + y @ y


def tiny(key: int, lr: float) -> None:
    """Call `solve` with fifty rounds of SimFBO on four clients."""
    method = fb.SimFBO(local_steps=2, batch_size=2, client_lr=lr, server_lr=lr)
    clients = fb.Clients(SAMPLES, SAMPLES[::-1].copy())
    fb.solve(method, fb.Bilevel(fit, ridge), clients, jnp.ones(2), jnp.zeros(3), rounds=50, key=key)


def capacities(key: int, lr: float) -> None:
    """Call `solve` with five rounds of RABO, in which half of the clients hold half of the model."""
    task = quadratic(clients=4, samples=(5, 5), units=4).with_own(capacity=[0.5, 1, 0.5, 1])
    own = fb.parts.LocalImplicit(solver=fb.parts.Neumann(step=0.03))
    method = fb.RABO(inner=fb.parts.LocalSGD(lr=0.03), hypergradient=own, outer_lr=lr)
    fb.solve(method, task.problem, task.clients, task.x0, task.y0, rounds=5, key=key)


def another(number: int) -> None:
    """Solve the problem with this number."""
    rng = np.random.default_rng(number)
    scale, samples = jnp.asarray(rng.normal(size=3)), rng.normal(size=(4, 8, 3))
    problem = fb.Bilevel(
        outer=lambda x, y, batch: fit(x, scale * y, batch),
        inner=lambda x, y, batch: fit(x, y, batch) + scale @ scale * (y @ y),
    )
    clients, method = fb.Clients(samples, samples.copy()), fb.SimFBO(local_steps=2, batch_size=8)
    fb.solve(method, problem, clients, jnp.ones(2), jnp.ones(3), rounds=3, metrics={"size": lambda x, y: scale @ y})


def main(passes: int = 5, solves: int = 500, every: int = 50) -> None:
    compiled: list[str] = []
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: name == event and compiled.append(name))
    head("problem", "solve", "processor s", "compilations")
    for problem, solve in {"tiny quadratic": tiny, "RABO on two capacities": capacities}.items():
        for which, given, times in (("first", (0, 0.02), 1), ("another step and seed", (7, 0.01), passes)):
            before, each = len(compiled), []
            for _ in range(times):
                began = process_time()
                solve(*given)
                each.append(process_time() - began)
            row(problem, which, f"{median(each):.4f}", len(compiled) - before)
    head("solves of different problems", "MB")
    for number in range(1, solves + 1):
        another(number)
        if number % every == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])  # in memory (Linux)
            row(number, f"{pages * 4096 / 1e6:.1f}")
