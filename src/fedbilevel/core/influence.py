"""Does x's gradient vanish by structure? Read off the traced losses; nothing is computed.

A derivative is there if it depends on the number that it is multiplied by: where a loss has no path to x, or none that
lets a derivative through, its derivative is a constant 0 that no factor enters.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import Array
from jax.interpreters.partial_eval import dce_jaxpr

from fedbilevel.core.problem import Loss, Minimax, Problem, SimpleBilevel, SingleLevel
from fedbilevel.core.tree import PyTree


def why_it_vanishes(problem: Problem, x: PyTree, y: PyTree, outer_batch: PyTree, inner_batch: PyTree) -> str | None:
    """Say why x's gradient, ∇x F − ∇²xy G·v with v = 0 where ∇y F is, is 0 everywhere, or return None.

    Batches may be shapes.
    """
    outer = problem.outer, x, y, outer_batch
    inner = problem.inner, x, y, inner_batch
    if _slopes(0, *outer):
        return None
    if isinstance(problem, SimpleBilevel):
        moves = problem.subgradient is not None or _slopes(0, *inner)
        return None if moves else "no loss has a derivative in x"
    if isinstance(problem, SingleLevel | Minimax):
        return "the loss has no derivative in x"
    if not _slopes(1, *outer):
        return "the outer loss has a derivative neither in x nor in y"
    if not _meets(*inner):
        return "the outer loss has no derivative in x, and the inner loss's derivative in y has none"
    return None


def _slopes(argument: int, loss: Loss, x: PyTree, y: PyTree, batch: PyTree) -> bool:
    """Whether a loss has a derivative in x (argument 0) or in y (1)."""

    def slope(factor: Array, x: PyTree, y: PyTree, batch: PyTree) -> PyTree:
        return jax.vjp(lambda x, y: loss(x, y, batch), x, y)[1](factor)[argument]

    return _used(slope, jax.eval_shape(loss, x, y, batch), x, y, batch)


def _meets(loss: Loss, x: PyTree, y: PyTree, batch: PyTree) -> bool:
    """Whether a loss's derivative in y has a derivative in x."""

    def product(v: PyTree, x: PyTree, y: PyTree, batch: PyTree) -> PyTree:
        return jax.vjp(lambda x: jax.grad(loss, 1)(x, y, batch), x)[1](v)

    return _used(product, y, x, y, batch)


def _used(function: Callable[..., PyTree], *arguments: PyTree) -> bool:
    """Whether any result of the function depends on its first argument."""
    traced = jax.make_jaxpr(function)(*arguments).jaxpr
    _, used = dce_jaxpr(traced, [True] * len(traced.outvars))
    return any(used[: len(jax.tree.leaves(arguments[0]))])
