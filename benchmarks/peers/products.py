"""The milliseconds of a round's matrix products alone, by NumPy, with one thread and a part of the clients per core."""

import os

os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")

import statistics
import time
from itertools import pairwise
from multiprocessing import Barrier, Process, Queue

import numpy as np
import work

ROUNDS = 10


def of_clients(count: int, barrier: object, found: object) -> None:
    """Compute the products of some clients: forward, for the gradient of the weights, and for that of the inputs.

    The first layer needs no gradient of the inputs.
    """
    rng = np.random.default_rng(0)
    layers = [
        (rng.normal(size=(work.BATCH, a)), rng.normal(size=(a, b)), rng.normal(size=(work.BATCH, b)))
        for a, b in pairwise(work.WIDTHS)
    ]
    layers = [tuple(np.asarray(one, np.float32) for one in layer) for layer in layers]
    for _ in range(ROUNDS):
        barrier.wait()
        began = time.perf_counter()
        for _ in range(count * work.STEPS):
            for number, (rows, weight, slope) in enumerate(layers):
                rows @ weight
                rows.T @ slope
                if number:
                    slope @ weight.T
        found.put(time.perf_counter() - began)


if __name__ == "__main__":
    cores = os.cpu_count() or 1
    barrier, found = Barrier(cores), Queue()
    shares = [len(range(core, work.COHORT, cores)) for core in range(cores)]
    processes = [Process(target=of_clients, args=(share, barrier, found)) for share in shares]
    for process in processes:
        process.start()
    seconds = [found.get() for _ in range(cores * ROUNDS)]
    for process in processes:
        process.join()
    print(1e3 * statistics.median(seconds))
