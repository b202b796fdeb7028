"""Does each method use every field that may be a client's own number?"""

from dataclasses import replace

import agreement
import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.algorithm import ALGORITHMS
from fedbilevel.core.hyperparameters import entries, replaced
from fedbilevel.core.own import LOCAL_STEPS, own_fields
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed
from refusals import refuses
from representatives import slow_but

NONE = {"BiFISTA", "IRG"}
"""Methods whose clients send a subgradient, and whose server makes the step."""
SHORT = {"iterations": 2, "estimate": fb.parts.LinearizedADMM(steps=2)}
METHODS = {cls.__name__: fixed(cls()) for cls in ALGORITHMS.values() if cls.__name__ not in NONE} | {
    "ADBO": fb.ADBO(wait_for=2, **SHORT),
    "SDBO": fb.SDBO(**SHORT),
    "FISM": fb.FISM(local_steps=2),
    "IRIG": fb.IRIG(local_steps=2),
    "FedBiOAcc": fixed(fb.FedBiOAcc(horizon=5.0)),
    "LFedNest, joint": fixed(fb.LFedNest(joint=True)),
    "RAFBO, coordinates": fixed(fb.RAFBO(hypergradient=fb.parts.Coordinates(terms=2))),
    "SimFBO, mixed": fixed(fb.SimFBO(local_optimizer=fb.parts.Mixed(decay=0.5, pull=0.1))),
    "SimFBO, momentum": fixed(fb.SimFBO(local_optimizer=fb.parts.Momentum())),
    "SimFBO, proximal": fixed(fb.SimFBO(local_optimizer=fb.parts.Proximal())),
}
PROBLEMS = {
    fb.Minimax: agreement.MINIMAX,
    fb.SingleLevel: agreement.SINGLE_LEVEL,
    fb.SimpleBilevel: agreement.SIMPLE_BILEVEL,
}


def short(method):
    """Return the method with series of two terms, whose length is not a client's own number."""
    for entry in entries(method):
        if entry.field.name == "terms":
            method = replaced(method, entry.keys, 2)
    return method


def field(method, path):
    """Return the number in a field; `local_steps` is found in the method or in its inner part."""
    for name in path.split("."):
        method = getattr(method, name) if hasattr(method, name) else getattr(method.inner, name)
    return method


REPEATED = {"ADBO", "SDBO", "AFBO", "FedMBO", "FedBiO", "FedNestSGD", "IRIG", "RAFBO", "ShroFBO", "FedAvg"}
"""Methods that step by clients' own numbers in a class that another method also has."""

LONG = {"FedBiOAcc", "FedNest", "AggITD", "LFedNest", "F2SA", "CorrectedFBO", "FedEx", "MEHA", "RABO"}
"""Methods whose rounds take long to compile. Engines hand a client's own numbers to all methods by the same code."""

SECOND = {"FedBiOAcc", "CorrectedFBO"}
"""Methods with a number that is first used in the second round."""


@pytest.mark.parametrize(
    "name", slow_but(*(name for name in METHODS if "," not in name and name not in REPEATED | LONG), of=METHODS)
)
def test_each_own_number_is_used_and_the_fields_value_for_all_changes_nothing(name):
    """A client's other number in any of these fields changes the state; the field's value for all clients does not.

    The rounds are on two clients. The sums have the same terms in the same order, and agree to a few roundings.
    """
    method = short(METHODS[name])
    method = replace(method, batch_size=None) if method.batch_size else method
    task = quadratic(clients=1 if isinstance(method, fb.IRIG) else 2, dim_x=2, dim_y=3, samples=(3, 3))
    kind = next((kind for kind in PROBLEMS if kind in method.kinds_of_problem), None)
    problem = task.problem if fb.Bilevel in method.kinds_of_problem else PROBLEMS[kind]
    if isinstance(problem, fb.Minimax):
        task = replace(task, clients=fb.Clients(task.clients.outer))
    y0 = None if isinstance(problem, fb.SingleLevel | fb.SimpleBilevel) else task.y0

    def state(own):
        given = task.with_own(own=own).clients, task.x0 + 1, y0
        result = fb.solve(method, problem, *given, rounds=rounds, engine=fb.Reference())
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.state)])

    rounds = 2 if name in SECOND else 1
    paths = [*dict(own_fields(method)), *([] if name in ("ADBO", "SDBO") else [LOCAL_STEPS])]
    alike = {path: np.repeat(field(method, path), len(task.clients)) for path in paths}
    others = {
        path: [numbers[0] + 1 if numbers.dtype == int else numbers[0] / 2, *numbers[1:]]
        for path, numbers in alike.items()
    }
    same = state(alike)
    assert alike
    np.testing.assert_allclose(same, state({}), rtol=1e-12, atol=1e-14)
    for path, other in others.items():
        assert np.max(np.abs(state({**alike, path: other}) - same)) > 1e-9, path


@pytest.mark.parametrize("method", [fb.ADBO(), fb.SDBO(), fb.IRG(), fb.BiFISTA()], ids=lambda method: method.label)
def test_a_method_that_makes_no_local_steps_refuses_them(method):
    task, simple = quadratic(clients=2, dim_x=2, dim_y=3), fb.SimpleBilevel in method.kinds_of_problem
    problem, y0 = (agreement.SIMPLE_BILEVEL, None) if simple else (task.problem, task.y0)
    clients = task.with_own(local_steps=[1, 3]).clients
    with refuses("Clients.local_steps", "1 to 3, one for each client", method.label):
        fb.solve(method, problem, clients, task.x0, y0, rounds=1)
