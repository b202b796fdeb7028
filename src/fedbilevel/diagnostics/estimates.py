"""The library's own ways to a hypergradient at one point."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from fedbilevel.core.problem import ImplicitTerm
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.progress import doing
from fedbilevel.oracles.exact import ExactHypergradient, dense_implicit, implicit_by_cg, implicit_with
from fedbilevel.oracles.finite_differences import Inner, Slopes, slopes, solve_inner
from fedbilevel.oracles.inverse import Solution, neumann
from fedbilevel.oracles.lanczos import Extremes, extreme_eigenvalues
from fedbilevel.oracles.population import Population
from fedbilevel.oracles.unrolled import unrolled_gradient

CG_TOLERANCE = 1e-10


@dataclass(frozen=True)
class SamplingPlan:
    """The estimates to compute and their numbers of steps; see `check_hypergradient`."""

    solve_inner: bool
    dense: bool
    steps: int
    terms: int
    step: float | None
    directions: int
    seed: int


@dataclass(frozen=True)
class Estimates:
    """Hypergradients at (x, y), like x, and what their notes need."""

    inner: Inner  # y, and how it was reached
    spectrum: Extremes  # of ∇²yy G at (x, y)
    step: float  # of the series and of the unrolled descent
    yardstick: ExactHypergradient
    unrolled: PyTree
    series: PyTree
    cg: PyTree
    system: Solution  # of conjugate gradient
    slopes: Slopes | None


def estimates(population: Population, x: PyTree, start: PyTree, plan: SamplingPlan) -> Estimates:
    """Everything but the local hypergradient."""
    doing("solving the inner problem")
    if plan.solve_inner:
        inner = solve_inner(population, x, start)
    else:
        norm, zero = optax.tree.norm(population.inner.gradients(x, start)[1]), jnp.asarray(0)
        inner = Inner(start, norm, zero, zero, jnp.asarray(False))
    y = inner.y
    doing("comparing hypergradients")
    spectrum = extreme_eigenvalues(lambda v: population.inner.hess_v(x, y, v), y, plan.seed, iterations=100)
    scale = max(abs(spectrum.smallest), abs(spectrum.largest))
    step = plan.step or (1 / scale if scale else 1.0)
    by_cg, system = implicit_by_cg(population, x, y, tolerance=CG_TOLERANCE)
    drawn = None
    if plan.solve_inner:
        doing("finite differences")
        # truncation is of order h⁴, rounding of order ε/h: 1e-10 is enough, and a narrow step meets fewer kinks
        width = float(np.finfo(np.float64).eps) ** (1 / 3) * max(1.0, float(optax.tree.norm(x)))
        drawn = slopes(population, x, y, plan.seed, directions=plan.directions, width=width)
        doing("comparing hypergradients")
    return Estimates(
        inner=inner,
        spectrum=spectrum,
        step=step,
        yardstick=dense_implicit(population, x, y) if plan.dense else by_cg,
        unrolled=unrolled_gradient(population, x, start, steps=plan.steps, lr=step).hypergradient,
        series=_series(population, x, y, step, terms=plan.terms),
        cg=by_cg.hypergradient,
        system=system,
        slopes=drawn,
    )


@partial(jax.jit, static_argnames="terms")
def _series(population: Population, x: PyTree, y: PyTree, step: Array, *, terms: int) -> PyTree:
    b = population.outer.gradients(x, y)[1]
    v = neumann(lambda v: population.inner.hess_v(x, y, v), b, terms=terms, step=step).v
    return implicit_with(population, x, y, v).hypergradient


@partial(jax.jit, static_argnames="implicit_term")
def local_hypergradient(
    each: Population, p: Array, x: PyTree, y: PyTree, *, implicit_term: ImplicitTerm = "inverse"
) -> tuple[PyTree, Array]:
    """Σ p_i (∇x f_i − ∇²xy g_i v_i), as LFedNest's clients form it, and the number of clients whose system failed.

    By what the problem says of ∇²yy g, v_i = (∇²yy g_i)⁻¹ ∇y f_i ("inverse"), ∇y f_i ("identity") or 0 ("none"). A
    system fails where the client's Hessian is not positive definite or could not be inverted.
    """

    def own(one: Population) -> tuple[PyTree, Array]:
        if implicit_term == "inverse":
            implicit, system = implicit_by_cg(one, x, y, tolerance=CG_TOLERANCE)
            failed = (system.negative_curvature >= 0) | (system.residual > 1e3 * CG_TOLERANCE)
            return implicit.hypergradient, failed
        f_x, f_y = one.outer.gradients(x, y)
        h = f_x if implicit_term == "none" else one.hypergradient(x, y, f_y)[0]
        return h, jnp.asarray(False)

    h, failed = lax.map(own, each)
    return jax.tree.map(lambda leaf: jnp.tensordot(p, leaf, 1), h), jnp.sum(failed)
