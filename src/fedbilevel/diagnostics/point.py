"""Where a problem is looked at: x and y in float64, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.core.client import require_clients
from fedbilevel.core.errors import require
from fedbilevel.core.problem import Bilevel, check_losses
from fedbilevel.core.tree import PyTree, is_floating, join, nonfinite_leaves, split


@dataclass(frozen=True)
class DifferentiablePoint:
    """A problem in the floating arrays of x and y alone, and those arrays in float64."""

    problem: Any
    x: PyTree
    y: PyTree
    x_fixed: PyTree
    single: bool  # whether an array was given in less than float64

    def like_given(self, x: PyTree) -> PyTree:
        """x with what is no variable in it, as the user knows it."""
        return join(x, self.x_fixed)


def point(problem: object, clients: object, x: PyTree, y: PyTree) -> DifferentiablePoint:
    """Check and convert; to be called with float64 switched on."""
    require(
        isinstance(problem, Bilevel), "problem", type(problem).__name__, "a Bilevel, Minimax or Compositional problem"
    )
    assert isinstance(problem, Bilevel)
    clients = require_clients(clients)
    given = [leaf for leaf in jax.tree.leaves((x, y)) if is_floating(leaf)]
    single = any(jnp.asarray(leaf).dtype != jnp.float64 for leaf in given)
    (x, x_fixed), (y, y_fixed) = split(x), split(y)
    for name, tree in (("x", x), ("y", y)):
        require(bool(jax.tree.leaves(tree)), name, tree, "a pytree with at least one floating array")
        require(not nonfinite_leaves(tree), name, nonfinite_leaves(tree), "finite in every leaf")
    x, y = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (x, y))
    problem = problem.with_fixed(x_fixed, y_fixed)
    check_losses(problem, x, y, clients.outer.row(0), clients.inner.row(0))
    return DifferentiablePoint(problem, x, y, x_fixed, single)


def same_shapes(name: str, got: PyTree, like: PyTree) -> None:
    """Refuse a tree that differs from `like` in structure or shapes."""
    same = str(jax.tree.structure(got)) == str(jax.tree.structure(like)) and _shapes(got) == _shapes(like)
    require(same, name, _shapes(got), f"like x, {_shapes(like)}")


def _shapes(tree: PyTree) -> str:
    return str(jax.tree.map(jnp.shape, tree))
