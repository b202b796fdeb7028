"""Remember the last replies of clients, for late replies (`Asynchronous`) and for short replies (`Compressor`, EF21).

A client keeps its last reply g_i to a phase, as the server knows it, and sends the difference between its new reply u_i
and g_i. The server adds up the differences. Let C be the compressor; without a compressor, c_i = u_i − g_i:

    c_i = C(u_i − g_i),   g_i ← g_i + c_i,   G ← G + Σ p_i c_i

Then G = Σ p_i g_i, and the server needs no table of replies. The method inside works as if every exchange waited for
all clients, and gets the mean of all g_i. Let t_i be the exchange of this phase, counted from 0, in which client i was
asked for its last reply. After exchange t, the server keeps

    total = G        weight = Σ p_i        age = Σ p_i (t − t_i)         over the clients that have replied before

From these three it computes the mean delay, and the mean reply, total/weight, even before all clients have replied. The
server has no values of a single client, and for any number of clients it needs only as much memory as one model. A
message also has the number t, and a reply has two more numbers. These counts are no part of the norms that the server
of a federation compares, and the two numbers of a reply have to be in the ranges that `ReplyDelta` declares.

With a compressor that sends only a part of the entries, replies are short. As the replies u_i converge, the g_i
converge too, and G converges to the exact mean, even if few entries are sent. Without the memory, the mean of the
C(u_i) has an error if the limits of clients' replies are not 0, which is the case if clients differ. (P. Richtárik, I.
Sokolov and I. Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error Feedback", NeurIPS
2021.)

Old replies limit the step sizes. Suppose that all clients have the curvature λ, and that the replies in G have constant
delays d, each with the share w_d. An error z of a variable, along which the server steps by η, then follows

    z_{t+1} = z_t − ηλ Σ_d w_d z_{t−d}

Without delays this converges for ηλ < 2. A root e^{iθ} of the characteristic polynomial satisfies, after division by
e^{iθ/2}, −2i sin(θ/2) = ηλ Σ_d w_d e^{−i(d + ½)θ}. Its imaginary part is 2 = ηλ Σ_d w_d sin((d + ½)θ)/sin(θ/2). The
quotient of the two sines is Dirichlet's kernel, 1 + 2 cos θ + … + 2 cos dθ, which is at most 1 + 2d. No root can
therefore leave the unit disc while ηλ (1 + 2D) < 2, where D = Σ_d w_d d is the mean delay: a step size that is stable
without delays is also stable with delays if it is divided by 1 + 2D. The factor 2 before D is the default of
`Asynchronous.delay_penalty`. With a smaller factor, step sizes that were chosen without delays can diverge: if d = 1
for all clients, the bound is ηλ < 1. In a run the age of a reply is not constant: it grows until the client's next
reply arrives. The bound is then a guide and no guarantee. A client that never replies again makes D grow without end.
The step sizes then tend to 0, since the server learns nothing new about this client's losses.

g_i depends on earlier replies. The memory is therefore only for phases whose replies may be late (`Allows.late`).
Replies to other phases and to fresh cohorts are sent whole. Marked parts of an update, such as public numbers, are not
compressed.

Rounding: if the server kept a table of replies, it would compute their sum anew in every exchange. G instead
accumulates the rounding errors of all exchanges since the start. Their sum grows as the square root of their number.
This was measured with 18 clients of unequal weights, in 20,000 exchanges of one reply each, for replies of mean 0 and
standard deviation 1 that do not converge. In float32 the mean had an error of 1.0e-6 (root mean square), and the delay
had a relative error of 1.5e-5. In float64 the errors were 1.8e-15 and 1.3e-14. If replies converge, the differences
vanish, and so do their rounding errors: with replies that shrink by 0.001 in every exchange, the error of the mean was
1.5e-7, all of it from the first 2,000 exchanges. Clients count exchanges in integers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from math import inf, isfinite
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from fedbilevel.algorithms.parts.layer_checks import plain_update
from fedbilevel.algorithms.parts.layers import Around, Ask, Asked, First, Inside, Kept, Layer
from fedbilevel.core.algorithm import Algorithm, takes_and_gives
from fedbilevel.core.authored import difference, explained
from fedbilevel.core.client import Client
from fedbilevel.core.config import positive_integer, static
from fedbilevel.core.errors import ConfigurationError, NumericalWarning, require, warn
from fedbilevel.core.facts import Allows, Asks, Findings, No
from fedbilevel.core.fed import FLAG, Public, PublicRange, Reply, Request, Total, decoded
from fedbilevel.core.local_x import server_x
from fedbilevel.core.own_y import server_y
from fedbilevel.core.privacy import is_marked, private_part
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import NUMBER
from fedbilevel.core.tree import XY, PyTree, join, over

SHORTENED = 10  # a remark follows if step sizes were divided by at least this number because replies were old
DELAY_PENALTY = 2.0  # the default of `Asynchronous.delay_penalty`, which is derived above
SAME = 1e-10  # two codes v, w of one tree t are the same if ‖v − w‖² ≤ SAME ‖t‖²: a GPU may add in another order
ROUNDING = 1e-5  # the largest rounding error of a sum of all weights in float32
COUNTS = "whether this is its first reply, and how many exchanges after its last reply it was asked for"
DIFFERENCES = (
    "the client sends the difference between its new reply and what the server has received of its earlier replies; "
    f"with it the client says {COUNTS}"
)


class Compressor(Around):
    """Base class of compressors, which make replies shorter: `coded` returns a form with fewer bytes.

    Clients compress the difference between a reply and the replies that they sent before, so that parts that were not
    sent are sent later (`Memory`). Compression and decoding, v -> C(v), must be a contraction: ‖C(v) − v‖² ≤
    (1 − δ)‖v‖² with some δ > 0 for every v. The smaller δ is, the smaller the step sizes have to be.
    """

    place = "coded"

    def layer(self, among: Mapping[str, Around]) -> Layer | None:
        return None if isinstance(among.get("late"), Asynchronous) else Memory(compressor=self)

    @abstractmethod
    def coded(self, tree: PyTree) -> PyTree:
        """Return a tree of floating-point arrays with some or all parts replaced by `authoring.Coded` parts.

        The result must depend only on the tree and on the fields of the compressor. There is no random key: a
        compressor that draws random numbers is a `Layer` whose `reply` draws with `asked.key`.
        """


class Asynchronous(Around):
    """Continue after the first replies of an exchange, with the last replies of all other clients.

    `fb.Asynchronous(method, wait_for=3)` is short for `fb.layered(method, fb.Asynchronous(wait_for=3))`.

    Args:
        wait_for: the number of replies for which an exchange waits.
        max_staleness: s, a number of exchanges of the same phase. An exchange also waits for every client that was
            asked s or more exchanges ago, and for every client that has been unavailable, or busy with another phase,
            for more than s exchanges. None: no bound.
        delay_penalty: c. The mean of replies, and with it the server's step, is divided by 1 + c·(mean delay of these
            replies, in exchanges of the phase). Suppose that a step size is stable if every exchange waits for all
            clients. With c = 2 it is also stable with late replies, if clients are alike and their delays constant. A
            run with a smaller c can be faster, but can also diverge. If clients keep x, c must be 0.
    """

    place, tells = "late", DIFFERENCES

    wait_for: int = positive_integer()
    max_staleness: int | None = positive_integer(default=None, optional=True)
    delay_penalty: float = static(default=DELAY_PENALTY)

    def validate(self) -> None:
        c = self.delay_penalty
        number = isinstance(c, int | float) and not isinstance(c, bool) and isfinite(c) and c >= 0
        require(number, "Asynchronous.delay_penalty", c, "a number, at least 0")

    def layer(self, among: Mapping[str, Around]) -> Layer:
        coded = among.get("coded")
        if coded is None or isinstance(coded, Compressor):
            return Memory(compressor=coded, late=self)
        why = "late replies are sent as differences, which only an authoring.Compressor can make shorter"
        raise ConfigurationError(f"Asynchronous and {type(coded).__name__} cannot be combined: {why}")


class Numbered(tuple[PyTree, Array]):
    """Hold a message and the number t of its exchange. It is sent as a plain pair; its class says which number is t."""


jax.tree_util.register_pytree_with_keys(
    Numbered,
    lambda pair: ([(jax.tree_util.SequenceKey(number), part) for number, part in enumerate(pair)], None),
    lambda _, parts: Numbered(parts),
)


def exchanges_so_far(request: Request) -> float:
    """Return t + 1, the number of exchanges of the phase up to the one in which a client was asked.

    It is infinite if a layer outside of the memory has sent the message in a form that hides the number t.
    """
    parts = jax.tree.leaves(request.message, is_leaf=lambda part: isinstance(part, Numbered))
    return next((float(part[1]) + 1 for part in parts if isinstance(part, Numbered)), inf)


class LastReplies(NamedTuple):
    """Hold the server's record of all clients' last replies to a phase."""

    total: PyTree  # Σ p_i g_i, where p_i is the weight of client i, and g_i its last reply
    weight: Array  # Σ p_i over the clients that have replied before
    age: Array  # Σ p_i (t − t_i) over these clients, where t − t_i is the age of the last reply of client i
    exchanges: Array  # the number of exchanges so far

    @classmethod
    def none(cls, like: PyTree) -> LastReplies:
        """Return the record before the first exchange, for updates with the shapes of `like`."""
        total = jax.tree.map(jnp.zeros_like, like)
        return cls(total, jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))

    def after(self, delta: ReplyDelta) -> LastReplies:
        """Return the record after an exchange; `delta` is the sum of the exchange's replies, weighted by p_i.

        The age of every earlier reply grows by one exchange. If a new reply replaces it, the age then falls by the
        difference between the new and the old t_i. For a client's first reply, the old t_i counts as −1. So the age is
        (t + 1) − (t_i − (−1)), which is t − t_i.
        """
        joins, exchanges = delta.joins.public, delta.exchanges.public
        age = self.age + self.weight + (self.exchanges + 1) * joins - exchanges
        total = optax.tree.add(self.total, delta.update)
        return LastReplies(total, self.weight + joins, age, self.exchanges + 1)

    @property
    def mean(self) -> PyTree:
        """Return Σ p_i g_i / Σ p_i over the clients that have replied before; 0 if no client has."""
        weight = jnp.where(self.weight > 0, self.weight, 1)
        return jax.tree.map(lambda leaf: leaf / weight.astype(leaf.dtype), self.total)

    @property
    def age_in_mean(self) -> Array:
        """Return the mean age of the replies in `mean`: Σ p_i (t − t_i) / Σ p_i over the clients that have replied."""
        return over(self.age, self.weight)

    @property
    def delay(self) -> Array:
        """Return the mean delay of all clients, Σ p_i (t − t_i), in exchanges of this phase.

        For a client that has not replied, t_i is −1.
        """
        missing = jnp.where(self.weight > 1 - ROUNDING, 0, 1 - self.weight)
        return self.age + missing * self.exchanges


class LastReply(NamedTuple):
    """Hold a client's last reply to a phase, as the server knows it."""

    update: PyTree  # g_i, the update of the last reply
    exchange: Array  # t_i, the exchange of the phase in which this reply was asked for; -1 before the first reply

    @classmethod
    def none(cls, like: PyTree) -> LastReply:
        """Return the record before the first reply, for updates with the shapes of `like`."""
        return cls(jax.tree.map(jnp.zeros_like, like), jnp.asarray(-1, jnp.int32))


