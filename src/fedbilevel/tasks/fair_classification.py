"""Fair classification: x is a network, and y raises the weights of the classes that contribute most to its loss.

    min over x, max over y of   E[(1 + y_c) CE(z(x), c)] − ½ρ‖y‖²,   y ∈ R^C

The expectation is over images of class c with logits z(x). The maximum over y is at y_c = E[1{class is c} CE]/ρ ≥ 0.
Therefore x minimises the mean loss plus the penalty Σ_c (E[1{class is c} CE])²/(2ρ). For a given mean loss, the penalty
is smallest if all classes contribute equally. y starts at 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Minimax
from fedbilevel.core.tree import PyTree
from fedbilevel.tasks import networks
from fedbilevel.tasks.images import load_images
from fedbilevel.tasks.task import Task


def fair_classification(
    *,
    data: str = "digits",
    ratio: float = 1.0,
    network: str = "mlp",
    hidden: Sequence[int] = (64,),
    clients: int = 20,
    partition_by: str = "iid",
    partition_options: Mapping[str, Any] | None = None,
    holdout: float = 0.0,
    concavity: float = 0.1,
    seed: int = 0,
) -> Task:
    """Split a set of labelled images over clients; x is the whole network, as (body, head).

    Args:
        ratio: the number of training images of the last class, divided by that of the first class. Below 1, the numbers
            fall exponentially from the first class to the last, as in loss_tuning.
        concavity: ρ, above 0. With a smaller ρ, the weights of classes follow their losses more.
        data, network, hidden, clients, partition_by, partition_options, holdout, seed: as in hyper_representation.
    """
    require(concavity > 0, "concavity", concavity, "positive")
    images = load_images(data, network, hidden, ratio=ratio, holdout=holdout, seed=seed)
    model = images.model  # losses hold the model and not the images, since a series of runs keeps the losses in memory

    def loss(x: PyTree, y: Array, batch: dict[str, Array]) -> Array:
        label = batch["label"]
        weighted = networks.cross_entropy(model.logits(x[0], x[1], batch["image"]), label, 1 + y[label])
        return weighted - concavity / 2 * jnp.vdot(y, y)

    measured, each_class = images.accuracy(), images.class_accuracies()
    samples = images.rows(images.dealt(clients, partition_by, partition_options, seed))
    return Task(
        name="fair_classification",
        problem=Minimax(loss),
        clients=Clients(outer=samples),
        x0=model.init(jax.random.key(seed)),
        y0=jnp.zeros(images.data.classes),
        metrics={
            f"{images.part}_accuracy": Metric(lambda x, y: measured(*x), True),
            f"worst_class_{images.part}_accuracy": Metric(lambda x, y: jnp.min(each_class(*x)), True),
        },
    )
