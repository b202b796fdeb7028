"""The cost of an asynchronous reply, compared with the same work of a client in a synchronous round.

SimFBO that waits for the first n of M clients is compared with SimFBO with cohorts of n of M clients. In both, n
clients compute the same steps per exchange. The asynchronous run also needs the clock, the tables of replies that are
under way, and the differences that its clients store. Times are the least of all passes, and the ratio is the median of
pairs. Aim: a ratio of at most 1.3.
"""

import time
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedbilevel as fb
from benchmarks.harness import head, row, turns
from fedbilevel.engines.engine import first_carry

SHAPE = (784, 10)
SAMPLES = 32
QUICK = {"clients": 18, "first": 9, "passes": 1}


def population(clients: int) -> fb.Clients:
    """Return clients with random bytes as images, and random labels."""
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 255, (clients, SAMPLES, SHAPE[0]), dtype=np.uint8)
    samples = {"row": rows, "label": rng.integers(0, SHAPE[1], (clients, SAMPLES))}
    return fb.Clients(samples, samples)


def outer(x, y, batch):
    logits = batch["row"].astype(jnp.float32) / 255 @ y
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def inner(x, y, batch):
    return outer(x, y, batch) + jnp.exp(x) * jnp.vdot(y, y)


class Run:
    """A compiled run that can be continued."""

    def __init__(self, algorithm, clients: fb.Clients, cohort: int) -> None:
        problem, x, y = fb.Bilevel(outer, inner), jnp.asarray(-5.0), jnp.zeros(SHAPE)
        self.carry = first_carry(algorithm, problem, clients, x, y)
        clock = fb.Clock(compute=0.1, spread=0.5, stragglers=len(clients) // 4)
        self.run = fb.Local(clock=clock).start(algorithm, problem, clients, cohort, jax.random.key(0), self.carry)
        self.advance(1)  # compiles the program; in this round, an asynchronous run asks all clients
        self.advance(20)

    def advance(self, rounds: int) -> float:
        """Run some more rounds; return the seconds per round."""
        began = time.perf_counter()
        self.carry = jax.block_until_ready(self.run.advance(self.carry, rounds).carry)
        return (time.perf_counter() - began) / rounds


def main(clients: int = 10_000, first: int = 100, passes: int = 5) -> None:
    method = fb.SimFBO(local_steps=5, batch_size=32, client_lr=1e-4, server_lr=1e-4)
    samples = population(clients)
    synchronous = Run(method, samples, first)
    asynchronous = Run(fb.Asynchronous(method, wait_for=first), samples, clients)
    rounds = int(np.clip(1 / synchronous.advance(10), 10, 400))
    runs = {"synchronous": synchronous, "asynchronous": asynchronous}
    times = turns({name: partial(run.advance, rounds) for name, run in runs.items()}, passes).values()
    ratio = median(b / a for a, b in zip(*times, strict=True))
    a, b = map(min, times)
    head("clients", "first n", "round of n, ms", "first n, ms", "ratio", "per reply, µs")
    row(f"{clients:,}", first, f"{1e3 * a:.2f}", f"{1e3 * b:.2f}", f"{ratio:.2f}", f"{1e6 * b / first:.0f}")
