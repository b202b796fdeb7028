"""Clients: the population, of unequal size, here or elsewhere, and a single client as a phase sees it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.card import Card, Shown, counted, listed, named_shape, span
from fedbilevel.core.errors import (
    ConfigurationError,
    FloorError,
    explain_call,
    explain_misspelt,
    is_count,
    is_number,
    require,
    require_count,
)
from fedbilevel.core.foreign import one_by_one
from fedbilevel.core.inputs import arrays_of
from fedbilevel.core.own import LOCAL_STEPS, Given, Values, check, read
from fedbilevel.core.problem import Minimax, Padded, Problem, with_keys
from fedbilevel.core.ragged import Ragged, one_sample
from fedbilevel.core.tree import PyTree, rows_at
from fedbilevel.machinery.threefry import computed_once, uniform_below


@explain_misspelt
@dataclass(frozen=True, init=False, repr=False)
class Clients(Shown):
    """The population: each client's samples for the two losses, its weight, and how much local work it does.

    Args:
        outer: samples of the outer loss: one pytree of arrays per client in a list (of unequal lengths), or one pytree
            of stacked arrays with leading axes (client, sample), or a `Ragged`. In the list, a data frame or a dataset
            of Hugging Face is a dict of columns, a dataset of PyTorch the pytree of its items: of pairs, `batch[0]` and
            `batch[1]`. Each item is read once. Groups of a pandas frame, in their order, and a partitioner of
            flwr-datasets are such lists.
        inner: samples of the inner loss, in the same form as `outer`; None where both losses read the same samples
            (minimax problems), or only the outer loss reads any (single-level problems).
        weights: p_i > 0, normalised to sum 1; None gives 1/M each, "size" gives inner samples over their total.
        outer_sizes: (M,) true numbers of samples in `outer`, where its arrays are stacked and padded at the end.
        inner_sizes: (M,) true numbers of samples in `inner`, where its arrays are stacked and padded at the end.
        local_steps: how many local steps a client makes: None (the algorithm's own number), a number, (M,) numbers, one
            for each client, (T, M), one for each round and client, (T, K, M), one for each inner round, too, (low,
            high), or {"low": …, "high": …}: drawn uniformly, both included, for each client and round; or a function
            (round, client, key) of JAX's operations, or (round, client, key, k) with the number of the inner round.
        own: other numbers of the method that are a client's own, by the path of the method's field, each in one of
            these forms: `{"outer_steps": [1, 5], "client_lr.x": (0.01, 0.1)}`.
        capacity: the share of the model's units that clients can hold, above 0 and up to 1: a number, (M,), one for
            each client, or (T, M), for each round and client; None: all.

    Raises:
        ConfigurationError: an empty client, NaN or infinite samples, leaves whose leading axes disagree, clients whose
            samples differ in keys or shapes, what are no numbers; the message names client and key.
    """

    outer: Ragged
    inner: Ragged
    weights: np.ndarray
    own: Mapping[str, Values]
    capacity: np.ndarray | None

    def __init__(
        self,
        outer: PyTree = None,
        inner: PyTree = None,
        *,
        weights: Any = None,
        outer_sizes: Any = None,
        inner_sizes: Any = None,
        local_steps: Any = None,
        own: Mapping[str, Any] | None = None,
        capacity: Any = None,
    ) -> None:
        allowed = "samples: fb.Clients(samples) for both losses, or divided, fb.Clients.split(samples, 0.8, seed=0)"
        require(outer is not None, "Clients.outer", outer, allowed)
        outer_rows = _rows("outer", outer, outer_sizes)
        inner_rows = outer_rows if inner is None else _rows("inner", inner, inner_sizes)
        require(inner is not None or inner_sizes is None, "Clients.inner_sizes", inner_sizes, "left out without inner")
        count = len(inner_rows.size)
        if len(outer_rows.size) != count:
            raise ConfigurationError(
                f"Clients: outer has {len(outer_rows.size)} clients and inner has {count}; they must agree"
            )
        object.__setattr__(self, "outer", outer_rows)
        object.__setattr__(self, "inner", inner_rows)
        weights = inner_rows.size if isinstance(weights, str) and weights == "size" else weights
        object.__setattr__(self, "weights", checked_weights("Clients.weights", weights, count, "None, 'size'"))
        object.__setattr__(self, "own", _own("Clients", count, local_steps, own))
        object.__setattr__(self, "capacity", read_capacity("Clients.capacity", count, capacity))

    @classmethod
    @explain_call
    def split(
        cls,
        samples: PyTree,
        fraction: float = 0.8,
        *,
        seed: int,
        sizes: Any = None,
        weights: Any = None,
        local_steps: Any = None,
        own: Mapping[str, Any] | None = None,
        capacity: Any = None,
    ) -> Clients:
        """Divide each client's samples at random: `fraction` of them for the inner loss, the rest for the outer one.

        Args:
            samples: of all clients, in a form of `outer`.
            fraction: strictly between 0 and 1, rounded to whole samples; both parts have one at least.
            seed: a whole number from 0 on, which determines the parts.
            sizes: (M,) true numbers of samples, where these are stacked arrays and padded at the end.
            weights, local_steps, own, capacity: see `Clients`.

        Raises:
            ConfigurationError: a client with a single sample, besides what `Clients` refuses.
        """
        require(is_number(fraction) and 0 < fraction < 1, "fraction", fraction, "strictly between 0 and 1")
        require(is_count(seed) or seed == 0, "seed", seed, "a whole number from 0 on")
        rows = _rows("samples", samples, sizes)
        few = np.flatnonzero(rows.size < 2)
        if few.size:
            raise ConfigurationError(f"Clients.split: client {few[0]} has one sample; two parts need at least two")
        rng = np.random.default_rng(seed)
        places = [start + rng.permutation(size) for start, size in zip(rows.start, rows.size, strict=True)]
        cuts = np.clip(np.rint(fraction * rows.size).astype(np.int64), 1, rows.size - 1)
        inner, outer = zip(*(np.split(own, [cut]) for own, cut in zip(places, cuts, strict=True)), strict=True)
        parts = rows.taken(outer), rows.taken(inner)
        return cls(*parts, weights=weights, local_steps=local_steps, own=own, capacity=capacity)

    def __len__(self) -> int:
        return len(self.weights)

    def card(self) -> Card:
        inner = "the same" if self.inner is self.outer else self.inner.in_words("client")
        samples = {"outer samples": self.outer.in_words("client"), "inner samples": inner}
        return Card(counted(len(self), "client"), samples | terms_in_words(self))

    def examples(self) -> tuple[PyTree, PyTree]:
        """One sample's shapes for each loss, leaves (1, ...)."""
        return self.outer.example(), self.inner.example()

    def pooled(self) -> Clients:
        """One client that holds every sample: the same problem without a federation.

        Each sample counts once, so the two agree exactly where weights are proportional to clients' sizes.
        """
        own = {
            name: values for name, values in self.own.items() if isinstance(values, Given) and not values.values.ndim
        }
        lost = sorted(self.own.keys() - own.keys())
        require(not lost, "Clients.own", lost, "single numbers, where all samples go to one client")
        pooled = Clients(self.outer.joined(), None if self.inner is self.outer else self.inner.joined())
        object.__setattr__(pooled, "own", own)
        return pooled


@dataclass(frozen=True, init=False, repr=False)
class RemoteClients(Shown):
    """A population whose samples are out of reach: how many clients, and what one sample looks like.

    Args:
        count: M, the number of clients.
        outer: an example of a client's samples of the outer loss: a pytree with leaves (any number, ...), of which
            only shapes and dtypes are looked at.
        inner: an example of a client's samples of the inner loss, in the same form; None where both losses read the
            same samples.
        weights: p_i > 0, (M,), normalised to sum 1; None gives 1/M each.
        local_steps: how many local steps a client makes, in one of the forms of `Clients`.
        own: other numbers of the method that are a client's own, in these forms, by the path of the method's field.
        capacity: the share of the model's units that clients can hold, above 0 and up to 1: a number, or (M,), one for
            each client; None: all.
    """

    outer: PyTree
    inner: PyTree
    weights: np.ndarray
    own: Mapping[str, Values]
    capacity: np.ndarray | None

    def __init__(
        self,
        count: int,
        outer: PyTree,
        inner: PyTree = None,
        *,
        weights: Any = None,
        local_steps: Any = None,
        own: Mapping[str, Any] | None = None,
        capacity: Any = None,
    ) -> None:
        require_count("RemoteClients.count", count)
        example = jax.tree.map(one_sample, outer)
        object.__setattr__(self, "outer", example)
        object.__setattr__(self, "inner", example if inner is None else jax.tree.map(one_sample, inner))
        object.__setattr__(self, "weights", checked_weights("RemoteClients.weights", weights, count))
        object.__setattr__(self, "own", _own("RemoteClients", count, local_steps, own))
        object.__setattr__(self, "capacity", read_capacity("RemoteClients.capacity", count, capacity))

    @classmethod
    def of(cls, clients: Clients) -> RemoteClients:
        """A `RemoteClients` with the count, shapes, weights, own numbers and capacities of simulated clients."""
        outer, inner = clients.examples()
        one = clients.inner is clients.outer
        made = cls(len(clients), outer, None if one else inner, capacity=clients.capacity)
        object.__setattr__(made, "weights", clients.weights)  # to the last bit
        object.__setattr__(made, "own", clients.own)
        return made

    def __len__(self) -> int:
        return len(self.weights)

    def card(self) -> Card:
        examples = {"outer samples": _in_words(self.outer), "inner samples": _in_words(self.inner)}
        return Card(f"{counted(len(self), 'client')}, elsewhere", examples | terms_in_words(self))

    def examples(self) -> tuple[PyTree, PyTree]:
        """One sample's shapes for each loss, leaves (1, ...)."""
        return self.outer, self.inner


def with_own(
    clients: Clients | RemoteClients,
    local_steps: Any = None,
    own: Mapping[str, Any] | None = None,
    capacity: Any = None,
) -> Any:
    """Return the same clients with these numbers over those that they have: see `Clients`."""
    changed, where = copy.copy(clients), type(clients).__name__
    object.__setattr__(changed, "own", {**clients.own, **_own(where, len(clients), local_steps, own)})
    if capacity is not None:
        object.__setattr__(changed, "capacity", read_capacity(f"{where}.capacity", len(clients), capacity))
    return changed


def _in_words(example: PyTree) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(example)
    return f"each {listed([named_shape(path, leaf, axes_left_out=1) for path, leaf in leaves])}"


def terms_in_words(clients: Any) -> dict[str, str]:
    """Weights, own numbers and capacity of `Clients` or `RemoteClients`, for people."""
    own = {name: str(values) for name, values in clients.own.items() if name != LOCAL_STEPS}
    return {
        "weights": span(clients.weights, ".3g"),
        "local steps": str(clients.own.get(LOCAL_STEPS, "as the algorithm says")),
        **own,
        "capacity": "the whole model" if clients.capacity is None else f"{span(clients.capacity, '.3g')} of its units",
    }


def _rows(name: str, data: PyTree, sizes: Any) -> Ragged:
    if isinstance(data, Ragged):
        require(sizes is None, f"Clients.{name}_sizes", sizes, "left out with a Ragged, which has them")
        arrays_of(f"Clients.{name}", data.values)
        return data.checked(name)
    data = one_by_one(f"Clients.{name}", data)
    if isinstance(data, list):
        require(len(data) > 0, f"Clients.{name}", data, "a list with one entry per client")
        require(sizes is None, f"Clients.{name}_sizes", sizes, "left out when the data is a list")
        return Ragged.listed(name, data)
    return Ragged.stacked(name, data, sizes)


def checked_weights(field: str, weights: Any, count: int, otherwise: str = "None") -> np.ndarray:
    """Weights of `count` clients that sum to 1; None means equal ones."""
    weights = np.ones(count) if weights is None else weights
    p = _numbers(field, weights, f"{otherwise} or one number per client")
    require(p.shape == (count,), field, p.shape, f"of shape {(count,)}, one per client")
    require(bool(np.all(np.isfinite(p)) and np.all(p > 0)), field, weights, "positive and finite")
    p = np.ldexp(p, -np.frexp(p.max())[1])  # so that their sum is finite
    require(bool(np.all(p > 0)), field, weights, "nearer to each other: beside the largest, the smallest counts as 0")
    return np.asarray(p / p.sum())


def _numbers(field: str, given: Any, allowed: str) -> np.ndarray:
    try:
        return np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(path=field, got=given, allowed=allowed) from error


def _own(where: str, count: int, local_steps: Any, own: Mapping[str, Any] | None) -> dict[str, Values]:
    """Read the clients' own numbers, that of local steps among them: see `Clients`."""
    given = {} if own is None else own
    require(isinstance(given, Mapping), f"{where}.own", own, "numbers by name, {name: numbers}")
    said = {f"{where}.own[{name!r}]": (name, numbers) for name, numbers in given.items()}
    if local_steps is not None:
        require(LOCAL_STEPS not in given, f"{where}.own", LOCAL_STEPS, f"left to {where}.local_steps, which is given")
        said[f"{where}.local_steps"] = LOCAL_STEPS, local_steps
    numbers = {name: read(path, numbers, count) for path, (name, numbers) in said.items()}
    if LOCAL_STEPS in numbers:
        check(f"{where}.local_steps", numbers[LOCAL_STEPS], require_count)
    return numbers


def read_capacity(where: str, count: int, capacity: Any) -> np.ndarray | None:
    """Read what clients can hold: (M,) or (T, M) numbers; each makes a program of its own, so that all are known."""
    if capacity is None:
        return None
    allowed = f"None or {count} numbers, one for each client, above 0 and at most 1; or a row of them for each round"
    drawn = callable(capacity) or isinstance(capacity, Mapping)
    require(not drawn, where, capacity, f"{allowed}: neither a rule nor drawn, as each is a model of another shape")
    values = read(where, list(capacity) if isinstance(capacity, tuple) else capacity, count, allowed)
    assert isinstance(values, Given)
    c = np.asarray(values.values, float)
    require(c.ndim <= 2 and bool(np.all((c > 0) & (c <= 1))), where, capacity, allowed)
    return np.full(count, c) if c.ndim == 0 else c


def require_clients(got: object) -> Clients:
    """What is given as clients, if it is a population with its samples; a ConfigurationError otherwise."""
    if not isinstance(got, Clients):
        made = "fedbilevel.Clients(outer, inner) makes them of lists with one entry per client"
        raise ConfigurationError(f"clients = a {type(got).__name__} is not allowed: it must be Clients; {made}")
    return got


def check_samples(problem: Problem, clients: Any) -> None:
    """Refuse samples of an inner loss where a problem has but one set of them."""
    one = isinstance(problem, Minimax) and clients.inner is not clients.outer
    if one:
        raise ConfigurationError(
            "a Minimax problem has one loss: leave Clients.inner out, and give its samples as outer"
        )


class Places(NamedTuple):
    """A batch that is known by the places of its samples among a client's own."""

    places: Array  # (batch,)
    valid: Array | None  # (batch,), which of them count, the others being padding; None: all
    key: Array  # what a loss that draws makes its samples' keys of


Draw = Array | Places
"""What a batch is made of: a key, which draws its samples, or their places."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Samples:
    """A client's samples for a loss, inside an engine: a window of flat arrays."""

    values: PyTree  # leaves (total, ...), shared by all clients
    start: Array  # scalar
    size: Array  # scalar
    longest: int = field(metadata={"static": True})  # the largest size of any client
    equal: bool = field(metadata={"static": True})  # whether all clients have that size
    floor: int = field(default=1, metadata={"static": True})  # a draw of fewer samples is refused, by the client itself
    unbatched: bool = field(default=True, metadata={"static": True})  # whether it is not vectorised with other clients

    def batch(self, draw: Draw, batch_size: int | None) -> PyTree:
        """`batch_size` samples that a key draws uniformly with replacement, or every sample once when it is None; or
        those at the places that `draw` says."""
        if isinstance(draw, Places):
            rows = rows_at(self.values, self.start + draw.places)
            return rows if draw.valid is None else Padded(rows, draw.valid)
        if batch_size is not None:
            return rows_at(self.values, self.start + self.drawn(draw, batch_size))
        whole = self.everything()
        return whole.samples if self.equal else whole

    def drawn(self, key: Array, batch_size: int) -> Array:
        """The places of a batch among this client's samples, (batch_size,) in 0..size − 1."""
        self.check_floor(batch_size)
        return computed_once(uniform_below(key, self.size, (batch_size,)))

    def check_floor(self, count: int | Array) -> None:
        """Refuse a draw of fewer than `floor` samples, or, above a floor of 1, of a number that data say.

        Raises:
            FloorError: while the phase is traced, so that nothing of it runs.
        """
        if isinstance(count, int) and count < self.floor:
            raise FloorError(f"a draw of {count} samples is below this client's floor of {self.floor}")
        if not isinstance(count, int) and self.floor > 1:
            raise FloorError(f"this client's floor of {self.floor} samples refuses draws of as many as a server says")

    def shuffled(self, key: Array) -> Array:
        """The places of all samples in random order, then those of the padding: (longest,)."""
        drawn = jax.random.bits(key, (self.longest,), jnp.uint32)
        last = jnp.where(jnp.arange(self.longest) < self.size, drawn, jnp.uint32(2**32 - 1))
        return jnp.argsort(last)

    def in_epochs(
        self, key: Array, epochs: int, batch_size: int, drop_last: bool
    ) -> tuple[int | Array, Callable[[Array | int], Places]]:
        """Return how many batches so many epochs have, and k -> the k-th of them.

        Each epoch takes the samples in a random order of its own, without replacement. Its last batch is short where
        `batch_size` does not divide the number of samples; `drop_last` leaves that out, unless it is the only one.
        """
        count, width = self.batches(batch_size, drop_last), min(batch_size, self.longest)
        self.check_floor(batch_size)
        rest = 0 if drop_last or self.longest <= batch_size else self.longest % batch_size
        if 0 < rest < self.floor:
            text = f"the last batch of an epoch is below this client's floor of {self.floor} samples"
            raise FloorError(f"{text}; drop_last=True leaves it out")
        orders = jax.vmap(lambda epoch: self.shuffled(jax.random.fold_in(key, epoch)))(jnp.arange(epochs))
        full = self.equal and (drop_last or self.longest % width == 0)
        of_losses = jax.random.fold_in(key, epochs)

        def batch(k: Array | int) -> Places:
            epoch = jnp.minimum(k // count, epochs - 1)  # others vectorised with this client may go on to larger k
            turn = k % count * batch_size + jnp.arange(width)
            places = orders[epoch, jnp.minimum(turn, self.size - 1)]
            return Places(places, None if full else turn < self.size, jax.random.fold_in(of_losses, k))

        return epochs * count, batch

    def batches(self, batch_size: int, drop_last: bool) -> int | Array:
        """How many batches an epoch has."""
        size = self.longest if self.equal else self.size
        return size // batch_size + (size < batch_size if drop_last else size % batch_size > 0)

    def in_turn(
        self, key: Array | None, steps: int | Array | None
    ) -> tuple[Callable[[Array | int], PyTree], int, Array]:
        """For methods that take a step on each sample: (j -> the j-th, (1, ...); bound of j; how many there are).

        All samples, in their own order or, given a key, in a random one; of `steps` many, at most all, with a key. The
        bound is the same for all clients.
        """
        if steps is not None:
            self.check_floor(steps)
        bound = self.longest if steps is None or isinstance(steps, Array) else min(int(steps), self.longest)
        count = self.size if steps is None else jnp.minimum(steps, self.size)
        order = jnp.arange(bound) if key is None else self.shuffled(key)[:bound]
        places = self.start + jnp.minimum(order, self.size - 1)
        if self.unbatched:  # a copy in that order would cost as much as small steps do
            return lambda j: rows_at(self.values, places[j][None]), bound, count
        # of vectorised clients each would be read by itself: a copy of all is quicker
        copy = self.everything().samples if key is None else rows_at(self.values, places)
        take = partial(jax.lax.dynamic_slice_in_dim, slice_size=1, allow_negative_indices=False)
        return lambda j: jax.tree.map(lambda leaf: take(leaf, j), copy), bound, count

    def everything(self) -> Padded:
        """Every sample, padded to the longest client."""
        offset = jnp.arange(self.longest)
        if self.equal:
            window = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, self.start, self.longest), self.values)
            return Padded(window, jnp.ones(self.longest, bool))
        chosen = self.start + jnp.minimum(offset, self.size - 1)
        return Padded(jax.tree.map(lambda a: jnp.asarray(a)[chosen], self.values), offset < self.size)


