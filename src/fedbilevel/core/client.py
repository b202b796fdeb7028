"""Define the population of clients, simulated or remote, and the single client that a phase gets."""

from __future__ import annotations

import copy
import re
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


@dataclass(frozen=True, init=False, repr=False)
class Clients(Shown):
    """Hold a population of M clients: their samples for both losses, their weights and their amounts of local work.

    The samples of a loss can have one of these forms:

    - A list with a pytree of arrays for each client, whose first axes are samples. Clients may have different numbers
      of samples.
    - A pytree of arrays with leading axes (client, sample). For one client, the first axis has the length 1: without
      this axis, every sample would become a client.
    - A `Ragged`, which has the samples of all clients one after the other in flat arrays, and the number of samples of
      each client.
    - A list of data frames or of datasets of Hugging Face, which become dicts of columns; or of datasets of PyTorch,
      each of which becomes the pytree of its items. Each item is read once. If the items are pairs, a batch has
      `batch[0]` and `batch[1]`.
    - A grouped pandas frame, whose groups are the clients in their order, or a partitioner of flwr-datasets.

    The number of local steps, and the other numbers that may differ between clients (`own`), can have one of these
    forms:

    - A number for all clients.
    - An array of shape (M,), with a number for each client; of shape (T, M), with a number for each round and client;
      or of shape (T, K, M), with a number for each round, inner round and client.
    - A pair (low, high), or {"low": …, "high": …}: numbers are drawn uniformly for each client and round, and both ends
      can be drawn.
    - A function of (round, client, key), or of (round, client, key, k) with the inner round k, written with operations
      of JAX.

    Args:
        outer: the samples of the outer loss.
        inner: the samples of the inner loss, in the same form as `outer`; None: both losses use the same samples
            (minimax problems), or there is only an outer loss (single-level problems).
        weights: M positive numbers p_i, which are scaled so that their sum is 1; None: 1/M each; "size": proportional
            to the clients' numbers of inner samples.
        outer_sizes: each client's true number of samples in `outer`, M numbers, if `outer` has stacked arrays that are
            padded at the end.
        inner_sizes: each client's true number of samples in `inner`, M numbers, if `inner` has stacked arrays that are
            padded at the end.
        local_steps: the number of local steps of a client; None: the algorithm's number.
        own: other numbers of the method that differ between clients, by the path of the method's field, such as
            `{"outer_steps": [1, 5], "client_lr.x": (0.01, 0.1)}`.
        capacity: the share of the model's units that clients can hold, above 0 and at most 1: one number, an array of
            shape (M,) with a number for each client, or an array of shape (T, M) with a number for each round and
            client; None: all units.

    Raises:
        ConfigurationError: a client has no samples, samples are not finite or not numbers, leaves have different
            numbers of samples, or clients' samples differ in keys or shapes. The message names the client and the key.
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
        allowed = (
            "samples: fb.Clients(samples) uses them for both losses, fb.Clients.split(samples, seed=0) divides them"
        )
        require(outer is not None, "Clients.outer", outer, allowed)
        outer_rows = _rows("outer", outer, outer_sizes)
        inner_rows = outer_rows if inner is None else _rows("inner", inner, inner_sizes)
        require(inner is not None or inner_sizes is None, "Clients.inner_sizes", inner_sizes, "left out without inner")
        count = len(inner_rows.size)
        if len(outer_rows.size) != count:
            text = f"outer has {len(outer_rows.size)} clients and inner has {count}; they must agree"
            raise ConfigurationError(text, where="Clients")
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
        """Divide each client's samples at random into samples of the inner and of the outer loss.

        Args:
            samples: the samples of all clients, in a form that `Clients` takes as `outer`.
            fraction: the share of each client's samples that the inner loss gets, strictly between 0 and 1. The number
                of these samples is rounded. Each of the two losses gets at least one sample of each client.
            seed: the seed of the draw, a whole number from 0 on.
            sizes: each client's true number of samples, M numbers, if `samples` has stacked arrays that are padded at
                the end.
            weights, local_steps, own, capacity: as in `Clients`.

        Raises:
            ConfigurationError: a client has a single sample, or `Clients` refuses the samples.
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
        inner, outer = zip(*(np.split(order, [cut]) for order, cut in zip(places, cuts, strict=True)), strict=True)
        parts = rows.taken(outer), rows.taken(inner)
        return cls(*parts, weights=weights, local_steps=local_steps, own=own, capacity=capacity)

    def __len__(self) -> int:
        return len(self.weights)

    def card(self) -> Card:
        inner = "the same" if self.inner is self.outer else self.inner.in_words("client")
        samples = {"outer samples": self.outer.in_words("client"), "inner samples": inner}
        return Card(counted(len(self), "client"), samples | terms_in_words(self))

    def examples(self) -> tuple[PyTree, PyTree]:
        """Return the form of a sample of each loss: shapes (1, ...) and dtypes of its leaves, without values."""
        return self.outer.example(), self.inner.example()

    def pooled(self) -> Clients:
        """Return a population of one client that has the samples of all clients: the same problem without a federation.

        Every sample has the same weight. The problem is therefore the same only if the weights of clients are
        proportional to their numbers of samples, and if no loss is a `WholeLoss`, which gets all samples at once.

        Raises:
            ConfigurationError: one of the clients' own numbers, such as `local_steps`, differs between clients or
                rounds.
        """
        own = {
            name: values for name, values in self.own.items() if isinstance(values, Given) and not values.values.ndim
        }
        lost = sorted(self.own.keys() - own.keys())
        require(not lost, "Clients.own", lost, "single numbers, since all samples go to one client")
        pooled = Clients(self.outer.joined(), None if self.inner is self.outer else self.inner.joined())
        object.__setattr__(pooled, "own", own)
        return pooled


