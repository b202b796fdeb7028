"""Write a snapshot as JSON, for terminals that read the page of `fedbilevel watch`, and check one that arrives."""

from __future__ import annotations

import json
from functools import partial
from math import inf, isfinite
from typing import Any

from fedbilevel.experiments.federation_status import ENDS
from fedbilevel.experiments.snapshot import CURVE, STATES, Extent, MetricTrace, Snapshot
from fedbilevel.experiments.tables import Cell, Column, Table
from fedbilevel.reading import parse_printable
from fedbilevel.wording import without_seed

PLAIN = "title", "state", "why", "amount", "done", "whole", "notes"
SHAPES: dict[str, Any] = {
    **dict.fromkeys(("title", "why", "amount"), str),
    **dict.fromkeys(("done", "whole"), float),
    "state": set(STATES),
    "notes": [str],
    "facts": [(str, str)],
    "traces": [(str, [float], (float, float, float, int))],
    "tables": [(str, [(str, bool, int | None)], [[str]])],
    "error": {"", *ENDS},
}
"""The form of each entry of a snapshot.

A form is a type, a set of texts, a list with one form for all elements, or a list with a form for each element.
"""


def to_json(snapshot: Snapshot) -> str:
    """Return the part of a snapshot that a terminal shows, as JSON.

    The values of a metric are thinned to the number of columns that a curve on a terminal has. As on the page, the seed
    of a run under privacy is hidden.
    """
    content = {name: getattr(snapshot, name) for name in PLAIN} | {
        "done": float(snapshot.done),
        "whole": float(snapshot.whole),
        "facts": list(snapshot.facts.items()),
        "traces": [_thinned(trace) for trace in snapshot.traces],
        "tables": [_written(table) for table in snapshot.tables],
        "error": type(snapshot.error).__name__ if snapshot.error else "",
    }
    return json.dumps(_without_seeds(content) if snapshot.is_private else content)


def _thinned(trace: MetricTrace) -> tuple[Any, ...]:
    return trace.name, list(map(float, trace.thinned(CURVE).values)), trace.extent


def _written(table: Table) -> tuple[Any, ...]:
    rows = zip(*(map(str, column.cells) for column in table.shown), strict=True)
    return table.title, [(column.heading, column.is_text, column.goes) for column in table.shown], list(rows)


def _without_seeds(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_seeds(content) for name, content in value.items()}
    if isinstance(value, list | tuple):
        return [_without_seeds(content) for content in value]
    return without_seed(value) if isinstance(value, str) else value


def from_json(text: bytes) -> Snapshot:
    """Return the snapshot that a JSON text contains, with all texts made printable.

    Raises:
        ValueError: the text does not have the form of a snapshot.
    """
    content = parse_printable(text, {name: partial(_has, shape) for name, shape in SHAPES.items()})
    if lacking := SHAPES.keys() - content.keys():
        raise ValueError(f"{min(lacking)} is missing")
    if not (content["done"] >= 0 and 0 <= content["whole"] < inf):
        raise ValueError(f"done is {content['done']} of {content['whole']}")
    return Snapshot(
        **{name: content[name] for name in PLAIN},
        facts=dict(content["facts"]),
        traces=[_trace(name, values, Extent(*extent)) for name, values, extent in content["traces"] if values],
        tables=[_table(*table) for table in content["tables"]],
        error=ENDS[content["error"]](content["why"]) if content["error"] else None,
    )


def _has(shape: Any, value: Any) -> bool:
    """Return whether a value has one of the forms that `SHAPES` describes."""
    match shape:
        case set():
            return isinstance(value, str) and value in shape
        case [each] if isinstance(shape, list):
            return isinstance(value, list) and all(_has(each, one) for one in value)
        case tuple():
            return isinstance(value, list) and len(value) == len(shape) and all(map(_has, shape, value))
    return isinstance(value, shape)


def _trace(name: str, values: list[float], extent: Extent) -> MetricTrace:
    if not all(extent.low <= value <= extent.high for value in values if isfinite(value)):
        raise ValueError(f"{name} has a value that is not in its range")
    return MetricTrace(name, values, extent)


def _table(title: str, headings: list[Any], rows: list[list[str]]) -> Table:
    """Return a table with the columns for which all rows have a cell."""
    columns = zip(headings, zip(*rows, strict=False), strict=False)
    return Table(
        title, [Column(name, [*map(Cell, words)], goes, is_text=text) for (name, text, goes), words in columns]
    )