class Default(Enum):
    """The value of an argument that is left out."""

    DEFAULT = "default"


DEFAULT = Default.DEFAULT


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Client:
    """The client that runs a phase: its losses, samples, number of local steps and state.

    Args:
        problem: with the losses `outer` and `inner`.
        outer: the client's samples for the outer loss.
        inner: the client's samples for the inner loss.
        id: its number, 0..M − 1.
        weight: p_i; the engine applies it, a phase rarely needs it.
        state: what it keeps between rounds, as `init_client` made it; the engine keeps it, and it is never sent.
        own: its own numbers in this round, by the path of the method's field; the phase finds them there.
        batch_size: samples per draw, the method's field of that name; None: all.
    """

    problem: Problem = field(metadata={"static": True})
    outer: Samples
    inner: Samples
    id: Array
    weight: Array
    state: PyTree
    own: Mapping[str, Array] = field(default_factory=dict)
    batch_size: int | None = field(default=None, metadata={"static": True})

    def outer_batch(self, key: Draw, batch_size: int | Default | None = DEFAULT) -> PyTree:
        """Samples for the outer loss: `batch_size` draws with replacement, all if None, the method's if left out."""
        return self._batch("outer", key, batch_size)

    def inner_batch(self, key: Draw, batch_size: int | Default | None = DEFAULT) -> PyTree:
        """Samples for the inner loss: `batch_size` draws with replacement, all if None, the method's if left out."""
        return self._batch("inner", key, batch_size)

    def _batch(self, name: str, draw: Draw, batch_size: int | Default | None) -> PyTree:
        samples: Samples = getattr(self, name)
        batch = samples.batch(draw, self.batch_size if isinstance(batch_size, Default) else batch_size)
        return with_keys(batch, draw.key if isinstance(draw, Places) else draw) if name in self.problem.draws else batch

    def local_steps(self, default: Any) -> Any:
        """How many local steps to make: the client's own number where it has one, else `default`, the method's."""
        return self.own.get(LOCAL_STEPS, default)
