"""A comparison for other programs, for papers and for READMEs, beside its picture: CSV, JSON, LaTeX and Markdown."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.engines.checkpoint import write_text
from fedbilevel.engines.history import Row
from fedbilevel.experiments.compare import RunGroup, common_targets, comparison, cost_to, costs_to, tasks_of
from fedbilevel.experiments.folder import LoadedRun
from fedbilevel.experiments.loader import label
from fedbilevel.experiments.tables import latex, markdown

SCHEMA = 1  # of the JSON file; docs/how-to/comparing.md says what is in it
CURRENCIES = ("exchanges", "bytes_down", "bytes_up", "gradients", "hvps", "flops", "seconds", "time")


def runs_csv(groups: Sequence[RunGroup]) -> str:
    """A line for each run: what it is, its outcome, what it cost in all and up to each common target."""
    targets = common_targets(groups, groups[0].metric)
    rows = []
    for group, run in _runs(groups):
        summary = run.summary
        row = {**_identity(group, run), "metric": run.metric}
        row |= {name: summary[name] for name in ("final", "best", "best_round", "rounds")}
        row |= {name: summary["last_row"].get(name) for name in CURRENCIES}
        for target in targets:
            row[f"exchanges_to_{target:g}"] = cost_to(run.history, run.metric, target)
        rows.append(row | {"folder": str(run.folder.path)})
    return csv_text(rows)


def curves_csv(groups: Sequence[RunGroup]) -> str:
    """A line for each run and row of its history ("long" or "tidy"), with all its columns."""
    return csv_text([{**_identity(group, run), **row} for group, run in _runs(groups) for row in run.history.rows])


def as_json(groups: Sequence[RunGroup]) -> dict[str, Any]:
    """The comparison as plain objects, whose numbers are finite; null stands for what is not known."""
    metric = groups[0].metric
    return {
        "schema": SCHEMA,
        "task": tasks_of(groups),
        "metric": metric,
        "larger_is_better": groups[0].larger_is_better,
        "methods": [_method(group, common_targets(groups, metric)) for group in groups],
    }


def _method(group: RunGroup, targets: Sequence[float]) -> dict[str, Any]:
    return {
        "name": group.name,
        "algorithm": group.algorithm,
        "task": label(group.runs[0].spec.task.name),
        "data": group.runs[0].spec.data,
        "pooled": group.pooled,
        "final": _statistics(group.values("final")),
        "best": _statistics(group.values("best")),
        "rounds": _statistics(group.values("rounds")),
        "costs": {name: _statistics([run.summary["last_row"].get(name) for run in group.runs]) for name in CURRENCIES},
        "targets": [_reached(group, target) for target in targets],
        "runs": [_run(run) for run in group.runs],
    }


def _run(run: LoadedRun) -> dict[str, Any]:
    return {
        "seed": run.spec.run.seed,
        "folder": str(run.folder.path),
        "stopped": run.summary["stopped"],
        "final": finite(run.summary["final"]),
        "best": finite(run.summary["best"]),
        "best_round": run.summary["best_round"],
        "history": [{name: finite(value) for name, value in row.items()} for row in run.history.rows],
    }


def _reached(group: RunGroup, target: float) -> dict[str, Any]:
    """The costs up to the first row of a run that is as good as the target, as means over the seeds."""
    reached, _ = costs_to(group, group.metric, target)
    mean = statistics.fmean(reached) if reached else None
    return {"target": target, "reached": len(reached), "of": len(group.runs), "exchanges": mean}


def _statistics(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and sample standard deviation, null where a value is not known or there is but one."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    whole = len(known) == len(values)
    return {
        "mean": statistics.fmean(known) if whole else None,
        "sd": statistics.stdev(known) if whole and len(known) > 1 else None,
    }


def finite(value: float | None) -> float | None:
    """null in place of what JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None


def _runs(groups: Sequence[RunGroup]) -> list[tuple[RunGroup, LoadedRun]]:
    return [(group, run) for group in groups for run in group.runs]


def _identity(group: RunGroup, run: LoadedRun) -> dict[str, Any]:
    return {
        "method": group.name,
        "algorithm": group.algorithm,
        "task": label(run.spec.task.name),
        "data": run.spec.data,
        "seed": run.spec.run.seed,
    }


def csv_text(rows: Sequence[Row | dict[str, Any]]) -> str:
    """Lines with a header of all columns; an empty cell where a row lacks one."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


Text = Callable[[Sequence[RunGroup]], str]
FORMATS: Mapping[str, Mapping[str, Text]] = {
    "csv": {".csv": runs_csv, "-curves.csv": curves_csv},
    "json": {".json": lambda groups: json.dumps(as_json(groups), indent=2) + "\n"},
    "latex": {".tex": lambda groups: latex(comparison(groups))},
    "markdown": {".md": lambda groups: markdown(comparison(groups))},
}
"""What each format writes: files, by what their names end with in place of the picture's suffix."""


def names(picture: Path, formats: Collection[str] = FORMATS.keys()) -> dict[Path, Text]:
    """The files of some formats, beside the picture and named like it, and what makes the text of each."""
    chosen = [FORMATS[name] for name in FORMATS if name in formats]
    return {picture.with_name(f"{picture.stem}{end}"): text for files in chosen for end, text in files.items()}


def write(groups: Sequence[RunGroup], picture: Path, formats: Collection[str]) -> list[Path]:
    """Write the comparison in some of the FORMATS, each file whole or not at all; the files."""
    files = names(picture, formats)
    for file, text in files.items():
        write_text(file, text(groups))
    return list(files)
