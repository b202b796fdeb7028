"""The extreme eigenvalues of a symmetric operator that is given by its products alone.

Cornelius Lanczos, "An iteration method for the solution of the eigenvalue problem of linear differential and integral
operators", J. Res. Nat. Bur. Standards 45, 1950; with full reorthogonalisation (Parlett, "The Symmetric Eigenvalue
Problem", 1980, chapter 13).
"""

from typing import NamedTuple

import jax
import numpy as np

from fedbilevel.core.errors import require_count
from fedbilevel.core.tree import PyTree
from fedbilevel.oracles.inverse import Operator


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


def extreme_eigenvalues(operator: Operator, like: PyTree, seed: int, *, iterations: int = 60) -> Extremes:
    """Lanczos with k = min(iterations, dim) products from a random start, on the host: compile the operator.

    An invariant subspace that is met on the way is left by a new random direction, so that k = dim gives the whole
    spectrum whatever its multiplicities. Memory: 2k vectors of the size of `like`, in float64.
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
    """All entries of a tree, (dim,)."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def _shaped(entries: np.ndarray, like: PyTree) -> PyTree:
    """Entries (dim,) as a tree of NumPy arrays of the shapes and types of `like`."""
    leaves, structure = jax.tree.flatten(like)
    parts = np.split(entries, np.cumsum([leaf.size for leaf in leaves])[:-1])
    shaped = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _orthogonal(basis: np.ndarray, w: np.ndarray) -> np.ndarray:
    """w less its part in the span of the rows of `basis`; twice is enough (Parlett and Kahan)."""
    for _ in range(2):
        w = w - basis.T @ (basis @ w)
    return w
