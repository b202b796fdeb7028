"""The memory of what clients replied last, for late replies (`Asynchronous`) and for short ones (`Compressor`, EF21).

A client keeps its last reply g_i to a phase, as the server knows it, and sends the difference to its new reply u_i. The
server adds differences up:

    c_i = C(u_i − g_i),   g_i ← g_i + c_i,   G ← G + Σ p_i c_i       C: the compressor; without one c_i = u_i − g_i

so that G = Σ p_i g_i, and no table of replies is needed. The method inside is written as if every exchange waited for
all, and gets the mean of everyone's g_i. With t_i the exchange (of that phase, counted from 0) in which client i was
asked for its last reply, the server keeps after exchange t

    total = G        weight = Σ p_i        age = Σ p_i (t − t_i)         over those that have ever replied

so that it knows the mean, total/weight, also before everyone has replied, and the mean delay, without any client's own
values and at the cost of a single model, however many clients there are. A message carries the number t more, and a
reply two numbers.

With a compressor that sends a part of the entries, a reply is short. As replies settle, so do the g_i, and G comes to
their exact mean, however little is sent. Without the memory, the mean of the C(u_i) is off wherever the limits of
clients' replies are not 0, that is, wherever clients differ. (P. Richtárik, I. Sokolov and I. Fatkhullin, "EF21: A New,
Simpler, Theoretically Better, and Practically Faster Error Feedback", NeurIPS 2021.)

g_i is made of earlier replies. Therefore the memory is for phases whose replies may be late (`Allows.late`) alone.
Replies to other phases, and to fresh cohorts, are sent whole, and marked parts are sent as they are.

Rounding: a table is summed anew each time, this sum carries all roundings since the start, which grow as the square
root of their number. 18 clients of unequal weights, 20,000 exchanges of one reply each, replies of mean 0 and standard
deviation 1 that never settle: in float32 the mean was off by 1.0e-6 (root mean square) and the delay by 1.5e-5 of
itself, in float64 by 1.8e-15 and 1.3e-14. Where replies settle differences vanish, and what is added with them: with
replies that shrink by 0.001 each time the mean was off by 1.5e-7, all of it from the first 2,000 exchanges. Clients
count exchanges in integers.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.algorithms.parts.layer_checks import plain_update
from fedbilevel.algorithms.parts.layers import Around, Ask, Asked, First, Inside, Kept, Layer
from fedbilevel.core.algorithm import Algorithm, takes_and_gives
from fedbilevel.core.authored import difference
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive_integer, static
from fedbilevel.core.errors import ConfigurationError, NumericalWarning, require
from fedbilevel.core.facts import Allows, Asks, Findings, No
from fedbilevel.core.fed import Public, Reply, Total, decoded
from fedbilevel.core.local_x import server_x
from fedbilevel.core.own_y import server_y
from fedbilevel.core.privacy import is_marked, private_part
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import NUMBER
from fedbilevel.core.tree import PyTree, join

ROUNDING = 1e-5  # what sums of weights may fall short of 1 by in float32, without anyone being missing


class Compressor(Around):
    """Base class of compressors, which make replies short: `coded` gives a form with fewer bytes.

    Clients send differences to what they sent before, so that nothing is lost for good (`Memory`). For this the code C
    must be a contraction: ‖C(v) − v‖² ≤ (1 − δ)‖v‖² with some δ > 0 for every v. Steps have to shrink with δ.
    """

    place = "coded"

    def layer(self, among: Mapping[str, Around]) -> Layer | None:
        return None if isinstance(among.get("late"), Asynchronous) else Memory(compressor=self)

    @abstractmethod
    def coded(self, tree: PyTree) -> PyTree:
        """Return the tree, whose leaves are floating arrays, with `authoring.Coded` parts in place of some or all."""


class Asynchronous(Around):
    """Continue as soon as some clients have replied, with the last replies of all others.

    `fb.Asynchronous(method, wait_for=3)` is short for `fb.layered(method, fb.Asynchronous(wait_for=3))`.

    Args:
        wait_for: how many replies an exchange waits for.
        max_staleness: also wait for every client that was asked so many exchanges (of the same phase) ago, or more, and
            for every client that has been unavailable, or busy with another phase, for longer; None: no bound.
        delay_penalty: c; means are divided by 1 + c·(mean delay of the replies in them, in exchanges of that phase),
            and so are the server's steps along them.
    """

    place = "late"

    wait_for: int = positive_integer()
    max_staleness: int | None = positive_integer(default=None, optional=True)
    delay_penalty: float = static(default=0.0)

    def validate(self) -> None:
        c = self.delay_penalty
        number = isinstance(c, int | float) and not isinstance(c, bool) and isfinite(c) and c >= 0
        require(number, "Asynchronous.delay_penalty", c, "a number, at least 0")

    def layer(self, among: Mapping[str, Around]) -> Layer:
        coded = among.get("coded")
        if coded is None or isinstance(coded, Compressor):
            return Memory(compressor=coded, late=self)
        why = "late replies are sent as differences, which an authoring.Compressor makes short"
        raise ConfigurationError(f"Asynchronous and {type(coded).__name__} cannot be together: {why}")


class LastReplies(NamedTuple):
    """What the server keeps of everyone's last replies to a phase."""

    total: PyTree
    weight: Array
    age: Array
    exchanges: Array  # made so far

    @classmethod
    def none(cls, like: PyTree) -> LastReplies:
        """Begin before the first exchange, for updates with the shapes of `like`."""
        total = jax.tree.map(jnp.zeros_like, like)
        return cls(total, jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))

    def after(self, delta: ReplyDelta) -> LastReplies:
        """Go on by an exchange, whose replies are summed, Σ p_i, in `delta`.

        All earlier replies become one exchange older, those replaced by t_i − (their last t_i) younger; a first
        reply brings t − t_i = (t + 1) − (t_i − (−1)).
        """
        joins, exchanges = delta.joins.public, delta.exchanges.public
        age = self.age + self.weight + (self.exchanges + 1) * joins - exchanges
        total = optax.tree.add(self.total, delta.update)
        return LastReplies(total, self.weight + joins, age, self.exchanges + 1)

    @property
    def mean(self) -> PyTree:
        """Σ p_i g_i / Σ p_i over the clients that have ever replied; 0 where nobody has."""
        weight = jnp.where(self.weight > 0, self.weight, 1)
        return jax.tree.map(lambda leaf: leaf / weight.astype(leaf.dtype), self.total)

    @property
    def delay(self) -> Array:
        """Σ p_i (t − t_i) over all clients, in exchanges of this phase; t_i = −1 for those that have never replied."""
        missing = jnp.where(self.weight > 1 - ROUNDING, 0, 1 - self.weight)
        return self.age + missing * self.exchanges


