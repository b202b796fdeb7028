"""`fed.sum_first` over Flower counts the first n replies in the order of their arrival, and late ones in later rounds.

Each run must equal a simulation of its events in NumPy.
"""

import heapq
import json
from functools import partial

import federations
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import authoring
from fedbilevel.core.config import static
from fedbilevel.core.errors import ExchangeError
from fedbilevel.core.tree import XY
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import RequestMessage, decode
from refusals import codes, raises_with, refuses
from representatives import slow_but

TASK = federations.TASK
P = TASK.clients.weights
TARGETS = np.stack([TASK.clients.outer.row(k)["t"].mean(0) for k in range(6)])
DELAYS = np.array([1.0, 1.7, 2.9, 4.3, 5.9, 0.6])
LR, ROUNDS = 0.3, 8


class Async(authoring.Algorithm):
    """Let y follow the targets of the first n clients that reply; if `both`, x also follows those of all clients."""

    n: int = static(default=2)
    both: bool = static(default=False)

    @property
    def asks(self):
        return authoring.Asks(first=self.n)

    def init(self, x, y):
        return XY(x, y)

    @authoring.phase
    def towards(self, client, message, key):
        return authoring.Reply(jnp.mean(client.outer_batch(key, None)["t"], 0) - message, gradients=1)

    @authoring.phase
    def all_towards(self, client, message, key):
        return authoring.Reply(jnp.mean(client.outer_batch(key, None)["t"], 0)[:2] - message)

    def round(self, fed, state, key):
        y = state.y + LR * fed.sum_first(self.n, self.towards, state.y, key)
        x = state.x + LR * fed.mean(self.all_towards, state.x, key) if self.both else state.x
        return XY(x, y)


class Silent(Async):
    """Call `fed.sum_first` without a declaration in `asks`."""

    asks = authoring.Asks()


class Overdue(Async):
    """Wait for replies that would become older than `max_staleness` exchanges."""

    max_staleness: int = static(default=1)

    def round(self, fed, state, key):
        last = fed.sum_first(self.n, self.towards, state.y, key, max_staleness=self.max_staleness)
        return XY(state.x, state.y + LR * last)


def simulated(n, delays, both=False, stop=None):
    """Return (x, y, staleness, number of replies) of each round, simulated by events in the order of their times.

    If the run stops before round `stop` and is resumed, all requests are new, and clients first finish their work.
    """
    x, y, time, trace = np.zeros(2), np.zeros(3), 0.0, []
    working, kept = [], []  # heap of (time of reply, client, y in its request, round); replies during the wait for x
    for round in range(ROUNDS):
        begin = dict.fromkeys(range(6), time)
        if round == stop:
            begin |= {entry[1]: entry[0] for entry in working}
            working = []
        for client in sorted(set(range(6)) - {entry[1] for entry in working}):
            heapq.heappush(working, (begin[client] + delays[client], client, y, round))
        used, kept = kept, []
        while len(used) < n:
            used.append(heapq.heappop(working))
            time = used[-1][0]
        y = y + LR * sum(P[client] * (TARGETS[client] - fetched) for _, client, fetched, _ in used)
        stale = sum(P[entry[1]] * (round - entry[3]) for entry in used) / sum(P[entry[1]] for entry in used)
        if both:  # each client is asked when it is idle, and its reply for y is kept
            home = {entry[1]: entry[0] for entry in working}
            time = max(home.get(client, time) + delays[client] for client in range(6))
            kept, working = sorted(working), []
            x = x + LR * (sum(p * target[:2] for p, target in zip(P, TARGETS, strict=True)) - x)
        trace.append((x, y, stale, len(used)))
    return trace


def run(algorithm, delays=None, stop=None, lost=lambda client, request: False, **options):
    """Return the result and (x, y) after each round; with `stop`, the run stops after `stop` rounds and is resumed."""

    def delay(client, message):
        request: RequestMessage = decode(RequestMessage, message)
        if not request.phase:
            return 0.0
        return np.inf if lost(client, request) else delays[client]

    grid = InProcess(federations.app(algorithm), 6, delay=None if delays is None else delay)
    trace = []
    note = lambda result, row: trace.append((np.asarray(result.x), np.asarray(result.y)))  # noqa: E731
    more = {"rounds": ROUNDS, "cohort": None, "eval_every": 1, "callbacks": [note], **options}
    if stop is not None:
        federations.solve(algorithm, grid, **more | {"rounds": stop})
        more["resume"] = True
    return federations.solve(algorithm, grid, **more), trace[1:]  # without the start


def followed(expected, *given, **options):
    """Assert that a run has the expected x, y and staleness in each round; return its result and what was expected."""
    result, trace = run(*given, **options)
    near = partial(np.testing.assert_allclose, rtol=0, atol=1e-12)
    near([x for x, _ in trace], [entry[0] for entry in expected])
    near([y for _, y in trace], [entry[1] for entry in expected])
    near(result.history["staleness"][1:], [entry[2] for entry in expected])
    return result, expected


