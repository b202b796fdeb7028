"""Training on clients of limited capacity: which units of the model each of them holds."""

from __future__ import annotations

from typing import Any

from jax import Array

from fedbilevel.algorithms.parts.wrapper import Wrapper
from fedbilevel.core.algorithm import check_algorithm, methods_that
from fedbilevel.core.config import static
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.fed import Fed
from fedbilevel.core.submodel import Pruned
from fedbilevel.core.tree import PyTree
from fedbilevel.core.unit_policy import Policy, UnitPolicy


class Submodels(Wrapper):
    """A method that trains submodels, with another choice of units than its own, which is by importance.

    Of no effect where the clients have no capacities.

    Args:
        algorithm: the method, one that can train submodels.
        policy: "importance", "static", "rolling", "random" or "covered": see core/unit_policy.py.
        pruned: "both", "x" or "y": whose units may be left out; with "x" groups of units that reach into y stay whole.
        fixed: of "random" and "covered": the same units in every round.
        min_coverage: of "covered": deal each segment but the first to exactly so many clients of a capacity, and the
            first to all others; None deals them out evenly.
    """

    policy: Policy = static(default="importance")
    pruned: Pruned = static(default="both")
    fixed: bool = static(default=False)
    min_coverage: int | None = static(default=None)

    def validate(self) -> None:
        check_algorithm(self.algorithm)
        _ = self.submodels  # which checks the fields
        if objection := self.algorithm.submodels_objection():
            able = methods_that(lambda method: not method.submodels_objection())
            raise ConfigurationError(f"{self.label} cannot be given Submodels: {objection}; methods that can: {able}")

    @property
    def submodels(self) -> UnitPolicy:
        return UnitPolicy(policy=self.policy, pruned=self.pruned, fixed=self.fixed, min_coverage=self.min_coverage)

    def init(self, x: PyTree, y: PyTree) -> Any:
        return self.algorithm.init(x, y)

    def round(self, fed: Fed, state: Any, key: Array) -> Any:
        return self.algorithm.round(fed, state, key)
