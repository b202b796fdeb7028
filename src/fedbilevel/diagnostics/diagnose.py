"""Describe a problem near a point, suggest step sizes, and explain them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.card import WIDTH, Card, Shown
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import ConfigurationError, require_count
from fedbilevel.core.tree import PyTree
from fedbilevel.diagnostics.measure import Measurements, measure, point
from fedbilevel.diagnostics.suggested import SUGGESTED, Scales, call, not_suggested, require_suggested, scales_of
from fedbilevel.engines.divergence import with_proximity

DIGITS = math.log(1000)  # `rounds_needed` counts the rounds in which an error falls by the factor e^DIGITS = 1000
UNDEFINED = (
    "the inner loss has negative curvature where its minimum was sought: y*(x) is not defined; add a ridge to it, or "
    "use fb.MEHA, which does not need y*(x)"
)


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """Hold the result of `diagnose`: measurements of a problem, and the step sizes that follow from them.

    Printing a diagnosis shows the call of a method with the suggested step sizes, and the reasons for these step sizes.
    `details` has all methods and measurements, and `fields` returns the suggested fields of a method.

    Args:
        measurements: the measurements of the losses: curvatures, the noise of batches, differences between clients.
        rounds: the planned number of rounds.
        dim_y: the number of entries of y.
        population: M, the number of clients.
        weight: M·max p_i, which is 1 if all clients have the same weight.
        work: the largest of the clients' own numbers of local steps (`Clients.local_steps`); None without such numbers.
    """

    measurements: Measurements
    rounds: int
    dim_y: int
    population: int
    weight: float
    work: int | None

    @property
    def mu(self) -> float:
        """Return μ, the measured least curvature of G in y at the given point; negative if G is not convex there.

        The true least curvature is at most μ.
        """
        return self.measurements.here.inner.smallest

    @property
    def smoothness(self) -> float:
        """Return L, the largest curvature of G in y at the given point."""
        return self.measurements.here.inner.largest

    @property
    def condition(self) -> float:
        """Return the condition number of the inner loss, κ = L/μ; infinite if μ ≤ 0."""
        return self.smoothness / self.mu if self.mu > 0 else math.inf

    @property
    def outer_smoothness(self) -> float:
        """Return the largest absolute curvature of F in y."""
        ends = self.measurements.here.outer
        return max(abs(ends.smallest), abs(ends.largest))

    @property
    def objective_smoothness(self) -> float:
        """Return L_Φ, the largest absolute curvature of Φ."""
        return self.scales().phi_smoothness

    @property
    def radius(self) -> float:
        """Return a radius for SimFBO's ball: ten times ‖∇y F‖/μ, which bounds ‖v*‖ at the points of measurement."""
        return self.scales().radius

    def scales(self, batch_size: int | None = None, cohort: int | None = None) -> Scales:
        """Return smoothness and curvature for batches and cohorts of these sizes; None: all samples, all clients."""
        partial = cohort is not None and cohort < self.population
        return scales_of(self.measurements, self.dim_y, batch_size, self.weight, partial)

    def fields(self, algorithm: str, *, batch_size: int | None = None, cohort: int | None = None) -> dict[str, Any]:
        """Return suggested fields of a method, which may be parts: `FedNest(**diagnosis.fields("fednest"))`.

        Args:
            algorithm: the method's name on the command line, a key of `fedbilevel.authoring.ALGORITHMS`.
            batch_size: the number of samples per draw; None: full batches.
            cohort: the number of clients per round; None: all clients.

        Raises:
            ConfigurationError: no fields can be derived from the measurements for this method, or y*(x) is not defined.
        """
        require_suggested(algorithm)
        require_count("batch_size", batch_size, optional=True)
        require_count("cohort", cohort, optional=True)
        if self.measurements.response.negative_curvature:
            raise ConfigurationError(UNDEFINED)
        return SUGGESTED[algorithm](self.scales(batch_size, cohort), batch_size, self.work)

    def rounds_needed(self, algorithm: str, *, batch_size: int | None = None, cohort: int | None = None) -> float:
        """Estimate after how many rounds a method with the fields of `fields` has a thousandth of its first error.

        The result is infinite if Φ is not convex.
        """
        chosen = self.fields(algorithm, batch_size=batch_size, cohort=cohort)
        s = self.scales(batch_size, cohort)
        if "outer_lr" in chosen:
            outer_step, inner_step = chosen["outer_lr"], chosen["inner"].rounds * chosen["inner"].lr
        else:
            tau, lr = chosen["local_steps"], chosen.get("server_lr", chosen["client_lr"])
            outer_step, inner_step = tau * lr.x, tau * lr.y
        if s.phi_mu <= 0:
            return math.inf
        return DIGITS * max(1 / (outer_step * s.phi_mu), 1 / (inner_step * s.mu))

    def safe_steps(self, batch_size: int | None = None, cohort: int | None = None) -> dict[str, float]:
        """Return upper bounds of the total step of a round, γ·τ for the server's step γ and τ local steps, by name.

        "y, v" is for y and v. "x" is for x if y and v are exact, as in double loops. "x, single loop" is for x if x, y
        and v move together.
        """
        s = self.scales(batch_size, cohort)
        inner = 1 / s.smoothness
        return {"y, v": 2 * inner, "x": 2 / s.phi_smoothness, "x, single loop": 4 * s.outer_step(inner)}

    def card(self) -> Card:
        m, spread = self.measurements, self.measurements.spread
        title = f"Diagnosis of {self.population} clients by {m.samples[0]} outer and {m.samples[1]} inner samples"
        phi, undefined = m.response.curvature, m.response.negative_curvature
        lines = {
            "inner loss": f"curvature in y from {self.mu:.3g} to {self.smoothness:.3g}, κ = {self.condition:.3g}",
            "outer loss": f"curvature in y up to {self.outer_smoothness:.3g}",
            "clients": f"differ in ∇y g_i by {spread.inner_share:.0%} of its mean square, in ∇x f_i by "
            f"{spread.outer_share:.0%}",
            "Φ": UNDEFINED if undefined else f"curvature from {phi.smallest:.3g} to {phi.largest:.3g}",
            "more": "print(…) for steps and why; fields(NAME); details",
        }
        return Card(title, lines)

    def __str__(self) -> str:
        if self.measurements.response.negative_curvature:
            return self.details
        more = "more: details; fields(NAME, batch_size=…, cohort=…) for other methods, batches and cohorts"
        return "\n".join([*textwrap.wrap(_pasted("simfbo", self), WIDTH, subsequent_indent="    "), *self.why(), more])

    def why(self, algorithms: Sequence[str] = ("simfbo",)) -> list[str]:
        """Return lines with the rounds that these methods need, and the measurements that determine the steps."""
        needs = [f"{name}: {_needs(self, name)}" for name in algorithms]
        inner, objective = _losses(self), _objective(self)
        return [*needs, _without_steps(self), *inner[1:-2], inner[-1], *objective]

    @property
    def details(self) -> str:
        """Return the fields of all methods, or the reason why there are none, and then all measurements, as text."""
        if self.measurements.response.negative_curvature:
            return "\n".join([f"fields: none for any method. {UNDEFINED}", "", *_losses(self)])
        return "\n".join([_without_steps(self), *_all_fields(self), "", *_losses(self), *_objective(self)])


