"""Do clients keep a head that is a dict in a dict, as the parameters of networks are?"""

import jax
import numpy as np
import pytest
from own_leaves import DIM_X, OWN, POPULATION, SHARED, SINGLE, START, X0, inner, outer

import fedbilevel as fb
from refusals import raises_with

STEPS = {**SINGLE, "server_lr": 0.1, "client_lr": 0.1}
METHODS = {
    "SimFBO": fb.SimFBO(**STEPS),
    "F2SA": fb.F2SA(**STEPS, multiplier=20.0),
    "MEHA": fb.MEHA(**STEPS),
    "FedBiO": fb.FedBiO(**SINGLE, client_lr=0.1),
}
NESTED = {
    "body": {"dense": {"bias": START["shared"]}},
    "head": {"last": {"bias": START["own"][:1], "weight": START["own"][1:]}},
}


def flat(y):
    """Return a nested y with its numbers in the two leaves that own_leaves.py uses, own and shared."""
    last = y["head"]["last"]
    return {"own": jax.numpy.concatenate([last["bias"], last["weight"]]), "shared": y["body"]["dense"]["bias"]}


def nested(loss):
    return lambda x, y, batch: loss(x, flat(y), batch)


PROBLEM = fb.Bilevel(nested(outer), nested(inner), own=lambda path: path.startswith("head/last/"))


@pytest.mark.parametrize(
    "name", ["F2SA", *[pytest.param(name, marks=pytest.mark.slow) for name in METHODS if name != "F2SA"]]
)
def test_a_nested_head_gives_the_numbers_of_a_flat_one(name):
    """A run with a nested head equals a run in which y has a single own leaf, and no message contains an own entry."""
    same = fb.Bilevel(outer, inner, own=lambda path: path == "own")
    want, have = (
        fb.solve(METHODS[name], problem, POPULATION, X0, y0, rounds=5)
        for problem, y0 in ((same, START), (PROBLEM, NESTED))
    )
    np.testing.assert_allclose(have.x, want.x, rtol=1e-12, atol=1e-14)
    for i in range(len(POPULATION)):
        for leaf, value in flat(have.own(i)).items():
            np.testing.assert_allclose(value, want.own(i)[leaf], rtol=1e-12, atol=1e-14)
    assert have.ledger.bytes_up == want.ledger.bytes_up == 5 * len(POPULATION) * (DIM_X + 2 * SHARED) * 8
    first, second = (have.own(i)["head"]["last"]["weight"] for i in (0, 1))
    assert len(first) == OWN - 1
    assert np.abs(first - second).max() > 1e-3


def test_corrected_fbo_refuses_it_and_says_why():
    with raises_with(fb.errors.UnsupportedError, "CorrectedFBO cannot leave parts of y to their clients"):
        fb.solve(fb.CorrectedFBO(), PROBLEM, POPULATION, X0, NESTED, rounds=1)
