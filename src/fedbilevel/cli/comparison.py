"""`fedbilevel compare`: finished runs side by side, or several algorithms on one task."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedbilevel.cli.shared import (
    NUMBERS_FAIL,
    OK,
    Add,
    add_length,
    console,
    count,
    prepare_jax,
    seeds,
    settings,
    tune,
)

if TYPE_CHECKING:
    from fedbilevel.experiments import Spec
    from fedbilevel.tasks import Task

EPILOG = """\
two ways:
  fedbilevel compare RUN RUN …                    finished runs: a table and a picture
  fedbilevel compare TASK --algorithms A,B,C      run A, B and C on the same task and seeds, then the same

Runs that differ in more than the method, such as in the task's objective, are for the first: make each with
`fedbilevel run --out FOLDER/NAME`, then `fedbilevel compare FOLDER/*`. GFLOP are shown where all runs know theirs.

settings of the second:
  --set algorithm.local_steps=10    every algorithm that has such a field
  --set fednest.inner_lr=0.1        that algorithm alone
  --set task.clients=50             and run.…, engine.…, clock.…: all of them (see `fedbilevel run --help`)

Methods make different numbers of exchanges a round: --exchanges gives all the same number, --rounds does not. Where
some do not wait for slow clients: --time, with a clock (--set clock.stragglers=5).
Repeated with the same --out, what is missing is run: after Ctrl-C, with more seeds or with more algorithms.
"""


def add_to(add: Add) -> None:
    """The command."""
    compare = add("compare", _compare, "compare finished runs, or run several algorithms and compare them", EPILOG)
    compare.add_argument("what", nargs="*", metavar="RUN|TASK", help="run folders, folders of them, or one task")
    compare.add_argument("--algorithms", type=_names, metavar="NAME,NAME,…", help="what to run on the task")
    compare.add_argument("--seeds", type=seeds, metavar="N,N,…", help="one run of each algorithm for each seed")
    add_length(compare)
    compare.add_argument("--cohort", type=count, metavar="N", help="clients per round")
    compare.add_argument("--data", metavar="NAME", help="the task's data set")
    compare.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="see below; repeatable")
    compare.add_argument(
        "--centralised",
        action="store_true",
        help="also run the first algorithm with one client that holds everything, drawn as a level",
    )
    compare.add_argument("--quiet", action="store_true", help="do not show the runs on their way")
    compare.add_argument(
        "--out", metavar="PATH", help="of runs: the picture (comparison.png); of algorithms: the folder (runs/…)"
    )


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _compare(options: argparse.Namespace) -> int:
    return _runs(options) if options.algorithms is None else _algorithms(options)


def _runs(options: argparse.Namespace) -> int:
    from fedbilevel.core.errors import ConfigurationError, require

    others = ("seeds", "rounds", "exchanges", "time", "cohort", "data", "set", "centralised")
    if given := [f"--{name}" for name in others if getattr(options, name)]:
        raise ConfigurationError(f"{', '.join(given)}: only together with --algorithms")
    require(bool(options.what), "RUN", options.what, "one or more run folders, or a task with --algorithms")
    terminal = console()
    from fedbilevel.experiments.compare import compare
    from fedbilevel.experiments.own_task import is_task

    if tasks := [what for what in options.what if not Path(what).exists() and is_task(what)]:
        raise ConfigurationError(f"{tasks[0]} is a task: say what to run on it with --algorithms")
    picture = options.out or "comparison.png"
    terminal.print(compare(options.what, picture, terminal.width))
    terminal.print(f"plot  {picture}", highlight=False, soft_wrap=True)
    return OK


def _algorithms(options: argparse.Namespace) -> int:
    from fedbilevel.core.errors import NumericalError, require

    require(len(options.what) <= 1, "TASK", " ".join(options.what), "a single task with --algorithms")
    terminal = console()
    prepare_jax()
    from fedbilevel.cli import playing
    from fedbilevel.experiments.compare import comparison_table
    from fedbilevel.experiments.methods import PICTURE, comparison_folder, comparison_specs, play_all

    task = options.what[0] if options.what else None
    said = settings(options)
    specs = comparison_specs(
        task, options.algorithms, settings=said, data=options.data, centralised=options.centralised
    )
    tune(next(iter(specs.values())))
    folder = Path(options.out) if options.out else comparison_folder(specs)
    failed = []

    def play(spec: Spec, place: Path, task: Task) -> None:
        try:
            playing.finish(spec, place, options.quiet, task, series=folder)
        except NumericalError as error:  # the others are still worth comparing
            failed.append(f"{place.relative_to(folder)}: {error}")
            print(f"fedbilevel: {failed[-1]}", file=sys.stderr)

    groups = play_all(specs, folder, options.seeds, play)
    terminal.print(comparison_table(groups, terminal.width))
    terminal.print(f"runs  {folder}\nplot  {folder / PICTURE}", highlight=False, soft_wrap=True)
    return NUMBERS_FAIL if failed else OK
