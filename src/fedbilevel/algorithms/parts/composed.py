"""Put the layers that a problem and a run require around a method."""

from __future__ import annotations

from fedbilevel.algorithms.parts.in_set import InSet
from fedbilevel.algorithms.parts.layers import Layer, layered
from fedbilevel.algorithms.parts.own_block import OwnBlock
from fedbilevel.algorithms.parts.own_leaves import OwnLeaves
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.problem import Problem


def composed(algorithm: Algorithm, problem: Problem, *more: Layer | None) -> Algorithm:
    """Return the method with the layers that its problem requires, and with the layers `more`.

    Raises:
        ConfigurationError: the method, or one of its layers, does not allow another layer.
    """
    own = OwnBlock() if problem.local else OwnLeaves() if problem.own else None
    return layered(algorithm, own, *more, None if problem.project_x is None else InSet())
