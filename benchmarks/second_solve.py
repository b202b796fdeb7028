"""The processor time of a second `solve`, which reuses programs of the first, and how many programs it compiles."""

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, row
from fedbilevel.tasks import quadratic

SAMPLES = np.random.default_rng(0).normal(size=(4, 5, 3))
QUICK = {"passes": 1}
Solve = Callable[[], Any]


def losses() -> tuple[Any, Any]:
    """Define the losses again, as if a cell of a notebook were executed again."""

    def outer(x: Any, y: Any, batch: Any) -> Any:
        return jnp.mean((batch @ y - jnp.sum(x)) ** 2)

    def inner(x: Any, y: Any, batch: Any) -> Any:
        return outer(x, y, batch) + y @ y

    return outer, inner


def tiny(problem: fb.Bilevel | None = None, key: int = 0, scale: float = 1.0, lr: float = 0.01, **fields: Any) -> Solve:
    """Return a `solve` with fifty rounds of SimFBO on four clients."""
    method = fb.SimFBO(local_steps=2, batch_size=2, client_lr=lr, server_lr=lr, **fields)
    clients = fb.Clients(scale * SAMPLES, SAMPLES[::-1].copy())
    return lambda: fb.solve(
        method, problem or fb.Bilevel(*losses()), clients, jnp.ones(2), jnp.zeros(3), rounds=50, key=key
    )


def capacities(seed: int, lr: float = 0.02) -> Solve:
    """Return a `solve` with five rounds of RABO, in which half of the clients hold half of the model."""
    task = quadratic(clients=4, samples=(5, 5), units=4, seed=seed).with_own(capacity=[0.5, 1, 0.5, 1])
    own = fb.parts.LocalImplicit(solver=fb.parts.Neumann(step=0.03))
    method = fb.RABO(inner=fb.parts.LocalSGD(lr=0.03), hypergradient=own, outer_lr=lr)
    return lambda: fb.solve(method, task.problem, task.clients, task.x0, task.y0, rounds=5, key=seed)


def cases() -> Iterator[tuple[str, Solve]]:
    """Yield the solves in order; later solves reuse the programs of earlier ones."""
    same = fb.Bilevel(*losses())
    yield "tiny quadratic, first", tiny(same)
    yield "the same again", tiny(same)
    yield "another step, radius and seed", tiny(same, key=7, lr=0.03, radius=4.0)
    yield "other samples", tiny(same, scale=2.0)
    yield "the same code defined again", tiny()
    yield "RABO on two capacities, first", capacities(0)
    yield "another seed", capacities(1)
    yield "another step", capacities(0, lr=0.01)


def main(passes: int = 5) -> None:
    compiled: list[str] = []
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: name == event and compiled.append(name))
    head("solve", "processor s", "compilations")
    for name, solve in cases():
        before, times = len(compiled), []
        for _ in range(1 if "first" in name else passes):
            began = time.process_time()
            solve()
            times.append(time.process_time() - began)
        row(name, f"{median(times):.4f}", len(compiled) - before)
