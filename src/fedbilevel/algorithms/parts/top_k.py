"""Compress replies by top-k: clients send the largest changes of their replies' entries (see memory.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedbilevel.algorithms.parts.memory import COUNTS, Compressor
from fedbilevel.core.config import static
from fedbilevel.core.errors import require
from fedbilevel.core.fed import Coded
from fedbilevel.core.tree import PyTree


@dataclass(frozen=True)
class Scatter:
    """Put values at their places in a vector of zeros. Places out of range are ignored: a site may send any number."""

    unravel: Callable[[Array], PyTree]
    size: int

    def __call__(self, wire: tuple[Array, Array]) -> PyTree:
        values, places = wire
        zeros = jnp.zeros(self.size, values.dtype)
        return self.unravel(zeros.at[places].set(values, mode="drop", wrap_negative_indices=False))


class TopK(Compressor):
    """Let clients send only the largest changes, in absolute value, of the entries of their replies.

    Args:
        share: the share of a reply's entries that are sent, above 0 and at most 1.
    """

    kind = "top_k"
    tells = (
        "the client sends the largest entries of the difference between its new reply and what the server has received "
        f"of its earlier replies, and says which entries these are, {COUNTS}"
    )

    share: float = static(default=0.1)

    def validate(self) -> None:
        number = isinstance(self.share, int | float) and not isinstance(self.share, bool)
        require(number and 0 < self.share <= 1, "TopK.share", self.share, "a number above 0, at most 1")

    def coded(self, tree: PyTree) -> Coded:
        vector, unravel = ravel_pytree(tree)
        count = math.ceil(round(self.share * vector.size, 6))  # 0.07 · 100 is 7.000000000000001
        _, places = jax.lax.top_k(jnp.abs(vector), min(max(1, count), vector.size))
        return Coded((vector[places], places.astype(jnp.int32)), Scatter(unravel, vector.size))
