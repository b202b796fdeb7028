"""Ragged client data as flat arrays: client i has rows start[i] to start[i] + size[i] of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data.errors import DataError

Arrays = dict[str, NDArray[Any]]


class Packed(NamedTuple):
    """A population, client after client.

    arrays: by name, each with leading axis the total number of samples. start, size: (clients,) int64.
    """

    arrays: Arrays
    start: NDArray[np.int64]
    size: NDArray[np.int64]

    def client(self, i: int) -> Arrays:
        """The arrays of client i, each with leading axis size[i]; views, not copies."""
        rows = slice(int(self.start[i]), int(self.start[i] + self.size[i]))
        return {name: array[rows] for name, array in self.arrays.items()}


def pack(images: NDArray[Any], labels: NDArray[Any], parts: Sequence[NDArray[np.integer]]) -> Packed:
    """`pack_arrays` for images and labels: the flat arrays are called "image" and "label"."""
    return pack_arrays({"image": images, "label": labels}, parts)


def pack_arrays(arrays: Mapping[str, NDArray[Any]], parts: Sequence[NDArray[np.integer]]) -> Packed:
    """The rows that `parts` names, in client order; one copy of the data.

    arrays: by name, each with leading axis n. parts: per client, indices in 0..n - 1. DataError if there is
    no client or no array, if the arrays differ in length, or if a client is empty (a mean over its samples
    would not exist) or names a row that is not there.
    """
    shapes = {name: array.shape for name, array in arrays.items()}
    lengths = {shape[:1] for shape in shapes.values()}
    if len(lengths) != 1 or lengths == {()}:
        raise DataError(f"arrays have shapes {shapes}; allowed: at least one array, all of the same length.")
    ((rows,),) = lengths
    size = np.array([len(part) for part in parts], np.int64)
    start = starts(size)
    for client, part in enumerate(parts):
        if np.min(part) < 0 or np.max(part) >= rows:
            raise DataError(f"client {client} names rows {np.min(part)} to {np.max(part)}; allowed: 0 to {rows - 1}.")
    order = np.concatenate(parts)
    return Packed({name: array[order] for name, array in arrays.items()}, start, size)


def starts(size: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first row of each client; DataError if there is no client, or one without samples."""
    if not len(size):
        raise DataError("there are no clients; allowed: at least one.")
    if size.min() < 1:
        client = int(np.argmin(size))
        raise DataError(f"client {client} has {size[client]} samples; allowed: at least one.")
    total = np.cumsum(size)
    first: NDArray[np.int64] = total - size
    return first
