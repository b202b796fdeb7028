"""Turn a table with categories and gaps into numbers, in the same way at all sites, which need not show rows for this.

For each column of numbers, a site sends the count of numbers, their mean, and the sum of squared differences from the
mean. For each column of categories, it sends how many rows have each category. These statistics are added up over
sites. With the sums, a number a becomes (a − mean)/deviation, and a gap becomes 0, which is the mean. A column of
categories becomes a column of 0 and 1, an indicator, for each category; in a gap all its indicators are 0. `fit` on the
rows of all sites gives the same result, up to rounding.

A site writes its statistics with `save`, as a text that a person can read before it is sent, and `load` adds up the
texts of several sites. Sums are exact and rounded once, so that they do not depend on the order of sites.

The statistics reveal something about rows. The mean of one number is that number, a category with one row reveals that
a patient has this category, and a column of names reveals all names. So `save` leaves out statistics of fewer than
`min_count` rows. This does not protect a single number among zeros. It also does not protect a row from a reader who
gets two texts of a site, one with the row and one without it.
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
from fedbilevel.data.columns import Summaries, added, checked, names_of, prepared, without_rare
from fedbilevel.errors import ConfigurationError, DataWarning
from fedbilevel.estimators.columns import (
    moments,
    require_frame,
    require_numerals,
    require_sizes,
    warn_of_spellings,
    warn_of_words,
)
from fedbilevel.extending import (
    errors_in,
    in_a_line,
    parse_json,
    read_bytes,
    require,
    require_count,
    unknown,
    warn,
    write_text,
)

__all__ = ["Preparer", "Summaries", "read_saved", "words_of"]

T = TypeVar("T")
NUMBERS = "biuf"  # the kinds of NumPy's dtypes of numbers
KINDS_OF_COLUMN = "numbers", "words"


class Preparer(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A transformer of data frames: columns become standardised numbers and indicators of categories.

    Args:
        categorical: the names of columns of categories. A column of texts or of pandas' categories need not be named,
            unless a site has only gaps in it. Columns of codes must be named, even if the codes are 0 and 1, because
            the mean of such a column would reveal a count of rows.

    `fit` and `load` set `columns_`, the statistics of each column. The name of a category is its text; the numbers 1.0
    and 1 have the same text.
    """

    def __init__(self, *, categorical: Sequence[str] = ()) -> None:
        self.categorical = categorical

    def fit(self, X: Any, y: Any = None) -> Self:
        """Compute the statistics of the columns of a data frame, such as a site's rows. Return the preparer.

        Raises:
            ConfigurationError: X is not a data frame, a categorical column is missing, or a number is infinite.
        """
        require_frame(X)
        for name in self.categorical:
            if name not in X.columns:
                raise unknown("categorical column", name, X.columns)
        summaries: Summaries = {}
        for name in X.columns:
            bears = name in self.categorical or X[name].dtype.kind in NUMBERS + "OSU"
            require(
                bears, f"type of column {name!r}", str(X[name].dtype), "numbers or texts, or named in `categorical`"
            )
            if name in self.categorical or X[name].dtype.kind not in NUMBERS:
                summaries[name] = {"categories": words_of(X[name]).value_counts().to_dict(), "rarer": False}
                if name not in self.categorical and str(X[name].dtype) != "category":
                    warn_of_words(name, summaries[name]["categories"])
            else:
                values = _numbers(X, name)
                values = values[~np.isnan(values)]
                mean, squares = moments(f"column {name!r}", values)
                summaries[name] = {"count": len(values), "mean": mean, "squares": squares}
        return self._keep({"X": summaries})

    def save(self, file: str | Path, *, min_count: int = 8) -> None:
        """Write the statistics to a file as JSON, with a line for each column.

        Args:
            min_count: the least number of rows from which a statistic may be computed. The mean of fewer numbers, and
                categories with fewer rows, are left out. If all sites leave out the mean of a column, all its entries
                are treated as gaps. 1: nothing is left out.
        """
        summaries = self.summaries(min_count).items()
        lines = [json.dumps({name: summary}, ensure_ascii=False)[1:-1] for name, summary in summaries]
        write_text(Path(file), "{\n" + ",\n".join(lines) + "\n}\n")

    def summaries(self, min_count: int = 8) -> Summaries:
        """Return the statistics that `save` writes, by column."""
        check_is_fitted(self)
        require_count("min_count", min_count)
        return without_rare(self.columns_, min_count)

    @classmethod
    def sum_of(cls, parts: Mapping[str, Summaries]) -> Self:
        """Return the preparer with the sum of the statistics of several sites; `parts` has them by site name.

        Raises:
            ConfigurationError: a site has other columns than the first site, or columns of another kind.
            ValueError: the statistics of a site do not have the form that `summaries` returns.
        """
        for summaries in parts.values():
            checked(summaries)
        return cls()._keep(parts)

    @classmethod
    def load(cls, *files: str | Path) -> Self:
        """Read files that `save` wrote, one or several, and add up their statistics. Return the preparer with the sum.

        Numbers are read exactly, and columns come in the order of the first file.

        Raises:
            DataError: a file cannot be read, or was not written by `save`.
            ConfigurationError: a file has other columns than the first file, or columns of another kind.
        """
        require(
            len({Path(file).resolve() for file in files}) == len(files) > 0, "files", files, "one or more, each once"
        )
        return cls()._keep({str(file): read_saved(Path(file), checked) for file in files})

    def transform(self, X: Any) -> Any:
        """Return a data frame of numbers without gaps, with the rows of X.

        Raises:
            ConfigurationError: a column is missing or unknown, or has a category that no site has named. (If some site
                has rarer categories in this column, which `save` does not name, an unknown category is treated as a gap
                instead.)
        """
        check_is_fitted(self)
        require_frame(X)
        _require_columns("X", X.columns, self.columns_)
        table = {}
        for name, summary in self.columns_.items():
            if "categories" not in summary:
                table[name] = _numbers(X, name)
                continue
            words = words_of(X[name])
            if others := set(words.dropna()) - summary["categories"].keys():
                if not summary["rarer"]:
                    raise unknown(f"category of column {name!r}", min(others), summary["categories"])
                _warn_of_unknown(name, words, others, summary["categories"])
                warn_of_spellings(f"column {name!r}", [*summary["categories"], *sorted(others)])
            table[name] = words.astype(object).where(words.notna(), None).to_numpy()
        return type(X)(prepared(self.columns_, table), index=X.index)

    def get_feature_names_out(self, input_features: Any = None) -> Any:
        """Return the names of the columns that `transform` makes. An indicator has the name COLUMN_CATEGORY."""
        check_is_fitted(self)
        return np.asarray(names_of(self.columns_), object)

    def _keep(self, parts: Mapping[str, Summaries]) -> Self:
        """Set `columns_` to the sum of the statistics of several sites. Return the preparer."""
        (first, known), *_ = parts.items()
        for place, summaries in parts.items():
            _require_columns(place, summaries, known)
            for name, one in summaries.items():
                here, there = (KINDS_OF_COLUMN["categories" in each] for each in (one, known[name]))
                how = "name texts that mean a gap (gaps, na_values), or codes in `categorical`"
                require(here == there, f"column {name!r} of {place}", here, f"{there}, as in {first}: {how}")
        self.columns_ = {name: added([summaries[name] for summaries in parts.values()]) for name in known}
        for name, one in self.columns_.items():
            warn_of_spellings(f"column {name!r}", one.get("categories", ()))
        for name, count in Counter(self.get_feature_names_out()).items():
            require(count == 1, f"column {name!r}", "made twice", "made once: rename a column or category")
        return self


