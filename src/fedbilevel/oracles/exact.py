"""Compute the exact hypergradient over all samples of all clients, as a reference for estimates, in three ways:

- By the implicit function theorem.
- By differences of Φ(x) = F(x, y*(x)), with the inner problem solved up to rounding.
- By differentiating the steps of training (iterative differentiation: Domke, "Generic methods for optimization-based
  modeling", AISTATS 2012; Maclaurin, Duvenaud, Adams, "Gradient-based hyperparameter optimization through reversible
  learning", ICML 2015).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require, require_count
from fedbilevel.core.forked import refuse_forked_child
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.oracles.operators import Solution, conjugate_gradient
from fedbilevel.oracles.population import Population

NEWTON_STEPS = 60  # the largest number of Newton steps


class ExactHypergradient(NamedTuple):
    """Hold the implicit gradient at (x, y), which equals ∇Φ(x) if y = y*(x)."""

    hypergradient: PyTree  # ∇x F − ∇²xy G·v, in the shape of x
    v: PyTree  # (∇²yy G)⁻¹ ∇y F, in the shape of y
    inner_gradient: PyTree  # ∇y G, in the shape of y; zero if y = y*(x)


@jax.jit
def dense_implicit(population: Population, x: PyTree, y: PyTree) -> ExactHypergradient:
    """Compute the implicit gradient with the dense matrix ∇²yy G.

    This takes O(dim y³) time, O(dim y²) memory and dim y Hessian-vector products.
    """
    flat, unravel = ravel_pytree(y)
    row = lambda e: ravel_pytree(population.inner.hess_v(x, y, unravel(e)))[0]  # noqa: E731
    hessian = jax.lax.map(row, jnp.eye(flat.size, dtype=flat.dtype), batch_size=32)
    f_y = ravel_pytree(population.outer.gradients(x, y)[1])[0]
    return implicit_with(population, x, y, unravel(jnp.linalg.solve(hessian, f_y)))


@partial(jax.jit, static_argnames="tolerance")
def implicit_by_cg(
    population: Population, x: PyTree, y: PyTree, *, tolerance: float = 1e-10
) -> tuple[ExactHypergradient, Solution]:
    """Compute the implicit gradient by conjugate gradient, for a y of any dimension.

    The second result, a `Solution`, says how accurate v is.
    """
    system = conjugate_gradient(
        lambda v: population.inner.hess_v(x, y, v),
        population.outer.gradients(x, y)[1],
        tolerance=tolerance,
        iterations=5000,
    )
    return implicit_with(population, x, y, system.v), system


def implicit_with(population: Population, x: PyTree, y: PyTree, v: PyTree) -> ExactHypergradient:
    """Return ∇x F − ∇²xy G·v for any v, together with v and ∇y G."""
    return ExactHypergradient(population.hypergradient(x, y, v)[0], v, population.inner.gradients(x, y)[1])


class Inner(NamedTuple):
    """Hold the last iterate of Newton's method on G(x, ·), and its diagnostics."""

    y: PyTree
    gradient_norm: Array  # the norm of the gradient at y: ‖∇y G‖, with the pull's term if there is a pull
    iterations: Array
    products: Array  # the number of Hessian-vector products
    negative_curvature: Array  # whether a Hessian was not positive definite; then y may not be a minimiser


class _Newton(NamedTuple):
    inner: Inner
    moved: Array  # whether the last step made the gradient's norm smaller


@partial(jax.jit, static_argnames="tolerance")
def solve_inner(
    population: Population, x: PyTree, y: PyTree, *, pull: float | Array = 0.0, tolerance: float = 1e-3
) -> Inner:
    """Minimise G(x, z) + ½ pull ‖z − y‖² over z by Newton's method from z = y; with pull = 0 the minimiser is y*(x).

    Conjugate gradient solves each system to a relative residual of `tolerance`. A step is halved until it reduces the
    norm of the gradient. If the Hessian is positive definite, a short enough step reduces the norm, since the
    derivative of ½‖∇y G‖² along the step is at most −(1 − tolerance)‖∇y G‖². The method ends when no step reduces the
    norm, because of rounding errors.
    """

    def gradient(z: PyTree) -> PyTree:
        return jax.tree.map(lambda g, a, b: g + pull * (a - b), population.inner.gradients(x, z)[1], z, y)

    def hessian(z: PyTree, v: PyTree) -> PyTree:
        return optax.tree.add_scale(population.inner.hess_v(x, z, v), pull, v)

    def unfinished(state: _Newton) -> Array:
        now = state.inner
        return state.moved & (now.gradient_norm > 0) & (now.iterations < NEWTON_STEPS) & ~now.negative_curvature

    def advance(state: _Newton) -> _Newton:
        now = state.inner
        system = conjugate_gradient(lambda v: hessian(now.y, v), gradient(now.y), tolerance=tolerance, iterations=2000)

        def shorter(trial: tuple[Array, PyTree, Array]) -> tuple[Array, PyTree, Array]:
            length = trial[0] / 2
            z = optax.tree.add_scale(now.y, -length, system.v)
            return length, z, optax.tree.norm(gradient(z))

        def too_long(trial: tuple[Array, PyTree, Array]) -> Array:
            return ~(trial[2] < now.gradient_norm) & (trial[0] > 2.0**-20)

        _, z, norm = lax.while_loop(
            too_long, shorter, (jnp.asarray(2.0), now.y, jnp.full_like(now.gradient_norm, jnp.inf))
        )
        moved = norm < now.gradient_norm
        z = optax.tree.where(moved, z, now.y)
        norm = jnp.where(moved, norm, now.gradient_norm)
        spent = now.products + system.iterations + 1  # one more product for the residual
        return _Newton(Inner(z, norm, now.iterations + 1, spent, system.negative_curvature >= 0), moved)

    first = Inner(y, optax.tree.norm(gradient(y)), jnp.asarray(0), jnp.asarray(0), jnp.asarray(False))
    return lax.while_loop(unfinished, advance, _Newton(first, jnp.asarray(True))).inner


