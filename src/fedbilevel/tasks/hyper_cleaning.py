"""Data hyper-cleaning: some training labels are wrong, and x determines a weight for each training sample.

Stochastic bilevel papers since Ji, Yang, Liang (ICML 2021) use this task; its federated form with 18 clients is from
"Asynchronous Distributed Bilevel Optimization" (Jiao et al., ICLR 2023). Let z(y) be the logits of a sample with label
c. Labels c_ij of training samples may be wrong, and labels of validation samples are right.

    g_i = mean_j sigmoid(x_ij)·CE(z(y), c_ij) + ridge·‖y‖²        f_i = mean CE(z(y), c)

f does not depend on x directly, and ∂g_i/∂x_ij = sigmoid'(x_ij)·CE_ij/n_i, where client i has n_i training samples. The
entry of the hypergradient for one weight is therefore of the order of 1/N, where N is the number of training samples of
all clients. So step sizes for x must be about N times as large as in problems whose hypergradient has entries of the
order of 1. x starts at 0.

x has shape (M, longest) for M clients, where `longest` is the largest of the n_i, and x_ij is entry j of row i. Entries
of row i from n_i on are never read. A client's losses read only the client's own row. They also accept x of shape (1,
longest), which is this row alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Bilevel, Loss
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import PyTree
from fedbilevel.data import split
from fedbilevel.tasks import networks
from fedbilevel.tasks.images import WITH_LINEAR, load_images
from fedbilevel.tasks.task import Task


def hyper_cleaning(
    *,
    data: str = "digits",
    corruption: float = 0.3,
    network: str = "linear",
    hidden: Sequence[int] = (),
    clients: int = 18,
    partition_by: str = "iid",
    partition_options: Mapping[str, Any] | None = None,
    validation: float = 0.5,
    holdout: float = 0.0,
    ridge: float = 1e-3,
    local: Literal["x"] | None = None,
    seed: int = 0,
) -> Task:
    """Split labelled images over clients, divide each client's samples into two parts, and make training labels wrong.

    The metrics are the accuracy, the mean weights of clean and of corrupted training samples, and `auc`. This is the
    probability that a clean training sample has a larger weight than a corrupted one; a tie counts as one half. If no
    label is wrong, or all labels are wrong, the accuracy is the only metric.

    Args:
        corruption: the probability with which a training label is replaced by a class drawn uniformly from all C
            classes. The draw may give the right class again, so the expected share of wrong labels is corruption·(1 −
            1/C). Metrics count only wrong labels as corrupted. Validation, held-out and test labels stay right.
        network: "linear" (no hidden layers), or a network of hyper_representation; y is the whole network.
        validation: the share of each client's samples that the outer loss gets; the inner loss gets the others.
        ridge: the factor of ‖y‖² in the inner loss.
        local: "x": each client keeps its own row of x, and no message contains x or a gradient in x. Only some methods
            support this; see `Bilevel`. None: the server holds x.
        data, hidden, clients, partition_by, partition_options, holdout, seed: as in hyper_representation.
    """
    require(0 <= corruption < 1, "corruption", corruption, "at least 0 and below 1")
    require(0 < validation < 1, "validation", validation, "strictly between 0 and 1")
    require(0 <= ridge < np.inf, "ridge", ridge, "at least 0 and finite")
    images = load_images(data, network, hidden, holdout=holdout, seed=seed, known=WITH_LINEAR)
    train, valid = split(images.dealt(clients, partition_by, partition_options, seed), 1 - validation, seed=seed)
    samples = spoiled(images.rows(train), images.data.classes, corruption, seed)
    outer, inner = weighted_losses(images.model, ridge, weights)
    measured = images.accuracy()
    return Task(
        name="hyper_cleaning",
        problem=Bilevel(outer, inner, structure=Structure(y=images.model.whole_structure), local=local),
        clients=Clients(images.rows(valid), samples),
        x0=jnp.zeros((clients, int(samples.size.max()))),
        y0=images.model.init(jax.random.key(seed)),
        metrics={f"{images.part}_accuracy": Metric(lambda x, y: measured(*y), True), **_cleaning_metrics(samples)},
        metrics_per_client={"client_accuracy": Metric(lambda x, y, b: images.own_accuracy(y[0], y[1], b), True)},
    )


def weighted_losses(
    model: networks.Network, ridge: float, weights: Callable[[Array, Mapping[str, Any]], Array]
) -> tuple[Loss, Loss]:
    """Return f and g for a network whose body and head together are y.

    Here f is the mean CE, and g is the mean of weight·CE plus ridge·‖y‖².

    The losses hold the model and not the images, since a series of runs keeps the losses in memory.

    Args:
        weights: a function (x, batch) -> the weight of each sample of the batch in g, as an array of shape (n,).
    """

    def outer(x: Array, y: PyTree, batch: dict[str, Array]) -> Array:
        return networks.cross_entropy(model.logits(y[0], y[1], batch["image"]), batch["label"])

    def inner(x: Array, y: PyTree, batch: dict[str, Array]) -> Array:
        weighted = networks.cross_entropy(model.logits(y[0], y[1], batch["image"]), batch["label"], weights(x, batch))
        return weighted + ridge * optax.tree.vdot(y, y)

    return outer, inner


def spoiled(samples: Ragged, classes: int, corruption: float | np.ndarray, seed: int) -> Ragged:
    """Replace some labels of packed samples at random, and add the place of each sample's weight in x.

    The packed samples have the arrays "image" and "label".

    `corruption` is the probability that a label is replaced: a number, or an array of shape (M,) with a number for each
    client. The new int32 arrays are "row", the client, and "place", the number of the sample within the client. The new
    array "corrupted" is True for a wrong label; only metrics use it.
    """
    rng = np.random.default_rng([seed, 3])
    label = samples.values["label"]
    row = np.repeat(np.arange(len(samples.size), dtype=np.int32), samples.size)
    replaced = rng.random(len(label)) < np.broadcast_to(corruption, len(samples.size))[row]
    noisy = np.where(replaced, rng.integers(classes, size=len(label), dtype=label.dtype), label)
    place = (np.arange(len(label)) - samples.start[row]).astype(np.int32)
    values = {**samples.values, "label": noisy, "row": row, "place": place, "corrupted": noisy != label}
    return Ragged(values, samples.start, samples.size)


def weights(x: Array, samples: Mapping[str, Any]) -> Array:
    """Return the weight sigmoid(x_ij) of each sample, as an array of shape (n,).

    Args:
        x: an array of shape (M, longest); or of shape (1, longest), the row of one client, if all samples belong to
            this client.
    """
    return jax.nn.sigmoid(x[jnp.minimum(samples["row"], x.shape[0] - 1), samples["place"]])


def cleaning_weights(task: Task, x: Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of all clean training samples, and those of all corrupted ones, as two 1-D arrays."""
    samples = task.population.inner.values
    each, corrupted = np.asarray(weights(x, samples)), samples["corrupted"]
    return each[~corrupted], each[corrupted]


def auc(higher: Array, lower: Array) -> Array:
    """Return the area under the ROC curve, P(a > b) + ½ P(a = b), for a in `higher` and b in `lower`.

    This is the Mann-Whitney statistic divided by n·m, where n and m are the numbers of entries of `higher` and `lower`.
    """
    ordered = jnp.sort(lower)
    below, not_above = (jnp.searchsorted(ordered, higher, side=side) for side in ("left", "right"))
    return jnp.mean((below + not_above).astype(float)) / (2 * len(lower))


def _cleaning_metrics(samples: Ragged) -> dict[str, Any]:
    corrupted = samples.values["corrupted"]
    if corrupted.all() or not corrupted.any():
        return {}
    clean, spoilt = (
        {name: samples.values[name][chosen] for name in ("row", "place")} for chosen in (~corrupted, corrupted)
    )
    return {
        "auc": Metric(lambda x, y: auc(weights(x, clean), weights(x, spoilt)), larger_is_better=True),
        "clean_weight": Metric(lambda x, y: jnp.mean(weights(x, clean)), larger_is_better=True),
        "corrupted_weight": lambda x, y: jnp.mean(weights(x, spoilt)),
    }
