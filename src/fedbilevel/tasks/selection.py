"""Selection: among all classifiers that fit the training samples best, find a sparse one with small weights.

The task is from "Federated Incremental Subgradient Method for Convex Bilevel Optimization Problems" (Boontawee et al.
2025), section III.A, which uses the digits 0 and 1 of MNIST. Rows a have the classes b = ±1. Minimise H among the
minimisers of F in X:

    F(x) = mean log(1 + exp(−b⟨a, x⟩))        H(x) = ‖x‖₁ + ½‖x‖²        X = [−bound, bound]ⁿ

F has many minimisers if some features are always 0 or are equal to others. The preference H is 1-strongly convex.
Features are not standardised, so that the derivative of F is 0 for a pixel that is always blank. x starts at 0, or
uniformly at random in [−start, start]ⁿ.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core import projections
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require, require_count
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import SimpleBilevel
from fedbilevel.core.ragged import Ragged
from fedbilevel.data import pack_arrays, partition
from fedbilevel.tasks.images import load_rows
from fedbilevel.tasks.task import Task

SMALL = 1e-3  # an entry of x is treated as zero if its absolute value is at most this share of the largest one


def selection(
    *,
    data: str = "digits",
    classes: Sequence[int] = (0, 1),
    samples: int | None = None,
    clients: int = 8,
    partition_by: str = "iid",
    partition_options: Mapping[str, Any] | None = None,
    holdout: float = 0.0,
    bound: float = 100.0,
    start: float = 0.0,
    seed: int = 0,
) -> Task:
    """Take two classes of a data set, and split their rows over clients. All rows have the same weight.

    The metrics are the accuracies of x and of the average iterate, F on all training rows ("train_loss"), H
    ("preference"), and the share of entries of x that are at most 0.001 of the largest ("sparsity").

    Args:
        data: "digits" (part of scikit-learn), another set of images, whose pixels are divided by 255, or a table such
            as "a9a".
        classes: the numbers of the two classes; the first has b = −1.
        samples: the number of training rows, half of each class; None: all rows.
        bound: the largest absolute value of an entry of x.
        start: half the width of the box in which x starts.
        clients, partition_by, partition_options, holdout, seed: as in hyper_representation.
    """
    require(0 < bound < np.inf, "bound", bound, "positive and finite")
    require(0 <= start <= bound, "start", start, f"at least 0 and at most bound = {bound:g}")
    require_count("samples", samples, optional=True)
    dataset = load_rows(data, holdout, seed)
    valid = all(isinstance(c, int) and 0 <= c < dataset.classes for c in classes)
    two = valid and len(classes) == 2 and classes[0] != classes[1]
    require(two, "classes", list(classes), f"two different classes from 0 to {dataset.classes - 1}")
    rows, signs = _rows(dataset.train_images, dataset.train_labels, classes)
    tested, truth = map(jnp.asarray, _rows(dataset.test_images, dataset.test_labels, classes))
    chosen = _balanced(signs, samples, seed)
    rows, signs = rows[chosen], signs[chosen]
    training = {"row": jnp.asarray(rows), "sign": jnp.asarray(signs)}
    parts = partition(partition_by, (signs > 0).astype(np.int32), clients, seed=seed, **dict(partition_options or {}))

    def loss(x: Array, batch: dict[str, Array]) -> Array:
        return jnp.mean(jax.nn.softplus(-batch["sign"] * (batch["row"] @ x)))

    def preference(x: Array) -> Array:
        return jnp.sum(jnp.abs(x)) + jnp.vdot(x, x) / 2

    def accuracy(x: Array) -> Array:
        return jnp.mean(jnp.where(tested @ x > 0, 1, -1) == truth)

    part = "validation" if holdout else "test"
    return Task(
        name="selection",
        problem=SimpleBilevel(preference, loss, projections.box(-bound, bound), strong_convexity=1.0),
        clients=Clients(Ragged(*pack_arrays({"row": rows, "sign": signs}, parts)), weights="size"),
        x0=jnp.asarray(start * np.random.default_rng([seed, 2]).uniform(-1, 1, rows.shape[1]), float),
        y0=None,
        metrics={
            f"{part}_accuracy": Metric(lambda x, y: accuracy(x), True),
            f"average_{part}_accuracy": Metric(lambda x, y: accuracy(y), True),
            "train_loss": lambda x, y: loss(x, training),
            "preference": Metric(lambda x, y: preference(x), None),
            "sparsity": Metric(lambda x, y: jnp.mean(jnp.abs(x) <= SMALL * jnp.max(jnp.abs(x))), None),
        },
    )


def _rows(images: np.ndarray, labels: np.ndarray, classes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the flattened rows of two classes, with pixels scaled to [0, 1], and their signs b = ±1, both float32."""
    ours = np.flatnonzero(np.isin(labels, classes))
    flat = images[ours].reshape(len(ours), -1) / np.float32(255 if images.dtype == np.uint8 else 1)
    return flat.astype(np.float32), np.where(labels[ours] == classes[1], 1, -1).astype(np.float32)


def _balanced(signs: np.ndarray, samples: int | None, seed: int) -> np.ndarray:
    """Return row numbers in random order: all, or `samples` of them, half of each class."""
    order = np.random.default_rng([seed, 3]).permutation(len(signs))
    if samples is None:
        return order
    of_each = [order[signs[order] == sign] for sign in (-1, 1)]
    most = 2 * min(map(len, of_each))
    require(samples % 2 == 0 and samples <= most, "samples", samples, f"an even number, at most {most}")
    both = np.concatenate([rows[: samples // 2] for rows in of_each])
    return np.random.default_rng([seed, 4]).permutation(both)
