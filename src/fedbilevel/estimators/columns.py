"""Check the values of tables: gaps, numbers whose squares overflow, and names that are spelt in several ways."""

import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data.columns import MOST, as_number
from fedbilevel.data.columns import moments as exact_moments
from fedbilevel.errors import ConfigurationError, DataWarning
from fedbilevel.extending import printable, require, unknown, warn

ABSURD = 50  # a number is far away if its distance to the median is this many times the median distance
SHARE = 0.9  # there is a warning if few numbers cause this share of the variance
Numbers = NDArray[Any]
"""An array of numbers of any type."""
MANY = 20  # no warning for fewer categories: in a small table, each of them may have only one row


def refusal(field: str, has: str, got: object, allowed: str, place: str = "") -> ConfigurationError:
    """Return the error "FIELD has HAS; allowed: ALLOWED" for a column or a table.

    Args:
        field: the column or the table.
        has: what it has, in words.
        got: what it has, for the attribute `got` of the error.
        allowed: what is allowed, in words.
        place: the place in the column, such as ", row 3"; the path of the error ends with it.
    """
    return ConfigurationError(
        path=f"{field}{place}", got=got, allowed=allowed, message=f"{field} has {has}; allowed: {allowed}"
    )


def numbers(field: str, values: Any) -> NDArray[np.float64]:
    """Return values as floats of the same shape, with NaN in gaps.

    Raises:
        ConfigurationError: the values are dates, complex numbers, or texts that are not numbers.
    """
    try:
        array = np.asarray(values)
        if array.dtype.kind == "O":
            array = np.reshape([np.nan if _is_gap(one) else float(one) for one in array.flat], array.shape)
        found = array.astype(np.float64) if array.dtype.kind in "biufSU" else None
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"{field} must hold numbers: {error}") from error
    require(found is not None, f"type of {field}", str(array.dtype), "numbers")
    assert found is not None
    return found


