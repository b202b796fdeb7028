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

LOCAL_STEPS = 5  # with mini-batches: averages the noise of as many draws for one exchange
INNER_ROUNDS = 20  # of FedNest's epoch at the most
TERMS = 10  # of its series at the most
CG_TOLERANCE = 1e-6
SOLVED = 8  # inner rounds of so many κ leave e^−8 of y's error, and of a truncated series


@dataclass(frozen=True)
class Scales:
    """Hold the quantities that determine the fields, for full batches or for mini-batches.

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
    """Fields of SimFBO, ShroFBO, F2SA and CorrectedFBO: FedBiO's steps are the server's."""
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
    """Return a short series if products are noisy, else conjugate gradient."""
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
    """Return, by name, why no fields are suggested for the other methods."""
    unknown = "nobody has written down how their steps follow from what is measured"
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
    """Write the Python expression that calls a class with these fields, numbers in three digits."""
    return f"{name}({', '.join(f'{field}={_expression(value)}' for field, value in fields.items())})"


def _expression(value: Any) -> str:
    """Return the Python expression of a field's value; for a part, only what differs from its defaults."""
    if isinstance(value, Part):
        return call(f"fb.parts.{type(value).__name__}", own_values(value))
    if isinstance(value, XYV):
        return call("fb.XYV", value._asdict())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
