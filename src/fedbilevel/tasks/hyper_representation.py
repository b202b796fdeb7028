"""Hyper-representation: x is a network up to its last layer, and y is the linear head that clients train on it.

With z(x, y) the logits of an image of class c, the losses are means over a client's training images (g) and validation
images (f):

    g = mean CE(z(x, y), c) + ridge·‖y‖²        f = mean CE(z(x, y), c)

FedNest (Tarzanagh et al., ICML 2022, section 4.1), SimFBO and others use this benchmark.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Bilevel
from fedbilevel.core.tree import PyTree
from fedbilevel.data import split
from fedbilevel.tasks import networks
from fedbilevel.tasks.images import load_images
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
    train_samples: int | None = None,
    seed: int = 0,
) -> Task:
    """Split a set of labelled images over clients, and each client's images into training and validation images.

    Args:
        data: "digits" (part of scikit-learn), "mnist", "fashion-mnist" or "cifar-10".
        network: "mlp", where x is all hidden layers; "cnn", where x is two convolutions and a dense layer; or a deep
            convolutional network, "conv4", "resnet12" or "resnet18".
        hidden: for "mlp" the widths of the hidden layers; for "cnn" two numbers of channels and the width of the dense
            layer; for "conv4" one number of channels, or a number for each of the four blocks; for a ResNet the numbers
            of channels of its four blocks or stages.
        clients: the number of clients.
        partition_by: "iid", "shards", "dirichlet", "quantity" or "one_label".
        partition_options: the options of the partition, e.g. {"alpha": 0.3}.
        validation: the share of each client's samples that the outer loss gets; the inner loss gets the others.
        holdout: the share of the training images that is held out. Above 0, metrics are measured on these images in
            place of the test images, so that hyperparameters can be chosen without the test images.
        ridge: the factor of ‖y‖² in the inner loss.
        train_samples: the number of training images, drawn once, on which the metric "train_accuracy" is measured;
            None: there is no such metric.
        seed: the seed of the partition, the splits and the starting point.
    """
    require(0 < validation < 1, "validation", validation, "strictly between 0 and 1")
    require(ridge >= 0, "ridge", ridge, "at least 0")
    images = load_images(data, network, hidden, holdout=holdout, seed=seed)
    train, valid = split(images.dealt(clients, partition_by, partition_options, seed), 1 - validation, seed=seed)
    model = images.model  # losses hold the model and not the images, since a series of runs keeps the losses in memory

    def outer(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
        return networks.cross_entropy(model.logits(x, y, batch["image"]), batch["label"])

    def inner(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
        return outer(x, y, batch) + ridge * optax.tree.vdot(y, y)

    x0, y0 = model.init(jax.random.key(seed))
    trained = {}
    if train_samples is not None:
        trained["train_accuracy"] = Metric(images.training_accuracy(train_samples, seed), True)
    return Task(
        name="hyper_representation",
        problem=Bilevel(outer, inner, structure=model.structure),
        clients=Clients(images.rows(valid), images.rows(train)),
        x0=x0,
        y0=y0,
        metrics={f"{images.part}_accuracy": Metric(images.accuracy(), True), **trained},
        metrics_per_client={"client_accuracy": Metric(images.own_accuracy, True)},
    )
