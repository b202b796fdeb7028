"""The extreme eigenvalues of a symmetric operator that is given by its products alone.

Cornelius Lanczos, "An iteration method for the solution of the eigenvalue problem of linear differential and integral
operators", J. Res. Nat. Bur. Standards 45, 1950; with full reorthogonalisation (Parlett, "The Symmetric Eigenvalue
Problem", 1980, chapter 13).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from fedbilevel.core.errors import require_count
from fedbilevel.core.tree import PyTree
from fedbilevel.oracles.inverse import Operator


class Extremes(NamedTuple):
    """The ends of a spectrum, approached from inside; scalars unless said otherwise.

    A residual ‖H u − θ u‖, ‖u‖ = 1, bounds the distance from θ to some eigenvalue of H, by rounding if k = dim.
    """

    smallest: Array
    largest: Array
    smallest_residual: Array
    largest_residual: Array
    smallest_vector: PyTree  # u, of unit norm
    largest_vector: PyTree


def extreme_eigenvalues(operator: Operator, like: PyTree, key: Array, *, iterations: int = 40) -> Extremes:
    """Lanczos with k = min(iterations, dim) products, and two more for the residuals, from a random start.

    Memory: k vectors of the size of `like`. An invariant subspace that is met on the way is left by a new random
    direction, so that k = dim always gives the whole spectrum.
    """
    require_count("lanczos iterations", iterations)
    flat, unravel = ravel_pytree(like)
    dim = flat.size
    k = min(iterations, dim)
    tiny = dim * jnp.finfo(flat.dtype).eps

    def product(q: Array) -> Array:
        return ravel_pytree(operator(unravel(q)))[0]

    def orthogonal(basis: Array, w: Array) -> Array:
        for _ in range(2):  # twice is enough (Parlett, Kahan)
            w = w - basis.T @ (basis @ w)
        return w

    def fresh(j: Array) -> Array:
        return jax.random.normal(jax.random.fold_in(key, j), (dim,), flat.dtype)

    def step(j: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        basis, q, alphas, betas = carry
        basis = basis.at[j].set(q)
        w = product(q)
        scale = jnp.linalg.norm(w)
        alphas = alphas.at[j].set(jnp.vdot(q, w))
        rest = orthogonal(basis, w)
        beta = jnp.linalg.norm(rest)
        stuck = beta <= tiny * scale  # False for NaN, which must reach the result
        other = orthogonal(basis, fresh(j + 1))
        rest = jnp.where(stuck, other / jnp.linalg.norm(other), rest / jnp.where(stuck, 1, beta))
        return basis, rest, alphas, betas.at[j].set(jnp.where(stuck, 0, beta))

    start = fresh(jnp.asarray(0))
    zeros = jnp.zeros(k, flat.dtype)
    carry = (jnp.zeros((k, dim), flat.dtype), start / jnp.linalg.norm(start), zeros, zeros)
    basis, _, alphas, betas = lax.fori_loop(0, k, step, carry)
    off = jnp.diag(betas[: k - 1], 1)
    _, vectors = jnp.linalg.eigh(jnp.diag(alphas) + off + off.T)

    def pair(i: int) -> tuple[Array, Array, PyTree]:
        u = basis.T @ vectors[:, i]
        u = u / jnp.linalg.norm(u)
        hu = product(u)
        theta = jnp.vdot(u, hu)
        return theta, jnp.linalg.norm(hu - theta * u), unravel(u)

    (low, low_residual, low_vector), (high, high_residual, high_vector) = pair(0), pair(-1)
    return Extremes(low, high, low_residual, high_residual, low_vector, high_vector)
