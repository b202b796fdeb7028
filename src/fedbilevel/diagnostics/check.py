"""Check a hypergradient: compare several ways of computing it with the exact one, in float64."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from fedbilevel.algorithms.parts.adaptive_steps import adaptive
from fedbilevel.core.algorithm import Algorithm, check_algorithm
from fedbilevel.core.card import aligned
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import NonFiniteError, require, require_count, unknown
from fedbilevel.core.facts import Findings
from fedbilevel.core.fed import Fed
from fedbilevel.core.hyperparameters import at, field_values
from fedbilevel.core.problem import ImplicitTerm
from fedbilevel.core.tree import PyTree, join, nonfinite_leaves, split
from fedbilevel.diagnostics.measure import DifferentiablePoint, point, same_shapes
from fedbilevel.engines.engine import Engine
from fedbilevel.engines.progress import report_stage
from fedbilevel.engines.solve import solve
from fedbilevel.oracles.exact import (
    ExactHypergradient,
    Inner,
    Slopes,
    dense_implicit,
    implicit_by_cg,
    implicit_with,
    slopes,
    solve_inner,
    unrolled_gradient,
)
from fedbilevel.oracles.operators import Extremes, Solution, extreme_eigenvalues, neumann
from fedbilevel.oracles.population import Population

DENSE = 500  # the largest dim y for which the exact hypergradient is computed with a dense Hessian
LOCAL = 1000  # the largest number of clients for which every client's own hypergradient is computed
LOCAL_NOTES = {
    "inverse": "each client uses its own Hessian; the error is bias",
    "identity": "each client uses its own ∇y f_i for v; the error is bias",
    "none": "the mean of ∇x f_i, since ∇y F vanishes at y*(x)",
}


@dataclass(frozen=True)
class ReportRow:
    """Compare an estimate h with the exact hypergradient ∇: cosine, error ‖h − ∇‖/‖∇‖, and relative standard error."""

    name: str
    cosine: float
    relative_error: float
    standard_error: float | None  # for a mean of random draws, relative to ‖∇‖; else None
    cost: str
    note: str


@dataclass(frozen=True, repr=False)
class HypergradientReport:
    """Hold the result of `check_hypergradient`, which prints as a table; `report[NAME]` is the row of an estimate.

    Args:
        rows: for each estimate, its distance from the exact hypergradient, and its cost.
        hypergradient: the exact hypergradient, with the structure of x, in float64.
        y: the y at which it was computed.
        inner_gradient: ‖∇y G‖ at this y, 0 at y*(x).
        smallest_curvature: the smallest eigenvalue of the inner Hessian at this y, by Lanczos' method; it is negative
            if the Hessian is indefinite.
        negative_curvature: whether this eigenvalue is negative, or conjugate gradient found negative curvature.
        notes: sentences about the point, the reference and the accuracy of these numbers.
    """

    rows: tuple[ReportRow, ...]
    hypergradient: PyTree
    y: PyTree
    inner_gradient: float
    smallest_curvature: float
    negative_curvature: bool
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> ReportRow:
        by_name = {row.name: row for row in self.rows}
        if name not in by_name:
            raise unknown("estimate", name, by_name)
        return by_name[name]

    def __repr__(self) -> str:
        head = ("estimate", "cosine", "relative error", "± std. error", "cost", "")
        return "\n".join([*self.notes, "", aligned([head, *(_cells(row) for row in self.rows)])])


def check_hypergradient(
    problem: Any,
    clients: Clients,
    x: PyTree,
    y: PyTree,
    *,
    estimators: Mapping[str, Any] | None = None,
    solve_inner: bool = True,
    steps: int = 100,
    terms: int = 20,
    step: float | None = None,
    directions: int = 4,
    draws: int = 100,
    cohort: int | None = None,
    engine: Engine | None = None,
    key: int = 0,
) -> HypergradientReport:
    """Compare estimates of the hypergradient ∇Φ(x), where Φ(x) = F(x, y*(x)), with the exact one on all samples.

    Everything is computed in float64, whatever the dtypes of x, y and the samples are, and even if JAX's 64-bit mode is
    off.

    Args:
        problem, clients, x, y: as for `solve`.
        estimators: by name, functions (x, y) -> a tree with the shapes of x, which are called at (x, y*(x)) with
            float64 arrays; or algorithms with a method `hypergradient_at(fed, x, y, key)`, which are run for `draws`
            rounds.
        solve_inner: whether to solve for y*(x) first. Otherwise estimates are compared with the implicit gradient at
            (x, y), which is not ∇Φ(x), and finite differences are left out.
        steps: the number of steps of the unrolled gradient descent, which starts from the given y.
        terms, step: the number of terms and the step of the truncated Neumann series; the unrolled descent has the same
            step. A step of None is 1/L.
        directions: the number of random directions for finite differences of Φ.
        draws: the number of rounds for each algorithm.
        cohort: the number of clients in these rounds; None: all clients.
        engine: the engine of these rounds.
        key: the seed of directions and draws.

    Returns:
        A report with the rows "unrolled", "finite differences", "series", "cg", "local" (the mean of the clients' own
        hypergradients: its error is the bias of heterogeneity) and a row for each estimator.

    Raises:
        ConfigurationError: an argument is not allowed, or an estimate does not have the shape of x.
        NonFiniteError: an estimate contains NaN or infinity.
    """
    for name, count in {"steps": steps, "terms": terms, "directions": directions, "draws": draws}.items():
        require_count(name, count)
    require(step is None or 0 < step < float("inf"), "step", step, "a positive number or None")
    with jax.enable_x64(True):
        at = point(problem, clients, x, y)
        population = Population.of(at.problem, clients)
        dim = sum(leaf.size for leaf in jax.tree.leaves(at.y))
        plan = SamplingPlan(solve_inner, dim <= DENSE, steps, terms, step, directions, key)
        found = estimates(population, at.x, at.y, plan)
        rows = ReportRows(at, found)
        rows.add_own(plan)
        rows.add_local(clients)
        for name, given in (estimators or {}).items():
            taken = {row.name for row in rows.rows}
            require(name not in taken, "the name of an estimator", name, f"none of {sorted(taken)}")
            report_stage(f"drawing estimates of {name}")
            if isinstance(given, Algorithm):
                options = {"cohort": cohort, "engine": engine, "key": key}
                mean, error, exchanges = sample(given, at.problem, clients, at.x, found.inner.y, draws, **options)
                spent = f"{exchanges:g} exchange{'s' * (exchanges != 1)}"
                rows.add_given(name, mean, spent, f"mean of {draws} draws", error)
            else:
                function = callable(given) and not isinstance(given, type)
                require(function, f"estimators[{name!r}]", given, "a function (x, y) -> tree, or an algorithm")
                rows.add_given(name, split(given(join(at.x, at.x_fixed), join(found.inner.y, at.y_fixed)))[0])
        return rows.report(population, plan, dim)


class ReportRows:
    """Collect the rows of a report; each row compares an estimate with the exact hypergradient."""

    def __init__(self, at: DifferentiablePoint, found: Estimates) -> None:
        self.at, self.found = at, found
        self.rows, self.notes = list[ReportRow](), list[str]()
        self.truth = ravel_pytree(found.yardstick.hypergradient)[0]
        if bad := nonfinite_leaves((found.inner.y, found.yardstick.hypergradient)):
            raise NonFiniteError(
                f"the implicit gradient, with which estimates are compared, is not finite ({', '.join(bad)})", names=bad
            )

    def add(self, name: str, h: PyTree, cost: str, note: str) -> None:
        """Add a row for an estimate that this library has computed.

        The row of an estimate that is not finite says "diverged", since its method may diverge if the inner Hessian is
        not positive definite.
        """
        if nonfinite_leaves(h):
            self.rows.append(ReportRow(name, float("nan"), float("inf"), None, cost, f"diverged; {note}"))
        else:
            self.compare(name, ravel_pytree(h)[0], self.truth, cost, note)

    def add_given(
        self, name: str, h: PyTree, cost: str = "", note: str = "", standard_error: float | None = None
    ) -> None:
        """Add an estimate of the user, which must be finite and have the shapes of x."""
        same_shapes(f"estimators[{name!r}]", h, self.at.x)
        if bad := nonfinite_leaves(h):
            raise NonFiniteError(f"the estimate {name!r} has NaN or infinity: {', '.join(bad)}", names=[name])
        self.compare(name, ravel_pytree(h)[0], self.truth, cost, note, standard_error)

    def compare(self, name: str, h: Any, truth: Any, cost: str, note: str, standard_error: float | None = None) -> None:
        """Add a row that compares the vectors h and `truth`; `standard_error` is that of h, in absolute terms."""
        a, b = np.asarray(h, np.float64), np.asarray(truth)
        size, length = np.linalg.norm(b), np.linalg.norm(a)
        cosine = float(a @ b / (size * length)) if size and length else float("nan")
        error = float(np.linalg.norm(a - b) / size) if size else float("inf" if length else 0)
        relative = standard_error / float(size) if standard_error is not None and size else standard_error
        self.rows.append(ReportRow(name, cosine, error, relative, cost, note))

    def add_own(self, plan: SamplingPlan) -> None:
        """Add rows for the estimates of this library, except the local hypergradient."""
        found = self.found
        step, low = found.step, found.spectrum.smallest

        def left(n: int) -> str:
            factor = abs(1 - step * low)
            return f"(1 − {step:.3g}·μ)^N = {factor**n:.1e}" if factor < 1 else f"grows by {factor:.3g} in each step"

        self.add("unrolled", found.unrolled, f"{plan.steps} steps", left(plan.steps))
        if found.slopes is not None:
            moved, size = np.linalg.norm(found.slopes.errors), np.linalg.norm(found.slopes.values)
            note = f"norm {size:.3g} over {plan.directions} random directions; half the width changes it by {moved:.1e}"
            solves = f"{4 * plan.directions} inner problems"
            self.compare("finite differences", found.slopes.values, found.slopes.directions @ self.truth, solves, note)
        self.add("series", found.series, f"{plan.terms - 1} products", left(plan.terms))
        itself = "" if plan.dense else "; this is the reference"
        note = f"relative residual {float(found.system.residual):.1e}{itself}"
        self.add("cg", found.cg, f"{int(found.system.iterations)} products", note)

    def add_local(self, clients: Clients) -> None:
        """Add the mean of the clients' own hypergradients, or a note if there are too many clients."""
        if len(clients) > LOCAL:
            self.notes.append(f"{len(clients)} clients, more than {LOCAL}: their own hypergradients are left out")
            return
        each = Population.each(self.at.problem, clients, range(len(clients)))
        p, implicit_term = jnp.asarray(clients.weights), self.at.problem.implicit_term
        h, failed = local_hypergradient(each, p, self.at.x, self.found.inner.y, implicit_term=implicit_term)
        note = LOCAL_NOTES[implicit_term]
        if failed:
            note = f"{int(failed)} of {len(clients)} clients' own Hessians are not positive definite"
        self.add("local", h, "1 exchange", note)

    def report(self, population: Population, plan: SamplingPlan, dim: int) -> HypergradientReport:
        """Return the report, with notes on the point, the spectrum and the reference; `dim` is the dimension of y."""
        found = self.found
        low, high = found.spectrum.smallest, found.spectrum.largest
        negative = bool(found.system.negative_curvature >= 0) or bool(found.inner.negative_curvature) or low < 0
        norm = float(found.inner.gradient_norm)
        where = "(x, y*(x))" if plan.solve_inner else "(x, y)"
        how = "dense" if plan.dense else f"conjugate gradient to a residual of {float(found.system.residual):.0e}"
        size = np.linalg.norm(self.truth)
        self.notes[:0] = [
            f"implicit gradient at {where}, {how}: norm {size:.6g}; dim x = {self.truth.size}, dim y = {dim}, "
            f"{population.counts[0]} outer and {population.counts[1]} inner samples, all in float64",
            f"inner gradient at this point: norm {norm:.1e}; inner Hessian: eigenvalues {low:.3g} to {high:.3g}",
        ]
        if (project := self.at.problem.project_x) is not None:
            step = optax.tree.sub(self.at.x, found.yardstick.hypergradient)
            left = float(optax.tree.norm(optax.tree.sub(self.at.x, project(step))))
            self.notes.append(f"projected gradient, ‖x − P(x − ∇)‖: {left:.3g}; it is 0 if x is stationary in its set")
        if self.at.single:
            self.notes.append("x or y had less precision than float64, and was converted to float64")
        if not plan.solve_inner:
            self.notes.append("the reference is ∇Φ(x) only if the inner gradient is 0; finite differences are left out")
        if negative:
            self.notes.append(
                "NEGATIVE CURVATURE: the inner Hessian is not positive definite, so that y*(x) and ∇Φ are not defined; "
                "a ridge in y, added to the inner loss, helps"
            )
        # the rounding error of a gradient is about ε·L·‖y‖; a norm above a thousand times this is not due to rounding
        limit = 1e3 * float(np.finfo(np.float64).eps) * max(high, 1.0) * max(1.0, float(optax.tree.norm(found.inner.y)))
        if plan.solve_inner and norm > limit:
            newton = int(found.inner.iterations)
            self.notes.append(
                f"the inner problem was NOT solved: its gradient is {norm:.1e} after {newton} Newton steps"
            )
        return HypergradientReport(
            tuple(self.rows), found.yardstick.hypergradient, found.inner.y, norm, low, negative, tuple(self.notes)
        )


