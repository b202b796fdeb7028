"""Simulate replies in flight: replies that clients of an asynchronous method have not delivered yet.

A client's reply is computed as soon as its message is sent, and waits in a table until it arrives by the virtual clock.
The result is exact, since a reply does not depend on anything that happens in between. And so the replies of all
clients that get a message at the same time can be computed together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.costs import Sums, weigh
from fedbilevel.engines.recorder import exchanges_of
from fedbilevel.engines.virtual_time import ClockState, Pace

IDLE = -1
NEVER = 2**31 - 1  # the time in ticks until a reply that will not arrive


class PhaseQueue(NamedTuple):
    """Hold the replies of one phase that are in flight, for methods that do not wait for all clients."""

    exchanges: Array  # the number of exchanges of this phase so far
    since: Array  # for each client, the last exchange of this phase in which it got a message or replied: (M,)
    replies: Sums  # the weighted reply that each client computes, or computed last, with leaves of shape (M, ...)
    early: Sums  # the sum of replies that arrived during exchanges of other phases
    early_asked: Array  # Σ p_i·(number of the exchange in which client i was asked) over the replies in `early`


class InFlight(NamedTuple):
    """Hold the replies in flight: what each client computes, and when its reply arrives."""

    kind: Array  # for each client, the number of the phase whose reply it computes, or IDLE: an array of shape (M,)
    left: Array  # for each client, the number of ticks until its reply arrives: an array of shape (M,)
    by_phase: dict[str, PhaseQueue]  # phases are numbered in the order of their names

    def number(self, phase: str) -> int:
        if phase not in self.by_phase:
            raise ConfigurationError(f"fed.sum_first asks phase {phase}, but did not when a round was traced")
        return sorted(self.by_phase).index(phase)


class ExchangePlan(NamedTuple):
    """Hold the events of an exchange: the messages sent, the replies that arrive, and its length."""

    asked: Array  # for each client, whether it is sent the message of this exchange: an array of shape (M,)
    arriving: Array  # for each client, whether its reply to this phase arrives and is used: an array of shape (M,)
    over: Array  # for each client, the number of the other phase to which it delivers a reply, or IDLE: (M,)
    ticks: Array  # the length of the exchange, in ticks
    kind: Array  # the new value of `InFlight.kind` after the exchange, an array of shape (M,)
    left: Array  # the new value of `InFlight.left` after the exchange, an array of shape (M,)


SumRows = Callable[[Sums, Array, Array], tuple[Sums, Array]]
"""(table of replies, asked, chosen) -> (the sum of the chosen rows, the sum of weight·asked over these rows).

