"""Train the own leaves of y for a client that took no part in a run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import NumericalError, require
from fedbilevel.core.own_y import own_paths, parted_y
from fedbilevel.core.problem import Bilevel, Loss
from fedbilevel.core.tree import PyTree, join, nonfinite_leaves, split
from fedbilevel.engines.history import Result
from fedbilevel.oracles.exact import inner_solution


def personalise(problem: Bilevel, result: Result, samples: PyTree, *, start: PyTree = None) -> PyTree:
    """Return y for a new client, which took no part in the run.

    The shared leaves of y are those of the result. The own leaves are trained on the new client's samples: Newton's
    method with conjugate gradient minimises the inner loss in them, up to rounding, while x and the shared leaves stay
    as they are in the result. The result is not changed.

    Args:
        problem: the problem that was passed to `solve`, with `own`.
        result: the result of a run of that problem.
        samples: the new client's inner samples, with leaves of shape (samples, ...).
        start: a tree with the structure of y0, in whose own leaves training begins; its other leaves are not used.
            None: training begins at the mean of all clients' own leaves, without weights. A start is required over
            Flower, where own leaves stay at their sites.

    Raises:
        ConfigurationError: y has no own leaves, or a start is required.
        NumericalError: the inner loss is not convex in the own leaves at a point that training reached.
    """
    require(isinstance(result, Result), "personalise: result", result, "the result of fb.solve")
    asked = isinstance(problem, Bilevel) and problem.own is not None and bool(result.own_leaves)
    require(asked, "personalise: problem", problem, "a Bilevel with `own`, and the result of its run")
    (x, x_fixed), (y, y_fixed) = split(result.x), split(result.y)
    is_own = lambda path: path in result.own_leaves  # noqa: E731
    shared, own = parted_y(is_own, y)
    if start is None:
        there = bool(jax.tree.leaves(own))
        require(
            there,
            "personalise: start",
            None,
            "given, like y0: the result has no own leaves of clients, since these stay at their sites",
        )
        first = jax.tree.map(lambda leaf: jnp.mean(leaf, 0), own)
    else:
        variable = split(start)[0]
        own_paths(is_own, variable)
        first = parted_y(is_own, variable)[1]

    def alone(loss: Loss) -> Any:
        return lambda x, own, batch: loss(join(x, x_fixed), join(join(shared, own), y_fixed), batch)

    found = inner_solution(problem.with_losses(alone).with_own(None), Clients([samples]), x, first)
    if bool(found.negative_curvature) or nonfinite_leaves(found.y):
        raise NumericalError("personalise: the inner loss is not convex in the client's own leaves of y; add a ridge")
    return join(join(shared, found.y), y_fixed)
