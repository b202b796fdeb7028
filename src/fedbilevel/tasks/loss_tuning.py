"""Loss tuning: x contains parameters of the training loss for long-tailed images, and y is the trained network.

The task is from FedNest (Tarzanagh et al., ICML 2022, section 4.2), after AutoBalance (Li et al., NeurIPS 2021). With
z(y) the logits of an image of class c, the losses are means over a client's training images (g) and validation images
(f):

    g = mean CE(z(y) ⊙ sigmoid(Δ) + ℓ, c) + ridge·‖y‖²        f = mean w_c CE(z(y), c)        x = (Δ, ℓ) ∈ R^C × R^C

The loss in g is the vector-scaling loss (Kini et al., NeurIPS 2021): Δ scales logits by factors in (0, 1), and ℓ shifts
them. At the start, Δ = ℓ = 0 and sigmoid(0) = ½, so g is the cross-entropy of halved logits, which is the loss without
tuning. To train with only this loss, give x a very small step size. The outer loss f does not depend on x directly.
With its weights w_c, f is the mean over classes of the classes' validation losses.

In RABO (Li et al., section V-B), f is the loss of g, too, and both contain class weights that are free variables:
`outer="vs"`, `class_weights=True`, `normalised=False`. This f is linear in the weights. At a fixed y it is 0 if all
weights are 0, and it has no lower bound. The paper prints e^(Δz) + ℓ. This is read as e^(Δz + ℓ) here, with sigmoid(Δ)
in place of Δ.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import ConfigurationError, require, unknown
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Bilevel
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import PyTree
from fedbilevel.data import split
from fedbilevel.data.clients import Indices
from fedbilevel.tasks import networks
from fedbilevel.tasks.images import load_images
from fedbilevel.tasks.task import Task

OuterLoss = Literal["balanced", "vs"]
ATTEMPTS = 100  # after this many failed random splits, an error says that a class is too small to be split


def loss_tuning(
    *,
    data: str = "digits",
    ratio: float = 0.1,
    network: str = "mlp",
    hidden: Sequence[int] = (64,),
    clients: int = 20,
    partition_by: str = "iid",
    partition_options: Mapping[str, Any] | None = None,
    validation: float = 0.2,
    holdout: float = 0.0,
    ridge: float = 5e-4,
    class_weights: bool = False,
    normalised: bool = True,
    outer: OuterLoss = "balanced",
    seed: int = 0,
) -> Task:
    """Thin labelled images to a long tail, split them over clients, and divide each client's images into two parts.

    Args:
        ratio: the number of training images of the last class, divided by that of the first class. The numbers fall
            exponentially from the first class to the last. The paper has 0.01. Test images and held-out images are not
            thinned.
        validation: the share of each client's samples that the outer loss gets; the inner loss gets the others.
        ridge: the factor of ‖y‖² in the inner loss.
        class_weights: whether x also determines a weight for each class. The weights are C·softmax(x["weight"]). They
            start at 1, and their mean is always 1.
        normalised: whether the weights are normalised by the softmax. False: x["weight"] contains the weights
            themselves, which start at 1; this needs `class_weights`.
        outer: the outer loss: "balanced", the mean over classes; or "vs", the inner loss without its ridge, which then
            depends on x.
        data, network, hidden, clients, partition_by, partition_options, holdout, seed: as in hyper_representation.

    Raises:
        ConfigurationError: a class is too small to have training and validation samples.
    """
    require(0 < validation < 1, "validation", validation, "strictly between 0 and 1")
    require(ridge >= 0, "ridge", ridge, "at least 0")
    for name, flag in {"class_weights": class_weights, "normalised": normalised}.items():
        require(isinstance(flag, bool), name, flag, "True or False")
    require(class_weights or normalised, "normalised", normalised, "True, since class_weights is False")
    if outer not in get_args(OuterLoss):
        raise unknown("outer", outer, get_args(OuterLoss))
    images = load_images(data, network, hidden, ratio=ratio, holdout=holdout, seed=seed)
    model = images.model  # losses hold the model and not the images, since a series of runs keeps the losses in memory
    parts = images.dealt(clients, partition_by, partition_options, seed)
    train, valid = complete_halves(parts, images.data.train_labels, images.data.classes, validation, seed)
    population = Clients(images.rows(valid), images.rows(train))
    balance = jnp.asarray(balancing_weights(population, images.data.classes))

    def balanced(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
        label = batch["label"]
        return networks.cross_entropy(model.logits(y[0], y[1], batch["image"]), label, balance[label])

    def shaped(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
        logits = model.logits(y[0], y[1], batch["image"]) * jax.nn.sigmoid(x["scale"]) + x["shift"]
        weights = jnp.ones(classes)
        if class_weights:
            weights = classes * jax.nn.softmax(x["weight"]) if normalised else x["weight"]
        return networks.cross_entropy(logits, batch["label"], weights[batch["label"]])

    def inner(x: PyTree, y: PyTree, batch: dict[str, Array]) -> Array:
        return shaped(x, y, batch) + ridge * optax.tree.vdot(y, y)

    each_class = images.class_accuracies()
    classes = images.data.classes
    zero = jnp.zeros(classes)
    return Task(
        name="loss_tuning",
        problem=Bilevel(
            outer=shaped if outer == "vs" else balanced, inner=inner, structure=Structure(y=model.whole_structure)
        ),
        clients=population,
        x0={"scale": zero, "shift": zero, **({"weight": zero if normalised else zero + 1} if class_weights else {})},
        y0=model.init(jax.random.key(seed)),
        metrics={f"balanced_{images.part}_accuracy": Metric(lambda x, y: jnp.mean(each_class(*y)), True)},
        metrics_per_client={"client_accuracy": Metric(lambda x, y, b: images.own_accuracy(y[0], y[1], b), True)},
    )


def complete_halves(
    parts: Sequence[Indices], labels: np.ndarray, classes: int, validation: float, seed: int
) -> tuple[list[Indices], list[Indices]]:
    """Split each client's samples at random into training and validation samples.

    Over all clients together, both parts have samples of every class. A split without some class is drawn again.

    Returns (training, validation), each with the indices of every client's samples.

    Raises:
        ConfigurationError: each of ATTEMPTS splits lacked a class.
    """
    rng = np.random.default_rng([seed, 2])
    for _ in range(ATTEMPTS):
        halves = split(parts, 1 - validation, seed=rng)
        if all(len(np.unique(labels[np.concatenate(half)])) == classes for half in halves):
            return halves
    counts = np.bincount(labels, minlength=classes)
    raise ConfigurationError(
        f"each of {ATTEMPTS} random splits left a class without training or without validation samples; the smallest "
        f"class, {counts.argmin()}, has {counts.min()} samples: use a larger ratio or validation share"
    )


def balancing_weights(clients: Clients, classes: int) -> np.ndarray:
    """Return a weight for each class c: w_c = 1/(C π_c), where π_c is the share of the class in the outer samples.

    The share π_c is weighted by the clients' weights p_i. With this choice, the weighted mean of w_c·loss over all
    samples is the mean over classes of each class's mean loss, and the weighted mean of w_c is 1.
    """
    share = np.zeros(classes)
    for i, p in enumerate(clients.weights):
        labels = clients.outer.row(i)["label"]
        share += p * np.bincount(labels, minlength=classes) / len(labels)
    return np.asarray(1 / (classes * share))
