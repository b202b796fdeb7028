"""Partition labelled samples over clients, and store the samples of all clients in flat arrays in memory or on disk.

In flat arrays, client i has the rows start[i] to start[i] + size[i] − 1.

Every partition assigns each sample to exactly one client, and shuffles the samples of each client. Its `seed` is an
int, where the same seed gives the same partition, or a NumPy Generator, whose state advances.
"""

import hashlib
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

from fedbilevel.data.files import (
    DataError,
    as_data_error,
    mapped,
    read_bytes,
    require,
    require_content,
    temporary,
    unknown_name,
)
from fedbilevel.reading import parse_json
from fedbilevel.wording import printable

Indices = NDArray[np.int64]
"""The indices of samples in the arrays of a data set."""
Seed = int | np.random.Generator
"""A whole number, or a generator of NumPy, whose state changes."""

ATTEMPTS = 1000  # after this many draws of a random partition, an error says that its `minimum` was not reached


def iid(labels: ArrayLike, clients: int, *, seed: Seed) -> list[Indices]:
    """Deal samples out to clients at random, so that the clients' numbers of samples differ by at most 1.

    Returns the indices of each client's samples. `labels` has an integer for each sample.
    """
    y, rng = _checked(labels, clients), generator(seed, 1)
    return np.array_split(rng.permutation(len(y)), clients)


def shards(labels: ArrayLike, clients: int, *, per_client: int = 2, seed: Seed) -> list[Indices]:
    """Sort samples by label, cut them into shards, and give each client `per_client` shards at random.

    There are clients · per_client shards. Their sizes differ by at most 1, so that no sample is left out; in the paper,
    200 shards have 300 samples each. Returns the indices of each client's samples. `labels` has an integer for each
    sample.

    Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
    section 3 ("pathological non-IID").
    """
    y, rng = _checked(labels, clients), generator(seed, 2)
    allowed = (
        f"a whole number from 1 to {len(y) // clients} for {clients} clients and {len(y)} samples, so that no shard is "
        "empty"
    )
    fits = _is_whole(per_client) and per_client >= 1 and clients * per_client <= len(y)
    require(fits, "per_client", per_client, allowed)
    cut = np.array_split(np.argsort(y, kind="stable"), clients * per_client)
    owner = rng.permutation(clients * per_client).reshape(clients, per_client)
    return [rng.permutation(np.concatenate([cut[shard] for shard in row])) for row in owner]


def dirichlet(labels: ArrayLike, clients: int, *, alpha: float, minimum: int = 1, seed: Seed) -> list[Indices]:
    """Skew labels: draw the clients' shares of each class from a symmetric Dirichlet distribution.

    With K clients, a share has the mean 1/K and the variance (1/K)(1 − 1/K)/(K·alpha + 1). With a small alpha, each
    client gets samples of few classes; with a large alpha, the partition is close to `iid`. The clients' numbers of
    samples are not balanced. Returns the indices of each client's samples.

    Args:
        labels: the class of each sample, an integer.
        clients: the number of clients, K.
        alpha: the concentration of the distribution, above 0.
        minimum: the least number of samples of a client. If a client gets fewer, the whole draw is repeated, up to
            1,000 times, so that the distribution is conditional on the minimum. With 0, the partition is as in the
            paper, and a client may get no samples.
        seed: the seed, or a NumPy Generator.

    Source: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019, section 4; also
    Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022.
    """
    y, rng = _checked(labels, clients), generator(seed, 3)
    classes = [np.flatnonzero(y == label) for label in np.unique(y)]
    totals = np.array([len(members) for members in classes])
    counts = _drawn(rng, totals, clients, alpha, minimum)
    held: list[list[Indices]] = [[] for _ in range(clients)]
    for members, per_client in zip(classes, counts, strict=True):
        for parts, part in zip(held, _dealt(rng, members, per_client), strict=True):
            parts.append(part)
    return [rng.permutation(np.concatenate(parts)) for parts in held]


