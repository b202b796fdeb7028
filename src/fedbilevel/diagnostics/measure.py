"""Measure the quantities that determine step sizes: curvatures, differences of clients, the lag of single-loop methods.

The vector fields along which single-loop methods move x, y and v are linearised about a point where y and v are in
equilibrium:

    h(x, y, v) = ∇x F − ∇²xy G·v        ∇y G(x, y)        s(x, y, v) = ∇²yy G·v − ∇y F

Let subscripts denote derivatives, such as h_y for the derivative of h in y. Eliminating y and v, with H = ∇²yy G + δI,
gives the Hessian of Φ (at δ = 0):

    ∇²Φ d = h_x d + h_y a + h_v b,        a = −H⁻¹ ∇²yx G d,        b = −H⁻¹ (s_x d + s_y a)

If y and v follow x by gradient steps of size γ, they lag behind by H⁻¹/γ. Let a dot denote the derivative in time. To
first order in the speed of x, a becomes a − H⁻¹ȧ/γ, and b becomes b − H⁻¹ḃ/γ, so that

    ẋ = −γ_x (∇²Φ x − T ẋ/γ),        T d = h_y a' + h_v b',        a' = H⁻¹a,        b' = H⁻¹(b − s_y a')

T is symmetric, as ∇²Φ is. The effect of the lag on the motion of x is small if γ_x ‖T‖ < γ. For example, let x and y be
numbers, F = ½ D y², λ = ∇²yy G and B = ∇²xy G. Then ∇²Φ = φ = D B²/λ² and T = 2φ/λ, and the variables x, y and v are
stable up to γ_x φ = 2γλ (Routh's criterion). There the condition γ_x ‖T‖ < γ is γ_x φ < ½γλ, a quarter of this bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from fedbilevel.core.client import Clients, require_clients
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.inputs import require_start
from fedbilevel.core.problem import Bilevel
from fedbilevel.core.tree import XYV, PyTree, is_floating, split
from fedbilevel.engines import first_look
from fedbilevel.engines.divergence import needs_ridge
from fedbilevel.engines.progress import report_stage
from fedbilevel.oracles.exact import require_shared, solve_inner
from fedbilevel.oracles.operators import Extremes, conjugate_gradient, extreme_eigenvalues
from fedbilevel.oracles.population import Population, WeightedLoss

CLIENTS = 20  # the largest number of clients whose losses are measured separately
SAMPLES = 20  # the largest number of samples whose curvature is measured separately
RESPONSE_SAMPLES = 512  # samples of each loss for quantities that need many linear systems


class Curvature(NamedTuple):
    """Hold the curvatures of both losses at some y."""

    inner: Extremes  # the extreme eigenvalues of ∇²yy G
    outer: Extremes  # the extreme eigenvalues of ∇²yy F
    outer_gradient: float  # ‖∇y F‖


class Spread(NamedTuple):
    """Hold the differences between clients at (x, y)."""

    inner: float  # √ Σ p_i ‖∇y g_i − mean‖², the spread of the clients' inner gradients about their mean
    inner_share: float  # `inner`² / Σ p_i ‖∇y g_i‖²: 0 if all gradients are equal, 1 if their mean is 0
    outer: float  # the same for ∇x f_i
    outer_share: float
    tops: list[float]  # the largest eigenvalue of each client's ∇²yy g_i


class Measurements(NamedTuple):
    """Hold all measurements of a problem at a given x.

    Args:
        delta: δ, the number that is added to the eigenvalues of ∇²yy G; see `measure`.
        here: the curvatures of both losses at the given y.
        there: the curvatures of both losses at y*(x), the minimiser of the inner loss, as `Response.y` defines it.
        response: how y*(x) and Φ respond to changes of x.
        spread: the differences between clients at the given y.
        sample: the largest eigenvalue of ∇²yy g on a single sample.
        samples: the numbers of outer and inner samples that were used.
        response_samples: the numbers of outer and inner samples that were used for `response`.
    """

    delta: float
    here: Curvature
    there: Curvature
    response: Response
    spread: Spread
    sample: float
    samples: tuple[int, int]
    response_samples: tuple[int, int]


def measure(
    problem: Any, clients: Clients, x: PyTree, y: PyTree, rounds: int, max_samples: int, seed: int
) -> Measurements:
    """Measure a problem at (x, y); JAX's 64-bit mode must be on.

    If the smallest eigenvalue μ of the inner Hessian is below L/rounds, a number δ = L/rounds − min(μ, 0) is added to
    all of its eigenvalues, so that the smallest is at least L/rounds.
    """
    population = Population.of(problem, clients, max_samples)
    few = Population.of(problem, clients, min(max_samples, RESPONSE_SAMPLES))
    report_stage("measuring curvature at the start")
    here = curvature(population, x, y, seed)
    low, high = here.inner.smallest, here.inner.largest
    require(bool(np.isfinite(high)), "the largest curvature of the inner loss in y", high, "finite")
    if high <= 0:
        raise ConfigurationError(needs_ridge(low))
    delta = 0.0 if low >= high / rounds else high / rounds - min(low, 0.0)
    report_stage("measuring how y*(x) and Φ respond")
    found = response(few, x, y, delta, seed)
    there = curvature(population, x, found.y, seed)
    report_stage("measuring how much clients differ")
    apart = spread(problem, clients, x, y, max_samples, seed)
    report_stage("measuring single samples")
    total = Population.of(problem, clients, SAMPLES).inner
    alone = jax.tree.map(lambda a: a.reshape(-1, 1, 1, *a.shape[2:]), total.samples)
    each = WeightedLoss(alone, jnp.ones((total.weights.size, 1, 1)), total.loss)
    return Measurements(
        delta=delta,
        here=here,
        there=there,
        response=found,
        spread=apart,
        sample=max(tops(each, x, y, seed)),
        samples=population.counts,
        response_samples=few.counts,
    )


def curvature(population: Population, x: PyTree, y: PyTree, seed: int) -> Curvature:
    """Measure the extreme curvatures of both losses in y at (x, y), by Lanczos' method, and ‖∇y F‖."""
    inner = extreme_eigenvalues(lambda v: population.inner.hess_v(x, y, v), y, seed, iterations=60)
    outer = extreme_eigenvalues(lambda v: population.outer.hess_v(x, y, v), y, seed, iterations=20)
    return Curvature(inner, outer, float(optax.tree.norm(population.outer.gradients(x, y)[1])))