`asked` and `chosen` are arrays of shape (M,): the exchange in which a client was asked, and whether its row is chosen.
"""


def early_replies(
    algorithm: Algorithm,
    problem: Problem,
    x: PyTree,
    y: PyTree,
    examples: tuple[PyTree, PyTree],
) -> dict[str, Sums]:
    """Trace a round; for each phase that `fed.sum_first` asks for, return the shapes of a client's weighted reply.

    Raises:
        ConfigurationError: `fed.sum_first` asks the same phase for replies of different shapes.
    """
    found: dict[str, Sums] = {}

    for exchange in exchanges_of(algorithm, problem, x, y, examples):
        if exchange.early:
            scalar = jax.ShapeDtypeStruct((), jnp.result_type(float))
            shapes = jax.eval_shape(weigh, exchange.reply, scalar, scalar)
            if found.setdefault(exchange.phase, shapes) != shapes:
                raise ConfigurationError(f"fed.sum_first asks phase {exchange.phase} for replies of different shapes")
    return found


def nothing_in_flight(replies: dict[str, Sums], clients: int, remote: bool = False) -> InFlight:
    """Make the empty queues before round 0, one for each phase in `replies`, which has the shapes of a reply.

    With `remote` clients the tables have no rows, since such clients keep the replies that they compute.
    """
    real, rows, by_phase = jax.dtypes.canonicalize_dtype(float), 0 if remote else clients, {}
    for phase, shape in replies.items():
        table = jax.tree.map(lambda s: jnp.zeros((rows, *s.shape), s.dtype), shape)
        none = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
        since = jnp.zeros(clients, jnp.int32)
        by_phase[phase] = PhaseQueue(jnp.zeros((), jnp.int32), since, table, none, jnp.zeros((), real))
    return InFlight(jnp.full(rows, IDLE, jnp.int32), jnp.zeros(rows, jnp.int32), by_phase)


def first(
    queues: InFlight, pace: Pace, now: ClockState, phase: str, n: int, units: Any, max_staleness: int | None
) -> ExchangePlan:
    """Plan an exchange that ends with the first n replies.

    Of replies that arrive at the same moment, those that were asked for earlier come first, and then those of clients
    with smaller ids.
    """
    queue, number = queues.by_phase[phase], queues.number(phase)
    ids = jnp.arange(queues.kind.shape[0], dtype=jnp.int32)
    here = queues.kind == number
    if pace.arrivals is not None:
        return _scheduled(queues, number, pace.arriving(now, ids), pace.durations(now, ids, units))
    free = ~here & pace.ever_available(ids)
    start = queues.left + pace.waits(now, ids, queues.left)
    arrival = jnp.where(free, start + pace.durations(now, ids, units), jnp.where(here, queues.left, NEVER))
    asked = jnp.where(here, queue.since, queue.exchanges)
    needed = n - queue.early.responders
    ticks = jnp.where(needed > 0, _smallest(arrival, n, needed), 0)
    before = arrival < ticks
    tied = arrival == ticks
    oldest = _smallest(jnp.where(tied, asked, NEVER), n, needed - jnp.sum(before))
    place = tied & (asked == oldest)
    older = before | (tied & (asked < oldest))
    arriving = older | (place & (jnp.cumsum(place) <= needed - jnp.sum(older)))
    arriving &= needed > 0
    if max_staleness is not None:
        age = queue.exchanges - queue.since
        overdue = jnp.where(here, age >= max_staleness, free & (age > max_staleness))
        last = jnp.max(jnp.where(overdue, arrival, -1))
        arriving = jnp.where(last >= ticks, arriving | (arrival <= last), arriving)
        ticks = jnp.maximum(ticks, last)
    sent = free & (start <= ticks)
    done = ~here & (queues.kind != IDLE) & (queues.left <= ticks)
    kind = jnp.where(arriving, IDLE, jnp.where(sent, number, jnp.where(done, IDLE, queues.kind)))
    left = jnp.where(arriving, 0, jnp.where(sent, arrival - ticks, jnp.maximum(queues.left - ticks, 0)))
    return ExchangePlan(sent, arriving, jnp.where(done, queues.kind, IDLE), ticks, kind, left)


def _scheduled(queues: InFlight, number: int, delivers: Array, ticks: Any) -> ExchangePlan:
    """Plan an exchange at whose end the clients chosen by `delivers` reply to the phase for which they were asked."""
    asked = queues.kind == IDLE
    at_work = jnp.where(asked, number, queues.kind)
    over = jnp.where(delivers & (at_work != number), at_work, IDLE)
    kind = jnp.where(delivers, IDLE, at_work)
    return ExchangePlan(asked, delivers & (at_work == number), over, jnp.asarray(ticks), kind, jnp.zeros_like(kind))


def everyone(queues: InFlight, pace: Pace, now: ClockState, units: Any) -> ExchangePlan:
    """Plan an exchange that waits for all clients that are ever available."""
    scheduled = pace.arrivals is not None
    require(not scheduled, "Clock.arrivals", "a schedule", "None with a method that waits for all clients in a phase")
    ids = jnp.arange(queues.kind.shape[0], dtype=jnp.int32)
    able = jnp.broadcast_to(pace.ever_available(ids), ids.shape)
    start = queues.left + pace.waits(now, ids, queues.left)
    ticks = jnp.max(jnp.where(able, start + pace.durations(now, ids, units), 0))
    idle, nothing = jnp.full_like(queues.kind, IDLE), jnp.zeros_like(queues.left)
    return ExchangePlan(able, able, jnp.where(able, queues.kind, IDLE), ticks, idle, nothing)


def handed_in(queues: InFlight, plan: ExchangePlan, total: SumRows) -> InFlight:
    """Return the queues after an exchange that follows a plan. Replies to other phases stay in them for later.

    `queues` are the queues before the exchange. Their tables already have the replies of the clients that the exchange
    asks. `total` sums rows of a table.
    """
    by_phase = {}
    for number, (name, queue) in enumerate(sorted(queues.by_phase.items())):
        who = plan.over == number
        new, asked = total(queue.replies, queue.since, who)
        since = jnp.where(who, queue.exchanges, queue.since)
        by_phase[name] = queue._replace(
            early=_added(queue.early, new), early_asked=queue.early_asked + asked, since=since
        )
    return InFlight(plan.kind, plan.left, by_phase)


def counted(queues: InFlight, plan: ExchangePlan, phase: str, total: SumRows) -> tuple[InFlight, Sums, Array]:
    """Take the replies of a phase that are used in this exchange out of the queues.

    Returns:
        The queues without these replies, the sum of the replies, and Σ p_i·(age of the reply in exchanges).
    """
    queue = queues.by_phase[phase]
    since = jnp.where(plan.asked, queue.exchanges, queue.since)
    new, asked = total(queue.replies, since, plan.arriving)
    sums, asked = _added(queue.early, new), queue.early_asked + asked
    left = PhaseQueue(
        queue.exchanges + 1,
        jnp.where(plan.arriving, queue.exchanges, since),
        queue.replies,
        jax.tree.map(jnp.zeros_like, queue.early),
        jnp.zeros_like(asked),
    )
    return queues._replace(by_phase={**queues.by_phase, phase: left}), sums, queue.exchanges * sums.weight - asked


def with_tables(queues: InFlight | None, change: Callable[[Sums], Any]) -> Any:
    """Apply a function to the tables of replies in the queues; only the tables may be distributed over devices."""
    if queues is None:
        return None
    changed = {phase: queue._replace(replies=change(queue.replies)) for phase, queue in queues.by_phase.items()}
    return queues._replace(by_phase=changed)


def written(queues: InFlight, phase: str, replies: Sums) -> InFlight:
    """Replace a phase's table of replies."""
    return queues._replace(by_phase={**queues.by_phase, phase: queues.by_phase[phase]._replace(replies=replies)})


def nonfinite_replies(queues: InFlight) -> list[str]:
    """Return a text for each phase with replies that are not finite; a text names up to five of the clients."""
    found = []
    for phase, queue in queues.by_phase.items():
        finite = [
            np.isfinite(np.asarray(leaf)).reshape(len(leaf), -1).all(1) for leaf in jax.tree.leaves(queue.replies)
        ]
        ids = np.flatnonzero(~np.all(finite, axis=0))
        if ids.size:
            found.append(f"phase {phase}: the reply of client {', '.join(map(str, ids[:5]))}")
    return found


def _added(a: Sums, b: Sums) -> Sums:
    return jax.tree.map(jnp.add, a, b)


def _smallest(values: Array, n: int, k: Array) -> Array:
    """Return the k-th smallest of n integers, with k ≤ n; for k < 1, return the smallest."""
    return jnp.sort(values)[jnp.clip(k - 1, 0, n - 1)]  # on CPUs this takes a fifth of the time of lax.top_k
