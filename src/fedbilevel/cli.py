"""The command line. Nothing heavy is imported before the arguments are known to be right."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from fedbilevel.experiments import Spec

OK, BAD_INPUT, NOT_FINITE, NOT_WRITTEN, INTERRUPTED = 0, 2, 3, 4, 130
EPILOG = """\
fields for --set:
  Dotted names: algorithm.local_steps=10, task.clients=50, algorithm.server_lr.x=0.05, run.rounds=300,
  engine.chunk=4. Without its section, a name means the algorithm's field if there is one (local_steps is also a
  field of tasks: write task.local_steps), else the only field of that name. Values are TOML, bare words are text,
  none is no value. `fedbilevel tasks` and `fedbilevel algorithms` list what there is.
    client_lr='{x = {schedule = "cosine", start = 0.1, steps = 500}, y = 0.1, v = 0.1}'
    schedules: cosine, exponential, inverse_sqrt, linear, polynomial
    coefficients='{name = "momentum", decay = 0.9}'       plain, momentum, proximal
    server_optimizer='{name = "adam", b1 = 0.9}'          sgd, momentum, adam, amsgrad, adagrad, yogi
    task.local_steps='{low = 1, high = 10}'               drawn for each client and round

exit codes: 0 done, 2 wrong input, 3 a number became NaN or infinite, 4 a file could not be written, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except KeyboardInterrupt:
        return _fail(INTERRUPTED, "interrupted")
    except Exception as error:
        code = _exit_code(error)
        if code is None or options.debug:
            raise
        return _fail(code, str(error))


def _exit_code(error: Exception) -> int | None:
    """The exit code for an error that is explained in one sentence; None for one that is a fault of ours."""
    from fedbilevel.core.errors import CheckpointError, FedbilevelError, NonFiniteError
    from fedbilevel.data.errors import DataError

    if isinstance(error, NonFiniteError):
        return NOT_FINITE
    if isinstance(error, CheckpointError | OSError):
        return NOT_WRITTEN
    return BAD_INPUT if isinstance(error, FedbilevelError | DataError) else None


def _fail(code: int, sentence: str) -> int:
    print(f"fedbilevel: {sentence}", file=sys.stderr)
    return code


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    whole = argparse.ArgumentParser(prog="fedbilevel", description="Federated bilevel optimization.")
    whole.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = whole.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, function: Callable[[Any], int], text: str, **more: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", **more)
        made.set_defaults(command=function)
        made.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return made

    raw = argparse.RawDescriptionHelpFormatter
    _add_run(command("run", _run, "run an algorithm on a task", epilog=EPILOG, formatter_class=raw))
    compare = command("compare", _compare, "compare finished runs: a table and a picture")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a folder of run folders")
    compare.add_argument("--out", default="comparison.png", metavar="FILE", help="the picture (%(default)s)")
    command("algorithms", _algorithms, "list the algorithms, their fields and defaults")
    command("tasks", _tasks, "list the tasks, their fields and defaults")
    return whole


def _add_run(run: argparse.ArgumentParser) -> None:
    run.add_argument("task", nargs="?", metavar="TASK", help="see `fedbilevel tasks` (hyper_representation)")
    run.add_argument("--algorithm", metavar="NAME", help="see `fedbilevel algorithms` (simfbo)")
    run.add_argument("--data", metavar="NAME", help="the task's data set (digits)")
    run.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="see below; repeatable")
    run.add_argument("--spec", metavar="FILE", help="a spec in TOML; the other options change it")
    run.add_argument("--rounds", type=_count, metavar="N", help="rounds in total")
    run.add_argument("--cohort", type=_count, metavar="N", help="clients per round")
    seeds = run.add_mutually_exclusive_group()
    seeds.add_argument("--seed", type=_seed, metavar="N", help="of the run and of the task (0)")
    seeds.add_argument(
        "--seeds",
        type=_seeds,
        metavar="N,N,…",
        help="one run for each, in subfolders seed-N; repeated with the same --out, what is missing",
    )
    run.add_argument("--eval-every", type=_count, metavar="N", help="rounds between evaluations")
    place = run.add_mutually_exclusive_group()
    place.add_argument("--out", type=Path, metavar="DIR", help="the run folder: new or empty (runs/…)")
    place.add_argument("--resume", type=Path, metavar="RUN", help="continue that run; goes with --rounds and --quiet")
    run.add_argument("--quiet", action="store_true", help="print nothing but the run's folder")


