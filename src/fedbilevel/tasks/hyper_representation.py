"""Hyper-representation: x is a network up to its last layer, y the linear head that clients train on it.

The federated benchmark of FedNest (Tarzanagh et al., ICML 2022, section 4.1), SimFBO and others: the head is fitted on
the clients' training halves with a ridge that makes it strongly convex, the representation on their validation halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients, Ragged
from fedbilevel.core.errors import require
from fedbilevel.core.problem import Bilevel
from fedbilevel.core.tree import PyTree
from fedbilevel.data import Dataset, load, pack, partition, split
from fedbilevel.tasks import networks
from fedbilevel.tasks.task import Task


def hyper_representation(
    *,
    data: str = "digits",
    network: str = "mlp",
    hidden: Sequence[int] = (64,),
    clients: int = 20,
    partition_by: str = "iid",
    partition_options: Mapping[str, Any] | None = None,
    validation: float = 0.5,
    holdout: float = 0.0,
    ridge: float = 5e-4,
    local_steps: Any = None,
    seed: int = 0,
) -> Task:
    """Split a labelled image set over clients, and each client's share into training and validation.

    Args:
        data: "digits" (embedded), "mnist", "fashion-mnist" or "cifar-10".
        network: "mlp", whose x is all hidden layers, or "cnn", whose x is two convolutions and a dense layer.
        hidden: widths of the MLP's hidden layers; of the CNN's channels (two) and dense layer (one).
        clients: M.
        partition_by: "iid", "shards", "dirichlet", "quantity" or "one_label".
        partition_options: of that partition, e.g. {"alpha": 0.3}.
        validation: the share of each client's samples that goes to the outer loss.
        holdout: the share of the training images taken away before, and measured in place of the test images: for
            choosing hyperparameters without looking at the test set.
        ridge: the inner loss has ridge·‖y‖² added.
        local_steps: see Clients.
        seed: of the partition, the splits and the starting point.
    """
    require(0 <= holdout < 1, "holdout", holdout, "at least 0 and below 1")
    require(0 < validation < 1, "validation", validation, "strictly between 0 and 1")
    require(ridge >= 0, "ridge", ridge, "at least 0")
    images = load(data)
    tuning, images = _held_out(images, holdout, seed)
    standard = images.standardised()
    parts = partition(partition_by, images.train_labels, clients, seed=seed, **dict(partition_options or {}))
    train, valid = split(parts, 1 - validation, seed=seed)
    make = {"mlp": networks.mlp, "cnn": networks.cnn}
    require(network in make, "network", network, f"one of {sorted(make)}")
    model = make[network](standard.train_images.shape[1:], tuple(hidden), images.classes)
    x0, y0 = model.init(jax.random.key(seed))

    def rows(chosen: list[np.ndarray]) -> Ragged:
        arrays, start, size = pack(model.prepare(standard.train_images), standard.train_labels, chosen)
        return Ragged(arrays, start, size)

    def outer(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
        return networks.cross_entropy(model.logits(x, y, batch["image"]), batch["label"])

    def inner(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
        return outer(x, y, batch) + ridge * sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(y))

    measured = "validation_accuracy" if tuning else "test_accuracy"
    return Task(
        name="hyper_representation",
        problem=Bilevel(outer=outer, inner=inner),
        clients=Clients(outer=rows(valid), inner=rows(train), local_steps=local_steps),
        x0=x0,
        y0=y0,
        metrics={measured: networks.accuracy(model, standard.test_images, standard.test_labels)},
    )


def _held_out(images: Dataset, share: float, seed: int) -> tuple[bool, Dataset]:
    """With a positive share: True, and the data with that part of the training images in place of the test images."""
    if share == 0:
        return False, images
    order = np.random.default_rng([seed, 1]).permutation(len(images.train_labels))
    aside = order[: max(1, round(share * len(order)))]
    rest = order[len(aside) :]
    return True, replace(
        images,
        test_images=images.train_images[aside],
        test_labels=images.train_labels[aside],
        train_images=images.train_images[rest],
        train_labels=images.train_labels[rest],
    )
