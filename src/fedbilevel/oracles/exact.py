"""The hypergradient over every sample of every client: the yardstick for everything that estimates it."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedbilevel.core.client import Clients
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.oracles.inverse import Solution, conjugate_gradient
from fedbilevel.oracles.population import Population


class ExactHypergradient(NamedTuple):
    """The implicit gradient at (x, y): equal to ∇Φ(x) where y = y*(x)."""

    hypergradient: PyTree  # ∇x F − ∇²xy G·v, like x
    v: PyTree  # (∇²yy G)⁻¹ ∇y F, like y
    inner_gradient: PyTree  # ∇y G, like y: zero where y = y*(x)


def implicit_gradient(problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> ExactHypergradient:
    """Solve ∇²yy G·v = ∇y F densely, over all samples. Use float64."""
    return dense_implicit(Population.of(problem, clients), x, y)


@jax.jit
def dense_implicit(population: Population, x: PyTree, y: PyTree) -> ExactHypergradient:
    """By the Hessian's matrix: O(dim y³) time, O(dim y²) memory and dim y Hessian-vector products."""
    flat, unravel = ravel_pytree(y)
    row = lambda e: ravel_pytree(population.inner.hess_v(x, y, unravel(e)))[0]  # noqa: E731
    hessian = jax.lax.map(row, jnp.eye(flat.size, dtype=flat.dtype), batch_size=32)
    f_y = ravel_pytree(population.outer.gradients(x, y)[1])[0]
    return implicit_with(population, x, y, unravel(jnp.linalg.solve(hessian, f_y)))


@partial(jax.jit, static_argnames=("tolerance", "iterations"))
def implicit_by_cg(
    population: Population, x: PyTree, y: PyTree, *, tolerance: float = 1e-10, iterations: int = 5000
) -> tuple[ExactHypergradient, Solution]:
    """By conjugate gradient, for any dimension; the second part says how far v may be trusted."""
    system = conjugate_gradient(
        lambda v: population.inner.hess_v(x, y, v),
        population.outer.gradients(x, y)[1],
        tolerance=tolerance,
        iterations=iterations,
    )
    return implicit_with(population, x, y, system.v), system


def implicit_with(population: Population, x: PyTree, y: PyTree, v: PyTree) -> ExactHypergradient:
    """The hypergradient that v gives, whatever v is."""
    return ExactHypergradient(population.hypergradient(x, y, v)[0], v, population.inner.gradients(x, y)[1])
