"""Find the penalties and coefficients of many features, with messages about as long as the coefficients.

The penalties are expressed by the shares 1/(1 + x_l) of `linear`, and the variables of its models are w_kl s_l √(1 +
x_l). With these variables, the Hessians of the training losses have the diagonal 2κ for all scales and penalties.
First, fb.SimFBO searches for the shares, with full batches, steps that adapt, and one exchange a round
(`share_search`). Then model K is trained with these shares by Newton's method with conjugate gradient (`Newton`), which
needs an exchange for each gradient and for each product with the Hessian. It starts from the mean of the models of the
folds.
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
"""The solver for the steps of Newton's method.

It is not a field, since sites compare fields that are counts with their limits on work.

A smaller tolerance gives fewer steps, but more products with the Hessian in all.
"""


def share_search() -> Algorithm:
    """Return the method that searches for the shares 1/(1 + x)."""
    return fb.layered(fb.SimFBO(local_steps=1, batch_size=None), fb.AdaptiveSteps(x_lr=0.02))  # a share is from 0 to 1


def in_shares(outer: Any, inner: Any, of: Any, largest: float | None = None) -> fb.Bilevel:
    """Rewrite a problem in the shares 1/(1 + x), and in coefficients divided by the roots of their shares.

    Args:
        outer, inner: the losses as functions of x and the coefficients.
        of: the index of each feature's share, with an entry for each feature.
        largest: the upper bound of x; the lower bound is 1/largest. None: the shares have no bounds.
    """

    def changed(loss: Callable[..., Array]) -> fb.WholeLoss:
        def of_shares(shares: Array, y: Any, rows: Any, valid: Array) -> Array:
            return loss(1 / shares - 1, {**y, "coef": y["coef"] * jnp.sqrt(shares[of])}, rows, valid)

        return fb.WholeLoss(of_shares)

    within = None if largest is None else fb.projections.box(1 / (1 + largest), largest / (1 + largest))
    return fb.Bilevel(changed(outer), changed(inner), project_x=within)


class Trained(NamedTuple):
    """The server's state: `y` has the smallest ‖∇G‖ so far, and clients evaluate `trial` next."""

    x: Any
    y: Any
    trial: Any
    step: Any  # Newton's step from y
    norm: Array  # ‖∇G‖ at y
    first: Array  # ‖∇G‖ at the start
    length: Array  # the length of the step from y to `trial`, as a share of Newton's step


class Newton(Algorithm):
    """The method that minimises the inner loss over y at a fixed x, by Newton's method with conjugate gradient.

    It makes one step in each round.

    If a step does not make ‖∇G‖ smaller, half of it is tried, and so on.
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

        # For a system with the right side 0, the solver asks for no product. This is used if the trial is not better,
        # since the step is then known, and if the gradient is small enough, since no step follows.
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
        """Reply with ∇y g, in the structure of y."""
        return Reply(_slope(client, message[0])(message[1]), gradients=1)

    @phase
    def product(self, client: Client, message: tuple[Any, Any, Any], key: Array) -> Reply:
        """Reply with the product of ∇²yy g and a direction, in the structure of y."""
        x, y, direction = message
        return Reply(jax.jvp(_slope(client, x), (y,), (direction,))[1], hvps=1)


def _slope(client: Client, x: Any) -> Callable[[Any], Any]:
    """Return the function y -> ∇y g(x, y) on all samples of a client."""
    batch = client.inner_batch(jax.random.key(0), None)
    return jax.grad(lambda y: client.problem.inner(x, y, batch))