def _cells(row: ReportRow) -> tuple[str, ...]:
    error = "" if row.standard_error is None else f"± {row.standard_error:.1e}"
    return row.name, f"{row.cosine:+.6f}", f"{row.relative_error:.1e}", error, row.cost, row.note


CG_TOLERANCE = 1e-10


@dataclass(frozen=True)
class SamplingPlan:
    """Hold the estimates to compute and their numbers of steps; see `check_hypergradient`."""

    solve_inner: bool
    dense: bool
    steps: int
    terms: int
    step: float | None
    directions: int
    seed: int


@dataclass(frozen=True)
class Estimates:
    """Hold estimates of the hypergradient at (x, y), and the quantities that the notes on them need."""

    inner: Inner  # the y at which estimates are compared, with the diagnostics of its computation
    spectrum: Extremes  # the eigenvalues of ∇²yy G at (x, y)
    step: float  # the step of the series and of the unrolled descent
    yardstick: ExactHypergradient
    unrolled: PyTree
    series: PyTree
    cg: PyTree
    system: Solution  # the result of conjugate gradient
    slopes: Slopes | None


def estimates(population: Population, x: PyTree, start: PyTree, plan: SamplingPlan) -> Estimates:
    """Compute all estimates except the local hypergradient."""
    report_stage("solving the inner problem")
    if plan.solve_inner:
        inner = solve_inner(population, x, start)
    else:
        norm, zero = optax.tree.norm(population.inner.gradients(x, start)[1]), jnp.asarray(0)
        inner = Inner(start, norm, zero, zero, jnp.asarray(False))
    y = inner.y
    report_stage("comparing hypergradients")
    spectrum = extreme_eigenvalues(lambda v: population.inner.hess_v(x, y, v), y, plan.seed, iterations=100)
    scale = max(abs(spectrum.smallest), abs(spectrum.largest))
    step = plan.step or (1 / scale if scale else 1.0)
    by_cg, system = implicit_by_cg(population, x, y, tolerance=CG_TOLERANCE)
    drawn = None
    if plan.solve_inner:
        report_stage("finite differences")
        # The truncation error is of order h⁴, and the rounding error of order ε/h. Errors of 1e-10 are small enough,
        # and with a small h fewer kinks of the loss lie between the two points.
        width = float(np.finfo(np.float64).eps) ** (1 / 3) * max(1.0, float(optax.tree.norm(x)))
        drawn = slopes(population, x, y, plan.seed, directions=plan.directions, width=width)
        report_stage("comparing hypergradients")
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
    v = neumann(lambda v: population.inner.hess_v(x, y, v), b, terms=terms, step=step)
    return implicit_with(population, x, y, v).hypergradient