def read_saved(file: Path, read: Callable[[Any], T]) -> T:
    """Read the JSON that `save` wrote, and return `read`(content).

    Raises:
        DataError: the file cannot be read, or was not written by `save`.
        ConfigurationError: a value in the file is not allowed; the message begins with the file.
    """
    foreign = f"{file} is not the file of a model or of a preparer, as `save` writes it"
    try:
        with errors_in(foreign):
            return read(parse_json(read_bytes(file)))
    except (ConfigurationError, DataError):
        raise
    except OSError as error:
        raise DataError(f"the file {str(file)!r} cannot be read: {in_a_line(error)}.", path=file) from error
    except KeyError as error:
        raise DataError(f"{foreign}: it has no entry {error}.", path=file) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{foreign}: {in_a_line(error)}.", path=file) from error


def _require_columns(place: str, names: Collection[str], known: Collection[str]) -> None:
    for name in [*names, *known]:
        if name not in known:
            raise unknown(f"column of {place}", name, known)
        require(name in names, f"column {name!r} of {place}", "missing", f"present, as the columns {[*names]} are")


def _warn_of_unknown(name: str, words: Any, others: Collection[str], known: Collection[str]) -> None:
    """Warn of categories that no site has named, and that are treated as gaps because a site has hidden rare ones."""
    count = int(words.isin(list(others)).sum())
    such = ", ".join(repr(one) for one in sorted(others)[:5])
    text = f"column {name!r} has categories that are not known ({such}) in {count} row{'s' * (count > 1)}"
    what = "they may be rare categories that a site has hidden, and are treated as gaps"
    warn(DataWarning(f"{text}: {what}. Correct them if they are misspelt; known are: {', '.join(known) or 'none'}"))


def _numbers(X: Any, name: str) -> Any:
    """Return the values of a column of numbers, with NaN in gaps."""
    if X[name].dtype.kind in "OSU":
        require_numerals(name, X[name])
    require(
        X[name].dtype.kind in NUMBERS,
        f"type of column {name!r}",
        str(X[name].dtype),
        "of numbers, as when the preparer was fitted",
    )
    values = X[name].to_numpy(float, na_value=np.nan)
    require_sizes(f"column {name!r}", np.where(np.isnan(values), 0, values), "a gap is NaN")
    return values


def words_of(column: Any) -> Any:
    """Return the texts of a column of categories; the text of the number 1.0 is "1"."""
    return column.astype("string").str.replace(r"^(-?\d+)\.0$", r"\1", regex=True)
