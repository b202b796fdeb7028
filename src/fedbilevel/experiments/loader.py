"""Tasks and algorithms by name: those of the library, and a user's own, as module:NAME or path/to/file.py:NAME.

Of a task, NAME is a `Task` or a function that returns one; the function's keyword arguments are then the task's fields.
Of an algorithm, NAME is a subclass of `fedbilevel.authoring.Algorithm`; its fields are the algorithm's.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.errors import ConfigurationError, unknown
from fedbilevel.experiments.names import is_file
from fedbilevel.tasks import TASKS, Task
from fedbilevel.wording import in_a_line


def full_name(name: str) -> str:
    """The name as a spec records it: files by their absolute path, so that a run can be resumed from anywhere."""
    place, _, attribute = name.rpartition(":")
    return f"{absolute(place)}:{attribute}" if is_file(place) else name


def label(name: str) -> str:
    """The name for people: files without their folders."""
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).name}:{attribute}" if is_file(place) else name


def own_file(name: str) -> Path | None:
    """The file that a user's own task or algorithm is in, if its name says one."""
    place = code_of(name)
    return Path(place) if is_file(place) else None


def code_of(name: str) -> str:
    """The file or module with the code of a user's own task or algorithm; "" for those of the library."""
    return name.rpartition(":")[0]


def absolute(place: str) -> Path:
    """The absolute path of a file.

    Raises:
        ConfigurationError: no file can have that name.
    """
    try:
        return Path(place).expanduser().resolve()
    except (ValueError, OSError, RuntimeError) as error:  # a zero byte; a loop of links; ~ of nobody
        raise ConfigurationError(f"{place[:200]!r} is not the name of a file: {in_a_line(error)}") from error


def task_maker(name: str) -> Callable[..., Task]:
    """The function that makes a task.

    Raises:
        ConfigurationError: there is no task of that name; no such file or module, or it cannot be imported; nothing
            of that name in it, or something that is no task.
    """
    if name in TASKS:
        return TASKS[name]
    found = _found("task", name, TASKS, "a Task, or of a function making one", "Task or function that returns one")
    if isinstance(found, Task):
        return lambda: found
    if not callable(found):
        kind = type(found).__name__
        raise ConfigurationError(f"{name} is of type {kind}; it must be a Task, or a function that returns one")
    return _checked(name, found)


def algorithm_class(name: str) -> type[Algorithm]:
    """The class of an algorithm.

    Raises:
        ConfigurationError: there is no algorithm of that name; no such file or module, or it cannot be imported;
            nothing of that name in it, or something that is no subclass of `Algorithm` or leaves methods undefined.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    wanted = "subclass of fedbilevel.authoring.Algorithm"
    found = _found("algorithm", name, ALGORITHMS, f"a {wanted}", wanted)
    if not inspect.isclass(found):
        raise ConfigurationError(f"{name} is of type {type(found).__name__}; it must be a {wanted}")
    if not issubclass(found, Algorithm):
        raise ConfigurationError(f"{name} is not a {wanted}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigurationError(f"{name} does not define {' and '.join(missing)}, which every algorithm has to")
    return found


@contextmanager
def apart() -> Iterator[None]:
    """Let a copy of a user's file be executed as in another process.

    Inside, `ALGORITHMS` holds the library's alone, since the copy's may have the names of the original's, and nothing
    is found in the folders of users' files; afterwards all is what it was before.
    """
    algorithms, executed, folders, path = dict(ALGORITHMS), dict(EXECUTED), list(FOLDERS), list(sys.path)
    for name, cls in algorithms.items():
        if not cls.__module__.startswith("fedbilevel."):
            del ALGORITHMS[name]
    hidden = _with_submodules({name for name, module in sys.modules.items() if _is_users(name, module)})
    sys.path[:] = [entry for entry in path if entry not in folders]
    FOLDERS.clear()
    EXECUTED.clear()
    try:
        yield
    finally:
        _with_submodules({name for name, module in sys.modules.items() if _is_users(name, module)})
        sys.modules.update(hidden)
        sys.path[:], FOLDERS[:] = path, folders
        ALGORITHMS.clear()
        ALGORITHMS.update(algorithms)
        EXECUTED.clear()
        EXECUTED.update(executed)


def _found(kind: str, name: str, known: Iterable[str], named: str, wanted: str) -> Any:
    """The object of that name in a user's file or module."""
    place, colon, attribute = name.rpartition(":")
    if not colon:
        if is_file(name):
            raise ConfigurationError(f"{kind} {name!r} needs the name of {named}: {name}:NAME")
        raise unknown(kind, name, known)
    module = _from_file(place) if is_file(place) else _by_name(place)
    if attribute in vars(module):
        return vars(module)[attribute]
    own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    fits = _may_be_task if kind == "task" else _is_algorithm
    if candidates := [key for key, value in own.items() if fits(value, module)]:
        raise unknown(f"{kind} in {place}", attribute, candidates)
    raise ConfigurationError(f"there is no {attribute!r} in {place}, nor any {wanted}")


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Task]:
    @functools.wraps(function)  # keeps the signature, from which the fields are read
    def make(**fields: Any) -> Task:
        made = function(**fields)
        if not isinstance(made, Task):
            raise ConfigurationError(f"{name} returned {type(made).__name__}; it must return a Task")
        return made

    return make


