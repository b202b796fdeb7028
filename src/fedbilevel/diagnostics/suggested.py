"""Suggest the fields of a method from the measurements of a problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.algorithms.fednest import SVRG
from fedbilevel.algorithms.parts.hypergradients import Implicit
from fedbilevel.algorithms.parts.inner import LocalSGD
from fedbilevel.algorithms.parts.linear_solvers import CG, Neumann
from fedbilevel.core.algorithm import Part
from fedbilevel.core.errors import ConfigurationError, unknown
from fedbilevel.core.hyperparameters import own_values
from fedbilevel.core.problem import Problem, SimpleBilevel, SingleLevel
from fedbilevel.core.tree import XYV
from fedbilevel.diagnostics.measure import Measurements

LOCAL_STEPS = 5  # the number of local steps with mini-batches, so that an exchange averages the noise of five draws
INNER_ROUNDS = 20  # the largest number of inner rounds in FedNest's epoch
TERMS = 10  # the largest number of terms of FedNest's series
CG_TOLERANCE = 1e-6
SOLVED = 8  # after 8κ inner rounds, e^−8 of the error of y and of a truncated series remains


@dataclass(frozen=True)
class Scales:
    """Hold the quantities that determine the fields, for full batches or for mini-batches.

    Attributes:
        mu, smoothness: μ and L for the steps on y; L grows with the noise of batches and cohorts.
        phi_mu, phi_smoothness: the least and the largest curvature of Φ.
        lag: ‖T‖, see measure.py.
        outer_gradient: the largest ‖∇y F‖ that was measured.
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
        """Return the condition number κ = L/μ."""
        return self.smoothness / self.mu

    @property
    def radius(self) -> float:
        """Return a radius for SimFBO's ball: ten times the bound ‖∇y F‖/μ of ‖v*‖, since ∇y F changes during a run."""
        return 10 * self.outer_gradient / self.mu

    def outer_step(self, inner_step: float) -> float:
        """Return a step γ_x on x that is slow enough for y and v, which move by inner steps of this size.

        There are two bounds on γ_x: a = 4·inner_step/‖T‖, from the lag of y and v, and b = 2/L_Φ, from the smoothness
        of Φ. The step is 1 / (4 (1/a + 1/b)).
        """
        return 1 / (self.lag / inner_step + 2 * self.phi_smoothness)


def scales_of(m: Measurements, dim_y: int, batch_size: int | None, weight: float, partial: bool) -> Scales:
    """Return the scales for batches of this size, and, if `partial`, for cohorts of some clients.

    `weight` is M·max p_i, by which a client's reply is multiplied in partial cohorts. A batch of b independent draws
    has an expected smoothness of L + (L_1 − L)/b, where L_1 is the smoothness of single samples (Gower et al., "SGD:
    general analysis and improved rates", ICML 2019).
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
    """Return fields of FedBiO and FedBiOAcc, in which only clients make steps.

    `work` is the largest of the clients' own numbers of local steps; None without such numbers.
    """
    tau = work or (LOCAL_STEPS if batch_size is not None else 1)
    inner = 1 / s.smoothness
    steps = XYV(x=s.outer_step(inner) / tau, y=inner / tau, v=inner / tau)
    return {"local_steps": tau, "batch_size": batch_size, "client_lr": steps}


def single_loop(s: Scales, batch_size: int | None, work: int | None) -> dict[str, Any]:
    """Return fields of SimFBO, ShroFBO, F2SA and CorrectedFBO, whose server makes the steps of FedBiO's clients."""
    chosen = plain(s, batch_size, work)
    server = chosen["client_lr"]
    # With noise, local steps of the server's size average the noise. Without noise, local steps only cause drift, and
    # they are made tiny.
    local = server if batch_size is not None else XYV(*(1e-3 * size for size in server))
    return {**chosen, "client_lr": local, "server_lr": server, "radius": s.radius}


def nested(s: Scales, batch_size: int | None, work: int | None, inner: type[LocalSGD | SVRG] = SVRG) -> dict[str, Any]:
    """Return fields of FedNest, with conjugate gradient if products are exact, and with a short series if not.

    A client's step is `inner.lr` divided by the number of its steps. So the fields do not depend on `work`, the largest
    of the clients' own numbers of local steps.
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
    """Return a short series if products are noisy, else conjugate gradient."""
    if s.noisy:
        return Neumann(terms=min(TERMS, math.ceil(s.condition)), step=1 / s.smoothness)
    # The error bound of conjugate gradient gives the number of steps; in exact arithmetic, dim y steps are enough.
    enough = math.ceil(math.sqrt(s.condition) / 2 * math.log(2 / CG_TOLERANCE))
    return CG(max_steps=min(enough, 2 * s.dim_y), tolerance=CG_TOLERANCE)


nested_plainly = partial(nested, inner=LocalSGD)
"""Function that returns fields of FedNestSGD, which are FedNest's with plain local steps on y."""


