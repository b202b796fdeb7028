"""Tasks by name: those of the library, and a user's own, as module:NAME or path/to/file.py:NAME.

NAME is a `Task`, or a function that returns one; the function's keyword arguments are then the task's fields.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbilevel.core.errors import ConfigurationError, unknown
from fedbilevel.quoting import in_a_line
from fedbilevel.tasks import TASKS, Task


def is_task(name: str) -> bool:
    """Whether a name is that of a task, the library's or a user's own."""
    return name in TASKS or ":" in name


def full_name(name: str) -> str:
    """The name as a spec records it: files by their absolute path, so that a run can be resumed from anywhere."""
    place, _, attribute = name.rpartition(":")
    return f"{_path(place)}:{attribute}" if _is_file(place) else name


def label(name: str) -> str:
    """The name for people: files without their folders."""
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).name}:{attribute}" if _is_file(place) else name


def own_file(name: str) -> Path | None:
    """The file that a task is in, if its name says one."""
    place, _, _ = name.rpartition(":")
    return Path(place) if _is_file(place) else None


def code_of(name: str) -> str:
    """The file or module whose code makes the task, if it is a user's own; else ""."""
    return "" if name in TASKS else name.rpartition(":")[0]


def task_maker(name: str) -> Callable[..., Task]:
    """The function that makes a task.

    Raises:
        ConfigurationError: there is no task of that name; no such file or module, or it cannot be imported; nothing
            of that name in it, or something that is no task.
    """
    if name in TASKS:
        return TASKS[name]
    place, colon, attribute = name.rpartition(":")
    if not colon:
        if _is_file(name):
            raise ConfigurationError(
                f"task {name!r} needs the name of a Task, or of a function making one: {name}:NAME"
            )
        raise unknown("task", name, TASKS)
    module = _from_file(place) if _is_file(place) else _by_name(place)
    if attribute not in vars(module):
        if tasks := _candidates(module):
            raise unknown(f"task in {place}", attribute, tasks)
        raise ConfigurationError(f"there is no {attribute!r} in {place}, nor any Task or function that returns one")
    found = vars(module)[attribute]
    if isinstance(found, Task):
        return lambda: found
    if not callable(found):
        kind = type(found).__name__
        raise ConfigurationError(f"{name} is of type {kind}; it must be a Task, or a function that returns one")
    return _checked(name, found)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Task]:
    @functools.wraps(function)  # keeps the signature, from which the fields are read
    def make(**fields: Any) -> Task:
        made = function(**fields)
        if not isinstance(made, Task):
            raise ConfigurationError(f"{name} returned {type(made).__name__}; it must return a Task")
        return made

    return make


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _path(place: str) -> Path:
    try:
        return Path(place).expanduser().resolve()
    except (ValueError, OSError, RuntimeError) as error:  # a zero byte; a loop of links; ~ of nobody
        raise ConfigurationError(f"{place[:200]!r} is not the name of a file: {in_a_line(error)}") from error


def _from_file(place: str) -> ModuleType:
    path = _path(place)
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    return _executed(path, path.stat().st_mtime_ns)


@functools.cache
def _executed(path: Path, changed: int) -> ModuleType:
    """The module of a file, executed once for each state of the file; it may import its neighbours."""
    _let_import(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise ConfigurationError(f"{path} cannot be imported: {error}") from error
    return module


def _by_name(name: str) -> ModuleType:
    _let_import(Path.cwd())
    try:
        return importlib.import_module(name)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:  # the latter two: a name like ".a" or ""
        raise ConfigurationError(f"module {name!r} cannot be imported: {error}") from error


def _let_import(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _candidates(module: ModuleType) -> list[str]:
    """Names in a module that may be tasks: its Tasks, and those of its own functions that may make one."""
    own = {name: thing for name, thing in vars(module).items() if not name.startswith("_")}
    return [name for name, thing in own.items() if isinstance(thing, Task) or _may_make_one(thing, module)]


def _may_make_one(thing: Any, module: ModuleType) -> bool:
    """Whether this is a function of the module that says it returns a Task or, saying nothing, needs no arguments."""
    if not inspect.isfunction(thing) or thing.__module__ != module.__name__:
        return False
    signature = inspect.signature(thing)
    if signature.return_annotation is not inspect.Signature.empty:
        return signature.return_annotation in (Task, "Task")
    return all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()
    )
