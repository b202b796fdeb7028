"""Read and check a site's CSV file for the task `tables`: features, target, weights and patients."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedbilevel.core.errors import ConfigurationError, DataWarning, require, unknown, warn
from fedbilevel.data.clients import dealt, generator_of_site, in_order_of_time, strata_of
from fedbilevel.data.columns import (
    MOST,
    ColumnValues,
    Summaries,
    deviation,
    hidden_entries,
    prepared,
    summaries_of,
    without_rare,
)
from fedbilevel.data.table_files import Texts, numbers_of, words_of
from fedbilevel.tasks.task import Floats

OutcomeName = Literal["binary", "classes", "count", "continuous", "survival"]
WORDS = ("binary", "classes")  # the outcomes whose target is a category


@dataclass(frozen=True, kw_only=True)
class ColumnRoles:
    """The roles of columns, which are the same in all sites' tables. The fields are arguments of `tables`."""

    outcome: OutcomeName
    target: str
    event: str
    positive: str
    patient: str
    sample_weight: str
    categorical: Sequence[str]
    drop: Sequence[str]
    absent: str
    min_count: int

    @property
    def named(self) -> list[str]:
        """Return the columns that have another role than feature, such as the target."""
        event = self.event if self.outcome == "survival" else ""
        return [name for name in (self.target, event, self.patient, self.sample_weight) if name]


@dataclass
class SiteFile:
    """A site's rows, without rows that lack a target.

    Args:
        name: the name of the site.
        where: the name of the file, for messages.
        features: columns of numbers or words, by name.
        target: arrays by name: "label" with words or numbers; or "time" and "event".
        weight: the weight of each row; at least one is above 0.
        patient: the number of the patient of each row.

    Attributes:
        stratum: the index of each row's class, or whether it has an event; rows are divided evenly by this. 0 if the
            target is a number.
    """

    name: str
    where: str
    features: dict[str, ColumnValues]
    target: dict[str, ColumnValues]
    weight: Floats
    patient: np.ndarray
    stratum: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        key = "event" if "event" in self.target else "label"
        words = self.target[key].dtype.kind == "O"
        even = np.zeros(len(self), int)
        self.stratum = (
            np.unique(self.target[key].astype(str), return_inverse=True)[1] if words or key == "event" else even
        )

    def __len__(self) -> int:
        return len(self.weight)

    def some(self, rows: np.ndarray) -> "SiteFile":
        """Return the file with only some of its rows, given by their numbers."""

        def taken(columns: Mapping[str, ColumnValues]) -> dict[str, ColumnValues]:
            return {name: column[rows] for name, column in columns.items()}

        parts = taken(self.features), taken(self.target), self.weight[rows], self.patient[rows]
        return SiteFile(self.name, self.where, *parts)

    def split(self, share: float, seed: int, stream: int) -> tuple["SiteFile", "SiteFile"]:
        """Set aside a share of the rows of each class, or of rows with and without event. Return (kept, aside).

        The rows of a patient are not divided. At least one row is kept.
        """

        def aside(stratum: np.ndarray, rng: np.random.Generator) -> np.ndarray:
            mixed = rng.permutation(len(stratum))
            order, place = mixed[np.argsort(stratum[mixed], kind="stable")], np.arange(len(stratum))
            out = np.zeros(len(stratum), bool)
            out[order] = np.floor((place + 1) * share + 1e-9) > np.floor(place * share + 1e-9)
            return out

        out = self._by_patient(aside, seed, stream)
        return self.some(np.flatnonzero(~out)), self.some(np.flatnonzero(out))

    def folds(self, count: int, seed: int) -> np.ndarray:
        """Draw the fold of each row.

        Classes or events are spread evenly over folds, and a patient's rows are in the same fold.
        """
        return self._by_patient(lambda stratum, rng: dealt(stratum, count, rng), seed, 1)

    def _by_patient(self, deal: Any, seed: int, stream: int) -> np.ndarray:
        """Apply `deal` to the patients, and return the result for each row.

        Random draws do not depend on other sites.
        """
        strata, patient = strata_of(self.patient, self.stratum)
        return deal(strata, generator_of_site(seed, self.name, stream))[patient]

    def summaries(self, columns: ColumnRoles) -> Summaries:
        """Return the summaries that the site reports: of its features and, unless it is a time, of its target."""
        target = {columns.target: self.target["label"]} if "label" in self.target else {}
        return without_rare(summaries_of(self.features), columns.min_count) | summaries_of(target)