def quantity(labels: ArrayLike, clients: int, *, alpha: float, minimum: int = 1, seed: Seed) -> list[Indices]:
    """Skew quantities: deal samples out at random, in numbers that are proportional to a draw from Dirichlet(alpha).

    Returns the indices of each client's samples.

    Args:
        labels: the class of each sample, an integer.
        clients: the number of clients.
        alpha: the concentration of the distribution, above 0.
        minimum: the least number of samples of a client. If a client gets fewer, the draw is repeated, up to 1,000
            times.
        seed: the seed, or a NumPy Generator.

    Source: Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study", ICDE 2022, section 3.
    """
    y, rng = _checked(labels, clients), generator(seed, 4)
    (sizes,) = _drawn(rng, np.array([len(y)]), clients, alpha, minimum)
    return _dealt(rng, np.arange(len(y)), sizes)


def one_label(labels: ArrayLike, clients: int, *, seed: Seed) -> list[Indices]:
    """Give each client samples of a single label.

    Of C labels in ascending order, client k gets the label with the index k mod C.

    The samples of a label are dealt out at random to the clients with this label, in numbers that differ by at most 1.
    Returns the indices of each client's samples. `labels` has an integer for each sample. Source: the case of one class
    per client in McMahan et al., AISTATS 2017.

    Raises:
        DataError: there are fewer clients than labels, or a label has fewer samples than clients.
    """
    y, rng = _checked(labels, clients), generator(seed, 5)
    kinds, counts = np.unique(y, return_counts=True)
    few = f"at least {len(kinds)}, one per label, so that no sample is left out"
    require(clients >= len(kinds), "clients", clients, few)
    held: list[Indices] = [np.empty(0, np.int64)] * clients
    for number, (kind, count) in enumerate(zip(kinds, counts, strict=True)):
        owners = range(number, clients, len(kinds))
        many = f"at most one client per sample; {len(owners)} clients would share the {count} samples of label {kind}"
        require(len(owners) <= count, "clients", clients, many)
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
REQUIRED = {"alpha": ("a number above 0, up to 1e9 (clients differ more if it is smaller)", 0.5)}
"""The options that have no default: name -> (the allowed values, an example)."""


def partition(name: str, labels: ArrayLike, clients: int, *, seed: Seed, **options: Any) -> list[Indices]:
    """Draw the partition called `name`, and return the indices of each client's samples.

    Args:
        name: a key of `PARTITIONS`: "dirichlet", "iid", "one_label", "quantity" or "shards".
        labels: the class of each sample, an integer.
        clients: the number of clients.
        seed: the seed, or a NumPy Generator.
        options: other arguments of the partition, such as alpha.

    Raises:
        DataError: the name or an option is unknown, an option is missing, or the partition is impossible.
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
                f"partition_options = {{{key} = {example}}}, in a shell --set 'partition_options={{{key}={example}}}'.",
                path=key,
                allowed=allowed_values,
            )
    return PARTITIONS[name](labels, clients, seed=seed, **options)


def split(
    parts: Sequence[NDArray[np.integer]], fraction: float = 0.5, *, seed: Seed
) -> tuple[list[Indices], list[Indices]]:
    """Split each client's samples at random into two lists, (training, validation), for the inner and the outer loss.

    Args:
        parts: the indices of each client's samples.
        fraction: the share of training samples, strictly between 0 and 1. The number of a client's training samples is
            rounded, and each client has at least one sample in both lists.
        seed: the seed, or a NumPy Generator.

    Raises:
        DataError: a client has fewer than two samples, or the fraction is not between 0 and 1.
    """
    require(0 < fraction < 1, "fraction", fraction, "strictly between 0 and 1")
    rng = generator(seed, 6)
    training, validation = [], []
    for client, part in enumerate(parts):
        require(len(part) >= 2, f"the number of samples of client {client}", len(part), "at least 2, for a split")
        mixed = rng.permutation(np.asarray(part, np.int64))
        cut = min(max(round(fraction * len(part)), 1), len(part) - 1)
        training.append(mixed[:cut])
        validation.append(mixed[cut:])
    return training, validation


def dealt(labels: NDArray[Any], folds: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Draw the fold of each sample, as an int32 array, so that each class is spread evenly over the folds.

    Samples are ordered by class, at random within a class, and dealt out to the folds in turn.
    """
    mixed = rng.permutation(len(labels))
    order = mixed[np.argsort(labels[mixed], kind="stable")]
    fold = np.empty(len(labels), np.int32)
    fold[order] = np.arange(len(labels)) % folds
    return fold