def _from_file(place: str) -> ModuleType:
    path = absolute(place)
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}")
    _let_import(path.parent)
    state = path, path.stat().st_mtime_ns
    if state not in EXECUTED:
        EXECUTED[state] = _executed(path)
    return EXECUTED[state]


EXECUTED: dict[tuple[Path, int], ModuleType] = {}
"""The modules of files, each executed once for each state of its file, which is when it was changed."""


def _executed(path: Path) -> ModuleType:
    """The module of a file; it may import its neighbours."""
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigurationError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # where the annotations of its classes are looked up
    try:
        with _own_neighbours(path.parent, str(path)):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
        if isinstance(error, ImportError | SyntaxError):
            raise ConfigurationError(f"{path} cannot be imported: {error}") from error
        raise
    return module


def _module_name(path: Path) -> str:
    """The file's stem, as its neighbours import it; another name where an import of the stem finds another module."""
    if not path.stem.isidentifier():
        return f"own_{path.stem.replace('.', '_')}"
    try:
        found = importlib.util.find_spec(path.stem)
    except ValueError:  # a module without a spec, such as __main__
        return f"own_{path.stem}"
    same = found is None or (found.origin is not None and Path(found.origin).resolve() == path)
    return path.stem if same else f"own_{path.stem}"


def _by_name(name: str) -> ModuleType:
    _let_import(Path.cwd())
    with _own_neighbours(Path.cwd(), f"module {name!r}"):
        try:
            return importlib.import_module(name)
        except (ImportError, SyntaxError, TypeError, ValueError) as error:  # the latter two: a name like ".a" or ""
            raise ConfigurationError(f"module {name!r} cannot be imported: {error}") from error


FOLDERS: list[str] = []
"""The folders of users' files and modules, as far as they were put on sys.path for them."""


def _let_import(folder: Path) -> None:
    """Modules of that folder are found before those of other users' files, and after whatever is installed."""
    place = str(folder)
    if place in FOLDERS:
        FOLDERS.remove(place)
        sys.path[:] = [entry for entry in sys.path if entry != place]
    elif place in sys.path:
        return
    first = min((sys.path.index(other) for other in FOLDERS if other in sys.path), default=len(sys.path))
    sys.path.insert(first, place)
    FOLDERS.append(place)


@contextmanager
def _own_neighbours(folder: Path, what: str) -> Iterator[None]:
    """Refuse `what`, imported inside, if it imports a module of its folder and the process has another of that name.

    A process has one module of a name: the later file would compute with the functions of the earlier one's neighbour.
    """
    files = {name: _file_of(module) for name, module in sys.modules.items() if _is_users(name, module)}
    taken = {name: file for name, file in files.items() if _has_another(folder, name, file)}
    hidden = _with_submodules(taken)
    try:
        yield
        twice = [name for name in taken if name in sys.modules]
    finally:
        _with_submodules(taken)
        sys.modules.update(hidden)
    if twice:
        raise ConfigurationError(
            f"{what} imports {twice[0]} of its folder, and this process has another {twice[0]} already, "
            f"{taken[twice[0]]}: rename one of them, or use {what} in another process"
        )


def _with_submodules(names: Collection[str]) -> dict[str, ModuleType]:
    """Take modules, and those inside them, out of this process."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}


def _file_of(module: ModuleType) -> Path:
    """The file of a module, or the folder of a package; of what is built in, a path without a folder."""
    known = getattr(module, "__dict__", {})  # what a module imports once it is asked for is not imported here
    return Path(next(iter(known.get("__path__") or ()), None) or known.get("__file__") or "")


def _is_users(name: str, module: ModuleType) -> bool:
    return "." not in name and str(_file_of(module).parent) in FOLDERS


def _has_another(folder: Path, name: str, file: Path) -> bool:
    """Whether the folder has a module of that name which is not that of `file`, or a copy of it."""
    package, own = folder / name, folder / f"{name}.py"
    if (package / "__init__.py").is_file():
        return package != file
    return own.is_file() and own != file and not (file.is_file() and own.read_bytes() == file.read_bytes())


def _is_algorithm(value: Any, module: ModuleType) -> bool:
    """Whether this is an algorithm that the module itself defines."""
    return inspect.isclass(value) and issubclass(value, Algorithm) and value.__module__ == module.__name__


def _may_be_task(value: Any, module: ModuleType) -> bool:
    """Whether this is a Task, or a function of the module that says it returns one or, saying nothing, needs no
    arguments."""
    if not inspect.isfunction(value) or value.__module__ != module.__name__:
        return isinstance(value, Task)
    signature = inspect.signature(value)
    if signature.return_annotation is not inspect.Signature.empty:
        return signature.return_annotation in (Task, "Task")
    return all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()
    )
