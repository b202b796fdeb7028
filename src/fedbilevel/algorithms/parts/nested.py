"""What methods share whose rounds step on y, then on x along a hypergradient; the rounds stand in their own files."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.algorithms.parts.inner import LocalSGD
from fedbilevel.algorithms.parts.linear_solvers import SolveInfo
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.config import positive_integer
from fedbilevel.core.facts import Allows, Asks, Findings, No, OwnParts
from fedbilevel.core.fed import Fed
from fedbilevel.core.problem import Bilevel, Compositional, Minimax, Problem
from fedbilevel.core.tree import PyTree

ALL_BILEVEL = Bilevel, Minimax, Compositional
"""Kinds of problem that differ in how v is found alone, which `Implicit` and `LocalImplicit` know."""


class State(NamedTuple):
    """The server's state."""

    x: PyTree
    y: PyTree
    info: SolveInfo  # of the last v; the first negative curvature stays noted
    v: PyTree = None  # what the hypergradient keeps: a v kept by the server (AFBO)


class Nested(Algorithm):
    """Base of methods that step on y, then on x by a hypergradient, whose checks and findings are theirs.

    Args:
        batch_size: samples per draw for each loss, with replacement; None: all.
    """

    hypergradient: Any
    batch_size: int | None = positive_integer(default=32, optional=True)

    def init(self, x: PyTree, y: PyTree) -> State:
        return State(x, y, SolveInfo.unknown(), self.hypergradient.start(y))

    @property
    def asks(self) -> Asks:
        return Asks(fresh_cohorts=self.hypergradient.fresh)

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        self.hypergradient.check(problem, clients, x, y, self.batch_size)

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        return self.hypergradient.estimate(fed, x, y, key).h

    def findings(self, state: State) -> Findings:
        found: Findings = self.hypergradient.findings(state.info)
        return found

    def next_state(self, state: State, change: PyTree, y: PyTree, info: SolveInfo) -> State:
        """Make the next state. Where negative curvature ends the run, x stays from then on."""
        before = state.info.negative_curvature
        first = jnp.where(before >= 0, before, info.negative_curvature)
        stays = (first >= 0) & self.hypergradient.stops
        x = jax.tree.map(lambda old, d: jnp.where(stays, old, old + d), state.x, change)
        return state._replace(x=x, y=y, info=info._replace(negative_curvature=first))


def allowed_by(method: Nested) -> Allows:
    """Return what the hypergradient of a method allows; if replies to it may be late, those to all phases may."""
    allows: Allows = method.hypergradient.allows
    return allows._replace(late=allows.late and tuple(sorted(method.phases)))


def own_alone(method: Any, system: str) -> Mapping[str, OwnParts] | No:
    """Say how clients step leaves of y of their own, where each finds the hypergradient alone, in the phase `system`.

    Such a hypergradient is the federation's where every leaf of y is a client's own.
    """
    found: Mapping[str, OwnParts] | No = method.hypergradient.allows.own_y
    if isinstance(found, No):
        return found
    if not isinstance(method.inner, LocalSGD):
        return No("its local steps are corrected by the mean of ∇y g_i, which no server has for a client's own leaves")
    steps = OwnParts(("y",), (("y", lambda method: -method.inner.server_lr),))
    return {"inner.descent": steps, system: OwnParts(("y",), alone=True)}