def _without_steps(found: Diagnosis) -> str:
    """Return a line that says whether adaptive steps, 1/L on y and v, are enough for the planned number of rounds.

    With the condition number κ of the inner loss, n rounds multiply an error of y or v by (1 − 1/κ)^n.
    """
    needed = DIGITS * found.condition
    if found.mu <= 0:
        return "with adaptive steps: trouble is expected, since y*(x) may not be defined"
    does = f"y and v need about {float(f'{needed:.2g}'):,.0f} rounds to reduce their errors to a thousandth"
    if needed > found.rounds:
        return f"with adaptive steps: trouble is expected, since {does}, and {found.rounds:,} are planned"
    return f"with adaptive steps: no trouble is expected; {does}"


def _all_fields(found: Diagnosis) -> list[str]:
    """Return lines with the fields of all methods, for full batches and all clients."""
    lines = ["fields with full batches and all clients; fields(NAME, batch_size=…, cohort=…) for others:"]
    lines += [f"  {name}: {_pasted(name, found)}; {_needs(found, name)}" for name in SUGGESTED]
    reasons: dict[str, list[str]] = {}
    for name, reason in not_suggested().items():
        reasons.setdefault(reason, []).append(name)
    return [*lines, *(f"  {', '.join(names)}: none; {reason}" for reason, names in reasons.items())]


