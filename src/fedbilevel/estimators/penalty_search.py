"""Search for the penalties of models with few coefficients, by exact hypergradients from exchanged Hessians.

The models k = 1 … M of `linear` have D coefficients w_kl each. They are trained with the penalties c_l w_kl²/2, where
c_l = 2 κ x_{g(l)} and g(l) is the group of feature l. f measures the models on validation rows. In every exchange the
server sends x and w. For every model, each client replies with the gradient and the Hessian H_k of the training loss,
and with the gradient s_k of the validation loss. This is about M (D + 1) (D + 2) numbers. From the means over clients
the server computes, without a further exchange,

    the step of Newton's method    w_k ← w_k − H_k⁻¹ ∇G_k
    the hypergradient              ∂F/∂log x_g = −Σ_k Σ_{l: g(l) = g} c_l w_kl (H_k⁻¹ s_k)_l

The server can do this because ∂²G_k/∂w_kl ∂log x_g = c_l w_kl depends on no samples. A step of Newton's method is
halved until it makes ‖∇G‖ smaller. When ‖∇G‖ is small, the server moves log x within its bounds, by a projected BFGS
method. Backtracking uses F − Σ_k s_kᵀH_k⁻¹∇G_k, which is F at the minimum of G up to second order. The server can
compute how new penalties change the gradients and Hessians, so it makes a Newton step for these penalties before the
next exchange. The search ends when the projected gradient is small. Newton's method then continues until only rounding
errors are left.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.authoring import Algorithm, Client, Fed, Reply, phase, positive, static
from fedbilevel.estimators.newton_end import SHORTEST, ended

Tree = dict[str, Array]
"""The coefficients of M models: "coef", of shape (M, features), and, for models that have one, the "intercept"."""

SOLVED = 1e-7  # the largest ‖∇G‖ at which penalties are judged, in units of the first ‖∇G‖
LONGEST = 4.0  # the longest step in log x


class Derivatives(NamedTuple):
    """The means over clients that an exchange returns, for M models with D coefficients each.

    `gradient` and `hessian` do not include the penalties.
    """

    value: Array  # f, the validation loss
    slope: Array  # the gradient of f, as an array of shape (M, D)
    gradient: Array  # the gradient of the training loss, as an array of shape (M, D)
    hessian: Array  # the Hessian of the training loss, as an array of shape (M, D, D)


class Judged(NamedTuple):
    """The best penalties so far, and the numbers by which they are compared."""

    log_x: Array  # log x, with an entry for each group
    value: Array  # F
    slope: Array  # the hypergradient in log x
    curvature: Array  # BFGS's approximation of the second derivatives, as an array of shape (groups, groups)
    direction: Array  # from log_x to a point within the bounds
    length: Array  # the length of the next step along the direction
    left: Array  # the largest entry of the projected gradient
    moves: Array  # how often better penalties were found


class State(NamedTuple):
    """The server's state: `y` has the best models for x so far, and `trial` those that clients evaluate next."""

    x: Array
    y: Tree
    trial: Tree
    known: Derivatives  # the derivatives at y
    norm: Array  # ‖∇G‖ at y
    first: Array  # ‖∇G‖ at the start
    length: Array  # the length of Newton's step from y to `trial`
    best: Judged
    searching: Array