def recursive(s: Scales, batch_size: int | None, work: int | None) -> dict[str, Any]:
    """Return fields of FedBiOAcc; with several local steps, the newest gradient has the weight ½.

    Clients then drift, and the momentum would add up their drift.
    """
    chosen = plain(s, batch_size, work)
    return chosen if chosen["local_steps"] == 1 else {**chosen, "forgetting": 0.5}


def nested_by_mean(s: Scales, batch_size: int | None, work: int | None) -> dict[str, Any]:
    """Return fields of FedMBO: those of FedNestSGD, with one step on x and series whose length each client draws."""
    chosen = nested_plainly(s, batch_size, work)
    del chosen["outer_steps"]
    found = chosen["hypergradient"].solver
    if isinstance(found, Neumann):
        chosen["hypergradient"] = Implicit(solver=replace(found, sampling="random_per_client"))
    return chosen


def aggregated(s: Scales, batch_size: int | None, work: int | None) -> dict[str, Any]:
    """Return fields of AggITD, with enough inner rounds for its series."""
    kappa, step = s.condition, 1 / s.smoothness
    rounds = min(INNER_ROUNDS, math.ceil(kappa)) if s.noisy else math.ceil(SOLVED * kappa)
    return {
        "inner": LocalSGD(rounds=rounds, local_steps=work or 1, lr=step),
        "outer_lr": s.outer_step(rounds * step),
        "batch_size": batch_size,
    }


SUGGESTED: dict[str, Callable[[Scales, int | None, int | None], dict[str, Any]]] = {
    "aggitd": aggregated,
    "corrected-fbo": single_loop,
    "f2sa": single_loop,
    "fedbio": plain,
    "fedbioacc": recursive,
    "fedmbo": nested_by_mean,
    "fednest": nested,
    "fednest-sgd": nested_plainly,
    "shrofbo": single_loop,
    "simfbo": single_loop,
}
"""(scales, batch size, work) -> fields, by the method's command-line name."""

_OWN = "clients' own hypergradients are averaged, but only the curvature of Φ is measured"
_PLANES = "no measurement bounds the steps of the cutting planes' multipliers"
_REASONS = {
    "adbo": _PLANES,
    "afbo": "the steps depend on the delays of replies, which only a run shows",
    "fedavg-s": "x and y move at once, and the steps also depend on ∇²xy F, which is not measured",
    "fedex": "x is chosen among random draws, so that there are no steps on x",
    "lfednest": _OWN,
    "meha": "it is for inner losses that are not convex in y, where y*(x) and Φ need not exist; its steps adapt",
    "rabo": _OWN,
    "rafbo": _OWN,
    "sdbo": _PLANES,
}
_REASONS_BY_PROBLEM: dict[type[Problem], str] = {
    SingleLevel: "single-level problems have no inner loss, which the measurements need",
    SimpleBilevel: "simple bilevel problems have no y, and the steps follow from the size of X",
}


def not_suggested() -> dict[str, str]:
    """Return the methods for which no fields are suggested, by name, each with the reason."""
    unknown = "no rule derives the steps from the measurements"
    others = {name: cls.solves[0] for name, cls in sorted(ALGORITHMS.items()) if name not in SUGGESTED}
    return {name: _REASONS.get(name) or _REASONS_BY_PROBLEM.get(kind, unknown) for name, kind in others.items()}


def require_suggested(algorithm: str) -> None:
    """Raise a ConfigurationError with the reason if no fields are suggested for a method."""
    reasons = not_suggested()
    if algorithm in reasons:
        raise ConfigurationError(f"no fields are suggested for {algorithm}: {reasons[algorithm]}")
    if algorithm not in SUGGESTED:
        raise unknown("algorithm", algorithm, {**SUGGESTED, **reasons})


def call(name: str, fields: Mapping[str, Any]) -> str:
    """Return the Python expression that calls a class with these fields, with numbers of three digits."""
    return f"{name}({', '.join(f'{field}={_expression(value)}' for field, value in fields.items())})"


def _expression(value: Any) -> str:
    """Return the Python expression of a field's value; for a part, only fields that differ from their defaults."""
    if isinstance(value, Part):
        return call(f"fb.parts.{type(value).__name__}", own_values(value))
    if isinstance(value, XYV):
        return call("fb.XYV", value._asdict())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