class LastReply(NamedTuple):
    """A client's own last reply to a phase, as the server knows it."""

    update: PyTree  # g_i
    exchange: Array  # of that phase, in which it was asked for; -1 before the first

    @classmethod
    def none(cls, like: PyTree) -> LastReply:
        """Begin before the first reply, for updates with the shapes of `like`."""
        return cls(jax.tree.map(jnp.zeros_like, like), jnp.asarray(-1, jnp.int32))


class ReplyDelta(NamedTuple):
    """What a client sends in place of a reply: the difference to its last one. The server adds these differences up.

    `joins` and `exchanges` are public: the server knows whose replies have counted and what it asked when.
    """

    update: PyTree
    joins: Public  # 1 in the first reply, then 0
    exchanges: Public  # t − the last t

    @classmethod
    def since(
        cls, last: LastReply, update: PyTree, exchange: Array, compressor: Compressor | None = None
    ) -> tuple[ReplyDelta, LastReply]:
        """Take the difference from the last reply to this, asked for in that exchange; also return what to keep now."""
        joins, exchanges = (jnp.asarray(n, float) for n in (last.exchange < 0, exchange - last.exchange))
        change = optax.tree.sub(update, last.update)
        if compressor is not None:
            marked = jax.tree.map(lambda part: part if is_marked(part) else None, change, is_leaf=is_marked)
            private = private_part(change)
            coded = compressor.coded(private)
            name = f"{type(compressor).__name__}.coded"
            plain_update(name, coded)
            if wrong := difference(restored := decoded(coded), private):
                raise ConfigurationError(f"{name}: what is decoded must be like the tree that it got: {wrong}")
            update = optax.tree.add(last.update, join(restored, marked))
            change = (coded, marked)
        return cls(change, Public(joins), Public(exchanges)), LastReply(update, exchange)


