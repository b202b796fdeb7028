"""A client's own loops in the words of the federation's, so that one solver serves both."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.tree import PyTree


class Alone:
    """Loops within one client, as `Fed.repeat` has them across the federation."""

    @staticmethod
    def repeat(n: Any, body: Callable[..., Any], carry: PyTree, key: Array, *, until: Any = None) -> PyTree:
        if until is None:  # a loop of known length, if n is one
            return jax.lax.fori_loop(0, n, lambda i, carry: body(Alone, carry, jax.random.fold_in(key, i)), carry)

        def unfinished(loop: tuple[Array, PyTree]) -> Array:
            return (loop[0] < n) & ~until(loop[1])

        def step(loop: tuple[Array, PyTree]) -> tuple[Array, PyTree]:
            return loop[0] + 1, body(Alone, loop[1], jax.random.fold_in(key, loop[0]))

        return jax.lax.while_loop(unfinished, step, (jnp.asarray(0), carry))[1]
