"""File formats: IDX (MNIST, Fashion-MNIST) and the CIFAR-10 binary archive."""

import math
import struct
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data.errors import DataError
from fedbilevel.data.reading import Expanded, as_data_error

BATCH, SIDE, CHANNELS = 10_000, 32, 3
RECORD = 1 + CHANNELS * SIDE * SIDE  # one label byte, then the planes R, G, B
CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR_TEST = ("test_batch.bin",)
CIFAR_LIMIT = 200_000_000  # bytes; expanded, the official archive has 184 MB
IDX_LIMIT = 100_000_000  # bytes; the longest of the published files has 47 MB


def parse_idx(content: bytes, ndim: int, where: str | Path) -> NDArray[np.uint8]:
    """The array in a gzipped IDX file of unsigned bytes.

    IDX: two zero bytes, the type (8: unsigned byte), the number of axes, each length as a big-endian int32,
    the entries. ndim: the number of axes it must have. where: the name for errors. Returns uint8, read-only.
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
    """(images, labels) of the 50,000 training and of the 10,000 test records of a CIFAR-10 binary archive.

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