def site_table(name: str, where: str, texts: Mapping[str, Texts], columns: ColumnRoles) -> SiteFile:
    """Read the columns of a site's file.

    Raises:
        ConfigurationError: a column is missing or has values that are not allowed, or no row has a target.
    """
    for one in columns.named:
        if one not in texts:
            raise unknown(f"column of {where}", one, texts)
    targets = [columns.target, *([columns.event] if columns.outcome == "survival" else [])]
    kept = np.all([[text is not None for text in texts[one]] for one in targets], axis=0)
    require(bool(kept.any()), f"rows of {where} with a target", 0, "at least 1")
    if lost := int((~kept).sum()):
        warn(DataWarning(f"{lost} of {len(kept)} rows of {where} have no {' or '.join(targets)}, and are left out"))
    rows = {one: column[kept] for one, column in texts.items()}
    features = {
        one: _typed(f"column {one!r} of {where}", column, one in columns.categorical)
        for one, column in rows.items()
        if one not in columns.named and one not in columns.drop
    }
    count = int(kept.sum())
    weight = np.ones(count)
    if columns.sample_weight:
        weight = _numbers(f"column {columns.sample_weight!r} of {where}", rows[columns.sample_weight])
        field = f"weights of {where}"
        require(bool((weight >= 0).all()), field, float(weight.min()), "0 or more")
        if not weight.any():
            message = f"{field} are all 0: at least one must be above 0"
            raise ConfigurationError(path=field, got=0.0, allowed="above 0 in some row", message=message)
    patient = np.arange(count)
    if columns.patient:
        of = rows[columns.patient]
        require(
            all(one is not None for one in of),
            f"column {columns.patient!r} of {where}",
            "a gap",
            "a patient in every row",
        )
        patient = np.unique(of.astype(str), return_inverse=True)[1]
    return SiteFile(name, where, features, _target(where, rows, columns), weight, patient)


def _target(where: str, rows: Mapping[str, Texts], columns: ColumnRoles) -> dict[str, ColumnValues]:
    if columns.outcome in WORDS:
        return {"label": words_of(rows[columns.target])}
    field = f"column {columns.target!r} of {where}"
    numbers = _numbers(field, rows[columns.target])
    if columns.outcome == "continuous":
        return {"label": numbers}
    bad = numbers[(numbers < 0) | ((numbers % 1 != 0) & (columns.outcome == "count"))]
    allowed = "whole numbers from 0 on" if columns.outcome == "count" else "times, 0 or later"
    require(not bad.size, field, bad[:3].tolist(), allowed)
    if columns.outcome == "count":
        return {"label": numbers}
    event = _numbers(f"column {columns.event!r} of {where}", rows[columns.event])
    allowed = "1 if the event was observed at this time, 0 if it had not happened by then"
    found = sorted(set(event.tolist()))
    require({*found} <= {0.0, 1.0}, f"column {columns.event!r} of {where}", found[:5], allowed)
    return {"time": numbers, "event": event}


def _numbers(field: str, texts: Texts) -> Floats:
    """Return the numbers that texts contain. Gaps are refused."""
    numbers = numbers_of(texts)
    if numbers is None or not np.all(np.abs(numbers) <= MOST):
        wrong = (
            next(text for text in texts if numbers_of(np.array([text], object)) is None) if numbers is None else None
        )
        require(False, field, wrong or "a gap or too large a number", f"numbers from {-MOST:g} to {MOST:g}")
    assert numbers is not None
    return numbers


def _typed(field: str, texts: Texts, categorical: bool) -> ColumnValues:
    numbers = None if categorical else numbers_of(texts)
    if numbers is None:
        return words_of(texts)
    large = numbers[np.abs(np.nan_to_num(numbers, posinf=np.inf, neginf=-np.inf)) > MOST]
    require(not large.size, field, large[:3].tolist(), f"numbers from {-MOST:g} to {MOST:g}; a gap is empty")
    return numbers


def with_columns(table: SiteFile, agreed: Summaries, columns: ColumnRoles) -> SiteFile:
    """Return the table with the agreed features.

    A column without any value gets the kind, numbers or words, on which sites have agreed.

    Raises:
        ConfigurationError: a column is missing, unknown, or of another kind.
    """
    made: dict[str, ColumnValues] = {}
    for name in table.features:
        if name not in agreed:
            raise unknown(f"column of {table.where}", name, agreed)
    for name, summary in agreed.items():
        words = "categories" in summary
        column = table.features.get(name)
        if column is None:
            if columns.absent != "gap":
                raise _lacks(table.where, name)
        elif (column.dtype.kind == "O") == words:
            made[name] = column
            continue
        elif not _is_empty(column):
            got, other = ("words", "numbers") if column.dtype.kind == "O" else ("numbers", "words")
            allowed = f"{other}, as at other sites; name it in `categorical` if its numbers are codes"
            require(False, f"column {name!r} of {table.where}", got, allowed)
        made[name] = np.full(len(table), None, object) if words else np.full(len(table), np.nan)
    return SiteFile(table.name, table.where, made, table.target, table.weight, table.patient)


def _lacks(where: str, name: str) -> ConfigurationError:
    """Return the error for a file without one of the agreed columns."""
    remedy = "add it, or set absent = 'gap', so that all its entries count as gaps"
    return ConfigurationError(
        path=f"column {name!r} of {where}",
        got="missing",
        allowed="in the file, or missing with absent = 'gap'",
        message=f"{where} has no column {name!r}, which other files have: {remedy}",
    )


