"""Export runs: a comparison as CSV, JSON, LaTeX and Markdown, and a report as a web page.

A report is about one run or several. It is a single HTML file, which loads nothing and runs no script. It has the
picture and the table of the command line, the specs, and the records of each run. The content of the runs' folders is
not trusted, and is only shown as text.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from fedbilevel.core.card import listed
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.metrics import text
from fedbilevel.core.writing import write_text
from fedbilevel.display.curves import encoded, require_matplotlib, run_figure, words
from fedbilevel.engines.history import Row
from fedbilevel.experiments.compare import (
    RunGroup,
    common_seeds,
    common_targets,
    comparison,
    comparison_figure,
    cost_to,
    costs_to,
    find_runs,
    load_groups,
    tasks_of,
)
from fedbilevel.experiments.folder import LoadedRun
from fedbilevel.experiments.loader import label
from fedbilevel.experiments.tables import Cell, Column, Table, latex, markdown, page_table, text_column, visible

SCHEMA = 1  # the version of the JSON file's form; see docs/how-to/comparing.md
CURRENCIES = ("exchanges", "bytes_down", "bytes_up", "gradients", "hvps", "flops", "seconds", "time")


def runs_csv(groups: Sequence[RunGroup]) -> str:
    """Return CSV with a line for each run: name and seed, outcome, total costs, and exchanges to each target."""
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
    """Return CSV with a line for each row of each run's history, and with all columns (a "long" or "tidy" table)."""
    return csv_text([{**_identity(group, run), **row} for group, run in _runs(groups) for row in run.history.rows])


def as_json(groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Return a comparison as plain objects for JSON. Unknown values, and values that are not finite, are None."""
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
    """Return how many runs reached the target, and the mean number of exchanges over these runs."""
    reached, _ = costs_to(group, group.metric, target)
    mean = statistics.fmean(reached) if reached else None
    return {"target": target, "reached": len(reached), "of": len(group.runs), "exchanges": mean}


def _statistics(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean and the sample standard deviation.

    Both are None if a value is unknown. The deviation of a single value is also None.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    whole = len(known) == len(values)
    return {
        "mean": statistics.fmean(known) if whole else None,
        "sd": statistics.stdev(known) if whole and len(known) > 1 else None,
    }


def finite(value: float | None) -> float | None:
    """Return a value, or None if it is not finite, since JSON has neither NaN nor infinity."""
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
    """Return rows as CSV. The header has the columns of all rows; if a row lacks a column, its cell is empty."""
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
"""Format -> file name's ending -> function that makes the file's text.

The ending replaces the suffix of the picture's name.
"""


def names(picture: Path, formats: Collection[str] = FORMATS.keys()) -> dict[Path, Text]:
    """Return the files of some formats as a dictionary: path of a file -> function that makes its text.

    The files lie in the picture's folder, under its name with other endings.
    """
    chosen = [FORMATS[name] for name in FORMATS if name in formats]
    return {picture.with_name(f"{picture.stem}{end}"): text for files in chosen for end, text in files.items()}


def write(groups: Sequence[RunGroup], picture: Path, formats: Collection[str]) -> list[Path]:
    """Write the comparison in some of the FORMATS, each file atomically. Return the paths of the files."""
    files = names(picture, formats)
    for file, text_of in files.items():
        write_text(file, text_of(groups))
    return list(files)


FILE = "report.html"
ROWS = 200  # the largest number of a history's rows in a report


def write_page(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write a report on some runs as a web page, and return its path.

    Args:
        folders: folders of runs, or folders that contain runs.
        out: the path of the page. None: report.html in the folder or, if there are several folders, in the current
            folder.

    Raises:
        ConfigurationError: the folders have no finished run, a run cannot be read, `out` does not end in .html, or
            Matplotlib, which draws the curves, is not installed.
    """
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError(f"--out {out}: the name of a page must end in .html")
    require_matplotlib()
    found, left_out = find_runs(folders)
    groups = load_groups(found)
    file = out or (folders[0] / FILE if len(folders) == 1 and folders[0].is_dir() else Path(FILE))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, page(groups, [f"Left out, {line}." for line in left_out]))
    return file