class PenaltySearch(Algorithm):
    """The method that searches for penalties by exact hypergradients and trains the models, with one exchange a round.

    Args:
        groups: g(l), the index of the penalty of each feature l, as a text. (If they were numbers, sites would compare
            them with their limits on work.)
        curvature: κ, half of the second derivative of the loss of a row, or half of an upper bound of it.
        largest: the upper bound of x; 1/largest is the lower bound.
        tolerance: the search ends when the largest entry of the projected gradient in log x, in units of f, is at most
            this number.
        search: whether to search for x; False: x is given, and only the models are trained.
    """

    groups: tuple[str, ...] = static()
    curvature: float = positive(default=1.0)
    largest: float = positive(default=999.0)
    tolerance: float = positive(default=1e-5)
    search: bool = static(default=True)

    @property
    def of(self) -> Any:
        """Return the number of each feature's group."""
        return np.array(self.groups, int)

    def init(self, x: Array, y: Tree) -> State:
        w = _rows(y)
        (models, width), groups, huge = w.shape, len(x), jnp.asarray(jnp.finfo(w.dtype).max, w.dtype)
        nothing = jnp.zeros_like(w)
        known = Derivatives(huge, nothing, nothing, jnp.zeros((models, width, width), w.dtype))
        zero, one = jnp.zeros_like(x), jnp.ones((), w.dtype)
        log_x = jnp.log(x) if self.search else zero  # given penalties may be 0, which has no logarithm
        best = Judged(log_x, huge, zero, jnp.eye(groups, dtype=x.dtype), zero, one, huge, jnp.asarray(0))
        return State(x, y, y, known, huge, 0 * huge, one, best, jnp.asarray(self.search))

    def round(self, fed: Fed, state: State, key: Array) -> State:
        mean = Derivatives(*fed.mean(self.derivatives, (state.x, state.trial), key))
        penalty, w = self.penalty(state.x, state.y), _rows(state.trial)
        norm = _norm(mean.gradient)
        mean = mean._replace(
            gradient=mean.gradient - penalty * w,
            hessian=mean.hessian - penalty[:, None] * jnp.eye(len(penalty)),
        )
        better = norm < state.norm
        y, known = optax.tree.where(better, (state.trial, mean), (state.y, state.known))
        state = state._replace(
            y=y,
            known=known,
            norm=jnp.where(better, norm, state.norm),
            first=jnp.where(state.first == 0, norm, state.first),
            length=jnp.where(better, 1.0, state.length / 2),
        )
        solved = (state.norm <= SOLVED * state.first) | (state.length < SHORTEST)
        state = optax.tree.where(solved & state.searching, self.moved(state), state)
        penalty = self.penalty(state.x, state.y)
        step = _solved(known.hessian, penalty, known.gradient + penalty * _rows(y))
        return state._replace(trial=_like(y, _rows(y) - state.length * step))

    def finished(self, state: State) -> Any:
        return ~state.searching & ended(state.norm, state.first, state.length)

    def penalty(self, x: Array, y: Tree) -> Array:
        """Return c, the penalty of each coefficient, as an array of shape (D,). It is 0 for an intercept."""
        penalty = 2 * self.curvature * x[self.of]
        return jnp.append(penalty, 0.0) if "intercept" in y else penalty

    def moved(self, state: State) -> State:
        """Judge the penalties x by the models that were trained with them. Then move x, or end the search."""
        known, penalty, w = state.known, self.penalty(state.x, state.y), _rows(state.y)
        adjoint = _solved(known.hessian, penalty, known.slope)
        value = known.value - jnp.sum(adjoint * (known.gradient + penalty * w))
        of_feature = -jnp.sum(penalty * w * adjoint, 0)[: len(self.groups)]
        slope = jax.ops.segment_sum(of_feature, self.of, len(state.x))
        best = self.judged(state.best, jnp.log(state.x), value, slope)
        searching = (best.left > self.tolerance) & (best.length >= SHORTEST)
        log_x = best.log_x + jnp.where(searching, best.length, 0.0) * best.direction
        x = jnp.exp(log_x)
        norm = _norm(known.gradient + self.penalty(x, state.y) * w)
        return state._replace(x=x, norm=norm, length=jnp.ones_like(state.length), best=best, searching=searching)

    def judged(self, best: Judged, log_x: Array, value: Array, slope: Array) -> Judged:
        """Accept new penalties if they are the best so far; otherwise shorten the step that led to them."""
        step, bound = log_x - best.log_x, jnp.log(self.largest)
        expected = jnp.sum(best.slope * step)  # the expected change of F, to first order
        fits = value <= best.value + 1e-4 * expected
        curvature = _updated(best.curvature, step, slope - best.slope, best.moves)
        curvature = jnp.where(best.moves > 0, curvature, jnp.max(jnp.abs(slope)) * curvature)
        left = jnp.clip(log_x - slope, -bound, bound) - log_x
        direction = _direction(curvature, log_x, slope, left != 0, bound)
        taken = Judged(
            log_x, value, slope, curvature, direction, jnp.ones_like(value), jnp.max(jnp.abs(left)), best.moves + 1
        )
        parabola = -expected / (2 * (value - best.value - expected))  # the minimum of a parabola through both values
        shorter = best._replace(length=best.length * jnp.clip(jnp.nan_to_num(parabola, nan=0.1), 0.1, 0.5))
        return optax.tree.where(fits, taken, shorter)

    @phase
    def derivatives(self, client: Client, message: tuple[Array, Tree], key: Array) -> Reply:
        """Reply with f and its gradient, and the gradients and Hessians of g, for each model."""
        x, y = message
        inner, outer = client.inner_batch(key, None), client.outer_batch(key, None)

        def slopes(w: Array) -> Array:
            return jax.grad(lambda w: client.problem.inner(x, _like(y, w), inner))(w)

        # Models do not depend on each other, so one product with a unit vector gives a column of every model's Hessian.
        def column(unit: Array) -> Array:
            return jax.jvp(slopes, (w,), (jnp.broadcast_to(unit, w.shape),))[1]

        w = _rows(y)
        value, slope = jax.value_and_grad(lambda w: client.problem.outer(x, _like(y, w), outer))(w)
        hessian = jnp.moveaxis(jax.lax.map(column, jnp.eye(w.shape[1], dtype=w.dtype), batch_size=32), 0, -1)
        update = value, slope, slopes(w), hessian
        return Reply(update, metrics={"outer_loss": value}, gradients=2, hvps=w.shape[1])


