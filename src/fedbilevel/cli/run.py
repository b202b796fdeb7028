"""`fedbilevel run`: start a run, one for each of several seeds, or go on with one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fedbilevel.cli.shared import (
    EPILOG,
    OK,
    TASK_HELP,
    Add,
    add_length,
    console,
    count,
    prepare_jax,
    seed,
    seeds,
    settings,
    tune,
)

if TYPE_CHECKING:
    from fedbilevel.experiments import Spec


def add_to(add: Add) -> None:
    """The command."""
    run = add("run", _run, "run an algorithm on a task", EPILOG)
    run.add_argument("task", nargs="?", metavar="TASK", help=TASK_HELP)
    run.add_argument("--algorithm", metavar="NAME", help="see `fedbilevel algorithms` (simfbo)")
    run.add_argument("--data", metavar="NAME", help="the task's data set (digits)")
    run.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="see below; repeatable")
    run.add_argument("--spec", metavar="FILE", help="a spec in TOML; the other options change it")
    add_length(run)
    run.add_argument("--cohort", type=count, metavar="N", help="clients per round")
    which = run.add_mutually_exclusive_group()
    which.add_argument("--seed", type=seed, metavar="N", help="of the run and of the task (0)")
    which.add_argument(
        "--seeds",
        type=seeds,
        metavar="N,N,…",
        help="one run for each, in subfolders seed-N; repeated with the same --out, what is missing",
    )
    run.add_argument("--eval-every", type=count, metavar="N", help="rounds between evaluations")
    place = run.add_mutually_exclusive_group()
    place.add_argument("--out", type=Path, metavar="DIR", help="the run folder: new or empty (runs/…)")
    place.add_argument("--resume", type=Path, metavar="RUN", help="continue that run; goes with --rounds and --quiet")
    run.add_argument("--quiet", action="store_true", help="print nothing but the run's folder")


def _run(options: argparse.Namespace) -> int:
    if options.resume is not None:
        return _resume(options)
    if options.out is not None and not options.seeds:
        from fedbilevel.experiments.places import require_free

        require_free(options.out)
    spec = _spec(options)
    from fedbilevel.cli.playing import start
    from fedbilevel.experiments import Folder

    folder = options.out or Folder.new(spec).path
    if not options.seeds:
        start(spec, folder, options.quiet)
        return OK
    return _run_seeds(options, spec, folder)


def _spec(options: argparse.Namespace) -> Spec:
    """The spec that the options describe."""
    from fedbilevel.experiments import toml

    base = toml.read(Path(options.spec)) if options.spec else None
    prepare_jax()
    from fedbilevel.experiments import configure
    from fedbilevel.experiments.series import seeded

    said = settings(options)
    spec = configure(base, task=options.task, algorithm=options.algorithm, data=options.data, settings=said)
    tune(spec)
    return spec if options.seed is None else seeded(spec, options.seed)


def _resume(options: argparse.Namespace) -> int:
    from fedbilevel.core.errors import ConfigurationError

    alone = ("task", "algorithm", "data", "set", "spec", "exchanges", "cohort", "seed", "seeds", "eval_every")
    if given := [name for name in alone if getattr(options, name) not in (None, [])]:
        raise ConfigurationError(f"--resume takes the spec of its run; {', '.join(given)} cannot be given with it")
    prepare_jax()
    from fedbilevel.cli.playing import go_on

    go_on(options.resume, options.rounds, options.quiet)
    return OK


def _run_seeds(options: argparse.Namespace, spec: Spec, folder: Path) -> int:
    """One run for each seed; in a folder that has some of them already, what is missing."""
    from fedbilevel.cli.playing import finish
    from fedbilevel.experiments import display
    from fedbilevel.experiments.series import require_series, seeded

    series = {folder / f"seed-{seed}": seeded(spec, seed) for seed in options.seeds}
    require_series(folder, series)
    runs = [finish(one, path, options.quiet, series=folder) for path, one in series.items()]
    console(options.quiet).print(display.seeds_table(runs))
    return OK