def numbers_asked(question: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the entry `name` of a server's question to a site as numbers of this shape.

    Raises:
        ConfigurationError: the question has no such entry, or the entry does not contain numbers of this shape.
    """
    field = f"{name} of the question"
    require(name in question, field, "missing", f"numbers of the shape {shape}")
    found = numbers(field, question[name])
    require(found.shape == shape, field, found.shape, f"{shape}")
    return found


def require_in_frame(names: Iterable[str], frame: Any) -> None:
    """Refuse a site's data frame if it lacks one of these columns of the study."""
    for name in names:
        if name not in frame.columns:
            error = unknown("column", name, frame.columns)
            error.message = f"the table has no column {name!r} of the study; it has {', '.join(error.allowed)}"
            raise error


def require_frame(X: Any) -> None:
    """Refuse a value that is not a data frame, and column names that are not texts or occur twice."""
    named = hasattr(X, "iloc") and all(isinstance(name, str) for name in X.columns)
    twice = X.columns[X.columns.duplicated()].unique().tolist() if named else []
    allowed = "a pandas.DataFrame, with texts as names of columns, each once"
    which = f"; more than once: {', '.join(map(repr, twice[:5]))}" * bool(twice)
    require(named and not twice, "X", type(X).__name__, allowed + which)


def require_sizes(field: str, column: NDArray[np.float64], gaps: str) -> None:
    """Refuse a column with a gap, an infinity or a number above MOST; `gaps` says what to do about gaps."""
    bad = np.flatnonzero(~(np.abs(column) <= MOST))
    if bad.size:
        row, got, allowed = bad[0], float(column[bad[0]]), f"a number from {-MOST:g} to {MOST:g}; {gaps}"
        if math.isnan(got):
            has = f"a gap (NaN), first in row {row}, counted from 0"
            raise refusal(field, has, "a gap", allowed, f", row {row}")
        require(False, f"{field}, row {row}", got, allowed)


def require_values(name: str, values: Any, fits: Any, allowed: str) -> None:
    """Refuse a column of a site's table in which some values are not allowed. The message has the number of such rows.

    Args:
        name: the name of the column.
        values: the values of the column, as an array of shape (n,).
        fits: which of them are allowed, as booleans of the same shape.
        allowed: the allowed values, in words.
    """
    if count := int(np.sum(~fits)):
        examples = list(dict.fromkeys(values[~fits].tolist()))[:3]
        such = ", ".join(printable(repr(one)) for one in examples)
        has = f"a value that is not allowed ({such}) in {count} row{'s' * (count > 1)}"
        raise refusal(f"column {name!r}", has, examples, allowed)


def require_numerals(name: str, column: Any) -> None:
    """Refuse a column of numbers that has texts. The message shows some of the texts that are not numbers."""
    texts = column.to_numpy(object)
    fits = np.array(
        [_is_gap(one) or not isinstance(one, str) or (_is_numeral(one) and "," not in one) for one in texts]
    )
    require_values(name, texts, fits, "a number with a decimal point, or an empty entry")


def moments(field: str, column: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean of a column and the sum of squared differences from the mean.

    The sum is exactly 0 if all numbers are equal.

    Warns if few numbers cause most of the sum, such as a code like 9999 for a missing value.

    Raises:
        ConfigurationError: the numbers differ by so little that the squares of the differences are rounded to 0.
    """
    mean, squares = exact_moments(column)
    fits = squares >= len(column) / MOST**2 or bool(np.all(column == column[:1].sum()))
    allowed = f"{1 / MOST:g} or more, or 0: measure it in a smaller unit"
    require(fits, f"standard deviation of {field}", f"below {1 / MOST:g}", allowed)
    if squares > 0:
        _warn_of_codes(field, column)
    return mean, squares


def _warn_of_codes(field: str, column: NDArray[np.float64]) -> None:
    """Warn of numbers that are far from the median and cause most of the variance.

    A number is far from the median if its distance is ABSURD times the median distance. If more than half of the
    numbers are equal to the median, as in a column of 0 and 1, the median distance of the other numbers is used.
    """
    away = np.abs(column - np.median(column))
    far = away > ABSURD * (np.median(away) or np.quantile(away[away > 0], 0.5, method="lower"))
    if far.any():
        share = float(np.sum((away[far] / away.max()) ** 2) / np.sum((away / away.max()) ** 2))
        if share > SHARE:
            rare = ", ".join(f"{number:g}" for number in np.unique(column[far])[:3])
            text = f"{far.sum()} of {len(column)} numbers of {field}, such as {rare}, cause {share:.0%} of its variance"
            how = "leave these entries empty (NaN), or list the codes in the setting `gaps` of a study"
            warn(
                DataWarning(f"{text}. If they are codes for gaps, {how}; if not, the logarithm may be a better feature")
            )


def labels(field: str, given: Any, count: int, allowed: str) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Return the distinct labels in order, and for each of `count` entries the index of its label.

    Raises:
        ConfigurationError: there is a gap, the shape is wrong, or the labels cannot be sorted, such as numbers mixed
            with texts.
    """
    array = np.asarray(given, object)
    array = array[:, 0] if array.shape == (count, 1) else array
    if array.shape != (count,):
        allowed = f"{allowed}, {count} in all"
        require(array.ndim > 0, field, given, allowed)
        raise refusal(field, f"the shape {array.shape}", array.shape, allowed)
    gap = next((place for place, one in enumerate(array) if _is_gap(one)), None)
    if gap is not None:
        has = f"a gap, first in entry {gap}, counted from 0"
        raise refusal(field, has, "a gap", allowed, f", entry {gap}")
    try:
        names, members = np.unique(array, return_inverse=True)
    except TypeError:
        kinds = " and ".join(sorted({type(one).__name__ for one in array}))
        raise ConfigurationError(path=field, got=kinds, allowed=f"of one type, such as {field}.astype(str)") from None
    warn_of_spellings(field, names)
    return np.array(names.tolist()), members


def sites_of(model: Any, method: str, groups: Any, count: int) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Return the sites and, for each row, the index of its site. Warn if `groups` was not passed to the method."""
    if groups is None:
        name = type(model).__name__
        text = (
            f"{name}.{method} got no groups, so all rows count as rows of one site. Pass groups=frame['site'], or "
            "groups=np.zeros(len(X)) for a single site. cross_val_score and searches pass sites on after "
            f"sklearn.set_config(enable_metadata_routing=True), with {name}().set_{method}_request(groups=True) "
            "and params={'groups': frame['site']}"
        )
        warn(DataWarning(text))
        groups = np.zeros(count, int)
    return labels("groups", groups, count, "the site of each row, such as frame['site']")


def warn_of_spellings(field: str, names: Iterable[Any]) -> None:
    """Warn of names that differ only by blanks, by case, by the coding of a character, or by the writing of a number.

    "01" and "1" are the same number. From a file whose entries in a column are all numbers, pandas reads "01" as 1.
    """
    spellings: dict[str, list[str]] = {}
    for name in names:
        if isinstance(name, str):
            seen = [one for one in unicodedata.normalize("NFKC", name) if one.isprintable() and one != " "]
            spellings.setdefault(as_number("".join(seen).casefold()), []).append(name)
    if several := [", ".join(map(repr, found)) for found in spellings.values() if len(found) > 1]:
        only = "blanks, by case or by the writing of a number"
        text = f"{field} has names that differ only by {only}, and count as different: {'; '.join(several)}"
        warn(DataWarning(f"{text}. If they mean the same, spell them alike, as .str.strip().str.lower() does"))


def warn_of_words(column: str, rows: Mapping[str, int]) -> None:
    """Warn of a column in which most texts are numbers, or in which most texts occur in a single row."""
    single = sum(count == 1 for count in rows.values())
    if not _warn_of_numerals(column, rows) and len(rows) >= MANY and 2 * single > len(rows):
        text = f"column {column!r} has {len(rows)} texts as categories, {single} of them in a single row each"
        how = "convert dates and texts with units to numbers, and leave out columns that identify a row"
        feature = "each text becomes a feature (in a study, each text that is not hidden)"
        warn(DataWarning(f"{text}, and {feature}: {how}"))


def _warn_of_numerals(column: str, words: Collection[str]) -> bool:
    """Warn if most texts of a column are numbers, for example because it has one "?". Return whether this is so."""
    others = [word for word in words if not _is_numeral(word)]
    if len(words) > 2 * len(others):
        but = f", but not {', '.join(map(repr, others[:5]))}" if others else ""
        text = f"column {column!r} has {len(words)} texts as categories; {len(words) - len(others)} are numbers{but}"
        gaps = f"na_values={others[:5]}" if others else ""
        commas = [word for word in words if "," in word and word not in others]
        points = any("." in word for word in commas)
        if commas:
            marks = ', thousands="."' if points else ""
            how = f'read_csv(…, decimal=","{marks}{gaps and ", "}{gaps})'
        else:
            how = f"read_csv(…, {gaps}) or pd.to_numeric" if gaps else "pd.to_numeric"
        in_file = ["write them with a decimal point" + " and without points between thousands" * points] * bool(commas)
        in_file += ["leave gaps empty, or list their codes in the setting `gaps` of a study"] * bool(others)
        corrected = f"correct the file ({'; '.join(in_file)}), or " * bool(in_file)
        codes = "if they are codes, name the column in `categorical`"
        warn(DataWarning(f"{text}. If they are measurements, {corrected}use {how}; {codes}"))
        return True
    return False


def _is_numeral(word: str) -> bool:
    """Return whether a text is a number. Numbers with a decimal comma count too, such as "1,5" or "1.234,5"."""
    if re.fullmatch(r"[+-]?\d{1,3}(\.\d{3})+,\d+", word.strip()):
        return True
    try:
        return math.isfinite(float(word.replace(",", ".")))
    except ValueError:
        return False


def _is_gap(value: Any) -> bool:
    """Return whether a value is None, NaN or another gap of pandas. (Such gaps do not equal themselves.)"""
    same = value == value
    return value is None or not (isinstance(same, bool | np.bool_) and same)