def generator_of_site(seed: int, site: str, *purpose: int) -> np.random.Generator:
    """Return the random generator of a site for a purpose. It depends on the site's name, and not on other sites."""
    name = int.from_bytes(hashlib.sha256(site.encode()).digest()[:8], "big")
    return np.random.default_rng([seed, name, *purpose])


def strata_of(owners: NDArray[Any], strata: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Return the stratum of each owner of samples, and, for each sample, the index of its owner.

    The stratum of an owner is the largest stratum of its samples. Values that are drawn for owners, such as folds, can
    be passed on to their samples: `drawn[owner]`.

    Args:
        owners: the owner of each sample, such as the patient of each row.
        strata: the stratum of each sample, such as its class: integers from 0 on.
    """
    names, owner = np.unique(owners, return_inverse=True)
    found = np.zeros(len(names), np.int64)
    np.maximum.at(found, owner, strata)
    return found, owner


def in_order_of_time(samples: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Sort a client's samples by time, the latest first, as losses of survival times need them.

    The result also has "last", an int32 array: for each sample, the index of the last sample of the same time. All
    samples up to this index are at risk at the time of the sample.
    """
    order = np.argsort(-samples["time"], kind="stable")
    ordered = {name: values[order] for name, values in samples.items()}
    times = -ordered["time"]
    return {**ordered, "last": (np.searchsorted(times, times, side="right") - 1).astype(np.int32)}


def _drawn(
    rng: np.random.Generator, totals: NDArray[np.integer], clients: int, alpha: float, minimum: int
) -> NDArray[np.int64]:
    """Draw counts (groups, clients) with the row sums `totals`.

    Each row is proportional to a draw from Dirichlet(alpha), up to rounding.
    """
    fits = isinstance(alpha, int | float | np.number) and not isinstance(alpha, bool) and bool(0 < alpha <= 1e9)
    require(fits, "alpha", alpha, "a number above 0, up to 1e9")
    most = totals.sum() // clients
    allowed = f"a whole number from 0 to {most}, since {totals.sum()} samples go to {clients} clients"
    require(_is_whole(minimum) and bool(0 <= minimum <= most), "minimum", minimum, allowed)
    for _ in range(ATTEMPTS):
        edges = np.cumsum(rng.dirichlet(np.full(clients, alpha), size=len(totals)), axis=1)
        # Edges are rounded to the nearest whole number, which favours no client. The last edge is the total, in spite
        # of rounding errors.
        cuts = np.rint(edges * totals[:, None]).astype(np.int64)
        counts: NDArray[np.int64] = np.diff(cuts, axis=1, prepend=np.int64(0))
        if counts.sum(axis=0).min() >= minimum:
            return counts
    raise DataError(
        f"alpha = {alpha} over {clients} clients left a client with fewer than minimum = {minimum} samples "
        f"in each of {ATTEMPTS} draws; allowed: a larger alpha, fewer clients or a smaller minimum.",
        path="alpha",
        got=alpha,
        allowed="a larger alpha, fewer clients or a smaller minimum",
    )


def _dealt(rng: np.random.Generator, members: Indices, counts: NDArray[np.int64]) -> list[Indices]:
    return np.split(rng.permutation(members), np.cumsum(counts)[:-1])


def _checked(labels: ArrayLike, clients: int) -> NDArray[np.integer]:
    y = np.asarray(labels)
    fits = y.ndim == 1 and np.issubdtype(y.dtype, np.integer)
    require(fits, "the layout of labels", f"{y.dtype}{list(y.shape)}", "integers along a single axis")
    require(1 <= clients <= len(y), "clients", clients, f"1 to {len(y)}, the number of samples")
    return y


def _is_whole(number: object) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def generator(seed: Seed, stream: int) -> np.random.Generator:
    """Return the random generator of a stream.

    Different streams of the same int are independent. A partition and its split use different streams, for example.

    If `seed` is a Generator, it is returned as it is.
    """
    if isinstance(seed, np.random.Generator):
        return seed
    fits = isinstance(seed, int | np.integer) and seed >= 0
    require(fits, "seed", seed, "an int from 0 on, or a numpy.random.Generator")
    return np.random.default_rng([stream, int(seed)])


Arrays = dict[str, NDArray[Any]]
"""Arrays by name, each with an entry for every sample."""


class Packed(NamedTuple):
    """The samples of all clients in flat arrays, client after client.

    Args:
        arrays: arrays by name, each with the samples of all clients along the first axis.
        start: the first row of each client, as int64.
        size: the number of samples of each client, as int64.
    """

    arrays: Arrays
    start: NDArray[np.int64]
    size: NDArray[np.int64]

    def client(self, i: int) -> Arrays:
        """Return the arrays of client i, each with size[i] rows. They are views, not copies."""
        rows = slice(int(self.start[i]), int(self.start[i] + self.size[i]))
        return {name: array[rows] for name, array in self.arrays.items()}


def pack(images: NDArray[Any], labels: NDArray[Any], parts: Sequence[NDArray[np.integer]]) -> Packed:
    """Pack n images and their n labels into flat arrays called "image" and "label"; see `pack_arrays`."""
    return pack_arrays({"image": images, "label": labels}, parts)


def pack_arrays(arrays: Mapping[str, NDArray[Any]], parts: Sequence[NDArray[np.integer]]) -> Packed:
    """Copy the clients' rows into flat arrays, client after client.

    Args:
        arrays: arrays by name, each with n rows.
        parts: the indices of each client's rows, from 0 to n − 1.

    Raises:
        DataError: there is no client or no array, arrays differ in length, a client has no samples, or an index is out
            of range.
    """
    shapes = {name: array.shape for name, array in arrays.items()}
    lengths = {shape[:1] for shape in shapes.values()}
    fits = len(lengths) == 1 and lengths != {()}
    require(fits, "the shapes of arrays", shapes, "at least one array, all of the same length")
    ((rows,),) = lengths
    size = np.array([len(part) for part in parts], np.int64)
    start = starts(size)
    for client, part in enumerate(parts):
        least, most = int(np.min(part)), int(np.max(part))
        indices = f"the range of row indices of client {client}"
        require(least >= 0 and most < rows, indices, (least, most), f"0 to {rows - 1}")
    order = np.concatenate(parts)
    return Packed({name: array[order] for name, array in arrays.items()}, start, size)


def starts(size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first row of each client in flat arrays, from the clients' numbers of samples.

    Raises:
        DataError: there is no client, or a client has no samples.
    """
    require(len(size) > 0, "the number of clients", 0, "at least one")
    client = int(np.argmin(size))
    require(bool(size[client] >= 1), f"the number of samples of client {client}", int(size[client]), "at least one")
    total = np.cumsum(size)
    first: NDArray[np.int64] = total - size
    return first


MANIFEST, FORMAT, VERSION = "manifest.json", "fedbilevel-clients", 1
NAME = re.compile(r"[A-Za-z0-9_-]+")  # allowed names of arrays, which become names of files


def write_clients(folder: str | Path, size: ArrayLike, clients: Iterable[Mapping[str, NDArray[Any]]]) -> Path:
    """Write the samples of all clients to a new folder, and return the folder.

    The folder is complete as soon as it exists; if writing fails, there is no folder. Only one client's samples are in
    memory at a time. To write a `Packed` p, call `write_clients(folder, p.size, map(p.client, range(len(p.size))))`.

    Args:
        folder: a path that does not exist yet.
        size: the number of samples of each client, at least 1.
        clients: the arrays of each client by name, in the same order, with size[i] rows for client i. Names, types and
            other axes are the same for all clients.

    Raises:
        DataError: the folder exists, a client's arrays do not fit, or the disk is full.
    """
    target = Path(folder)
    if target.exists():
        new = "a new folder (to write it again, delete it first)"
        raise DataError(f"{target} exists; allowed: {new}.", path=target, allowed=new)
    sizes = np.asarray(size, np.int64)
    starts(sizes)  # refuses wrong sizes
    part = temporary(target)
    try:
        part.mkdir(parents=True)
        _write(part, sizes, clients)
        os.rename(part, target)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror or error}.", path=target) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def open_clients(folder: str | Path) -> Packed:
    """Open a folder that `write_clients` wrote, with its arrays as read-only memory maps.

    The arrays `start` and `size` are read into memory.

    Raises:
        DataError: `write_clients` did not write the folder, or a file is missing, truncated or unlike the manifest.
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
            raise ValueError("it has no arrays, or its sizes are not one integer per client")
    rows, most = min(map(len, arrays.values())), size.max(initial=0)
    require_content(most <= rows, root, f"a client of {most} samples", f"at most {rows}, the number of its rows")
    try:
        start, total = starts(size), int(size.sum())
    except DataError as error:
        raise DataError(f"{root / 'size.npy'}: {error}", path=root / "size.npy", got=error.got) from error
    for name, array in arrays.items():
        sizes = f"{total}, the sum of the sizes"
        require_content(len(array) == total, root, f"{len(array)} rows of {name!r}", sizes)
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
            layout = {name: (array.shape[1:], array.dtype) for name, array in client.items()}
            if not written:
                like = layout
                for name, (shape, dtype) in like.items():
                    outs[name] = open_files.enter_context(_npy(part, name, (rows, *shape), dtype))
            lengths = {array.shape[:1] for array in client.values()}
            if written == len(sizes) or layout != like or lengths != {(sizes[written],)}:
                allowed = f"{sizes[written]} rows of {like}" if written < len(sizes) else "no such client"
                require(False, f"the layout of client {written}", f"{sorted(lengths)} rows of {layout}", allowed)
            for name, array in client.items():
                outs[name].write(np.ascontiguousarray(array).tobytes())
            written += 1
    require(written == len(sizes), "the number of clients", written, f"{len(sizes)}, the length of size")
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
    """Open a new .npy file and write its header; the caller writes the entries.

    Entries are written to the file, and not by a memory map, because on a full disk a memory map would kill the
    process, while a write raises an error.
    """
    path = part / f"{name}.npy"
    fits = bool(NAME.fullmatch(name)) and not path.exists() and dtype.kind in "biufc"
    allowed = "an array of numbers, with a name of letters, digits, _ and - other than 'size'"
    require(fits, f"the type of array {name!r}", str(dtype), allowed)
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
    actual = path.stat().st_size if path.is_file() else 0
    require_content(actual == length, path, f"{actual:,} bytes", f"{length:,}", "it is missing or truncated")
    array = mapped(path, "cannot be mapped")
    fits = list(array.shape) == shape and array.dtype.str == dtype and bool(shape)
    require_content(fits, path, f"{list(array.shape)} {array.dtype.str}", printable(f"{shape} {dtype}"))
    return array
