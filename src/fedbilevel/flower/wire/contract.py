"""The contract of server and clients: the algorithm, its hyperparameters, and every call that a round may make."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel import __version__
from fedbilevel.core.algorithm import Algorithm, parts_of
from fedbilevel.core.config import Schedule, hyperparameters
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import UnitLayout
from fedbilevel.core.tree import PyTree, nbytes
from fedbilevel.engines.costs import ExchangeKind
from fedbilevel.engines.recorder import check_plain, exchanges_of
from fedbilevel.flower.wire.messages import digest, layout, shapes

PROTOCOL = 2
PROBES = (0, 1, 10, 100, 1000)
"""Rounds at which schedules are compared."""
MISSING = ("missing",)  # equal to nothing that JSON can hold


class CallSignature(NamedTuple):
    """A phase with the shapes of its message and update: one of the calls that a server may make."""

    phase: str
    message: PyTree
    update: PyTree  # the shapes of the reply's update
    metrics: tuple[str, ...]

    @property
    def name(self) -> str:
        """The phase and a digest of the message's layout."""
        return f"{self.phase}:{digest('|'.join(layout(self.message)))[:12]}"

    @property
    def size(self) -> ExchangeKind:
        """As the ledger knows it."""
        return self.phase, nbytes(self.message), nbytes(self.update)


@dataclass(frozen=True)
class Contract:
    """Drawn up by each side from its own code and compared at the first message.

    Its calls are found by tracing one round abstractly, with a `fed` that notes what is asked: a server cannot ask
    anything that its algorithm does not ask, in any other shape.
    """

    algorithm: Algorithm
    calls: dict[str, CallSignature]
    state: PyTree  # shapes of what a client keeps between rounds, or None
    has_client_steps: bool  # whether the server says how many local steps a client makes
    units: Mapping[str, int] | None = None  # of a client who holds a submodel: how many of each group

    @cached_property
    def text(self) -> str:
        """As JSON, to be compared."""
        calls = {name: [layout(call.message), layout(call.update), call.metrics] for name, call in self.calls.items()}
        terms = {
            "protocol": PROTOCOL,
            "fedbilevel": __version__,
            "algorithm": self.algorithm.label,
            "hyperparameters": hyperparameters(self.algorithm),
            "schedules": self.schedules(),
            "local steps from the server": self.has_client_steps,
            "calls": calls,
            "state": layout(self.state),
        }
        if self.units is not None:
            terms["units"] = dict(self.units)
        return json.dumps(terms, sort_keys=True)

    @cached_property
    def digest(self) -> str:
        return digest(self.text)

    def cut(self, unit_layout: UnitLayout, kept: Mapping[str, int]) -> Contract:
        """The contract, with smaller calls, for a client that holds a submodel; `kept`: group -> how many units."""
        if kept == unit_layout.sizes:
            return self
        units = {group: jnp.arange(count, dtype=jnp.int32) for group, count in kept.items()}

        def small(kinds: PyTree, tree: PyTree) -> PyTree:
            return shapes(jax.eval_shape(lambda tree: unit_layout.cut(kinds, tree, units), tree))

        calls: dict[str, CallSignature] = {}
        for call in self.calls.values():
            takes, gives = parts_of(self.algorithm.named_phase(call.phase))
            call = call._replace(message=small(takes, call.message), update=small(gives, call.update))
            calls[call.name] = call
        return replace(self, calls=calls, units=kept)

    def schedules(self) -> dict[str, list[str]]:
        """Each schedule's values at the rounds PROBES, to five digits, since two machines may round differently."""
        leaves = jax.tree_util.tree_leaves_with_path(self.algorithm, is_leaf=lambda leaf: isinstance(leaf, Schedule))
        found = {jax.tree_util.keystr(path): leaf.function for path, leaf in leaves if isinstance(leaf, Schedule)}
        rounds = [jnp.asarray(round, jnp.int32) for round in PROBES]
        return {name: [f"{float(function(round)):.5g}" for round in rounds] for name, function in found.items()}


def draw_up(
    algorithm: Algorithm,
    problem: Problem,
    x: PyTree,
    y: PyTree,
    examples: tuple[PyTree, PyTree],
    has_client_steps: bool,
) -> Contract:
    """The contract of a run; for the arguments see `engines.recorder.exchanges_of`.

    Raises:
        ConfigurationError: a message, an update or what clients keep holds a PRNG key.
    """
    state = algorithm.client_state(problem, x, y)
    check_plain("what clients keep", state)
    first: dict[str, PyTree] = {}  # what is asked by fed.first, and the updates' shapes
    calls: dict[str, CallSignature] = {}

    for phase, message, reply, early, _ in exchanges_of(algorithm, problem, x, y, examples, has_client_steps):
        check_plain(f"the message of phase {phase}", message)
        if early and not algorithm.asynchronous:
            name = algorithm.label
            raise ConfigurationError(f"phase {phase} is asked by fed.first: {name} has to say asynchronous = True")
        if early and first.setdefault(phase, shapes(reply.update)) != shapes(reply.update):
            raise ConfigurationError(f"phase {phase} is asked by fed.first with replies of different shapes")
        call = CallSignature(phase, shapes(message), shapes(reply.update), tuple(sorted(reply.metrics or {})))
        calls[call.name] = call
    kept = None if state is None else shapes(jax.tree.map(jnp.asarray, state))
    return Contract(algorithm, calls, kept, has_client_steps)


def difference(mine: str, theirs: str) -> str:
    """The first difference of two contracts, in words."""
    try:
        a, b = json.loads(mine), json.loads(theirs)
        for term in sorted({**a, **b}, key=lambda term: (term == "calls", term)):  # they follow from the others
            if a.get(term, MISSING) != b.get(term, MISSING):
                return _first(term, a.get(term, MISSING), b.get(term, MISSING))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return "it cannot be read"
    return "it is written otherwise"


def _first(term: str, mine: Any, theirs: Any) -> str:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        name = next(n for n in sorted({**mine, **theirs}) if mine.get(n, MISSING) != theirs.get(n, MISSING))
        return _first(f"{term}.{name}", mine.get(name, MISSING), theirs.get(name, MISSING))
    said = ["missing" if value is MISSING else str(value)[:200] for value in (theirs, mine)]
    return f"{term} is {said[0]} there and {said[1]} here"
