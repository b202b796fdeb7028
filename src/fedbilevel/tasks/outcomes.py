"""What linear models of tables predict: losses of rows, what rows have of their target, and a score.

With z = aᵀw for a row a, or z_c for each class c, and C the classes:

    binary      ℓ = log(1 + eᶻ) − c z                   c of 0 or 1
    classes     ℓ = log Σ_c' e^{z_c'} − z_c
    count       ℓ = eᶻ − (c/m) z                        Poisson's, over m, the mean of all counts: their rate is m eᶻ
    continuous  ℓ = ½ (z − (c − m)/s)²                  m and s the mean and the standard deviation of all targets
    survival    ℓ = e [log Σ_{k at risk} v_k e^{z_k} − z]

The last is Cox's partial likelihood with Breslow's ties: e is 1 where the event came at time t, v the weights of rows,
and at risk are the rows of the same site, and of those that the model sees, with a time of t or later.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Batch = Mapping[str, Array]


class OutcomeKind(NamedTuple):
    """A kind of target.

    Args:
        losses: (z, batch, seen) -> ℓ of each row. z is (n, models), or (n, models, classes); `seen`, (n, models) of
            booleans, says which rows each model sees: elsewhere ℓ is any finite number.
        score: what is measured beside the mean loss.
        scored: (z of the model that is used, batch) -> the score.
        larger_is_better: of the score.
        whole: whether ℓ depends on a site's other rows.
    """

    losses: Callable[[Array, Batch, Array], Array]
    score: str
    scored: Callable[[Array, Batch], Array]
    larger_is_better: bool = True
    whole: bool = False


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
    most = jax.lax.stop_gradient(jnp.max(z, axis=0))  # so that no power overflows
    risk = jnp.where(seen, batch["weight"][:, None] * jnp.exp(z - most), 0)
    at_risk = jnp.cumsum(risk, axis=0)[batch["last"]]
    counted = seen & (batch["event"][:, None] > 0)
    return jnp.where(counted, most + jnp.log(jnp.where(counted & (at_risk > 0), at_risk, 1)) - z, 0)


def pairs(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return which pairs (j, k) of rows of a site can be compared: j has its event before k's time. (n, n) booleans."""
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
    """Compute the mean deviance over m: 2 [c log(c/μ) − (c − μ)] with c and μ in units of m."""
    c = batch["label"]
    return 2 * jnp.mean(jnp.where(c > 0, c * (jnp.log(jnp.where(c > 0, c, 1)) - z), 0) - c + jnp.exp(z))


def _explained(z: Array, batch: Batch) -> Array:
    """Compute R², against the mean of these rows."""
    c = batch["label"]
    return 1 - jnp.sum((z - c) ** 2) / jnp.sum((c - jnp.mean(c)) ** 2)


OUTCOMES = {
    "binary": OutcomeKind(_binary, "accuracy", _accuracy),
    "classes": OutcomeKind(_classes, "accuracy", _accuracy_of_classes),
    "count": OutcomeKind(_count, "deviance", _deviance, larger_is_better=False),
    "continuous": OutcomeKind(_continuous, "r2", _explained),
    "survival": OutcomeKind(_survival, "concordance", _concordance, whole=True),
}
