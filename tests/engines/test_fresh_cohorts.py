"""Exchanges with fresh cohorts: which clients are members, and what work and time each exchange takes.

In a fresh cohort, a client neither sees nor changes the state that it keeps between rounds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import authoring

ROUNDS, CLIENTS, NONE = 6, 3, -1.0


class State(NamedTuple):
    x: jax.Array
    y: jax.Array


class Asking(authoring.Algorithm):
    """A method whose rounds ask their own cohort, two fresh cohorts, and their own again.

    y has a row for each of these exchanges: the means over its clients of id, kept number and local steps.
    """

    @property
    def asks(self):
        return authoring.Asks(fresh_cohorts=2)

    def init(self, x, y):
        return State(x, y)

    def init_client(self, x, y):
        return jnp.zeros(())

    @authoring.phase
    def question(self, client, message, key):
        kept, later = (NONE * jnp.ones(()), None) if client.state is None else (client.state, client.state + 1)
        told = jnp.stack([client.id.astype(float), kept, client.local_steps(0) * jnp.ones(())])
        return authoring.Reply(told, state=later)

    def round(self, fed, state, key):
        return State(state.x, jnp.stack([fed.mean(self.question, state.x, key, fresh=c) for c in (None, 0, 1, None)]))


@pytest.fixture(params=[fb.Reference, fb.Local], scope="module")
def rounds(request):
    """Return a function of the cohort: y after each round, and the virtual time of each round.

    Client i takes 1 + i seconds for an exchange.
    """

    def play(cohort):
        seen, samples = [], {"a": np.zeros((CLIENTS, 2))}
        clients = fb.Clients(samples, samples, local_steps=(1, 1000))
        problem = fb.Bilevel(lambda x, y, b: x * jnp.sum(y) * b["a"][0], lambda x, y, b: x * jnp.sum(y) * b["a"][0])
        engine = request.param(clock=fb.Clock(network=[1.0, 2.0, 3.0]))
        options = {"eval_every": 1, "callbacks": [lambda result, row: seen.append(np.asarray(result.y).round(9))]}
        result = fb.solve(
            *(Asking(), problem, clients, jnp.zeros(()), jnp.zeros((4, 3))),
            **options | {"rounds": ROUNDS, "cohort": cohort, "engine": engine},
        )
        assert (result.ledger.exchanges, result.ledger.replies) == (4 * ROUNDS, 4 * ROUNDS * (cohort or CLIENTS))
        return seen[1:], np.diff(result.history["time"])

    return play


def test_the_own_cohort_alone_keeps_what_it_did(rounds):
    """Exchanges with the round's own cohort change the state of a client, and exchanges with fresh cohorts do not.

    The state counts the exchanges that the client has seen. Cohorts have one client.
    """
    calls, fresh = dict.fromkeys(range(CLIENTS), 0), set()
    for (own, *others, again), took in zip(*rounds(1), strict=True):
        client = int(own[0])
        assert (own[1], again[1]) == (calls[client], calls[client] + 1)
        calls[client] += 2
        assert (again[0], again[2]) == (own[0], own[2])
        assert all(kept == NONE for _, kept, _ in others)
        # each exchange waits for its cohort
        assert round(took) == sum(1 + int(told[0]) for told in (own, *others, again))
        fresh |= {(client, *(int(told[0]) for told in others))}
    assert len(fresh) > CLIENTS  # otherwise a fresh cohort would follow from the round's own


def test_a_fresh_cohort_of_everyone_draws_its_own_work(rounds):
    """A fresh cohort of all clients draws its own numbers of local steps.

    The means of three numbers from 1..1000 agree for two cohorts with a chance below 1/300.
    """
    for (own, one, other, again), _ in zip(*rounds(None), strict=True):
        assert own[2] == again[2]
        assert len({own[2], one[2], other[2]}) == 3
