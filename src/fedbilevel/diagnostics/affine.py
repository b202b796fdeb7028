"""Small problems with quadratic losses, whose iterations can be written down: their matrix and its spectra.

The three fields of response.py are then affine, with one Jacobian everywhere. In blocks for x and for w = (y, v) it is

    J = [J_xx  J_xw]        ∇²Φ = J_xx − J_xw J_ww⁻¹ J_wx        T = −J_xw J_ww⁻² J_wx
        [J_wx  J_ww]

T being the lag: w late by J_ww⁻¹/γ is w + J_ww⁻² J_wx ẋ/γ, and moves h by J_xw of that, which is −Tẋ/γ.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedbilevel.core.tree import XYV, PyTree
from fedbilevel.diagnostics.response import fields
from fedbilevel.oracles.population import Population

SMALL = 300  # dim x + 2 dim y up to which eigenvalues are cheap
SAME = 1e-6  # relative change of the Jacobian that is rounding


class Affine(NamedTuple):
    """The Jacobian of (h, ∇y G, s) in (x, y, v)."""

    jacobian: np.ndarray
    dim_x: int
    dim_y: int
    v: float  # the larger ‖v‖ of two equilibria: of y and v at the given x, and of all three

    @property
    def inner(self) -> np.ndarray:
        """Eigenvalues of ∇²yy G, ascending, as those below."""
        y = slice(self.dim_x, self.dim_x + self.dim_y)
        return np.linalg.eigvalsh(self.jacobian[y, y])

    @property
    def phi(self) -> np.ndarray:
        """Eigenvalues of ∇²Φ."""
        own, across, follow = self._parts()
        return np.linalg.eigvalsh(own - across @ follow)

    @property
    def lag(self) -> np.ndarray:
        """Eigenvalues of T."""
        _, across, follow = self._parts()
        return np.linalg.eigvalsh(-across @ np.linalg.solve(self.jacobian[self.dim_x :, self.dim_x :], follow))

    def _parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """J_xx, J_xw and J_ww⁻¹J_wx."""
        d = self.dim_x
        up, down = self.jacobian[:d], self.jacobian[d:]
        return up[:, :d], up[:, d:], np.linalg.solve(down[:, d:], down[:, :d])


def affine(population: Population, at: XYV) -> Affine | None:
    """The Jacobian of (h, ∇y G, s) in (x, y, v) over all the population's samples.

    None where it is too large or not affine, or where ∇²yy G is not positive definite.
    """
    dim_x, dim_y, dim_v = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in at)
    if dim_x + dim_y + dim_v > SMALL:
        return None
    jacobian, here = (np.asarray(a) for a in _linearised(population, at))
    flat, unravel = ravel_pytree(at)
    if not np.all(np.isfinite(jacobian)):
        return None
    (rest, *_), (all_rest, *_) = (np.linalg.lstsq(jacobian[i:, i:], here[i:]) for i in (dim_x, 0))
    moves = [np.concatenate([np.zeros(dim_x), rest]), all_rest]
    found = Affine(jacobian, dim_x, dim_y, max(float(np.linalg.norm((flat - move)[-dim_y:])) for move in moves))
    # were the fields affine, all three would be at rest there
    there = np.asarray(_linearised(population, unravel(flat - all_rest))[0])
    same = np.linalg.norm(there - jacobian) <= SAME * np.linalg.norm(jacobian)
    return found if same and found.inner[0] > 0 else None


@jax.jit
def _linearised(population: Population, at: XYV) -> tuple[PyTree, PyTree]:
    """The Jacobian, and the fields themselves."""
    flat, unravel = ravel_pytree(at)

    def flat_fields(z: jax.Array) -> jax.Array:
        return ravel_pytree(fields(population, unravel(z)))[0]

    columns = jax.lax.map(lambda e: jax.jvp(flat_fields, (flat,), (e,))[1], jnp.eye(flat.size), batch_size=32)
    return columns.T, flat_fields(flat)