def _losses(found: Diagnosis) -> list[str]:
    m, ends = found.measurements, found.measurements.here.inner
    lines = [
        f"measured on {m.samples[0]} outer and {m.samples[1]} inner samples ({m.response_samples[0]} and "
        f"{m.response_samples[1]} for Φ) of {found.population} clients, in float64",
        f"inner loss in y: curvature from μ = {ends.smallest:.3g} (± {ends.smallest_residual:.0e}) to "
        f"L = {ends.largest:.3g} (± {ends.largest_residual:.0e}), κ = {found.condition:.3g}; "
        f"single samples up to {m.sample:.3g}",
    ]
    if found.mu <= 0:
        lines.append(
            "  INDEFINITE: the inner loss is not strongly convex in y here, so that y*(x) may not be defined; "
            f"add a ridge to it, or use fb.MEHA{with_proximity(found.mu)}"
        )
    if m.delta:
        lines.append(
            f"  directions with curvature below L/rounds = {found.smoothness / found.rounds:.2g} cannot be learnt in "
            f"{found.rounds} rounds; the fields above ignore them (δ = {m.delta:.2g}), and are for no more rounds"
        )
    s = m.spread
    return [
        *lines,
        f"outer loss in y: curvature up to {found.outer_smoothness:.3g}, ‖∇y F‖ = {m.here.outer_gradient:.3g}",
        f"clients differ: ∇y g_i by {s.inner:.3g} about their mean ({s.inner_share:.0%} of their mean square), "
        f"∇x f_i by {s.outer:.3g} ({s.outer_share:.0%}); "
        f"largest curvature of g_i from {min(s.tops):.3g} to {max(s.tops):.3g}",
    ]


def _objective(found: Diagnosis) -> list[str]:
    phi, late = found.measurements.response.curvature, found.measurements.response.lag
    lines = [
        f"Φ at y*: curvature from {phi.smallest:.3g} to {phi.largest:.3g}, L_Φ = {found.objective_smoothness:.3g}; "
        f"lag {found.scales().lag:.3g} ({late.smallest:.3g} to {late.largest:.3g})"
    ]
    if phi.smallest < 0:
        lines.append("  Φ is not convex here")
    parts = ("y and v", "x", "x in a single-loop method")
    steps = "; ".join(f"{part} below {size:.3g}" for part, size in zip(parts, found.safe_steps().values(), strict=True))
    return [*lines, f"safe steps of a round, full batches: {steps}; ‖v‖ within r = {found.radius:.3g}"]


def _needs(found: Diagnosis, algorithm: str) -> str:
    needed = found.rounds_needed(algorithm)
    if math.isinf(needed):
        return "no number of rounds is predicted, since Φ is not convex here"
    late = f", more than the {found.rounds} that are planned" if needed > found.rounds else ""
    return f"about {float(f'{needed:.2g}'):,.0f} rounds reduce the error to a thousandth{late}"


def _pasted(algorithm: str, found: Diagnosis) -> str:
    """Return the Python expression of a method with its suggested fields, with three digits."""
    return call(f"fb.{ALGORITHMS[algorithm].__name__}", found.fields(algorithm))


def diagnose(
    problem: Any,
    clients: Clients,
    x: PyTree,
    y: PyTree,
    *,
    rounds: int = 1000,
    max_samples: int = 4096,
    key: int = 0,
) -> Diagnosis:
    """Measure the quantities on which step sizes depend, near (x, y), and suggest step sizes.

    Everything is computed in float64. The curvature of Φ, and the lag of single-loop methods, are measured at the
    equilibrium y*(x), or the nearest point that `rounds` rounds can reach, on at most 512 samples of each loss.

    Args:
        problem, clients, x, y: as for `solve`.
        rounds: the planned number of rounds, which only matters if the condition number κ is larger than it.
        max_samples: the largest number of samples of each loss, taken evenly from clients.
        key: the seed of the random starts.

    Raises:
        ConfigurationError: an argument is not allowed, or the inner loss has no positive curvature in y.
    """
    require_count("rounds", rounds)
    require_count("max_samples", max_samples)
    with jax.enable_x64(True):
        at = point(problem, clients, x, y)
        found = measure(at.problem, clients, at.x, at.y, rounds, max_samples, key)
        dim = sum(leaf.size for leaf in jax.tree.leaves(at.y))
    ends = clients.own["local_steps"].ends if "local_steps" in clients.own else ()
    work = int(ends[-1]) if ends else None
    return Diagnosis(found, rounds, dim, len(clients), float(len(clients) * clients.weights.max()), work)