def _use_of_samples(cls: type, name: str) -> str:
    """Return which samples `Clients` takes as which argument, if the wrong name of an argument is a use of samples."""
    uses = re.match("train|val|test", name)
    return "`outer` takes the samples for validation, and `inner` those for training" if uses else ""


explain_misspelt(Clients, hint=_use_of_samples)


@dataclass(frozen=True, init=False, repr=False)
class RemoteClients(Shown):
    """Describe a population whose samples are on other machines: its number of clients, and the form of a sample.

    Args:
        count: the number of clients, M.
        outer: an example of samples of the outer loss: a pytree whose leaves have a leading axis of samples, of any
            length. Only the other axes and the dtypes matter.
        inner: an example of samples of the inner loss, in the same form; None: both losses use the same samples.
        weights: M positive numbers p_i, which are scaled so that their sum is 1; None: 1/M each.
        local_steps: the number of local steps of a client, in one of the forms that `Clients` takes.
        own: other numbers of the method that differ between clients, by the path of the method's field, in the same
            forms.
        capacity: the share of the model's units that clients can hold, above 0 and at most 1: one number, or M numbers,
            one for each client; None: all units.
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
        """Return `RemoteClients` with the number, shapes, weights, own numbers and capacities of simulated clients."""
        outer, inner = clients.examples()
        shared = clients.inner is clients.outer
        made = cls(len(clients), outer, None if shared else inner, capacity=clients.capacity)
        object.__setattr__(made, "weights", clients.weights)  # scaling them again could change the last bit
        object.__setattr__(made, "own", clients.own)
        return made

    def __len__(self) -> int:
        return len(self.weights)

    def card(self) -> Card:
        examples = {"outer samples": _in_words(self.outer), "inner samples": _in_words(self.inner)}
        return Card(f"{counted(len(self), 'client')}, elsewhere", examples | terms_in_words(self))

    def examples(self) -> tuple[PyTree, PyTree]:
        """Return the form of a sample of each loss: shapes (1, ...) and dtypes of its leaves, without values."""
        return self.outer, self.inner


def with_own(
    clients: Clients | RemoteClients,
    local_steps: Any = None,
    own: Mapping[str, Any] | None = None,
    capacity: Any = None,
) -> Any:
    """Return a copy of the clients with other own numbers or capacities, given in the forms that `Clients` takes.

    Numbers that are left out stay as they are.
    """
    changed, where = copy.copy(clients), type(clients).__name__
    object.__setattr__(changed, "own", {**clients.own, **_own(where, len(clients), local_steps, own)})
    if capacity is not None:
        object.__setattr__(changed, "capacity", read_capacity(f"{where}.capacity", len(clients), capacity))
    return changed


def _in_words(example: PyTree) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(example)
    return f"each {listed([named_shape(path, leaf, axes_left_out=1) for path, leaf in leaves])}"


def terms_in_words(clients: Any) -> dict[str, str]:
    """Describe the weights, own numbers and capacities of `Clients` or `RemoteClients` in words, by name."""
    own = {name: str(values) for name, values in clients.own.items() if name != LOCAL_STEPS}
    return {
        "weights": span(clients.weights, ".3g"),
        "local steps": str(clients.own.get(LOCAL_STEPS, "as the algorithm says")),
        **own,
        "capacity": "the whole model" if clients.capacity is None else f"{span(clients.capacity, '.3g')} of its units",
    }


def _rows(name: str, data: PyTree, sizes: Any) -> Ragged:
    if isinstance(data, Ragged):
        require(sizes is None, f"Clients.{name}_sizes", sizes, "left out with a Ragged, which has the sizes")
        arrays_of(f"Clients.{name}", data.values)
        return data.checked(name)
    data = one_by_one(f"Clients.{name}", data)
    if isinstance(data, list):
        require(len(data) > 0, f"Clients.{name}", data, "a list with one entry per client, and at least one client")
        require(sizes is None, f"Clients.{name}_sizes", sizes, "left out when the data is a list")
        return Ragged.listed(name, data)
    rows = Ragged.stacked(name, data, sizes)
    if len(rows.size) == 0:
        raise ConfigurationError("it has 0 clients; at least one client is needed", where=f"Clients.{name}")
    return rows


def checked_weights(field: str, weights: Any, count: int, otherwise: str = "None") -> np.ndarray:
    """Return the weights of `count` clients, scaled to sum to 1; None gives equal weights."""
    weights = np.ones(count) if weights is None else weights
    p = _numbers(field, weights, f"{otherwise} or one number per client")
    require(p.shape == (count,), field, weights, f"of shape {(count,)}, a number for each client, and not {p.shape}")
    require(bool(np.all(np.isfinite(p)) and np.all(p > 0)), field, weights, "positive and finite")
    p = np.ldexp(p, -np.frexp(p.max())[1])  # keeps the sum finite
    require(bool(np.all(p > 0)), field, weights, "of similar size: relative to the largest, the smallest rounds to 0")
    return np.asarray(p / p.sum())


def _numbers(field: str, given: Any, allowed: str) -> np.ndarray:
    try:
        return np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(path=field, got=given, allowed=allowed) from error


def _own(where: str, count: int, local_steps: Any, own: Mapping[str, Any] | None) -> dict[str, Values]:
    """Read the clients' own numbers, including local steps, in the forms of `Clients`."""
    given = {} if own is None else own
    require(isinstance(given, Mapping), f"{where}.own", own, "numbers by name, {name: numbers}")
    by_path = {f"{where}.own[{name!r}]": (name, numbers) for name, numbers in given.items()}
    if local_steps is not None:
        allowed = f"without local_steps, since {where}.local_steps is given"
        require(LOCAL_STEPS not in given, f"{where}.own", LOCAL_STEPS, allowed)
        by_path[f"{where}.local_steps"] = LOCAL_STEPS, local_steps
    numbers = {name: read(path, numbers, count) for path, (name, numbers) in by_path.items()}
    if LOCAL_STEPS in numbers:
        check(f"{where}.local_steps", numbers[LOCAL_STEPS], require_count)
    return numbers


