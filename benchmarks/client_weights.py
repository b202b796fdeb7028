"""Clients' weights chosen by a run, compared with equal weights, weights by size, and bad clients left out by hand.

Of the 18 clients of the task `client_weights`, nine are bad in one of three ways, which the page
docs/how-to/unequal-clients.md describes. Half of each client's samples are validation samples, which are always right.
The four compared runs are runs of SimFBO with τ = 1, all samples and steps that adapt. "Chosen" trains x, from equal
weights. In the other runs x is fixed: at 0 ("equal"), at the logarithms of the numbers of training samples ("by size"),
or at values at which the nine bad clients have no weight ("left out").
"""

import warnings
from typing import Any

import numpy as np

import fedbilevel as fb
from benchmarks.harness import compare, head
from fedbilevel.core.ragged import Ragged
from fedbilevel.tasks import Task
from fedbilevel.tasks.client_weights import client_weights, weights

CLIENTS, BAD, FEW, PIXELS = 18, 9, 5, 2
NOTHING = -50.0  # exp(NOTHING) is the weight of a client that is left out
CHOSEN = fb.SimFBO(batch_size=None, local_steps=1)
FIXED = fb.SimFBO(batch_size=None, local_steps=1, server_lr=fb.XYV(x=1e-30, y=None, v=None))  # x does not move
QUICK = {"exchanges": 3, "seeds": 2, "problems": ["small"]}


def small(inner: Ragged, bad: np.ndarray) -> Ragged:
    """Return samples in which bad clients have only a few."""
    sizes = np.where(bad, FEW, inner.size)
    return inner.taken([start + np.arange(size) for start, size in zip(inner.start, sizes, strict=True)])


def shifted(inner: Ragged, bad: np.ndarray) -> Ragged:
    """Return samples in which the images of bad clients are moved to the right."""
    image = np.asarray(inner.values["image"])
    left = image.reshape(len(image), 8, 8)[:, :, :-PIXELS]
    moved = np.pad(left, ((0, 0), (0, 0), (PIXELS, 0))).reshape(image.shape)
    mine = bad[inner.values["row"]].reshape(-1, *[1] * (image.ndim - 1))
    return Ragged({**inner.values, "image": np.where(mine, moved, image)}, inner.start, inner.size)


CHANGES: dict[str, Any] = {"wrong labels": None, "small": small, "shifted": shifted}


def posed(problem: str, seed: int) -> tuple[Task, fb.Clients, np.ndarray]:
    """Return the task, its clients, and which of them are bad, (M,)."""
    change = CHANGES[problem]
    task = client_weights(clients=CLIENTS, spoilt=0.5 if change is None else 0.0, seed=seed)
    bad = np.isin(np.arange(CLIENTS), np.random.default_rng([seed, 4]).permutation(CLIENTS)[:BAD])  # as in the task
    inner = task.clients.inner if change is None else change(task.clients.inner, bad)
    return task, fb.Clients(task.clients.outer, inner), bad


def measured(problem: str, seed: int, exchanges: int) -> dict[str, tuple[float, float]]:
    """Return the test accuracy of each compared run, and the share of the weight that bad clients have."""
    task, clients, bad = posed(problem, seed)
    starts = {
        "chosen": np.zeros(CLIENTS),
        "equal": np.zeros(CLIENTS),
        "by size": np.log(clients.inner.size),
        "left out": np.where(bad, NOTHING, 0.0),
    }
    found = {}
    for arm, start in starts.items():
        method, x0 = CHOSEN if arm == "chosen" else FIXED, np.asarray(start, np.float32)
        result = fb.solve(method, task.problem, clients, x0, task.y0, rounds=exchanges, metrics=task.metrics)
        accuracy = result.history.rows[-1]["test_accuracy"]
        found[arm] = float(accuracy), float(np.sum(weights(result.x) * bad) / CLIENTS)
    return found


def main(problems: tuple[str, ...] = tuple(CHANGES), seeds: int = 5, exchanges: int = 300) -> None:
    warnings.simplefilter("ignore", fb.errors.NumericalWarning)  # runs with fixed weights may end above their start
    columns = "test accuracy, %", "minus chosen, points", "weight of the bad clients, %", "minus chosen, points"
    head("problem", "weights", *columns)
    for problem in problems:
        each = [measured(problem, seed, exchanges) for seed in range(seeds)]
        table = {arm: 100 * np.array([one[arm] for one in each]) for arm in each[0]}
        compare((problem,), table, "chosen", (".1f", ".1f"))
