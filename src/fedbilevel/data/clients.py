"""Clients and their samples: who holds which, by partitions of a labelled set, and what they hold, as flat arrays in
memory or on disk, of which client i has rows start[i] to start[i] + size[i].

All partitions use every sample exactly once, shuffle the order within each client, and draw only from `seed`: an int
(the same seed gives the same partition) or a NumPy Generator (which is advanced).
"""

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedbilevel.data.files import DataError, as_data_error, mapped, read_bytes, temporary, unknown_name
from fedbilevel.reading import parse_json
from fedbilevel.wording import printable

Indices = NDArray[np.int64]
Seed = int | np.random.Generator

ATTEMPTS = 1000  # redraws of a random partition before its `minimum` counts as impossible


def iid(labels: ArrayLike, clients: int, *, seed: Seed) -> list[Indices]:
    """Deal out samples at random, client sizes equal to within 1."""
    y, rng = _checked(labels, clients), generator(seed, 1)
    return np.array_split(rng.permutation(len(y)), clients)


def shards(labels: ArrayLike, clients: int, *, per_client: int = 2, seed: Seed) -> list[Indices]:
    """Cut samples, sorted by label, into shards; each client gets `per_client` of them at random.

    There are clients * per_client shards, of equal size to within 1 (equal if the numbers divide, as in the paper's
    200 shards of 300), so that no sample is left out. Source: McMahan et al., Communication-Efficient
    Learning of Deep Networks from Decentralized Data, AISTATS 2017, section 3 ("pathological non-IID").
    """
    y, rng = _checked(labels, clients), generator(seed, 2)
    if not _is_whole(per_client) or per_client < 1 or clients * per_client > len(y):
        raise DataError(
            f"per_client is {per_client!r}; allowed: a whole number from 1 to {len(y) // clients} for {clients} "
            f"clients and {len(y)} samples, so that no shard is empty."
        )
    cut = np.array_split(np.argsort(y, kind="stable"), clients * per_client)
    owner = rng.permutation(clients * per_client).reshape(clients, per_client)
    return [rng.permutation(np.concatenate([cut[shard] for shard in row])) for row in owner]


def dirichlet(labels: ArrayLike, clients: int, *, alpha: float, minimum: int = 1, seed: Seed) -> list[Indices]:
    """Skew labels: for each class, draw the clients' shares of it from a symmetric Dirichlet(alpha).

    A share has mean 1/K and variance (1/K)(1 - 1/K) / (K alpha + 1) for K clients: small alpha gives few
    classes per client, alpha to infinity gives iid. No self-balancing. minimum: samples per client; a draw
    that misses it is dropped as a whole (up to 1,000 times), which conditions the law on it; `minimum=0` is
    the plain definition and can leave a client empty. Source: Yurochkin et al., Bayesian Nonparametric
    Federated Learning of Neural Networks, ICML 2019, section 4 (also Li et al., Federated Learning on Non-IID
    Data Silos, ICDE 2022).
    """
    y, rng = _checked(labels, clients), generator(seed, 3)
    classes = [np.flatnonzero(y == label) for label in np.unique(y)]
    totals = np.array([len(members) for members in classes])
    counts = _drawn(rng, totals, clients, alpha, minimum)
    held: list[list[Indices]] = [[] for _ in range(clients)]
    for members, per_client in zip(classes, counts, strict=True):
        for own, part in zip(held, _dealt(rng, members, per_client), strict=True):
            own.append(part)
    return [rng.permutation(np.concatenate(own)) for own in held]


def quantity(labels: ArrayLike, clients: int, *, alpha: float, minimum: int = 1, seed: Seed) -> list[Indices]:
    """Skew quantities: client sizes in proportion to a draw from Dirichlet(alpha), labels at random.

    minimum: samples per client, as in `dirichlet`. Source: Li et al., Federated Learning on Non-IID Data
    Silos: An Experimental Study, ICDE 2022, section 3.
    """
    y, rng = _checked(labels, clients), generator(seed, 4)
    (sizes,) = _drawn(rng, np.array([len(y)]), clients, alpha, minimum)
    return _dealt(rng, np.arange(len(y)), sizes)


def one_label(labels: ArrayLike, clients: int, *, seed: Seed) -> list[Indices]:
    """Give each client a single label: client k holds label number k mod C of the C labels in ascending order.

    The clients of a label share its samples equally, to within 1. DataError with fewer clients than labels,
    or more clients to a label than it has samples. Source: the one-class-per-client limit of McMahan et al.,
    AISTATS 2017.
    """
    y, rng = _checked(labels, clients), generator(seed, 5)
    kinds, counts = np.unique(y, return_counts=True)
    if clients < len(kinds):
        raise DataError(
            f"clients is {clients}; allowed: at least one per label, {len(kinds)}, or samples are left out."
        )
    held: list[Indices] = [np.empty(0, np.int64)] * clients
    for number, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        owners = range(number, clients, len(kinds))
        if len(owners) > count:
            raise DataError(f"clients is {clients}: {len(owners)} of them share the {count} samples of label {kind}.")
        parts = np.array_split(rng.permutation(np.flatnonzero(y == kind)), len(owners))
        for client, part in zip(owners, parts, strict=True):
            held[client] = part
    return held


