"""Find tasks and algorithms by name: the library's own, or a user's as module:NAME or path/to/file.py:NAME.

For a task, NAME is a `Task` or a function that returns one. The function's keyword arguments are the task's fields.
For an algorithm, NAME is a subclass of `fedbilevel.authoring.Algorithm`, whose fields are the fields of the algorithm.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.errors import ConfigurationError, unknown
from fedbilevel.core.tables import Fields, hints_of, names_of, parameters_of, parts_of, plain
from fedbilevel.experiments import toml
from fedbilevel.experiments.names import SEARCHES, is_file, is_own, spelled
from fedbilevel.tasks import TASKS, Task
from fedbilevel.wording import in_a_line


def full_name(kind: str, name: str) -> str:
    """Return a name in the form that a spec records: in the library's spelling, or with the absolute path of a file.

    With an absolute path, a run can be resumed from any folder.
    """
    place, _, attribute = name.rpartition(":")
    if is_file(place):
        return f"{absolute(place)}:{attribute}"
    return name if name in (ALGORITHMS if kind == "algorithm" else TASKS) else spelled(kind, name)


def label(name: str) -> str:
    """Return the name to show.

    A file is shown without its folder, and a search over x as "search: TPE". Other names do not change.
    """
    place, _, attribute = name.rpartition(":")
    if place == SEARCHES:
        return f"search: {attribute}"
    return f"{Path(place).name}:{attribute}" if is_file(place) else name


def own_file(name: str) -> Path | None:
    """Return the file of a user's task or algorithm; None if the name contains no file."""
    place = code_of(name)
    return Path(place) if is_file(place) else None


def code_of(name: str) -> str:
    """Return the file or module with the code of a user's task or algorithm; "" for a name of the library."""
    return name.rpartition(":")[0]


def absolute(place: str) -> Path:
    """Return the absolute path of a file.

    Raises:
        ConfigurationError: no file can have that name.
    """
    try:
        return Path(place).expanduser().resolve()
    except (ValueError, OSError, RuntimeError) as error:  # a zero byte, a loop of links, or ~ of an unknown user
        raise ConfigurationError(f"{place[:200]!r} is not the name of a file: {in_a_line(error)}") from error


def task_maker(name: str) -> Callable[..., Task]:
    """Return the function that makes a task.

    Raises:
        ConfigurationError: the library has no task of that name; the file or module does not exist or cannot be
            imported; or it has no task of that name.
    """
    found = _found("task", name, TASKS)
    if isinstance(found, Task):
        return lambda: found
    if not callable(found):
        kind = type(found).__name__
        raise ConfigurationError(f"{name} is of type {kind}; it must be a Task, or a function that returns one")
    return found if name in TASKS else _checked(name, found)


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class of an algorithm.

    Raises:
        ConfigurationError: the library has no algorithm of that name; the file or module does not exist or cannot be
            imported; or it has no complete subclass of `Algorithm` of that name.
    """
    found = _found("algorithm", name, ALGORITHMS)
    if not (inspect.isclass(found) and issubclass(found, Algorithm)):
        raise ConfigurationError(f"{name} is not a subclass of fedbilevel.authoring.Algorithm")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigurationError(f"{name} must define {' and '.join(missing)}, as every algorithm does")
    return found


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Task]:
    @functools.wraps(function)  # keeps the signature, from which the fields are read
    def make(**fields: Any) -> Task:
        made = function(**fields)
        if not isinstance(made, Task):
            raise ConfigurationError(f"{name} returned {type(made).__name__}; it must return a Task")
        return made

    return make


def _found(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """Return the object of that name in the library or in a user's file or module."""
    if name in known:
        return known[name]
    place, colon, attribute = name.rpartition(":")
    if not colon:
        if is_file(name):
            raise ConfigurationError(f"{kind} {name!r} needs the name of an object in this file: {name}:NAME")
        raise unknown(kind, name, known)
    module = _module(place)
    if attribute not in vars(module):
        raise unknown(f"{kind} in {place}", attribute, _defined(kind, module))
    return vars(module)[attribute]


def _defined(kind: str, module: ModuleType) -> list[str]:
    """Return the names of algorithms, or of tasks and functions, that a module defines and does not import."""

    def fits(value: Any) -> bool:
        if isinstance(value, Task) or getattr(value, "__module__", "") != module.__name__:
            return kind == "task" and isinstance(value, Task)
        if kind == "task":
            return inspect.isfunction(value)
        return inspect.isclass(value) and issubclass(value, Algorithm) and not inspect.isabstract(value)

    return [name for name, value in vars(module).items() if fits(value)]


FOLDER: list[Path] = []
"""The folder from which this process has loaded a user's code; empty if it has loaded none."""


def _module(place: str) -> ModuleType:
    """Import a user's file or module, which may import other files of its folder.

    All user code of a process must be in one folder, since Python would confuse files of the same name in two folders.
    """
    file = absolute(place) if is_file(place) else None
    if file and not file.is_file():
        raise ConfigurationError(f"there is no file {file}")
    if file and "." in file.stem:
        raise ConfigurationError(f"{file} cannot be imported: give the file a name without dots before .py")
    try:
        if file or importlib.util.find_spec(place.partition(".")[0]) is None:
            _let_import(place, file.parent if file else Path.cwd())
        module = importlib.import_module(file.stem if file else place)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:  # the last two: names like ".a" or ""
        if isinstance(error, ConfigurationError):
            raise
        what = file or f"module {place!r}"
        raise ConfigurationError(f"{what} cannot be imported: {error}") from error
    if file and Path(module.__file__ or "").resolve() != file:
        raise ConfigurationError(f"Python finds another module named {file.stem}: rename the file", where=str(file))
    return module


def _let_import(place: str, folder: Path) -> None:
    """Let Python import modules of a folder. Installed modules take precedence. A second folder is rejected."""
    if FOLDER and folder not in FOLDER:
        text = f"{place} is in {folder}, but this process has loaded code from {FOLDER[0]}: put both into one folder"
        raise ConfigurationError(f"{text}, or use another process")
    if not FOLDER:
        FOLDER.append(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def shown(kind: str, name: str) -> str:
    """Return the docstring of an algorithm or task, and its section of a spec with all defaults.

    Raises:
        ConfigurationError: there is no algorithm or task of that name.
    """
    if kind == "task":
        function = task_maker(name)
        about = None if is_own(name) else inspect.getdoc(inspect.getmodule(function))
        given = {one: value for one, value in parameters_of(function).items() if value is not inspect.Parameter.empty}
        return "\n\n".join(filter(None, [about, inspect.getdoc(function), _section("task", name, given)]))
    cls = algorithm_class(name)
    problems = f"Problems: {', '.join(problem.__name__ for problem in cls.solves)}."
    fields = {one.name: one.default for one in dataclasses.fields(cls) if one.default is not dataclasses.MISSING}
    kinds = dict.fromkeys(_kinds(cls, ""))
    parts = "\n".join(["parts:", *kinds]) if kinds else None
    return "\n\n".join(filter(None, [inspect.getdoc(cls), problems, _section("algorithm", name, fields), parts]))


def _section(kind: str, name: str, fields: Fields) -> str:
    return toml.dumps({kind: {"name": name, **plain(fields)}}).rstrip()


def _kinds(cls: Any, within: str) -> Iterator[str]:
    """Yield a line for each field whose value is a part: the field's path and the names of the possible parts."""
    for name in names_of(cls):
        parts = parts_of(hints_of(cls)[name])
        if parts:
            yield f"{within}{name}: {', '.join(parts)}"
        for part in parts.values():
            yield from _kinds(part, f"{within}{name}.")