def inner_solution(problem: Problem, clients: Clients, x: PyTree, y0: PyTree) -> Inner:
    """Minimise the inner loss over y at a fixed x, on all samples of all clients, by Newton's method up to rounding.

    Args:
        problem: a problem whose inner loss is strongly convex in y near the path from y0 to the minimiser.
        clients: the population.
        x: a tree of arrays.
        y0: the start, a tree of arrays.

    Raises:
        ConfigurationError: clients keep x or leaves of y (`Bilevel.local`, `Bilevel.own`).
    """
    refuse_forked_child()
    require_shared(problem)
    return solve_inner(Population.of(problem, clients), x, y0)


def require_shared(problem: Problem) -> None:
    """Refuse a problem whose clients keep x or leaves of y, since its losses need these parts of a single client."""
    for name, variable in (("local", "x"), ("own", "y")):
        kept = getattr(problem, name)
        require(kept is None, f"Bilevel.{name}", kept, f"None: this needs one {variable} for all clients")


class Slopes(NamedTuple):
    """Hold directional derivatives of Φ, as arrays of shape (directions,)."""

    directions: np.ndarray  # unit vectors, of shape (directions, dim x), with entries in the order of ravel_pytree
    values: np.ndarray
    errors: np.ndarray  # how much each value changes if the width is halved; without rounding, its error is smaller


def slopes(population: Population, x: PyTree, y: PyTree, seed: int, *, directions: int, width: float) -> Slopes:
    """Compute ⟨∇Φ(x), d⟩ for random unit vectors d, by differences of F(x ± h d, y*(x ± h d)).

    Richardson extrapolation combines the differences for h = width and h = width/2, which leaves an error of order h⁴.

    Args:
        y: the point at which the inner solver starts.
        seed: the seed of the random vectors.
        directions: the number of vectors d.
        width: the larger h.
    """
    require_count("directions", directions)
    flat, unravel = ravel_pytree(x)
    drawn = np.random.default_rng(seed).normal(size=(directions, flat.size))
    units = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)

    def objective(point: np.ndarray) -> float:
        here = unravel(jnp.asarray(point, flat.dtype))
        return float(population.outer.value(here, solve_inner(population, here, y).y))

    def difference(h: float) -> np.ndarray:
        return np.array([objective(flat + h * d) - objective(flat - h * d) for d in units]) / (2 * h)

    wide, narrow = difference(width), difference(width / 2)
    return Slopes(units, (4 * narrow - wide) / 3, np.abs(narrow - wide))


class Unrolled(NamedTuple):
    """Hold y after N steps of gradient descent on G, and the derivative of F through these steps."""

    hypergradient: PyTree  # dF(x, y_N(x))/dx, in the shape of x
    y: PyTree  # y_N


@partial(jax.jit, static_argnames="steps")
def unrolled_gradient(population: Population, x: PyTree, y: PyTree, *, steps: int, lr: float | Array) -> Unrolled:
    """Return d/dx F(x, y_N(x)) with y_0 = y fixed and y_{n+1} = y_n − lr·∇y G(x, y_n), by reverse mode.

    Let N be the number of steps, μ the strong convexity and L the smoothness of G in y. For lr ≤ 1/L the result tends
    to ∇Φ(x), with an error in proportion to (1 − lr·μ)^N. From y = y*(x) it equals the hypergradient by a Neumann
    series of N terms. N copies of y are kept in memory; other intermediate values are computed again in the backward
    pass.
    """
    require_count("unrolled steps", steps)

    def step(x: PyTree, y: PyTree) -> PyTree:
        return jax.tree.map(lambda a, g: a - lr * g, y, population.inner.gradients(x, y)[1])

    def train(x: PyTree) -> PyTree:
        return lax.scan(lambda y, _: (jax.checkpoint(step)(x, y), None), y, None, length=steps)[0]

    end, pull_back = jax.vjp(train, x)
    f_x, f_y = population.outer.gradients(x, end)
    return Unrolled(jax.tree.map(lambda a, b: a + b, f_x, pull_back(f_y)[0]), end)
