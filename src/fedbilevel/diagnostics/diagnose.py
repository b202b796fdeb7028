"""What a problem is like near a point, and from what was measured to the fields of an algorithm."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.algorithms.fednest import SVRG
from fedbilevel.algorithms.parts.hypergradients import Implicit
from fedbilevel.algorithms.parts.inner import LocalSGD
from fedbilevel.algorithms.parts.linear_solvers import CG, Neumann
from fedbilevel.core.algorithm import Part
from fedbilevel.core.card import WIDTH, Card, Shown
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import ConfigurationError, require_count, unknown
from fedbilevel.core.hyperparameters import own_values
from fedbilevel.core.problem import Problem, SimpleBilevel, SingleLevel
from fedbilevel.core.tree import XYV, PyTree
from fedbilevel.diagnostics.measure import Measurements, measure, point

LOCAL_STEPS = 5  # with mini-batches: averages the noise of as many draws for one exchange
INNER_ROUNDS = 20  # of FedNest's epoch at the most
TERMS = 10  # of its series at the most
CG_TOLERANCE = 1e-6
SOLVED = 8  # inner rounds of so many κ leave e^−8 of y's error, and of a truncated series
DIGITS = math.log(1000)  # an error reduced a thousandfold


@dataclass(frozen=True)
class Scales:
    """The few numbers that decide, for full batches or for mini-batches.

    Attributes:
        mu, smoothness: μ and L that y has to be stepped by: L grows with the noise of batches and cohorts.
        phi_mu, phi_smoothness: the least and the largest curvature of Φ.
        lag: ‖T‖, see measure.py.
        outer_gradient: the largest ‖∇y F‖ seen.
    """

    mu: float
    smoothness: float
    phi_mu: float
    phi_smoothness: float
    lag: float
    outer_gradient: float
    dim_y: int
    noisy: bool

    @property
    def condition(self) -> float:
        return self.smoothness / self.mu

    @property
    def radius(self) -> float:
        """Ten times ‖∇y F‖/μ, which bounds ‖v*‖ where it was measured: ∇y F changes on the way."""
        return 10 * self.outer_gradient / self.mu

    def outer_step(self, inner_step: float) -> float:
        """γ_x that stays behind y and v, which move by inner steps of that size.

        The lag alone would allow inner_step/‖T‖, Φ by itself 2/L_Φ; harmonically, with a factor of 4 to spare in each.
        """
        return 1 / (self.lag / inner_step + 2 * self.phi_smoothness)


def scales_of(m: Measurements, dim_y: int, batch_size: int | None, weight: float, partial: bool) -> Scales:
    """Scales for that batch size; `weight` is M·max p_i, which multiplies a client's reply where cohorts are `partial`.

    A batch of b independent draws is as smooth as L + (L_1 − L)/b on average, L_1 being that of single samples (Gower
    et al., "SGD: general analysis and improved rates", ICML 2019, expected smoothness).
    """
    smoothness = max(m.here.inner.largest, m.there.inner.largest)
    noisy = batch_size is not None or partial
    if noisy:
        smoothness = max(smoothness, *m.spread.tops)
    if batch_size is not None:
        smoothness += max(0.0, m.sample - smoothness) / batch_size
    if partial:
        smoothness *= weight
    phi, late = m.response.curvature, m.response.lag
    mu = min(m.here.inner.smallest, m.there.inner.smallest) + m.delta
    return Scales(
        mu=max(float(mu), smoothness * 1e-12),
        smoothness=smoothness,
        phi_mu=float(phi.smallest),
        phi_smoothness=float(max(abs(phi.smallest), abs(phi.largest))),
        lag=float(max(abs(late.smallest), abs(late.largest))),
        outer_gradient=max(m.here.outer_gradient, m.there.outer_gradient),
        dim_y=dim_y,
        noisy=noisy,
    )


def plain(s: Scales, batch_size: int | None, work: int | None) -> dict[str, Any]:
    """Fields of FedBiO and FedBiOAcc, whose clients' own steps are the only ones.

    `work` is the most local steps that the population says, if it says any.
    """
    tau = work or (LOCAL_STEPS if batch_size is not None else 1)
    inner = 1 / s.smoothness
    steps = XYV(x=s.outer_step(inner) / tau, y=inner / tau, v=inner / tau)
    return {"local_steps": tau, "batch_size": batch_size, "client_lr": steps}


def single_loop(s: Scales, batch_size: int | None, work: int | None) -> dict[str, Any]:
    """Fields of SimFBO and ShroFBO: FedBiO's steps are the server's."""
    chosen = plain(s, batch_size, work)
    server = chosen["client_lr"]
    # local steps as long as the server's retrace its path; where there is no noise to average they only drift
    local = server if batch_size is not None else XYV(*(1e-3 * size for size in server))
    return {**chosen, "client_lr": local, "server_lr": server, "radius": s.radius}


def nested(s: Scales, batch_size: int | None, work: int | None, inner: type[LocalSGD | SVRG] = SVRG) -> dict[str, Any]:
    """Fields of FedNest: conjugate gradient where its products are exact, a short series where they are noisy.

    The clients' steps are `inner.lr` over their number, so that `work` changes nothing.
    """
    kappa, step = s.condition, 1 / s.smoothness
    rounds = min(INNER_ROUNDS, math.ceil(kappa)) if not s.noisy else min(2, math.ceil(kappa))
    local_steps = 1 if batch_size is None else LOCAL_STEPS
    return {
        "inner": inner(rounds=rounds, local_steps=local_steps, lr=step),
        "hypergradient": Implicit(solver=solver(s)),
        "outer_steps": 1,
        "outer_lr": s.outer_step(rounds * step),
        "batch_size": batch_size,
    }


def solver(s: Scales) -> Neumann | CG:
    """A short series where products are noisy, else conjugate gradient."""
    if s.noisy:
        return Neumann(terms=min(TERMS, math.ceil(s.condition)), step=1 / s.smoothness)
    enough = math.ceil(math.sqrt(s.condition) / 2 * math.log(2 / CG_TOLERANCE))  # of conjugate gradient's error bound
    # in exact arithmetic dim y steps are enough
    return CG(max_steps=min(enough, 2 * s.dim_y), tolerance=CG_TOLERANCE)


nested_plainly = partial(nested, inner=LocalSGD)
"""Fields of FedNestSGD: FedNest's, with plain local steps on y."""


