"""`fedbilevel run`: start a run, one for each of several seeds, or go on with one."""

from __future__ import annotations

import argparse
import os
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbilevel.cli.shared import (
    INTERRUPTED,
    OK,
    TASK_HELP,
    Add,
    add_length,
    add_options,
    configured,
    console,
    count,
    exit_code,
    fail,
    prepare_jax,
    say_paths,
    seed,
    sentence,
    spec_tables,
    tune,
)

if TYPE_CHECKING:
    from fedbilevel.experiments import Spec


def add_to(add: Add) -> None:
    run = add("run", _run)
    run.add_argument("task", nargs="?", metavar="TASK", help=TASK_HELP)
    add_options(run, "algorithm", "data", "set", "spec", "cohort")
    add_length(run)
    add_options(
        run.add_mutually_exclusive_group(),
        seed="of the run, its task and its clock (0)",
        seeds="one run for each, in subfolders seed-N; repeated with the same --out, what is missing",
    )
    run.add_argument("--eval-every", type=count, metavar="N", help="rounds between evaluations")
    place = run.add_mutually_exclusive_group()
    add_options(place, out="the run folder: new or empty (runs/…)")
    place.add_argument(
        "--resume", type=Path, metavar="RUN", help="continue that run; goes with --rounds, --force, --quiet"
    )
    run.add_argument("--force", action="store_true", help="with --resume: though its task is not what it was")
    add_options(run, quiet="print nothing but the run's folder")
    run.add_argument("--coordinator", metavar="HOST:PORT", help="play with others: where process 0 listens, or auto")
    run.add_argument("--processes", type=count, metavar="N", help="with --coordinator: how many there are")
    run.add_argument("--process", type=seed, metavar="K", help="with --coordinator: which one this is, from 0")


def _run(options: argparse.Namespace) -> int:
    """Run an algorithm on a task.

    fields for --set:
      Dotted names: algorithm.local_steps=10, task.clients=50, algorithm.server_lr.x=0.05, run.rounds=300,
      engine.chunk=4, clock.spread=0.3. Without its section, a name means the algorithm's field if there is one
      (local_steps is also a field of tasks: write task.local_steps), else the only field of that name. Values are TOML,
      bare words are text, none is no value. `fedbilevel tasks` and `fedbilevel algorithms` list what there is.
        client_lr='{x = {schedule = "cosine_decay_schedule", init_value = 0.1, decay_steps = 500}, y = 0.1, v = 0.1}'
        schedules and server optimizers are Optax's, by their names and arguments there
        local_optimizer=momentum local_optimizer.decay=0.9    a part: its name takes that part's defaults, and its
                                                              fields, which may be parts again, follow after a dot
        hypergradient.solver=cg hypergradient.solver.max_steps=10
        server_optimizer='{name = "adam", b1 = 0.9}'
        task.local_steps='{low = 1, high = 10}'               drawn for each client and round
        capacities='[1, 0.5, 0.25]'                           shares of the model that clients hold, dealt out in turn
        run.exchanges=500                                     a budget of messages, in place of run.rounds
        run.bytes=2e9 run.time=200                            a budget of traffic, or of virtual seconds, likewise
        clock.network=1.0 clock.compute=0.1                   seconds for a message, and for a gradient or product
        clock.stragglers=5 clock.slowdown=5.0                 so many clients take so many times as long
        run.pooled=true                                       one client that holds every sample

    several processes, on one or more hosts:
      The same command in each, but for --process 0, 1, …, N-1. Process 0 listens at HOST:PORT, has the run folder and
      prints; which spec is played, and which run is resumed, is its word. A run may be resumed with any number of
      processes. --coordinator auto takes all three from a launcher's environment (Slurm, Open MPI, Kubernetes).

    your own task or algorithm:
      TASK may be module:NAME or path/to/file.py:NAME, NAME being a fedbilevel.tasks.Task or a function that returns
      a task; the function's keyword arguments are then the fields of [task]. --algorithm may be so, too, NAME being a
      subclass of fedbilevel.authoring.Algorithm. A spec that names them names code: --spec and --resume run it, and
      first say whose. So look at the spec.toml of a stranger first. `fedbilevel compare RUN …` reads runs and executes
      nothing of them.

    exit codes: 0 done, 2 wrong input, 3 the numbers do not go on (NaN, …), 4 a file could not be written,
      5 too few clients replied or another process was lost, 130 interrupted
    """
    together = [getattr(options, name) is not None for name in ("coordinator", "processes", "process")]
    return _run_together(options) if any(together) else _play(options)


