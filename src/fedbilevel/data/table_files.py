r"""Read files of tables that have a header and a row for each person or thing. Entries are numbers, words or gaps.

`read_texts` needs no other package; `read_table` makes a data frame with pandas. Both refuse a missing or repeated name
of a column, rows that are longer or shorter than the header, and quotes that are not closed. A quoted entry may have
several lines; its line breaks are read as "\n" on every system.
"""

import csv
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data.files import DataError, require_content, unexpected, unreadable
from fedbilevel.reading import require_regular
from fedbilevel.wording import in_a_line, missing

_WORDS = "#N/A,#N/A N/A,#NA,-1.#IND,-1.#QNAN,-NaN,-nan,1.#IND,1.#QNAN,<NA>,N/A,NA,NULL,NaN,None,n/a,nan,null"
GAPS = frozenset(["", *_WORDS.split(",")])
"""The texts that mean a gap. They are the same as pandas'."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
LONGEST_ENTRY = 2**31 - 1
"""The largest number of characters of an entry that the csv module accepts on every system; its default is 131,072."""
csv.field_size_limit(max(LONGEST_ENTRY, csv.field_size_limit()))  # a lower limit would affect other readers
ENCODING = "utf-8-sig"
QUOTES = "a quote in this row may not be closed, and an entry with a quote at its start must end with one"
Texts = NDArray[Any]
"""A column as an array of objects: texts, and None in gaps."""


def read_texts(file: Path, gaps: Collection[str] = ()) -> dict[str, Texts]:
    """Read a CSV file, and return its columns by name. Entries are texts, or None in gaps.

    Args:
        gaps: texts that mean a gap besides `GAPS`.

    Raises:
        DataError: the file cannot be read, is not UTF-8, has a quote that is not closed, has a column without a name or
            two of the same name, or has a row of another length than its header.
    """
    header, *rows = rows_of(file, ",")
    none = GAPS | set(gaps)
    columns = [[None if text.strip() in none else text for text in column] for column in zip(*rows, strict=True)]
    columns = columns or [[] for _ in header]
    return {name: np.array([*column, None], object)[:-1] for name, column in zip(header, columns, strict=True)}


def rows_of(file: Path, separator: str) -> Iterator[list[str]]:
    """Yield the header and the rows of a text file with a table. Lines that contain only spaces are left out.

    Args:
        separator: the character between the entries of a row.

    Raises:
        DataError: the file cannot be read, is not UTF-8, has a quote that is not closed, has text after a closing
            quote, or has a wrong header or a row of another length.
    """
    before, header = 0, list[str]()
    try:
        require_regular(file)
        with open(file, encoding=ENCODING) as text:
            reader = csv.reader(text, strict=True, delimiter=separator)
            for row in reader:
                line, before = before + 1, reader.line_num  # a quoted entry may have several lines
                if not row or (len(row) == 1 and row[0] and not row[0].strip(" \t")):
                    continue
                if not header:
                    header = row
                    check_header(file, header, separator)
                elif len(row) != len(header):
                    expected = f"{len(header)}, as its header has"
                    raise unexpected(f"{file}, line {line}", f"{len(row)} entries", expected)
                yield row
    except OSError as error:
        raise unreadable(file, in_a_line(error)) from error
    except UnicodeDecodeError as error:
        place = f"{file}, line {_line_that_is_not_utf_8(file)}"
        how = 'save it in UTF-8, which spreadsheets call "CSV UTF-8"'
        raise DataError(f"{place}: the file is not a text in UTF-8; {how}.", path=place) from error
    except csv.Error as error:
        place = f"{file}, line {before + 1}"
        raise DataError(f"{place}: the row cannot be read ({error}); {QUOTES}.", path=place) from error
    require_content(bool(header), file, "no lines", "a first line that names the columns")


def _line_that_is_not_utf_8(file: Path) -> int:
    """Return the number of the first line with a byte that is not UTF-8.

    It has to be searched, because decoding in blocks does not report it.
    """
    with open(file, encoding=ENCODING, errors="surrogateescape") as text:
        return next(number for number, line in enumerate(text, 1) if re.search("[\udc80-\udcff]", line))


def check_header(file: Path, header: list[str], separator: str) -> None:
    """Raise DataError if a column has no name, two columns have the same name, or the separator is another one."""
    other = next((one for one in NAMES if one in header[0] and one != separator), None)
    if len(header) == 1 and other:
        where = f"a {file.suffix} file" if file.suffix else "the file"
        found = f"the names in its first line are separated by {NAMES[other]}"
        text = f"{file}: {found}; {where} must have {NAMES[separator]} between entries, and a decimal point."
        raise DataError(text, path=file, got=NAMES[other], allowed=NAMES[separator])
    twice = next((name for name in header if header.count(name) > 1 or not name), None)
    column = f"the column {twice!r} twice or without a name"
    require_content(twice is None, file, column, "a name of its own for each column")


def read_table(file: Path, gaps: Collection[str] = ()) -> Any:
    """Read a .csv, .tsv or .parquet file as a pandas.DataFrame, with a row for each row of the file.

    Args:
        gaps: texts that mean a gap, in addition to pandas'. They are not used for Parquet, which has gaps of its own.

    Raises:
        DataError: the name has another ending; the file cannot be read, has no rows, a wrong header, a row of another
            length than its header, or a quote that is not closed; or a package that reads such files is not installed.
    """
    kind = file.suffix.lower()
    if kind not in (*SEPARATORS, ".parquet"):
        kinds = ".csv, .tsv or .parquet"
        raise DataError(f"{file} is not a table: it must be a {kinds} file.", path=file, allowed=kinds)
    try:
        import pandas as pd
    except ImportError as error:
        raise DataError(f"{file} needs {missing('pandas', 'tables')}", path=file) from error
    try:
        if kind == ".parquet":
            frame = pd.read_parquet(file)
        else:
            for _ in rows_of(file, SEPARATORS[kind]):
                pass  # this checks the lengths of rows: pandas moves columns if rows are longer than the header
            with open(file, encoding=ENCODING) as text:  # with a path, pandas misreads "\r" at a line's start
                frame = pd.read_csv(text, na_values=list(gaps), sep=SEPARATORS[kind], low_memory=False)
    except ImportError as error:
        needs = "needs pyarrow, which is not installed: pip install pyarrow"
        raise DataError(f"{file} {needs}", path=file) from error
    except DataError:
        raise
    except (OSError, ValueError) as error:  # pandas' ParserError and EmptyDataError are ValueErrors
        raise unreadable(file, in_a_line(error)) from error
    require_content(len(frame) > 0, file, "no rows", "at least one")
    return frame


def numbers_of(texts: Texts) -> NDArray[np.float64] | None:
    """Return a column as numbers, with NaN in gaps; None if a text is not a number for pandas."""
    if any(text is not None and ("_" in text or not text.isascii()) for text in texts):
        return None  # Python's `float` takes "1_2" for 12, and knows digits of other scripts
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
