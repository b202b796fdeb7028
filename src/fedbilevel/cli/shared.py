"""Define what several commands share: exit codes, types of arguments, the console, and common options."""

from __future__ import annotations

import argparse
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from fedbilevel.core import interrupts
from fedbilevel.core.errors import (
    CheckpointError,
    ConfigurationError,
    ExchangeError,
    FedbilevelError,
    NumericalError,
    unknown,
)
from fedbilevel.wording import missing, nearest, printable

if TYPE_CHECKING:
    from rich.console import Console

    from fedbilevel.experiments import Spec
    from fedbilevel.trackers import Tracker

OK, BAD_INPUT, NUMBERS_FAIL, NOT_WRITTEN, NOT_ANSWERED, BUDGET_SPENT = 0, 2, 3, 4, 5, 6
LINES = "\n\t"  # the control characters that are printed
OWN = "or your own: module:NAME or path/to/file.py:NAME"
ALGORITHM_HELP = f"see `fedbilevel algorithms` (simfbo, or the task's); {OWN}"
TRACKERS = "mlflow", "tensorboard", "wandb"  # the names of `fedbilevel.trackers.BY_NAME`
TASK_HELP = f"see `fedbilevel tasks` (hyper_representation); {OWN}"


class Once(argparse.Action):
    """An argparse action that stores the value of an option, and rejects a second, different value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = vars(self).setdefault("given", values)  # each parser parses once
        if option_string and before != values:
            raise argparse.ArgumentError(self, f"gets two values, {before} and {values}: leave one out")
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest command or option if one is unknown."""

    commands: Mapping[str, Parser] = MappingProxyType({})

    def add_subparsers(self, **options: Any) -> Any:
        """Make the object that adds commands to this parser."""
        made: Any = super().add_subparsers(**options)
        self.commands = made.choices
        return made

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Read the arguments of a command. An unknown argument or command ends the program."""
        args = sys.argv[1:] if args is None else list(args)
        for name in args if self.commands else ():  # no option before a command has a value
            if name in self.commands:
                break
            if not name.startswith("-"):
                self.refuse("command", name, nearest(name, self.commands))
            if not any(option.startswith(name.partition("=")[0]) for option in self._option_string_actions):
                self.refuse_option(name)
        options, extra = super().parse_known_args(args, namespace)
        if extra:
            self.refuse_option(extra[0])
        return options, extra

    def refuse_option(self, argument: str) -> NoReturn:
        """End the program because of an unknown argument.

        If the option comes before a command, the options of all commands are searched for the nearest name.
        """
        name = argument.partition("=")[0]
        near = nearest(name, self._option_string_actions)
        if not near and (near := nearest(name, self.options)):
            near = f"{near} after the command"
        self.refuse("argument", name, near)

    @property
    def options(self) -> list[str]:
        """Return the options of this parser and of its commands."""
        return [*self._option_string_actions, *(option for each in self.commands.values() for option in each.options)]

    def refuse(self, kind: str, name: str, near: str) -> NoReturn:
        """End the program because of an unknown name, and suggest the nearest name."""
        hint, listed = f"; did you mean {near}?" if near else "", f"{'option' if kind == 'argument' else kind}s"
        text = f"unknown {kind} {printable(name)}{hint} ({self.prog} --help lists all {listed})"
        raise SystemExit(fail(BAD_INPUT, text))


@dataclass(frozen=True)
class Add:
    """An object that adds commands to a parser when it is called. The help of a command is its function's docstring."""

    commands: Any

    def __call__(self, name: str, function: Callable[[Any], int]) -> argparse.ArgumentParser:
        first, _, rest = (inspect.getdoc(function) or name).partition("\n\n")
        made: argparse.ArgumentParser = self.commands.add_parser(
            name,
            help=f"{first[0].lower()}{first[1:].rstrip('.')}",
            description=first,
            epilog=rest,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.register("action", None, Once)
        made.set_defaults(command=function)
        made.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return made


def add_options(command: argparse._ActionsContainer, *names: str, **helps: str) -> None:
    """Add common options to a command, by their names.

    `helps` has other help texts for some options, by the option's name.
    """
    for name in (*names, *helps):
        given = {**OPTIONS[name], **({"help": helps[name]} if name in helps else {})}
        command.add_argument(f"--{name.replace('_', '-')}", **given)


def add_length(command: argparse.ArgumentParser) -> None:
    """Add the options for the length of a run. Only one of them may be given."""
    add_options(command.add_mutually_exclusive_group(), "rounds", "exchanges", "bytes", "evaluations", "time")


def fail(code: int, sentence: str) -> int:
    """Print a message to standard error, and return the exit code.

    The message is made printable, since it may quote untrusted text.
    """
    print(f"fedbilevel: {printable(sentence, None, kept=LINES)}", file=sys.stderr)
    return code


def spec_tables(path: Path, task: str | None = None, algorithm: str | None = None) -> dict[str, Any]:
    """Read the tables of a spec that will be run.

    `task` and `algorithm` are names that will replace the names in the spec, if given.

    If the spec names a user's own task or algorithm, running the spec executes code that is not named on the command
    line. This is first reported on standard error.
    """
    from fedbilevel.experiments import toml

    tables = toml.read(path)
    if other := toml.other_version(tables):
        fail(OK, f"{path}: {other}; numbers may differ")
    for kind, given in {"a task": task, "an algorithm": algorithm}.items():
        table = tables.get(kind.split()[1])
        name = table.get("name") if isinstance(table, dict) else table
        if given is None and isinstance(name, str):
            say_code(name, named=f"{path} names {kind} of your own: ")
    return tables


def say_code(*names: str | None, named: str = "") -> None:
    """If some of these names mean a user's own tasks or algorithms, print which code will run.

    `named` is the beginning of the line. It says in which file the name is, if the name is not on the command line.
    """
    for code in {name.rpartition(":")[0]: None for name in names if name}:
        if code:
            fail(OK, f"{named}this runs the code of {code}")


def configured(options: argparse.Namespace, *before: str) -> Spec:
    """Return the spec that the options describe.

    The settings in `before` are applied before the settings of the options.
    """
    base = spec_tables(Path(options.spec), options.task, options.algorithm) if options.spec else None
    prepare_jax()
    from fedbilevel.experiments import configure

    named = {name: getattr(options, name, None) for name in ("task", "algorithm", "data")}
    spec = configure(base, **named, settings=[*before, *settings(options)])
    tune(spec)
    return spec


def positive(text: str, unit: str) -> float:
    """Read a positive finite number."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of {unit}")
    return found


def whole(text: str, least: int) -> int:
    """Read a whole number that is at least `least`."""
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


count, seed = partial(whole, least=1), partial(whole, least=0)


def seeds(text: str) -> list[int]:
    """Read different whole numbers, separated by commas."""
    found = [seed(part) for part in text.split(",")]
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} has the same seed twice")
    return found


def names(text: str) -> list[str]:
    """Read names, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def some_names(text: str, kind: str, allowed: Iterable[str]) -> list[str]:
    """Read names, separated by commas. A text without any name, such as the value of an unset variable, is an error."""
    if found := names(text):
        return found
    raise argparse.ArgumentTypeError(f"{text!r} names no {kind} (allowed: {', '.join(allowed)})")


def _budget(unit: str, ends: str) -> dict[str, Any]:
    return {"type": partial(positive, unit=unit), "metavar": "N", "help": f"instead of --rounds: end once N {ends}"}


OPTIONS: dict[str, dict[str, Any]] = {
    "algorithm": {"metavar": "NAME", "help": ALGORITHM_HELP},
    "data": {"metavar": "NAME", "help": "the task's data set"},
    "set": {"action": "append", "default": [], "metavar": "FIELD=VALUE", "help": "see below; repeatable"},
    "spec": {"metavar": "FILE", "help": "a spec in TOML; the other options change it"},
    "cohort": {"type": count, "metavar": "N", "help": "the number of clients per round"},
    "rounds": {"type": count, "metavar": "N", "help": "the number of rounds in total"},
    "exchanges": {"type": count, "metavar": "N", "help": "instead of --rounds: end after N exchanges"},
    "bytes": _budget("bytes", "bytes have been sent, down and up, e.g. 2e9"),
    "evaluations": _budget("evaluations", "batch gradients and hvps have been computed by all clients"),
    "time": _budget("seconds", "seconds of the clock have passed"),
    "seed": {"type": seed, "metavar": "N"},
    "seeds": {"type": seeds, "metavar": "N,N,…"},
    "out": {"type": Path, "metavar": "DIR"},
    "quiet": {"action": "store_true"},
    "log": {
        "type": partial(some_names, kind="tracker", allowed=TRACKERS),
        "default": [],
        "metavar": "NAME,NAME,…",
        "help": f"record in trackers: {', '.join(TRACKERS)}",
    },
}
"""A common option -> the arguments of `add_argument` for it."""


RUN = ("rounds", "exchanges", "bytes", "evaluations", "time", "cohort", "eval_every")
FIELDS: dict[str, tuple[str, ...]] = {
    **{name: (f"run.{name}",) for name in RUN},
    **dict.fromkeys(("seed", "seeds"), ("run.seed", "task.seed", "clock.seed")),
    **dict.fromkeys(("task", "what", "base"), ("task.name",)),
    **dict.fromkeys(("algorithm", "algorithms"), ("algorithm.name",)),
    "clients": ("task.clients",),
    "data": ("task.data",),
}
"""An option -> the fields of a spec that the option sets."""


def check_fields(options: argparse.Namespace) -> None:
    """Reject a field that gets two values.

    Both values may come from --set, --grid or --search. Or one value comes from these options, and the other from an
    option such as --rounds.
    """
    given = [(name, setting) for name in ("set", "grid", "search") for setting in getattr(options, name, [])]
    before: dict[str, list[tuple[str, str]]] = {}  # field -> (option, setting) so far
    for by, setting in given:
        name, said = setting.partition("=")[0].strip(), f"--{by} {setting}"
        others = [f"--{by} {other}" for path, other in before.setdefault(by, []) if _same_field(name, path)]
        for option, paths in FIELDS.items():
            if getattr(options, option, None) not in (None, []) and any(_same_field(name, path) for path in paths):
                others.append("TASK" if paths == ("task.name",) else f"--{option.replace('_', '-')}")
        if others:
            raise ConfigurationError(f"{name} gets two values, by {said} and by {others[0]}: leave one out")
        before[by].append((name, setting))


def _same_field(one: str, other: str) -> bool:
    """Return whether two paths mean the same field; a path may lack the section."""
    return one == other or one == other.partition(".")[2] or one.partition(".")[2] == other


def check_names(options: argparse.Namespace) -> None:
    """Replace names of algorithms and tasks by the library's spelling, and reject unknown names.

    This is done before slow packages are imported.
    """
    from fedbilevel.experiments.names import known, known_rivals

    known_rivals(getattr(options, "against", None) or ())
    for name in getattr(options, "log", ()):
        if name not in TRACKERS:
            raise unknown("tracker of --log", name, TRACKERS)
    for place in ("algorithm", "algorithms", "task", "what"):
        given, kind = getattr(options, place, None), "algorithm" if place.startswith("algorithm") else "task"
        if given and (place != "what" or options.algorithms):  # without --algorithms, `what` is a list of folders
            found = [known(kind, name) for name in given] if isinstance(given, list) else known(kind, given)
            setattr(options, place, found)
    if (base := getattr(options, "base", None)) and not base.endswith(".toml"):
        options.base = known("task", base)


def settings(options: argparse.Namespace) -> list[str]:
    """Return the settings of --set and of the options for fields of [run], in the form FIELD=VALUE."""
    flags = {name: getattr(options, name, None) for name in RUN}
    return [*options.set, *(f"run.{name}={value}" for name, value in flags.items() if value is not None)]


def trackers(options: argparse.Namespace) -> list[Tracker]:
    """Return the trackers that --log names. Without --log, no tracker is loaded."""
    if not options.log:
        return []
    from fedbilevel.trackers import made

    return made(options.log)


def console(quiet: bool = False) -> Console:
    """Return the console for standard output.

    A pipe or a log file gets no colours, whatever the environment says. It gets 160 columns, or the number in COLUMNS,
    so that lines are not wrapped.
    """
    from rich.console import Console

    made = Console(quiet=quiet, force_terminal=sys.stdout.isatty())
    if not made.is_terminal:
        columns = os.environ.get("COLUMNS", "")
        made.width = int(columns) if columns.isdecimal() and int(columns) > 0 else 160
    return made


def say(terminal: Console, *lines: object) -> None:
    """Print lines without markup and without folding. Control characters that a terminal would obey are replaced."""
    said = [printable(str(line), None, kept=LINES) for line in lines]
    terminal.print(*said, sep="\n", markup=False, highlight=False, soft_wrap=True)


def say_paths(terminal: Console, paths: Mapping[str, Path | Sequence[Path]]) -> None:
    """Print the paths of written files, each after a word that describes the file."""
    for word, found in paths.items():
        say(terminal, *(f"{word:<6} {path}" for path in ([found] if isinstance(found, Path) else found)))


def prepare_jax() -> None:
    """Let JAX keep compiled programs on disk, so that later runs start quickly. JAX's own settings take precedence."""
    from fedbilevel.engines.machine import keep_on_disk_if_possible

    keep_on_disk_if_possible()


def tune(spec: Spec) -> None:
    """Set options of XLA. Call this before the first computation of the process, when XLA reads them."""
    from fedbilevel.engines.machine import tune_cpu
    from fedbilevel.engines.process_group import current_group

    one = spec.run.pooled or spec.run.cohort == 1 or current_group().processes > 1
    tune_cpu(spec.engine.devices or (1 if one else None))


def exit_code(error: BaseException) -> int | None:
    """Return the exit code for an expected error; None for an unexpected error, which is a bug of the library."""
    if isinstance(error, KeyboardInterrupt):
        return interrupts.exit_code()
    from fedbilevel.data.files import DataError

    codes: dict[Any, int] = {
        NumericalError: NUMBERS_FAIL,
        ExchangeError: NOT_ANSWERED,
        (CheckpointError, OSError): NOT_WRITTEN,
        (FedbilevelError, DataError): BAD_INPUT,
    }
    if lacks_memory(error) or lacks_rich(error):
        return BAD_INPUT
    return next((code for kinds, code in codes.items() if isinstance(error, kinds)), None)


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that NumPy, Python or XLA could not get memory."""
    return isinstance(error, MemoryError) or str(error).startswith("RESOURCE_EXHAUSTED")


def lacks_rich(error: BaseException) -> bool:
    """Return whether an error was raised because rich, with which most commands print, is not installed."""
    return isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "rich"


def sentence(error: BaseException) -> str:
    """Return the message of an error.

    For an error of the operating system, these are the file and the reason, without the number of the error.
    """
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if lacks_rich(error):
        return f"the command line needs {missing('rich', 'cli')}"
    if lacks_memory(error):
        first = str(error).partition("\n")[0].removeprefix("RESOURCE_EXHAUSTED: ").rstrip(".")
        return f"there is not enough memory ({first}): use fewer clients, fewer samples or a smaller model"
    if isinstance(error, OSError) and not isinstance(error, FedbilevelError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return str(error)
