"""Is this hypergradient right? Every way to it, side by side, against the implicit gradient in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import NonFiniteError, require, require_count, unknown
from fedbilevel.core.tree import PyTree, nonfinite_leaves, split
from fedbilevel.diagnostics.estimates import Estimates, SamplingPlan, estimates, local_hypergradient
from fedbilevel.diagnostics.point import DifferentiablePoint, point, same_shapes
from fedbilevel.diagnostics.probe import sample
from fedbilevel.engines.engine import Engine
from fedbilevel.engines.progress import doing
from fedbilevel.oracles.population import Population

DENSE = 500  # dim y up to which the yardstick is dense
LOCAL = 1000  # clients up to which everyone's own hypergradient is computed
LOCAL_NOTES = {
    "inverse": "every client with its own Hessian: its error is bias",
    "identity": "every client with its own ∇y f_i for v: its error is bias",
    "none": "the mean of ∇x f_i, as ∇y F vanishes at y*(x)",
}

Estimator = Callable[[PyTree, PyTree], PyTree]
"""(x, y) -> an estimate of the hypergradient, like x."""


@dataclass(frozen=True)
class ReportRow:
    """One estimate h against the yardstick ∇: cosine, ‖h − ∇‖/‖∇‖, and the same for its standard error."""

    name: str
    cosine: float
    relative_error: float
    standard_error: float | None  # of a mean of random draws, relative to ‖∇‖ as the error is; else None
    cost: str
    note: str


@dataclass(frozen=True)
class HypergradientReport:
    """The result of `check_hypergradient`; print it, or take a row by its name."""

    rows: tuple[ReportRow, ...]
    hypergradient: PyTree  # the yardstick, like x, float64
    y: PyTree  # where it was taken
    inner_gradient: float  # ‖∇y G‖ there
    smallest_curvature: float  # of the inner Hessian there, from Lanczos; negative: indefinite
    negative_curvature: bool  # that, or conjugate gradient met some
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> ReportRow:
        by_name = {row.name: row for row in self.rows}
        if name not in by_name:
            raise unknown("estimate", name, by_name)
        return by_name[name]

    def __str__(self) -> str:
        head = ("estimate", "cosine", "relative error", "± std. error", "cost", "")
        lines = [head, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*self.notes, "", *(line.rstrip() for line in table)])


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
    """Compare estimates of ∇Φ(x), Φ(x) = F(x, y*(x)), with the implicit gradient over all samples of all clients.

    All in float64, whatever the dtype of x, y and the samples, and whether or not JAX has it switched on.

    Args:
        problem, clients, x, y: as for `solve`.
        estimators: by name, functions (x, y) -> a tree like x, called at (x, y*(x)) with float64 arrays; or algorithms
            with a method `hypergradient_at(fed, x, y, key)`, played for `draws` rounds on `cohort` clients (None: all).
        solve_inner: take y to y*(x) first. Otherwise the yardstick is the implicit gradient at (x, y), which is not
            ∇Φ(x), and finite differences are left out.
        steps: N of the unrolled gradient descent, which starts from the given y.
        terms, step: of the truncated Neumann series; the unrolled descent has the same step. None: 1/L.
        directions: random directions for finite differences of Φ.
        draws: rounds played with each algorithm.
        key: seed of directions and draws.

    Returns:
        A report with the rows "unrolled", "finite differences", "series", "cg", "local" (the mean of the clients' own
        hypergradients: its error is the bias of heterogeneity) and one per estimator.

    Raises:
        ConfigurationError: an argument is not allowed, or an estimate does not have the shape of x.
        NonFiniteError: an estimate holds NaN or infinity.
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
            doing(f"drawing estimates of {name}")
            if isinstance(given, Algorithm):
                drawn = sample(
                    given, at.problem, clients, at.x, found.inner.y, draws=draws, cohort=cohort, engine=engine, key=key
                )
                spent = f"{drawn.exchanges:g} exchange{'s' * (drawn.exchanges != 1)}"
                rows.add_given(name, drawn.mean, spent, f"mean of {draws} draws", drawn.standard_error)
            else:
                function = callable(given) and not isinstance(given, type)
                require(function, f"estimators[{name!r}]", given, "a function (x, y) -> tree, or an algorithm")
                rows.add_given(name, split(given(at.like_given(at.x), rows.full_y(y)))[0])
        return rows.report(population, plan, dim)


