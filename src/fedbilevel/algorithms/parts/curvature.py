"""Measure the largest curvature of each client's inner loss. Their mean is an upper bound for the mean of the losses.

A client keeps a unit vector u_i. When the server asks for a measurement, the client adds a random unit vector w and
makes AGAIN steps of the power method at the x and y of the message, each on a new batch of its samples:

    u ← (u_i + MIX w) / ‖u_i + MIX w‖,    u ← ∇²yy g_i(x, y) u / L_i  with  L_i = ‖∇²yy g_i(x, y) u‖,    u_i ← u

On full batches L_i approaches the largest absolute value of an eigenvalue, from below. A client that has no vector yet
begins with w and makes FIRST steps. If a method adds terms to the inner loss in y (`Added`), ∇²yy g_i also contains the
Hessian of the share of f, and L_i contains the curvature of the other term.

The vector w is needed to detect a direction whose curvature has just become large. Once u_i has converged, its
component in this direction has decayed to rounding error. If Hessians are diagonal, the power method alone does not
restore it. Suppose that an eigenvalue grows by a quarter in each round, which is the most that a penalty 10^x allows.
Without w, L_i is then too low by a factor of 10⁴ in the worst case. With w the factor is 2.2, and 1.04 if no eigenvalue
grows (benchmarks/results/power_method.txt, which also has other values of MIX and AGAIN). Steps of 1/L_i are stable up
to a factor of 2.

The curvature at y may be much smaller than where the first step leads. For exp(y) − cy, for example, it is 1 at y = 0
and c at the solution, and a step of 1/L_i from 0 ends far beyond the solution, at c − 1. At its first measurement, a
client therefore tries the step y − ∇y g_i/L_i. If the curvature at its end is more than GROWTH times the curvature at
y, the client doubles L_i until gradient descent with steps of 1/L_i halves the norm of the gradient without meeting a
curvature above L_i. Here the curvature is that along the gradient, on one batch. With a quadratic loss it is the same
everywhere, so that the trial never changes L_i. Later measurements need no trial, since L_i falls slowly.

The server averages the reported curvatures in the same way as the replies. If this is the unbiased mean of a cohort,
(M/P) Σ p_i, then curvature and reply are too large or too small by the same factor, so that a step of 1/L remains safe.
The server's curvature follows a rise at once. In a round it falls at most to FALL times its value.

If L_i rises because x has moved, steps of 1/L on y become shorter, and y follows x more slowly. Steps on x then become
shorter too, so that y can follow. Their factor is Σ p_i least_i / Σ p_i L_i, where least_i is the least L_i so far,
which is raised by the factor RISE with each measurement. Without this, the weights of a network as x can grow until y
no longer follows. Each client compares its curvature with its own earlier curvature, so that a new cohort with other
clients does not shorten the steps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.core.client import Client
from fedbilevel.core.tree import PyTree, move, over, scaled
from fedbilevel.oracles.differences import value_and_derivative

FIRST = 10  # the number of products of a client without a vector
AGAIN = 3  # the number of products of a client that has a vector
MIX = 0.3  # the length of the random vector that is added to the unit vector
RISE = 1.005  # the factor by which L_i may rise between two measurements without a shorter step on x
FALL = 0.95  # the smallest factor by which a curvature can fall between two measurements
GROWTH = 2  # the factor by which the curvature may grow along a client's first step
TRIALS = 30  # the largest number of products with which a client tries its first steps
STREAM = 0x4C  # the number that derives the key of a measurement from the key of a phase


class Added(NamedTuple):
    """Hold the terms that a method adds to the inner loss in its steps on y.

    They are a share of f, and a term of constant curvature.
    """

    outer: Any = None  # the weight with which f is added; None: f is not added
    constant: Any = 0.0  # the curvature of the term with constant curvature


class PowerMethod(NamedTuple):
    """Hold a client's state of the power method."""

    vector: PyTree  # u_i, the client's unit vector; None: the client starts from a random vector each time
    largest: Array  # L_i, the client's curvature; 0 before the first measurement
    least: Array  # the smallest L_i so far, multiplied by RISE at each measurement; 0 before the first measurement

    @classmethod
    def begin(cls, y: PyTree, keep: bool) -> PowerMethod:
        return cls(optax.tree.zeros_like(y) if keep else None, jnp.zeros(()), jnp.zeros(()))

    def measured(
        self,
        client: Client,
        x: PyTree,
        y: PyTree,
        seed: Array,
        batch_size: int | None,
        key: Array,
        added: Added = Added(),  # noqa: B008  # a tuple of constants
    ) -> tuple[PowerMethod, Array]:
        """Continue the power method at x and y. Return the new state, and the number of products with a Hessian.

        `seed` is the random key of the vector w. It is the same for all clients, so that an engine that simulates them
        draws w only once. `added` has the terms that the method adds to the inner loss.
        """
        key = jax.random.fold_in(key, STREAM)
        powers: Any = FIRST
        start = unit(optax.tree.random_like(jax.random.key(seed), y))
        if self.vector is not None:
            powers = jnp.where(self.largest > 0, AGAIN, FIRST)
            start = unit(move(self.vector, jnp.where(self.largest > 0, MIX, 1), start))
        tries = ~(self.largest > 0)  # whether the client also tries its first steps

        def goes_on(state: tuple[Array, PowerMethod, Trial]) -> Array:
            n, _, trial = state
            return (n < powers) | (tries & ~trial.done)

        def once(state: tuple[Array, PowerMethod, Trial]) -> tuple[Array, PowerMethod, Trial]:
            n, found, trial = state
            draw = jax.random.fold_in(key, jnp.minimum(n, powers - 1))  # the steps are tried on the last batch
            inner_batch = client.inner_batch(draw, batch_size)

            def loss(y: PyTree) -> Array:
                g = client.problem.inner(x, y, inner_batch)
                if added.outer is None:
                    return g
                return g + added.outer * client.problem.outer(x, y, client.outer_batch(draw, batch_size))

            is_power = n < powers
            at, along = optax.tree.where(is_power, (y, found.vector), (trial.end, trial.gradient))
            gradient, product = value_and_derivative(jax.grad(loss), at, along)
            norm = optax.tree.norm(product).astype(self.largest.dtype)
            powered = found._replace(vector=unit(product), largest=norm)
            begun = Trial.begin(y, gradient, (norm + added.constant).astype(norm.dtype))
            return n + 1, *optax.tree.where(is_power, (powered, begun), (found, trial.after(gradient, norm)))

        begin = jnp.zeros((), "int32"), self._replace(vector=start), Trial.begin(y, y, self.largest)
        products, found, trial = jax.lax.while_loop(goes_on, once, begin)
        largest = jnp.maximum(trial.largest, FALL * self.largest)
        least = jnp.where(self.least > 0, jnp.minimum(RISE * self.least, largest), largest)
        products = products * (1 if added.outer is None else 2)
        return PowerMethod(None if self.vector is None else found.vector, largest, least), products


