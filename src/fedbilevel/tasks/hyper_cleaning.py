"""Data hyper-cleaning: some training labels are wrong, and x learns how far to trust each training sample.

Stochastic bilevel papers since Ji, Yang, Liang (ICML 2021), in federated form "Asynchronous Distributed Bilevel
Optimization" (Jiao et al., ICLR 2023): 18 clients. With z(y) the logits of training sample j of client i, whose label c
may be wrong, and of a validation sample, whose label is right,

    g_i = mean_j sigmoid(x_ij)·CE(z(y), c_ij) + ridge·‖y‖²        f_i = mean CE(z(y), c)        x = 0 at the start

f does not depend on x directly. ∂g_i/∂x_ij = sigmoid'(x_ij)·CE_ij/n_i: the hypergradient of a weight is of the order
of 1 over the number of all training samples, so steps on x must be that much larger.

x has shape (M, longest): x_ij is the j-th entry of row i; what is behind the end of a shorter client's row is never
read. A client's losses read its own row alone, and give the same where x is that row alone, of shape (1, longest).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Bilevel
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
    """Split a labelled image set over clients, their shares into training and validation, and spoil training labels.

    Args:
        corruption: the probability with which a training label is replaced by a class drawn uniformly from all C of
            them; as that may be the class it was, a share corruption·(1 − 1/C) ends up wrong, and that is what
            "corrupted" means in the metrics. Validation, held-out and test labels stay right.
        network: "linear" (no hidden layers), or a network of hyper_representation; y is the whole network.
        validation: the share of each client's samples that goes to the outer loss.
        ridge: the inner loss has ridge·‖y‖² added.
        local: "x" has each client keep its own row of x, so that neither x nor a gradient in x is in any message, with
            methods that can do so (see `Bilevel`).
        data, hidden, clients, partition_by, partition_options, holdout, seed: see hyper_representation.

    Measured: accuracy; `auc`, the probability that a clean training sample has a larger weight than a corrupted
    sample, ties counting half; the mean weights of both. Where no label is wrong, or every label, accuracy alone.
    """
    require(0 <= corruption < 1, "corruption", corruption, "at least 0 and below 1")
    require(0 < validation < 1, "validation", validation, "strictly between 0 and 1")
    require(0 <= ridge < np.inf, "ridge", ridge, "at least 0 and finite")
    images = load_images(data, network, hidden, holdout=holdout, seed=seed, known=WITH_LINEAR)
    train, valid = split(images.dealt(clients, partition_by, partition_options, seed), 1 - validation, seed=seed)
    samples = spoiled(images.rows(train), images.data.classes, corruption, seed)

    model = images.model  # alone: losses, which a series keeps, hold no images

    def outer(x: Array, y: PyTree, batch: dict[str, Array]) -> Array:
        return networks.cross_entropy(model.logits(y[0], y[1], batch["image"]), batch["label"])

    def inner(x: Array, y: PyTree, batch: dict[str, Array]) -> Array:
        weighted = networks.cross_entropy(model.logits(y[0], y[1], batch["image"]), batch["label"], weights(x, batch))
        return weighted + ridge * optax.tree.vdot(y, y)

    measured = images.accuracy()
    return Task(
        name="hyper_cleaning",
        problem=Bilevel(outer, inner, structure=Structure(y=model.whole_structure), local=local),
        clients=Clients(images.rows(valid), samples),
        x0=jnp.zeros((clients, int(samples.size.max()))),
        y0=model.init(jax.random.key(seed)),
        metrics={f"{images.part}_accuracy": Metric(lambda x, y: measured(*y), True), **_cleaning_metrics(samples)},
        metrics_per_client={"client_accuracy": Metric(lambda x, y, b: images.own_accuracy(y[0], y[1], b), True)},
    )


def spoiled(samples: Ragged, classes: int, corruption: float, seed: int) -> Ragged:
    """Replace labels of packed {"image", "label"} at random, and add what finds each sample's weight in x.

    Adds "row" (the client) and "place" (the sample's number there), int32, and for the metrics alone "corrupted", True
    where the label is wrong.
    """
    rng = np.random.default_rng([seed, 3])
    label = samples.values["label"]
    replaced = rng.random(len(label)) < corruption
    found = np.where(replaced, rng.integers(classes, size=len(label), dtype=label.dtype), label)
    row = np.repeat(np.arange(len(samples.size), dtype=np.int32), samples.size)
    place = (np.arange(len(label)) - samples.start[row]).astype(np.int32)
    values = {**samples.values, "label": found, "row": row, "place": place, "corrupted": found != label}
    return Ragged(values, samples.start, samples.size)


def weights(x: Array, samples: Mapping[str, Any]) -> Array:
    """Compute sigmoid(x) of each sample, shape (n,); x: (M, longest), or (1, longest), the row of all these samples."""
    return jax.nn.sigmoid(x[jnp.minimum(samples["row"], x.shape[0] - 1), samples["place"]])


def cleaning_weights(task: Task, x: Array) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of the clean and of the corrupted training samples of all clients, 1-D arrays."""
    samples = task.population.inner.values
    found, corrupted = np.asarray(weights(x, samples)), samples["corrupted"]
    return found[~corrupted], found[corrupted]


def auc(higher: Array, lower: Array) -> Array:
    """Compute P(a > b) + ½ P(a = b), a of `higher` (n,) and b of `lower` (m,): the Mann-Whitney statistic over nm."""
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