def _run_together(options: argparse.Namespace) -> int:
    """This process's part of a run by several; an error ends it without waiting for the others."""
    _check_together(options)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "4")  # what JAX's runtime prints when it ends a process; we say it
    prepare_jax()
    from fedbilevel.engines.multihost import current_group, join

    try:
        join(options.coordinator, options.processes, options.process)
        current_group().require_same({"--resume": "left out" if options.resume is None else "given"})
        return _play(options)
    except BaseException as error:
        if current_group().service is None:
            raise  # nobody is waiting

        current_group().part(
            _reported(error, options.debug), type(error).__name__ if isinstance(error, SystemExit) else sentence(error)
        )


def _reported(error: BaseException, debug: bool) -> int:
    """Print the message of an error; the exit code."""

    if isinstance(error, SystemExit):
        return int(error.code or OK)  # its message was printed
    if isinstance(error, KeyboardInterrupt):
        return fail(INTERRUPTED, "interrupted")
    code = exit_code(error) if isinstance(error, Exception) else None
    if code is None or debug:
        traceback.print_exception(error)
    return 1 if code is None else fail(code, sentence(error))


def _check_together(options: argparse.Namespace) -> None:
    from fedbilevel.core.errors import ConfigurationError, require

    number = (options.processes is not None, options.process is not None)
    whole = options.coordinator is not None and (all(number) or options.coordinator == "auto")
    if not whole:
        raise ConfigurationError("--coordinator, --processes and --process are given together")
    require(not options.seeds, "--seeds", options.seeds, "left out with --coordinator: one run at a time")


def _play(options: argparse.Namespace) -> int:
    if options.force and options.resume is None:
        from fedbilevel.core.errors import ConfigurationError

        raise ConfigurationError("--force goes with --resume")
    if options.resume is not None:
        return _resume(options)
    spec, folder = _chosen(options)
    from fedbilevel.cli.progress import played
    from fedbilevel.experiments import run

    if not options.seeds:
        played(spec, folder, options.quiet, partial(run, spec, folder))
        return OK
    return _run_seeds(options, spec, folder)


def _chosen(options: argparse.Namespace) -> tuple[Spec, Path]:
    """The spec and the folder for its run; where several processes play it, those of process 0."""
    if options.coordinator is None:
        return _described(options)
    from fedbilevel.engines.multihost import current_group
    from fedbilevel.experiments.spec import resolve

    def say() -> tuple[dict[str, dict[str, Any]], str]:
        spec, folder = _described(options)
        return spec.tables(), str(folder)

    tables, folder = current_group().decide(say)
    spec = resolve(tables)
    tune(spec)
    return spec, Path(folder)


def _described(options: argparse.Namespace) -> tuple[Spec, Path]:
    """The spec and the folder that the options describe."""
    from fedbilevel.experiments import Folder, seeded

    if options.out is not None and not options.seeds:
        Folder(options.out).require_free()
    spec = configured(options)
    spec = spec if options.seed is None else seeded(spec, options.seed)
    return spec, options.out or Folder.new(spec).path


WITH_RESUME = ["command", "debug", "resume", "rounds", "force", "quiet", "coordinator", "processes", "process"]
"""What `--resume` goes with, and what the parser has beside options."""


def _resume(options: argparse.Namespace) -> int:
    from fedbilevel.core.errors import ConfigurationError

    if given := [name for name, value in vars(options).items() if name not in WITH_RESUME and value not in (None, [])]:
        raise ConfigurationError(f"--resume takes the spec of its run; {', '.join(given)} cannot be given with it")
    prepare_jax()
    from fedbilevel.cli.progress import played
    from fedbilevel.experiments import Folder, resume
    from fedbilevel.experiments.runner import resumable

    place = Folder(options.resume)
    if place.spec.is_file():  # of several processes, process 0 has the folder
        spec_tables(place.spec)
    spec = resumable(place, options.rounds)
    tune(spec)
    go_on = partial(resume, place.path, rounds=options.rounds, force=options.force)
    played(spec, place.path, options.quiet, go_on)
    return OK


def _run_seeds(options: argparse.Namespace, spec: Spec, folder: Path) -> int:
    """One run for each seed; in a folder that has some of them already, what is missing. One picture shows all."""
    from fedbilevel.cli.progress import played
    from fedbilevel.experiments import plots, tables
    from fedbilevel.experiments.compare import draw, load_groups
    from fedbilevel.experiments.folder import Folder
    from fedbilevel.experiments.series import require_series, seeded

    drawn = plots.possible()
    series = {folder / f"seed-{seed}": seeded(spec, seed) for seed in options.seeds}
    picture = Folder(folder).plot
    require_series(folder, series, besides=[picture.name])
    runs = [played(one, path, options.quiet, series=folder) for path, one in series.items()]
    if drawn:
        draw(load_groups(list(series)), picture)
    terminal = console(options.quiet)
    terminal.print(tables.seeds_table(runs, terminal.width))
    say_paths(terminal, {"runs": folder, "plot": [picture] * drawn})
    return OK
