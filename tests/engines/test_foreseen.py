"""Does a round cost what was predicted, and is a prediction refused where it is impossible?"""

from dataclasses import replace

import pytest

import fedbilevel as fb
from fedbilevel.engines.foreseen import cost_of_round
from fedbilevel.tasks.hyper_representation import hyper_representation
from refusals import refuses
from representatives import slow_but

LOCAL = fb.parts.LocalSGD(local_steps=2, rounds=2, lr=0.1)
SERIES = fb.parts.Neumann(terms=3, step=0.1)
METHODS = {
    "whole models, one exchange": fb.SimFBO(client_lr=0.1, server_lr=0.1, local_steps=2),
    "whole models, loops": fb.FedMBO(inner=LOCAL, hypergradient=fb.parts.Implicit(solver=SERIES), outer_lr=0.1),
    "submodels": fb.RABO(inner=LOCAL, hypergradient=fb.parts.LocalImplicit(solver=SERIES), outer_lr=0.1),
}
COLUMNS = ("rounds", "exchanges", "replies", "bytes_down", "bytes_up", "flops")


def task_of(case, capacity=(1.0, 0.5, 0.5, 0.25)):
    task = hyper_representation(network="mlp", hidden=(8,), clients=4)
    clients = task.clients
    return replace(task, clients=replace(clients, capacity=capacity) if case == "submodels" else clients)


@pytest.mark.parametrize("case", slow_but("whole models, one exchange", of=METHODS))
def test_a_round_costs_what_was_counted(case):
    """The predicted cost of a round equals the measured cost of a run.

    Of four clients with submodels, one holds the whole model, two hold a half, and one holds a quarter of it.
    """
    method, task = METHODS[case], task_of(case)
    start = method, task.problem, task.clients, task.x0, task.y0
    found, played = cost_of_round(*start), fb.solve(*start, rounds=1, count_flops=True).ledger
    assert {name: getattr(found, name) for name in COLUMNS} == {name: getattr(played, name) for name in COLUMNS}
    assert found.exchanges > 0
    assert found.flops


def test_costs_that_are_not_fixed_are_refused():
    task = task_of("submodels", [[1.0, 0.5, 0.5, 0.25], [0.5, 1.0, 0.5, 0.25]])
    with refuses("Clients.capacity", "by round"):
        cost_of_round(METHODS["submodels"], task.problem, task.clients, task.x0, task.y0)
    growing = replace(METHODS["submodels"], inner=replace(LOCAL, rounds=lambda round: 1 + round))
    task = task_of("submodels")
    with refuses("number of clients of phase inner.descent"):
        cost_of_round(growing, task.problem, task.clients, task.x0, task.y0)
