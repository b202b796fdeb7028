"""Turn a table with categories and gaps into numbers, in a way on which sites agree without showing rows.

For each column of numbers, a site sends how many numbers there are, their mean and the sum of squares about the mean.
For each column of categories, it sends how many rows have each category. With these statistics added up over sites, a
number becomes (a − mean)/deviation, and a gap becomes 0, which is the mean; a category becomes an indicator for each
name, and all indicators are 0 in a gap. `fit` on the rows of all sites gives the same, up to rounding.

A site writes its statistics with `save`, as a text to be read before it is sent, and `load` adds such texts up. Sums
are exact and rounded once: the order of sites changes no bit of them.

The statistics reveal little, but not nothing. The mean of one number is that number, a category with one row reveals
that a patient has it, and a column of names reveals them all. So `save` leaves out statistics of fewer than `min_count`
rows. It does not hide a single number among zeros. It does not hide a row from a reader who gets two texts of a site,
one with the row and one without it.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from fedbilevel.data import DataError
from fedbilevel.data.columns import Told, added, checked, names_of, prepared, without_rare
from fedbilevel.estimators.columns import moments, require_sizes, warn_of_spellings, warn_of_words
from fedbilevel.extending import (
    in_a_line,
    parse_json,
    read_bytes,
    require,
    require_count,
    unknown,
    write_text,
)

__all__ = ["Preparer", "Told", "read_saved", "words_of"]

T = TypeVar("T")
NUMBERS = "biuf"  # kinds of types
KINDS_OF_COLUMN = "numbers", "words"


class Preparer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Make standardised numbers and indicators of a data frame's columns.

    Args:
        categorical: the names of columns whose numbers are codes, also the codes 0 and 1 (their mean would reveal a
            count of rows); and of columns of categories in which a site has only gaps. Texts and pandas' categories
            are categories anyway.

    `fit` and `load` set `columns_`, the statistics of each column. The name of a category is its text; 1.0 and 1 have
    the same name.
    """

    def __init__(self, *, categorical: Sequence[str] = ()) -> None:
        self.categorical = categorical

    def fit(self, X: Any, y: Any = None) -> Self:
        """Compute the statistics of the columns of a data frame, such as a site's rows; returns the preparer.

        Raises:
            ConfigurationError: X is no data frame, a categorical column is not there, or a number is infinite.
        """
        _require_frame(X)
        for name in self.categorical:
            if name not in X.columns:
                raise unknown("categorical column", name, X.columns)
        told: Told = {}
        for name in X.columns:
            bears = name in self.categorical or X[name].dtype.kind in NUMBERS + "OSU"
            require(
                bears, f"type of column {name!r}", str(X[name].dtype), "numbers or texts, or named in `categorical`"
            )
            if name in self.categorical or X[name].dtype.kind not in NUMBERS:
                told[name] = {"categories": words_of(X[name]).value_counts().to_dict(), "rarer": False}
                if name not in self.categorical and str(X[name].dtype) != "category":
                    warn_of_words(name, told[name]["categories"])
            else:
                values = _numbers(X, name)
                values = values[~np.isnan(values)]
                mean, squares = moments(f"column {name!r}", values)
                told[name] = {"count": len(values), "mean": mean, "squares": squares}
        return self._keep({"X": told})

    def save(self, file: str | Path, *, min_count: int = 8) -> None:
        """Write the statistics as JSON, a line for each column.

        Args:
            min_count: of a column with fewer numbers none is told, and categories of fewer rows are not named; 1: all.
                Numbers of which no site told count as gaps.
        """
        lines = [json.dumps({name: told}, ensure_ascii=False)[1:-1] for name, told in self.told(min_count).items()]
        write_text(Path(file), "{\n" + ",\n".join(lines) + "\n}\n")

    def told(self, min_count: int = 8) -> Told:
        """Return what `save` writes, by column."""
        check_is_fitted(self)
        require_count("min_count", min_count)
        return without_rare(self.columns_, min_count)

    @classmethod
    def sum_of(cls, parts: Mapping[str, Told]) -> Self:
        """Add up the statistics of several sites, given by site name, as `load` does with files.

        Raises:
            ConfigurationError: a place has other columns than the first, or of another kind.
            ValueError: what a place told is not as `told` returns it.
        """
        for told in parts.values():
            checked(told)
        return cls()._keep(parts)

    @classmethod
    def load(cls, *files: str | Path) -> Self:
        """Read what `save` wrote, to the bit; of several sites, a file each, the sum, with columns as in the first.

        Raises:
            DataError: a file cannot be read, or holds something else.
            ConfigurationError: a file has other columns than the first, or of another kind.
        """
        require(
            len({Path(file).resolve() for file in files}) == len(files) > 0, "files", files, "one or more, each once"
        )
        return cls()._keep({str(file): read_saved(Path(file), checked) for file in files})

    def transform(self, X: Any) -> Any:
        """Return a data frame of numbers without gaps, with the rows of X.

        Raises:
            ConfigurationError: a column is missing or unknown, or holds a category that no site had told; it counts as
                a gap in a column of which some told that there are rarer ones.
        """
        check_is_fitted(self)
        _require_frame(X)
        _require_columns("X", X.columns, self.columns_)
        table = {}
        for name, told in self.columns_.items():
            if "categories" not in told:
                table[name] = _numbers(X, name)
                continue
            words = words_of(X[name])
            if others := set(words.dropna()) - told["categories"].keys():
                if not told["rarer"]:
                    raise unknown(f"category of column {name!r}", min(others), told["categories"])
                warn_of_spellings(f"column {name!r}", [*told["categories"], *sorted(others)])
            table[name] = words.astype(object).where(words.notna(), None).to_numpy()
        return type(X)(prepared(self.columns_, table), index=X.index)

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """Return the names of the columns that `transform` makes. An indicator has the name COLUMN_CATEGORY."""
        check_is_fitted(self)
        return np.asarray(names_of(self.columns_), object)

    def _keep(self, parts: Mapping[str, Told]) -> Self:
        """Store the sum of the statistics of several sites."""
        (first, known), *_ = parts.items()
        for place, told in parts.items():
            _require_columns(place, told, known)
            for name, one in told.items():
                here, there = (KINDS_OF_COLUMN["categories" in each] for each in (one, known[name]))
                how = "name texts that mean a gap (gaps, na_values), or codes in `categorical`"
                require(here == there, f"column {name!r} of {place}", here, f"{there}, as in {first}: {how}")
        self.columns_ = {name: added([told[name] for told in parts.values()]) for name in known}
        for name, one in self.columns_.items():
            warn_of_spellings(f"column {name!r}", one.get("categories", ()))
        for name, count in Counter(self.get_feature_names_out()).items():
            require(count == 1, f"column {name!r}", "made twice", "made once: rename a column or category")
        return self


