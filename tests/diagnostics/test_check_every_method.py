"""Do the library's own methods pass the check that users run on theirs?"""

import pytest
from agreement import MINIMAX, SIMPLE_BILEVEL, SINGLE_LEVEL

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed
from refusals import refuses
from representatives import slow_but

TASK = quadratic(clients=4, samples=(3, 5), seed=6)  # clients of two kinds, each of which is compiled by itself
ONE_LOSS = fb.Clients([TASK.clients.outer.row(i) for i in range(4)], weights=TASK.clients.weights)
PROBLEMS = {
    fb.Bilevel: (TASK.problem, TASK.clients, TASK.x0, TASK.y0),
    fb.Minimax: (MINIMAX, ONE_LOSS, TASK.x0, TASK.y0),
    fb.SingleLevel: (SINGLE_LEVEL, TASK.clients, TASK.x0),
    fb.SimpleBilevel: (SIMPLE_BILEVEL, TASK.clients, TASK.x0),
}
METHODS = {name: cls for name, cls in authoring.ALGORITHMS.items() if cls.__module__.startswith("fedbilevel.")}
ALONE = {fb.IRIG}  # they need a single client with all samples
NEVER_REFUSED = {
    "rounds move the state",
    "a seed repeats a run",
    "another seed",
    "one client after the other",
    "chunks of one client",
}


@pytest.mark.parametrize("name", slow_but("bi-fista", of=sorted(METHODS.keys() - {cls.name for cls in ALONE})))
def test_our_methods_pass_the_check_of_methods(name):
    """Each method with its own fields passes, on a problem of the first kind that it solves.

    If a check fails, the error has the report.
    """
    method = fixed(METHODS[name]())
    report = fb.check_method(method, *PROBLEMS[method.solves[0]], rounds=2)
    refused = {check.name for check in report.checks if check.outcome == "refused"}
    assert not refused & NEVER_REFUSED
    claims = method.facts.bias == "nothing" and method.solves[0] is fb.Bilevel
    assert ("the solution of a quadratic problem" not in refused) == claims


def test_a_method_for_one_client_is_refused_as_in_a_run():
    with refuses("IRIG: clients"):
        fb.check_method(fb.IRIG(), *PROBLEMS[fb.SimpleBilevel])