def read_capacity(where: str, count: int, capacity: Any) -> np.ndarray | None:
    """Return the clients' capacities, as an array of shape (M,) or (T, M).

    Capacities must be fixed numbers, since programs are compiled for the shapes of each capacity.
    """
    if capacity is None:
        return None
    allowed = f"None or {count} numbers, one for each client, above 0 and at most 1; or a row of them for each round"
    drawn = callable(capacity) or isinstance(capacity, Mapping)
    require(not drawn, where, capacity, f"{allowed}: fixed numbers only, since programs are compiled for each capacity")
    values = read(where, list(capacity) if isinstance(capacity, tuple) else capacity, count, allowed)
    assert isinstance(values, Given)
    c = np.asarray(values.values, float)
    require(c.ndim <= 2 and bool(np.all((c > 0) & (c <= 1))), where, capacity, allowed)
    return np.full(count, c) if c.ndim == 0 else c


def require_clients(got: object) -> Clients:
    """Return `got` if it is a population with samples, and raise ConfigurationError otherwise."""
    if not isinstance(got, Clients):
        made = "fedbilevel.Clients(outer, inner) makes them from lists with one entry per client"
        raise ConfigurationError(
            f"clients = an object of type {type(got).__name__} is not allowed: it must be Clients; {made}"
        )
    return got


