"""`fedbilevel report`: a page for people, of runs, of comparisons and of the papers' figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedbilevel.cli.shared import OK, Add, console

EPILOG = """\
A page is one HTML file: it needs no network, its curves can be pointed at and switched off, and it can be printed.

  fedbilevel report runs/RUN                         a run: runs/RUN/report.html
  fedbilevel report runs/A runs/B                    runs side by side: report.html
  fedbilevel report runs/FOLDER                      a folder of runs, likewise: runs/FOLDER/report.html
  fedbilevel report runs/reproduce/simfbo-4/quick    an entry of `fedbilevel reproduce`
  fedbilevel report runs/reproduce                   all of them, and index.html over them

What lies in the folders is read and shown as text; nothing of it is executed.
"""


def add_to(add: Add) -> None:
    """The command."""
    report = add("report", _report, "write a page for people about runs or a paper's figures", EPILOG)
    report.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of a run, of runs, or of reproduce")
    report.add_argument("--out", type=Path, metavar="FILE", help="of runs: the page, .html (report.html)")


def _report(options: argparse.Namespace) -> int:
    from fedbilevel.report import write

    terminal = console()
    for path in write(options.folders, options.out):
        terminal.print(f"report {path}", markup=False, highlight=False, soft_wrap=True)
    return OK