def _is_empty(column: ColumnValues) -> bool:
    return all(one is None for one in column) if column.dtype.kind == "O" else bool(np.isnan(column).all())


def kinds_of(tables: Collection[SiteFile]) -> Summaries:
    """Return all columns that at least one site has, each with its kind, in the order in which they first appear.

    A column is a column of words if some site has a word in it, even if other sites have only gaps there.
    """
    kinds: Summaries = {}
    for table in tables:
        for name, column in table.features.items():
            if name not in kinds or ("categories" not in kinds[name] and not _is_empty(column)):
                kinds[name] = summaries_of({name: column[:0]})[name]
    return kinds


def used(table: SiteFile, columns: ColumnRoles) -> SiteFile:
    """Return the table with gaps in place of entries that the site's summaries leave out, such as rare categories."""
    summaries = {name: one for name, one in table.summaries(columns).items() if name in table.features}
    made = {}
    for name, gaps in hidden_entries(summaries, table.features).items():
        made[name] = table.features[name].copy()
        made[name][gaps] = None if "categories" in summaries[name] else np.nan
    return SiteFile(table.name, table.where, made, table.target, table.weight, table.patient)


def require_known(table: SiteFile, agreed: Summaries) -> None:
    """Refuse a category that none of the sites' summaries contains.

    In a column from whose summary a site left out rare categories, an unknown category is not refused: it may be one of
    these.
    """
    for name, column in table.features.items():
        if "categories" in agreed[name] and not agreed[name]["rarer"]:
            known = agreed[name]["categories"]
            if others := sorted({word for word in column if word is not None} - known.keys()):
                raise unknown(f"category in the column {name!r} of {table.where}", others[0], known)


def classes_of(target: Mapping[str, Any], columns: ColumnRoles) -> list[str]:
    """Return the classes in the sites' summaries. With a binary outcome, the positive class comes last.

    Raises:
        ConfigurationError: there are too few classes, or too many, or `positive` is not one of them.
    """
    classes = list(target.get("categories", ()))
    if columns.outcome == "binary":
        require(
            len(classes) == 2,
            f"classes of {columns.target!r}",
            classes[:6],
            "exactly two; outcome = 'classes' allows more",
        )
        if columns.positive and columns.positive not in classes:
            raise unknown("positive", columns.positive, classes)
        return classes[::-1] if columns.positive == classes[0] else classes
    require(len(classes) >= 2, f"classes of {columns.target!r}", classes, "two or more")
    return classes


def samples_of(
    table: SiteFile, agreed: Summaries, target: Mapping[str, Any], columns: ColumnRoles
) -> dict[str, Floats]:
    """Return a table's arrays: "row" with the agreed features, "weight" with mean 1, and arrays that the outcome needs.

    Raises:
        ConfigurationError: a row has a class that is in no site's summaries, or all counts are 0.
    """
    made = [*prepared(agreed, table.features).values()]
    rows = np.column_stack([np.zeros((len(table), 0)), *made])
    weight = table.weight / (table.weight.mean() if len(table) else 1.0)
    arrays = {"row": rows, "weight": weight}
    if columns.outcome == "survival":
        arrays |= {"time": _distinct(table.target["time"]), "event": table.target["event"]}
        return {name: column.astype(np.float32) for name, column in arrays.items()}
    label = table.target["label"]
    if columns.outcome in WORDS:
        classes = classes_of(target, columns)
        if others := sorted({*label} - {*classes}):
            raise unknown(f"class in the column {columns.target!r} of {table.where}", others[0], classes)
        label = np.array([classes.index(word) for word in label], int)
    elif columns.outcome == "count":
        require(target["mean"] > 0, f"counts {columns.target!r}", "all 0", "above 0 in at least one row")
        label = label / target["mean"]
    else:
        label = (label - target["mean"]) / deviation(target)
    kind = np.int32 if columns.outcome in WORDS else np.float32
    return {**{name: array.astype(np.float32) for name, array in arrays.items()}, "label": label.astype(kind)}


def _distinct(times: np.ndarray) -> np.ndarray:
    """Return times that stay different in float32: their ranks, if float32 would make different times equal.

    Only the order of times within a site matters for losses and scores.
    """
    known, rank = np.unique(times, return_inverse=True)
    return times if len(np.unique(known.astype(np.float32))) == len(known) else rank


def ordered(samples: dict[str, Floats], columns: ColumnRoles) -> dict[str, Floats]:
    """Return samples in the order that the losses need."""
    return in_order_of_time(samples) if columns.outcome == "survival" else samples


def require_fit(summary: Mapping[str, Any], columns: ColumnRoles) -> None:
    """Refuse a summary of the target if its kind, numbers or categories, does not fit the outcome."""
    if columns.outcome != "survival" and ("categories" in summary) != (columns.outcome in WORDS):
        kind = "a column of categories" if columns.outcome in WORDS else "a column of numbers"
        raise ConfigurationError(path=f"target {columns.target!r}", got=f"{[*summary]}", allowed=kind)
