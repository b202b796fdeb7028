"""`fedbilevel sweep`: runs over other values of some fields, and the best of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedbilevel.cli.shared import (
    ALGORITHM_HELP,
    INTERRUPTED,
    NUMBERS_FAIL,
    OK,
    TASK_HELP,
    Add,
    add_length,
    console,
    count,
    fail,
    prepare_jax,
    say_whose_code,
    seeds,
    settings,
    spec_tables,
    tune,
)

if TYPE_CHECKING:
    from fedbilevel.experiments import Spec
    from fedbilevel.experiments.sweep import Definition, Watching
    from fedbilevel.sweeps.outcome import Sweep
    from fedbilevel.tasks import Task

EPILOG = """\
A grid is every combination of the values of some fields, which are those of --set, in the same notation. Each point is
run with every seed, each run in a folder of its own; the best point has the best mean of --select at the end.

  fedbilevel sweep quadratic --grid server_lr.x=0.01,0.03,0.1 --grid local_steps=1,5 --seeds 0,1,2 --out runs/steps
  fedbilevel sweep --set task.holdout=0.2 --select validation_accuracy --grid client_lr.x=0.01,0.1 --exchanges 300
  fedbilevel sweep quadratic --grid hypergradient.solver=cg,neumann --algorithm fednest --halving
  fedbilevel sweep --resume runs/steps

--halving [3] plays all points for a part of the budget, the best third of them for three times as much, and so on;
a run that goes on ends at the numbers of an unbroken one.

--search draws --trials points from ranges by Optuna (extra [sweep]), numbers in four digits, whole ones where both ends
are; the values of --grid are then choices.

  fedbilevel sweep quadratic --search server_lr.x=0.001:1:log --search local_steps=1:8 --trials 40

