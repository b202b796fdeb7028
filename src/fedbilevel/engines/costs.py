"""Count the costs of exchanges: `RoundCosts` is a small pytree with the costs of a round, `Ledger` a run's totals."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.card import Card, Shown, counted, listed
from fedbilevel.core.fed import Reply, Total, decoded
from fedbilevel.core.tree import PyTree, is_floating, nbytes
from fedbilevel.engines.virtual_time import TICK
from fedbilevel.wording import printable, require_object

ExchangeKind = tuple[str, int, int]
"""(phase, bytes sent to each client, bytes sent by each client)."""


T = TypeVar("T")
PART = 2**14


class ExchangeCount(NamedTuple):
    """Count the exchanges of one kind, the messages in them, and the replies."""

    exchanges: Any
    asked: Any  # the number of messages to clients, summed over the exchanges
    replies: Any  # the number of replies that the server has used


class RoundCosts(NamedTuple):
    """Hold sums of costs over exchanges; leaves are scalars for one round, or arrays (rounds,) for several rounds."""

    calls: dict[ExchangeKind, ExchangeCount]  # the exchanges of each kind
    gradients: Array  # the number of batch gradients, summed over clients, in two parts: see `split_count`
    hvps: Array  # the number of products of a vector with second derivatives, in the same form
    metrics: dict[tuple[str, str], Any]  # (phase, name) -> (Σ weight·value, Σ weight)
    time: Array  # the clock's ticks that the exchanges took, in the same form
    privacy: tuple[float, float] | None = None  # the largest ε and δ spent by any client; for whole rounds only


def empty_costs() -> RoundCosts:
    """Make the costs of a round before its first exchange."""
    return RoundCosts({}, split_count(0), split_count(0), {}, split_count(0))


def add_costs(a: RoundCosts, b: RoundCosts) -> RoundCosts:
    """Add the costs of exchanges `a` and `b`."""
    calls, metrics = _added(a.calls, b.calls), _added(a.metrics, b.metrics)
    return RoundCosts(calls, a.gradients + b.gradients, a.hvps + b.hvps, metrics, a.time + b.time)


def _added(a: dict[Any, Any], b: dict[Any, Any]) -> dict[Any, Any]:
    """Add two tables by key; a key that is missing in one table has the value 0 there."""
    return {**a, **b} | {k: jax.tree.map(operator.add, a[k], b[k]) for k in a.keys() & b.keys()}


def stack_costs(costs: Sequence[RoundCosts]) -> RoundCosts:
    """Stack the costs of some rounds to leaves of shape (rounds,); a kind of exchange is 0 in rounds without it."""
    nothing = jax.tree.map(jnp.zeros_like, reduce(add_costs, costs))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(add_costs(nothing, round_costs) for round_costs in costs))


def packed(costs: RoundCosts) -> dict[str, Array]:
    """Pack all numbers of a round's costs into one vector for each dtype, so that a program returns few arrays."""
    kinds: dict[str, list[Array]] = {}
    for leaf in map(jnp.asarray, jax.tree.leaves(costs)):
        kinds.setdefault(str(leaf.dtype), []).append(jnp.ravel(leaf))
    return {kind: jnp.concatenate(leaves) for kind, leaves in kinds.items()}


