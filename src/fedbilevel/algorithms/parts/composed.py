"""The one place where what a problem and a run ask for is put around a method."""

from __future__ import annotations

from fedbilevel.algorithms.parts.in_set import InSet
from fedbilevel.algorithms.parts.layers import Layer, innermost, layered
from fedbilevel.algorithms.parts.own_block import OwnBlock
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.problem import Problem


def composed(algorithm: Algorithm, problem: Problem, *more: Layer | None) -> Algorithm:
    """Return the method with the layers that its problem asks for, and `more` next to its phases."""
    algorithm = innermost(algorithm, OwnBlock() if problem.local else None, *more)
    return algorithm if problem.project_x is None else layered(algorithm, InSet())