def spread(problem: Any, clients: Clients, x: PyTree, y: PyTree, max_samples: int, seed: int) -> Spread:
    """Measure the differences between clients, over at most CLIENTS evenly spread clients."""
    ids = np.unique(np.linspace(0, len(clients) - 1, CLIENTS).astype(int))
    each = Population.each(problem, clients, ids.tolist(), max_samples)
    p = clients.weights[ids] / clients.weights[ids].sum()
    inner, outer = _gradients(each, x, y)
    return Spread(*_dissimilarity(p, inner), *_dissimilarity(p, outer), tops(each.inner, x, y, seed))


def tops(each: WeightedLoss, x: PyTree, y: PyTree, seed: int) -> list[float]:
    """Return the largest eigenvalue of the Hessian in y for each of several losses, which are stacked in one tree."""

    def top(i: int) -> float:
        return extreme_eigenvalues(lambda v: _hess_v_of(each, i, x, y, v), y, seed, iterations=20).largest

    return [top(i) for i in range(len(each.weights))]


@jax.jit
def _gradients(each: Population, x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
    """Compute ∇y g_i and ∇x f_i of every client, as leaves of shape (clients, ...)."""
    return lax.map(lambda one: (one.inner.gradients(x, y)[1], one.outer.gradients(x, y)[0]), each)


@jax.jit
def _hess_v_of(each: WeightedLoss, i: Array, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[i], each).hess_v(x, y, v)


def _dissimilarity(p: np.ndarray, gradients: PyTree) -> tuple[float, float]:
    leaves = [np.asarray(leaf).reshape(len(p), -1) for leaf in jax.tree.leaves(gradients)]
    total = sum(float(np.sum(p @ leaf**2)) for leaf in leaves)
    apart = sum(float(np.sum(p @ (leaf - p @ leaf) ** 2)) for leaf in leaves)
    return apart**0.5, apart / total if total else 0.0


PRODUCTS = 500  # the largest number of products for a linear system


class Response(NamedTuple):
    """Hold y and v in equilibrium at x, and the extreme eigenvalues of ∇²Φ and of T, the matrix of the lag."""

    y: PyTree  # argmin G + ½δ‖· − start‖²
    v: PyTree  # (∇²yy G + δ)⁻¹ ∇y F
    curvature: Extremes  # the eigenvalues of ∇²Φ
    lag: Extremes  # the eigenvalues of T
    negative_curvature: bool  # whether H was not positive definite; the other values are then meaningless


def response(
    population: Population, x: PyTree, start: PyTree, delta: float, seed: int, *, iterations: int = 12
) -> Response:
    """Compute the extreme eigenvalues of ∇²Φ and of T at x, by Lanczos' method with `iterations` products each.

    A product with ∇²Φ takes 2 linear systems, and a product with T takes 4. y and v are at their equilibrium.
    """
    inner = solve_inner(population, x, start, pull=delta)
    y = inner.y
    v, negative = _solve(population, x, y, delta, population.outer.gradients(x, y)[1])
    still_x, still_y = optax.tree.zeros_like(x), optax.tree.zeros_like(y)

    def minus_inverse(b: PyTree) -> PyTree:
        return optax.tree.scale(-1, _solve(population, x, y, delta, b)[0])

    def follow(d: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        """Return the changes a of y*(x) and b of v that a change d of x causes, and h_x d + h_y a."""
        a = minus_inverse(_moved(population, x, y, v, d, still_y).y)
        along = _moved(population, x, y, v, d, a)
        return a, minus_inverse(along.v), along.x

    def through_v(dv: PyTree) -> PyTree:
        """Return h_v dv, the change of the hypergradient h in x that a change dv of v causes."""
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
    """Compute H⁻¹b by conjugate gradient; also return whether H was found not to be positive definite."""

    def shifted(v: PyTree) -> PyTree:
        return optax.tree.add_scale(population.inner.hess_v(x, y, v), delta, v)

    found = conjugate_gradient(shifted, b, tolerance=1e-6, iterations=PRODUCTS)
    return found.v, found.negative_curvature >= 0


@jax.jit
def _moved(population: Population, x: PyTree, y: PyTree, v: PyTree, dx: PyTree, dy: PyTree) -> XYV:
    """Compute the derivatives along (dx, dy, 0) of the vector fields h, ∇y G and s, which the module defines."""

    def fields(x: PyTree, y: PyTree) -> XYV:
        h, s = population.hypergradient(x, y, v)
        return XYV(h, population.inner.gradients(x, y)[1], s)

    moved: XYV = jax.jvp(fields, (x, y), (dx, dy))[1]
    return moved


@dataclass(frozen=True)
class DifferentiablePoint:
    """Hold a problem whose losses take only the floating arrays of x and y, and these arrays in float64."""

    problem: Any
    x: PyTree
    y: PyTree
    x_fixed: PyTree  # the leaves of x that are not variables
    y_fixed: PyTree
    single: bool  # whether an array was given in less than float64


def point(problem: object, clients: object, x: PyTree, y: PyTree) -> DifferentiablePoint:
    """Check the arguments and convert them to float64; JAX's 64-bit mode must be on."""
    require(
        isinstance(problem, Bilevel), "problem", type(problem).__name__, "a Bilevel, Minimax or Compositional problem"
    )
    assert isinstance(problem, Bilevel)
    require_shared(problem)
    clients = require_clients(clients)
    given = [leaf for leaf in jax.tree.leaves((x, y)) if is_floating(leaf)]
    (x, x_fixed), (y, y_fixed) = split(x), split(y)  # before JAX computes anything
    single = any(jnp.asarray(leaf).dtype != jnp.float64 for leaf in given)
    for name, tree in (("x", x), ("y", y)):
        require_start(name, tree, tree)
    x, y = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (x, y))
    problem = problem.with_fixed(x_fixed, y_fixed)
    prepared = problem.prepared()
    first_look.first_look(prepared, clients, x, y, prepared.traced(x, y, clients.examples()))
    return DifferentiablePoint(problem, x, y, x_fixed, y_fixed, single)


def same_shapes(name: str, got: PyTree, like: PyTree) -> None:
    """Raise a ConfigurationError if a tree differs from `like` in structure or shapes."""
    same = str(jax.tree.structure(got)) == str(jax.tree.structure(like)) and _shapes(got) == _shapes(like)
    require(same, name, _shapes(got), f"the shapes of x, {_shapes(like)}")


def _shapes(tree: PyTree) -> str:
    return str(jax.tree.map(jnp.shape, tree))
