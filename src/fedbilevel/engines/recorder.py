"""What a round asks of clients, found by tracing one abstractly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Client, Samples
from fedbilevel.core.config import at
from fedbilevel.core.fed import Fed, Reply
from fedbilevel.core.own_x import server_x
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.costs import Sums, normalise, weigh

Note = Callable[[str, PyTree, Reply, bool], None]
"""(phase, message, its reply, whether it was asked by `first`), of shapes alone."""


def record(
    algorithm: Algorithm,
    problem: Problem,
    x: PyTree,
    y: PyTree,
    examples: tuple[PyTree, PyTree],
    has_client_steps: bool,
    note: Note,
    recorder: Callable[..., Recorder] | None = None,
) -> None:
    """Trace one round and have every exchange noted.

    Args:
        x, y: the variables where the run starts; only shapes matter.
        examples: one sample of each loss, as `RemoteClients.examples` gives them.
        has_client_steps: whether the population says how many local steps a client makes.
        recorder: what to make instead of a Recorder.
    """
    kept = algorithm.client_state(problem, x, y)

    def round(number: Array, x: PyTree, y: PyTree, kept: PyTree, examples: tuple[PyTree, PyTree], key: Array) -> Any:
        now = at(algorithm, number)
        return now.round(
            (recorder or Recorder)(now, problem, has_client_steps, kept, examples, note),
            now.init(server_x(problem, x), y),
            key,
        )

    jax.eval_shape(round, jnp.zeros((), jnp.int32), x, y, kept, examples, jax.random.key(0))


class Recorder:
    """A `Fed` for tracing: every exchange has one client, whose samples are the examples."""

    def __init__(
        self,
        algorithm: Algorithm,
        problem: Problem,
        has_client_steps: bool,
        state: PyTree,
        examples: tuple[PyTree, PyTree],
        note: Note,
    ) -> None:
        self.algorithm, self.problem, self.has_client_steps, self.sampled = algorithm, problem, has_client_steps, False
        self.state, self.examples, self.note = state, examples, note

    def mean(
        self,
        phase: Callable[..., Reply],
        message: PyTree,
        key: Array,
        *,
        unbiased: bool = False,
        fresh: int | Array | None = None,
    ) -> PyTree:
        return normalise(self.asked(phase, message, key, fresh, early=False), 1, unbiased)

    def first(
        self,
        n: int,
        phase: Callable[..., Reply],
        message: PyTree,
        key: Array,
        *,
        max_staleness: int | None = None,
    ) -> PyTree:
        return self.asked(phase, message, key, None, early=True).update

    def asked(self, phase: Callable[..., Reply], message: PyTree, key: Array, fresh: Any, early: bool) -> Sums:
        name = self.algorithm.phase_name(phase)
        message = jax.tree.map(jnp.asarray, message)
        client = self.client(None if fresh is not None else self.state)
        reply = self.algorithm.run_phase(name, client, message, key)
        self.note(name, message, reply, early)
        return weigh(reply, client.weight, jnp.ones(()))

    def repeat(
        self,
        n: int | Array,
        body: Callable[[Fed, Any, Array], Any],
        carry: PyTree,
        key: Array,
        *,
        until: Callable[[Any], Array] | None = None,
    ) -> PyTree:
        return body(self, carry, key)

    def client(self, state: PyTree) -> Client:
        outer, inner = (Samples(one, jnp.asarray(0), jnp.asarray(1), 1, True) for one in self.examples)
        work = jnp.asarray(1, jnp.int32) if self.has_client_steps else None
        return Client(self.problem, outer, inner, jnp.asarray(0, jnp.int32), jnp.asarray(1.0), state, work)
