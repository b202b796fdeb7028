"""The numbers that step sizes depend on."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from fedbilevel.core.client import Clients
from fedbilevel.core.tree import XYV, PyTree
from fedbilevel.diagnostics.affine import Affine, affine
from fedbilevel.diagnostics.response import Response, response
from fedbilevel.engines.progress import doing
from fedbilevel.oracles.lanczos import Extremes, extreme_eigenvalues
from fedbilevel.oracles.population import Population, Total

CLIENTS = 20  # whose own losses are looked at
SAMPLES = 20  # whose own curvature is looked at
RESPONSE_SAMPLES = 512  # of each loss, for what needs many linear systems


class Curvature(NamedTuple):
    """At one y."""

    inner: Extremes  # of ∇²yy G
    outer: Extremes  # of ∇²yy F
    outer_gradient: float  # ‖∇y F‖


class Spread(NamedTuple):
    """The differences between clients at (x, y)."""

    inner: float  # √ Σ p_i ‖∇y g_i − mean‖²
    inner_share: float  # that squared over Σ p_i ‖∇y g_i‖²: 0 where all agree, 1 where they cancel
    outer: float  # the same of ∇x f_i
    outer_share: float
    tops: list[float]  # the largest eigenvalue of each client's ∇²yy g_i


class Measurements(NamedTuple):
    """All of it. 'Here' is the y that was given, 'there' the equilibrium."""

    delta: float
    here: Curvature
    there: Curvature
    response: Response
    spread: Spread
    sample: float  # the largest eigenvalue of ∇²yy g on a single sample
    samples: tuple[int, int]  # outer and inner, that were looked at
    response_samples: tuple[int, int]
    affine: Affine | None  # of the samples of the response; None where the problem is not small and quadratic


def measure(
    problem: Any, clients: Clients, x: PyTree, y: PyTree, rounds: int, max_samples: int, seed: int
) -> Measurements:
    """Float64 must be switched on. δ lifts the inner Hessian's eigenvalues to L/rounds where μ is below that."""
    population = Population.of(problem, clients, max_samples)
    few = Population.of(problem, clients, min(max_samples, RESPONSE_SAMPLES))
    doing("measuring curvature at the start")
    here = curvature(population, x, y, seed)
    low, high = here.inner.smallest, here.inner.largest
    delta = 0.0 if low >= high / rounds else high / rounds - min(low, 0.0)
    doing("measuring how y*(x) and Φ respond")
    found = response(few, x, y, delta, seed)
    there = curvature(population, x, found.y, seed)
    doing("measuring how much clients differ")
    apart = spread(problem, clients, x, y, max_samples, seed)
    doing("measuring single samples")
    return Measurements(
        delta=delta,
        here=here,
        there=there,
        response=found,
        spread=apart,
        sample=single_sample(Population.of(problem, clients, SAMPLES).inner, x, y, seed),
        samples=population.counts,
        response_samples=few.counts,
        affine=affine(few, XYV(x, found.y, found.v)),
    )


def curvature(population: Population, x: PyTree, y: PyTree, seed: int) -> Curvature:
    inner = extreme_eigenvalues(lambda v: population.inner.hess_v(x, y, v), y, seed, iterations=60)
    outer = extreme_eigenvalues(lambda v: population.outer.hess_v(x, y, v), y, seed, iterations=20)
    return Curvature(inner, outer, float(optax.tree.norm(population.outer.gradients(x, y)[1])))


def spread(problem: Any, clients: Clients, x: PyTree, y: PyTree, max_samples: int, seed: int) -> Spread:
    """Over at most CLIENTS clients, evenly spread."""
    ids = np.unique(np.linspace(0, len(clients) - 1, CLIENTS).astype(int))
    each = Population.each(problem, clients, ids.tolist(), max_samples)
    p = clients.weights[ids] / clients.weights[ids].sum()
    inner, outer = _gradients(each, x, y)
    return Spread(*_dissimilarity(p, inner), *_dissimilarity(p, outer), tops(each.inner, x, y, seed))


def single_sample(total: Total, x: PyTree, y: PyTree, seed: int) -> float:
    """The largest curvature that one of the samples has by itself."""
    apart = jax.tree.map(lambda a: a.reshape(-1, 1, 1, *a.shape[2:]), total.samples)
    return max(tops(Total(apart, jnp.ones((total.weights.size, 1, 1)), total.loss), x, y, seed))


def tops(each: Total, x: PyTree, y: PyTree, seed: int) -> list[float]:
    """The largest eigenvalue of ∇²yy of each of some stacked losses."""

    def top(i: int) -> float:
        return extreme_eigenvalues(lambda v: _hess_v_of(each, i, x, y, v), y, seed, iterations=20).largest

    return [top(i) for i in range(len(each.weights))]


@jax.jit
def _gradients(each: Population, x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
    """∇y g_i and ∇x f_i of every client: leaves (clients, ...)."""
    return lax.map(lambda one: (one.inner.gradients(x, y)[1], one.outer.gradients(x, y)[0]), each)


@jax.jit
def _hess_v_of(each: Total, i: Array, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[i], each).hess_v(x, y, v)


def _dissimilarity(p: np.ndarray, gradients: PyTree) -> tuple[float, float]:
    leaves = [np.asarray(leaf).reshape(len(p), -1) for leaf in jax.tree.leaves(gradients)]
    total = sum(float(np.sum(p @ leaf**2)) for leaf in leaves)
    apart = sum(float(np.sum(p @ (leaf - p @ leaf) ** 2)) for leaf in leaves)
    return apart**0.5, apart / total if total else 0.0
