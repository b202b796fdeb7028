"""A method that changes another one: what is said of the other one is said of it, but for what it says itself."""

from __future__ import annotations

from typing import Any

from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients
from fedbilevel.core.config import wrapped
from fedbilevel.core.fed import Fed
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import SubmodelPolicy
from fedbilevel.core.tree import PyTree


class Wrapper(Algorithm):
    """Every hook asks the method inside, whose state is `state.inside`.

    Args:
        algorithm: the method inside.
    """

    algorithm: Algorithm = wrapped(kw_only=False)

    @property
    def label(self) -> str:
        return self.algorithm.label

    @property
    def phases(self) -> frozenset[str]:
        return self.algorithm.phases

    def phase_name(self, function: object) -> str:
        return self.algorithm.phase_name(function)

    def named_phase(self, name: str) -> Any:
        return self.algorithm.named_phase(name)

    @property
    def extra_cohorts(self) -> int:
        return self.algorithm.extra_cohorts

    @property
    def submodels(self) -> SubmodelPolicy | None:
        return self.algorithm.submodels

    @property
    def own_x_lr(self) -> Any:
        return self.algorithm.own_x_lr

    def check_problem(self, problem: Problem, population: int, x: PyTree) -> None:
        self.algorithm.check_problem(problem, population, x)

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> None:
        self.algorithm.check_start(problem, clients, x, y)

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        return self.algorithm.hypergradient_at(fed, x, y, key)

    def finished(self, state: Any) -> Any:
        return self.algorithm.finished(state.inside)

    def complaint(self, state: Any) -> str:
        return self.algorithm.complaint(state.inside)

    def warning(self, state: Any) -> str:
        return self.algorithm.warning(state.inside)

    def noise_objection(self) -> str:
        return self.algorithm.noise_objection()

    def columns(self, state: Any) -> dict[str, Any]:
        return self.algorithm.columns(state.inside)
