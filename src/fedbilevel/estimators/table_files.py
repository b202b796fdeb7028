"""Tables of people or things in files, as data frames."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedbilevel.data import DataError
from fedbilevel.errors import ConfigurationError
from fedbilevel.extending import in_a_line, missing, require

SEPARATORS = {".csv": ",", ".tsv": "\t"}


def read_table(file: Path, gaps: Collection[str] = ()) -> Any:
    """Read a .csv, .tsv or .parquet file as a pandas.DataFrame, with a row for each row of the file.

    Args:
        gaps: texts that mean a gap, besides those of pandas; not used with Parquet, which has gaps of its own.

    Raises:
        DataError: the file cannot be read, or has no rows.
        ConfigurationError: the name ends otherwise, or a package that reads such files is missing.
    """
    kind = file.suffix.lower()
    require(kind in (*SEPARATORS, ".parquet"), "table", str(file), "a .csv, .tsv or .parquet file")
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigurationError(f"{file} needs {missing('pandas', 'tables')}") from error
    try:
        if kind == ".parquet":
            frame = pd.read_parquet(file)
        else:
            frame = pd.read_csv(file, na_values=list(gaps), sep=SEPARATORS[kind])
    except ImportError as error:
        raise ConfigurationError(f"{file} needs pyarrow, which is not installed: pip install pyarrow") from error
    except (OSError, ValueError) as error:  # pandas' ParserError and EmptyDataError are ValueErrors
        raise DataError(f"{file} cannot be read: {in_a_line(error)}.") from error
    if not len(frame):
        raise DataError(f"{file} has no rows.")
    return frame
