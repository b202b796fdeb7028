"""The memory and the time of runs with 10⁴, 10⁵ and 10⁶ clients that each have leaves of y of their own.

A client has four samples with 16 features, and a linear classifier of its own with ten classes. Together with the state
of the adjoint, this takes 1.4 kB. A round asks 100 clients. "On disk" means that these states are in temporary files
(`stream=True`), and "in memory" that all samples and states are on the device. Each measurement is a process of its
own. Peak memory is the largest resident set, which also counts pages of files. At each of the four rows of the history
a run copies the own leaves, if it is the best row so far.
"""

import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, in_process, row
from benchmarks.machine import peak_mb
from fedbilevel.tasks import networks

FEATURES, CLASSES, SAMPLES = 16, 10, 2
ROUNDS, COHORT, BLOCK = 300, 100, 10_000
QUICK = {"largest": 10_000}


def write_samples(folder: Path, clients: int) -> None:
    """Write the samples of all clients. The labels of each client follow a random linear map."""
    rng, shape = np.random.default_rng(0), (clients, 2 * SAMPLES)
    images = np.lib.format.open_memmap(folder / "image.npy", "w+", np.float32, (*shape, FEATURES))
    labels = np.lib.format.open_memmap(folder / "label.npy", "w+", np.int32, shape)
    for first in range(0, clients, BLOCK):
        block = slice(first, first + BLOCK)
        images[block] = rng.normal(size=images[block].shape)
        maps = rng.normal(size=(len(images[block]), FEATURES, CLASSES))
        labels[block] = np.argmax(images[block] @ maps, -1)


def population(folder: str) -> fb.Clients:
    """Return clients with two training and two validation samples each, in memory-mapped files."""
    arrays = {name: np.load(Path(folder, f"{name}.npy"), mmap_mode="r") for name in ("image", "label")}
    values = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in arrays.items()}
    first = np.arange(len(arrays["label"])) * 2 * SAMPLES
    size = np.full(len(first), SAMPLES)
    return fb.Clients(inner=fb.Ragged(values, first, size), outer=fb.Ragged(values, first + SAMPLES, size))


def measure(folder: str, on_disk: bool) -> dict[str, float]:
    """Return the milliseconds of a round after the first ones, all seconds, and the peak memory of this process."""

    def outer(x, y, batch):
        return networks.cross_entropy(batch["image"] @ y["weight"] + y["bias"], batch["label"])

    def inner(x, y, batch):
        return outer(x, y, batch) + 10**x * ((y["weight"] ** 2).sum() + (y["bias"] ** 2).sum())

    began, clients = time.perf_counter(), population(folder)
    y0 = {"weight": jnp.zeros((FEATURES, CLASSES)), "bias": jnp.zeros(CLASSES)}
    method = fb.SimFBO(local_steps=1, batch_size=None, client_lr=0.1, server_lr=fb.XYV(x=0.01, y=0.1, v=0.1))
    result = fb.solve(
        method, fb.Bilevel(outer, inner, own=lambda path: True), clients, -1.0, y0, rounds=ROUNDS, cohort=COHORT,
        eval_every=ROUNDS // 3, engine=fb.Local(stream=on_disk), progress=False,
    )  # fmt: skip
    assert any(np.any(result.own(i)["weight"]) for i in range(len(clients)))
    seconds = result.history["seconds"]
    rounds = 1e3 * (seconds[-1] - seconds[1]) / (ROUNDS - ROUNDS // 3)
    return {"ms": rounds, "seconds": time.perf_counter() - began, "mb": peak_mb()}


def main(largest: int = 1_000_000) -> None:
    head("clients", "own states", "ms a round", "seconds in all", "peak memory, MiB")
    for clients in (10_000, 100_000, 1_000_000):
        if clients <= largest:
            with tempfile.TemporaryDirectory() as folder:
                write_samples(Path(folder), clients)
                for on_disk in (True, False):
                    found = in_process(measure, folder, on_disk)
                    where = "on disk" if on_disk else "in memory"
                    numbers = f"{found['ms']:.1f}", f"{found['seconds']:.0f}", f"{found['mb']:,.0f}"
                    row(f"{clients:,}", where, *numbers)