def recursive(s: Scales, batch_size: int | None, work: int | None) -> dict[str, Any]:
    """Fields of FedBiOAcc: the newest gradient weighs ½ where clients drift, since its momentum adds that up."""
    chosen = plain(s, batch_size, work)
    return chosen if chosen["local_steps"] == 1 else {**chosen, "forgetting": 0.5}


def nested_by_mean(s: Scales, batch_size: int | None, work: int | None) -> dict[str, Any]:
    """Fields of FedMBO: FedNestSGD's, but a step on x is one, and short series have lengths of each client's own."""
    chosen = nested_plainly(s, batch_size, work)
    del chosen["outer_steps"]
    found = chosen["hypergradient"].solver
    if isinstance(found, Neumann):
        chosen["hypergradient"] = Implicit(solver=replace(found, sampling="random_per_client"))
    return chosen


def aggregated(s: Scales, batch_size: int | None, work: int | None) -> dict[str, Any]:
    """Fields of AggITD: as many inner rounds as make its series long enough."""
    kappa, step = s.condition, 1 / s.smoothness
    rounds = min(INNER_ROUNDS, math.ceil(kappa)) if s.noisy else math.ceil(SOLVED * kappa)
    return {
        "inner": LocalSGD(rounds=rounds, local_steps=work or 1, lr=step),
        "outer_lr": s.outer_step(rounds * step),
        "batch_size": batch_size,
    }


SUGGESTED: dict[str, Callable[[Scales, int | None, int | None], dict[str, Any]]] = {
    "aggitd": aggregated,
    "fedbio": plain,
    "fedbioacc": recursive,
    "fedmbo": nested_by_mean,
    "fednest": nested,
    "fednest-sgd": nested_plainly,
    "shrofbo": single_loop,
    "simfbo": single_loop,
}
"""(scales, batch size, work) -> fields, by the method's command-line name."""

_OWN = "they average clients' own hypergradients, while the curvature of Φ is what is measured"
_PLANES = "nothing that is measured bounds the steps of the cutting planes' multipliers"
_REASONS = {
    "adbo": _PLANES,
    "afbo": "steps depend on how late replies are, which a run alone shows",
    "fedavg-s": "both players move at once, and what that bears depends on how ∇²xy F turns them, too",
    "fedex": "x is one of some draws, which no step moves",
    "lfednest": _OWN,
    "rabo": _OWN,
    "rafbo": _OWN,
    "sdbo": _PLANES,
}
_REASONS_BY_PROBLEM: dict[type[Problem], str] = {
    SingleLevel: "they solve single-level problems, and what is measured begins with an inner loss",
    SimpleBilevel: "they solve simple bilevel problems, which have no y, and steps follow from the size of X",
}


def not_suggested() -> dict[str, str]:
    """Why no fields are suggested for the other methods, by name."""
    unknown = "nobody has written down how their steps follow from what is measured"
    others = {name: cls.solves[0] for name, cls in sorted(ALGORITHMS.items()) if name not in SUGGESTED}
    return {name: _REASONS.get(name) or _REASONS_BY_PROBLEM.get(kind, unknown) for name, kind in others.items()}


