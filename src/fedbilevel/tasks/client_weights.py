"""Clients' weights: some clients have wrong labels, and x determines how much each client counts in training.

Let z(y) be the logits of a sample with label c. It is not known which clients have wrong labels. The labels of
validation samples are right, and in f the validation losses of all clients have the same weight:

    g_i = M softmax(x)_i · mean CE(z(y), c) + ridge·‖y‖²        f_i = mean CE(z(y), c)

x starts at 0, where all clients have the same weight. Let p_i be the weight of client i in means over clients, s =
softmax(x), v the solution of ∇²yy G v = ∇y F, and ℓ_i the mean CE of client i's training samples. The hypergradient of
one entry is then

    ∂Φ/∂x_i = −M s_i (a_i − Σ_k s_k a_k)    with    a_i = p_i ⟨v, ∇ℓ_i⟩.

So x_i grows if the gradient of client i lowers the validation loss by more than the gradients of clients do on average.

For a problem of your own, use `numbered(clients)`, which adds the client's number to each inner sample, and multiply
the inner loss by the client's entry of `weights(x)`.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import Bilevel
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.submodel import Structure
from fedbilevel.data import split
from fedbilevel.tasks.hyper_cleaning import spoiled, weighted_losses
from fedbilevel.tasks.images import WITH_LINEAR, load_images
from fedbilevel.tasks.task import Task


def client_weights(
    *,
    data: str = "digits",
    spoilt: float = 0.5,
    corruption: float = 0.5,
    network: str = "linear",
    hidden: Sequence[int] = (),
    clients: int = 18,
    partition_by: str = "iid",
    partition_options: Mapping[str, Any] | None = None,
    validation: float = 0.5,
    holdout: float = 0.0,
    ridge: float = 1e-3,
    seed: int = 0,
) -> Task:
    """Split labelled images over clients, divide each client's samples into two parts, and spoil some clients' labels.

    The metrics are the accuracy and, if some clients have wrong labels and some do not, the share of all weight that
    the clients with wrong labels have. This share is `spoilt` if all clients have the same weight.

    Args:
        spoilt: the share of the clients whose training labels are made wrong, rounded to a number of clients.
        corruption: the probability with which such a client's training label is replaced by a class drawn uniformly
            from all classes. Validation, held-out and test labels stay right.
        network: "linear" (no hidden layers), or a network of hyper_representation; y is the whole network.
        validation: the share of each client's samples that the outer loss gets; the inner loss gets the others.
        ridge: the factor of ‖y‖² in the inner loss.
        data, hidden, clients, partition_by, partition_options, holdout, seed: as in hyper_representation.
    """
    require(0 <= spoilt <= 1, "spoilt", spoilt, "from 0 to 1")
    require(0 <= corruption <= 1, "corruption", corruption, "from 0 to 1")
    require(0 < validation < 1, "validation", validation, "strictly between 0 and 1")
    require(0 <= ridge < np.inf, "ridge", ridge, "at least 0 and finite")
    images = load_images(data, network, hidden, holdout=holdout, seed=seed, known=WITH_LINEAR)
    train, valid = split(images.dealt(clients, partition_by, partition_options, seed), 1 - validation, seed=seed)
    chosen = np.random.default_rng([seed, 4]).permutation(clients)[: round(spoilt * clients)]
    wrong = np.isin(np.arange(clients), chosen)
    noisy = spoiled(images.rows(train), images.data.classes, corruption * wrong, seed)
    samples = Ragged({name: noisy.values[name] for name in ("image", "label", "row")}, noisy.start, noisy.size)
    outer, inner = weighted_losses(images.model, ridge, lambda x, batch: weights(x)[batch["row"]])
    measured = images.accuracy()
    metrics: dict[str, Any] = {f"{images.part}_accuracy": Metric(lambda x, y: measured(*y), True)}
    if wrong.any() and not wrong.all():
        metrics["spoilt_weight"] = lambda x, y: jnp.sum(weights(x) * wrong) / clients
    return Task(
        name="client_weights",
        problem=Bilevel(outer, inner, structure=Structure(y=images.model.whole_structure)),
        clients=Clients(images.rows(valid), samples),
        x0=jnp.zeros(clients),
        y0=images.model.init(jax.random.key(seed)),
        metrics=metrics,
        metrics_per_client={"client_accuracy": Metric(lambda x, y, b: images.own_accuracy(y[0], y[1], b), True)},
    )


def weights(x: Array) -> Array:
    """Return the clients' weights M softmax(x), as an array of shape (M,). Their mean is 1."""
    return x.size * jax.nn.softmax(x)


def numbered(clients: Clients) -> Clients:
    """Return clients whose inner samples are {"samples": the sample, "client": the number of its client}.

    Multiply the inner loss of a batch by `weights(x)[batch["client"][0]]`; all samples of a batch have the same client.
    The outer samples stay as they are. The inner samples are copied.
    """
    inner = clients.inner
    rows = inner.taken([start + np.arange(size) for start, size in zip(inner.start, inner.size, strict=True)])
    number = np.repeat(np.arange(len(rows.size), dtype=np.int32), rows.size)
    changed = copy.copy(clients)
    vars(changed).update(inner=Ragged({"samples": rows.values, "client": number}, rows.start, rows.size))
    return changed
