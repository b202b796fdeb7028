"""What does an asynchronous arrival cost, beside the same client's work in a synchronous round?

    .venv/bin/python benchmarks/async_speed.py [--model softmax|tiny] [--repeats 5]

SimFBO that waits for the first n of M clients, beside SimFBO with cohorts of n out of M: n clients compute the same
steps per exchange in both, so that what is more is the clock, the tables of answers under way, and the differences that
clients of an asynchronous run keep. The two are timed in turn; printed are the least times of an exchange, and the
median of the ratios. Aim: a ratio of at most 1.3, and the same time per arrival with 10,000 clients as with 1,000.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedbilevel as fb
from fedbilevel.engines.engine import first_carry

SIZES = [(18, 9), (100, 20), (1000, 100), (10_000, 100)]
FEATURES = {"softmax": (784, 10), "tiny": (4, 2)}
SAMPLES, STEPS, BATCH = 32, 5, 32


def population(clients: int, features: int, classes: int) -> fb.Clients:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 255, (clients, SAMPLES, features), dtype=np.uint8)
    samples = {"row": rows, "label": rng.integers(0, classes, (clients, SAMPLES))}
    return fb.Clients(samples, samples)


def outer(x, y, batch):
    logits = batch["row"].astype(jnp.float32) / 255 @ y
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def inner(x, y, batch):
    return outer(x, y, batch) + jnp.exp(x) * jnp.vdot(y, y)


class Timed:
    """A compiled run, of which one can play some more rounds."""

    def __init__(self, algorithm, clients: fb.Clients, cohort: int, shape: tuple[int, int]) -> None:
        problem, x, y = fb.Bilevel(outer, inner), jnp.asarray(-5.0), jnp.zeros(shape)
        carry = first_carry(algorithm, problem, clients, x, y)
        clock = fb.Clock(compute=0.1, spread=0.5, stragglers=len(clients) // 4)
        self.run = fb.Local(clock=clock).start(algorithm, problem, clients, cohort, jax.random.key(0), carry)
        self.carry = carry
        self.play(1)  # compiles; an asynchronous run asks everybody here
        self.play(20)

    def play(self, rounds: int) -> float:
        """Seconds per round."""
        began = time.perf_counter()
        self.carry = jax.block_until_ready(self.run.advance(self.carry, rounds).carry)
        return (time.perf_counter() - began) / rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FEATURES, default="softmax")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    shape = FEATURES[options.model]
    print("clients  first   round of n, ms   first n, ms   ratio   per arrival, µs")
    for count, n in SIZES:
        clients = population(count, *shape)
        fields = {"local_steps": STEPS, "batch_size": BATCH, "client_lr": 1e-4, "server_lr": 1e-4}
        waiting = Timed(fb.SimFBO(**fields), clients, n, shape)
        going_on = Timed(fb.Asynchronous(fb.SimFBO(**fields), wait_for=n), clients, count, shape)
        rounds = max(10, min(400, int(1 / waiting.play(10))))
        pairs = [(waiting.play(rounds), going_on.play(rounds)) for _ in range(options.repeats)]
        ratio = statistics.median(b / a for a, b in pairs)
        a, b = (min(times) for times in zip(*pairs, strict=True))
        print(f"{count:7}  {n:5}   {1e3 * a:14.2f}   {1e3 * b:11.2f}   {ratio:5.2f}   {1e6 * b / n:15.0f}", flush=True)


if __name__ == "__main__":
    main()
