"""Reading files that anyone may have written, within bounds and with one sentence for whatever is wrong with them; the
formats IDX (MNIST, Fashion-MNIST) and the CIFAR-10 binary archive."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.wording import in_a_line


class DataError(ValueError):
    """Data cannot be found, read, downloaded, partitioned or stored; the message says what to do."""


def unknown_name(field: str, got: object, allowed: Iterable[str]) -> DataError:
    """Return the error for a `field` that got a name outside `allowed`, with the nearest valid name."""
    names = sorted(allowed)
    near = get_close_matches(str(got), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return DataError(f"{field} {got!r} is unknown.{hint} Allowed: {', '.join(names) or 'none'}.")


CHUNK = 1 << 20  # bytes

EXPANDERS: dict[str, Callable[[IO[bytes]], Any]] = {
    "bz2": bz2.BZ2File,
    "gzip": lambda file: gzip.GzipFile(fileobj=file),
    "xz": lzma.LZMAFile,
}


@contextmanager
def as_data_error(where: str | Path, problem: str) -> Iterator[None]:
    """Turn whatever goes wrong inside into the DataError «where problem: why».

    What libraries raise for damaged files is not documented: it ranges from ValueError to zlib.error and
    NotImplementedError.
    """
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{where} {problem}: {in_a_line(error)}.") from error


class Expanded:
    """Expand compressed bytes, as a stream.

    Args:
        form: a key of EXPANDERS.
        limit: DataError once there are more bytes: a small file can expand to thousands of times its size.
        where: the name of the file in errors.
    """

    def __init__(self, content: bytes, form: str, limit: int, where: str | Path) -> None:
        self.stream = EXPANDERS[form](io.BytesIO(content))
        self.limit = self.left = limit
        self.where = where

    def read(self, size: int = -1) -> bytes:
        """Read the next `size` bytes, fewer at the end; without `size` all that is left."""
        wanted = self.left + 1 if size < 0 else min(size, self.left + 1)
        parts = []
        while wanted and (part := self.stream.read(min(wanted, CHUNK))):
            parts.append(part)
            wanted -= len(part)
            self.left -= len(part)
        if self.left < 0:
            raise DataError(f"{self.where} expands to more than {self.limit:,} bytes: it is not the file it should be.")
        return b"".join(parts)


def mapped(path: Path, problem: str) -> NDArray[Any]:
    """Map the array of numbers in a .npy file, read-only: it takes no memory, whatever its header says."""
    with as_data_error(path, problem):
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
        if array.dtype.kind not in "biufc":
            raise ValueError(f"it holds {array.dtype}, not numbers")
        return array


BATCH, SIDE, CHANNELS = 10_000, 32, 3
RECORD = 1 + CHANNELS * SIDE * SIDE  # one label byte, then the planes R, G, B
CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR_TEST = ("test_batch.bin",)
CIFAR_LIMIT = 200_000_000  # bytes; expanded, the official archive has 184 MB
IDX_LIMIT = 100_000_000  # bytes; the longest of the published files has 47 MB


def parse_idx(content: bytes, ndim: int, where: str | Path) -> NDArray[np.uint8]:
    """Parse the array in a gzipped IDX file of unsigned bytes.

    IDX: two zero bytes, the type (8: unsigned byte), the number of axes, each length as a big-endian int32,
    the entries. ndim: the number of axes it must have. where: the name of the file in errors. Returns uint8, read-only.
    DataError if it cannot be unpacked, or if its magic, axes or length are wrong.
    """
    with as_data_error(where, "is not a whole gzip file"):
        raw = Expanded(content, "gzip", IDX_LIMIT, where).read()
    magic, start = bytes((0, 0, 8, ndim)), 4 + 4 * ndim
    if raw[:4] != magic or len(raw) < start:
        raise DataError(
            f"{where} starts with {raw[:4].hex(' ')}, expected {magic.hex(' ')} (IDX, {ndim} axes of bytes)."
        )
    shape = struct.unpack(f">{ndim}i", raw[4:start])
    expected = math.prod(shape)
    if min(shape) < 0 or len(raw) - start != expected:
        raise DataError(f"{where} holds {len(raw) - start:,} entries, expected {expected:,} for its shape {shape}.")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def parse_cifar(
    content: bytes, where: str | Path
) -> tuple[tuple[NDArray[np.uint8], NDArray[np.int32]], tuple[NDArray[np.uint8], NDArray[np.int32]]]:
    """Parse (images, labels) of the 50,000 training and of the 10,000 test records of a CIFAR-10 binary archive.

    Images (n, 32, 32, 3) uint8, labels (n,) int32. Compressed by gzip or xz. Nothing is unpacked to disk. DataError
    if the archive is damaged or expands to more than CIFAR_LIMIT bytes, a batch has another size, or the classes
    are not equally frequent.
    """
    form = "gzip" if content[:2] == b"\x1f\x8b" else "xz"
    with (
        as_data_error(where, "is not a whole tar archive"),
        tarfile.open(fileobj=Expanded(content, form, CIFAR_LIMIT, where), mode="r|") as archive,  # type: ignore[call-overload]
    ):
        batches = _batches(archive, where)
    train, test = ([batches[name] for name in names] for names in (CIFAR_TRAIN, CIFAR_TEST))
    return _records(train, where), _records(test, where)


def _batches(archive: tarfile.TarFile, where: str | Path) -> dict[str, bytes]:
    # One pass in file order: asking for members by name would unpack a compressed archive once per member.
    batches = {}
    for member in archive:
        folder, _, name = member.name.rpartition("/")
        if folder != "cifar-10-batches-bin" or name not in CIFAR_TRAIN + CIFAR_TEST:
            continue
        stream = archive.extractfile(member) if member.size == BATCH * RECORD else None
        if stream is None:
            raise DataError(f"{where}: {name} has {member.size:,} bytes, expected {BATCH * RECORD:,}.")
        batches[name] = stream.read()
    missing = set(CIFAR_TRAIN + CIFAR_TEST) - set(batches)
    if missing:
        raise DataError(f"{where} lacks {', '.join(sorted(missing))} in cifar-10-batches-bin.")
    return batches


def _records(batches: list[bytes], where: str | Path) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    records = np.frombuffer(b"".join(batches), np.uint8).reshape(-1, RECORD)
    labels = records[:, 0].astype(np.int32)
    # The published sets are exactly balanced: a re-packed archive without a known checksum must be too.
    counts = np.bincount(labels, minlength=10)
    if np.any(counts != len(labels) // 10):
        raise DataError(
            f"{where} has {counts.tolist()} images per class, expected {len(labels) // 10:,} of each of 10."
        )
    planes = records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels
