"""An algorithm's hypergradient at one point, as it comes out of real exchanges, many times over."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.algorithm import check_algorithm
from fedbilevel.core.client import Clients
from fedbilevel.core.config import at, field_values
from fedbilevel.core.errors import require
from fedbilevel.core.fed import Fed
from fedbilevel.core.tree import PyTree
from fedbilevel.diagnostics.point import same_shapes
from fedbilevel.engines.engine import Engine
from fedbilevel.engines.solve import solve


class ProbeState(NamedTuple):
    """The point, and the mean and spread of the estimates so far (Welford's recurrence)."""

    x: PyTree
    y: PyTree
    mean: PyTree
    squares: PyTree  # Σ (h − mean)², entry by entry
    draws: Array


class Sample(NamedTuple):
    """The mean of independent estimates, its standard error, and the exchanges of an estimate."""

    mean: PyTree
    standard_error: float  # of the mean: √(trace of the covariance / draws)
    exchanges: float  # per estimate


def sample(
    given: Any,
    problem: Any,
    clients: Clients,
    x: PyTree,
    y: PyTree,
    *,
    draws: int,
    cohort: int | None,
    engine: Engine | None,
    key: int | Array,
) -> Sample:
    """Ask `given.hypergradient_at(fed, x, y, key)` for one estimate a round; schedules stay at round 0."""
    check_algorithm(given)
    wanted = "an algorithm with a method hypergradient_at(fed, x, y, key)"
    require(type(given).estimates_hypergradient(), "estimator", given, wanted)
    given = at(given, 0)
    cls: Any = type(given)
    result = solve(
        _probe(cls)(**field_values(given)), problem, clients, x, y, rounds=draws, cohort=cohort, engine=engine, key=key
    )
    spread = sum(float(jnp.sum(leaf)) for leaf in jax.tree.leaves(result.state.squares))
    error = (spread / (draws - 1) / draws) ** 0.5 if draws > 1 else float("nan")
    return Sample(result.state.mean, error, result.ledger.exchanges / draws)


@functools.cache
def _probe(cls: Any) -> Any:
    """The algorithm `cls` with other rounds: each asks for one hypergradient and x and y stay where they are."""

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

        def complaint(self, state: ProbeState) -> str:
            return ""

        def warning(self, state: ProbeState) -> str:
            return ""

    Probe.__name__, Probe.__qualname__, Probe.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Probe
