"""Does a round get dearer when the population grows? A cohort of 100 out of 1,000 and out of 1,000,000 clients.

    python benchmarks/scale.py [--clients 1000000] [--folder DIR]

Both populations are memory-mapped; the two are timed in turns, in separate processes, and the peak resident memory is
that of the process with the large one.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

FEATURES, CLASSES, SAMPLES = 32, 10, 10
ROUNDS, COHORT = 300, 100


def population(clients: int) -> Iterator[dict[str, np.ndarray]]:
    """Clients with ten training and ten validation samples each, labelled by a random linear map."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(FEATURES, CLASSES))
    block = 10_000
    for first in range(0, clients, block):
        count = min(block, clients - first)
        images = rng.normal(size=(count, 2 * SAMPLES, FEATURES)).astype(np.float32)
        labels = np.argmax(images @ truth, axis=-1).astype(np.int32)
        for image, label in zip(images, labels, strict=True):
            yield {"image": image, "label": label}


def prepare(folder: Path, clients: int) -> Path:
    from fedbilevel.data import write_clients

    path = folder / str(clients)
    if not path.exists():
        write_clients(path, np.full(clients, 2 * SAMPLES), population(clients))
    return path


def measure(path: Path) -> dict[str, float]:
    """Seconds per round after the first ones, and this process's peak memory in GiB."""
    import fedbilevel as fb
    from fedbilevel.data import open_clients
    from fedbilevel.tasks import networks

    packed = open_clients(path)
    first, rest = np.asarray(packed.start), np.full(len(packed.start), SAMPLES)
    clients = fb.Clients(
        inner=fb.Ragged(packed.arrays, first, rest), outer=fb.Ragged(packed.arrays, first + SAMPLES, rest)
    )
    model = networks.mlp((FEATURES,), (128,), CLASSES)

    def outer(x, y, batch):
        return networks.cross_entropy(model.logits(x, y, batch["image"]), batch["label"])

    def inner(x, y, batch):
        return outer(x, y, batch) + 1e-3 * sum((leaf**2).sum() for leaf in y.values())

    import jax

    x0, y0 = model.init(jax.random.key(0))
    algorithm = fb.SimFBO(local_steps=5, batch_size=10)
    result = fb.solve(
        algorithm, fb.Bilevel(outer, inner), clients, x0, y0, rounds=ROUNDS, cohort=COHORT, eval_every=ROUNDS // 3
    )
    seconds = result.history["seconds"]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": (seconds[-1] - seconds[1]) / (ROUNDS - ROUNDS // 3), "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where to keep the populations (2.7 GB); default: temporary")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        paths = {clients: prepare(folder, clients) for clients in (1_000, arguments.clients)}
        found: dict[int, list[dict[str, float]]] = {clients: [] for clients in paths}
        for _ in range(3):
            for clients, path in paths.items():
                command = [sys.executable, __file__, "--measure", str(path)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found[clients].append(json.loads(done.stdout.splitlines()[-1]))
    for clients, runs in found.items():
        best = min(run["seconds"] for run in runs)
        memory = max(run["memory"] for run in runs)
        times = ", ".join(f"{1e3 * run['seconds']:.1f}" for run in runs)
        print(f"{clients:>9,} clients: {1e3 * best:6.1f} ms per round (runs: {times}), peak memory {memory:.2f} GiB")
    small, large = (min(run["seconds"] for run in runs) for runs in found.values())
    print(f"ratio {large / small:.2f} (to reach: at most 1.5), memory to stay under 4 GiB")


if __name__ == "__main__":
    main()
