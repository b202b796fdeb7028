"""CSV files with a row for each person or thing, and a header: columns of numbers or words, with gaps."""

import csv
import io
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data.files import DataError, read_bytes

_WORDS = "#N/A,#N/A N/A,#NA,-1.#IND,-1.#QNAN,-NaN,-nan,1.#IND,1.#QNAN,<NA>,N/A,NA,NULL,NaN,None,n/a,nan,null"
GAPS = frozenset(["", *_WORDS.split(",")])
"""The texts that pandas takes as gaps, too."""
Texts = NDArray[Any]
"""(n,) objects: texts, and None in gaps."""


def read_texts(file: Path, gaps: Collection[str] = ()) -> dict[str, Texts]:
    """Read a CSV file: its columns by name, as texts, with None in gaps.

    Args:
        gaps: texts that mean a gap besides `GAPS`.

    Raises:
        DataError: the file cannot be read, is not UTF-8, repeats a name in its header, or has a line of another length.
    """
    try:
        lines = list(csv.reader(io.StringIO(read_bytes(file).decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} is not a CSV file in UTF-8: {error}.") from error
    header, *rows = [line for line in lines if line] or [[]]
    twice = next((name for name in header if header.count(name) > 1 or not name), None)
    if twice is not None or not header:
        raise DataError(f"{file} has the column {twice!r} twice or without a name; each needs a name of its own.")
    for number, line in enumerate(rows, 2):
        if len(line) != len(header):
            raise DataError(f"{file}, row {number}: {len(line)} entries; the header has {len(header)}.")
    none = GAPS | set(gaps)
    columns = [[None if text.strip() in none else text for text in column] for column in zip(*rows, strict=True)]
    columns = columns or [[] for _ in header]
    return {name: np.array([*column, None], object)[:-1] for name, column in zip(header, columns, strict=True)}


def numbers_of(texts: Texts) -> NDArray[np.float64] | None:
    """Return the numbers, NaN in gaps; None where a text is no number."""
    try:
        return np.array([np.nan if text is None else float(text) for text in texts], float)
    except ValueError:
        return None


def words_of(texts: Texts) -> Texts:
    """Return the names of categories, None in gaps: of a column of numbers "1" for "1.0" and "01"."""
    if numbers_of(texts) is None:
        return texts
    words = [
        None if text is None else str(int(text)) if re.fullmatch(r"[+-]?\d+", text.strip()) else _shortest(float(text))
        for text in texts
    ]
    return np.array([*words, None], object)[:-1]


def _shortest(number: float) -> str:
    return repr(number).removesuffix(".0")
