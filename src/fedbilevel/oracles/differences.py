"""Second derivatives by differences of first ones, for whoever cannot afford, or cannot have, the exact products.

With η the length of a step and third derivatives of about the size of second ones, a central difference is off by η²/6
for what it leaves out and by ε(1 + ‖y‖)/η for rounding, ε being the precision of the numbers; their sum is least near
η = (ε(1 + ‖y‖))^⅓. Likewise a forward difference, off by η/2 and ε(1 + ‖x‖)/η, wants η = (ε(1 + ‖x‖))^½.
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
    """Products with second derivatives by central differences of gradients along v: each costs two gradients.

    For losses that JAX cannot differentiate twice. The error grows as the square of the length of the differences; very
    short ones are off by rounding.

    Args:
        perturbation: the length of differences, ‖μv‖ to either side; None: the length that balances truncation and
            rounding, (ε(1 + ‖y‖))^⅓.
    """

    kind: ClassVar[str] = "differences"

    perturbation: float | None = positive(default=None, optional=True)

    def counted(self, reply: Reply) -> Reply:
        """Count what the reply's products cost: two gradients each."""
        return reply._replace(gradients=reply.gradients + 2 * reply.hvps, hvps=0)

    def hess_v(self, problem: Problem, x: PyTree, y: PyTree, v: PyTree, batch: PyTree) -> PyTree:
        """Return ∇²yy g·v ≈ [∇y g(x, y + μv) − ∇y g(x, y − μv)]/2μ, of the shape of y."""
        return self.hess_of(lambda y: problem.inner(x, y, batch), y, v)

    def hess_of(self, loss: Callable[[PyTree], Array], y: PyTree, v: PyTree) -> PyTree:
        """Return ∇²loss(y)·v ≈ [∇loss(y + μv) − ∇loss(y − μv)]/2μ of a function of y alone, of the shape of y.

        Both gradients by one `vmap`, which computes once what does not depend on y, such as features.
        """
        mu = self.step(y, v)
        gradients = jax.vmap(lambda size: jax.grad(loss)(move(y, size, v)))(jnp.stack([mu, -mu]))
        return jax.tree.map(lambda ends: ((ends[0] - ends[1]) / (2 * mu)).astype(ends.dtype), gradients)

    def cross_v(self, problem: Problem, x: PyTree, y: PyTree, v: PyTree, batch: PyTree) -> PyTree:
        """Return ∇²xy g·v ≈ ∇x [g(x, y + μv) − g(x, y − μv)]/2μ, of the shape of x.

        What does not depend on y, as features do, is computed once for both and differentiated once.
        """
        given = inner_loss_on(problem, x, y, batch)
        return given.pull(self.cross_of(given.of_y, given.features, y, v))

    def cross_of(self, loss: Callable[[PyTree, PyTree], Array], x: PyTree, y: PyTree, v: PyTree) -> PyTree:
        """Return ∇²xy loss(x, y)·v, of the shape of x, by differences of the loss's gradient in x at y ± μv."""
        mu = self.step(y, v)
        return jax.grad(lambda x: (loss(x, move(y, mu, v)) - loss(x, move(y, -mu, v))) / (2 * mu))(x)

    def hypergradient(
        self, problem: Problem, x: PyTree, y: PyTree, v: PyTree, outer_batch: PyTree, inner_batch: PyTree
    ) -> tuple[Array, PyTree]:
        """Return f(x, y) and ∇x f − ∇²xy g·v; v = None leaves the product out."""
        loss, f_x = jax.value_and_grad(problem.outer)(x, y, outer_batch)
        return loss, f_x if v is None else optax.tree.sub(f_x, self.cross_v(problem, x, y, v, inner_batch))

    def step(self, y: PyTree, v: PyTree) -> Array:
        """Return μ; along v = 0 the difference is 0 by itself. Only y differs: its precision is what is rounded to."""
        size = optax.tree.norm(v)
        length = jnp.cbrt(epsilon(y) * (1 + optax.tree.norm(y)))
        return (length if self.perturbation is None else self.perturbation) / jnp.where(size > 0, size, 1)


def value_and_derivative(function: Callable[[PyTree], PyTree], y: PyTree, v: PyTree) -> tuple[PyTree, PyTree]:
    """Return function(y) and its derivative along v, as `jax.jvp` does, for measurements of curvature.

    Where JAX cannot differentiate the function, as the gradient of a loss with a `jax.custom_vjp`, the derivative is a
    central difference. Methods do not fall back to it: their fields say how they make products.
    """
    try:  # within `jit`, which leaves nothing behind of an attempt that fails
        value, derivative = jax.jit(lambda y, v: jax.jvp(function, (y,), (v,)))(y, v)
        return value, derivative
    except (TypeError, ValueError):  # an error that is the function's own comes again below
        value, mu = function(y), Differences().step(y, v)
        ends = function(move(y, mu, v)), function(move(y, -mu, v))
        return value, jax.tree.map(lambda high, low: ((high - low) / (2 * mu)).astype(high.dtype), *ends)


def coordinate_slopes(
    function: Callable[[PyTree], PyTree], x: PyTree, weight: PyTree, places: Array, mu: float | Array | None = None
) -> PyTree:
    """Return Σ_p ⟨δ_p, weight⟩ e_p over places p, δ_p = [function(x + μ e_p) − function(x)]/μ: like x, 0 elsewhere.

    One place after the other, each an evaluation of `function`, so that memory does not grow with their number.

    Args:
        places: (n,) different indices into the flattened x.
        mu: μ; None: the length that balances truncation and rounding, (ε(1 + ‖x‖))^½.
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