def unpacked(rows: dict[str, np.ndarray], like: RoundCosts) -> RoundCosts:
    """Undo `packed` for some rounds: make the costs, with leaves (rounds, ...), from an array (rounds, n) per dtype.

    `like` has the shapes and dtypes of one round's costs.
    """
    places = dict.fromkeys(rows, 0)

    def take(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        kind, size = str(leaf.dtype), math.prod(leaf.shape)
        places[kind] += size
        return rows[kind][:, places[kind] - size : places[kind]].reshape(-1, *leaf.shape)

    return jax.tree.map(take, like)


class Book:
    """Add up the costs of a round, or of one iteration of a compiled loop, exchange by exchange."""

    def __init__(self) -> None:
        self.costs = empty_costs()

    def add(self, costs: RoundCosts) -> None:
        """Add costs that were already summed, such as those of a compiled loop."""
        self.costs = add_costs(self.costs, costs)

    def enter(
        self,
        phase: str,
        parts: Sequence[tuple[PyTree, Sums, int | Array]],
        ticks: int | Array = 0,
        age: Array | None = None,
    ) -> None:
        """Add the costs of one exchange.

        Args:
            phase: the name of the phase.
            parts: (message, sums over the replies to this message, number of clients that got it) for each message.
                There are several parts if clients get messages of different sizes. Together they are counted as one
                exchange.
            ticks: the time that the exchange took, in ticks of the clock.
            age: after `sum_first`, Σ p_i·(exchanges since client i was asked) over the replies, where p_i is the
                client's weight. From this sum the metric `staleness` is computed.
        """
        for number, (message, sums, asked) in enumerate(parts):
            count = ExchangeCount(jnp.asarray(number == 0, jnp.int32), jnp.asarray(asked, jnp.int32), sums.responders)
            metrics = {(phase, name): (value, sums.weight) for name, value in sums.metrics.items()}
            if age is not None:
                metrics[phase, "staleness"] = age, sums.weight
            kind = phase, *sizes(message, sums)
            # The time is added to the last part, so that XLA can fold the constants of the other parts.
            time = split_count(ticks if number == len(parts) - 1 else 0)
            self.add(RoundCosts({kind: count}, split_count(sums.gradients), split_count(sums.hvps), metrics, time))


def sizes(message: PyTree, sums: Sums) -> tuple[int, int]:
    """Return the number of bytes of a message, and of the reply of each client that got it."""
    return nbytes(message), nbytes(sums.update) if sums.sent is None else sums.sent.bytes


def joined(parts: Sequence[tuple[PyTree, Sums, int]]) -> list[tuple[PyTree, Sums, int]]:
    """Join the parts of an exchange, as `Book.enter` takes them, whose messages and replies have the same sizes.

    Counts are added in NumPy, so that JAX starts no program for each addition. The update is that of the first part.
    """
    same: dict[tuple[int, int], list[tuple[PyTree, Sums, int]]] = {}
    for part in parts:
        same.setdefault(sizes(*part[:2]), []).append(part)

    def together(message: PyTree, first: Sums, every: list[tuple[PyTree, Sums, int]]) -> tuple[PyTree, Sums, int]:
        added = added_up([sums._replace(update=None, held=None) for _, sums, _ in every])
        return message, added._replace(update=first.update), sum(asked for *_, asked in every)

    return [together(*every[0][:2], every) for every in same.values()]


def added_up(trees: Sequence[T]) -> T:
    """Add trees of arrays in their order. NumPy adds them, since JAX would start a program for each addition."""
    total: T = jax.tree.map(jnp.asarray, reduce(partial(jax.tree.map, np.add), trees))
    return total


def split_count(number: int | Array) -> Array:
    """Split a number of ticks, or of gradients in an exchange, into (multiples of PART, rest).

    Sums of both parts fit into 32 bits, even over 16,000 exchanges with the largest number of 32 bits, and over 65,536
    exchanges of the longest possible duration.
    """
    return jnp.stack([jnp.asarray(number // PART, jnp.int32), jnp.asarray(number % PART, jnp.int32)])


@jax.tree_util.register_static
@dataclass(frozen=True)
class Sent:
    """Hold the number of bytes that a client has sent: the size of its reply as sent, which may be compressed."""

    bytes: int


@jax.tree_util.register_static
@dataclass(frozen=True)
class Dtypes:
    """Hold the dtypes of the leaves of a reply's update, in the order of the leaves."""

    of_leaves: tuple[np.dtype[Any], ...]

    @classmethod
    def of(cls, tree: PyTree) -> Dtypes:
        """Return the dtypes of a tree's leaves."""
        return cls(tuple(np.dtype(leaf.dtype) for leaf in jax.tree.leaves(tree)))

    def rounded(self, tree: PyTree) -> PyTree:
        """Return a tree with as many leaves, rounded to these dtypes."""
        leaves, structure = jax.tree.flatten(tree)
        each = zip(leaves, self.of_leaves, strict=True)
        return jax.tree.unflatten(structure, [leaf.astype(dtype) for leaf, dtype in each])


class Sums(NamedTuple):
    """Hold weighted sums over the clients' replies in an exchange. The server receives nothing but these sums.

    Leaves of less than 32 bits are summed in float32, and the sum is rounded. If terms were added in bfloat16, a sum
    would stop growing as soon as it is 256 times as large as a term, as with some hundreds of clients.
    """

    update: PyTree  # Σ p_i u_i, with the weight p_i and the update u_i of client i, in float32 or wider
    weight: Array  # Σ p_i
    metrics: dict[str, Array]  # Σ p_i m_i, with the metric m_i of client i, by name
    responders: Array
    gradients: Array
    hvps: Array
    held: PyTree = None  # with submodels: for each entry of the update, Σ p_i over the clients that hold it
    sent: Sent | None = None  # bytes from each client; None in sums over clients that sent different numbers of bytes
    dtypes: Dtypes | None = None  # the dtypes of the updates u_i

    def total(self, population: Any, rows: Any = None) -> Total:
        """Return these sums in the form that a method's program on the server gets: without metrics and work."""
        held = self.held if self.held is None else self._rounded(self.held)
        return Total(self.rounded, self.weight, self.responders, population, held, rows)

    @property
    def rounded(self) -> PyTree:
        """Return Σ p_i u_i, rounded to the dtypes of the updates."""
        return self._rounded(self.update)

    def _rounded(self, tree: PyTree) -> PyTree:
        return tree if self.dtypes is None else self.dtypes.rounded(tree)

    @property
    def row(self) -> tuple[PyTree, Array]:
        """Return the update and the weight of a client, if these are the sums of a single client.

        A place without a client, which only fills up an array, has the weight 0.
        """
        weight = jnp.where(self.weight > 0, self.weight, 1)
        update = jax.tree.map(lambda leaf: leaf / weight.astype(leaf.dtype), self.update)
        return self._rounded(update), self.weight


def weigh(reply: Reply, weight: Array, counts: Array) -> Sums:
    """Return a client's reply multiplied by its weight, to be added up; `counts` is 0 for a place without a client."""
    weight = weight * counts

    def weighted(leaf: Array) -> Array:
        wide = leaf.astype(jnp.float32) if is_floating(leaf) and leaf.dtype.itemsize < 4 else leaf
        return wide * weight.astype(wide.dtype)

    update = decoded(reply.update)
    return Sums(
        jax.tree.map(weighted, update),
        weight,
        {name: weight * value for name, value in (reply.metrics or {}).items()},
        counts.astype(jnp.int32),
        (counts * reply.gradients).astype(jnp.int32),
        (counts * reply.hvps).astype(jnp.int32),
        sent=Sent(nbytes(reply.update)),
        dtypes=Dtypes.of(update),
    )


_IN_JSON: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", lambda value: type(value) is int),
    "int | None": ("a whole number or null", lambda value: value is None or type(value) is int),
    "float": ("a number", lambda value: type(value) in (int, float)),
    "bool": ("true or false", lambda value: type(value) is bool),
    "dict[str, int]": (
        "an object of whole numbers by phase",
        lambda value: isinstance(value, dict) and all(type(count) is int for count in value.values()),
    ),
}
"""The annotation of a field -> (the JSON value that the field takes, in words; a test of a value)."""


@dataclass(repr=False)
class Ledger(Shown):
    """Hold the total costs of a run since round 0; a resumed run continues them.

    Args:
        rounds: the number of rounds done.
        exchanges: the number of exchanges. One exchange is a message to each client of the cohort, and a reply from
            each.
        bytes_down: the number of bytes of the arrays that were sent to all clients that were asked.
        bytes_up: the number of bytes of the arrays in the replies that the server has used.
        replies: the number of replies that the server has used.
        gradients: the number of gradients on a batch, summed over clients. Each is counted as 1, whether it is the
            gradient of a head or of a whole network.
        hvps: the number of products of a vector with second derivatives on a batch, summed over clients.
        exchanges_by_phase: for each phase, the number of exchanges that asked for it.
        epsilon: ε of differential privacy, the largest that any client has spent (or reports to have spent) at
            `delta`; 0 without privacy. In a simulation, ε is an upper bound if clients keep no count of their replies.
        delta: δ of differential privacy, the largest of any client.
        ticks: the time that exchanges took, in whole ticks of the clock.
        flops: the number of floating-point operations for the replies that the server has used; None if it is not
            known.
        virtual: whether the time is that of a simulation's clock; False: it is real time.
    """

    COLUMNS: ClassVar = ("exchanges", "bytes_down", "bytes_up", "gradients", "hvps", "flops", "time", "epsilon")

    rounds: int = 0
    exchanges: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    replies: int = 0
    gradients: int = 0
    hvps: int = 0
    exchanges_by_phase: dict[str, int] = field(default_factory=dict)
    epsilon: float = 0.0
    delta: float = 0.0
    ticks: int = 0
    flops: int | None = None  # 0 when counting begins
    virtual: bool = field(default=True, compare=False)

    @classmethod
    def of(cls, fields: Any) -> Ledger:
        """Make a ledger from an object that was read from JSON.

        Raises:
            ValueError: the object has a field that a ledger does not have, or a value of the wrong type.
        """
        kinds = {field.name: _IN_JSON[field.type] for field in dataclasses.fields(cls)}
        require_object(fields, f"the totals of a ledger ({', '.join(list(kinds)[:2])}, …)")
        for name, value in fields.items():
            if name not in kinds:
                raise ValueError(
                    f"{printable(name, 50)!r} is not a total of a ledger; its totals are {', '.join(kinds)}"
                )
            kind, fits = kinds[name]
            if not fits(value):
                raise ValueError(f"{name} of the ledger is {printable(repr(value))}, not {kind}")
        return cls(**fields)

    def add(self, round_costs: RoundCosts, rounds: int, costs: Mapping[ExchangeKind, int | None] | None = None) -> None:
        """Add the costs of some rounds to the totals.

        Args:
            round_costs: the costs: arrays with an entry for each round, or scalars for a single round.
            rounds: the number of these rounds.
            costs: the number of floating-point operations that a client needs for a reply, by the kind of the exchange.
                If the number for a kind is missing or None, `flops` becomes None.
        """
        self.rounds += rounds
        for (phase, down, up), calls in round_costs.calls.items():
            count, asked, replies = (_total(number) for number in calls)
            self.exchanges += count
            self.bytes_down += asked * down
            self.bytes_up += replies * up
            self.replies += replies
            cost = (costs or {}).get((phase, down, up))
            self.flops = None if self.flops is None or cost is None else self.flops + replies * cost
            if count:
                self.exchanges_by_phase[phase] = self.exchanges_by_phase.get(phase, 0) + count
        if round_costs.privacy is not None:
            self.epsilon, self.delta = map(max, (self.epsilon, self.delta), round_costs.privacy)
        self.gradients += _joined(round_costs.gradients)
        self.hvps += _joined(round_costs.hvps)
        self.ticks += _joined(round_costs.time)

    def card(self) -> Card:
        phases = [f"{name} {count:,}" for name, count in self.exchanges_by_phase.items()]
        work = [counted(self.gradients, "gradient"), counted(self.hvps, "hvp")]
        each = f"{self.gradients_per_client:.3g} and {self.hvps_per_client:.3g} of a client in an exchange"
        lines = {
            "exchanges": f"{self.exchanges:,}" + (f": {listed(phases)}" if phases else ""),
            "traffic": f"{self.bytes_down / 1e6:,.3f} MB down, {self.bytes_up / 1e6:,.3f} MB up, the whole cohort's",
            "work": f"{', '.join(work)}; {each}" + ("" if self.flops is None else f"; {self.flops / 1e9:,.3g} GFLOP"),
            "virtual time" if self.virtual else "time": f"{self.time:,.1f} seconds",
        }
        if self.delta:
            lines["privacy"] = f"ε = {self.epsilon:.4g} at δ = {self.delta:g}, the most that a client spent"
        return Card(f"Costs of {counted(self.rounds, 'round')}", lines)

    def in_short(self) -> str:
        """Return the most important totals as one line of text."""
        traffic = f"{(self.bytes_down + self.bytes_up) / 1e6:,.1f} MB"
        work = f"{counted(self.gradients, 'gradient')}, {counted(self.hvps, 'hvp')}"
        return f"{counted(self.exchanges, 'exchange')}, {traffic}, {work}"

    def columns(self) -> dict[str, float | int]:
        """Return the totals as columns of a row of the history; unknown totals are left out."""
        values = {name: getattr(self, name) for name in self.COLUMNS if name != "epsilon" or self.delta}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def time(self) -> float:
        """Return the seconds that exchanges took: virtual seconds in a simulation, real seconds in a federation."""
        return self.ticks * TICK

    @property
    def gradients_per_client(self) -> float:
        """Return the mean number of batch gradients per reply that the server has used."""
        return self.gradients / max(self.replies, 1)

    @property
    def hvps_per_client(self) -> float:
        """Return the mean number of products with second derivatives per reply that the server has used."""
        return self.hvps / max(self.replies, 1)


def _joined(parts: object) -> int:
    """Return the sum of numbers that `split_count` has split."""
    whole, rest = np.asarray(parts).reshape(-1, 2).sum(axis=0, dtype=np.int64)
    return int(whole) * PART + int(rest)


def _total(counts: object) -> int:
    return int(np.sum(np.asarray(counts), dtype=np.int64))