class ReplyDelta(NamedTuple):
    """Hold the difference between a client's new and last reply, which it sends in place of the new reply.

    The server adds up the differences.
    `joins` and `exchanges` are public, since the server knows which clients have replied, and when it asked them. They
    are whole numbers in reply to the message of exchange t: `joins` is 0 or 1, and `exchanges` is from 1 to t + 1. It
    is large if a client replies after many exchanges in which it was away.
    """

    update: PyTree
    joins: Public  # 1 in a client's first reply, then 0
    exchanges: Public  # the new t_i minus the old t_i, where t_i is -1 before the first reply

    @classmethod
    def since(
        cls, last: LastReply, update: PyTree, exchange: Array, compressor: Compressor | None = None
    ) -> tuple[ReplyDelta, LastReply]:
        """Return the difference from the last reply to a new one, and the new record of the last reply.

        Args:
            last: the record of the last reply.
            update: the update of the new reply.
            exchange: the number of the exchange in which the new reply was asked for.
            compressor: the compressor of the difference; None: the difference is sent whole.
        """
        joins, exchanges = (jnp.asarray(n, float) for n in (last.exchange < 0, exchange - last.exchange))
        change = public_differences(optax.tree.sub(update, last.update))
        if compressor is not None:
            marked = jax.tree.map(lambda part: part if is_marked(part) else None, change, is_leaf=is_marked)
            private = private_part(change)
            coded = checked_code(compressor, private)
            restored = decoded(coded)
            update = optax.tree.add(last.update, join(restored, marked))
            change = (coded, marked)
        apart = PublicRange(1, exchanges_so_far, whole=True)
        return cls(change, Public(joins, FLAG), Public(exchanges, apart)), LastReply(update, exchange)


