"""Hold tables with a row for each client in scratch files, so that memory does not limit the population.

A table is a `numpy.memmap` of a file that has no name, and keeps this file open. The operating system removes the file
when the table is no longer used, also if the process is killed. A table is the only kind of leaf that changes in place:
code that needs its present values later has to copy them, or to restore the rows that have changed, as `Stretch.undo`
does. Only a checkpoint survives the process; it has a copy of each table.
"""

from __future__ import annotations

import errno
import math
import mmap
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.errors import CheckpointError
from fedbilevel.core.tree import PyTree, is_table

BLOCK = 2**22  # the number of bytes that are read or written at once
FEW = 16  # the number of scattered rows that are read or written at once: each row may map a megabyte of pages


def table(shape: tuple[int, ...], dtype: Any, pieces: Iterable[bytes]) -> np.memmap:
    """Make a table from its bytes, in C order and in pieces of any size, in the folder for temporary files.

    Raises:
        CheckpointError: there is no space, or too many files are open.
        ValueError: there are more or fewer bytes than the shape has.
    """
    folder, missing = Path(tempfile.gettempdir()), math.prod(shape) * np.dtype(dtype).itemsize
    with _with_remedy(folder, missing), tempfile.TemporaryFile(dir=folder) as file:
        for piece in pieces:
            file.write(piece)
            missing -= len(piece)
        if missing:
            raise ValueError(f"there are {abs(missing)} bytes too {'few' if missing > 0 else 'many'}")
        file.write(b"\0")  # an empty file cannot be mapped
        file.flush()
        return np.memmap(file, dtype, "r+", shape=shape)


def bytes_of(array: np.ndarray) -> Iterator[bytes]:
    """Yield the bytes of an array, in C order and in pieces of about BLOCK bytes."""
    rows = array.reshape(1) if array.ndim == 0 else array
    step = max(1, BLOCK // max(1, array.nbytes // max(1, len(rows))))
    for first in range(0, len(rows), step):
        yield rows[first : first + step].tobytes()
        let_go(array)


def on_disk(tree: PyTree) -> PyTree:
    """Return a tree whose leaves are tables: leaves that are no tables are copied into tables."""
    return jax.tree.map(lambda leaf: leaf if is_table(leaf) else _table_like(np.asarray(leaf)), tree)


def repeated(tree: PyTree, rows: int) -> PyTree:
    """Return a table of shape (rows, ...) for each leaf of a tree; every row of the table is a copy of the leaf."""
    return jax.tree.map(lambda leaf: _table_like(np.broadcast_to(leaf, (rows, *np.shape(leaf)))), tree)


def copied(leaf: Any) -> Any:
    """Copy an array; the copy of a table is another table."""
    return _table_like(leaf) if is_table(leaf) else jnp.copy(leaf)


def lasting(tree: PyTree) -> PyTree:
    """Return a tree that does not change later: its leaves on disk are copied, and its other leaves are the same."""
    return jax.tree.map(lambda leaf: _table_like(leaf) if is_table(leaf) else leaf, tree)


def read(tables: PyTree, rows: np.ndarray) -> PyTree:
    """Return a copy in memory of these rows of all tables."""

    def taken(leaf: np.memmap) -> np.ndarray:
        values = np.empty((len(rows), *leaf.shape[1:]), leaf.dtype)
        for part in _parts(leaf, rows):
            values[part] = leaf[rows[part]]
        return values

    return jax.tree.map(taken, tables)


def write(tables: PyTree, rows: np.ndarray, values: PyTree) -> None:
    """Replace these rows of all tables in place by `values`, whose leaves have the shape (rows, ...)."""

    def put(leaf: np.memmap, new: Any) -> None:
        new = np.asarray(new)
        for part in _parts(leaf, rows):
            leaf[rows[part]] = new[part]

    jax.tree.map(put, tables, values)


def let_go(tree: PyTree) -> None:
    """Release the pages of memory maps that were read or written; they stay in the operating system's cache."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, np.memmap) and leaf.mode in ("r", "r+") and hasattr(mmap, "MADV_DONTNEED"):
            leaf._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


@contextmanager
def _with_remedy(folder: Path, size: int) -> Iterator[None]:
    """Turn an OSError in the block into a CheckpointError that says what a table of `size` bytes needs."""
    try:
        yield
    except CheckpointError:  # an OSError, of a checkpoint and not of a table
        raise
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            needs = "a run may need 13 open files for each leaf of y; `ulimit -n` sets how many are allowed"
        else:
            needs = (
                f"the array takes {size:,} bytes; TMPDIR names the folder, which may be on any disk that has the space"
            )
        why = error.strerror or error
        text = f"could not write the clients' states to {folder}: {why}"
        raise CheckpointError(text, path=folder, errno=error.errno, remedy=needs) from error


def _parts(leaf: np.memmap, rows: np.ndarray) -> Iterator[slice]:
    """Divide rows of a table into parts, and release the table's pages after each."""
    for first in range(0, len(rows), FEW):
        yield slice(first, first + FEW)
        let_go(leaf)


def _table_like(array: np.ndarray) -> np.memmap:
    return table(array.shape, array.dtype, bytes_of(array))
