"""The cost of a round if the population grows: a cohort of 100 from 1,000 and from 1,000,000 clients.

Both populations are memory-mapped (2.7 GB in a temporary folder). Each measurement is a process of its own, and the two
populations are measured in turn. Aims: a ratio of at most 1.5, and at most 4 GiB.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, in_process, row, spread, turns
from benchmarks.machine import peak_mb
from fedbilevel.data import open_clients, write_clients
from fedbilevel.tasks import networks

FEATURES, CLASSES, SAMPLES = 32, 10, 10
ROUNDS, COHORT, BLOCK = 300, 100, 10_000
QUICK = {"clients": 20_000, "passes": 1}


def population(clients: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield clients with ten training and ten validation samples each, labelled by a random linear map."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(FEATURES, CLASSES))
    for first in range(0, clients, BLOCK):
        images = rng.normal(size=(min(BLOCK, clients - first), 2 * SAMPLES, FEATURES)).astype(np.float32)
        labels = np.argmax(images @ truth, axis=-1).astype(np.int32)
        for image, label in zip(images, labels, strict=True):
            yield {"image": image, "label": label}


def measure(path: str) -> dict[str, float]:
    """Return the milliseconds per round after the first rounds, and the peak memory of this process."""
    packed = open_clients(Path(path))
    first, rest = np.asarray(packed.start), np.full(len(packed.start), SAMPLES)
    clients = fb.Clients(
        inner=fb.Ragged(packed.arrays, first, rest), outer=fb.Ragged(packed.arrays, first + SAMPLES, rest)
    )
    model = networks.mlp((FEATURES,), (128,), CLASSES)

    def outer(x, y, batch):
        return networks.cross_entropy(model.logits(x, y, batch["image"]), batch["label"])

    def inner(x, y, batch):
        return outer(x, y, batch) + 1e-3 * sum((leaf**2).sum() for leaf in y.values())

    x0, y0 = model.init(jax.random.key(0))
    method, stretch = fb.SimFBO(local_steps=5, batch_size=10), ROUNDS // 3
    result = fb.solve(
        method, fb.Bilevel(outer, inner), clients, x0, y0, rounds=ROUNDS, cohort=COHORT, eval_every=stretch
    )
    seconds = result.history["seconds"]
    return {"ms": 1e3 * (seconds[-1] - seconds[1]) / (ROUNDS - stretch), "mb": peak_mb()}


def main(clients: int = 1_000_000, passes: int = 3) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sizes = (1_000, clients)
        for size in sizes:
            write_clients(Path(folder, str(size)), np.full(size, 2 * SAMPLES), population(size))
        contenders = {f"{size:,}": partial(in_process, measure, f"{folder}/{size}") for size in sizes}
        measured = turns(contenders, passes)
    best = {name: min(one["ms"] for one in runs) for name, runs in measured.items()}
    head("clients", "ms a round: median (minimum to maximum)", "minimum relative to 1,000 clients", "peak memory, GiB")
    for name, runs in measured.items():
        memory = max(one["mb"] for one in runs) / 1024
        row(name, spread((one["ms"] for one in runs), ".1f"), f"{best[name] / best['1,000']:.2f}", f"{memory:.2f}")
