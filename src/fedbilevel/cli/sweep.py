"""`fedbilevel sweep`: runs over other values of some fields, and the best of them."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.cli import shared
from fedbilevel.core.errors import ConfigurationError, require

if TYPE_CHECKING:
    from fedbilevel.experiments import Spec
    from fedbilevel.experiments.sweep import SpecOf
    from fedbilevel.sweeps import PointValues, Sweep


def add_to(add: shared.Add) -> None:
    sweep = add("sweep", _sweep)
    sweep.add_argument("base", nargs="?", metavar="TASK|SPEC.toml", help=f"{shared.TASK_HELP}; or a spec in TOML")
    shared.add_options(sweep, "algorithm", "data", set="of every run; repeatable")
    sweep.add_argument("--grid", action="append", default=[], metavar="FIELD=VALUE,VALUE,…", help="repeatable")
    sweep.add_argument("--search", action="append", default=[], metavar="FIELD=LOW:HIGH[:log]", help="see below")
    sweep.add_argument("--trials", type=shared.count, metavar="N", help="with --search: how many points to draw")
    sweep.add_argument("--pruner", choices=["halving", "hyperband", "median"], help="with --search: ends trials early")
    sweep.add_argument("--storage", metavar="URL|FILE", help="with --search: of the study (a file in DIR)")
    shared.add_options(sweep, "cohort", seeds="every point is run with each (the spec's own)")
    shared.add_length(sweep)
    sweep.add_argument("--select", metavar="METRIC", help="what decides (the task's first metric); a loss, too")
    sweep.add_argument("--select-on-test", action="store_true", help="even if that is measured on test data")
    shared.add_options(
        sweep, out="the sweep's folder, new or its own (runs/…)", quiet="print nothing but the table and the paths"
    )


def _sweep(options: argparse.Namespace) -> int:
    """Run with other values of some fields, and choose the best.

    A grid is every combination of the values of some fields, which are those of --set, in the same notation. Each point
    is run with every seed, each run in a folder of its own; the best point has the best mean of --select at the end.

      fedbilevel sweep quadratic --grid server_lr.x=0.01,0.03,0.1 --grid local_steps=1,5 --seeds 0,1,2 --out runs/steps
      fedbilevel sweep --set task.holdout=0.2 --select validation_accuracy --grid client_lr.x=0.01,0.1 --exchanges 300

    --search draws --trials points from ranges by Optuna (extra [sweep]), numbers in four digits, whole numbers where
    both ends are whole; the values of --grid are then choices.

      fedbilevel sweep quadratic --search server_lr.x=0.001:1:log --search local_steps=1:8 --trials 40 --out runs/search

    The same command with the same --out goes on where it was, and several at once share the work. Hosts without a
    common disk share a search by --storage, the URL of a database (postgresql://…).

    In the folder: the runs, sweep.csv, a line for each, and chosen.toml, which `fedbilevel run --spec` takes.
    `fedbilevel compare DIR` draws them.
    """
    terminal = shared.console()
    shared.prepare_jax()
    from fedbilevel.experiments.folder import default_path
    from fedbilevel.experiments.sweep import sweep_table, write_files

    folder = options.out or default_path("sweep", Path(options.base or "").stem)
    try:
        found = _played(options, folder)
    except KeyboardInterrupt:
        return shared.fail(shared.INTERRUPTED, f"interrupted; continue with the same command and --out {folder}")
    terminal.print(sweep_table(found, terminal.width))
    shared.say_paths(terminal, {"runs": folder, **write_files(found, folder)})
    return shared.OK if found.best else shared.fail(shared.NUMBERS_FAIL, "every point failed: nothing is chosen")


def _played(options: argparse.Namespace, folder: Path) -> Sweep:
    from fedbilevel.experiments.search import Range, search_specs
    from fedbilevel.experiments.sweep import parse_values, sweep_specs

    fields = _fields(options)
    grid = {name: parse_values(text) for name, (option, text) in fields.items() if option == "--grid"}
    space = {name: Range.parse(name, text) for name, (option, text) in fields.items() if option == "--search"}
    names = ("trials", "pruner", "storage")
    drawing = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    given: dict[str, Any] = {name: getattr(options, name) for name in ("seeds", "select", "select_on_test")}
    given |= {"say": partial(shared.say, shared.console(options.quiet)), "progress": False if options.quiet else None}
    spec_of = _spec_of(options, fields)
    for name, value in drawing.items():
        require(bool(space), f"--{name}", value, "left out without --search")
    if not space:
        return sweep_specs(spec_of, grid, folder, **given)
    require("trials" in drawing, "--trials", None, "given with --search: the number of points to draw")
    return search_specs(spec_of, {**space, **grid}, folder, **given, **drawing)


def _fields(options: argparse.Namespace) -> dict[str, tuple[str, str]]:
    """The fields that are swept, each with the option that names it and its text."""
    from fedbilevel.experiments.sweep import parse_field

    fields: dict[str, tuple[str, str]] = {}
    for option in ("--search", "--grid"):
        for name, text in (parse_field(option, one) for one in getattr(options, option[2:])):
            if name in fields:
                raise ConfigurationError(f"{option} {name} is given twice: name all its values at once")
            fields[name] = option, text
    if not fields:
        raise ConfigurationError("a sweep needs a field and its values: --grid FIELD=VALUE,VALUE,…")
    return fields


def _spec_of(options: argparse.Namespace, fields: Collection[str]) -> SpecOf:
    """What makes the spec of a point, from the options and the point's values."""
    from fedbilevel.experiments import configure
    from fedbilevel.experiments.runner import algorithm_of

    file = options.base if (options.base or "").endswith(".toml") else None
    base = shared.spec_tables(Path(file), None, options.algorithm) if file else None
    named = {"task": None if file else options.base, "algorithm": options.algorithm, "data": options.data}
    given = shared.settings(options)
    for setting in given:
        if setting.partition("=")[0].strip().removeprefix("run.") in (name.removeprefix("run.") for name in fields):
            raise ConfigurationError(f"{setting} is set for all points, and swept: leave one of them out")

    def spec_of(point: PointValues) -> Spec:
        spec = configure(base, **named, settings=given, values=point)
        algorithm_of(spec)  # is allowed
        shared.tune(spec)
        return spec

    return spec_of
