"""An exchange by hand that ends with the first answers. The answers of other clients remain under way."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

IDLE = -1


class Lane(NamedTuple):
    """The records of one of the two phases, by client."""

    last: Any  # the last answers that count
    has: Any  # whether a client has such an answer
    answers: Any  # the answers that were computed last, and may be under way
    since: Any  # the exchange in which the message was sent
    early: Any  # answers that came during exchanges of the other phase
    number: Any  # the number of exchanges so far

    def with_those(self, who):
        keep = lambda a, b: jnp.where(who.reshape(-1, *[1] * (a.ndim - 1)), b, a)  # noqa: E731
        return self._replace(last=jax.tree.map(keep, self.last, self.answers), has=self.has | who)


def exchange(phase, ask, lanes, kind, left, lasts, wait_for, data, weights):
    """Make an exchange.

    Return the mean of all clients' last answers, and the records with answers that are under way.
    """
    lane, other, clients = lanes[phase], lanes[1 - phase], len(weights)
    here, needed = kind == phase, wait_for - lane.early
    arrival = jnp.where(here, left, left + lasts)
    order = jnp.lexsort((jnp.where(here, lane.since, lane.number), arrival))
    ticks = jnp.where(needed > 0, arrival[order[jnp.maximum(needed, 1) - 1]], 0)
    arriving = jnp.zeros(clients, bool).at[order].set(jnp.arange(clients) < needed)
    sent, done = ~here & (left <= ticks), ~here & (kind != IDLE) & (left <= ticks)
    ids = jnp.append(jnp.nonzero(sent, size=clients, fill_value=clients)[0], jnp.full(wait_for, clients))

    def block(carry):  # the clients that were sent the message, as many as are waited for
        at, table = carry
        mine = jax.lax.dynamic_slice_in_dim(ids, at, wait_for)
        new = jax.vmap(ask)(jax.tree.map(lambda a: a.at[mine].get(mode="clip"), data), mine)
        return at + wait_for, jax.tree.map(lambda t, a: t.at[mine].set(a, mode="drop"), table, new)

    _, answers = jax.lax.while_loop(lambda carry: carry[0] < sent.sum(), block, (0, lane.answers))
    since = jnp.where(arriving | sent, lane.number, lane.since)
    lane = lane._replace(answers=answers, since=since, early=0 * lane.early, number=lane.number + 1)
    lane, w = lane.with_those(arriving), weights * (lane.has | arriving)
    other = other.with_those(done)._replace(
        since=jnp.where(done, other.number, other.since), early=other.early + done.sum(dtype=jnp.int32)
    )
    left = jnp.where(arriving, 0, jnp.where(sent, arrival - ticks, jnp.maximum(left - ticks, 0)))
    kind = jnp.where(arriving, IDLE, jnp.where(sent, phase, jnp.where(done, IDLE, kind)))
    mean = jax.tree.map(lambda a: jnp.tensordot(w, a, 1) / w.sum(), lane.last)
    return mean, ([lane, other] if phase == 0 else [other, lane]), kind, left
