"""The engine that defines the semantics: a Python loop over clients, nothing compiled. For debugging and tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.algorithm import phase_name
from fedbilevel.core.client import Client, Clients, Ragged, Samples, check_finite
from fedbilevel.core.config import at
from fedbilevel.core.errors import NonFiniteError
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, nonfinite_leaves
from fedbilevel.engines import book
from fedbilevel.engines.cohort import RoundKeys, draw_cohort, round_keys, work_of
from fedbilevel.engines.engine import Carry, Progress, check_here, check_reply, loop


class ReferenceFed:
    """One round's exchanges, one client after the other. An error names the client."""

    def __init__(self, run: "ReferenceRun", algorithm: Any, round: int, keys: RoundKeys, states: PyTree):
        self.run, self.algorithm, self.round, self.keys, self.states = run, algorithm, round, keys, states
        self.indirect = run.problem.indirect
        self.worked = run.clients.local_steps is not None
        self.own = self.cohort(keys)
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
        total = None
        ids, works = self.own if fresh is None else self.cohort(self.keys.of_fresh(fresh))
        for place, i in enumerate(ids.tolist()):
            state = None if fresh is not None else jax.tree.map(lambda leaf, i=i: leaf[i], self.states)
            client = self.client(i, None if works is None else works[place], state)
            reply = phase(client, message, jax.random.fold_in(key, i))
            losses = [metric for metric, value in (reply.metrics or {}).items() if not np.isfinite(value)]
            if bad := nonfinite_leaves(reply.update) + losses:
                raise NonFiniteError(f"round {self.round}, phase {name}, client {i}: {', '.join(bad)} is not finite")
            check_reply(reply, name, fresh)
            if reply.state is not None:
                self.states = jax.tree.map(lambda full, new, i=i: full.at[i].set(new), self.states, reply.state)
            sums = book.weigh(reply, client.weight, jnp.ones(()))
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        assert total is not None
        self.book = book.merge(self.book, book.entry(name, message, total.update, total, len(ids)))
        return book.normalise(total, len(self.run.clients), len(ids), unbiased)

    def repeat(
        self,
        n: int | Array,
        body: Callable[[Fed, Any, Array], Any],
        carry: PyTree,
        key: Array,
        *,
        until: Callable[[Any], Array] | None = None,
    ) -> PyTree:
        return loop(self, n, body, carry, key, until)

    def cohort(self, keys: RoundKeys) -> tuple[Array, Array | None]:
        """Who is asked, and how much each one works."""
        with jax.disable_jit(False):
            ids = draw_cohort(keys.cohort, len(self.run.clients), self.run.cohort)
            return ids, work_of(keys.work, ids, self.run.clients.local_steps)

    def client(self, i: int, work: Array | None, state: PyTree) -> Client:
        clients = self.run.clients
        return Client(
            problem=self.run.problem,
            outer=_samples("outer", clients.outer, i),
            inner=_samples("inner", clients.inner, i),
            id=jnp.asarray(i),
            weight=jnp.asarray(clients.weights[i], float),
            state=state,
            work=work,
        )


@dataclass
class ReferenceRun:
    algorithm: Any
    problem: Problem
    clients: Clients
    cohort: int
    key: Array
    compile_seconds: float = 0.0

    def advance(self, carry: Carry, rounds: int) -> Progress:
        books = []
        for round in range(int(carry.round), int(carry.round) + rounds):
            keys = round_keys(self.key, round)
            algorithm = at(self.algorithm, carry.round)  # an array, as compiled schedules see it
            fed = ReferenceFed(self, algorithm, round, keys, carry.clients)
            with jax.disable_jit():  # loops of jax.lax run in Python too: every intermediate value can be looked at
                state = algorithm.round(fed, carry.state, keys.algorithm)
            if bad := nonfinite_leaves(state):
                raise NonFiniteError(f"round {round}, server update: {', '.join(bad)} is not finite")
            carry = Carry(carry.round + 1, state, fed.states)
            books.append(fed.book)
        return Progress(carry, rounds, book.stack(books))

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Reference:
    """Simulate clients one at a time, without compiling anything: slow, exact, easy to step through."""

    def start(
        self, algorithm: Any, problem: Problem, clients: Clients, cohort: int, key: Array, carry: Carry
    ) -> ReferenceRun:
        check_here(clients)
        return ReferenceRun(algorithm, problem, clients, cohort, key)


def _samples(name: str, rows: Ragged, i: int) -> Samples:
    """Client i's own samples alone, unpadded."""
    size, row = int(rows.size[i]), rows.row(i)
    for path, leaf in jax.tree_util.tree_leaves_with_path(row):
        if isinstance(leaf, np.memmap):
            check_finite(f"Clients.{name}{jax.tree_util.keystr(path)} of client {i}", leaf)
    values = jax.tree.map(jnp.asarray, row)
    return Samples(values, jnp.asarray(0), jnp.asarray(size), longest=size, equal=True)
