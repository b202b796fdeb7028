"""Define the base class of methods whose rounds step on y, and then on x along a hypergradient."""

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
"""The kinds of problem for `Implicit` and `LocalImplicit`, which differ only in the computation of v."""


class State(NamedTuple):
    """Hold the server's state."""

    x: PyTree
    y: PyTree
    info: SolveInfo  # diagnostics of the last linear system; negative curvature stays recorded for the whole run
    v: PyTree = None  # the state of the part `hypergradient`, such as AFBO's v; None: it has no state


class Nested(Algorithm):
    """Base class of methods that step on y, and then on x along a hypergradient.

    The checks and findings of the method are those of its part `hypergradient`.

    Args:
        batch_size: the number of samples that a client draws for each loss, with replacement; None: all samples.
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
        """Return the next state, with this y; x changes by `change`, unless negative curvature has ended the run."""
        before = state.info.negative_curvature
        first = jnp.where(before >= 0, before, info.negative_curvature)
        stays = (first >= 0) & self.hypergradient.stops
        x = jax.tree.map(lambda old, d: jnp.where(stays, old, old + d), state.x, change)
        return state._replace(x=x, y=y, info=info._replace(negative_curvature=first))


def allowed_by(method: Nested) -> Allows:
    """Return the optional features of a method that its part `hypergradient` allows.

    If replies to the phases of this part may be late, then replies to all phases of the method may be late.
    """
    allows: Allows = method.hypergradient.allows
    return allows._replace(late=allows.late and tuple(sorted(method.phases)))


def own_alone(method: Any, system: str) -> Mapping[str, OwnParts] | No:
    """Return, for each phase, how clients step on their own leaves of y, or `No` with the reason why they cannot.

    In the methods that use this function, each client computes a hypergradient on its own, in the phase `system`. If
    every leaf of y is a client's own, the mean of these hypergradients is the hypergradient of all clients.
    """
    found: Mapping[str, OwnParts] | No = method.hypergradient.allows.own_y
    if isinstance(found, No):
        return found
    if not isinstance(method.inner, LocalSGD):
        return No("its local steps are corrected by a mean of ∇y g_i, which does not exist for a client's own leaves")
    steps = OwnParts(("y",), (("y", lambda method: -method.inner.server_lr),))
    return {"inner.descent": steps, system: OwnParts(("y",), alone=True)}
