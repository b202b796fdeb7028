"""`load_table`: rows of numbers with a class each, from files on this machine."""

import bz2
import gzip
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data import files
from fedbilevel.data.dataset import Dataset
from fedbilevel.data.errors import DataError, unknown_name

COVERTYPE_COLUMNS = 55  # 54 features and the label
Rows = tuple[NDArray[np.float32], NDArray[np.int32]]


class Published(NamedTuple):
    """What a set of libsvm's collection must contain; these have no published checksums."""

    features: int
    train: tuple[int, int]  # rows, and those of them that are positive
    test: tuple[int, int]


LIBSVM = {
    "a9a": Published(123, (32_561, 7_841), (16_281, 3_846)),
    "ijcnn1": Published(22, (49_990, 4_853), (91_701, 8_712)),
}


def load_table(name: str) -> Dataset:
    """The table called `name`: "covtype" (7 classes), "a9a" or "ijcnn1" (2 classes each).

    Its rows stand in the place of images: `train_images` is (n, features) float32, as published; `mean` and `std` have
    one entry per feature, of the training rows (std 1 for a feature that never varies), so that `standardised()` works
    as for images. Nothing is downloaded: files are looked for in `$FEDBILEVEL_DATA` and in the cache.

    DataError if the name is unknown, or a file is missing or has other content than it should.
    """
    if name not in TABLES:
        raise unknown_name("table", name, TABLES)
    train, test, classes = TABLES[name](name)
    rows = train[0].astype(np.float64)
    std = rows.std(0)
    spread = np.where(std > 0, std, 1)
    return Dataset(
        name=name,
        train_images=train[0],
        train_labels=train[1],
        test_images=test[0],
        test_labels=test[1],
        classes=classes,
        mean=tuple(rows.mean(0).tolist()),
        std=tuple(spread.tolist()),
    )


def covtype(name: str) -> tuple[Rows, Rows, int]:
    """Covertype (Blackard, Dean 1998): 54 features of a patch of forest, and which of 7 trees grows on it.

    From `covtype.data.gz`, 581,012 rows, or from `covtype.subset.data.gz`, some of these rows in any order. There is no
    published split into halves that are alike: every fifth row is a test row.
    """
    path = _found(name, "covtype.data.gz", "covtype.subset.data.gz")
    try:
        text = gzip.decompress(files.read_bytes(path))
        table = np.loadtxt(io.BytesIO(text), np.int32, delimiter=",", ndmin=2)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"{path} is not a gzipped table of integers, separated by commas: {error}.") from error
    label = table[:, -1] - 1
    if table.shape[1] != COVERTYPE_COLUMNS or set(np.unique(label)) != set(range(7)):
        raise DataError(f"{path} has {table.shape[1]} columns; expected {COVERTYPE_COLUMNS}, the last a class, 1 to 7.")
    rows = table[:, :-1].astype(np.float32)
    test = np.arange(len(label)) % 5 == 4
    return (rows[~test], label[~test]), (rows[test], label[test]), 7


def libsvm(name: str) -> tuple[Rows, Rows, int]:
    """a9a (the census data Adult, in Platt's encoding) or ijcnn1 (Prokhorov 2001), with their published split.

    From `libsvm/<name>.bz2` and `libsvm/<name>.t.bz2`. The positive class is 1.
    """
    known = LIBSVM[name]
    train, test = (
        parse_libsvm(_found("libsvm", f"{name}{end}.bz2"), known.features, *counts)
        for end, counts in (("", known.train), (".t", known.test))
    )
    return train, test, 2


def parse_libsvm(path: Path, features: int, count: int, positive: int) -> Rows:
    """Rows (count, features) and labels 0 or 1 of a bz2 file with lines «±1 index:value index:value …».

    Indices count from 1; what a line does not name is 0. DataError if it is no such file, or rows or positive ones are
    fewer or more.
    """
    try:
        lines = bz2.decompress(files.read_bytes(path)).split(b"\n")
        lines = [line for line in lines if line.strip()]
        numbers = np.array(b" ".join(lines).replace(b":", b" ").split(), np.float64)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} is not a bz2 file in libsvm's format: {error}.") from error
    entries = np.array([line.count(b":") for line in lines], np.int64)
    starts = np.cumsum(2 * entries + 1) - (2 * entries + 1)
    if len(lines) != count or len(numbers) != len(lines) + 2 * entries.sum():
        raise DataError(f"{path} has {len(lines):,} lines; expected {count:,}, each a label and pairs index:value.")
    label = (numbers[starts] > 0).astype(np.int32)
    pairs = np.delete(numbers, starts).reshape(-1, 2)
    index = pairs[:, 0].astype(np.int64) - 1
    if label.sum() != positive or index.min() < 0 or index.max() >= features:
        raise DataError(
            f"{path} has {label.sum():,} positive rows and indices {index.min() + 1} to {index.max() + 1}; expected "
            f"{positive:,}, and 1 to {features}."
        )
    rows = np.zeros((count, features), np.float32)
    rows[np.repeat(np.arange(count), entries), index] = pairs[:, 1]
    return rows, label


def _found(folder: str, *names: str) -> Path:
    """The first of these files that is there."""
    paths = [path for name in names if (path := files.local(folder, name))]
    if not paths:
        places = " or ".join(str(place) for place in files.folders(folder))
        raise DataError(
            f"{' or '.join(names)} is not in {places}. Nothing is downloaded: put it there, or at "
            f"FOLDER/{folder}/{names[0]}, and set FEDBILEVEL_DATA=FOLDER."
        )
    return paths[0]


TABLES: dict[str, Callable[[str], Any]] = {"a9a": libsvm, "covtype": covtype, "ijcnn1": libsvm}
