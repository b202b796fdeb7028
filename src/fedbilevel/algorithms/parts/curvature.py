"""The largest curvature of the inner loss: what a client measures of its own, and what the server knows of all.

A client keeps a unit vector u_i. When it is asked, it mixes in a random unit vector w and makes AGAIN steps of the
power method at the x and y of the message, on a batch of its own for each:

    u ← (u_i + MIX w) / ‖u_i + MIX w‖,    u ← ∇²yy g_i(x, y) u / L_i  with  L_i = ‖∇²yy g_i(x, y) u‖,    u_i ← u

L_i approaches the largest eigenvalue in absolute value, from below. A client that has no vector, or that could not keep
it, begins with w and makes FIRST steps.

Without w, L_i would be blind to a direction that has just become stiff: once u_i has settled, its component there has
decayed to rounding error, and where Hessians are diagonal, nothing brings it back. With an eigenvalue that grows by a
quarter in each round, the most that a penalty 10^x allows, L_i is then low by a factor of 10⁴ at worst; with w, by 2.2,
and by 1.04 where nothing grows (benchmarks/results/power_method.txt, with other values of MIX and AGAIN). Steps of
1/L_i are stable up to a factor of 2.

The server takes the same mean of what clients report as of their replies. Where that is the unbiased mean of a cohort,
(M/P) Σ p_i, curvature and reply are long or short by the same factor, so that a step of 1/L stays safe. The server's
curvature follows a rise at once, and a fall by the factor FALL in a round.

Where L_i rises because x has moved, steps of 1/L on y become shorter, and y follows x more slowly. Steps on x then
become shorter, too, so that x waits for y: by Σ p_i least_i / Σ p_i L_i, where the least L_i so far counts as higher
by the factor RISE with each measurement. Otherwise the weights of a network as x can grow until y no longer follows.
Each client compares with itself, so that a cohort with other clients than before slows nothing down.
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

FIRST = 10  # products of a client that has kept no vector
AGAIN = 3  # products of a client that has
MIX = 0.3  # the length of the random vector beside the one that was kept
RISE = 1.005  # by how much L_i may rise from one measurement to the next without a shorter step on x
FALL = 0.95  # what remains of a curvature, at least, from one measurement to the next
STREAM = 0x4C  # of a phase's key, the stream of the measurement


class PowerMethod(NamedTuple):
    """What a client keeps of the power method."""

    vector: PyTree  # u_i; None: it begins anew each time
    largest: Array  # L_i; 0 before the first product
    least: Array  # the least L_i so far, times RISE for each measurement since; 0 before the first

    @classmethod
    def begin(cls, y: PyTree, keep: bool) -> PowerMethod:
        return cls(optax.tree.zeros_like(y) if keep else None, jnp.zeros(()), jnp.zeros(()))

    def measured(
        self, client: Client, x: PyTree, y: PyTree, seed: Array, batch_size: int | None, key: Array
    ) -> tuple[PowerMethod, Array]:
        """Continue at x and y; return what to keep, and how many products were made.

        w is drawn by `seed`, the same for all clients, so that an engine that has them all draws it once.
        """
        key = jax.random.fold_in(key, STREAM)
        products: Any = FIRST
        start = unit(optax.tree.random_like(jax.random.key(seed), y))
        if self.vector is not None:
            products = jnp.where(self.largest > 0, AGAIN, FIRST)
            start = unit(move(self.vector, jnp.where(self.largest > 0, MIX, 1), start))

        def once(n: Array, found: PowerMethod) -> PowerMethod:
            batch = client.inner_batch(jax.random.fold_in(key, n), batch_size)
            gradient = jax.grad(lambda y: client.problem.inner(x, y, batch))
            product = value_and_derivative(gradient, y, found.vector)[1]
            return found._replace(vector=unit(product), largest=optax.tree.norm(product).astype(found.largest.dtype))

        found = jax.lax.fori_loop(0, products, once, self._replace(vector=start))
        largest = jnp.maximum(found.largest, FALL * self.largest)
        least = jnp.where(self.least > 0, jnp.minimum(RISE * self.least, largest), largest)
        return PowerMethod(None if self.vector is None else found.vector, largest, least), jnp.asarray(products)


class Measured(NamedTuple):
    """What a client reports with its reply: its curvature, and a_i, how many directions its sum contains."""

    largest: Array  # L_i
    work: Array  # a_i
    inverse: Array  # 1/a_i
    summed: Array  # a_i L_i
    least: Array  # the least L_i so far
    square: Array  # ‖q_i‖², q_i being its reply for y

    @classmethod
    def of(cls, found: PowerMethod, work: Array, square: Array) -> Measured:
        largest = found.largest
        numbers = largest, work, 1 / work, work * largest, found.least, square
        return cls(*(number.astype(largest.dtype) for number in numbers))


class ServerCurvature(NamedTuple):
    """What the server knows of all clients."""

    largest: Array  # L = Σ p_i L_i; 0 before anyone has measured
    work: Array  # Σ p_i a_i
    inverse: Array  # Σ p_i/a_i
    summed: Array  # Σ p_i a_i L_i
    slower: Array  # Σ p_i least_i / Σ p_i L_i of the last measurement, by which steps on x are shorter
    agreement: Array  # r

    @classmethod
    def unknown(cls) -> ServerCurvature:
        return cls(*jnp.zeros((len(cls._fields),)))._replace(slower=jnp.ones(()))

    def after(self, measured: Measured, square: Array) -> ServerCurvature:
        """Add a measurement, given ‖q‖², q being the mean of the replies for y."""
        agreement = jnp.minimum(over(square, measured.square), 1).astype(self.agreement.dtype)
        rises = (jnp.maximum(FALL * old, new) for old, new in zip(self[:-2], measured[:-2], strict=True))
        largest, work, inverse, summed = rises
        slower = jnp.where(measured.largest == 0, 1, over(measured.least, measured.largest))
        return ServerCurvature(largest, work, inverse, summed, slower.astype(agreement.dtype), agreement)

    def steps(self, fraction: Any) -> tuple[Array, Array]:
        """Return the server's step on y and v, and a client's; 0 where nothing is known."""
        safe = over(fraction, jnp.maximum(self.largest * self.work, self.summed))
        own = jnp.sqrt(self.agreement) * over(fraction, self.largest)
        return jnp.maximum(safe, over(own, self.work * self.inverse)), own


def unit(vector: PyTree) -> PyTree:
    """Return the vector at length 1, or as it is where it is 0."""
    return scaled(over(1, optax.tree.norm(vector)), vector)