UNDEFINED = (
    "the inner loss still curves downwards where its minimum was sought: y*(x) is not defined; add a ridge to it"
)


@dataclass(frozen=True, repr=False)
class Diagnosis(Shown):
    """The result of `diagnose`: print it for steps to paste and why; `details` has all methods and measurements, and
    `fields` the fields of a method.

    Args:
        measurements: what was measured of the losses: curvatures, the noise of batches, how clients differ.
        rounds: how many rounds it plans for.
        dim_y: how many numbers y has.
        population: M, the number of clients.
        weight: M·max p_i, 1 where all clients weigh the same.
        work: the largest number of local steps that clients bring themselves; None where they bring none.
    """

    measurements: Measurements
    rounds: int
    dim_y: int
    population: int
    weight: float
    work: int | None

    @property
    def mu(self) -> float:
        """The least curvature of G in y at the given point, at most: negative where G is not convex."""
        return self.measurements.here.inner.smallest

    @property
    def smoothness(self) -> float:
        """L: the largest curvature of G in y at the given point."""
        return self.measurements.here.inner.largest

    @property
    def condition(self) -> float:
        """κ = L/μ; infinite where μ ≤ 0."""
        return self.smoothness / self.mu if self.mu > 0 else math.inf

    @property
    def outer_smoothness(self) -> float:
        """The largest curvature of F in y, in size."""
        ends = self.measurements.here.outer
        return max(abs(ends.smallest), abs(ends.largest))

    @property
    def objective_smoothness(self) -> float:
        """L_Φ: the largest curvature of Φ, in size."""
        return self.scales().phi_smoothness

    @property
    def radius(self) -> float:
        """A radius for SimFBO's ball: ten times ‖∇y F‖/μ, which bounds ‖v*‖ where it was measured."""
        return self.scales().radius

    def scales(self, batch_size: int | None = None, cohort: int | None = None) -> Scales:
        """Smoothness, curvature and noise for batches and cohorts of these sizes; None: all samples, all clients."""
        partial = cohort is not None and cohort < self.population
        return scales_of(self.measurements, self.dim_y, batch_size, self.weight, partial)

    def fields(self, algorithm: str, *, batch_size: int | None = None, cohort: int | None = None) -> dict[str, Any]:
        """Constructor fields of a method, parts among them: `FedNest(**diagnosis.fields("fednest"))`.

        Args:
            algorithm: its command-line name, a key of `fedbilevel.authoring.ALGORITHMS`.
            batch_size: samples per draw; None: full batches.
            cohort: clients per round; None: all.

        Raises:
            ConfigurationError: nothing that is measured says which fields suit the method, or y*(x) is not defined.
        """
        require_suggested(algorithm)
        require_count("batch_size", batch_size, optional=True)
        require_count("cohort", cohort, optional=True)
        if self.measurements.response.negative_curvature:
            raise ConfigurationError(UNDEFINED)
        return SUGGESTED[algorithm](self.scales(batch_size, cohort), batch_size, self.work)

    def rounds_needed(self, algorithm: str, *, batch_size: int | None = None, cohort: int | None = None) -> float:
        """Rounds that those fields should need for a thousandfold smaller error; infinite where Φ is not convex."""
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
        """Below which a round's whole step (γ·τ) should stay: of y and v, of x where y and v are exact (double loop),
        and of x where they move along (single loop)."""
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
        """Say in a few lines what the steps follow from, and how many rounds they need, by command-line names."""
        needs = [f"{name}: {self._needs(name)}" for name in algorithms]
        inner, objective = self._inner(), self._objective()
        return [*needs, self._without_steps(), *inner[1:-2], inner[-1], *objective]

    @property
    def details(self) -> str:
        """The fields of all methods, or why there are none; then all that was measured."""
        if self.measurements.response.negative_curvature:
            return "\n".join([f"fields: none for any method. {UNDEFINED}", "", *self._inner()])
        return "\n".join([self._without_steps(), *self._fields(), "", *self._inner(), *self._objective()])

    def _without_steps(self) -> str:
        """Say whether steps that adapt, 1/L on y and v, are expected to do: (1 − 1/κ)^n of an error is left."""
        needed = DIGITS * self.condition
        if self.mu <= 0:
            return "without steps: trouble, since y*(x) need not be defined"
        does = f"y and v come to a thousandth of their error in about {float(f'{needed:.2g}'):,.0f} rounds"
        if needed > self.rounds:
            return f"without steps: trouble, since {does}, of {self.rounds:,} planned; x may outrun them"
        return f"without steps: no trouble expected; {does}"

    def _fields(self) -> list[str]:
        """Full batches and all clients."""
        lines = ["fields with full batches and all clients; fields(NAME, batch_size=…, cohort=…) for others:"]
        lines += [f"  {name}: {_pasted(name, self)}; {self._needs(name)}" for name in SUGGESTED]
        reasons: dict[str, list[str]] = {}
        for name, reason in not_suggested().items():
            reasons.setdefault(reason, []).append(name)
        return [*lines, *(f"  {', '.join(names)}: none; {reason}" for reason, names in reasons.items())]

    def _inner(self) -> list[str]:
        m, ends = self.measurements, self.measurements.here.inner
        lines = [
            f"looked at {m.samples[0]} outer and {m.samples[1]} inner samples ({m.response_samples[0]} and "
            f"{m.response_samples[1]} for Φ) of {self.population} clients, in float64",
            f"inner loss in y: curvature from μ = {ends.smallest:.3g} (± {ends.smallest_residual:.0e}) to "
            f"L = {ends.largest:.3g} (± {ends.largest_residual:.0e}), κ = {self.condition:.3g}; "
            f"single samples up to {m.sample:.3g}",
        ]
        if self.mu <= 0:
            lines.append(
                "  INDEFINITE: the inner loss is not strongly convex in y here, so that y*(x) need not be defined; "
                "add a ridge to it"
            )
        if m.delta:
            lines.append(
                f"  directions with curvature below L/rounds = {self.smoothness / self.rounds:.2g} cannot be learnt in "
                f"{self.rounds} rounds; the fields above leave them out (δ = {m.delta:.2g}) and are for no more rounds"
            )
        s = m.spread
        return [
            *lines,
            f"outer loss in y: curvature up to {self.outer_smoothness:.3g}, ‖∇y F‖ = {m.here.outer_gradient:.3g}",
            f"clients differ: ∇y g_i by {s.inner:.3g} about their mean ({s.inner_share:.0%} of their mean square), "
            f"∇x f_i by {s.outer:.3g} ({s.outer_share:.0%}); "
            f"largest curvature of g_i from {min(s.tops):.3g} to {max(s.tops):.3g}",
        ]

    def _objective(self) -> list[str]:
        phi, late = self.measurements.response.curvature, self.measurements.response.lag
        lines = [
            f"Φ at y*: curvature from {phi.smallest:.3g} to {phi.largest:.3g}, L_Φ = {self.objective_smoothness:.3g}; "
            f"lag {self.scales().lag:.3g} ({late.smallest:.3g} to {late.largest:.3g})"
        ]
        if phi.smallest < 0:
            lines.append("  Φ is not convex here")
        safe = self.safe_steps()
        steps = ", ".join(f"{name} below {size:.3g}" for name, size in safe.items())
        return [*lines, f"safe steps of a round, full batches: {steps}; ‖v‖ within r = {self.radius:.3g}"]

    def _needs(self, algorithm: str) -> str:
        needed = self.rounds_needed(algorithm)
        if math.isinf(needed):
            return "Φ being not convex here, no number of rounds is predicted"
        late = f", more than the {self.rounds} that were planned" if needed > self.rounds else ""
        return f"about {float(f'{needed:.2g}'):,.0f} rounds to a thousandth of the error{late}"