def read_saved(file: Path, read: Callable[[Any], T]) -> T:
    """Return what `read` makes of the JSON that `save` wrote.

    Raises:
        DataError: the file cannot be read, or holds something else.
    """
    try:
        return read(parse_json(read_bytes(file)))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {in_a_line(error)}.") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise DataError(f"{file} is not what `save` writes: {in_a_line(error)}.") from error


def _require_frame(X: Any) -> None:
    fits = hasattr(X, "iloc") and X.columns.is_unique and all(isinstance(name, str) for name in X.columns)
    require(fits, "X", type(X).__name__, "a pandas.DataFrame, with texts as names of columns, each once")


def _require_columns(place: str, names: Collection[str], known: Collection[str]) -> None:
    for name in [*names, *known]:
        if name not in known:
            raise unknown(f"column of {place}", name, known)
        require(name in names, f"column {name!r} of {place}", "missing", f"there, beside {[*names]}")


def _numbers(X: Any, name: str) -> Any:
    """Return the values of a column of numbers, NaN in gaps."""
    require(X[name].dtype.kind in NUMBERS, f"type of column {name!r}", str(X[name].dtype), "of numbers, as was told")
    values = X[name].to_numpy(float, na_value=np.nan)
    require_sizes(f"column {name!r}", np.where(np.isnan(values), 0, values), "a gap is NaN")
    return values


def words_of(column: Any) -> Any:
    """Return the texts of a column of categories, "1" of the number 1.0."""
    return column.astype("string").str.replace(r"^(-?\d+)\.0$", r"\1", regex=True)
