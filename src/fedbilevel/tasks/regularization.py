"""Regularization coefficients: a ridge of its own for each feature, found on validation samples.

"Asynchronous Distributed Bilevel Optimization" (Jiao et al., ICLR 2023), after Chen et al., "Decentralized Stochastic
Bilevel Optimization with Improved Per-Iteration Complexity" (2022): logistic regression on Covertype and ijcnn1. With
z(y) the logits Wᵀa of a row a, whose last entry is 1, and j counting its features,

    g_i = mean CE(z(y), c) + Σ_j exp(x_j) ‖W_j‖²        f_i = mean CE(z(y), c)        x_j = log(ridge) at the start

so that coefficients are positive whatever x is, and g_i strongly convex. f does not depend on x directly:
∂g_i/∂x_j = exp(x_j) ‖W_j‖². Two classes have a single logit, whose sigmoid is the probability of class 1; more classes
have a logit each.
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
    """Split a table, or a set of images as a table of pixels, over clients, their shares into training and validation.

    Args:
        data: "digits" (embedded), "covtype", "a9a", "ijcnn1", or an image set. Features are standardised.
        validation: the share of each client's samples that goes to the outer loss.
        ridge: every coefficient at the start.
        clients, partition_by, partition_options, holdout, seed: see hyper_representation.

    Measured: accuracy, and the mean loss, on test rows.
    """
    require(0 < validation < 1, "validation", validation, "strictly between 0 and 1")
    require(0 < ridge < np.inf, "ridge", ridge, "positive and finite")
    found, part = load_rows(data, holdout, seed).standardised(), "validation" if holdout else "test"
    rows = {"row": with_one(found.train_images), "label": found.train_labels}
    parts = partition(partition_by, found.train_labels, clients, seed=seed, **dict(partition_options or {}))
    train, valid = (Ragged(*pack_arrays(rows, half)) for half in split(parts, 1 - validation, seed=seed))

    def outer(x: Array, y: Array, batch: dict[str, Array]) -> Array:
        return cross_entropy(logits(y, batch["row"]), batch["label"])

    def inner(x: Array, y: Array, batch: dict[str, Array]) -> Array:
        return outer(x, y, batch) + jnp.vdot(jnp.exp(x), jnp.sum(y**2, axis=1))

    tested, truth = jnp.asarray(with_one(found.test_images)), jnp.asarray(found.test_labels)
    features = rows["row"].shape[1]
    return Task(
        name="regularization",
        problem=Bilevel(outer=outer, inner=inner),
        clients=Clients(outer=valid, inner=train),
        x0=jnp.full(features, jnp.log(ridge)),
        y0=jnp.zeros((features, 1 if found.classes == 2 else found.classes)),
        metrics={
            f"{part}_accuracy": Metric(lambda x, y: jnp.mean(jnp.argmax(logits(y, tested), axis=1) == truth), True),
            f"{part}_loss": lambda x, y: cross_entropy(logits(y, tested), truth),
        },
    )


def with_one(images: np.ndarray) -> np.ndarray:
    """Flatten each image to a row whose last entry is 1: (n, features)."""
    flat = images.reshape(len(images), -1)
    return np.concatenate([flat, np.ones((len(flat), 1), flat.dtype)], axis=1)


def logits(y: Array, rows: Array) -> Array:
    """Compute the logits, (n, classes); of two classes the first has logit 0."""
    z = rows @ y
    return z if z.shape[1] > 1 else jnp.concatenate([jnp.zeros_like(z), z], axis=1)
