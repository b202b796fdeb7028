"""Find the penalties and coefficients of many features, with messages that are as long as the coefficients.

The penalties are chosen in the shares 1/(1 + x_l), and the models of `linear` have the variables w_kl s_l √(1 + x_l).
Their training losses then have Hessians with the diagonal 2κ, whatever scales and penalties are. fb.SimFBO searches for
the shares, with full batches and steps that adapt, one exchange a round (`share_search`). Model K is then trained at
these shares by Newton's method with conjugate gradient, one exchange for each gradient and each product with the
Hessian (`Newton`). It starts from the mean of the models of the folds.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

import fedbilevel as fb
from fedbilevel.authoring import Algorithm, Client, Fed, Reply, phase
from fedbilevel.estimators.newton_end import ended, exact

PRODUCTS = fb.parts.CG(max_steps=500, tolerance=0.1)
"""The solver of each of Newton's steps; no field, since sites take fields that are counts as their own work.

With more accurate steps there are fewer of them, but more products in all."""


def share_search() -> Algorithm:
    """Return the method that searches for the shares."""
    return fb.layered(fb.SimFBO(local_steps=1, batch_size=None), fb.AdaptiveSteps(x_lr=0.02))  # a share is from 0 to 1


def in_shares(outer: Any, inner: Any, of: Any, largest: float | None = None) -> fb.Bilevel:
    """State a problem in the shares 1/(1 + x), and in coefficients divided by the roots of their shares.

    Args:
        outer, inner: the losses of x and the coefficients.
        of: the number of each feature's share, (features,).
        largest: the bound of x, and 1/largest the other; None: the shares have no bounds.
    """

    def changed(loss: Callable[..., Array]) -> fb.WholeLoss:
        def of_shares(shares: Array, y: Any, rows: Any, valid: Array) -> Array:
            return loss(1 / shares - 1, {**y, "coef": y["coef"] * jnp.sqrt(shares[of])}, rows, valid)

        return fb.WholeLoss(of_shares)

    within = None if largest is None else fb.projections.box(1 / (1 + largest), largest / (1 + largest))
    return fb.Bilevel(changed(outer), changed(inner), project_x=within)


class Trained(NamedTuple):
    """Hold the server's state: `y` has the smallest ‖∇G‖ so far, and clients evaluate `trial` next."""

    x: Any
    y: Any
    trial: Any
    step: Any  # Newton's step from y
    norm: Array  # ‖∇G‖ at y
    first: Array  # the same at the start
    length: Array  # of the step from y to `trial`, as a share of Newton's


class Newton(Algorithm):
    """Minimise the inner loss over y at a fixed x, by Newton's method with conjugate gradient, a step a round.

    A step is halved until it makes ‖∇G‖ smaller.
    """

    def init(self, x: Any, y: Any) -> Trained:
        one = jnp.ones((), jnp.result_type(float))
        return Trained(x, y, y, optax.tree.zeros_like(y), jnp.finfo(one.dtype).max * one, 0 * one, one)

    def round(self, fed: Fed, state: Trained, key: Array) -> Trained:
        gradient = fed.mean(self.gradient, (state.x, state.trial), key)
        norm = optax.tree.norm(gradient)
        first = jnp.where(state.first == 0, norm, state.first)
        better = norm < state.norm
        y = optax.tree.where(better, state.trial, state.y)

        def product(fed: Fed, v: Any, key: Array, _: Any) -> Any:
            return fed.mean(self.product, (state.x, y, v), key)

        # Of a system with the right side 0, no product is asked for. If the trial is no better, the step is known; if
        # its gradient is small enough, there is no further step.
        right = jax.tree.map(lambda leaf: jnp.where(better & ~exact(norm, first), leaf, 0), gradient)
        step = optax.tree.where(better, PRODUCTS.solve(fed, product, right, key, 1).v, state.step)
        length = jnp.where(better, 1.0, state.length / 2)
        return Trained(
            x=state.x,
            y=y,
            trial=optax.tree.add_scale(y, -length, step),
            step=step,
            norm=jnp.where(better, norm, state.norm),
            first=first,
            length=length,
        )

    def finished(self, state: Trained) -> Any:
        return ended(state.norm, state.first, state.length)

    @phase
    def gradient(self, client: Client, message: tuple[Any, Any], key: Array) -> Reply:
        """Reply with ∇y g, like y."""
        return Reply(_slope(client, message[0])(message[1]), gradients=1)

    @phase
    def product(self, client: Client, message: tuple[Any, Any, Any], key: Array) -> Reply:
        """Reply with the product of ∇²yy g and a direction, like y."""
        x, y, direction = message
        return Reply(jax.jvp(_slope(client, x), (y,), (direction,))[1], hvps=1)


def _slope(client: Client, x: Any) -> Callable[[Any], Any]:
    """Return the function y -> ∇y g(x, y) on all samples of a client."""
    batch = client.inner_batch(jax.random.key(0), None)
    return jax.grad(lambda y: client.problem.inner(x, y, batch))
