"""A method that changes another one: what is said of the other one is said of it, but for what it says itself."""

from __future__ import annotations

from typing import Any

from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Client, Clients
from fedbilevel.core.config import wrapped
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.core.unit_policy import UnitPolicy


class Wrapper(Algorithm):
    """Every hook asks the method inside, and its state is the state.

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
    def phases(self) -> frozenset[str]:
        return self.algorithm.phases

    def phase_name(self, function: object) -> str:
        return self.algorithm.phase_name(function)

    def named_phase(self, name: str) -> Any:
        return self.algorithm.named_phase(name)

    def init(self, x: PyTree, y: PyTree) -> Any:
        return self.algorithm.init(x, y)

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        return self.algorithm.client_state(problem, x, y)

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        return self.algorithm.run_phase(name, client, message, key)

    def round(self, fed: Fed, state: Any, key: Array) -> Any:
        return self.algorithm.round(fed, state, key)

    @property
    def asynchronous(self) -> bool:
        return self.algorithm.asynchronous

    @property
    def asynchronous_phases(self) -> tuple[str, ...]:
        return self.algorithm.asynchronous_phases

    @property
    def waits_for(self) -> int | None:
        return self.algorithm.waits_for

    @property
    def needs_everyone(self) -> bool:
        return self.algorithm.needs_everyone

    @property
    def extra_cohorts(self) -> int:
        return self.algorithm.extra_cohorts

    @property
    def submodels(self) -> UnitPolicy | None:
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
        return self.algorithm.finished(state)

    def complaint(self, state: Any) -> str:
        return self.algorithm.complaint(state)

    def warning(self, state: Any) -> str:
        return self.algorithm.warning(state)

    def noise_objection(self) -> str:
        return self.algorithm.noise_objection()

    def columns(self, state: Any) -> dict[str, Any]:
        return self.algorithm.columns(state)
