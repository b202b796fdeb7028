"""What a round asks of clients, found by tracing a round abstractly."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Client, Samples
from fedbilevel.core.config import at
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.fed import LoopBody, Phase, Reply
from fedbilevel.core.local_x import server_x
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, is_floating
from fedbilevel.engines.costs import Sums, normalise, weigh
from fedbilevel.engines.fingerprint import method_key
from fedbilevel.machinery.hashes import of_array
from fedbilevel.machinery.kept import kept, shapes_of


class RecordedExchange(NamedTuple):
    """One exchange of a round, as shapes."""

    phase: str
    message: PyTree
    reply: Reply
    early: bool  # whether it is asked by `sum_first`
    state: PyTree  # what the client keeps, None of a member of a fresh cohort


def exchanges_of(
    algorithm: Algorithm,
    problem: Problem,
    x: PyTree,
    y: PyTree,
    examples: tuple[PyTree, PyTree],
    has_client_steps: bool,
) -> list[RecordedExchange]:
    """Find the exchanges of a round, by tracing a round.

    Args:
        x, y: the variables where the run starts; only shapes matter.
        examples: one sample of each loss, as `RemoteClients.examples` gives them.
        has_client_steps: whether the population says how many local steps a client makes.
    """

    def traced() -> list[RecordedExchange]:
        exchanges: list[RecordedExchange] = []

        def round(number: Array, x: PyTree, y: PyTree, examples: tuple[PyTree, PyTree], key: Array) -> Any:
            now, state = at(algorithm, number), algorithm.client_state(problem, x, y)
            fed = Recorder(now, problem, has_client_steps, state, examples, exchanges)
            return now.round(fed, now.init(server_x(problem, x), y), key)

        jax.eval_shape(round, np.int32(0), x, y, examples, jax.random.key(0))
        return exchanges

    return list(kept(key_of_round(algorithm, problem, x, y, "exchanges", has_client_steps), traced))


def key_of_round(algorithm: Algorithm, problem: Problem, x: PyTree, y: PyTree, *more: Hashable) -> Hashable | None:
    """Say all that a traced round depends on, with the method's whole numbers, which may be lengths of its loops; None
    where what is traced may change."""
    method = method_key(algorithm)
    if problem.key is None or method is None:
        return None
    whole = [of_array(leaf) for leaf in jax.tree.leaves(algorithm) if not is_floating(leaf)]
    return problem.key, method, *more, *whole, shapes_of((x, y))


def _shapes(tree: PyTree) -> PyTree:
    """Replace every array or number of a tree by its shape and dtype, and whether that is weak."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        like = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
        return jax.ShapeDtypeStruct(like.shape, like.dtype, weak_type=like.weak_type)

    return jax.tree.map(shape, tree)


@dataclass(eq=False)
class Recorder:
    """A `Fed` for tracing: every exchange has a single client, whose samples are the examples."""

    algorithm: Algorithm
    problem: Problem
    has_client_steps: bool
    state: PyTree
    examples: tuple[PyTree, PyTree]
    exchanges: list[RecordedExchange]
    sampled: bool = False

    def mean(
        self, phase: Phase, message: PyTree, key: Array, *, unbiased: bool = False, fresh: int | Array | None = None
    ) -> PyTree:
        return normalise(self.asked(phase, message, key, fresh, early=False), 1, unbiased)

    def sum_first(
        self, n: int, phase: Phase, message: PyTree, key: Array, *, max_staleness: int | None = None
    ) -> PyTree:
        return self.asked(phase, message, key, None, early=True).update

    def asked(self, phase: Phase, message: PyTree, key: Array, fresh: Any, early: bool) -> Sums:
        name = self.algorithm.phase_name(phase)
        message = jax.tree.map(jnp.asarray, message)
        client = self.client(None if fresh is not None else self.state)
        reply = self.algorithm.run_phase(name, client, message, key)
        check_plain(f"the update of phase {name}", reply.update)
        self.exchanges.append(RecordedExchange(name, _shapes(message), _shapes(reply), early, _shapes(client.state)))
        return weigh(reply, client.weight, jnp.ones(()))

    def repeat(
        self, n: int | Array, body: LoopBody, carry: PyTree, key: Array, *, until: Callable[[Any], Array] | None = None
    ) -> PyTree:
        return body(self, carry, key)

    def client(self, state: PyTree) -> Client:
        outer, inner = (Samples(sample, jnp.asarray(0), jnp.asarray(1), 1, True) for sample in self.examples)
        work = jnp.asarray(1, jnp.int32) if self.has_client_steps else None
        return Client(self.problem, outer, inner, jnp.asarray(0, jnp.int32), jnp.asarray(1.0), state, work)


def check_plain(what: str, tree: PyTree) -> None:
    """Refuse PRNG keys, which have no bytes of their own to send or keep."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            place = jax.tree_util.keystr(path) or "value"
            raise ConfigurationError(
                f"{what}: {place} is a PRNG key; use the key that a phase gets, or send jax.random.key_data of it"
            )