class Trial(NamedTuple):
    """Hold the point that gradient descent has reached whose steps are tried, and the curvature that it has met."""

    y: PyTree
    gradient: PyTree  # the gradient at y
    largest: Array  # L, whose inverse is the size of the steps
    allowed: Array  # the largest curvature that the end of the next step may have
    enough: Array  # the norm of the gradient at which the trial ends
    products: Array  # the number of products with a Hessian
    done: Array  # whether no further step has to be tried

    @classmethod
    def begin(cls, y: PyTree, gradient: PyTree, largest: Array) -> Trial:
        """Begin at y. The first product measures the curvature at y itself, for comparison."""
        any_curvature, enough = jnp.full_like(largest, jnp.inf), optax.tree.norm(gradient) / 2
        return cls(y, gradient, largest, any_curvature, enough, jnp.zeros((), "int32"), ~(largest > 0))

    @property
    def end(self) -> PyTree:
        """Return the point whose curvature the next product measures: the end of the next step."""
        return move(self.y, jnp.where(self.products == 0, 0, -over(1, self.largest)), self.gradient)

    def after(self, gradient: PyTree, norm: Array) -> Trial:
        """Accept the step, or double L if it meets too large a curvature.

        If the curvature does not grow along the first step, no other step is tried, and L stays as it is.

        Args:
            gradient: the gradient at `end`.
            norm: the norm of the product of the Hessian at `end` with the gradient at y.
        """
        begins = self.products == 0
        curvature = over(norm, optax.tree.norm(self.gradient)).astype(norm.dtype)
        fits = curvature <= self.allowed  # False for NaN, too
        y, gradient = optax.tree.where(fits, (self.end, gradient), (self.y, self.gradient))
        largest = jnp.where(fits, 1, 2) * self.largest
        allowed = jnp.where(begins, GROWTH * jnp.maximum(curvature, largest), largest)
        grows_not = (self.products == 1) & fits
        halved = ~begins & (optax.tree.norm(gradient) <= self.enough)
        products = self.products + 1
        return Trial(y, gradient, largest, allowed, self.enough, products, grows_not | halved | (products == TRIALS))


