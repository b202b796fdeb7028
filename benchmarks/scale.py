"""The time of a round and the memory if the population grows. A round asks 100 clients.

shared      clients share all of y: a network with a hidden layer of 128, five local steps, 10 training and 10
            validation samples of each client; a thousand clients, and a million
on-disk     each client has leaves of y of its own, a linear classifier, which take 1.4 kB with the state of the
            adjoint; two training and two validation samples; these states are in temporary files (`stream=True`)
in-memory   the same, with all samples and states on the device

Samples are memory-mapped (2.7 GB in a temporary folder). Each measurement is a process of its own, and the populations
of a kind are measured in turn. The ratio is the least time over that of the smallest population. Peak memory is the
largest resident set, which also counts pages of files. Aims for "shared": a ratio of at most 1.5, and at most 4 GiB.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, in_process, round_ms, row, spread, turns
from benchmarks.machine import peak_mb
from fedbilevel.data import open_clients, write_clients
from fedbilevel.tasks import networks

CLASSES, ROUNDS, COHORT, BLOCK = 10, 300, 100, 10_000
OWN = (10_000, 100_000, 1_000_000)
SIZES = {"shared": (1_000, 1_000_000), "on-disk": OWN, "in-memory": OWN}
QUICK = {"largest": 10_000, "passes": 1}


def shape(kind: str) -> tuple[int, int]:
    """Return the number of features, and the number of each client's samples for each loss."""
    return (32, 10) if kind == "shared" else (16, 2)


def population(kind: str, clients: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the samples of each client, labelled by a random linear map, or by one for each client."""
    rng, (features, samples) = np.random.default_rng(0), shape(kind)
    truth = rng.normal(size=(features, CLASSES))
    for first in range(0, clients, BLOCK):
        count = min(BLOCK, clients - first)
        images = rng.normal(size=(count, 2 * samples, features)).astype(np.float32)
        maps = truth if kind == "shared" else rng.normal(size=(count, features, CLASSES))
        labels = np.argmax(images @ maps, axis=-1).astype(np.int32)
        for image, label in zip(images, labels, strict=True):
            yield {"image": image, "label": label}


def posed(kind: str) -> tuple[Any, ...]:
    """Return the method, the problem and the start."""
    features, _ = shape(kind)
    if kind == "shared":
        model, penalty = networks.mlp((features,), (128,), CLASSES), lambda x: 1e-3
        method, start = fb.SimFBO(local_steps=5, batch_size=10), model.init(jax.random.key(0))
    else:
        model, penalty = networks.linear((features,), (), CLASSES), lambda x: 10**x
        steps = fb.XYV(x=0.01, y=0.1, v=0.1)
        method = fb.SimFBO(local_steps=1, batch_size=None, client_lr=0.1, server_lr=steps)
        start = -1.0, model.init(jax.random.key(0))[1]

    def outer(x: Any, y: Any, batch: Any) -> Any:
        return networks.cross_entropy(model.logits(x, y, batch["image"]), batch["label"])

    def inner(x: Any, y: Any, batch: Any) -> Any:
        return outer(x, y, batch) + penalty(x) * sum((leaf**2).sum() for leaf in jax.tree.leaves(y))

    return method, fb.Bilevel(outer, inner, own=None if kind == "shared" else lambda path: True), *start


def measure(kind: str, path: str) -> dict[str, float]:
    """Return the milliseconds per round after the first rounds, and the peak memory of this process."""
    packed, (_, samples) = open_clients(Path(path)), shape(kind)
    first, size = np.asarray(packed.start), np.full(len(packed.start), samples)
    inner, outer = (fb.Ragged(packed.arrays, start, size) for start in (first, first + samples))
    method, problem, *start = posed(kind)
    stretch, engine = ROUNDS // 3, fb.Local(stream={"on-disk": True, "in-memory": False}.get(kind))
    given = {"rounds": ROUNDS, "cohort": COHORT, "eval_every": stretch, "engine": engine, "progress": False}
    result = fb.solve(method, problem, fb.Clients(inner=inner, outer=outer), *start, **given)
    assert kind == "shared" or any(np.any(result.own(i)["weight"]) for i in range(len(size)))
    return {"ms": round_ms(result.history["seconds"], stretch), "mb": peak_mb()}


def main(kinds: tuple[str, ...] = tuple(SIZES), largest: int = 1_000_000, passes: int = 3) -> None:
    head("y", "clients", "ms a round", "ratio", "peak memory, MiB")
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            sizes = [size for size in SIZES[kind] if size <= largest]
            for size in sizes:
                write_clients(Path(folder, str(size)), np.full(size, 2 * shape(kind)[1]), population(kind, size))
            contenders = {f"{size:,}": partial(in_process, measure, kind, f"{folder}/{size}") for size in sizes}
            measured = turns(contenders, passes)
        best = [min(one["ms"] for one in runs) for runs in measured.values()]
        for (name, runs), least in zip(measured.items(), best, strict=True):
            memory = max(one["mb"] for one in runs)
            row(kind, name, spread((one["ms"] for one in runs), ".1f"), f"{least / best[0]:.2f}", f"{memory:,.0f}")
