"""Approximate products with second derivatives by differences of gradients, if exact products cost too much or fail.

Let η be the length of a difference and ε the machine precision, and suppose that third derivatives are about as large
as second derivatives. A central difference in y has a truncation error of η²/6 and a rounding error of ε(1 + ‖y‖)/η.
Their sum is least near η = (ε(1 + ‖y‖))^⅓. A forward difference in x has the errors η/2 and ε(1 + ‖x‖)/η, whose sum is
least near η = (ε(1 + ‖x‖))^½.
"""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from fedbilevel.core.algorithm import Part
from fedbilevel.core.config import positive
from fedbilevel.core.fed import Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, epsilon, move
from fedbilevel.oracles.fixed_x import inner_loss_on


class Differences(Part):
    """Approximate products of second derivatives with a vector v by two gradients, at y + μv and y − μv.

    Use these central differences for losses that JAX cannot differentiate twice. The truncation error grows as the
    square of the difference's length. A very short difference loses digits to rounding.

    Args:
        perturbation: the length of the difference on each side of y, ‖μv‖; None: (ε(1 + ‖y‖))^⅓, which balances the
            errors of truncation and rounding.
    """

    kind: ClassVar[str] = "differences"

    perturbation: float | None = positive(default=None, optional=True)

    def counted(self, reply: Reply) -> Reply:
        """Return the reply with each second-order product counted as two gradients."""
        return reply._replace(gradients=reply.gradients + 2 * reply.hvps, hvps=0)

    def hess_v(self, problem: Problem, x: PyTree, y: PyTree, v: PyTree, batch: PyTree) -> PyTree:
        """Return ∇²yy g·v ≈ [∇y g(x, y + μv) − ∇y g(x, y − μv)]/2μ on a batch, in the shape of y, with μ by `step`."""
        return self.hess_of(lambda y: problem.inner(x, y, batch), y, v)

    def hess_of(
        self, loss: Callable[[PyTree], Array], y: PyTree, v: PyTree, share: float | Array | None = None
    ) -> PyTree:
        """Return ∇²loss(y)·v ≈ [∇loss(y + μv) − ∇loss(y − μv)]/2μ for a function of y alone, in the shape of y.

        Here μ is `step(y, v)`, times `share` if this is a number. One `vmap` computes both gradients, so that values
        that do not depend on y, such as features, are computed once.

        Args:
            loss: the function, which returns a scalar.
            y: the point.
            v: a vector in the shape of y.
            share: the length of the difference as a share of the usual length; None: the usual length.
        """
        mu = self.step(y, v) if share is None else share * self.step(y, v)
        gradients = jax.vmap(lambda size: jax.grad(loss)(move(y, size, v)))(jnp.stack([mu, -mu]))
        return jax.tree.map(lambda ends: ((ends[0] - ends[1]) / (2 * mu)).astype(ends.dtype), gradients)

    def cross_v(self, problem: Problem, x: PyTree, y: PyTree, v: PyTree, batch: PyTree) -> PyTree:
        """Return ∇²xy g·v ≈ ∇x [g(x, y + μv) − g(x, y − μv)]/2μ, of the shape of x, with μ by `step`.

        Values that do not depend on y, such as features, are computed and differentiated once for both gradients.
        """
        on_batch = inner_loss_on(problem, x, y, batch)
        return on_batch.pull(self.cross_of(on_batch.of_y, on_batch.features, y, v))

    def cross_of(self, loss: Callable[[PyTree, PyTree], Array], x: PyTree, y: PyTree, v: PyTree) -> PyTree:
        """Return ∇²xy loss(x, y)·v, of the shape of x, by differences of ∇x loss at y ± μv, with μ by `step`."""
        mu = self.step(y, v)
        return jax.grad(lambda x: (loss(x, move(y, mu, v)) - loss(x, move(y, -mu, v))) / (2 * mu))(x)

    def hypergradient(
        self, problem: Problem, x: PyTree, y: PyTree, v: PyTree, outer_batch: PyTree, inner_batch: PyTree
    ) -> tuple[Array, PyTree]:
        """Return f(x, y) and ∇x f − ∇²xy g·v, of the shape of x. If v is None, leave out ∇²xy g·v."""
        loss, f_x = jax.value_and_grad(problem.outer)(x, y, outer_batch)
        return loss, f_x if v is None else optax.tree.sub(f_x, self.cross_v(problem, x, y, v, inner_batch))

    def step(self, y: PyTree, v: PyTree) -> Array:
        """Return μ, the length of the difference divided by ‖v‖.

        For v = 0, return the length itself; the difference is then 0 anyway. The precision ε is that of y, since only y
        is moved.
        """
        size = optax.tree.norm(v)
        length = jnp.cbrt(epsilon(y) * (1 + optax.tree.norm(y)))
        return (length if self.perturbation is None else self.perturbation) / jnp.where(size > 0, size, 1)


def value_and_derivative(function: Callable[[PyTree], PyTree], y: PyTree, v: PyTree) -> tuple[PyTree, PyTree]:
    """Return function(y) and its derivative along v, as `jax.jvp` does, for measurements of curvature.

    If JAX cannot differentiate the function, such as the gradient of a loss with a `jax.custom_vjp`, the derivative is
    a central difference. Methods do not fall back to this: their fields say how they compute products.
    """
    try:  # within `jit`, so that an attempt that fails has no effects
        value, derivative = jax.jit(lambda y, v: jax.jvp(function, (y,), (v,)))(y, v)
        return value, derivative
    except (TypeError, ValueError):  # if the function itself is wrong, its error is raised again below
        value, mu = function(y), Differences().step(y, v)
        ends = function(move(y, mu, v)), function(move(y, -mu, v))
        return value, jax.tree.map(lambda high, low: ((high - low) / (2 * mu)).astype(high.dtype), *ends)


def coordinate_slopes(
    function: Callable[[PyTree], PyTree], x: PyTree, weight: PyTree, places: Array, mu: float | Array | None = None
) -> PyTree:
    """Return Σ_p ⟨δ_p, weight⟩ e_p over the indices p, where δ_p = [function(x + μ e_p) − function(x)]/μ.

    Here e_p is the unit vector of entry p of x. The result has the shape of x, and is 0 at all other indices.
    `function` is evaluated for one index after the other, so that memory does not grow with the number of indices.

    Args:
        function: returns a tree of the shape of `weight`.
        places: different indices into the flattened x, as an array of shape (n,).
        mu: μ; None: (ε(1 + ‖x‖))^½, which balances the errors of truncation and rounding.
    """
    flat, unravel = ravel_pytree(x)
    here = function(x)
    length = jnp.sqrt(epsilon(x, here) * (1 + jnp.linalg.norm(flat))) if mu is None else jnp.asarray(mu)

    def slope(place: Array) -> Array:
        there = function(unravel(flat.at[place].add(length.astype(flat.dtype))))
        return optax.tree.vdot(optax.tree.sub(there, here), weight) / length

    slopes = lax.map(slope, places)
    along: PyTree = unravel(jnp.zeros_like(flat).at[places].set(slopes.astype(flat.dtype)))
    return along
