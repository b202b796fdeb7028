"""The first n answers to arrive: their order, what they were computed on, what becomes of those that come later."""

import heapq
import re

import federations
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.config import static
from fedbilevel.core.errors import ExchangeError
from fedbilevel.core.tree import XY
from fedbilevel.flower.in_process import InProcess
from fedbilevel.flower.records import said_in
from fedbilevel.flower.terms import Terms
from fedbilevel.flower.wire import Ask

TASK = federations.TASK
P = TASK.clients.weights
TARGETS = np.stack([TASK.clients.outer.row(k)["t"].mean(0) for k in range(6)])
DELAYS = np.array([1.0, 1.7, 2.9, 4.3, 5.9, 0.6])
LR, ROUNDS = 0.3, 8


@fb.algorithm
class Async:
    """y follows the clients' targets as they come; where `both`, x does too, and waits for all of them."""

    n: int = static(2)
    both: bool = static(False)
    asynchronous = True

    def init(self, x, y):
        return XY(x, y)

    @fb.phase
    def towards(self, client, message, key):
        return fb.Reply(jnp.mean(client.outer_batch(key, None)["t"], 0) - message, gradients=1)

    @fb.phase
    def all_towards(self, client, message, key):
        return fb.Reply(jnp.mean(client.outer_batch(key, None)["t"], 0)[:2] - message)

    def round(self, fed, state, key):
        y = state.y + LR * fed.first(self.n, self.towards, state.y, key)
        x = state.x + LR * fed.mean(self.all_towards, state.x, key) if self.both else state.x
        return XY(x, y)


def simulated(n, delays, both=False):
    """(x, y, staleness, how many answers) of each round, by hand: events in the order of their times."""
    x, y, time, trace = np.zeros(2), np.zeros(3), 0.0, []
    working, kept = [], []  # heap of (when, client, fetched, round); what came in while x was waited for
    for round in range(ROUNDS):
        for client in sorted(set(range(6)) - {entry[1] for entry in working}):
            heapq.heappush(working, (time + delays[client], client, y, round))
        used, kept = kept, []
        while len(used) < n:
            used.append(heapq.heappop(working))
            time = used[-1][0]
        y = y + LR * sum(P[client] * (TARGETS[client] - fetched) for _, client, fetched, _ in used)
        stale = sum(P[entry[1]] * (round - entry[3]) for entry in used) / sum(P[entry[1]] for entry in used)
        if both:  # each is asked when it comes home; what it brings is kept
            home = {entry[1]: entry[0] for entry in working}
            time = max(home.get(client, time) + delays[client] for client in range(6))
            kept, working = sorted(working), []
            x = x + LR * (sum(p * target[:2] for p, target in zip(P, TARGETS, strict=True)) - x)
        trace.append((x, y, stale, len(used)))
    return trace


def run(algorithm, delays=None, **options):
    """(result, (x, y) after each round)."""

    def delay(client, message):
        ask: Ask = said_in(Ask, message)
        return delays[client] if ask.phase else 0.0

    grid = InProcess(federations.app(algorithm), 6, delay=None if delays is None else delay)
    trace = []
    note = lambda result, row: trace.append((np.asarray(result.x), np.asarray(result.y)))  # noqa: E731
    more = {"rounds": ROUNDS, "cohort": None, "eval_every": 1, "callbacks": [note], **options}
    return federations.solve(algorithm, grid, **more), trace[1:]  # after round 0 there is nothing to see


