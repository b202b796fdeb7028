"""Columns that sites agree on without showing rows: what each site tells of its columns, sums of it, rows of numbers.

A table is a column by name: of numbers, (n,) floats with NaN in gaps, or of words, (n,) objects with None in gaps. Told
is of a column of numbers {"count", "mean", "squares"}, the squares being about the mean, and of a column of words
{"categories": rows by name, "rarer": whether there are others}.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data.files import DataError, read_bytes
from fedbilevel.reading import parse_json
from fedbilevel.wording import in_a_line

__all__ = [
    "MOST",
    "Told",
    "added",
    "checked",
    "deviation",
    "moments",
    "names_of",
    "penalty_labels",
    "prepared",
    "read_told",
    "told_of",
    "untold",
    "without_rare",
]

ColumnValues = NDArray[Any]
Told = dict[str, dict[str, Any]]
MOST = 1e100
"""The largest number, and 1/MOST the smallest standard deviation: sums of squares neither overflow nor become 0."""
MOST_ROWS = 2**53  # of a table: floats count no further


def moments(numbers: NDArray[np.float64]) -> tuple[float, float]:
    """Compute the mean and the sum of squares about it, exactly 0 where all numbers are equal."""
    first = numbers[:1].sum()  # equal numbers have exactly this mean
    mean = float(first + (numbers - first).sum() / max(len(numbers), 1))
    return mean, float(((numbers - mean) ** 2).sum())


def told_of(table: Mapping[str, ColumnValues]) -> Told:
    """Return what the columns of a table tell."""
    told: Told = {}
    for name, column in table.items():
        if column.dtype.kind == "O":
            told[name] = {"categories": dict(Counter(word for word in column if word is not None)), "rarer": False}
        else:
            mean, squares = moments(numbers := column[~np.isnan(column)])
            told[name] = {"count": len(numbers), "mean": mean, "squares": squares}
    return told


def without_rare(told: Told, least: int) -> Told:
    """Leave out categories of fewer rows than `least`, and what fewer numbers tell."""
    shown: Told = {}
    for name, one in told.items():
        if "categories" in one:
            named = {word: rows for word, rows in one["categories"].items() if rows >= least}
            one = {"categories": named, "rarer": one["rarer"] or named != one["categories"]}
        elif one["count"] < least:
            one = {"count": 0, "mean": 0.0, "squares": 0.0}
        shown[name] = one
    return shown


def untold(told: Told, table: Mapping[str, ColumnValues]) -> dict[str, NDArray[np.bool_]]:
    """Return which entries of each column are not told: words that are not named, and all numbers where they have no
    mean. They count as gaps at their site: used, they would be plain in the first gradient."""
    hidden = {}
    for name, one in told.items():
        if "categories" in one:
            hidden[name] = np.array([word not in one["categories"] for word in table[name]], bool)
        else:
            hidden[name] = np.full(len(table[name]), not one["count"])
    return hidden


def penalty_labels(told: Told, penalty: str, own: Mapping[str, str]) -> list[str]:
    """Name the penalty of each column that `prepared` makes.

    Args:
        penalty: "one" for all, or one for each "column" or "feature", that is, indicator.
        own: the label of a column that has another penalty than these.
    """
    labels = []
    for column, one in told.items():
        for word in one.get("categories", [""]):
            labels.append(own.get(column, {"one": "all", "column": column, "feature": f"{column} {word}"}[penalty]))
    return labels


def added(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up what several sites told of one column, exactly, with a single rounding: their order changes no bit."""
    if "categories" in told[0]:
        rows = sum((Counter(one["categories"]) for one in told), Counter[str]())
        return {"categories": dict(sorted(rows.items())), "rarer": any(one["rarer"] for one in told)}
    exact = [(one["count"], Fraction(one["mean"]), Fraction(one["squares"])) for one in told]
    count = sum(n for n, _, _ in exact)
    mean = sum(n * m for n, m, _ in exact) / Fraction(max(count, 1))
    return {"count": count, "mean": float(mean), "squares": float(sum(s + n * (m - mean) ** 2 for n, m, s in exact))}


def deviation(told: Mapping[str, Any]) -> float:
    """Return the standard deviation of numbers; 1 where all are equal, infinite where there are none."""
    return float(np.sqrt(told["squares"] / told["count"]) or 1.0) if told["count"] else np.inf


def prepared(told: Told, table: Mapping[str, ColumnValues]) -> dict[str, NDArray[np.float64]]:
    """Return columns without gaps: (a − mean)/deviation and 0 in a gap, or an indicator for each category."""
    made: dict[str, NDArray[np.float64]] = {}
    for name, one in told.items():
        if "categories" in one:
            made |= {f"{name}_{word}": (table[name] == word).astype(float) for word in one["categories"]}
        else:
            made[name] = np.nan_to_num((table[name] - one["mean"]) / deviation(one))
    return made


def names_of(told: Told) -> list[str]:
    """Return the names of the columns that `prepared` makes: of an indicator COLUMN_CATEGORY."""
    each = ((name, one.get("categories")) for name, one in told.items())
    return [made for name, rows in each for made in ([name] if rows is None else [f"{name}_{word}" for word in rows])]


def checked(told: Told) -> Told:
    """Return what a site told, if it has the form that the module describes. ValueError otherwise."""
    for name, one in told.items():
        match one:
            case {"categories": dict(n), "rarer": bool(), **more} if not more and all(map(_is_count, n.values())):
                continue
            case {"count": int(n), "mean": float(m), "squares": float(s), **more} if not more and (
                (n == 0 or _is_count(n)) and type(n) is int and abs(m) <= MOST and 0 <= s <= MOST**3
            ):
                continue
        raise ValueError(f"of column {name!r} it says {one}")
    return told


def _is_count(rows: object) -> bool:
    return type(rows) is int and 0 < rows <= MOST_ROWS


def read_told(file: Path) -> Told:
    """Read what a site, or all of them together, told, as `estimators.Preparer.save` writes it.

    Raises:
        DataError: the file cannot be read, or has other content.
    """
    try:
        return checked(parse_json(read_bytes(file)))
    except DataError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is not what `Preparer.save` writes: {in_a_line(error)}.") from error
