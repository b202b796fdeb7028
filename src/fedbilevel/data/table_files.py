"""Read files of tables, with a header and a row for each person or thing; columns have numbers or words, and gaps.

`read_texts` needs no other package; `read_table` makes a data frame. Both refuse the same files.
"""

import csv
import io
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data.files import DataError, read_bytes
from fedbilevel.wording import in_a_line, missing

_WORDS = "#N/A,#N/A N/A,#NA,-1.#IND,-1.#QNAN,-NaN,-nan,1.#IND,1.#QNAN,<NA>,N/A,NA,NULL,NaN,None,n/a,nan,null"
GAPS = frozenset(["", *_WORDS.split(",")])
"""The texts that mean a gap; pandas takes the same texts as gaps."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
Texts = NDArray[Any]
"""A column as (n,) objects: texts, and None in gaps."""


def read_texts(file: Path, gaps: Collection[str] = (), separator: str = ",") -> dict[str, Texts]:
    """Read a CSV file, and return its columns by name, as texts, with None in gaps.

    Args:
        gaps: texts that mean a gap besides `GAPS`.
        separator: what is between the entries of a row.

    Raises:
        DataError: the file cannot be read, is not UTF-8, has a column without a name or two of the same name, or has a
            line of another length than its header.
    """
    try:
        lines = list(
            csv.reader(io.StringIO(read_bytes(file).decode("utf-8-sig"), newline=""), strict=True, delimiter=separator)
        )
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} is not a CSV file in UTF-8: {error}.") from error
    header, *rows = [line for line in lines if line] or [[]]
    twice = next((name for name in header if header.count(name) > 1 or not name), None)
    if not header:
        raise DataError(f"{file} is empty; its first line must name the columns.")
    if twice is not None:
        raise DataError(f"{file} has the column {twice!r} twice or without a name; each needs a name of its own.")
    for number, line in enumerate(rows, 2):
        if len(line) != len(header):
            raise DataError(f"{file}, row {number}: {len(line)} entries; the header has {len(header)}.")
    none = GAPS | set(gaps)
    columns = [[None if text.strip() in none else text for text in column] for column in zip(*rows, strict=True)]
    columns = columns or [[] for _ in header]
    return {name: np.array([*column, None], object)[:-1] for name, column in zip(header, columns, strict=True)}


def read_table(file: Path, gaps: Collection[str] = ()) -> Any:
    """Read a .csv, .tsv or .parquet file as a pandas.DataFrame, with a row for each row of the file.

    Args:
        gaps: texts that mean a gap, besides those of pandas; not used with Parquet, which has gaps of its own.

    Raises:
        DataError: the name ends otherwise; the file cannot be read, has no rows, or is one that `read_texts` refuses; a
            package that reads such files is missing.
    """
    kind = file.suffix.lower()
    if kind not in (*SEPARATORS, ".parquet"):
        raise DataError(f"{file} is no table: it must be a .csv, .tsv or .parquet file.")
    try:
        import pandas as pd
    except ImportError as error:
        raise DataError(f"{file} needs {missing('pandas', 'tables')}") from error
    try:
        if kind == ".parquet":
            frame = pd.read_parquet(file)
        else:
            read_texts(file, separator=SEPARATORS[kind])  # pandas moves columns if rows are longer than the header
            frame = pd.read_csv(file, na_values=list(gaps), sep=SEPARATORS[kind])
    except ImportError as error:
        raise DataError(f"{file} needs pyarrow, which is not installed: pip install pyarrow") from error
    except DataError:
        raise
    except (OSError, ValueError) as error:  # pandas' ParserError and EmptyDataError are ValueErrors
        raise DataError(f"{file} cannot be read: {in_a_line(error)}.") from error
    if not len(frame):
        raise DataError(f"{file} has no rows.")
    return frame


def numbers_of(texts: Texts) -> NDArray[np.float64] | None:
    """Return a column as numbers, with NaN in gaps; None if a text is not a number."""
    try:
        return np.array([np.nan if text is None else float(text) for text in texts], float)
    except ValueError:
        return None


def words_of(texts: Texts) -> Texts:
    """Return a column as names of categories, with None in gaps; in a column of numbers, "1.0" and "01" become "1"."""
    if numbers_of(texts) is None:
        return texts
    words = [
        None if text is None else str(int(text)) if re.fullmatch(r"[+-]?\d+", text.strip()) else _shortest(float(text))
        for text in texts
    ]
    return np.array([*words, None], object)[:-1]


def _shortest(number: float) -> str:
    return repr(number).removesuffix(".0")
