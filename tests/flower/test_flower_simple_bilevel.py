"""FISM over Flower has the numbers of one machine and the bytes that it states, also if clients do not know H."""

import federations
import jax.numpy as jnp
import pytest

import fedbilevel as fb
from fedbilevel.flower.client.site import ClientRuntime
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.server.engine import Flower
from fedbilevel.tasks.location import location
from refusals import refuses

ROUNDS, COHORT, DIM, NUMBER = 3, 2, 3, 8  # NUMBER: the bytes of a number in float64
TASK = location(dim=DIM, targets=7, clients=3)  # clients with 2, 2 and 3 balls: unequal weights and walks
KNOWN = TASK.problem
UNKNOWN = fb.SimpleBilevel(None, lambda x, batch: KNOWN.inner(x, None, batch), KNOWN.project)


OPTIONS = {"rounds": ROUNDS, "key": 1, "eval_every": 1, "metrics": TASK.metrics}


def over_flower(algorithm, problem, cohort=COHORT, known=KNOWN):
    grid = InProcess(federations.app(algorithm, TASK, problem), len(TASK.clients))
    clients = fb.RemoteClients.of(TASK.clients)
    return fb.solve(algorithm, known, clients, TASK.x0, cohort=cohort, engine=Flower(grid=grid), **OPTIONS)


@pytest.mark.parametrize(
    ("algorithm", "cohort", "more_up"),
    [(fb.FISM(order="random"), COHORT, 0), pytest.param(fb.FISM(tolerance=1e-9), 3, 1, marks=pytest.mark.slow)],
)
def test_agrees_with_local_where_clients_do_not_know_h(algorithm, cohort, more_up):
    """FISM has the state, history and costs of `Local`, also if clients do not know H.

    A client gets x, λ𝓗, γ and λ, which are 2·DIM + 2 numbers. It sends the way of its walk and 1/n, and with a
    tolerance also its part of F, which are DIM + 1 or DIM + 2 numbers.
    """
    local = fb.solve(algorithm, KNOWN, TASK.clients, TASK.x0, cohort=cohort, **OPTIONS)
    there = over_flower(algorithm, UNKNOWN, cohort)
    federations.same(local, there)
    assert float(abs(local.x - TASK.x0).max()) > 1e-2
    asked = ROUNDS * cohort
    for ledger in (local.ledger, there.ledger):
        assert ledger.bytes_down == asked * (2 * DIM + 2) * NUMBER
        assert ledger.bytes_up == asked * (DIM + 1 + more_up) * NUMBER
    assert local.ledger.gradients == there.ledger.gradients


def test_fresh_subgradients_need_clients_who_know_h():
    """New subgradients of H in each step need clients that know H; other clients would take H for 0.

    Clients that know H do not get λ𝓗: their message has x, γ and λ, which are DIM + 2 numbers.
    """
    algorithm = fb.FISM(refresh=True)
    with refuses("SimpleBilevel.outer", None, "clients"):
        ClientRuntime(federations.site(algorithm, 0, TASK, UNKNOWN))
    result = over_flower(algorithm, KNOWN, cohort=1)
    assert result.ledger.bytes_down == ROUNDS * (DIM + 2) * NUMBER


def test_the_server_has_to_know_h():
    with refuses("SimpleBilevel.outer", None, "server"):
        over_flower(fb.FISM(), UNKNOWN, known=UNKNOWN)


FLAT = lambda x, batch: jnp.sum(x)  # noqa: E731
FIELDS = {
    "steps": (fb.FISM(lr=30.0, regularization=0.1), "FISM: lr·regularization·μ", "at most 2"),
    "clients": (fb.IRIG(), "IRIG: clients", "1 client"),
}
LOSSES = {
    "H": (fb.SimpleBilevel(jnp.sum, FLAT, KNOWN.project), "SimpleBilevel.outer", "strongly convex"),
    "X": (fb.SimpleBilevel(jnp.sum, FLAT, lambda x: x / 2), "SimpleBilevel.project", "0: "),
}


@pytest.mark.parametrize("case", FIELDS)
def test_the_server_looks_at_fields_before_it_asks(case):
    algorithm, path, fact = FIELDS[case]
    with refuses(path, fact=fact):
        over_flower(algorithm, UNKNOWN, known=KNOWN)


@pytest.mark.parametrize("case", LOSSES)
def test_the_server_looks_at_losses_before_it_asks(case):
    known, path, fact = LOSSES[case]
    with refuses(path, fact=fact):
        over_flower(fb.FISM(), UNKNOWN, known=known)


def test_sites_may_differ_in_what_they_know():
    """Sites with and without H have the same contract, since it has only shapes."""
    sites = [federations.site(fb.FISM(), 0, TASK, problem) for problem in (KNOWN, UNKNOWN)]
    assert len({ClientRuntime(site).contract.text for site in sites}) == 1
