"""The code that all contenders share: the task, the start and the clock.

It uses only NumPy, since each library has an environment of its own.
"""

import itertools
import json
import os
import statistics
import time
from functools import cache

import numpy as np

CLIENTS, SAMPLES = int(os.environ.get("CLIENTS", 100)), int(os.environ.get("SAMPLES", 600))
COHORT, STEPS, BATCH, LR = 10, 30, 20, 0.05
WIDTHS = (784, 200, 200, 10)
STRETCH = int(os.environ.get("STRETCH", 5))  # the number of rounds of a stretch
ROUNDS = 5 * STRETCH
STARTED = float(os.environ.get("STARTED", time.time()))  # the start of the process, in seconds since 1970


@cache
def data() -> tuple[np.ndarray, np.ndarray]:
    """Return images (CLIENTS, SAMPLES, 784) and labels (CLIENTS, SAMPLES)."""
    rng = np.random.default_rng(0)
    images = rng.random((CLIENTS, SAMPLES, 784), dtype=np.float32)
    return images, np.argmax((images - 0.5) @ rng.normal(size=(784, 10)).astype(np.float32), axis=-1)


def few() -> tuple[np.ndarray, np.ndarray]:
    """Return ten samples of each client."""
    images, labels = data()
    return images[:, :10].reshape(-1, 784), labels[:, :10].reshape(-1)


def start() -> list[np.ndarray]:
    """Return weight (inputs, outputs) and bias of each layer in turn: He's normal weights, and biases 0."""
    rng = np.random.default_rng(1)
    layers = itertools.pairwise(WIDTHS)
    each = [((2 / into) ** 0.5 * rng.normal(size=(into, out)), np.zeros(out)) for into, out in layers]
    return [array.astype(np.float32) for layer in each for array in layer]


class Clock:
    """A clock that is read after the first round and after every stretch."""

    def __init__(self) -> None:
        self.made = time.time()
        self.cold = self.first = 0.0
        self.at: list[float] = []

    def tick(self, rounds: int, now: float | None = None) -> None:
        """Record that so many rounds are done.

        `now` is the time in seconds, if the library has measured it itself.
        """
        if rounds == 1 and now is None:
            self.cold, self.first = time.time() - STARTED, time.time() - self.made
        if rounds % STRETCH == 0:
            self.at.append(time.time() if now is None else now)

    def result(self, loss: float) -> dict[str, float]:
        """Return the results.

        The first stretch is left out, since it may contain work that is done once.
        """
        ms = 1e3 * statistics.median(np.diff(self.at)) / STRETCH
        return {"ms": ms, "cold": self.cold, "first": self.first, "loss": float(loss)}

    def report(self, loss: float) -> None:
        """Print the results as a line of JSON."""
        print(json.dumps(self.result(loss)))
