"""Keep x in a set: the server projects x at the end of every round."""

from __future__ import annotations

from typing import Any

from fedbilevel.algorithms.parts.layers import Kept, Layer
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.authored import with_x
from fedbilevel.core.problem import Problem
from fedbilevel.core.projections import check_set
from fedbilevel.core.tree import PyTree


class InSet(Layer):
    """Keep x in the problem's set, by a projection at the end of every round."""

    kind, place, needs, cannot = "in_set", "state", "project_x", "cannot keep x in a set (project_x)"

    def check(self, method: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
        assert problem.project_x is not None
        check_set(f"{type(problem).__name__}.project_x", problem.project_x, x)

    def after_round(self, method: Algorithm, problem: Problem, kept: Kept, before: Any, after: Any) -> tuple[Any, Kept]:
        assert problem.project_x is not None
        return with_x(method, after, problem.project_x(after.x)), kept