def page(groups: Sequence[RunGroup], notes: Sequence[str] = ()) -> str:
    """Return the report on some groups of runs, as HTML."""
    metric, runs, seeds = groups[0].metric, _runs(groups), common_seeds(groups)
    first, single = groups[0].runs[0], len(runs) == 1
    band = (
        f"Means over {seeds} seeds; the band is one standard deviation." if seeds > 1 else "One line for each method."
    )
    title = f"{tasks_of(groups)}: {words(metric)}"
    if single:
        title = f"{tasks_of(groups)} · {groups[0].algorithm}"
        figure = run_figure(first.history, metric, title, groups[0].timed)
    else:
        figure = comparison_figure(groups)
    places = [
        text_column("run", [group.text for group, _ in runs]),
        Column("seed", [Cell(str(run.summary["seed"])) for _, run in runs]),
        text_column("folder", [run.folder.path for _, run in runs]),
    ]
    alt = f"{title}: curves against costs; the numbers are in the tables."
    image = base64.b64encode(encoded(figure, Path("image.svg"))).decode()
    content = [
        *(f"<p>{visible(one)}</p>" for one in (_best(groups), *notes)),
        # an SVG in <img> runs no script and loads nothing
        f'<img alt="{visible(alt)}" src="data:image/svg+xml;base64,{image}">',
        *([] if single else [f"<p>{band}</p>"]),
        page_table(comparison(groups)),
        *([_history(first), page_table(_pairs("Ledger", first.ledger))] if single else []),
        "<h2>Run it again</h2>",
        *(_folded(f"Spec of {group.label}", group.runs[0].spec.to_toml()) for group in groups),
        "<h2>Where it comes from</h2>",
        page_table(Table("Folders", places)),
        *(page_table(_pairs(f"Versions and machine of {places}", made)) for made, places in _environments(runs)),
    ]
    files = [resources.files("fedbilevel.experiments") / name for name in ("report.html", "report.css")]
    template, style = (file.read_text(encoding="utf-8") for file in files)
    version = metadata.version("fedbilevel")
    return template.format(title=visible(title), style=style, version=version, content="\n".join(content))


def _best(groups: Sequence[RunGroup]) -> str:
    """Return a sentence with the final mean of the best method, and its name, or the names of all with this mean.

    If there is one method, it is not compared.

    A pooled run is only a level to compare with, and is never the best of several methods.
    """
    metric, choose = groups[0].metric, max if groups[0].larger_is_better else min
    rivals = [group for group in groups if not group.pooled] or groups
    ends = {group.text: group.values("final") for group in rivals}
    best = choose(ends.values(), key=statistics.fmean)
    level = [
        name
        for name, values in ends.items()
        if text(metric, statistics.fmean(values)) == text(metric, statistics.fmean(best))
    ]
    amount = Cell(values=best, kind=metric)
    if len(groups) == 1:
        name = words(metric)
        return f"{name[:1].upper()}{name[1:]} at the end: {amount}."
    return f"Best {words(metric)} at the end: {amount}, by {' and '.join(level)}."


def _history(run: LoadedRun) -> str:
    """Return the rows of a run's history as HTML that can be unfolded.

    Of a long history, only every n-th row is shown.
    """
    rows = run.history.rows[:: -(-len(run.history) // ROWS)]
    columns = [
        Column(name, [Cell(f"{row[name]:.6g}" if name in row else "") for row in rows]) for name in run.history.columns
    ]
    table = page_table(Table(f"{len(rows)} of {len(run.history)} rows", columns))
    return f"<details><summary>History</summary>{table}</details>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{visible(title)}</summary><pre>{visible(content)}</pre></details>"


def _pairs(title: str, content: Mapping[str, Any]) -> Table:
    """Return a table of names and values."""
    return Table(title, [text_column("name", content), text_column("value", content.values())])


def _environments(runs: Sequence[tuple[RunGroup, LoadedRun]]) -> list[tuple[dict[str, Any], str]]:
    """Return each recorded environment with the folders of its runs. Folders without a record are left out."""
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for _, run in runs:
        for made in run.folder.environments():
            found.setdefault(json.dumps(made), (made, []))[1].append(str(run.folder.path))
    return [(made, listed(list(dict.fromkeys(places)))) for made, places in found.values()]