def _rows(y: Tree) -> Array:
    """Join the coefficients and the intercept of each model to a row. The result has the shape (M, D)."""
    return jnp.hstack([y["coef"], y["intercept"][:, None]]) if "intercept" in y else jnp.asarray(y["coef"])


def _like(y: Tree, w: Array) -> Tree:
    """Return the rows of w as a tree with the structure of y. This is the inverse of `_rows`."""
    return {"coef": w[:, :-1], "intercept": w[:, -1]} if "intercept" in y else {"coef": w}


def _norm(gradient: Array) -> Array:
    return jnp.linalg.norm(gradient.ravel())


def _solved(hessian: Array, penalty: Array, b: Array) -> Array:
    """Solve (H_k + diag c) v_k = b_k for each model. Of several solutions, return the shortest v_k."""
    values, vectors = jnp.linalg.eigh(hessian + penalty[:, None] * jnp.eye(len(penalty)))
    large = values > 1e-13 * values[:, -1:]
    inverse = jnp.where(large, 1 / jnp.where(large, values, 1), 0)
    return jnp.einsum("kij,kj,klj,kl->ki", vectors, inverse, vectors, b)


def _updated(curvature: Array, step: Array, change: Array, count: Array) -> Array:
    """Update the BFGS approximation by a step and the change of the gradient, if this shows positive curvature."""
    along = jnp.sum(step * change)
    positive = along > 1e-8 * _norm(step) * _norm(change)
    along = jnp.where(positive, along, 1)
    before = jnp.where(count == 1, jnp.eye(len(step)) * jnp.sum(change**2) / along, curvature)
    product = before @ step
    length = jnp.where(positive, jnp.sum(step * product), 1)
    after = before - jnp.outer(product, product) / length + jnp.outer(change, change) / along
    return jnp.where(positive, after, curvature)


def _direction(curvature: Array, log_x: Array, slope: Array, free: Array, bound: Array) -> Array:
    """Return the step from log x to the minimum of the quadratic model over the free entries, clipped to the bounds.

    If this step leads uphill, return the step of steepest descent.
    """
    both = free[:, None] & free[None, :]
    newton = -jnp.linalg.solve(jnp.where(both, curvature, jnp.eye(len(slope))), jnp.where(free, slope, 0))
    newton *= jnp.minimum(1, LONGEST / jnp.maximum(jnp.max(jnp.abs(newton)), 1e-300))
    newton = jnp.clip(log_x + newton, -bound, bound) - log_x
    steepest = -slope / jnp.maximum(jnp.max(jnp.abs(slope)), 1e-300)
    steepest = jnp.clip(log_x + steepest, -bound, bound) - log_x
    return jnp.where(jnp.sum(newton * slope) < 0, newton, steepest)
