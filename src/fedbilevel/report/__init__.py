"""Reports that people read: one HTML file each, which asks the network for nothing and runs only our own script.

What a page says is collected by entries.py (the papers' figures) and runs.py (runs and comparisons), curves are drawn
by chart.py, and page.py fills in the templates, in which every text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.engines.curves import require_matplotlib
from fedbilevel.experiments.folder import as_damage
from fedbilevel.report.entries import INDEX, found_below, write_entry, write_index
from fedbilevel.report.page import FILE
from fedbilevel.report.runs import write_runs
from fedbilevel.reproduce import outcome
from fedbilevel.reproduce.entry import ids, load


def write(folders: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Write the page of some folders, or of entries their pages; the paths of the pages.

    Args:
        folders: one with the outcome of an entry, one with those of several, or any number with runs.
        out: the page of runs; None: report.html in the folder, or for several in the current one.

    Raises:
        ConfigurationError: there is nothing in the folders that a page can show, or it cannot be read; or
            Matplotlib, which draws the curves of pages, is not installed.
    """
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise ConfigurationError(f"--out {out}: the name of a page ends in .html")
    require_matplotlib()
    first = folders[0]
    of_entry = (first / outcome.FILE).is_file()
    below = [] if of_entry or (first / "spec.toml").is_file() else found_below(first)
    if not of_entry and not below:
        default = first / FILE if len(folders) == 1 and first.is_dir() else Path(FILE)
        return [write_runs(folders, out or default)]
    if len(folders) > 1:
        raise ConfigurationError(f"{first} holds a paper's figure: such folders are reported one at a time")
    if out is not None:
        raise ConfigurationError(f"--out {out}: the pages of entries lie in their folders")
    return [_one(first)] if of_entry else write_index([load(id) for id in ids()], first)


def _one(folder: Path) -> Path:
    """The page of an entry's folder, with a link to the index where there is one."""
    found = outcome.read(folder / outcome.FILE)
    with as_damage(folder / outcome.FILE):
        index = f"../../{INDEX}" if (folder.parent.parent / INDEX).is_file() else ""
    return write_entry(load(found["id"]), folder, index)
