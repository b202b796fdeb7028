"""Who is asked, whose replies end an exchange, and how long it takes, compared to a simulation event by event."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines import in_flight
from fedbilevel.engines.costs import Sums
from fedbilevel.engines.in_flight import IDLE, InFlight, PhaseQueue
from fedbilevel.engines.reference import total_of
from fedbilevel.engines.virtual_time import TICK, ClockState

CLIENTS = 7


class Simulated:
    """Simulate clients one by one, with events in the order of time; the server waits for the first n of a kind."""

    def __init__(self, takes, there):
        self.takes, self.there, self.time = takes, there, 0
        self.work = {}  # client -> (kind, when it is done, exchange in which it was asked)
        self.kept = {"a": [], "b": []}  # (client, exchange in which it was asked)
        self.exchanges = {"a": 0, "b": 0}
        self.counted = {"a": [0] * CLIENTS, "b": [0] * CLIENTS}  # the exchange in which each client handed in last

    def first(self, kind, n, bound=None):
        """Simulate an exchange that waits for the first replies.

        Return three values: the clients that were asked; the replies that count, each with the exchange in which it was
        asked for; and the ticks.
        """
        number, began = self.exchanges[kind], self.time
        used, self.kept[kind] = self.kept[kind], []
        asked, answered = set(), set()
        overdue = set()
        if bound is not None:
            here = {c: e for c, (k, _, e) in self.work.items() if k == kind}
            overdue = {c for c, e in here.items() if number - e >= bound}
            missed = [c for c in range(CLIENTS) if c not in here and number - self.counted[kind][c] > bound]
            overdue |= {c for c in missed if any(self.there(c, t) for t in range(PERIOD))}

        def ask_whoever_is_idle():
            for c, (k, when, e) in list(self.work.items()):
                if k != kind and when <= self.time:
                    del self.work[c]
                    self.kept[k].append((c, e))
                    self.counted[k][c] = self.exchanges[k]
            for c in range(CLIENTS):
                if c not in self.work and c not in answered and self.there(c, self.time):
                    asked.add(c)
                    self.work[c] = (kind, self.time + self.takes[c], number)

        ask_whoever_is_idle()
        last = None
        while len(used) < n or overdue or last == self.next_answer(kind):
            times = [(max(when, self.time), e if k == kind else -1, c) for c, (k, when, e) in self.work.items()]
            coming = self.next_coming(answered)
            when, _, c = min(times, default=(np.inf, 0, 0))
            self.time = min(when, coming)
            if coming >= when and self.work[c][0] == kind:
                used.append((c, self.work.pop(c)[2]))
                answered.add(c)
                if c in overdue:  # other replies at the same moment count too
                    overdue.discard(c)
                    last = self.time
                self.counted[kind][c] = number
            ask_whoever_is_idle()
        self.exchanges[kind] += 1
        return asked, sorted(used), self.time - began

    def next_answer(self, kind):
        return min((max(when, self.time) for k, when, _ in self.work.values() if k == kind), default=np.inf)

    def next_coming(self, answered):
        """Return the time at which the next idle client that is away becomes available."""
        away = [c for c in range(CLIENTS) if c not in self.work and c not in answered]
        later = range(self.time, self.time + PERIOD + 1)
        return min((t for c in away for t in later if self.there(c, t)), default=np.inf)


PERIOD = 40
COME_AND_GO = [1, 0.5, 1, 0.25, 1, 0.8, 0]


def pace_of(takes, availability):
    """Return a pace with this number of ticks for each client."""
    clock = fb.Clock(network=[t * TICK for t in takes], availability=availability, period=PERIOD * TICK, seed=3)
    return clock.pace(CLIENTS)


def opened():
    zero = jnp.zeros((), jnp.int32)
    none = Sums(jnp.zeros(()), jnp.zeros(()), {}, zero, zero, zero)
    table = Sums(jnp.zeros(CLIENTS), jnp.zeros(CLIENTS), {}, *(jnp.zeros(CLIENTS, jnp.int32) for _ in range(3)))
    nobody = jnp.zeros(CLIENTS, jnp.int32)
    by_phase = {kind: PhaseQueue(zero, nobody, table, none, jnp.zeros(())) for kind in "ab"}
    return InFlight(jnp.full(CLIENTS, IDLE, jnp.int32), nobody, by_phase)


@partial(jax.jit, static_argnames=("kind", "bound"))
def planned(queues, pace, now, kind, n, bound):
    return in_flight.first(queues, pace, now, kind, n, 0, bound)


def exchange(queues, pace, now, kind, n, bound):
    """Make an exchange as an engine does, where client i replies 2ⁱ, so that the sum shows which replies are in it."""
    plan = planned(queues, pace, now, kind, n, bound)
    ids = np.arange(CLIENTS)
    one = np.ones(CLIENTS, np.int32)
    table = Sums(jnp.asarray(2.0**ids), jnp.ones(CLIENTS), {}, *(jnp.asarray(one) for _ in range(3)))
    after = in_flight.handed_in(in_flight.written(queues, kind, table), plan, total_of)
    after, sums, age = in_flight.counted(after, plan, kind, total_of)
    return plan, after, sums, float(age)


@pytest.mark.parametrize(
    ("bound", "availability"),
    [
        (1, COME_AND_GO),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [(None, 1.0), (3, COME_AND_GO), (1, 1.0)]),
    ],
)
def test_agrees_with_a_simulation_event_by_event(bound, availability):
    rng = np.random.default_rng(0)
    takes = rng.choice(np.arange(3, 60), CLIENTS, replace=False).tolist()
    pace = pace_of(takes, availability)
    begins, lasts = (None, None) if pace.lasts is None else (pace.begins, pace.lasts)
    there = lambda c, t: begins is None or (t - int(begins[c])) % PERIOD < int(lasts[c])  # noqa: E731
    simulated, queues, now = Simulated(takes, there), opened(), ClockState.start()
    waited = 0
    for _ in range(60):
        kind, n = rng.choice(["a", "b"]), int(rng.choice([1, 2, 4]))
        asked, used, ticks = simulated.first(kind, n, bound)
        plan, queues, sums, age = exchange(queues, pace, now, kind, n, bound)
        now = now.later(pace, plan.ticks)
        assert int(plan.ticks) == ticks
        assert set(np.flatnonzero(plan.asked)) == asked
        counted = [c for c, _ in used]
        assert float(sums.update) == sum(2.0**c for c in counted)
        assert age == sum(simulated.exchanges[kind] - 1 - e for _, e in used)
        waited += ticks > 0
    assert waited > 20  # otherwise the test would show nothing


def test_everyone_is_waited_for_and_brings_what_it_worked_on():
    """`everyone` waits for all clients, which first finish what they were working on.

    The times are 10, 20, ..., 70. The first two replies of kind a end at 20. Then all clients finish and reply once
    more.
    """
    pace = pace_of([10 * (c + 1) for c in range(CLIENTS)], 1.0)
    plan, queues, sums, _ = exchange(opened(), pace, ClockState.start(), "a", 2, None)
    assert (int(plan.ticks), float(sums.update)) == (20, 1 + 2)
    plan = in_flight.everyone(queues, pace, ClockState.start().later(pace, plan.ticks), 0)
    assert int(plan.ticks) == (70 - 20) + 70  # the slowest client needs 50 more, and then 70
    queues = in_flight.handed_in(queues, plan, total_of)
    assert queues.kind.tolist() == [IDLE] * CLIENTS
    plan, queues, sums, age = exchange(queues, pace, ClockState.start(), "a", 3, None)
    assert float(sums.update) == 4 + 8 + 16 + 32 + 64  # five replies: all that had arrived count at once
    assert (int(plan.ticks), age) == (0, 5)


def test_a_bound_on_staleness_waits_for_the_old_ones():
    """With a bound s on staleness, exchange s waits for the reply to exchange 0.

    Six clients need one tick for a reply, and the last client needs 100. Without a bound, the reply of the last client
    to exchange 0 is used in exchange 99. With a bound of s, this reply is used in exchange s, together with all replies
    that have arrived until then.
    """
    pace = pace_of([1] * 6 + [100], 1.0)
    for bound in (1, 3):
        queues, now = opened(), ClockState.start()
        for number in range(bound + 1):
            plan, queues, sums, age = exchange(queues, pace, now, "a", 6, bound)
            now = now.later(pace, plan.ticks)
            late = bool(float(sums.update) >= 64)
            assert late == (number == bound)
        assert (age, int(plan.ticks)) == (bound, 100 - bound)


@pytest.mark.slow
def test_a_bound_on_staleness_waits_for_those_who_were_busy_with_another_request():
    """A bound on staleness also waits for clients that were busy with another request.

    Six clients need 2 ticks, and one needs 10. Requests alternate between two of kind a and one of kind b. The slow
    client is always ready when a request of kind a is sent, so after its first reply to b it would never be asked for b
    again. With s = 2, this client is overdue after s + 1 further exchanges of b. Then an exchange of b waits for it,
    and no earlier exchange does. (If an exchange waited only for replies to b that are under way, the gaps would be 4.)
    """
    pace = pace_of([2] * 6 + [10], 1.0)
    for bound in (None, 2):
        queues, now, slow = opened(), ClockState.start(), []
        for _ in range(14):
            for kind in "aab":
                plan, queues, sums, _ = exchange(queues, pace, now, kind, 5, bound)
                now = now.later(pace, plan.ticks)
            slow.append(bool(float(sums.update) >= 64))
        assert (sum(slow) == 1) if bound is None else (set(np.diff(np.flatnonzero(slow))) == {bound + 1})


def test_ties_go_to_the_older_request_then_to_the_lower_id():
    """If replies arrive at the same time, the older request comes first, and then the lower id.

    Here no client needs any time. All clients are asked. The first exchange counts the first three replies, and the
    next exchange the next three.
    """
    pace = pace_of([0] * CLIENTS, 1.0)
    queues, counted = opened(), []
    for _ in range(3):
        plan, queues, _, _ = exchange(queues, pace, ClockState.start(), "a", 3, None)
        counted.append(np.flatnonzero(plan.arriving).tolist())
        assert int(plan.ticks) == 0
    assert counted == [[0, 1, 2], [3, 4, 5], [0, 1, 6]]
