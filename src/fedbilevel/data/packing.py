"""Ragged client data as flat arrays, in memory or on disk: client i has rows start[i] to start[i] + size[i] of each."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedbilevel.data.files import read_bytes, temporary
from fedbilevel.data.reading import DataError, as_data_error, mapped
from fedbilevel.wording import printable

Arrays = dict[str, NDArray[Any]]


class Packed(NamedTuple):
    """Hold the samples of all clients, client after client.

    arrays: by name, each with leading axis the total number of samples. start, size: (clients,) int64.
    """

    arrays: Arrays
    start: NDArray[np.int64]
    size: NDArray[np.int64]

    def client(self, i: int) -> Arrays:
        """Return the arrays of client i, each with leading axis size[i]; views, not copies."""
        rows = slice(int(self.start[i]), int(self.start[i] + self.size[i]))
        return {name: array[rows] for name, array in self.arrays.items()}


def pack(images: NDArray[Any], labels: NDArray[Any], parts: Sequence[NDArray[np.integer]]) -> Packed:
    """Pack images and labels as `pack_arrays` does: the flat arrays are called "image" and "label"."""
    return pack_arrays({"image": images, "label": labels}, parts)


def pack_arrays(arrays: Mapping[str, NDArray[Any]], parts: Sequence[NDArray[np.integer]]) -> Packed:
    """Copy the rows that `parts` names, in the order of clients.

    arrays: by name, each with leading axis n. parts: per client, indices in 0..n - 1. DataError if there is no client
    or no array, if the arrays differ in length, or if a client is empty (a mean over its samples would not exist) or
    names a row that does not exist.
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
    """Compute the first row of each client. DataError if there is no client, or a client without samples."""
    if not len(size):
        raise DataError("there are no clients; allowed: at least one.")
    if size.min() < 1:
        client = int(np.argmin(size))
        raise DataError(f"client {client} has {size[client]} samples; allowed: at least one.")
    total = np.cumsum(size)
    first: NDArray[np.int64] = total - size
    return first


MANIFEST, FORMAT, VERSION = "manifest.json", "fedbilevel-clients", 1
NAME = re.compile(r"[A-Za-z0-9_-]+")  # array names become file names


def write_clients(folder: str | Path, size: ArrayLike, clients: Iterable[Mapping[str, NDArray[Any]]]) -> Path:
    """Write clients in their order to a new folder, which appears complete or not at all.

    size: (clients,) samples of each client, all at least 1. clients: in the same order, per client a dict of arrays
    with leading axis size[i]; names, other axes and dtypes are those of the first client. Only a single client is in
    memory at a time. Write a `Packed` by `write_clients(folder, p.size, map(p.client, range(len(p.size))))`. Returns
    the folder. DataError if it exists, if a client does not fit, or if the disk is full.
    """
    target = Path(folder)
    if target.exists():
        raise DataError(f"{target} exists; allowed: a new folder (delete it first to write it anew).")
    sizes = np.asarray(size, np.int64)
    starts(sizes)  # checks them
    part = temporary(target)
    try:
        part.mkdir(parents=True)
        _write(part, sizes, clients)
        os.rename(part, target)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def open_clients(folder: str | Path) -> Packed:
    """Open the clients that `write_clients` wrote, their arrays as read-only memory maps.

    `start` and `size` are in memory. DataError if the folder holds no such clients, or if a file is missing, truncated
    or does not match the manifest.
    """
    root = Path(folder)
    problem = f"is not a manifest of {FORMAT} version {VERSION}"
    with as_data_error(root / MANIFEST, problem):
        manifest = json.loads(read_bytes(root / MANIFEST))
        if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format is {manifest['format']!r} {manifest['version']!r}")
        arrays = {name: _open(root, name, entry) for name, entry in dict(manifest["arrays"]).items()}
        size = np.array(_open(root, "size", manifest["size"]))
        if size.ndim != 1 or size.dtype.kind not in "iu" or not arrays:
            raise ValueError("it has no arrays, or sizes that are not an integer per client")
    if size.max(initial=0) > min(map(len, arrays.values())):
        raise DataError(f"{root} has a client of {size.max()} samples, more than it has rows.")
    try:
        start, total = starts(size), int(size.sum())
    except DataError as error:
        raise DataError(f"{root / 'size.npy'}: {error}") from error
    for name, array in arrays.items():
        if len(array) != total:
            raise DataError(f"{root} has {len(array)} rows of {name!r}, expected {total}, the sum of the sizes.")
    return Packed(arrays, start, size)


def _write(part: Path, sizes: NDArray[np.int64], clients: Iterable[Mapping[str, NDArray[Any]]]) -> None:
    rows = int(sizes.sum())
    with _npy(part, "size", sizes.shape, sizes.dtype) as out:
        out.write(sizes.tobytes())
    like: dict[str, Any] = {}
    written = 0
    with ExitStack() as open_files:
        outs: dict[str, IO[bytes]] = {}
        for client in clients:
            found = {name: (array.shape[1:], array.dtype) for name, array in client.items()}
            if not written:
                like = found
                for name, (shape, dtype) in like.items():
                    outs[name] = open_files.enter_context(_npy(part, name, (rows, *shape), dtype))
            lengths = {array.shape[:1] for array in client.values()}
            if written == len(sizes) or found != like or lengths != {(sizes[written],)}:
                allowed = f"{sizes[written]} rows of {like}" if written < len(sizes) else "no such client"
                raise DataError(f"client {written} has {sorted(lengths)} rows of {found}; allowed: {allowed}.")
            for name, array in client.items():
                outs[name].write(np.ascontiguousarray(array).tobytes())
            written += 1
    if written != len(sizes):
        raise DataError(f"clients ended after {written}; allowed: {len(sizes)}, the length of size.")
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "size": _entry(part, "size", sizes.shape, sizes.dtype),
        "arrays": {name: _entry(part, name, (rows, *shape), dtype) for name, (shape, dtype) in like.items()},
    }
    with _synced(part / MANIFEST) as out:
        out.write(json.dumps(manifest, indent=1).encode())


@contextmanager
def _synced(path: Path) -> Iterator[IO[bytes]]:
    with open(path, "xb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


@contextmanager
def _npy(part: Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[IO[bytes]]:
    """Open a new .npy file and write its header. Its entries follow as plain sequential writes.

    On a full disk these fail with an error, where a writable memory map would kill the process.
    """
    path = part / f"{name}.npy"
    if not NAME.fullmatch(name) or path.exists() or dtype.kind not in "biufc":
        raise DataError(
            f"array {name!r} has type {dtype}; allowed: numbers, under a name of letters, digits, _ and - "
            "other than 'size'."
        )
    with _synced(path) as out:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(out, header)
        yield out


def _entry(part: Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any]:
    return {"shape": shape, "dtype": dtype.str, "bytes": (part / f"{name}.npy").stat().st_size}


def _open(root: Path, name: str, entry: dict[str, Any]) -> NDArray[Any]:
    if not NAME.fullmatch(name):
        raise ValueError(f"array name {name!r}")
    path = root / f"{name}.npy"
    shape, dtype, length = list(entry["shape"]), str(entry["dtype"]), int(entry["bytes"])
    found = path.stat().st_size if path.is_file() else 0
    if found != length:
        raise DataError(f"{path} has {found:,} bytes, expected {length:,}: it is missing or truncated.")
    array = mapped(path, "cannot be mapped")
    if list(array.shape) != shape or array.dtype.str != dtype or not shape:
        expected = printable(f"{shape} {dtype}")
        raise DataError(f"{path} holds {array.shape} {array.dtype.str}, expected {expected}.")
    return array
