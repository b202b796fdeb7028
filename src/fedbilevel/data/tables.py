"""`load_table`: rows of numbers with a class each, from files on this machine."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data import files
from fedbilevel.data.dataset import Dataset
from fedbilevel.data.errors import DataError, unknown_name
from fedbilevel.data.reading import Expanded, as_data_error

COVERTYPE_COLUMNS = 55  # 54 features and the label
COVERTYPE_LIMIT = 100_000_000  # bytes; expanded, all of its rows have 75 MB
LIBSVM_PAIR = 32  # characters of a pair index:value, at most; the published files have up to 12
LINE = re.compile(rb"\s*[+-]?1(\.0*)?(\s+\d+:[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?)*\s*")
LARGEST = float(np.finfo(np.float32).max)
Rows = tuple[NDArray[np.float32], NDArray[np.int32]]


class Published(NamedTuple):
    """The sizes that a set of libsvm's collection must have; these sets have no published checksums."""

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
    with as_data_error(path, "is not a gzipped table of integers, separated by commas"):
        text = Expanded(files.read_bytes(path), "gzip", COVERTYPE_LIMIT, path).read()
        table = np.loadtxt(io.BytesIO(text), np.int32, delimiter=",", ndmin=2, comments=None)
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

    Indices count from 1; what a line does not name is 0. DataError, with the number of the line, where a label is not
    1 or -1, an index is not a whole number up to `features` or comes twice, or a value is not finite in float32; and if
    rows, or positive ones, are fewer or more than expected.
    """
    limit = count * (features + 1) * LIBSVM_PAIR
    with as_data_error(path, "is not a bz2 file in libsvm's format"):
        whole = Expanded(files.read_bytes(path), "bz2", limit, path).read()
    ends = whole.count(b"\n")
    many = ends > 2 * count  # split, lines of a byte would take a hundred times their size
    lines = [] if many else [(number, line) for number, line in enumerate(whole.split(b"\n"), 1) if line.strip()]
    if len(lines) != count:
        found = ends if many else len(lines)
        raise DataError(f"{path} has {found:,} lines; expected {count:,}, each a label and pairs index:value.")
    for number, line in lines:
        if not LINE.fullmatch(line) or line.count(b":") > features:
            raise DataError(
                f"{path}, line {number}: expected a label, 1 or -1, and up to {features} pairs index:value."
            )
    entries = np.array([line.count(b":") for _, line in lines], np.int64)
    numbers = np.array(b" ".join(line for _, line in lines).replace(b":", b" ").split(), np.float64)
    starts = np.cumsum(2 * entries + 1) - (2 * entries + 1)
    label = (numbers[starts] > 0).astype(np.int32)
    index, value = np.delete(numbers, starts).reshape(-1, 2).T
    row = np.repeat(np.arange(count), entries)
    _, first = np.unique(row * (features + 1) + np.clip(index, 0, features), return_index=True)
    wrong = {
        f"an index that is not one of 1 to {features}": (index < 1) | (index > features),
        "an index that comes twice": ~np.isin(np.arange(len(index)), first),
        "a value that is not finite in float32": ~(np.abs(value) <= LARGEST),
    }
    for what, where in wrong.items():
        if where.any():
            raise DataError(f"{path}, line {lines[row[np.argmax(where)]][0]} has {what}.")
    if label.sum() != positive:
        raise DataError(f"{path} has {label.sum():,} positive rows; expected {positive:,}.")
    rows = np.zeros((count, features), np.float32)
    rows[row, index.astype(np.int64) - 1] = value
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