class ReportRows:
    """The rows so far, and what they are measured against."""

    def __init__(self, at: DifferentiablePoint, found: Estimates) -> None:
        self.at, self.found = at, found
        self.rows, self.notes = list[ReportRow](), list[str]()
        self.truth = ravel_pytree(found.yardstick.hypergradient)[0]
        if bad := nonfinite_leaves((found.inner.y, found.yardstick.hypergradient)):
            raise NonFiniteError(f"the implicit gradient is not finite ({', '.join(bad)}): no yardstick")

    def add(self, name: str, h: PyTree, cost: str, note: str) -> None:
        """One of our own; it may well diverge, where the inner Hessian is not positive definite."""
        if nonfinite_leaves(h):
            self.rows.append(ReportRow(name, float("nan"), float("inf"), None, cost, f"diverged; {note}"))
        else:
            self.compare(name, ravel_pytree(h)[0], self.truth, cost, note)

    def add_given(
        self, name: str, h: PyTree, cost: str = "", note: str = "", standard_error: float | None = None
    ) -> None:
        same_shapes(f"estimators[{name!r}]", h, self.at.x)
        if bad := nonfinite_leaves(h):
            raise NonFiniteError(f"the estimate {name!r} holds NaN or infinity: {', '.join(bad)}")
        self.compare(name, ravel_pytree(h)[0], self.truth, cost, note, standard_error)

    def compare(self, name: str, h: Any, truth: Any, cost: str, note: str, standard_error: float | None = None) -> None:
        a, b = np.asarray(h, np.float64), np.asarray(truth)
        size, length = np.linalg.norm(b), np.linalg.norm(a)
        cosine = float(a @ b / (size * length)) if size and length else float("nan")
        error = float(np.linalg.norm(a - b) / size) if size else float("inf" if length else 0)
        relative = standard_error / float(size) if standard_error is not None and size else standard_error
        self.rows.append(ReportRow(name, cosine, error, relative, cost, note))

    def add_own(self, plan: SamplingPlan) -> None:
        found = self.found
        step, low = found.step, found.spectrum.smallest

        def left(n: int) -> str:
            factor = abs(1 - step * low)
            return f"(1 − {step:.3g}·μ)^N = {factor**n:.1e}" if factor < 1 else f"grows by {factor:.3g} each time"

        self.add("unrolled", found.unrolled, f"{plan.steps} steps", left(plan.steps))
        if found.slopes is not None:
            moved, size = np.linalg.norm(found.slopes.errors), np.linalg.norm(found.slopes.values)
            note = (
                f"along {plan.directions} random directions, {size:.3g} in all; half the width moves it by {moved:.1e}"
            )
            solves = f"{4 * plan.directions} inner problems"
            self.compare("finite differences", found.slopes.values, found.slopes.directions @ self.truth, solves, note)
        self.add("series", found.series, f"{plan.terms - 1} products", left(plan.terms))
        itself = "" if plan.dense else "; the yardstick itself"
        note = f"relative residual {float(found.system.residual):.1e}{itself}"
        self.add("cg", found.cg, f"{int(found.system.iterations)} products", note)

    def add_local(self, clients: Clients) -> None:
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

    def full_y(self, given: PyTree) -> PyTree:
        """y*(x) with what is no variable in the y that was given."""
        fixed = split(given)[1]
        return jax.tree.map(
            lambda a, b: b if a is None else a, self.found.inner.y, fixed, is_leaf=lambda leaf: leaf is None
        )

    def report(self, population: Population, plan: SamplingPlan, dim: int) -> HypergradientReport:
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
            f"inner gradient there: {norm:.1e}; inner Hessian: {low:.3g} to {high:.3g}",
        ]
        if self.at.single:
            self.notes.append("x or y came in less than float64 and was converted")
        if not plan.solve_inner:
            self.notes.append(
                "the yardstick equals ∇Φ(x) only where the inner gradient vanishes; no finite differences"
            )
        if negative:
            self.notes.append(
                "NEGATIVE CURVATURE: the inner Hessian is not positive definite; y*(x) and ∇Φ are not defined"
            )
        # rounding of a gradient is about ε·L·‖y‖; a thousand times that is no longer rounding
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
