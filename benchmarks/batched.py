"""Points of a sweep one after the other, or side by side in one program: hand-written SimFBO with 27 steps and seeds.

    .venv/bin/python benchmarks/batched.py

Each row is one problem, of the sizes of `benchmarks/floor.py`'s or of the embedded digits. In sequence: one compiled
program, called once for each point. In one program: `jax.vmap` over the points, or `jax.lax.map`, which plays them in
turn inside of it. Seconds of the second call, compilation left out; the least of three passes, the three ways in turn.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp

from machine import describe
from peers import problems, simfbo

POINTS = 27
STEPS = (0.03, 0.1, 0.1), (0.05, 0.1, 0.1)
DIGITS = partial(problems.images, clients=20, samples=36, pixels=64, hidden=32)
ROWS = {
    "quadratic, 6 clients": (partial(problems.quadratic, 6), 300, {"local_steps": 5, "batch_size": 32}),
    "quadratic, 10 of 100": (partial(problems.quadratic, 100), 300, {"local_steps": 5, "batch_size": 32, "cohort": 10}),
    "digits, 10 of 20": (DIGITS, 300, {"local_steps": 5, "batch_size": 32, "cohort": 10}),
}  # fmt: skip


def seconds(problem, rounds, options):
    """Of the three ways, the least of three passes."""
    run = simfbo.program(problem, **({"cohort": None, "one_by_one": False} | options))
    data = jax.tree.map(jnp.asarray, (problem.data, problem.weights))
    start = problem.x, problem.y, jax.tree.map(jnp.zeros_like, problem.y)

    def one(scale, key):
        client, server = (tuple(scale * step for step in steps) for steps in STEPS)
        return run(start, *data, (client, server, 1e30), key, rounds)[:2]

    points = jnp.linspace(0.5, 1.0, POINTS), jax.random.split(jax.random.key(0), POINTS)
    alone, together = jax.jit(one), jax.jit(jax.vmap(one))
    in_turn = jax.jit(lambda *points: jax.lax.map(lambda point: one(*point), points))
    ways = {
        "in sequence": lambda: [jax.block_until_ready(alone(*point)) for point in zip(*points, strict=True)],
        "vmap": lambda: jax.block_until_ready(together(*points)),
        "lax.map": lambda: jax.block_until_ready(in_turn(*points)),
    }
    taken = {name: [] for name in ways}
    for _ in range(4):  # the first compiles
        for name, play in ways.items():
            began = time.perf_counter()
            play()
            taken[name].append(time.perf_counter() - began)
    return {name: min(passes[1:]) for name, passes in taken.items()}


def main():
    print(describe())
    for name, (make, rounds, options) in ROWS.items():
        taken = seconds(make(), rounds, options)
        told = [f"{way} {value:.2f} ({value / taken['in sequence']:.2f})" for way, value in taken.items()]
        print(f"{name}: {', '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