def public_differences(change: PyTree) -> PyTree:
    """Return a difference of two updates with the ranges of differences for its public parts."""

    def one(part: PyTree) -> PyTree:
        return replace(part, within=part.within.of_difference()) if isinstance(part, Public) else part

    return jax.tree.map(one, change, is_leaf=is_marked)


class Memory(Layer):
    """Let clients send differences from their last replies, whole or compressed, which the server adds up.

    Args:
        compressor: the compressor of the differences; None: they are sent whole.
        late: the rule by which an exchange ends after the first replies; None: an exchange waits for all clients.
    """

    kind, place, needs, tells = "memory", "coded", "late", DIFFERENCES

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
        return "cannot be Asynchronous" if self.late else f"cannot send differences from earlier replies ({self.label})"

    def asks(self, inside: Asks) -> Asks:
        asks = inside._replace(differences=True)
        return asks if self.late is None else asks._replace(first=self.late.wait_for)

    def allows(self, inside: Allows, method: Algorithm) -> Allows:
        late = No(f"its replies are already differences from earlier replies ({self.label})")
        return inside._replace(late=late)

    def check(self, method: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
        if self.compressor is not None:
            check_compressor(self.compressor, XY(x, y))
        if self.late is None:
            return
        alone = self.late.delay_penalty == 0 or problem.local is None
        own = "0 if clients keep x: they step on it themselves, and do not know the mean delay"
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
            why = f"{self.label} sends differences from earlier replies, of which the server knows only the sum"
            raise ConfigurationError(f"every reply of an exchange was asked for: {why}")
        last = kept[asked.phase]
        first = None if self.late is None else First(self.late.wait_for, self.late.max_staleness)
        delta = ask(replace(asked, message=Numbered((asked.message, last.exchanges)), first=first)).update
        if self.compressor is not None:
            delta = delta._replace(update=join(*delta.update))
        last = last.after(delta)
        return Total.of_mean(self._shortened(asked, last)), {**kept, asked.phase: last}

    def _slower(self, last: LastReplies) -> Any:
        """Return the number by which the server's step is divided because replies are old; it is at least 1.

        The mean age is below 0 only by rounding, or if a client of a federation reports false numbers of exchanges.
        Steps are then as without delays. They never become longer, and never change their sign.
        """
        return 1 if self.late is None else 1 + self.late.delay_penalty * jnp.maximum(last.age_in_mean, 0)

    def _shortened(self, asked: Asked, last: LastReplies) -> PyTree:
        """Return the mean of last replies, divided by the penalty for their mean delay."""
        if self.late is None or self.late.delay_penalty == 0:
            return last.mean
        slower = self._slower(last)

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
        """Add the mean delay of late replies as columns: `delay` for a single phase, else `delay.PHASE` for each."""
        if self.late is None:
            return found
        single = len(kept) == 1
        delays = {"delay" if single else f"delay.{name}": last.delay for name, last in kept.items()}
        return found._replace(columns=found.columns | delays)

    def remarks(self, method: Algorithm, kept: Kept) -> tuple[str, ...]:
        """Return a sentence for the end of a run if old replies have shortened the steps to a tenth or less."""
        divided = [(float(last.age_in_mean), float(self._slower(last))) for last in kept.values()]
        age, slower = max(divided, default=(0.0, 1.0))
        if slower < SHORTENED:
            return ()
        return (
            f"replies were {age:.0f} exchanges old in the mean, so the server's steps were divided by {slower:.0f}. "
            "Perhaps a client has stopped replying: the mean age then grows without end. If the steps were chosen for "
            "late replies, give delay_penalty=0",
        )


def checked_code(compressor: Compressor, tree: PyTree) -> PyTree:
    """Return the code of a tree.

    Raises:
        ConfigurationError: the decoded code differs from the tree in structure, shapes or dtypes.
    """
    where = f"{type(compressor).__name__}.coded"
    with explained(where):
        coded = compressor.coded(tree)
    if wrong := difference(plain_update(where, coded), tree):
        must = "decoding must return the structure, shapes and dtypes of the encoded tree"
        raise ConfigurationError(f"{must}: {wrong}", where=where)
    return coded


def check_compressor(compressor: Compressor, like: PyTree) -> None:
    """Try a compressor C on a random tree v with the shapes of `like`, at three sizes of v.

    Warn if the compressor is not a contraction: if C(v), compressed and decoded, is not nearer to v than 0 is. A
    compressor that passes this check may still not be a contraction for other trees.

    Raises:
        ConfigurationError: the decoded C(v) does not have the shapes of v, or a second C(v) differs from the first.
    """
    random, where = np.random.default_rng(0), f"{type(compressor).__name__}.coded"
    tree = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=jnp.shape(leaf)), jnp.result_type(leaf)), like)
    for size in (1e-3, 1.0, 1e3):
        v = jax.tree.map(lambda leaf, size=size: (size * leaf).astype(leaf.dtype), tree)
        first, second = (decoded(checked_code(compressor, v)) for _ in range(2))
        if not _squared(optax.tree.sub(first, second)) <= SAME * _squared(v):
            text = "it returned two results for the same tree, and must be deterministic: a round is traced once, and "
            text += "draws would be the same in every round. A random compressor is a Layer that draws with asked.key"
            raise ConfigurationError(text, where=where)
        share = _squared(optax.tree.sub(first, v)) / (_squared(v) or 1)  # the norm is 0 if there are no entries
        if not share < 1:
            text = f"{where} is not a contraction: for a random v with entries of size {size:g} "
            text += f"‖C(v) − v‖² is {share:.3g} ‖v‖²; it must be below ‖v‖², or the run may not converge"
            warn(NumericalWarning(text))
            return


def _squared(tree: PyTree) -> float:
    """Return the sum of the squares of all entries."""
    return float(optax.tree.norm(tree, squared=True))


def gives(method: Algorithm, phase: str) -> PyTree:
    """Return the declaration `gives` of a phase: the shapes of the parts of its update."""
    return takes_and_gives(method.phases[phase])[1]


def template(gives: PyTree, x: PyTree, y: PyTree) -> PyTree:
    """Return zeros in the shapes of an update, from the declaration of its phase."""
    shapes = {"x": x, "y": y, NUMBER: jnp.zeros(())}
    return jax.tree.map(lambda kind: shapes[kind], gives)
