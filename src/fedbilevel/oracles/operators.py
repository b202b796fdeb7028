"""Solve H v = b approximately, and find extreme eigenvalues of a symmetric H, by products H v alone.

Each solution has diagnostics. Eigenvalues are found by the method of Lanczos, "An iteration method for the solution of
the eigenvalue problem of linear differential and integral operators", J. Res. Nat. Bur. Standards 45, 1950, with full
reorthogonalisation (Parlett, "The Symmetric Eigenvalue Problem", 1980, chapter 13).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from fedbilevel.core.errors import require, require_count
from fedbilevel.core.tree import PyTree

Operator = Callable[[PyTree], PyTree]
"""A linear and symmetric map from v to H v, for trees of the shape of b."""


class Solution(NamedTuple):
    """Hold an approximate solution v of H v = b, and diagnostics of its accuracy."""

    v: PyTree
    residual: Array  # ‖H v − b‖ / ‖b‖, computed by a product with H and not by a recurrence; 0 if b = 0
    iterations: Array  # the number of products with H that were computed for v
    negative_curvature: (
        Array  # the first iteration with pᵀHp ≤ 0, so that H is not positive definite; -1: there was none
    )


def neumann(operator: Operator, b: PyTree, *, terms: int, step: float | Array) -> PyTree:
    """Return v = step · Σ_{n < terms} (I − step·H)ⁿ b, the truncated Neumann series.

    For a positive definite H and 0 < step < 2/λ_max(H) the series converges to H⁻¹b. For step ≤ 1/λ_max(H) its relative
    error is at most (1 − step·λ_min)^terms.
    """
    require_count("neumann terms", terms)

    def add_term(_: int, sums: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        power = optax.tree.add_scale(sums[0], -step, operator(sums[0]))
        return power, optax.tree.add(sums[1], power)

    return optax.tree.scale(step, lax.fori_loop(0, terms - 1, add_term, (b, b))[1])


class Iteration(NamedTuple):
    """Hold the state of a conjugate gradient iteration; the caller computes the products with H."""

    v: PyTree
    r: PyTree  # the residual b − H v, by its recurrence
    p: PyTree  # the search direction: the next product is H p
    rr: Array  # ⟨r, r⟩
    target: Array  # the iteration ends at ⟨r, r⟩ ≤ target
    spent: Array  # the number of products so far
    negative: Array  # the first iteration with pᵀHp ≤ 0; -1 if there was none

    @classmethod
    def start(cls, b: PyTree, tolerance: float | Array) -> "Iteration":
        """Return the state at v = 0, for an iteration that ends when ‖b − H v‖ ≤ tolerance·‖b‖."""
        size = optax.tree.vdot(b, b)
        zero = optax.tree.scale(0, b)  # keeps a NaN of b
        return cls(zero, b, b, size, tolerance**2 * size, jnp.asarray(0), jnp.asarray(-1))

    def ended(self) -> Array:
        """Return whether the residual is small enough, or a direction had non-positive curvature."""
        return ~(self.rr > self.target) | (self.negative >= 0)  # also True for a NaN

    def advanced(self, hp: PyTree) -> "Iteration":
        """Take a step along p, given hp = H p. Along a direction of non-positive curvature the step has length 0."""
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
        )


def conjugate_gradient(operator: Operator, b: PyTree, *, tolerance: float = 1e-6, iterations: int = 100) -> Solution:
    """Solve H v = b by conjugate gradient from v = 0, until ‖b − H v‖ ≤ tolerance·‖b‖ or after `iterations` products.

    The method stops at a direction of non-positive curvature and returns the iterate so far. `negative_curvature` then
    has the number of this iteration: H is not positive definite, and v may be far from a solution.
    """
    require(iterations >= 1, "conjugate_gradient iterations", iterations, "at least 1")
    require(tolerance >= 0, "conjugate_gradient tolerance", tolerance, "at least 0")
    end = lax.while_loop(
        lambda it: ~it.ended() & (it.spent < iterations),
        lambda it: it.advanced(operator(it.p)),
        Iteration.start(b, tolerance),
    )
    size = optax.tree.norm(b)
    zero = size == 0
    residual = optax.tree.norm(optax.tree.sub(operator(end.v), b)) / jnp.where(zero, 1, size)
    return Solution(end.v, jnp.where(zero, 0, residual), end.spent, end.negative)


class Extremes(NamedTuple):
    """Hold approximations θ of the smallest and the largest eigenvalue of H, with unit vectors u and residuals.

    Both θ lie between the true values. The residual ‖H u − θ u‖ bounds the distance from θ to the nearest eigenvalue of
    H. After as many steps as there are dimensions, θ is exact up to rounding.
    """

    smallest: float
    largest: float
    smallest_residual: float
    largest_residual: float
    smallest_vector: PyTree  # u of the smallest eigenvalue
    largest_vector: PyTree  # u of the largest eigenvalue


@np.errstate(over="ignore", invalid="ignore")
def extreme_eigenvalues(operator: Operator, like: PyTree, seed: int, *, iterations: int = 60) -> Extremes:
    """Approximate the extreme eigenvalues by k = min(iterations, dim) steps of Lanczos from a random vector.

    The iteration runs in NumPy and calls `operator` once per step. When it reaches an invariant subspace, it continues
    with a new random direction. So k = dim steps give the whole spectrum, even with multiple eigenvalues. Memory is
    needed for 2k vectors of the size of `like`, in float64. If a product is not finite, all eigenvalues and residuals
    are NaN.

    Args:
        like: a tree of arrays with the shapes and types that `operator` takes.
        seed: the seed of the random vectors.
    """
    require_count("lanczos iterations", iterations)
    rng, dim = np.random.default_rng(seed), sum(leaf.size for leaf in jax.tree.leaves(like))
    k = min(iterations, dim)
    basis, images = np.zeros((k, dim)), np.zeros((k, dim))  # q_j and H q_j
    rest, scale = rng.normal(size=dim), 1.0
    for j in range(k):
        rest = _orthogonal(basis[:j], rest)
        if np.linalg.norm(rest) <= dim * np.finfo(np.float64).eps * scale:  # False for NaN, which must reach the result
            rest = _orthogonal(basis[:j], rng.normal(size=dim))
        basis[j] = rest / np.linalg.norm(rest)
        images[j] = _flat(operator(_shaped(basis[j], like)))
        rest, scale = images[j], float(np.linalg.norm(images[j]))
    projected = basis @ images.T
    if not np.all(np.isfinite(projected)):
        nan = float("nan")
        return Extremes(nan, nan, nan, nan, like, like)
    values, vectors = np.linalg.eigh((projected + projected.T) / 2)
    low, high = vectors[:, 0] @ basis, vectors[:, -1] @ basis
    low_residual = np.linalg.norm(vectors[:, 0] @ images - values[0] * low)
    high_residual = np.linalg.norm(vectors[:, -1] @ images - values[-1] * high)
    ends = (_shaped(u, like) for u in (low, high))
    return Extremes(float(values[0]), float(values[-1]), float(low_residual), float(high_residual), *ends)


def _flat(tree: PyTree) -> np.ndarray:
    """Return all entries of a tree as an array of shape (dim,)."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def _shaped(entries: np.ndarray, like: PyTree) -> PyTree:
    """Return a tree of NumPy arrays with the shapes and types of `like`, from all entries as an array (dim,)."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(entries, np.cumsum([leaf.size for leaf in leaves])[:-1])
    shaped = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _orthogonal(basis: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return w without its component in the span of the rows of `basis`; two passes suffice (Parlett and Kahan)."""
    for _ in range(2):
        w = w - basis.T @ (basis @ w)
    return w
