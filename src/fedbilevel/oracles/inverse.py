"""Approximate solutions of H v = b for a symmetric operator H given by its products, each with its diagnostics."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from fedbilevel.core.errors import require
from fedbilevel.core.tree import PyTree, move

Operator = Callable[[PyTree], PyTree]
"""v -> H v, linear and symmetric; trees of the shape of b."""


class Solution(NamedTuple):
    """An approximate solution and how far it may be trusted."""

    v: PyTree
    residual: Array  # ‖H v − b‖ / ‖b‖, computed from H itself, not from a recurrence; 0 when b = 0
    iterations: Array  # products with H that were spent on v
    negative_curvature: Array  # first iteration whose direction p had pᵀHp ≤ 0, or -1: then H is not definite


def neumann(operator: Operator, b: PyTree, *, terms: int, step: float | Array) -> Solution:
    """v = step · Σ_{n < terms} (I − step·H)ⁿ b, the truncated Neumann series.

    Converges to H⁻¹b for 0 < step < 2/λ_max(H), with error (1 − step·λ_min)^terms. Curvature is not looked at.
    """
    require(terms >= 1, "neumann terms", terms, "at least 1")

    def add_term(_: int, sums: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        power, total = sums
        power = optax.tree.add_scale(power, -step, operator(power))
        return power, optax.tree.add(total, power)

    _, total = lax.fori_loop(0, terms - 1, add_term, (b, b))
    v = optax.tree.scale(step, total)
    return Solution(v, _relative_residual(operator, v, b), jnp.asarray(terms - 1), jnp.asarray(-1))


class Iteration(NamedTuple):
    """Conjugate gradient under way, for a driver that has the products made elsewhere.

    As v = Σ α_k p_k, a driver that gets C p_k with every H p_k, for another linear C, has C v at the end as well.
    """

    v: PyTree
    r: PyTree  # residual b − H v, by its recurrence
    p: PyTree  # search direction, of which the next product is wanted
    rr: Array  # ⟨r, r⟩
    target: Array  # the ⟨r, r⟩ that is small enough
    spent: Array  # products so far
    negative: Array  # as in Solution
    image: PyTree = None  # C v, of any shape; None for no C

    @classmethod
    def start(cls, b: PyTree, tolerance: float | Array, image: PyTree = None) -> "Iteration":
        """From v = 0, to end at ‖b − H v‖ ≤ tolerance·‖b‖; `image` is C 0, zeros in the shape of C v."""
        size = optax.tree.vdot(b, b)
        zero = optax.tree.scale(0, b)  # a NaN in b stays
        return cls(zero, b, b, size, tolerance**2 * size, jnp.asarray(0), jnp.asarray(-1), image)

    def ended(self) -> Array:
        """Whether the residual is small enough, or no further direction may be taken."""
        return ~(self.rr > self.target) | (self.negative >= 0)  # a NaN ends it too

    def advanced(self, hp: PyTree, cp: PyTree = None) -> "Iteration":
        """One step along p, `hp` being H p and `cp` C p; none along a direction of non-positive curvature."""
        curvature = optax.tree.vdot(self.p, hp)
        bad = curvature <= 0  # False for NaN, which must reach v
        length = jnp.where(bad, 0, self.rr / jnp.where(bad, 1, curvature))
        r = optax.tree.add_scale(self.r, -length, hp)
        rr = optax.tree.vdot(r, r)
        return self._replace(
            v=optax.tree.add_scale(self.v, length, self.p),
            r=r,
            p=optax.tree.add_scale(r, rr / self.rr, self.p),
            rr=rr,
            spent=self.spent + 1,
            negative=jnp.where(bad, self.spent, self.negative),
            image=move(self.image, length, cp),
        )


def conjugate_gradient(operator: Operator, b: PyTree, *, tolerance: float = 1e-6, iterations: int = 100) -> Solution:
    """Conjugate gradient from v = 0, until ‖b − H v‖ ≤ tolerance·‖b‖ by its recurrence or `iterations` products.

    At a direction of non-positive curvature it stops and says so in `negative_curvature`, keeping the iterate so far:
    H is then not positive definite, and no claim is made for v.
    """
    require(iterations >= 1, "conjugate_gradient iterations", iterations, "at least 1")
    require(tolerance >= 0, "conjugate_gradient tolerance", tolerance, "at least 0")
    end = lax.while_loop(
        lambda it: ~it.ended() & (it.spent < iterations),
        lambda it: it.advanced(operator(it.p)),
        Iteration.start(b, tolerance),
    )
    return Solution(end.v, _relative_residual(operator, end.v, b), end.spent, end.negative)


def _relative_residual(operator: Operator, v: PyTree, b: PyTree) -> Array:
    size = optax.tree.norm(b)
    zero = size == 0
    return jnp.where(zero, 0, optax.tree.norm(optax.tree.sub(operator(v), b)) / jnp.where(zero, 1, size))


def dense_matrix(operator: Operator, like: PyTree) -> Array:
    """The matrix of `operator` on the flattened tree: for tests and tiny problems only."""
    flat, unravel = ravel_pytree(like)
    columns = jax.vmap(lambda e: ravel_pytree(operator(unravel(e)))[0])(jnp.eye(flat.size))
    return columns.T
