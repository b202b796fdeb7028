"""Regularization coefficients: x determines a ridge penalty for each feature, and is fitted to validation samples.

The task is from "Asynchronous Distributed Bilevel Optimization" (Jiao et al., ICLR 2023), after Chen et al.,
"Decentralized Stochastic Bilevel Optimization with Improved Per-Iteration Complexity" (2022): logistic regression on
Covertype and ijcnn1. Let a be a sample of class c, whose last entry is 1. Let y be a matrix W with a row W_j for each
feature, and let z(y) = Wᵀa be the logits:

    g_i = mean CE(z(y), c) + Σ_j exp(x_j) ‖W_j‖²        f_i = mean CE(z(y), c)

The coefficients exp(x_j) are positive for any x, and g_i is strongly convex in y. The outer loss f does not depend on x
directly, and ∂g_i/∂x_j = exp(x_j) ‖W_j‖². With two classes there is a single logit, whose sigmoid is the probability of
class 1. With more classes, each class has a logit. x_j starts at log(ridge).
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Bilevel
from fedbilevel.core.ragged import Ragged
from fedbilevel.data import pack_arrays, partition, split
from fedbilevel.tasks.images import load_rows
from fedbilevel.tasks.networks import cross_entropy
from fedbilevel.tasks.task import Task


def regularization(
    *,
    data: str = "digits",
    clients: int = 18,
    partition_by: str = "iid",
    partition_options: Mapping[str, Any] | None = None,
    validation: float = 0.5,
    holdout: float = 0.0,
    ridge: float = 0.01,
    seed: int = 0,
) -> Task:
    """Split the rows of a table, or images as rows of pixels, over clients.

    Each client's rows are divided into training and validation rows.

    The metrics are the accuracy and the mean loss on test rows.

    Args:
        data: "digits" (part of scikit-learn), "covtype", "a9a", "ijcnn1", or another set of images. Features are
            standardised.
        validation: the share of each client's samples that the outer loss gets; the inner loss gets the others.
        ridge: the value of every coefficient exp(x_j) at the start.
        clients, partition_by, partition_options, holdout, seed: as in hyper_representation.
    """
    require(0 < validation < 1, "validation", validation, "strictly between 0 and 1")
    require(0 < ridge < np.inf, "ridge", ridge, "positive and finite")
    dataset, part = load_rows(data, holdout, seed).standardised(), "validation" if holdout else "test"
    rows = {"row": with_one(dataset.train_images), "label": dataset.train_labels}
    parts = partition(partition_by, dataset.train_labels, clients, seed=seed, **dict(partition_options or {}))
    train, valid = (Ragged(*pack_arrays(rows, half)) for half in split(parts, 1 - validation, seed=seed))

    def outer(x: Array, y: Array, batch: dict[str, Array]) -> Array:
        return cross_entropy(logits(y, batch["row"]), batch["label"])

    def inner(x: Array, y: Array, batch: dict[str, Array]) -> Array:
        return outer(x, y, batch) + jnp.vdot(jnp.exp(x), jnp.sum(y**2, axis=1))

    tested, truth = jnp.asarray(with_one(dataset.test_images)), jnp.asarray(dataset.test_labels)
    features = rows["row"].shape[1]
    return Task(
        name="regularization",
        problem=Bilevel(outer=outer, inner=inner),
        clients=Clients(outer=valid, inner=train),
        x0=jnp.full(features, jnp.log(ridge)),
        y0=jnp.zeros((features, 1 if dataset.classes == 2 else dataset.classes)),
        metrics={
            f"{part}_accuracy": Metric(lambda x, y: jnp.mean(jnp.argmax(logits(y, tested), axis=1) == truth), True),
            f"{part}_loss": lambda x, y: cross_entropy(logits(y, tested), truth),
        },
    )


def with_one(images: np.ndarray) -> np.ndarray:
    """Flatten each image to a row and append a 1. The result has the shape (n, features)."""
    flat = images.reshape(len(images), -1)
    return np.concatenate([flat, np.ones((len(flat), 1), flat.dtype)], axis=1)


def logits(y: Array, rows: Array) -> Array:
    """Return the logits, as an array of shape (n, classes). With two classes, the first class has the logit 0."""
    z = rows @ y
    return z if z.shape[1] > 1 else jnp.concatenate([jnp.zeros_like(z), z], axis=1)