@pytest.mark.parametrize("both", [False, True], ids=["alone", "with a mean after it"])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_order_of_events(n, both):
    """Weights are below 1, so 8 rounds amplify no rounding: 1e-12."""
    result, trace = run(Async(n=n, both=both), DELAYS)
    expected = simulated(n, DELAYS, both)
    assert len(trace) == len(expected) == ROUNDS
    for (x, y), (x_expected, y_expected, *_) in zip(trace, expected, strict=True):
        np.testing.assert_allclose(y, y_expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(x, x_expected, rtol=0, atol=1e-12)
    stale = [row["staleness"] for row in result.history.rows[1:]]
    np.testing.assert_allclose(stale, [entry[2] for entry in expected], rtol=0, atol=1e-12)
    assert n == 5 or both or max(stale) > 1  # there was something to see
    assert result.ledger.gradients == sum(entry[3] for entry in expected)


def test_everyone_at_once_is_a_mean():
    """Weights sum to 1, so the sum over all is the mean over the population: y → t̄, by a factor 1 − LR a round."""
    result, trace = run(Async(n=6))
    mean = P @ TARGETS
    for round, (_, y) in enumerate(trace, 1):
        np.testing.assert_allclose(y, mean * (1 - (1 - LR) ** round), rtol=0, atol=1e-12)
    assert [row["staleness"] for row in result.history.rows[1:]] == [0.0] * ROUNDS
    assert result.ledger.bytes_down == result.ledger.bytes_up == ROUNDS * 6 * 24


def test_more_than_there_are():
    with pytest.raises(fb.ConfigurationError, match=re.escape("fed.first: n = 7 is not allowed: it must be 1 to 6")):
        run(Async(n=7))


def test_fewer_than_needed_can_come():
    """Client 4 does not answer: within 3 attempts n = 6 is not reached, and n = 5 is."""
    delays = np.where(np.arange(6) == 4, np.inf, DELAYS)
    terms = Terms(deadline=20.0, join=1.0)
    said = "round 0, phase towards: 5 clients answered where 6 are needed after 3 attempts"
    with pytest.raises(ExchangeError, match=re.escape(f"{said} (client 4: no answer within 20 s)")):
        run(Async(n=6), delays, terms=terms)
    result, trace = run(Async(n=5), delays, terms=terms)
    there = np.arange(6) != 4
    np.testing.assert_allclose(trace[0][1], LR * P[there] @ TARGETS[there], rtol=0, atol=1e-12)
    assert result.round == ROUNDS


def test_one_who_failed_is_asked_again_where_it_is_needed():
    """It fails once: the second attempt has its answer, the others' are not asked for twice."""
    algorithm, failed = Async(n=6), []

    def once(answer, message):
        if failed:
            return answer
        failed.append(answer.client)
        raise RuntimeError("once")

    client_app = federations.misbehaving(federations.app(algorithm), {(2, 0, 0): once})
    result = federations.solve(algorithm, InProcess(client_app, 6), rounds=1, cohort=None)
    np.testing.assert_allclose(result.y, LR * P @ TARGETS, rtol=0, atol=1e-12)
    assert failed == [2]
    assert result.ledger.bytes_down == 7 * 24
    assert jax.tree.leaves(result.state)


@fb.algorithm
class Mixed(Async):
    """After the first n answers of one kind, those of all clients of another kind."""

    def round(self, fed, state, key):
        y = state.y + LR * fed.first(self.n, self.towards, state.y, key)
        return XY(state.x + LR * fed.first(6, self.all_towards, state.x, key), y)


@pytest.mark.parametrize("n", [1, 5])
def test_answers_of_another_kind_keep_nobody_busy(n):
    """Those at work on the first kind are waited for where the second needs them; what they bring counts in the next.

    Then n − (what was kept) more are waited for, if that is positive: all others of the six are kept in their turn.
    Sums over all clients are means over the population: x → t̄, by a factor 1 − LR a round.
    """
    result, trace = run(Mixed(n=n), DELAYS)
    mean = (P @ TARGETS)[:2]
    assert len(trace) == ROUNDS
    for round, (x, _) in enumerate(trace, 1):
        np.testing.assert_allclose(x, mean + (1 - LR) ** round * (TASK.x0 - mean), rtol=0, atol=1e-12)
    kept, used = 0, 0
    for _ in range(ROUNDS):
        used += max(n, kept)
        kept = 6 - max(n - kept, 0)
    assert result.ledger.gradients == used
