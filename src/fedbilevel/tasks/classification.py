"""Image classification: an ordinary federated problem, in which all clients train one network on all their samples.

With z(x) the logits of an image of class c, the loss is

    f(x) = mean CE(z(x), c) + ridge·‖x‖².

There is no y.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import SingleLevel
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import PyTree
from fedbilevel.tasks import networks
from fedbilevel.tasks.images import load_images
from fedbilevel.tasks.task import Task


def classification(
    *,
    data: str = "digits",
    ratio: float = 1.0,
    network: str = "mlp",
    hidden: Sequence[int] = (64,),
    clients: int = 20,
    partition_by: str = "iid",
    partition_options: Mapping[str, Any] | None = None,
    holdout: float = 0.0,
    ridge: float = 0.0,
    seed: int = 0,
) -> Task:
    """Split a set of labelled images over clients; x is the whole network, as (body, head).

    Args:
        ratio: the number of training images of the last class, divided by that of the first class. Below 1, the numbers
            fall exponentially from the first class to the last, as in loss_tuning.
        ridge: the factor of ‖x‖² in the loss.
        data, network, hidden, clients, partition_by, partition_options, holdout, seed: as in hyper_representation.
    """
    require(ridge >= 0, "ridge", ridge, "at least 0")
    images = load_images(data, network, hidden, ratio=ratio, holdout=holdout, seed=seed)
    model = images.model  # losses hold the model and not the images, since a series of runs keeps the losses in memory

    def loss(x: PyTree, batch: dict[str, Array]) -> Array:
        return networks.cross_entropy(
            model.logits(x[0], x[1], batch["image"]), batch["label"]
        ) + ridge * optax.tree.vdot(x, x)

    measured = images.accuracy()
    samples = images.rows(images.dealt(clients, partition_by, partition_options, seed))
    return Task(
        name="classification",
        problem=SingleLevel(loss, structure=Structure(x=model.whole_structure)),
        clients=Clients(outer=samples),
        x0=model.init(jax.random.key(seed)),
        y0=None,
        metrics={f"{images.part}_accuracy": Metric(lambda x, y: measured(*x), True)},
        metrics_per_client={"client_accuracy": Metric(lambda x, y, b: images.own_accuracy(x[0], x[1], b), True)},
    )