def check_samples(problem: Problem, clients: Any) -> None:
    """Refuse samples of an inner loss for a problem that has only one loss."""
    if isinstance(problem, Minimax) and clients.inner is not clients.outer:
        raise ConfigurationError(
            "a Minimax problem has one loss: leave Clients.inner out, and give the samples as Clients.outer"
        )


class Places(NamedTuple):
    """Select a batch by the indices of its samples among the client's samples."""

    places: Array  # the indices of the samples, as an array of shape (batch,)
    valid: Array | None  # an array of shape (batch,): True for samples, False for padding; None: there is no padding
    key: Array  # for a loss that draws random numbers: the key from which each sample's key is made


Draw = Array | Places
"""The selection of a batch: a key that draws the samples, or the samples' indices."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Samples:
    """Hold a client's samples for a loss inside an engine, as a window of flat arrays."""

    values: PyTree  # the samples of all clients, with leaves of shape (total, ...)
    start: Array  # the index at which this client's samples begin, a scalar
    size: Array  # the number of this client's samples, a scalar
    longest: int = field(metadata={"static": True})  # the largest number of samples of any client
    equal: bool = field(metadata={"static": True})  # whether all clients have the same number of samples
    floor: int = field(default=1, metadata={"static": True})  # the smallest batch that the client agrees to draw
    unbatched: bool = field(default=True, metadata={"static": True})  # whether the client runs alone, not vectorised

    def batch(self, draw: Draw, batch_size: int | None) -> PyTree:
        """Return a batch, with leaves of shape (batch, ...).

        If `draw` is a key, the batch has `batch_size` samples drawn uniformly with replacement, or, if `batch_size` is
        None, every sample once. If `draw` is `Places`, the batch has the samples at these indices.
        """
        if isinstance(draw, Places):
            rows = rows_at(self.values, self.start + draw.places)
            return rows if draw.valid is None else Padded(rows, draw.valid)
        if batch_size is not None:
            return rows_at(self.values, self.start + self.drawn(draw, batch_size))
        whole = self.everything()
        return whole.samples if self.equal else whole

    def drawn(self, key: Array, batch_size: int) -> Array:
        """Draw a batch; return indices of this client's samples, below size, as an array of shape (batch_size,)."""
        self.check_floor(batch_size)
        return computed_once(uniform_below(key, self.size, (batch_size,)))

    def check_floor(self, count: int | Array) -> None:
        """Refuse a draw of fewer than `floor` samples, or, if `floor` is above 1, of a number that is not static.

        Raises:
            FloorError: the draw is refused. This happens while the phase is traced, before any of it runs.
        """
        if isinstance(count, int) and count < self.floor:
            text = f"a draw of {count} samples is below this client's floor of {self.floor}"
            raise FloorError(text, floor=self.floor)
        if not isinstance(count, int) and self.floor > 1:
            text = f"this client's floor of {self.floor} samples refuses draws whose size a server chooses"
            raise FloorError(text, floor=self.floor)

    def shuffled(self, key: Array) -> Array:
        """Return all samples' indices in random order, then those of the padding, as an array of shape (longest,)."""
        drawn = jax.random.bits(key, (self.longest,), jnp.uint32)
        last = jnp.where(jnp.arange(self.longest) < self.size, drawn, jnp.uint32(2**32 - 1))
        return jnp.argsort(last)

    def in_epochs(
        self, key: Array, epochs: int, batch_size: int, drop_last: bool
    ) -> tuple[int | Array, Callable[[Array | int], Places]]:
        """Return the number of batches of `epochs` epochs, and a function from k to the k-th batch.

        Each epoch goes through the samples in a new random order, without replacement. If `batch_size` does not divide
        the number of samples, the last batch of an epoch is shorter; `drop_last` drops it unless it is the only one.
        """
        count, width = self.batches(batch_size, drop_last), min(batch_size, self.longest)
        self.check_floor(batch_size)
        rest = 0 if drop_last or self.longest <= batch_size else self.longest % batch_size
        if 0 < rest < self.floor:
            text = f"the last batch of an epoch is below this client's floor of {self.floor} samples"
            raise FloorError(f"{text}; drop_last=True leaves this batch out", floor=self.floor)
        orders = jax.vmap(lambda epoch: self.shuffled(jax.random.fold_in(key, epoch)))(jnp.arange(epochs))
        full = self.equal and (drop_last or self.longest % width == 0)
        of_losses = jax.random.fold_in(key, epochs)

        def batch(k: Array | int) -> Places:
            # clients in a vectorised call make equally many steps, so k may be beyond the last batch of this client
            epoch = jnp.minimum(k // count, epochs - 1)
            turn = k % count * batch_size + jnp.arange(width)
            places = orders[epoch, jnp.minimum(turn, self.size - 1)]
            return Places(places, None if full else turn < self.size, jax.random.fold_in(of_losses, k))

        return epochs * count, batch

    def batches(self, batch_size: int, drop_last: bool) -> int | Array:
        """Return the number of batches of an epoch."""
        size = self.longest if self.equal else self.size
        return size // batch_size + (size < batch_size if drop_last else size % batch_size > 0)

    def in_turn(
        self, key: Array | None, steps: int | Array | None
    ) -> tuple[Callable[[Array | int], PyTree], int, Array]:
        """Return samples one after the other, for methods that take a step on each sample.

        Args:
            key: draws a random order; None: the stored order.
            steps: the number of samples, at most the number that the client has; it can only be given with a key. None:
                all samples.

        Returns:
            A function from j to the j-th sample, with leaves of shape (1, ...); an upper bound of j that is the same
            for all clients; and the number of samples.
        """
        if steps is not None:
            self.check_floor(steps)
        bound = self.longest if steps is None or isinstance(steps, Array) else min(int(steps), self.longest)
        count = self.size if steps is None else jnp.minimum(steps, self.size)
        order = jnp.arange(bound) if key is None else self.shuffled(key)[:bound]
        places = self.start + jnp.minimum(order, self.size - 1)
        if self.unbatched:  # copying all samples into this order would take as long as the steps, if these are small
            return lambda j: rows_at(self.values, places[j][None]), bound, count
        # vectorised clients would each read their sample one by one: a copy of all samples is faster
        copy = self.everything().samples if key is None else rows_at(self.values, places)
        take = partial(jax.lax.dynamic_slice_in_dim, slice_size=1, allow_negative_indices=False)
        return lambda j: jax.tree.map(lambda leaf: take(leaf, j), copy), bound, count

    def everything(self) -> Padded:
        """Return all samples of the client, padded to the largest number of samples that any client has."""
        offset = jnp.arange(self.longest)
        if self.equal:
            window = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, self.start, self.longest), self.values)
            return Padded(window, jnp.ones(self.longest, bool))
        chosen = self.start + jnp.minimum(offset, self.size - 1)
        return Padded(jax.tree.map(lambda a: jnp.asarray(a)[chosen], self.values), offset < self.size)


