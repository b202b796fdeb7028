"""Processor seconds of a second `solve`, which finds the programs of the first one, and how many programs it compiles.

python benchmarks/second_solve.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.tasks import quadratic

REPETITIONS = 5
RNG = np.random.default_rng(0)
SAMPLES = RNG.normal(size=(4, 5, 3))
Solve = Callable[[], Any]


def losses() -> tuple[Any, Any]:
    """Defined anew by each call, as by a notebook's cell that runs again."""

    def outer(x: Any, y: Any, batch: Any) -> Any:
        return jnp.mean((batch @ y - jnp.sum(x)) ** 2)

    def inner(x: Any, y: Any, batch: Any) -> Any:
        return outer(x, y, batch) + y @ y

    return outer, inner


def tiny(problem: fb.Bilevel | None = None, key: int = 0, scale: float = 1.0, **fields: Any) -> Solve:
    """Fifty rounds of SimFBO on four clients."""
    method = fb.SimFBO(local_steps=2, batch_size=2, **fields)
    clients = fb.Clients(scale * SAMPLES, SAMPLES[::-1].copy())
    return lambda: fb.solve(
        method, problem or fb.Bilevel(*losses()), clients, jnp.ones(2), jnp.zeros(3), rounds=50, key=key
    )


def capacities(seed: int, **fields: Any) -> Solve:
    """Five rounds of RABO where half of the clients hold half of the model."""
    task = quadratic(clients=4, samples=(5, 5), units=4, seed=seed).with_own(capacity=[0.5, 1, 0.5, 1])
    return lambda: fb.solve(fb.RABO(**fields), task.problem, task.clients, task.x0, task.y0, rounds=5, key=seed)


def seconds(solve: Solve, compiled: list[str]) -> tuple[float, int]:
    """Processor seconds and compilations of one solve."""
    before, began = len(compiled), time.process_time()
    solve()
    return time.process_time() - began, len(compiled) - before


def cases() -> Iterator[tuple[str, Solve]]:
    same = fb.Bilevel(*losses())
    yield "tiny quadratic, first", tiny(same)
    yield "the same again", tiny(same)
    yield "another step, radius and seed", tiny(same, key=7, client_lr=0.03, server_lr=0.1, radius=4.0)
    yield "other samples", tiny(same, scale=2.0)
    yield "the same code defined again", tiny()
    yield "RABO on two capacities, first", capacities(0)
    yield "another seed", capacities(1)
    yield "another step", capacities(0, outer_lr=0.01)


def main() -> None:
    compiled: list[str] = []
    event = "/jax/core/compile/backend_compile_duration"
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: name == event and compiled.append(name))
    print(f"{'':32}   seconds  compilations")
    for name, solve in cases():
        found = [seconds(solve, compiled) for _ in range(1 if "first" in name else REPETITIONS)]
        print(f"{name:32} {median(one for one, _ in found):9.4f}  {sum(count for _, count in found):6}")


if __name__ == "__main__":
    main()
