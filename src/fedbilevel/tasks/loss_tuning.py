"""Loss tuning: x shapes the training loss of a long-tailed set, y is the network trained with it.

FedNest (Tarzanagh et al., ICML 2022, section 4.2), after AutoBalance (Li et al., NeurIPS 2021). With z(y) the logits of
an image of class c, the clients' training and validation samples see

    g = CE(z(y) ⊙ sigmoid(Δ) + ℓ, c) + ridge·‖y‖²        f = w_c CE(z(y), c)        x = (Δ, ℓ) ∈ R^C × R^C, start 0

The first is the vector-scaling loss (Kini et al., NeurIPS 2021): Δ scales logits by factors in (0, 1), ℓ moves them. It
starts as plain cross-entropy of halved logits, sigmoid(0) being ½, which is the loss "without tuning": to train with
that alone, give x a vanishing step size. f does not depend on x directly; its weights make it the mean over classes of
their validation losses.

RABO (Li et al., section V-B) has g's loss as f too, with free weights of classes in both: `outer="vs"`,
`class_weights=True`, `normalised=False`. This f is linear in the weights: at the same y it vanishes with them, and has
no least value. The printed e^(Δz) + ℓ is read as e^(Δz + ℓ), sigmoid(Δ) for Δ.
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
ATTEMPTS = 100  # splits drawn before a class counts as too small to be split


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
    """Thin a labelled image set to a long tail, split it over clients, and their shares into training and validation.

    Args:
        ratio: the last class's number of training images over the first's; the numbers between fall exponentially. The
            paper has 0.01. Test images, and images held out, are not thinned.
        validation: the share of each client's samples that goes to the outer loss.
        ridge: the inner loss has ridge·‖y‖² added.
        class_weights: give x a weight of each class, too: C·softmax(x["weight"]), which start at 1 and have mean 1.
        normalised: False makes x["weight"] itself the weights; they start at 1.
        outer: the validation samples' loss: "balanced", or "vs", the inner one without its ridge, which sees x.
        data, network, hidden, clients, partition_by, partition_options, holdout, seed: see hyper_representation.

    Raises:
        ConfigurationError: some class is too small to have training and validation samples.
    """
    require(0 < validation < 1, "validation", validation, "strictly between 0 and 1")
    require(ridge >= 0, "ridge", ridge, "at least 0")
    for name, flag in {"class_weights": class_weights, "normalised": normalised}.items():
        require(isinstance(flag, bool), name, flag, "True or False")
    require(class_weights or normalised, "normalised", normalised, "True without class_weights")
    if outer not in get_args(OuterLoss):
        raise unknown("outer", outer, get_args(OuterLoss))
    images = load_images(data, network, hidden, ratio=ratio, holdout=holdout, seed=seed)
    model = images.model  # alone: losses, which a series keeps, hold no images
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
    none = jnp.zeros(classes)
    return Task(
        name="loss_tuning",
        problem=Bilevel(
            outer=shaped if outer == "vs" else balanced, inner=inner, structure=Structure(y=model.whole_structure)
        ),
        clients=population,
        x0={"scale": none, "shift": none, **({"weight": none if normalised else none + 1} if class_weights else {})},
        y0=model.init(jax.random.key(seed)),
        metrics={f"balanced_{images.part}_accuracy": Metric(lambda x, y: jnp.mean(each_class(*y)), True)},
        metrics_per_client={"client_accuracy": Metric(lambda x, y, b: images.own_accuracy(y[0], y[1], b), True)},
    )


def complete_halves(
    parts: Sequence[Indices], labels: np.ndarray, classes: int, validation: float, seed: int
) -> tuple[list[Indices], list[Indices]]:
    """Split each client's samples at random into (training, validation), so that both unions have every class.

    A split that lacks a class is drawn again: the law of the split is conditioned on that. ConfigurationError where
    ATTEMPTS splits lack a class.
    """
    rng = np.random.default_rng([seed, 2])
    for _ in range(ATTEMPTS):
        halves = split(parts, 1 - validation, seed=rng)
        if all(len(np.unique(labels[np.concatenate(half)])) == classes for half in halves):
            return halves
    counts = np.bincount(labels, minlength=classes)
    raise ConfigurationError(
        f"{ATTEMPTS} splits left some class without training or without validation samples; the smallest, "
        f"class {counts.argmin()}, has {counts.min()}: a larger ratio or validation share is needed"
    )


def balancing_weights(clients: Clients, classes: int) -> np.ndarray:
    """Compute w_c = 1/(C π_c), π_c being the weight of class c in the population's outer samples; shape (classes,).

    Σ_i p_i mean over client i's samples of w_c·loss is then the mean over classes of their mean losses, and E w = 1.
    """
    share = np.zeros(classes)
    for i, p in enumerate(clients.weights):
        labels = clients.outer.row(i)["label"]
        share += p * np.bincount(labels, minlength=classes) / len(labels)
    return np.asarray(1 / (classes * share))
