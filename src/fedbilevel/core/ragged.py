"""Store the samples of all clients in flat arrays, as rows of unequal length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.card import Card, Shown, counted, listed, named_shape, span
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.inputs import arrays_of, require_alike
from fedbilevel.core.tree import PyTree, shapes


@dataclass(frozen=True, repr=False)
class Ragged(Shown):
    """Hold rows of unequal length in flat arrays: row i is `values[start[i] : start[i] + size[i]]` of every leaf.

    A row contains the samples of one client. No padding is stored, so a client with ten samples needs the memory of
    ten.

    Args:
        values: a pytree of arrays (total, ...), which may be memory maps.
        start: the first index of each row, as an int64 array of shape (rows,).
        size: the length of each row, at least 1, as an int64 array of shape (rows,).
    """

    values: PyTree
    start: np.ndarray
    size: np.ndarray

    @classmethod
    def stacked(cls, name: str, arrays: PyTree, sizes: np.ndarray | None) -> Ragged:
        """Make rows from leaves of shape (clients, samples, ...), without a copy; client i has sizes[i] samples."""
        called, hint = type(arrays).__name__, ""
        if isinstance(arrays, dict | tuple):
            make = "list(samples.values())" if isinstance(arrays, dict) else "list(samples)"
            hint = f"; if its parts are clients, they must be in a list and not in a {called}: {make}"
        arrays = arrays_of(f"Clients.{name}", arrays)
        leading = {np.shape(leaf)[:2] for leaf in jax.tree.leaves(arrays)}
        if len(leading) != 1 or len(next(iter(leading))) != 2:
            text = f"every leaf needs the same two leading axes (clients, samples), got {shapes(arrays)}{hint}"
            raise ConfigurationError(text, where=f"Clients.{name}")
        clients, samples = leading.pop()
        size = np.full(clients, samples) if sizes is None else np.asarray(sizes)
        fits = size.shape == (clients,) and np.issubdtype(size.dtype, np.integer)
        require(fits, f"Clients.{name}_sizes", sizes, f"integers of shape ({clients},)")
        if size.max(initial=0) > samples:
            text = f"a size of {size.max()} exceeds the {samples} samples stored"
            raise ConfigurationError(text, where=f"Clients.{name}")
        flat = jax.tree.map(lambda leaf: np.asanyarray(leaf).reshape(-1, *np.shape(leaf)[2:]), arrays)
        return cls(flat, np.arange(clients) * samples, size.astype(np.int64)).checked(name)

    @classmethod
    def listed(cls, name: str, entries: Sequence[PyTree]) -> Ragged:
        """Make rows from a pytree for each client, with leaves of shape (samples, ...)."""
        entries = [arrays_of(f"Clients.{name}", entry, f" of client {i}") for i, entry in enumerate(entries)]
        require_alike(f"Clients.{name}", entries)
        size = np.array([_length(f"Clients.{name} of client {i}", entry) for i, entry in enumerate(entries)], np.int64)
        flat = jax.tree.map(lambda *leaves: np.concatenate(leaves), *entries)
        return cls(flat, np.cumsum(size) - size, size).checked(name)

    def checked(self, name: str) -> Ragged:
        """Refuse empty clients, rows outside the stored samples, and NaN or infinity in arrays that are in memory."""
        shapes = np.shape(self.start), np.shape(self.size)
        fits = shapes[0] == shapes[1] and len(shapes[0]) == 1
        require(fits, f"Clients.{name}: shapes of start and size", shapes, "(rows,) both")
        empty = np.flatnonzero(self.size <= 0)
        if empty.size:
            more = f" ({empty.size} clients have none)" if empty.size > 1 else ""
            whose = f"client {empty[0]} has no samples{more}" if len(self.size) > 1 else "there is no sample"
            raise ConfigurationError(f"{whose}; every client needs at least one sample", where=f"Clients.{name}")
        stored = _length(f"Clients.{name}", self.values)
        outside = np.flatnonzero((self.start < 0) | (self.start + self.size > stored))
        if outside.size:
            i = outside[0]
            text = f"row {i} (start {self.start[i]}, size {self.size[i]}) is outside the {stored} samples"
            raise ConfigurationError(text, where=f"Clients.{name}")
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.values):
            if not isinstance(leaf, np.memmap):  # memory maps are checked row by row when they are read
                check_finite(f"Clients.{name}{jax.tree_util.keystr(path)}", leaf, self.place)
        return self

    def place(self, i: int) -> str:
        """Return in words the client and the sample number of the sample at index i of the flat arrays."""
        holders = np.flatnonzero((self.start <= i) & (i < self.start + self.size))
        if not holders.size:
            return f"in row {i} of the stored arrays, which belongs to no client"
        whose = f" of client {holders[0]}" if len(self.size) > 1 else ""  # a single client needs no number
        return f"in sample {i - self.start[holders[0]]}{whose}"

    def card(self) -> Card:
        return Card(counted(len(self.size), "row") + " of unequal length", {"samples": self.in_words("row")})

    def in_words(self, owner: str) -> str:
        """Return in words the number of samples, the range of numbers per owner, and the form of a sample."""
        leaves = jax.tree_util.tree_leaves_with_path(self.values)
        shapes = listed([named_shape(path, leaf, axes_left_out=1) for path, leaf in leaves], width=60)
        return f"{int(self.size.sum()):,}, {span(self.size)} a {owner}, each {shapes}"

    def taken(self, places: Sequence[np.ndarray]) -> Ragged:
        """Return new rows: row i has the samples at the indices `places[i]` of the flat arrays."""
        size, chosen = np.array([len(of_row) for of_row in places], np.int64), np.concatenate(places)
        return Ragged(jax.tree.map(lambda leaf: leaf[chosen], self.values), np.cumsum(size) - size, size)

    def joined(self) -> Ragged:
        """Return a `Ragged` with a single row, which has the samples of all rows one after the other."""
        total = int(self.size.sum())
        chosen = np.repeat(self.start - (np.cumsum(self.size) - self.size), self.size) + np.arange(total)
        values = jax.tree.map(lambda leaf: leaf[chosen], self.values)
        return Ragged(values, np.zeros(1, np.int64), np.array([total]))

    def example(self) -> PyTree:
        """Return the shapes and types of one sample, with leaves of shape (1, ...)."""
        return jax.tree.map(one_sample, self.values)

    def row(self, i: int) -> PyTree:
        """Return the samples of row i, with leaves of shape (size[i], ...)."""
        start, stop = int(self.start[i]), int(self.start[i] + self.size[i])
        return jax.tree.map(lambda leaf: leaf[start:stop], self.values)


def one_sample(leaf: Any) -> jax.ShapeDtypeStruct:
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return jax.ShapeDtypeStruct((1, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype))


def _length(where: str, tree: PyTree) -> int:
    """Return the common length of the first axes of all leaves; `where` names the tree in the error."""
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(tree)}
    if len(lengths) != 1 or () in lengths:
        raise ConfigurationError(f"leaves disagree in their leading (sample) axis: {shapes(tree)}", where=where)
    return int(lengths.pop()[0])


def check_finite(name: str, array: Any, place: Callable[[int], str]) -> None:
    """Raise ConfigurationError if a floating array is not finite in the precision in which JAX computes.

    `name` names the array in the message. `place` returns in words the client and the sample of a row of the array.
    """
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return
    precision = jax.dtypes.canonicalize_dtype(array.dtype)
    with np.errstate(over="ignore"):
        finite = np.isfinite(np.asarray(array).astype(precision, copy=False))
    if not np.all(finite):
        row, *within = (int(i) for i in np.argwhere(~finite)[0])
        value, entry = array[(row, *within)], f", entry [{', '.join(map(str, within))}]" if within else ""
        what = f"{value:g}, which is infinite in {precision}" if np.isfinite(value) else "NaN or infinity"
        raise ConfigurationError(f"it holds {what}, first {place(row)}{entry} (counted from 0)", where=name)