PARTITIONS: dict[str, Callable[..., list[Indices]]] = {
    "dirichlet": dirichlet,
    "iid": iid,
    "one_label": one_label,
    "quantity": quantity,
    "shards": shards,
}
REQUIRED = {"alpha": ("a number above 0, up to 1e9 (the smaller, the more do clients differ)", 0.5)}
"""Options without a default: the values that are allowed, and an example."""


def partition(name: str, labels: ArrayLike, clients: int, *, seed: Seed, **options: Any) -> list[Indices]:
    """Draw the partition called `name`, a key of `PARTITIONS`, with its own options.

    labels: (n,) integers. Returns an index array for each client. DataError for an unknown name or option, or a
    value that the partition cannot honour.
    """
    if name not in PARTITIONS:
        raise unknown_name("partition", name, PARTITIONS)
    parameters = inspect.signature(PARTITIONS[name]).parameters
    allowed = [key for key in parameters if key not in ("labels", "clients", "seed")]
    for key in options:
        if key not in allowed:
            raise unknown_name(f"option of partition {name!r}", key, allowed)
    for key in allowed:
        if parameters[key].default is inspect.Parameter.empty and key not in options:
            allowed_values, example = REQUIRED[key]
            raise DataError(
                f"partition {name!r} needs the option {key!r}, {allowed_values}: {key}={example}; in a spec "
                f"partition_options = {{{key} = {example}}}, in a shell --set 'partition_options={{{key}={example}}}'."
            )
    return PARTITIONS[name](labels, clients, seed=seed, **options)


def split(
    parts: Sequence[NDArray[np.integer]], fraction: float = 0.5, *, seed: Seed
) -> tuple[list[Indices], list[Indices]]:
    """Split each client's samples at random into (training, validation), e.g. for the inner and the outer loss.

    fraction: the share of training samples, strictly between 0 and 1, rounded to whole samples and kept away
    from none and all, so that both sides are non-empty. DataError naming a client that holds fewer than two
    samples.
    """
    if not 0 < fraction < 1:
        raise DataError(f"fraction is {fraction}; allowed: strictly between 0 and 1.")
    rng = generator(seed, 6)
    training, validation = [], []
    for client, part in enumerate(parts):
        if len(part) < 2:
            raise DataError(f"client {client} holds {len(part)} samples; a split needs at least 2.")
        mixed = rng.permutation(np.asarray(part, np.int64))
        cut = min(max(round(fraction * len(part)), 1), len(part) - 1)
        training.append(mixed[:cut])
        validation.append(mixed[cut:])
    return training, validation


def dealt(labels: NDArray[Any], folds: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Draw the fold of each sample, (n,) int32: class by class, samples in random order are dealt out in turn."""
    mixed = rng.permutation(len(labels))
    order = mixed[np.argsort(labels[mixed], kind="stable")]
    fold = np.empty(len(labels), np.int32)
    fold[order] = np.arange(len(labels)) % folds
    return fold


def _drawn(
    rng: np.random.Generator, totals: NDArray[np.integer], clients: int, alpha: float, minimum: int
) -> NDArray[np.int64]:
    """Draw counts (groups, clients) with row sums `totals`, each row in proportion to a Dirichlet(alpha) draw."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | np.number) or not 0 < alpha <= 1e9:
        raise DataError(f"alpha is {alpha!r}; allowed: a number above 0, up to 1e9.")
    if not _is_whole(minimum) or not 0 <= minimum <= totals.sum() // clients:
        raise DataError(
            f"minimum is {minimum!r}; allowed: a whole number from 0 to {totals.sum() // clients}, as {totals.sum()} "
            f"samples go to {clients} clients."
        )
    for _ in range(ATTEMPTS):
        edges = np.cumsum(rng.dirichlet(np.full(clients, alpha), size=len(totals)), axis=1)
        # Rounded, not cut down: no client is favoured, and the last edge is the total whatever the sum's rounding.
        cuts = np.rint(edges * totals[:, None]).astype(np.int64)
        counts: NDArray[np.int64] = np.diff(cuts, axis=1, prepend=np.int64(0))
        if counts.sum(axis=0).min() >= minimum:
            return counts
    raise DataError(
        f"alpha = {alpha} over {clients} clients left a client with fewer than minimum = {minimum} samples "
        f"in each of {ATTEMPTS} draws; allowed: a larger alpha, fewer clients or a smaller minimum."
    )


def _dealt(rng: np.random.Generator, members: Indices, counts: NDArray[np.int64]) -> list[Indices]:
    return np.split(rng.permutation(members), np.cumsum(counts)[:-1])


def _checked(labels: ArrayLike, clients: int) -> NDArray[np.integer]:
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"labels have shape {y.shape} and type {y.dtype}; allowed: integers along a single axis.")
    if not 1 <= clients <= len(y):
        raise DataError(f"clients is {clients}; allowed: 1 to {len(y)}, the number of samples.")
    return y


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def generator(seed: Seed, stream: int) -> np.random.Generator:
    """Return a Generator for a purpose: the same int gives unrelated numbers to a partition and the split after it."""
    if isinstance(seed, np.random.Generator):
        return seed
    if not isinstance(seed, int | np.integer) or seed < 0:
        raise DataError(f"seed is {seed!r}; allowed: an int from 0 on, or a numpy.random.Generator.")
    return np.random.default_rng([stream, int(seed)])


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
        manifest = parse_json(read_bytes(root / MANIFEST))
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