def _count(text: str) -> int:
    return _whole(text, 1)


def _seed(text: str) -> int:
    return _whole(text, 0)


def _seeds(text: str) -> list[int]:
    seeds = [_seed(part) for part in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} has a seed twice")
    return seeds


def _whole(text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def _version() -> str:
    from fedbilevel import __version__

    return __version__


def _console(quiet: bool = False) -> Console:
    try:
        from rich.console import Console
    except ImportError:
        from fedbilevel.core.errors import ConfigurationError

        raise ConfigurationError('the command line needs rich: pip install "fedbilevel[cli]"') from None
    console = Console(quiet=quiet)
    if not console.is_terminal:
        console.width = 160  # pipes and log files do not wrap
    return console


def _run(options: argparse.Namespace) -> int:
    if options.resume is not None:
        return _resume(options)
    if options.out is not None and not options.seeds:
        from fedbilevel.experiments.places import require_free

        require_free(options.out)
    spec = _spec(options)
    if not options.seeds:
        _start(options, spec, options.out)
        return OK
    return _run_seeds(options, spec)


def _spec(options: argparse.Namespace) -> Spec:
    """The spec that the options describe."""
    from fedbilevel.experiments import toml

    base = toml.read(Path(options.spec)) if options.spec else None
    _prepare_jax()
    from fedbilevel.experiments import configure

    settings = [*options.set]
    flags = {"run.rounds": options.rounds, "run.cohort": options.cohort, "run.eval_every": options.eval_every}
    settings += [f"{name}={value}" for name, value in flags.items() if value is not None]
    spec = configure(base, task=options.task, algorithm=options.algorithm, data=options.data, settings=settings)
    _tune(spec)
    return spec if options.seed is None else _seeded(spec, options.seed)


def _tune(spec: Spec) -> None:
    from fedbilevel.engines.cpu import tune_cpu

    tune_cpu(spec.engine.devices)  # XLA reads its flags at the first computation, which is still to come


def _seeded(spec: Spec, seed: int) -> Spec:
    task = {"seed": seed} if "seed" in spec.task.fields else {}
    return spec.replace(run={"seed": seed}, task=task)


def _start(options: argparse.Namespace, spec: Spec, folder: Path | None) -> dict[str, Any]:
    """A new run, shown while it runs."""
    from fedbilevel.experiments import Folder, build, run

    folder = folder or Folder.new(spec).path
    parts = build(spec)  # shows downloads by itself
    metric = next(iter(parts.task.metrics))
    return _shown(options, folder, metric, spec, lambda show: run(spec, folder, parts=parts, callbacks=[show]))


def _resume(options: argparse.Namespace) -> int:
    from fedbilevel.core.errors import ConfigurationError

    alone = ("task", "algorithm", "data", "set", "spec", "cohort", "seed", "seeds", "eval_every")
    if given := [name for name in alone if getattr(options, name) not in (None, [])]:
        raise ConfigurationError(f"--resume takes the spec of its run; {', '.join(given)} cannot be given with it")
    _prepare_jax()
    _continue(options, options.resume)
    return OK


def _continue(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The run in a folder, shown while it goes on from its checkpoint."""
    from fedbilevel.experiments import Folder, build, resume
    from fedbilevel.experiments.runner import resumable

    spec = resumable(Folder(folder), options.rounds)
    _tune(spec)
    parts = build(spec)
    metric = next(iter(parts.task.metrics))
    again = lambda show: resume(folder, rounds=options.rounds, parts=parts, callbacks=[show])  # noqa: E731
    return _shown(options, folder, metric, spec, again)


def _shown(
    options: argparse.Namespace, folder: Path, metric: str, spec: Spec, play: Callable[[Any], Any]
) -> dict[str, Any]:
    """Play a run with its progress shown, then its outcome; say how to go on if it does not reach its end."""
    from fedbilevel.core.errors import CheckpointError, NonFiniteError
    from fedbilevel.experiments import display, load_run

    console = _console(options.quiet)
    watch = display.Watch(console, metric)
    try:
        with watch.shown():
            watch.start(spec.run.rounds)
            play(watch)
    except KeyboardInterrupt:
        raise SystemExit(_fail(INTERRUPTED, _how_to_resume(folder))) from None
    except NonFiniteError as error:
        raise NonFiniteError(f"{error}; {_what_stays(folder)}") from error
    except CheckpointError as error:
        full = isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)
        if not full or not (folder / "checkpoint.npz").is_file():
            raise
        advice = f"free some space, then continue with: fedbilevel run --resume {folder}"
        raise CheckpointError(f"{error}; {advice}") from error
    summary = load_run(folder).summary
    console.print(display.summary_table(summary))
    console.print(display.paths(folder, "plot"), highlight=False, soft_wrap=True)
    if options.quiet:
        print(folder)
    return summary


def _how_to_resume(folder: Path) -> str:
    if (folder / "checkpoint.npz").is_file():
        return f"interrupted; continue with: fedbilevel run --resume {folder}"
    return "interrupted before the first checkpoint; there is nothing to resume"


def _what_stays(folder: Path) -> str:
    if (folder / "checkpoint.npz").is_file():
        return f"the last good checkpoint stays in {folder}"
    return "no checkpoint had been written; smaller step sizes may help"


def _run_seeds(options: argparse.Namespace, spec: Spec) -> int:
    """One run for each seed; in a folder that has some of them already, what is missing."""
    from fedbilevel.experiments import Folder, display
    from fedbilevel.experiments.places import require_seeds

    folder = options.out or Folder.new(spec).path
    specs = {folder / f"seed-{seed}": _seeded(spec, seed) for seed in options.seeds}
    require_seeds(folder, {path: one.to_toml() for path, one in specs.items()})
    runs = [_finish_seed(options, one, path) for path, one in specs.items()]
    _console(options.quiet).print(display.seeds_table(runs))
    return OK


def _finish_seed(options: argparse.Namespace, spec: Spec, folder: Path) -> dict[str, Any]:
    """The summary of one seed's run, which is read, continued or started."""
    from fedbilevel.experiments import Folder, load_run

    place = Folder(folder)
    if place.summary.is_file():
        return load_run(folder).summary
    return _continue(options, folder) if place.checkpoint.is_file() else _start(options, spec, folder)


def _compare(options: argparse.Namespace) -> int:
    console = _console()
    from fedbilevel.experiments.compare import compare

    console.print(compare(options.runs, options.out, console.width))
    console.print(f"plot  {options.out}", highlight=False, soft_wrap=True)
    return OK


def _algorithms(options: argparse.Namespace) -> int:
    console = _console()
    from fedbilevel.experiments.display import algorithm_fields_table, algorithms_table

    console.print(algorithms_table())
    console.print(algorithm_fields_table())
    return OK


def _tasks(options: argparse.Namespace) -> int:
    console = _console()
    from fedbilevel.experiments.display import tasks_table

    console.print(tasks_table())
    return OK


def _prepare_jax() -> None:
    """Keep compiled programs between runs, so that the second start is quick. JAX's own settings come first."""
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
        jax.config.update("jax_compilation_cache_dir", str(cache / "fedbilevel" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


if __name__ == "__main__":
    sys.exit(main())