@pytest.mark.parametrize("both", [False, True], ids=["alone", "with a mean after it"])
@pytest.mark.parametrize("n", slow_but(2, of=[2, 5]))
def test_the_order_of_events(n, both):
    """A run equals the simulation of its events, in which the first n replies of a round count.

    Replies have weights below 1, so that 8 rounds do not amplify rounding errors, and the tolerance is 1e-12.
    """
    result, expected = followed(simulated(n, DELAYS, both), Async(n=n, both=both), DELAYS)
    assert n == 5 or both or max(result.history["staleness"][1:]) > 1  # some replies came late
    assert result.ledger.gradients == sum(entry[3] for entry in expected)


@pytest.mark.parametrize("both", [False, True], ids=["alone", "with a mean after it"])
def test_a_run_that_was_stopped_goes_on_without_what_was_under_way(both, tmp_path):
    expected = simulated(2, DELAYS, both, stop=4)
    followed(expected, Async(n=2, both=both), DELAYS, stop=4, checkpoint=tmp_path / "run.npz")
    changed = np.max(np.abs(expected[-1][1] - simulated(2, DELAYS, both)[-1][1]))
    assert changed == 0 if both else changed > 1e-6  # after a mean no reply is under way


def test_time_does_not_drift():
    """The times of exchanges are added up before the sum is rounded: eight of 0.6 ticks are 4.8 ticks, not 8."""
    result, _ = run(Async(n=6), np.full(6, 6e-5))
    assert result.ledger.ticks == 5


@pytest.mark.parametrize(("algorithm", "options", "path", "got", "fact"), [
    (Async(), {"cohort": 4}, "cohort", 4, "None: Async"),
    (Overdue(max_staleness=0), {}, "fed.sum_first: max_staleness", 0, ""),
    (Async(n=7), {}, "fed.sum_first: n", 7, "1 to 6"),
])  # fmt: skip
def test_what_a_run_cannot_be_asked(algorithm, options, path, got, fact):
    """A run of first replies refuses a cohort, a largest staleness of 0, and more first replies than clients."""
    with refuses(path, got, fact):
        run(algorithm, **options)


def test_a_method_says_that_it_asks_for_first_replies():
    with refuses("asks", fact="Asks(first"):
        run(Silent())


def test_fewer_than_needed_can_come():
    """A run ends with an error if fewer than n replies count after the last attempt.

    Client 4 never replies, so that n = 6 is not reached in 3 attempts, and n = 5 is.
    """
    delays = np.where(np.arange(6) == 4, np.inf, DELAYS)
    terms = Terms(deadline=20.0, join=1.0)
    counts = {"round": 0, "phase": "towards", "replies": 5, "needed": 6}
    with raises_with(ExchangeError, "after 3 attempts", **counts) as error:
        run(Async(n=6), delays, terms=terms)
    assert codes(error) == {4: Code.LATE}
    result, trace = run(Async(n=5), delays, terms=terms)
    there = np.arange(6) != 4
    np.testing.assert_allclose(trace[0][1], LR * P[there] @ TARGETS[there], rtol=0, atol=1e-12)
    assert result.round == ROUNDS


def test_one_who_failed_is_asked_again_where_it_is_needed():
    """A client that failed is asked again if its reply is needed, and no other client is asked twice.

    So seven messages of three numbers are sent to six clients, of 24 bytes each.
    """
    algorithm, failed = Async(n=6), []

    def once(response, message):
        if failed:
            return response
        failed.append(response.client)
        raise RuntimeError("once")

    client_app = federations.misbehaving(federations.app(algorithm), {(2, 0, 0): once})
    result = federations.solve(algorithm, InProcess(client_app, 6), rounds=1, cohort=None)
    np.testing.assert_allclose(result.y, LR * P @ TARGETS, rtol=0, atol=1e-12)
    assert failed == [2]
    assert result.ledger.bytes_down == 7 * 24


class Mixed(Async):
    """Wait for the first n replies of one phase, and then for the replies of all clients of another phase."""

    def round(self, fed, state, key):
        y = state.y + LR * fed.sum_first(self.n, self.towards, state.y, key)
        return XY(state.x + LR * fed.sum_first(6, self.all_towards, state.x, key), y)


@pytest.mark.parametrize("n", slow_but(1, of=[1, 5]))
def test_answers_of_another_kind_keep_nobody_busy(n):
    """A phase that needs all clients waits for those that are busy with another phase, and keeps their replies to it.

    The kept replies count in the next round, which waits for n − (number of kept replies) more, if this is positive.
    The replies of all other clients are then kept in turn. A sum over all clients is the population's mean, so that the
    distance of x from the mean target shrinks by the factor 1 − LR in each round.
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


def test_nobody_is_waited_for_beyond_the_deadline(tmp_path):
    """With bounded staleness, a round waits for an overdue reply until the deadline, and the log then says so.

    Client 4 never replies to its first request, and round 2 waits for this reply until 20 s are over.
    """
    log = tmp_path / "log.jsonl"
    lost = lambda client, request: client == 4 and request.round == 0  # noqa: E731
    terms = Terms(deadline=20.0, poll=100.0)
    result, _ = run(Overdue(n=1, max_staleness=2), DELAYS, lost=lost, terms=terms, log=log, rounds=5)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    refused = [{c: r["why"] for c, r in line.get("refused", {}).items()} for line in lines]
    assert refused == [{}, {}, {"4": "no reply within 20 s"}, {}, {}]
    assert result.round == 5
