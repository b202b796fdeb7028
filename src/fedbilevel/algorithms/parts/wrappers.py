"""Define methods that wrap another method: a base class, and `Submodels`, which chooses the units that clients hold."""

from __future__ import annotations

from typing import Any

from jax import Array

from fedbilevel.core.algorithm import Algorithm, check_algorithm, refuse_unless_allowed
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import wrapped
from fedbilevel.core.facts import Allows, Asks, Findings
from fedbilevel.core.fed import Fed, Phase, Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tree import PyTree


class Wrapper(Algorithm):
    """Base class of methods that change another method; everything that a subclass does not override is unchanged.

    Args:
        algorithm: the method inside.
    """

    algorithm: Algorithm = wrapped(kw_only=False)

    @property
    def label(self) -> str:
        return self.algorithm.label

    @property
    def kinds_of_problem(self) -> tuple[type[Problem], ...]:
        return self.algorithm.kinds_of_problem

    @property
    def batch_size(self) -> int | None:
        return self.algorithm.batch_size

    @property
    def phases(self) -> dict[str, Phase]:
        return self.algorithm.phases

    @property
    def asks(self) -> Asks:
        return self.algorithm.asks

    @property
    def allows(self) -> Allows:
        return self.algorithm.allows

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        self.algorithm.check(problem, clients, x, y)

    def init(self, x: PyTree, y: PyTree) -> Any:
        return self.algorithm.init(x, y)

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        return self.algorithm.client_state(problem, x, y)

    def round(self, fed: Fed, state: Any, key: Array) -> Any:
        return self.algorithm.round(fed, state, key)

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        return self.algorithm.run_phase(name, client, message, key)

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        return self.algorithm.hypergradient_at(fed, x, y, key)

    def finished(self, state: Any) -> Any:
        return self.algorithm.finished(state)

    def findings(self, state: Any) -> Findings:
        return self.algorithm.findings(state)

    def remarks(self, state: Any) -> tuple[str, ...]:
        return self.algorithm.remarks(state)


def without_wrappers(algorithm: Algorithm) -> Algorithm:
    """Return the method inside all wrappers, such as `Submodels` and layers."""
    return without_wrappers(algorithm.algorithm) if isinstance(algorithm, Wrapper) else algorithm


class Submodels(UnitPolicy, Wrapper):
    """Choose the units of clients of limited capacity by another policy than the method's own, "importance".

    If clients have no capacities, this wrapper changes nothing.

    Args:
        algorithm: the method, which must support submodels.
    """

    def validate(self) -> None:
        check_algorithm(self.algorithm)
        refuse_unless_allowed(self.algorithm, "submodels", "cannot be given Submodels")

    @property
    def allows(self) -> Allows:
        return self.algorithm.allows._replace(submodels=self)
