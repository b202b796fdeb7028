"""The one place where what a problem and a run ask for is put around a method."""

from __future__ import annotations

from fedbilevel.algorithms.parts.in_set import InSet
from fedbilevel.algorithms.parts.layers import Layer, innermost, layered
from fedbilevel.algorithms.parts.own_block import OwnBlock
from fedbilevel.core.algorithm import Algorithm, refuse_unless_allowed
from fedbilevel.core.problem import Problem


def composed(algorithm: Algorithm, problem: Problem, *more: Layer | None) -> Algorithm:
    """Return the method with the layers that its problem asks for, and `more` next to its phases.

    Raises:
        ConfigurationError: the method, or a wrapper around it, does not allow one.
    """
    inside = [OwnBlock() if problem.local else None, *more]
    for layer in filter(None, inside):
        if layer.needs:  # of wrappers, too, within which these layers go
            refuse_unless_allowed(algorithm, layer.needs, layer.cannot)
    algorithm = innermost(algorithm, *inside)
    return algorithm if problem.project_x is None else layered(algorithm, InSet())
