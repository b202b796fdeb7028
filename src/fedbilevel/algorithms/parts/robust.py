"""Replace the mean of clients' replies by robust rules, whose results a few faulty clients cannot change much.

A rule needs every reply of an exchange, as an array of shape (P, d) with a row for each reply, and the clients'
weights, as an array of shape (P,). A weight of 0 marks a row that only pads the cohort. The server needs memory for P·d
numbers.

Sources: D. Yin, Y. Chen, K. Ramchandran and P. Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates", ICML 2018 (trimmed mean, median). P. Blanchard, E. M. El Mhamdi, R. Guerraoui and J. Stainer,
"Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017 (Krum). S. P. Karimireddy, L. He
and M. Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021 (centred clipping).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedbilevel.algorithms.parts.layers import Ask, Asked, Kept, Layer
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.config import positive, positive_integer
from fedbilevel.core.errors import require
from fedbilevel.core.facts import Asks
from fedbilevel.core.fed import Total
from fedbilevel.core.field_types import Number

ROUNDING = 16  # the largest relative error of a sum of weights, in units of the machine precision
SINGLE = "the client sends what it would also send without this layer, and the server "


class RobustRule(Layer):
    """Base class of robust rules, which replace the mean of replies."""

    place, cannot = "rule", "cannot have a robust rule"
    excludes: ClassVar[Mapping[str, str]] = {"memory": "the server would have to keep the last reply of every client"}

    def fits(self, method: Algorithm) -> None:
        late = "a method that waits for all replies: a rule needs the replies of one exchange"
        require(not method.asks.asynchronous, f"{self.label}, its method", f"{method.label} with first replies", late)

    @property
    def _least(self) -> int:
        """Return the least number of replies for which the rule is defined."""
        return 1

    def asks(self, inside: Asks) -> Asks:
        return inside._replace(replies=max(self._least, inside.replies))

    def exchange(self, asked: Asked, kept: Kept, ask: Ask) -> tuple[Total, Kept]:
        updates, weights = ask(replace(asked, each=True)).rows
        rows = jax.vmap(lambda update: ravel_pytree(update)[0])(updates)
        _, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], updates))
        return Total.of_mean(unravel(self.of(rows, weights))), kept

    @abstractmethod
    def of(self, rows: Array, weights: Array) -> Array:
        """Compute the vector that replaces the mean of the replies.

        Here P is the number of clients, and d the number of entries of a reply. `rows` has the shape (P, d), with a
        reply in each row. `weights` has the shape (P,), and the result has the shape (d,).
        """


def require_replies(path: str, bad: int, weights: Array, least: int) -> Array:
    """Refuse a number of bad clients if an exchange has too few replies for it; return a factor for the rule's result.

    The factor is 1 if there are enough replies. Rows with the weight 0 only pad the cohort, and which rows these are is
    known only when the rule is computed. If too few rows are left without them, the factor is NaN.

    Args:
        path: the name of the field in messages.
        bad: the number of bad clients.
        weights: the weights of the rows, as an array of shape (P,).
        least: the number of replies that the rule needs.
    """
    allowed = f"smaller: it needs {least} replies, and an exchange has {len(weights)}"
    require(len(weights) >= least, path, bad, allowed)
    return jnp.where(jnp.sum(weights > 0) >= least, 1.0, jnp.nan)


class TrimmedMean(RobustRule):
    """Take the mean of each entry without its largest and its smallest values. The weights of clients are ignored.

    Args:
        trim: the number of values that are left out at each end. An exchange needs at least 2·trim + 1 replies.
    """

    kind = "trimmed_mean"
    tells = f"{SINGLE}compares the single replies, instead of using only their weighted sum"
    trim: int = positive_integer(default=1)

    @property
    def _least(self) -> int:
        return 2 * self.trim + 1

    def of(self, rows: Array, weights: Array) -> Array:
        enough = require_replies("TrimmedMean.trim", self.trim, weights, self._least)
        here = weights > 0
        count = jnp.sum(here)
        ascending = jnp.sort(jnp.where(here[:, None], rows, jnp.inf), axis=0)  # rows that pad the cohort come last
        place = jnp.arange(len(rows))[:, None]
        inside = (place >= self.trim) & (place < count - self.trim)
        return enough.astype(rows.dtype) * jnp.sum(jnp.where(inside, ascending, 0), axis=0) / jnp.sum(inside)


class Median(RobustRule):
    """Take the weighted median of each entry: the least value such that half of all weight is at or below it."""

    kind = "median"
    tells = f"{SINGLE}takes each entry from the reply of one client, which the next message can show to other clients"

    def of(self, rows: Array, weights: Array) -> Array:
        order = jnp.argsort(rows, axis=0)
        below = jnp.cumsum(weights[order], axis=0)
        rounding = ROUNDING * jnp.finfo(below.dtype).eps  # else five of ten weights of 0.1 may be less than half
        half = jnp.argmax(below >= below[-1:] * (0.5 - rounding), axis=0)
        return jnp.take_along_axis(jnp.take_along_axis(rows, order, 0), half[None], 0)[0]


class Krum(RobustRule):
    """Take the reply with the least sum of squared distances to its P − bad − 2 nearest replies.

    The weights of clients are ignored.

    Args:
        bad: the number of clients that may be bad. An exchange needs at least 2·bad + 3 replies.
    """

    kind = "krum"
    tells = f"{SINGLE}uses the whole reply of one client, which the next message can show to other clients"
    bad: int = positive_integer(default=1)

    @property
    def _least(self) -> int:
        return 2 * self.bad + 3

    def of(self, rows: Array, weights: Array) -> Array:
        enough = require_replies("Krum.bad", self.bad, weights, self._least)
        here = weights > 0
        squares = jax.lax.map(lambda row: jnp.sum((rows - row) ** 2, axis=1), rows)
        others = here[None] & ~jnp.eye(len(rows), dtype=bool)
        near = jnp.sort(jnp.where(others, squares, jnp.inf), axis=1)
        among = jnp.arange(len(rows)) < jnp.sum(here) - self.bad - 2
        score = jnp.sum(jnp.where(among, near, 0), axis=1)
        return enough.astype(rows.dtype) * rows[jnp.argmin(jnp.where(here & jnp.isfinite(score), score, jnp.inf))]


class CentredClipping(RobustRule):
    """Move from the median towards the replies in a few steps, along the weighted mean of clipped differences.

    In each step, the differences of all replies from the present point are clipped to the length `radius`.

    Args:
        radius: the largest length of a difference; longer differences are shortened to it.
        steps: the number of steps.
    """

    kind = "centred_clipping"
    tells = f"{SINGLE}compares the single replies, instead of using only their weighted sum"
    radius: Number = positive(default=1.0)
    steps: int = positive_integer(default=3)

    def of(self, rows: Array, weights: Array) -> Array:
        finite = jnp.all(jnp.isfinite(rows), axis=1)
        rows, shares = jnp.where(finite[:, None], rows, 0), (jnp.where(finite, weights, 0) / jnp.sum(weights))[:, None]

        def step(_: Any, center: Array) -> Array:
            away = rows - center
            length = jnp.linalg.norm(away, axis=1, keepdims=True)
            kept = jnp.minimum(1, self.radius / jnp.where(length > 0, length, 1))
            return center + jnp.sum(shares * kept * away, axis=0)

        return jax.lax.fori_loop(0, self.steps, step, Median().of(rows, weights))
