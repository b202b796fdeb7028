"""Symmetric operators H that are given by their products alone: approximate solutions of H v = b, each with its
diagnostics, and extreme eigenvalues.

These by Lanczos, "An iteration method for the solution of the eigenvalue problem of linear differential and integral
operators", J. Res. Nat. Bur. Standards 45, 1950; with full reorthogonalisation (Parlett, "The Symmetric Eigenvalue
Problem", 1980, chapter 13).
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
"""v -> H v, linear and symmetric; trees of the shape of b."""


class Solution(NamedTuple):
    """An approximate solution and how far it may be trusted."""

    v: PyTree
    residual: Array  # ‖H v − b‖ / ‖b‖, computed from H itself, not from a recurrence; 0 when b = 0
    iterations: Array  # products with H that were spent on v
    negative_curvature: Array  # first iteration whose direction p had pᵀHp ≤ 0, or -1: then H is not definite


def neumann(operator: Operator, b: PyTree, *, terms: int, step: float | Array) -> PyTree:
    """Return v = step · Σ_{n < terms} (I − step·H)ⁿ b, the truncated Neumann series.

    Converges to H⁻¹b for 0 < step < 2/λ_max(H), with error (1 − step·λ_min)^terms.
    """
    require_count("neumann terms", terms)

    def add_term(_: int, sums: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        power = optax.tree.add_scale(sums[0], -step, operator(sums[0]))
        return power, optax.tree.add(sums[1], power)

    return optax.tree.scale(step, lax.fori_loop(0, terms - 1, add_term, (b, b))[1])


class Iteration(NamedTuple):
    """Conjugate gradient under way, for a driver that has the products made elsewhere."""

    v: PyTree
    r: PyTree  # residual b − H v, by its recurrence
    p: PyTree  # search direction, of which the next product is wanted
    rr: Array  # ⟨r, r⟩
    target: Array  # the ⟨r, r⟩ that is small enough
    spent: Array  # products so far
    negative: Array  # as in Solution

    @classmethod
    def start(cls, b: PyTree, tolerance: float | Array) -> "Iteration":
        """Begin from v = 0, to end at ‖b − H v‖ ≤ tolerance·‖b‖."""
        size = optax.tree.vdot(b, b)
        zero = optax.tree.scale(0, b)  # a NaN in b stays
        return cls(zero, b, b, size, tolerance**2 * size, jnp.asarray(0), jnp.asarray(-1))

    def ended(self) -> Array:
        """Say whether the residual is small enough, or no further direction may be taken."""
        return ~(self.rr > self.target) | (self.negative >= 0)  # a NaN ends it too

    def advanced(self, hp: PyTree) -> "Iteration":
        """Take a step along p, `hp` being H p; none along a direction of non-positive curvature."""
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
    """Solve H v = b by conjugate gradient from v = 0, until ‖b − H v‖ ≤ tolerance·‖b‖, or `iterations` products.

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
    size = optax.tree.norm(b)
    zero = size == 0
    residual = optax.tree.norm(optax.tree.sub(operator(end.v), b)) / jnp.where(zero, 1, size)
    return Solution(end.v, jnp.where(zero, 0, residual), end.spent, end.negative)


class Extremes(NamedTuple):
    """The ends of a spectrum, approached from inside.

    A residual ‖H u − θ u‖ with ‖u‖ = 1 bounds the distance from θ to some eigenvalue of H; after as many steps as there
    are dimensions θ is the end itself, to rounding.
    """

    smallest: float
    largest: float
    smallest_residual: float
    largest_residual: float
    smallest_vector: PyTree  # u
    largest_vector: PyTree


@np.errstate(over="ignore", invalid="ignore")
def extreme_eigenvalues(operator: Operator, like: PyTree, seed: int, *, iterations: int = 60) -> Extremes:
    """Find them by Lanczos with k = min(iterations, dim) products from a random start, on the host, operator compiled.

    An invariant subspace that is met on the way is left by a new random direction, so that k = dim gives the whole
    spectrum whatever its multiplicities. Memory: 2k vectors of the size of `like`, in float64. Where a product is not
    finite, all results are NaN.
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
    """Collect all entries of a tree, (dim,)."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def _shaped(entries: np.ndarray, like: PyTree) -> PyTree:
    """Shape entries (dim,) into a tree of NumPy arrays of the shapes and types of `like`."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(entries, np.cumsum([leaf.size for leaf in leaves])[:-1])
    shaped = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _orthogonal(basis: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Take from w its part in the span of the rows of `basis`; twice is enough (Parlett and Kahan)."""
    for _ in range(2):
        w = w - basis.T @ (basis @ w)
    return w