--storage shares the points, drawn or of a grid, with others who start the same command: each is a worker. It is a file,
or the URL of a database (sqlite:///FILE on one host, postgresql://… on many). The points of a worker that was killed go
to others after a minute; every worker waits for the last trial and leaves the files of the whole sweep.

In the folder: sweep.csv and sweep.json (every run, and the number of trials), sweep.png, and chosen.toml, which
`fedbilevel run --spec` takes.
"""


def add_to(add: Add) -> None:
    sweep = add("sweep", _sweep, "run with other values of some fields, and choose the best", EPILOG)
    sweep.add_argument("base", nargs="?", metavar="TASK|SPEC.toml", help=f"{TASK_HELP}; or a spec in TOML")
    sweep.add_argument("--algorithm", metavar="NAME", help=ALGORITHM_HELP)
    sweep.add_argument("--data", metavar="NAME", help="the task's data set")
    sweep.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="of every run; repeatable")
    sweep.add_argument("--grid", action="append", default=[], metavar="FIELD=VALUE,VALUE,…", help="repeatable")
    sweep.add_argument("--search", action="append", default=[], metavar="FIELD=LOW:HIGH[:log]", help="see below")
    sweep.add_argument("--trials", type=count, metavar="N", help="with --search: how many points to draw")
    sweep.add_argument("--storage", metavar="URL|FILE", help="shared by workers, see below")
    sweep.add_argument("--seeds", type=seeds, metavar="N,N,…", help="every point is run with each (the spec's own)")
    add_length(sweep)
    sweep.add_argument("--cohort", type=count, metavar="N", help="clients per round")
    sweep.add_argument("--select", metavar="METRIC", help="what decides (the task's first metric); a loss, too")
    sweep.add_argument("--select-on-test", action="store_true", help="even if that is measured on test data")
    sweep.add_argument("--halving", type=count, nargs="?", const=3, metavar="K", help="one in K goes on (3)")
    place = sweep.add_mutually_exclusive_group()
    place.add_argument("--out", type=Path, metavar="DIR", help="the sweep's folder: new or empty (runs/…)")
    place.add_argument("--resume", type=Path, metavar="DIR", help="go on with the sweep in that folder")
    sweep.add_argument("--quiet", action="store_true", help="print nothing but the table and the paths")


def _sweep(options: argparse.Namespace) -> int:
    terminal = console()
    definition = _definition(options)
    prepare_jax()
    from fedbilevel.experiments import plots
    from fedbilevel.experiments.sweep import sweep_table, write_files

    drawn = plots.possible()
    folder = options.resume or options.out or _new_folder(definition)
    try:
        found = _played(options, definition, folder)
    except KeyboardInterrupt:
        trials = f" --trials {options.trials}" if options.trials else ""
        again = "the same command" if options.storage else f"fedbilevel sweep --resume {folder}{trials}"
        return fail(INTERRUPTED, f"interrupted; continue with: {again}")
    written = write_files(found, folder, picture=drawn)
    terminal.print(sweep_table(found, terminal.width))
    for name, path in {"runs": folder, **written}.items():
        terminal.print(f"{name:<6} {path}", markup=False, highlight=False, soft_wrap=True)
    return OK if found.winner is not None else fail(NUMBERS_FAIL, "every point failed: nothing is chosen")


def _played(options: argparse.Namespace, definition: Definition, folder: Path) -> Sweep:
    from fedbilevel.experiments.search import search_specs, specs_of
    from fedbilevel.experiments.sweep import sweep_specs

    watch, going_on = _Watch(options.quiet), options.resume is not None
    specs = specs_of(definition)
    tune(next(one for one in specs if not isinstance(one, Exception)))
    if definition.search or options.storage or options.trials:
        return search_specs(
            definition,
            specs,
            folder,
            trials=options.trials,
            storage=options.storage,
            resume=going_on,
            show=watch.show,
            said=watch.said,
        )
    return sweep_specs(definition, specs, folder, resume=going_on, show=watch.show, said=watch.said)


def _definition(options: argparse.Namespace) -> Definition:
    """The sweep that the options describe, or that of the folder to go on with."""
    from fedbilevel.core.errors import ConfigurationError
    from fedbilevel.experiments.sweep import Definition, parse_field, parse_values

    given = settings(options)
    alone = ("base", "algorithm", "data", "grid", "search", "seeds", "select", "select_on_test", "halving")
    if options.resume is not None:
        if also := [name for name in alone if getattr(options, name) not in (None, [], False)] + given:
            raise ConfigurationError(
                f"--resume takes the sweep of its folder; {', '.join(also)} cannot be given with it"
            )
        found = Definition.read(options.resume)
        say_whose_code(options.resume, found.named)
        return found
    fields = [("--grid", text) for text in options.grid] + [("--search", text) for text in options.search]
    swept: dict[str, dict[str, str]] = {"--grid": {}, "--search": {}}
    for option, text in fields:
        name, values = parse_field(option, text)
        if name in {**swept["--grid"], **swept["--search"]}:
            raise ConfigurationError(
                f"{option} {name} is given twice: name all its values at once, with commas between"
            )
        swept[option][name] = values
    if not fields:
        raise ConfigurationError("a sweep needs a field and its values: --grid FIELD=VALUE,VALUE,…")
    from_file = options.base is not None and options.base.endswith(".toml")
    spec = spec_tables(Path(options.base), None, options.algorithm) if from_file else None
    return Definition.of(
        spec=spec,
        task=None if from_file else options.base,
        algorithm=options.algorithm,
        data=options.data,
        settings=given,
        grid={name: parse_values(text) for name, text in swept["--grid"].items()},
        search=swept["--search"],
        seeds=options.seeds,
        select=options.select,
        select_on_test=options.select_on_test,
        halving=options.halving,
    )


def _new_folder(definition: Definition) -> Path:
    from fedbilevel.experiments.folder import default_path
    from fedbilevel.experiments.loader import label

    task = definition.task or "run"
    return default_path("sweep", label(task))


class _Watch:
    """Shows the run that is played, and a line for each that has ended."""

    def __init__(self, quiet: bool) -> None:
        self.console = console(quiet)

    @contextmanager
    def show(self, spec: Spec, place: Path, task: Task) -> Iterator[Watching]:
        """On a terminal, a bar."""
        from fedbilevel.engines.progress import showing
        from fedbilevel.experiments.tables import Watch

        bar = self.console.is_terminal and not self.console.quiet
        watch = Watch(console(not bar), next(iter(task.metrics)), spec)
        with showing(watch) as display:
            yield [watch], display

    def said(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
