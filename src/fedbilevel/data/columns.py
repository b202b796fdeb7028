"""Add up the summaries of columns that sites send, so that all sites can encode rows as numbers in the same way.

A table has columns by name. A column of numbers is an array of floats, with NaN in gaps. A column of words is an array
of objects, with None in gaps. A site sends a summary of each column. For numbers it is {"count", "mean", "squares"};
"squares" is the sum of squared differences from the mean. For words it is {"categories", "rarer"}: the numbers of rows
by category, and whether there are other categories.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
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
    "Summaries",
    "added",
    "as_number",
    "checked",
    "deviation",
    "hidden_entries",
    "moments",
    "names_of",
    "penalty_labels",
    "prepared",
    "read_summaries",
    "summaries_of",
    "without_rare",
]

ColumnValues = NDArray[Any]
Summaries = dict[str, dict[str, Any]]
MOST = 1e100
"""The largest allowed number.

The smallest allowed standard deviation is 1/MOST. With these limits, sums of squares neither overflow nor become 0.
"""
MOST_ROWS = 2**53  # the largest number of rows, since floats cannot count further


def moments(numbers: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean of numbers, and the sum of squared differences from the mean.

    The sum is exactly 0 if all numbers are equal.
    """
    first = numbers[:1].sum()  # equal numbers have exactly this mean
    mean = float(first + (numbers - first).sum() / max(len(numbers), 1))
    return mean, float(((numbers - mean) ** 2).sum())


def summaries_of(table: Mapping[str, ColumnValues]) -> Summaries:
    """Return the summaries of a table's columns, by name."""
    summaries: Summaries = {}
    for name, column in table.items():
        if column.dtype.kind == "O":
            summaries[name] = {"categories": dict(Counter(word for word in column if word is not None)), "rarer": False}
        else:
            mean, squares = moments(numbers := column[~np.isnan(column)])
            summaries[name] = {"count": len(numbers), "mean": mean, "squares": squares}
    return summaries


def without_rare(summaries: Summaries, least: int) -> Summaries:
    """Return summaries without the categories and the means that come from fewer than `least` rows."""
    shown: Summaries = {}
    for name, one in summaries.items():
        if "categories" in one:
            named = {word: rows for word, rows in one["categories"].items() if rows >= least}
            one = {"categories": named, "rarer": one["rarer"] or named != one["categories"]}
        elif one["count"] < least:
            one = {"count": 0, "mean": 0.0, "squares": 0.0}
        shown[name] = one
    return shown


def hidden_entries(summaries: Summaries, table: Mapping[str, ColumnValues]) -> dict[str, NDArray[np.bool_]]:
    """Return, for each column by its name, which of its entries a site's summaries leave out, as booleans.

    Left out are words that are not among the categories, and all numbers of a column whose summary has no mean. The
    site treats such entries as gaps. If it used them, its first gradient would reveal them.
    """
    hidden = {}
    for name, one in summaries.items():
        if "categories" in one:
            hidden[name] = np.array([word not in one["categories"] for word in table[name]], bool)
        else:
            hidden[name] = np.full(len(table[name]), not one["count"])
    return hidden


def as_number(word: str) -> str:
    """Return a text that is the same for all ways to write a number, such as "01" and "1"; other texts do not change.

    Only digits with a decimal point are numbers here, and not "1e2", which may be a code.
    """
    return str(Decimal(word).normalize()) if re.fullmatch(r"[+-]?\d+(\.\d*)?", word, re.ASCII) else word


def penalty_labels(summaries: Summaries, penalty: str, own: Mapping[str, str]) -> list[str]:
    """Return a label for each column that `prepared` makes. Columns with the same label share a penalty.

    Args:
        summaries: the summaries of the columns.
        penalty: "one": all columns share a penalty; "column": each original column has a penalty; "feature": each
            prepared column has a penalty, such as each indicator.
        own: column -> label, for the columns whose label does not follow from `penalty`, such as the columns of a
            group.
    """
    labels = []
    for column, one in summaries.items():
        for word in one.get("categories", [""]):
            labels.append(own.get(column, {"one": "all", "column": column, "feature": f"{column} {word}"}[penalty]))
    return labels


def added(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up several sites' summaries of one column.

    Sums are exact and rounded once, so that the order of sites has no effect.
    """
    if "categories" in summaries[0]:
        rows = sum((Counter(one["categories"]) for one in summaries), Counter[str]())
        return {"categories": dict(sorted(rows.items())), "rarer": any(one["rarer"] for one in summaries)}
    exact = [(one["count"], Fraction(one["mean"]), Fraction(one["squares"])) for one in summaries]
    count = sum(n for n, _, _ in exact)
    mean = sum(n * m for n, m, _ in exact) / Fraction(max(count, 1))
    return {"count": count, "mean": float(mean), "squares": float(sum(s + n * (m - mean) ** 2 for n, m, s in exact))}


def deviation(summary: Mapping[str, Any]) -> float:
    """Return the standard deviation of a column of numbers; 1 if all numbers are equal, infinity if there are none."""
    return float(np.sqrt(summary["squares"] / summary["count"]) or 1.0) if summary["count"] else np.inf


def prepared(summaries: Summaries, table: Mapping[str, ColumnValues]) -> dict[str, NDArray[np.float64]]:
    """Encode columns as numbers without gaps.

    A number a becomes (a − mean)/deviation, and a gap becomes 0. A column of words becomes an indicator for each
    category.
    """
    made: dict[str, NDArray[np.float64]] = {}
    for name, one in summaries.items():
        if "categories" in one:
            made |= {f"{name}_{word}": (table[name] == word).astype(float) for word in one["categories"]}
        else:
            made[name] = np.nan_to_num((table[name] - one["mean"]) / deviation(one))
    return made


def names_of(summaries: Summaries) -> list[str]:
    """Return the names of the columns that `prepared` makes. An indicator has the name COLUMN_CATEGORY."""
    each = ((name, one.get("categories")) for name, one in summaries.items())
    return [made for name, rows in each for made in ([name] if rows is None else [f"{name}_{word}" for word in rows])]


def checked(summaries: Summaries) -> Summaries:
    """Return a site's summaries; raise ValueError if they do not have the form that the module describes."""
    for name, one in summaries.items():
        match one:
            case {"categories": dict(n), "rarer": bool(), **more} if not more and all(map(_is_count, n.values())):
                continue
            case {"count": int(n), "mean": float(m), "squares": float(s), **more} if not more and (
                (n == 0 or _is_count(n)) and type(n) is int and abs(m) <= MOST and 0 <= s <= MOST**3
            ):
                continue
        raise ValueError(f"for column {name!r} it has {one}")
    return summaries


def _is_count(rows: object) -> bool:
    return type(rows) is int and 0 < rows <= MOST_ROWS


def read_summaries(file: Path) -> Summaries:
    """Read a file that `estimators.Preparer.save` wrote, with the summaries of one site or the sum over sites.

    Raises:
        DataError: the file cannot be read, or has other content.
    """
    try:
        return checked(parse_json(read_bytes(file)))
    except DataError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file} is not what `Preparer.save` writes: {in_a_line(error)}.", path=file) from error
