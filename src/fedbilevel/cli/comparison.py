"""Finished runs: `fedbilevel compare`, side by side, or several algorithms on one task; `fedbilevel report`, a page
about runs, for people."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedbilevel.cli import shared
from fedbilevel.cli.run import played
from fedbilevel.core.errors import ConfigurationError, NumericalError, require

if TYPE_CHECKING:
    from fedbilevel.experiments import Spec
    from fedbilevel.tasks import Task


FORMATS = {"csv": "CSV", "json": "JSON", "latex": "LaTeX", "markdown": "Markdown"}


def add_to(add: shared.Add) -> None:
    compare = add("compare", _compare)
    compare.add_argument("what", nargs="*", metavar="RUN|TASK", help="run folders, folders of them, or one task")
    compare.add_argument(
        "--algorithms", type=_names, metavar="NAME,NAME,…", help=f"what to run on the task; {shared.OWN}"
    )
    shared.add_options(compare, "data", "set", "cohort", seeds="one run of each algorithm for each seed")
    shared.add_length(compare)
    compare.add_argument(
        "--centralised",
        action="store_true",
        help="also run the first algorithm with one client that holds everything, drawn as a level",
    )
    shared.add_options(compare, quiet="do not show the runs on their way")
    out = "of runs: the picture, .png, .pdf or .svg (comparison.png); of algorithms: the folder (runs/…)"
    compare.add_argument("--out", metavar="PATH", help=out)
    compare.add_argument("--panel", type=_names, metavar="NAME,NAME,…", help="what the picture's panels run over")
    compare.add_argument("--size", type=_size, metavar="WxH", help="of the picture, in inches")
    for name, text in FORMATS.items():
        compare.add_argument(f"--{name}", action="store_true", help=f"also write {text}, beside the picture")
    report = add("report", _report)
    report.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of a run, or of runs")
    report.add_argument("--out", type=Path, metavar="FILE", help="the page, .html (report.html)")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _size(text: str) -> tuple[float, float]:
    width, _, height = text.lower().partition("x")
    try:
        return float(width), float(height)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 3.3x2.6, width x height in inches") from None


def _compare(options: argparse.Namespace) -> int:
    """Compare finished runs, or run several algorithms and compare them.

    two ways:
      fedbilevel compare RUN RUN …                    finished runs: a table and a picture
      fedbilevel compare TASK --algorithms A,B,C      run A, B and C on the same task and seeds, then the same

    A RUN is the folder of a run or one with runs in it, however deep: of --seeds, or what the second way has written.
    Runs that differ in more than the method, such as in the task's objective, are for the first way: make each with
    `fedbilevel run --out FOLDER/NAME`, then `fedbilevel compare FOLDER`. GFLOP are shown where all runs know theirs.

    for a paper, with either way:
      fedbilevel compare FOLDER --out fig.pdf --panel exchanges --size 3.3x2.6 --latex
      --panel NAME,NAME   a panel for each: rounds, exchanges, megabytes, evaluations (gradients + hvps), gflop,
                          seconds (of this machine), time (of the clock); per_client, or per_client:NAME: metrics of
                          single clients, where they were measured (run.metrics_per_client=true)
      --size WxH          of the picture in inches; below 5 inches of width the type is small; it has no title
      --csv, --json, --latex, --markdown write beside the picture, with its name (fig.csv, …):
        .csv              a line for each run;  -curves.csv: one for each run and row of its history
        .json             both, with mean and standard deviation of each method
        .tex              a booktabs tabular: mean ± standard deviation, the best in bold
        .md               the table that is printed, the best in bold

    settings of the second:
      --set algorithm.local_steps=10    every algorithm that has such a field
      --set fednest.inner.lr=0.1        that algorithm alone
      --set task.clients=50             and run.…, engine.…, clock.…: all of them (see `fedbilevel run --help`)

    Methods make different numbers of exchanges a round: --exchanges gives all the same number, --rounds does not. Where
    some do not wait for slow clients: --time, with a clock (--set clock.stragglers=5).
    Repeated with the same --out, what is missing is run: after Ctrl-C, with more seeds or with more algorithms.
    """
    from fedbilevel.display.curves import require_matplotlib, require_size
    from fedbilevel.experiments.compare import is_per_client

    of_picture = [options.panel, options.size, options.out if options.algorithms is None else None]
    if any(one is not None for one in of_picture):  # whoever says how to draw wants the picture
        require_matplotlib()
    for panel in options.panel or []:
        is_per_client(panel)
    if options.size is not None:
        require_size(options.size)
    return _runs(options) if options.algorithms is None else _algorithms(options)


def _formats(options: argparse.Namespace) -> list[str]:
    return [name for name in FORMATS if getattr(options, name)]


def _runs(options: argparse.Namespace) -> int:
    others = ("seeds", "rounds", "exchanges", "bytes", "time", "cohort", "data", "set", "centralised")
    if given := [f"--{name}" for name in others if getattr(options, name)]:
        raise ConfigurationError(f"{', '.join(given)}: only together with --algorithms")
    require(bool(options.what), "RUN", options.what, "one or more run folders, or a task with --algorithms")
    terminal = shared.console()
    from fedbilevel.display.curves import can_draw, require_picture
    from fedbilevel.experiments import export
    from fedbilevel.experiments.compare import comparison_table, draw, find_runs, load_groups
    from fedbilevel.experiments.names import is_task

    picture = Path(options.out or "comparison.png")
    require_picture(picture)
    if tasks := [what for what in options.what if not Path(what).exists() and is_task(what)]:
        raise ConfigurationError(f"{tasks[0]} is a task: say what to run on it with --algorithms")
    runs, left_out = find_runs(options.what)
    for line in left_out:
        print(f"fedbilevel: left out, {line}", file=sys.stderr)
    groups = load_groups(runs)
    drawn = can_draw()
    if drawn:
        draw(groups, picture, options.panel, options.size)
    written = export.write(groups, picture, _formats(options))
    terminal.print(comparison_table(groups, terminal.width))
    shared.say_paths(terminal, {"plot": [picture] * drawn, "also": written})
    return shared.OK


def _algorithms(options: argparse.Namespace) -> int:
    require(len(options.what) <= 1, "TASK", " ".join(options.what), "a single task with --algorithms")
    terminal = shared.console()
    shared.prepare_jax()
    from fedbilevel.display.curves import SUFFIXES, can_draw
    from fedbilevel.experiments import export
    from fedbilevel.experiments.compare import comparison_table
    from fedbilevel.experiments.series import PICTURE, comparison_folder, comparison_specs, play_all
    from fedbilevel.experiments.spec import said_of_several

    if options.out and Path(options.out).suffix.lower() in SUFFIXES:
        advice = f"a picture of them: fedbilevel compare FOLDER --out {options.out}"
        raise ConfigurationError(f"--out {options.out}: with --algorithms that is the folder of the runs; {advice}")

    task = options.what[0] if options.what else None
    given = shared.settings(options)
    specs = comparison_specs(
        task, options.algorithms, settings=given, data=options.data, centralised=options.centralised
    )
    shared.tune(next(iter(specs.values())))
    folder = Path(options.out) if options.out else comparison_folder(specs)
    if not options.quiet:
        shared.say(terminal, said_of_several(list(specs.values())))
    failed, drawn = [], can_draw()

    def play(spec: Spec, place: Path, task: Task) -> None:
        try:
            played(spec, place, options.quiet, task=task, series=folder)
        except NumericalError as error:  # the others are still worth comparing
            failed.append(f"{place.relative_to(folder)}: {error}")
            print(f"fedbilevel: {failed[-1]}", file=sys.stderr)

    groups = play_all(specs, folder, options.seeds, play, options.panel, options.size, picture=drawn)
    written = export.write(groups, folder / PICTURE, _formats(options))
    terminal.print(comparison_table(groups, terminal.width))
    shared.say_paths(terminal, {"runs": folder, "plot": [folder / PICTURE] * drawn, "also": written})
    return shared.NUMBERS_FAIL if failed else shared.OK


def _report(options: argparse.Namespace) -> int:
    """Write a page for people about runs.

    A page is one HTML file: picture, table, specs and versions. It needs no network and runs no script.

      fedbilevel report runs/RUN                         a run: runs/RUN/report.html
      fedbilevel report runs/A runs/B                    runs side by side: report.html
      fedbilevel report runs/FOLDER                      a folder of runs, likewise: runs/FOLDER/report.html

    What lies in the folders is read and shown as text; nothing of it is executed.
    """
    from fedbilevel.experiments.report import write

    terminal = shared.console()
    shared.say_paths(terminal, {"report": [write(options.folders, options.out)]})
    return shared.OK