class Memory(Layer):
    """Send differences to last replies, which the server adds up, whole or short; wait for all, or for the first.

    Args:
        compressor: how differences are made short; None: they are sent whole.
        late: how many replies an exchange waits for; None: for all that were asked.
    """

    kind, place, needs = "memory", "coded", "late"

    compressor: Compressor | None = None
    late: Asynchronous | None = None

    @property
    def label(self) -> str:
        return type(self.late or self.compressor).__name__

    @property
    def whole(self) -> bool:
        return self.compressor is not None

    @property
    def cannot(self) -> str:
        return "cannot be Asynchronous" if self.late else f"cannot send differences to earlier replies ({self.label})"

    def asks(self, inside: Asks) -> Asks:
        return inside if self.late is None else inside._replace(first=self.late.wait_for)

    def allows(self, inside: Allows, method: Algorithm) -> Allows:
        late = No(f"its replies are differences to earlier ones already ({self.label})")
        return inside._replace(late=late)

    def check(self, method: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
        if self.compressor is not None:
            warn_unless_contraction(self.compressor, (x, y))
        if self.late is None:
            return
        alone = self.late.delay_penalty == 0 or problem.local is None
        own = "0 where clients keep x: they make the steps on it, and do not know the mean delay"
        require(alone, "Asynchronous.delay_penalty", self.late.delay_penalty, own)
        few = f"at most {len(clients)}, the number of clients"
        require(self.late.wait_for <= len(clients), "Asynchronous.wait_for", self.late.wait_for, few)

    def server_slot(self, method: Algorithm, x: PyTree, y: PyTree) -> dict[str, LastReplies]:
        return {name: LastReplies.none(template(gives(method, name), x, y)) for name in method.allows.late or ()}

    def client_slot(self, method: Algorithm, problem: Problem, x: PyTree, y: PyTree) -> dict[str, LastReply]:
        x, y = server_x(problem, x), server_y(problem.own, y)
        return {name: LastReply.none(template(gives(method, name), x, y)) for name in method.allows.late or ()}

    def exchange(self, asked: Asked, kept: Kept, ask: Ask) -> tuple[Total, Kept]:
        if asked.fresh is not None or asked.phase not in kept:
            return ask(asked), kept
        if asked.each:
            why = f"{self.label} sends differences to earlier replies, of which the server knows the sum alone"
            raise ConfigurationError(f"every reply of an exchange was asked for: {why}")
        last = kept[asked.phase]
        first = None if self.late is None else First(self.late.wait_for, self.late.max_staleness)
        delta = ask(replace(asked, message=(asked.message, last.exchanges), first=first)).update
        if self.compressor is not None:
            delta = delta._replace(update=join(*delta.update))
        last = last.after(delta)
        return Total.of_mean(self._shortened(asked, last)), {**kept, asked.phase: last}

    def _shortened(self, asked: Asked, last: LastReplies) -> PyTree:
        """Return the mean, shorter by the penalty for delay."""
        if self.late is None or self.late.delay_penalty == 0:
            return last.mean
        slower = 1 + self.late.delay_penalty * last.delay

        def one(kind: str, part: PyTree) -> PyTree:
            return part if kind == NUMBER else jax.tree.map(lambda leaf: (leaf / slower).astype(leaf.dtype), part)

        return jax.tree.map(one, gives(asked.method, asked.phase), last.mean)

    def reply(self, asked: Asked, kept: Kept, client: Client, run: Inside) -> tuple[Reply, Kept]:
        if kept is None or asked.phase not in kept:
            return run(asked, client), kept
        message, exchange = asked.message
        reply = run(replace(asked, message=message), client)
        delta, last = ReplyDelta.since(kept[asked.phase], reply.update, exchange, self.compressor)
        return reply._replace(update=delta), {**kept, asked.phase: last}

    def findings(self, method: Algorithm, kept: Kept, found: Findings) -> Findings:
        """Add the mean delay of late replies: `delay`, or `delay.PHASE` for each phase."""
        if self.late is None:
            return found
        single = len(kept) == 1
        delays = {"delay" if single else f"delay.{name}": last.delay for name, last in kept.items()}
        return found._replace(columns=found.columns | delays)


def warn_unless_contraction(compressor: Compressor, like: PyTree) -> None:
    """Warn if a code is further from a random tree with the shapes of `like` than 0 is, at any of some sizes.

    A code that passes may still be no contraction: the sizes are three, and the directions one.
    """
    random = np.random.default_rng(0)
    tree = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=jnp.shape(leaf)), jnp.result_type(leaf)), like)
    for size in (1e-3, 1.0, 1e3):
        v = jax.tree.map(lambda leaf, size=size: (size * leaf).astype(leaf.dtype), tree)
        coded = compressor.coded(v)
        plain = plain_update(f"{type(compressor).__name__}.coded", coded)
        if difference(plain, v):
            return  # an error, with the reply in which it is
        off = optax.tree.norm(optax.tree.sub(decoded(coded), v), squared=True)
        share = float(off / optax.tree.norm(v, squared=True))
        if share > 1:
            text = f"{type(compressor).__name__}.coded is no contraction: of a random v with entries of size {size:g} "
            text += f"‖C(v) − v‖² is {share:.3g} ‖v‖²; it must be below ‖v‖², or the run may not settle"
            warnings.warn(NumericalWarning(text), stacklevel=2)
            return


def gives(method: Algorithm, phase: str) -> PyTree:
    """Return the declared shape of a phase's update."""
    return takes_and_gives(method.phases[phase])[1]


def template(gives: PyTree, x: PyTree, y: PyTree) -> PyTree:
    """Make zeros in the shape of an update, from what its phase declares to give."""
    shapes = {"x": x, "y": y, NUMBER: jnp.zeros(())}
    return jax.tree.map(lambda kind: shapes[kind], gives)
