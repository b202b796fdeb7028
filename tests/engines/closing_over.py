"""Losses and a metric that close over an array, for tests of what a run keeps of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array


class Functions(NamedTuple):
    """Two losses of samples (n, 3), for an x of any length and a y of three entries, and a metric."""

    outer: Callable[..., Array]
    inner: Callable[..., Array]
    metric: Callable[..., Array]


def closing_over(scale: Array) -> Functions:
    """Return new functions that all close over `scale`, which has three entries."""

    def outer(x: Array, y: Array, batch: Array) -> Array:
        return jnp.mean((batch @ (scale * y) - jnp.sum(x)) ** 2)

    def inner(x: Array, y: Array, batch: Array) -> Array:
        return outer(x, y, batch) + y @ y

    def metric(x: Array, y: Array) -> Any:
        return scale @ y

    return Functions(outer, inner, metric)