class Measured(NamedTuple):
    """Hold a client's report with its reply: its curvature, and a_i, the number of directions in its sum."""

    largest: Array  # L_i, the client's curvature
    work: Array  # a_i, the number of directions in the client's reply
    inverse: Array  # 1/a_i
    summed: Array  # a_i L_i, the curvature times the number of directions
    least: Array  # the least L_i so far
    square: Array  # ‖q_i‖², where q_i is the client's reply for y

    @classmethod
    def of(cls, found: PowerMethod, work: Array, square: Array) -> Measured:
        largest = found.largest
        numbers = largest, work, 1 / work, work * largest, found.least, square
        return cls(*(number.astype(largest.dtype) for number in numbers))


class ServerCurvature(NamedTuple):
    """Hold the server's means of the clients' reports."""

    largest: Array  # L = Σ p_i L_i; 0 before the first measurement
    work: Array  # Σ p_i a_i, the mean number of directions in a reply
    inverse: Array  # Σ p_i/a_i
    summed: Array  # Σ p_i a_i L_i
    slower: Array  # Σ p_i least_i / Σ p_i L_i of the last measurement, the factor of steps on x
    agreement: Array  # r = ‖q‖² / Σ p_i ‖q_i‖², where q is the mean of the replies q_i for y

    @classmethod
    def unknown(cls) -> ServerCurvature:
        return cls(*jnp.zeros((len(cls._fields),)))._replace(slower=jnp.ones(()))

    def after(self, measured: Measured, square: Array) -> ServerCurvature:
        """Return the means after another measurement; `square` is ‖q‖², where q is the mean of the replies for y."""
        agreement = jnp.minimum(over(square, measured.square), 1).astype(self.agreement.dtype)
        rises = (jnp.maximum(FALL * old, new) for old, new in zip(self[:-2], measured[:-2], strict=True))
        largest, work, inverse, summed = rises
        slower = jnp.where(measured.largest == 0, 1, over(measured.least, measured.largest))
        return ServerCurvature(largest, work, inverse, summed, slower.astype(agreement.dtype), agreement)

    def steps(self, fraction: Any) -> tuple[Array, Array]:
        """Return the step sizes of the server and of a client on y and v; both are 0 before any measurement.

        `fraction` is c, by which both step sizes are multiplied: see `AdaptiveSteps`."""
        safe = over(fraction, jnp.maximum(self.largest * self.work, self.summed))
        own = jnp.sqrt(self.agreement) * over(fraction, self.largest)
        return jnp.maximum(safe, over(own, self.work * self.inverse)), own


def unit(vector: PyTree) -> PyTree:
    """Return the vector scaled to length 1; a vector of zeros is returned unchanged."""
    return scaled(over(1, optax.tree.norm(vector)), vector)
