"""The processor time of a second `solve`, which reuses programs of the first, and how many programs it compiles."""

from collections.abc import Callable
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
QUICK = {"passes": 1}


def outer(x: Any, y: Any, batch: Any) -> Any:
    return jnp.mean((batch @ y - jnp.sum(x)) ** 2)


def inner(x: Any, y: Any, batch: Any) -> Any:
    return outer(x, y, batch) + y @ y


def tiny(key: int, lr: float) -> Any:
    """Call `solve` with fifty rounds of SimFBO on four clients."""
    method = fb.SimFBO(local_steps=2, batch_size=2, client_lr=lr, server_lr=lr)
    given = fb.Bilevel(outer, inner), fb.Clients(SAMPLES, SAMPLES[::-1].copy()), jnp.ones(2), jnp.zeros(3)
    return fb.solve(method, *given, rounds=50, key=key)


def capacities(key: int, lr: float) -> Any:
    """Call `solve` with five rounds of RABO, in which half of the clients hold half of the model."""
    task = quadratic(clients=4, samples=(5, 5), units=4).with_own(capacity=[0.5, 1, 0.5, 1])
    own = fb.parts.LocalImplicit(solver=fb.parts.Neumann(step=0.03))
    method = fb.RABO(inner=fb.parts.LocalSGD(lr=0.03), hypergradient=own, outer_lr=lr)
    return fb.solve(method, task.problem, task.clients, task.x0, task.y0, rounds=5, key=key)


CASES: dict[str, Callable[[int, float], Any]] = {"tiny quadratic": tiny, "RABO on two capacities": capacities}


def main(passes: int = 5) -> None:
    compiled: list[str] = []
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: name == event and compiled.append(name))
    head("problem", "solve", "processor s", "compilations")
    for name, solve in CASES.items():
        for which, given, times in (("first", (0, 0.02), 1), ("another step and seed", (7, 0.01), passes)):
            before, each = len(compiled), []
            for _ in range(times):
                began = process_time()
                solve(*given)
                each.append(process_time() - began)
            row(name, which, f"{median(each):.4f}", len(compiled) - before)
