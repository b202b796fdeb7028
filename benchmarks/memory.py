"""The memory of a process that solves one problem after another: does it stay the same?

Each `solve` has a problem of its own, with new losses (which close over arrays), samples, start and metrics. The first
calls load code and fill caches of a fixed size.
"""

import gc
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, row

CLIENTS, DIMENSION = 4, 3
QUICK = {"solves": 4, "every": 2}


def megabytes() -> float:
    """Return the memory of this process, in MB (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def solve(number: int) -> None:
    """Solve the problem with this number."""
    rng = np.random.default_rng(number)
    scale, samples = jnp.asarray(rng.normal(size=DIMENSION)), rng.normal(size=(CLIENTS, 8, DIMENSION))
    problem = fb.Bilevel(
        outer=lambda x, y, batch: jnp.mean((batch @ (scale * y) - jnp.sum(x)) ** 2),
        inner=lambda x, y, batch: jnp.mean((batch @ y - jnp.sum(x)) ** 2) + scale @ scale * (y @ y),
    )
    clients, method = fb.Clients(samples, samples.copy()), fb.SimFBO(local_steps=2, batch_size=8)
    metrics = {"size": lambda x, y: scale @ y}
    fb.solve(method, problem, clients, jnp.ones(2), jnp.ones(DIMENSION), rounds=3, metrics=metrics)


def main(solves: int = 500, every: int = 50) -> None:
    head("solves", "MB")
    for number in range(1, solves + 1):
        solve(number)
        if number % every == 0:
            gc.collect()
            row(number, f"{megabytes():.1f}")
