"""Determine the costs of a round by tracing it, without computing anything."""

from __future__ import annotations

import math

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.recorder import CapacityClass, calls_of
from fedbilevel.engines.submodels import SubmodelPlan


def cost_of_round(algorithm: Algorithm, problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> Ledger:
    """Return the costs of a round in which every client takes part, without computing the round.

    The ledger has exchanges, replies, bytes and operations. Gradients, products and time are not counted, and are 0.

    Args:
        algorithm, problem, clients: as for `solve`.
        x, y: the variables at the start of the run; only shapes matter.

    Raises:
        ConfigurationError: the costs are not fixed, because values of the run decide how often clients are asked,
            because the round waits for some of the clients only, or because capacities change from round to round.
    """
    ledger = Ledger(rounds=1, flops=0)
    for number, (cut, count) in enumerate(groups_of(algorithm, problem, clients, x, y)):
        for exchange, (phase, down, up), cost in calls_of(algorithm, problem, clients, x, y, cut):
            if exchange.early or not math.isfinite(exchange.times):
                message = f"{algorithm.label} decides only during a round how many clients run the phase {phase}"
                path, allowed = f"number of clients of phase {phase}", "fixed before the round"
                raise ConfigurationError(path=path, got="not fixed", allowed=allowed, message=message)
            times = int(exchange.times)
            ledger.exchanges += times if number == 0 else 0
            ledger.replies += times * count
            ledger.bytes_down += times * count * down
            ledger.bytes_up += times * count * up
            known = ledger.flops is not None and cost is not None
            ledger.flops = (ledger.flops or 0) + times * count * (cost or 0) if known else None
    return ledger


def groups_of(
    algorithm: Algorithm, problem: Problem, clients: Clients, x: PyTree, y: PyTree
) -> list[tuple[CapacityClass | None, int]]:
    """Return, for each capacity, a pair of the capacity and the number of clients that have it.

    Without submodels, the only capacity is None: all clients hold the whole model.
    """
    plan = SubmodelPlan.of(algorithm, problem, clients, x, y)
    if plan is None:
        return [(None, len(clients))]
    if plan.number.ndim > 1:
        message = "capacities change from round to round, and with them what a round costs"
        raise ConfigurationError(path="Clients.capacity", got="by round", allowed="the same", message=message)
    return list(zip(plan.classes, plan.places, strict=True))
