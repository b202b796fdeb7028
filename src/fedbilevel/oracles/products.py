"""Compute products with second derivatives of the inner loss by a single pass each, without forming a Hessian."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
import optax
from jax import Array

from fedbilevel.core.errors import ConfigurationError, FedbilevelError
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import XYV, PyTree

NOT_DIFFERENTIABLE = re.compile("differentiat|support JVP", re.IGNORECASE)
"""Words that JAX's errors contain for a function without a derivative, but not for wrong shapes."""
FIRST_DERIVATIVES = "fb.F2SA, fb.MEHA and fb.RAFBO need only first derivatives"


class Directions(NamedTuple):
    """Hold the directions for x, y and v along which single-loop methods step, and both losses on the same batches."""

    step: XYV
    outer_loss: Array
    inner_loss: Array


@contextmanager
def second_derivatives() -> Iterator[None]:
    """Explain the error that JAX raises in the `with` block if the gradient of a loss cannot be differentiated.

    Raises:
        ConfigurationError: JAX cannot differentiate the gradient, for example because a `jax.custom_vjp` computes it.
    """
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        cause = str(error).partition("\n")[0].rstrip(".")
        if isinstance(error, FedbilevelError) or not NOT_DIFFERENTIABLE.search(cause):
            raise
        text = f"JAX cannot differentiate the gradient of a loss, which this method needs: {cause}"
        raise ConfigurationError(f"{text}. {FIRST_DERIVATIVES}") from error


def hess_v(problem: Problem, x: PyTree, y: PyTree, v: PyTree, batch: PyTree) -> PyTree:
    """Return ∇²yy g(x, y)·v, of the shape of y, by a single forward-over-reverse pass."""
    return hess_of(lambda y: problem.inner(x, y, batch), y, v)


@second_derivatives()
def hess_of(loss: Callable[[PyTree], Array], y: PyTree, v: PyTree) -> PyTree:
    """Return ∇² loss(y)·v, of the shape of y, by a single forward-over-reverse pass."""
    return jax.jvp(jax.grad(loss), (y,), (v,))[1]


def cross_v(problem: Problem, x: PyTree, y: PyTree, v: PyTree, batch: PyTree) -> PyTree:
    """Return ∇²xy g(x, y)·v, of the shape of x: the gradient in x of ⟨∇y g(x, y), v⟩."""
    return cross_of(lambda x, y: problem.inner(x, y, batch), x, y, v)


@second_derivatives()
def cross_of(loss: Callable[[PyTree, PyTree], Array], x: PyTree, y: PyTree, v: PyTree) -> PyTree:
    """Return ∇²xy loss(x, y)·v, of the shape of x: the gradient in x of ⟨∇y loss(x, y), v⟩."""
    return jax.grad(lambda x: optax.tree.vdot(jax.grad(loss, 1)(x, y), v))(x)


@second_derivatives()
def hypergradient(
    problem: Problem, x: PyTree, y: PyTree, v: PyTree, outer_batch: PyTree, inner_batch: PyTree
) -> tuple[Array, PyTree]:
    """Return f(x, y) and ∇x f − ∇²xy g·v, in x's shape, by one reverse pass. If v is None, leave out ∇²xy g·v."""

    def surrogate(x: PyTree) -> tuple[Array, Array]:
        loss = problem.outer(x, y, outer_batch)
        if v is None:
            return loss, loss
        return loss - optax.tree.vdot(jax.grad(problem.inner, 1)(x, y, inner_batch), v), loss

    h, loss = jax.grad(surrogate, has_aux=True)(x)
    return loss, h


@second_derivatives()
def directions(problem: Problem, iterate: XYV, outer_batch: PyTree, inner_batch: PyTree) -> Directions:
    """Return the three directions at (x, y, v), with the same two batches for all of them.

        x: ∇x f − ∇²xy g·v        y: ∇y g        v: ∇²yy g·v − ∇y f

    The scalar f(x, y) − ⟨∇y g(x, y), v⟩ has the direction of x as its gradient in x, and the negative direction of v as
    its gradient in y. One reverse pass computes both, with ∇y g as a by-product.
    """

    def surrogate(x: PyTree, y: PyTree) -> tuple[Array, tuple[PyTree, Array, Array]]:
        inner_loss, grad_y = jax.value_and_grad(problem.inner, 1)(x, y, inner_batch)
        outer_loss = problem.outer(x, y, outer_batch)
        return outer_loss - optax.tree.vdot(grad_y, iterate.v), (grad_y, outer_loss, inner_loss)

    (dx, minus_dv), (dy, outer_loss, inner_loss) = jax.grad(surrogate, (0, 1), has_aux=True)(iterate.x, iterate.y)
    return Directions(XYV(dx, dy, optax.tree.scale(-1, minus_dv)), outer_loss, inner_loss)


def independent_directions(
    problem: Problem,
    iterate: XYV,
    inner_batch: PyTree,
    system_batches: tuple[PyTree, PyTree],
    outer_batches: tuple[PyTree, PyTree],
) -> Directions:
    """Return the three descent directions at (x, y, v), each on separately drawn samples.

    The directions of v and of x need ∇f and a product with ∇²g, and therefore a pair (outer batch, inner batch).

    Args:
        problem: the problem.
        iterate: (x, y, v).
        inner_batch: the samples for the direction of y, ζ in the papers.
        system_batches: the pair of batches for the direction of v, ψ in the papers.
        outer_batches: the pair of batches for the direction of x, ξ in the papers.
    """
    x, y, v = iterate
    inner_loss, dy = jax.value_and_grad(problem.inner, 1)(x, y, inner_batch)
    grad_f_y = jax.grad(problem.outer, 1)(x, y, system_batches[0])
    outer_loss, grad_f_x = jax.value_and_grad(problem.outer)(x, y, outer_batches[0])
    dv = optax.tree.sub(hess_v(problem, x, y, v, system_batches[1]), grad_f_y)
    dx = optax.tree.sub(grad_f_x, cross_v(problem, x, y, v, outer_batches[1]))
    return Directions(XYV(dx, dy, dv), outer_loss, inner_loss)
