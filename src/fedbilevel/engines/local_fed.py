"""The exchanges of one round inside a compiled program: clients by vmap × chunk × device mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedbilevel.core.algorithm import phase_name
from fedbilevel.core.client import Client, Samples
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.engines import book
from fedbilevel.engines.engine import check_reply
from fedbilevel.engines.shares import Shares

AXIS = "clients"
HOST = "hosts"  # the mesh's axis over processes, where there are several


class Members(NamedTuple):
    """Clients as arrays: a table of the population (M,), or the cohort taken from it (P,)."""

    id: Any
    weight: Any
    outer_start: Any
    outer_size: Any
    inner_start: Any
    inner_size: Any
    work: Any
    counts: Any  # 1, or 0 for a place that only pads the cohort to a multiple of the chunk


class Data(NamedTuple):
    """Flat samples that the members' windows point into."""

    outer: PyTree
    inner: PyTree


@dataclass(frozen=True)
class Layout:
    """What shapes the program."""

    problem: Problem
    population: int
    cohort: int
    fresh: int  # fresh cohorts per round
    outer_longest: int
    outer_equal: bool
    inner_longest: int
    inner_equal: bool
    chunk: int  # clients vectorised together
    axis: str | tuple[str, ...] | None  # names of the mesh's axes, if the cohort is spread over devices
    shares: Shares | None = None  # of several processes


Draw = Callable[[Array | int], Members]
"""Number of a fresh cohort -> its members on this device."""


class LocalFed:
    """See `Fed`. Sums stream over chunks; per-client replies are never stacked."""

    def __init__(
        self, layout: Layout, algorithm: Any, data: Data, members: Members, states: PyTree, draw: Draw
    ) -> None:
        self.layout, self.algorithm, self.data = layout, algorithm, data
        self.members, self.states, self.draw = members, states, draw
        self.indirect = layout.problem.indirect
        self.worked = members.work is not None
        self.book = book.empty()

    def mean(
        self,
        phase: Callable[..., Reply],
        message: PyTree,
        key: Array,
        *,
        unbiased: bool = False,
        fresh: int | Array | None = None,
    ) -> PyTree:
        name = phase_name(self.algorithm, phase)

        def one(member: Members, state: PyTree) -> tuple[book.Sums, PyTree]:
            reply = phase(self.client(member, state), message, jax.random.fold_in(key, member.id))
            check_reply(reply, name, fresh)
            kept = state if reply.state is None else reply.state
            return book.weigh(reply, member.weight, member.counts), kept

        chunk, gaps = self.layout.chunk, self.layout.shares is not None
        if fresh is None:
            sums, self.states = sum_over_clients(one, self.members, self.states, chunk, gaps)
        else:
            sums, _ = sum_over_clients(one, self.draw(fresh), None, chunk, gaps)
        if self.layout.axis:
            sums = lax.psum(sums, self.layout.axis)
        self.book = book.merge(self.book, book.entry(name, message, sums.update, sums, self.layout.cohort))
        return book.normalise(sums, self.layout.population, self.layout.cohort, unbiased)

    def repeat(
        self,
        n: int | Array,
        body: Callable[[Fed, Any, Array], Any],
        carry: PyTree,
        key: Array,
        *,
        until: Callable[[Any], Array] | None = None,
    ) -> PyTree:
        def once(i: Array | int, carry: PyTree, states: PyTree) -> tuple[PyTree, PyTree, book.Book]:
            fed = LocalFed(self.layout, self.algorithm, self.data, self.members, states, self.draw)
            carry = body(fed, carry, jax.random.fold_in(key, i))
            return carry, fed.states, fed.book

        def unfinished(loop: tuple[Array, PyTree, PyTree, book.Book]) -> Array:
            i, carry, *_ = loop
            return i < n if until is None else (i < n) & ~until(carry)

        def step(loop: tuple[Array, PyTree, PyTree, book.Book]) -> tuple[Array, PyTree, PyTree, book.Book]:
            i, carry, states, total = loop
            carry, states, new = once(i, carry, states)
            return i + 1, carry, states, jax.tree.map(jnp.add, total, new)

        shape = jax.eval_shape(once, 0, carry, self.states)[2]
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
        start = (jnp.zeros((), jnp.int32), carry, self.states, zero)
        _, carry, self.states, total = lax.while_loop(unfinished, step, start)
        self.book = book.merge(self.book, total)
        return carry

    def client(self, member: Members, state: PyTree) -> Client:
        layout = self.layout
        return Client(
            problem=layout.problem,
            outer=Samples(
                self.data.outer,
                member.outer_start,
                member.outer_size,
                layout.outer_longest,
                layout.outer_equal,
            ),
            inner=Samples(
                self.data.inner,
                member.inner_start,
                member.inner_size,
                layout.inner_longest,
                layout.inner_equal,
            ),
            id=member.id,
            weight=member.weight,
            state=state,
            work=member.work,
        )


def sum_over_clients(
    one: Callable[[Members, PyTree], tuple[book.Sums, PyTree]],
    members: Members,
    states: PyTree,
    chunk: int,
    gaps: bool = False,
) -> tuple[book.Sums, PyTree]:
    """Σ of `one` over clients, `chunk` of them vectorised at a time, and their new states in order.

    With `gaps`, chunks in which nobody counts are left out.
    """
    count = members.id.shape[0]
    if chunk == count and not gaps:
        return _vectorised(one, members, states)
    blocks = jax.tree.map(lambda a: a.reshape(count // chunk, chunk, *a.shape[1:]), (members, states))

    def play(total: book.Sums, inputs: tuple[Members, PyTree]) -> tuple[book.Sums, PyTree]:
        sums, new = _vectorised(one, *inputs)
        return jax.tree.map(jnp.add, total, sums), new

    def block(total: book.Sums, inputs: tuple[Members, PyTree]) -> tuple[book.Sums, PyTree]:
        if not gaps:
            return play(total, inputs)
        counts = inputs[0].counts
        return lax.cond(jnp.any(counts > 0), play, lambda total, inputs: (total, inputs[1]), total, inputs)

    shape = jax.eval_shape(one, *jax.tree.map(lambda a: a[0], (members, states)))[0]
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
    total, new = lax.scan(block, zero, blocks)
    return total, jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), new)


def _vectorised(
    one: Callable[[Members, PyTree], tuple[book.Sums, PyTree]], members: Members, states: PyTree
) -> tuple[book.Sums, PyTree]:
    if members.id.shape[0] == 1:  # a batch axis of one would only hide matrix products from the compiler
        sums, new = one(*jax.tree.map(lambda a: a[0], (members, states)))
        return sums, jax.tree.map(lambda a: a[None], new)
    sums, new = jax.vmap(one)(members, states)
    return jax.tree.map(lambda a: jnp.sum(a, axis=0, dtype=a.dtype), sums), new