class Default(Enum):
    """Mark an argument that is left out."""

    DEFAULT = "default"


DEFAULT = Default.DEFAULT


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Client:
    """Hold the client that runs a phase: its losses, samples, own numbers and state.

    Args:
        problem: the problem, with the losses `outer` and `inner`.
        outer: the client's samples for the outer loss.
        inner: the client's samples for the inner loss.
        id: the client's number, from 0 to M − 1.
        weight: the client's weight p_i. The engine multiplies replies by it, so that a phase rarely needs it.
        state: the client's state between rounds, which is never sent. Before the first round it is the result of
            `init_client`.
        own: the client's own numbers in this round, by the path of the method's field. The method's fields already
            have these values in a phase.
        batch_size: the default number of samples in a batch, which is the method's field of this name; None: all
            samples.
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
        """Return a batch of the outer loss, with leaves of shape (batch, ...).

        `batch_size` is the number of draws with replacement; None: all samples; left out: the method's `batch_size`.
        """
        return self._batch("outer", key, batch_size)

    def inner_batch(self, key: Draw, batch_size: int | Default | None = DEFAULT) -> PyTree:
        """Return a batch of the inner loss, with leaves of shape (batch, ...).

        `batch_size` is the number of draws with replacement; None: all samples; left out: the method's `batch_size`.
        """
        return self._batch("inner", key, batch_size)

    def _batch(self, name: str, draw: Draw, batch_size: int | Default | None) -> PyTree:
        samples: Samples = getattr(self, name)
        batch = samples.batch(draw, self.batch_size if isinstance(batch_size, Default) else batch_size)
        return with_keys(batch, draw.key if isinstance(draw, Places) else draw) if name in self.problem.draws else batch

    def local_steps(self, default: Any) -> Any:
        """Return the client's own number of local steps, or, if it has none, `default`, the method's number."""
        return self.own.get(LOCAL_STEPS, default)
