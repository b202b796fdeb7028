"""A page for people about a run, or about runs side by side: one HTML file, which loads nothing and runs no script.

It holds the picture and the table that the command line makes, the specs, and what each run recorded. What lies in the
folders of runs, which anyone may have written, is shown as text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from statistics import fmean
from typing import Any

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.metrics import text
from fedbilevel.display.curves import encoded, require_matplotlib, run_figure, words
from fedbilevel.engines.checkpoint import write_text
from fedbilevel.experiments.compare import (
    RunGroup,
    common_seeds,
    comparison,
    comparison_figure,
    find_runs,
    load_groups,
    tasks_of,
)
from fedbilevel.experiments.folder import LoadedRun, as_damage
from fedbilevel.experiments.tables import Cell, Column, Table, page_table, text_column, visible
from fedbilevel.wording import require_object

FILE = "report.html"
ROWS = 200  # of a history, at most
PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>
<body><main><h1>{title}</h1>
{content}
</main><footer><p>Written by fedbilevel {version}. This file asks the network for nothing.</p></footer></body></html>
"""


def write(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of some runs; its path.

    Args:
        folders: of runs, or with runs in them.
        out: the page; None: report.html in the folder, or for several in the current one.

    Raises:
        ConfigurationError: there is nothing in the folders that a page can show, or it cannot be read; or
            Matplotlib, which draws the curves of pages, is not installed.
    """
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError(f"--out {out}: the name of a page ends in .html")
    require_matplotlib()
    found, left_out = find_runs(folders)
    groups = load_groups(found)
    file = out or (folders[0] / FILE if len(folders) == 1 and folders[0].is_dir() else Path(FILE))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, page(groups, [f"Left out, {line}." for line in left_out]))
    return file


def page(groups: Sequence[RunGroup], notes: Sequence[str] = ()) -> str:
    """The page of some groups of runs, as HTML."""
    metric, runs = groups[0].metric, [(group, run) for group in groups for run in group.runs]
    first, single = groups[0].runs[0], len(runs) == 1
    title = f"{tasks_of(groups)}: {words(metric)}"
    if single:
        title = f"{tasks_of(groups)} · {groups[0].algorithm}"
        figure = run_figure(first.history, metric, title, groups[0].timed)
    else:
        figure = comparison_figure(groups)
    places = [
        text_column("run", [group.name for group, _ in runs]),
        Column("seed", [Cell(str(run.summary["seed"])) for _, run in runs]),
        text_column("folder", [run.folder.path for _, run in runs]),
    ]
    content = [
        *(f"<p>{visible(one)}</p>" for one in (_best(groups), *notes)),
        _image(figure, f"{title}: curves against costs; the numbers are in the tables."),
        *([] if single else [f"<p>{visible(_band(groups))}</p>"]),
        page_table(comparison(groups)),
        *([_history(first), page_table(_pairs("Ledger", first.ledger))] if single else []),
        "<h2>Run it again</h2>",
        *(_folded(f"Spec of {group.label}", group.runs[0].spec.to_toml()) for group in groups),
        "<h2>Where it comes from</h2>",
        page_table(Table("Folders", places)),
        *(page_table(_pairs(f"Versions and machine of {places}", made)) for made, places in _environments(runs)),
    ]
    style = (resources.files("fedbilevel.experiments") / "report.css").read_text(encoding="utf-8")
    version = metadata.version("fedbilevel")
    return PAGE.format(title=visible(title), style=style, version=version, content="\n".join(content))


def _best(groups: Sequence[RunGroup]) -> str:
    """Say which method ends best by its mean, or which methods, where they are level in what is printed."""
    metric, choose = groups[0].metric, max if groups[0].larger_is_better else min
    ends = {group.name: group.values("final") for group in groups}
    best = choose(ends.values(), key=fmean)
    level = [name for name, values in ends.items() if text(metric, fmean(values)) == text(metric, fmean(best))]
    by = f", by {' and '.join(level)}" if len(ends) > 1 else ""
    return f"Best {words(metric)} at the end: {Cell(values=best, kind=metric)}{by}."


def _band(groups: Sequence[RunGroup]) -> str:
    seeds = common_seeds(groups)
    return (
        f"Means over {seeds} seeds; the band is one standard deviation." if seeds > 1 else "One line for each method."
    )


def _image(figure: Any, alt: str) -> str:
    """A figure as an image within the page; in an image no script runs, and nothing is loaded."""
    data = base64.b64encode(encoded(figure, Path("image.svg"))).decode()
    return f'<img alt="{visible(alt)}" src="data:image/svg+xml;base64,{data}">'


def _history(run: LoadedRun) -> str:
    """What a run measured, row by row, in a fold; of a long history every so many rows."""
    rows = run.history.rows[:: -(-len(run.history) // ROWS)]
    columns = [
        Column(name, [Cell(f"{row[name]:.6g}" if name in row else "") for row in rows]) for name in run.history.columns
    ]
    table = page_table(Table(f"{len(rows)} of {len(run.history)} rows", columns))
    return f"<details><summary>History</summary>{table}</details>"


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{visible(title)}</summary><pre>{visible(content)}</pre></details>"


def _pairs(title: str, content: Mapping[str, Any]) -> Table:
    """A table of names and values."""
    return Table(title, [text_column("name", content), text_column("value", content.values())])


def _environments(runs: Sequence[tuple[RunGroup, LoadedRun]]) -> list[tuple[dict[str, Any], str]]:
    """Each environment that some runs recorded, with their folders; none of those whose folder has lost it."""
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for _, run in runs:
        file = run.folder.environment
        if file.is_file():
            with as_damage(file):
                made = json.loads(file.read_text(encoding="utf-8"))
                require_object(made, "the versions of packages")
            found.setdefault(json.dumps(made), (dict(made), []))[1].append(str(run.folder.path))
    return [(made, ", ".join(places)) for made, places in found.values()]
