"""Reports that people read: one HTML file each, which asks the network for nothing and runs only our own script.

What a page says is collected by runs.py, curves are drawn by chart.py, and page.py fills in the templates, in which
every text is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.display.curves import require_matplotlib
from fedbilevel.report.page import FILE
from fedbilevel.report.runs import write_runs


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
    default = folders[0] / FILE if len(folders) == 1 and folders[0].is_dir() else Path(FILE)
    return write_runs(folders, out or default)
