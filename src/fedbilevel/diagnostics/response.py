"""How Φ bends, and how a single-loop method feels it late.

Linearise the fields of the three variables of single-loop methods about a point where y and v are in equilibrium:

    h(x, y, v) = ∇x F − ∇²xy G·v        ∇y G(x, y)        s(x, y, v) = ∇²yy G·v − ∇y F

Eliminating y and v, with H = ∇²yy G + δI, gives the Hessian of Φ (at δ = 0):

    ∇²Φ d = h_x d + h_y a + h_v b,        a = −H⁻¹ ∇²yx G d,        b = −H⁻¹ (s_x d + s_y a)

When y and v follow by gradient steps of size γ, they are late by H⁻¹/γ: to first order in the speed of x, a becomes
a − H⁻¹ȧ/γ and b likewise, so that

    ẋ = −γ_x (∇²Φ x − T ẋ/γ),        T d = h_y a' + h_v b',        a' = H⁻¹a,        b' = H⁻¹(b − s_y a')

T is symmetric, as ∇²Φ is. Motion of x against itself through the lag is kept small by γ_x ‖T‖ < γ. For one dimension
with ∇²Φ = φ = D B²/λ² this is T = 2φ/λ, and x, y, v are stable up to γ_x φ = 2γλ (Routh): the bound ½γλ is a quarter.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import optax
from jax import Array

from fedbilevel.core.tree import XYV, PyTree
from fedbilevel.oracles.finite_differences import solve_inner
from fedbilevel.oracles.inverse import conjugate_gradient
from fedbilevel.oracles.lanczos import Extremes, extreme_eigenvalues
from fedbilevel.oracles.population import Population

PRODUCTS = 500  # of one linear system at the most


class Response(NamedTuple):
    """The equilibrium and the two operators' spectra."""

    y: PyTree  # argmin G + ½δ‖· − start‖²
    v: PyTree  # (∇²yy G + δ)⁻¹ ∇y F
    curvature: Extremes  # of ∇²Φ
    lag: Extremes  # of T
    negative_curvature: bool  # H was not positive definite: no claim is made


def response(
    population: Population, x: PyTree, start: PyTree, delta: float, seed: int, *, iterations: int = 12
) -> Response:
    """Both spectra at x, by Lanczos with `iterations` products each; every product costs 2 (T: 4) linear systems."""
    inner = solve_inner(population, x, start, pull=delta)
    y = inner.y
    v, negative = _solve(population, x, y, delta, population.outer.gradients(x, y)[1])
    still_x, still_y = optax.tree.zeros_like(x), optax.tree.zeros_like(y)

    def minus_inverse(b: PyTree) -> PyTree:
        return optax.tree.scale(-1, _solve(population, x, y, delta, b)[0])

    def follow(d: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        """a, b and h_x d + h_y a."""
        a = minus_inverse(_moved(population, x, y, v, d, still_y).y)
        along = _moved(population, x, y, v, d, a)
        return a, minus_inverse(along.v), along.x

    def through_v(dv: PyTree) -> PyTree:
        """h_v dv."""
        return optax.tree.scale(-1, population.inner.products(x, y, dv)[0])

    def hessian(d: PyTree) -> PyTree:
        _, b, h = follow(d)
        return optax.tree.add(h, through_v(b))

    def lag(d: PyTree) -> PyTree:
        a, b, _ = follow(d)
        late_a = optax.tree.scale(-1, minus_inverse(a))
        along = _moved(population, x, y, v, still_x, late_a)
        late_b = minus_inverse(optax.tree.sub(along.v, b))
        return optax.tree.add(along.x, through_v(late_b))

    curvature = extreme_eigenvalues(hessian, x, seed, iterations=iterations)
    late = extreme_eigenvalues(lag, x, seed, iterations=iterations)
    return Response(y, v, curvature, late, bool(inner.negative_curvature | negative))


@jax.jit
def _solve(population: Population, x: PyTree, y: PyTree, delta: Array, b: PyTree) -> tuple[PyTree, Array]:
    """H⁻¹b, and whether H turned out not to be positive definite."""

    def shifted(v: PyTree) -> PyTree:
        return optax.tree.add_scale(population.inner.hess_v(x, y, v), delta, v)

    found = conjugate_gradient(shifted, b, tolerance=1e-6, iterations=PRODUCTS)
    return found.v, found.negative_curvature >= 0


def fields(population: Population, at: XYV) -> XYV:
    """h, ∇y G and s."""
    h, s = population.hypergradient(*at)
    return XYV(h, population.inner.gradients(at.x, at.y)[1], s)


@jax.jit
def _moved(population: Population, x: PyTree, y: PyTree, v: PyTree, dx: PyTree, dy: PyTree) -> XYV:
    """The derivatives of h, ∇y G and s along (dx, dy, 0)."""
    return jax.jvp(lambda x, y: fields(population, XYV(x, y, v)), (x, y), (dx, dy))[1]
