"""Does a process that solves one problem after the other keep its size? Prints its memory every so many solves.

    python benchmarks/memory.py [--solves 500] [--every 50] [--federated]

Each solve is a problem of its own: other losses (which close over arrays), samples, start, metrics. `--federated` plays
over Flower, with the clients in this process. The first solves load code and fill caches of a size of their own.
"""

import argparse
import gc
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb

CLIENTS, DIMENSION = 4, 3


def megabytes() -> float:
    """Of this process that are in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def engine(problem: fb.Bilevel, clients: fb.Clients, federated: bool, start: tuple) -> tuple:
    """An engine, and the clients as it wants them."""
    if not federated:
        return None, clients
    from fedbilevel.flower import Flower, Site, client_app
    from fedbilevel.flower.launch.in_process import InProcess

    def site(run: object, node: dict) -> Site:
        client = node["partition-id"]
        own = {"outer": clients.outer.row(client), "inner": clients.inner.row(client)}
        return Site(id=client, algorithm=ALGORITHM, problem=problem, x0=start[0], y0=start[1], **own)

    return Flower(grid=InProcess(client_app(site), CLIENTS)), fb.RemoteClients.of(clients)


ALGORITHM = fb.SimFBO(local_steps=2, batch_size=8)


def solve(number: int, federated: bool) -> None:
    rng = np.random.default_rng(number)
    scale, samples = jnp.asarray(rng.normal(size=DIMENSION)), rng.normal(size=(CLIENTS, 8, DIMENSION))
    problem = fb.Bilevel(
        outer=lambda x, y, batch: jnp.mean((batch @ (scale * y) - jnp.sum(x)) ** 2),
        inner=lambda x, y, batch: jnp.mean((batch @ y - jnp.sum(x)) ** 2) + scale @ scale * (y @ y),
    )
    clients, start = fb.Clients(samples, samples.copy()), (jnp.zeros(2), jnp.zeros(DIMENSION))
    chosen, known = engine(problem, clients, federated, start)
    metrics = {"size": lambda x, y: scale @ y}
    fb.solve(ALGORITHM, problem, known, *start, rounds=3, engine=chosen, metrics=metrics)


def sizes(solves: int, every: int, federated: bool) -> Iterator[tuple[int, float]]:
    for number in range(1, solves + 1):
        solve(number, federated)
        if number % every == 0:
            gc.collect()
            yield number, megabytes()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--solves", type=int, default=500)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--federated", action="store_true")
    options = parser.parse_args()
    for number, size in sizes(options.solves, options.every, options.federated):
        print(f"{number:5d} solves {size:7.1f} MB", flush=True)


if __name__ == "__main__":
    main()