@partial(jax.jit, static_argnames="implicit_term")
def local_hypergradient(
    each: Population, p: Array, x: PyTree, y: PyTree, *, implicit_term: ImplicitTerm = "inverse"
) -> tuple[PyTree, Array]:
    """Compute the mean of the clients' own hypergradients, Σ p_i (∇x f_i − ∇²xy g_i v_i), as in LFedNest.

    By `implicit_term`, v_i is (∇²yy g_i)⁻¹ ∇y f_i ("inverse"), ∇y f_i ("identity") or 0 ("none").

    Args:
        each: the losses of single clients, stacked.
        p: the weights of the clients.
        x, y: the point.
        implicit_term: the rule for v_i.

    Returns:
        The mean, with the structure of x, and the number of clients whose linear system failed, since the client's
        Hessian is not positive definite or the system could not be solved accurately.
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


class ProbeState(NamedTuple):
    """Hold the point, and the mean and spread of the estimates so far (Welford's recurrence)."""

    x: PyTree
    y: PyTree
    mean: PyTree
    squares: PyTree  # Σ (h − mean)², entry by entry
    draws: Array


def sample(
    given: Any, problem: Any, clients: Clients, x: PyTree, y: PyTree, draws: int, **options: Any
) -> tuple[PyTree, float, float]:
    """Run `given.hypergradient_at(fed, x, y, key)` in each of `draws` rounds; schedules have their value in round 0.

    Returns:
        The mean of the estimates; its standard error, √(trace of the covariance / draws); and the exchanges per
        estimate.
    """
    check_algorithm(given)
    given = adaptive(given, problem)
    wanted = "an algorithm with a method hypergradient_at(fed, x, y, key)"
    require(type(given).estimates_hypergradient(), "estimator", given, wanted)
    given = at(given, 0)
    cls: Any = type(given)
    result = solve(
        _probe(cls)(**field_values(given)), problem, clients, x, y, rounds=draws, eval_every=draws, **options
    )
    spread = sum(float(jnp.sum(leaf)) for leaf in jax.tree.leaves(result.state.squares))
    error = (spread / (draws - 1) / draws) ** 0.5 if draws > 1 else float("nan")
    return result.state.mean, error, result.ledger.exchanges / draws


@functools.cache
def _probe(cls: Any) -> Any:
    """Return a subclass of the algorithm `cls` whose rounds estimate a hypergradient, and do not change x and y."""

    class Probe(cls):  # type: ignore[misc]
        def init(self, x: PyTree, y: PyTree) -> ProbeState:
            zero = jax.tree.map(jnp.zeros_like, x)
            return ProbeState(x, y, zero, zero, jnp.zeros((), jnp.int32))

        def round(self, fed: Fed, state: ProbeState, key: Array) -> ProbeState:
            h = self.hypergradient_at(fed, state.x, state.y, key)
            same_shapes(f"the hypergradient of {cls.__name__}", h, state.x)
            draws = state.draws + 1
            mean = jax.tree.map(lambda m, a: m + (a - m) / draws, state.mean, h)
            squares = jax.tree.map(lambda s, a, old, new: s + (a - old) * (a - new), state.squares, h, state.mean, mean)
            return ProbeState(state.x, state.y, mean, squares, draws)

        def finished(self, state: ProbeState) -> bool:
            return False

        def findings(self, state: ProbeState) -> Findings:
            return Findings()

        def remarks(self, state: ProbeState) -> tuple[str, ...]:
            return ()

    Probe.__name__, Probe.__qualname__, Probe.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Probe
