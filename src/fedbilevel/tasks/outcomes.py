"""Define the kinds of targets that linear models of tables predict, each with its loss of a row and its score.

A row has the features a and the target c, and z = aᵀw is the value that the model computes; with several classes, z_c
is the value of class c. The losses ℓ are:

    binary      ℓ = log(1 + eᶻ) − c z                   c of 0 or 1
    classes     ℓ = log Σ_c' e^{z_c'} − z_c
    count       ℓ = eᶻ − (c/m) z                        Poisson's, divided by m, the mean of counts; the rate is m eᶻ
    continuous  ℓ = ½ (z − (c − m)/s)²                  m and s the mean and the standard deviation of all targets
    survival    ℓ = e [log Σ_{k at risk} v_k e^{z_k} − z]

The last loss is Cox's partial likelihood with Breslow's treatment of ties. The number e is 1 if the event was observed
at the row's time t, and otherwise 0; v are the weights of rows. A row k is at risk if it is of the same site, the model
is trained on it, and its time is t or later.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Batch = Mapping[str, Array]


class OutcomeKind(NamedTuple):
    """A kind of target, with its loss and its score.

    Args:
        losses: a function (z, batch, seen) -> ℓ of each row under each model. The shape of z is (n, models) or
            (n, models, classes). `seen` has the shape (n, models), and is True where the model is trained on the row;
            elsewhere, ℓ may be any finite number.
        score: the name of the metric that is measured besides the mean loss.
        scored: a function (z, batch) -> the score of one model; z has the shape (n,) or (n, classes).
        larger_is_better: whether a larger score is better.
        whole: whether the loss ℓ of a row depends on other rows of its site.
        has_score: a function (rows) -> whether some rows have a score, which is then no mean over rows; None: all rows
            have one, and it is the mean of the scores of single rows.
    """

    losses: Callable[[Array, Batch, Array], Array]
    score: str
    scored: Callable[[Array, Batch], Array]
    larger_is_better: bool = True
    whole: bool = False
    has_score: Callable[[Mapping[str, np.ndarray]], bool] | None = None


def _binary(z: Array, batch: Batch, seen: Array) -> Array:
    return jax.nn.softplus(z) - batch["label"][:, None] * z


def _classes(z: Array, batch: Batch, seen: Array) -> Array:
    label = jnp.broadcast_to(batch["label"].astype(int)[:, None, None], (*z.shape[:2], 1))
    return jax.nn.logsumexp(z, axis=2) - jnp.take_along_axis(z, label, axis=2)[:, :, 0]


def _count(z: Array, batch: Batch, seen: Array) -> Array:
    return jnp.exp(z) - batch["label"][:, None] * z


def _continuous(z: Array, batch: Batch, seen: Array) -> Array:
    return (z - batch["label"][:, None]) ** 2 / 2


def _survival(z: Array, batch: Batch, seen: Array) -> Array:
    most = jax.lax.stop_gradient(jnp.max(z, axis=0))  # so that no exponential overflows
    risk = jnp.where(seen, batch["weight"][:, None] * jnp.exp(z - most), 0)
    at_risk = jnp.cumsum(risk, axis=0)[batch["last"]]
    counted = seen & (batch["event"][:, None] > 0)
    return jnp.where(counted, most + jnp.log(jnp.where(counted & (at_risk > 0), at_risk, 1)) - z, 0)


def pairs(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return which pairs of a site's n rows can be compared, as booleans of shape (n, n).

    A pair (j, k) can be compared if row j has an event before the time of row k.
    """
    time, event, site = batch["time"], batch["event"], batch["site"]
    return (event[:, None] > 0) & (time[:, None] < time) & (site[:, None] == site)


def _concordance(z: Array, batch: Batch) -> Array:
    compared = pairs(batch)  # type: ignore[arg-type]
    right = jnp.where(z[:, None] == z, 0.5, z[:, None] > z)
    return jnp.sum(jnp.where(compared, right, 0)) / jnp.sum(compared)


def _accuracy(z: Array, batch: Batch) -> Array:
    return jnp.mean((z > 0) == (batch["label"] > 0))


def _accuracy_of_classes(z: Array, batch: Batch) -> Array:
    return jnp.mean(jnp.argmax(z, axis=1) == batch["label"])


def _deviance(z: Array, batch: Batch) -> Array:
    """Return the mean of the deviances 2 [c log(c/μ) − (c − μ)] of counts c and rates μ, divided by the mean count."""
    c = batch["label"]
    return 2 * jnp.mean(jnp.where(c > 0, c * (jnp.log(jnp.where(c > 0, c, 1)) - z), 0) - c + jnp.exp(z))


def _explained(z: Array, batch: Batch) -> Array:
    """Return R², which compares the errors of the predictions with the variance of these rows' targets."""
    c = batch["label"]
    return 1 - jnp.sum((z - c) ** 2) / jnp.sum((c - jnp.mean(c)) ** 2)


OUTCOMES = {
    "binary": OutcomeKind(_binary, "accuracy", _accuracy),
    "classes": OutcomeKind(_classes, "accuracy", _accuracy_of_classes),
    "count": OutcomeKind(_count, "deviance", _deviance, larger_is_better=False),
    "continuous": OutcomeKind(_continuous, "r2", _explained, has_score=lambda rows: bool(np.ptp(rows["label"]))),
    "survival": OutcomeKind(
        _survival, "concordance", _concordance, whole=True, has_score=lambda rows: bool(pairs(rows).any())
    ),
}