def require_suggested(algorithm: str) -> None:
    """Refuse a method that no fields are suggested for, with the reason."""
    reasons = not_suggested()
    if algorithm in reasons:
        raise ConfigurationError(f"no fields are suggested for {algorithm}: {reasons[algorithm]}")
    if algorithm not in SUGGESTED:
        raise unknown("algorithm", algorithm, {**SUGGESTED, **reasons})


def _pasted(algorithm: str, found: Diagnosis) -> str:
    """The Python expression for a method with its fields, in three digits."""
    return _call(f"fb.{ALGORITHMS[algorithm].__name__}", found.fields(algorithm))


def _call(name: str, fields: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{field}={_expression(value)}' for field, value in fields.items())})"


def _expression(value: Any) -> str:
    """A field's value; of a part what differs from its defaults."""
    if isinstance(value, Part):
        return _call(f"fb.parts.{type(value).__name__}", own_values(value))
    if isinstance(value, XYV):
        return _call("fb.XYV", value._asdict())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


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
    """Estimate what step sizes depend on, near (x, y), and say what it would choose.

    All in float64. The curvature of Φ, and how much of it reaches a single-loop method late, are taken at the
    equilibrium y*(x) (or the nearest to it that `rounds` rounds can reach) on at most 512 samples of each loss.

    Args:
        problem, clients, x, y: as for `solve`.
        rounds: how many rounds can be afforded; only matters where κ exceeds it.
        max_samples: of each loss, at most, evenly spread over clients.
        key: seed of the random starts.

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
