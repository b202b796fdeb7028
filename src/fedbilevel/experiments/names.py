"""The names of what there is to run, read from the library's files, which are not run: a list does not wait for JAX."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import unknown

ROOT = Path(__file__).parents[1]


def is_file(place: str) -> bool:
    """Tell whether that is a path rather than a module's name."""
    return place.endswith(".py") or "/" in place


def is_own(name: str) -> bool:
    """Tell whether a name is that of a user's own task or algorithm: module:NAME, or in a file."""
    return ":" in name or is_file(name)


def is_task(name: str) -> bool:
    """Tell whether a name is that of a task of the library, or may be that of a user's own."""
    return ":" in name or name in library("task")


def require_known(kind: str, name: str | None) -> None:
    """Refuse the name of a task or algorithm that is neither the library's nor a user's own."""
    if name is not None and not is_own(name) and name not in library(kind):
        raise unknown(kind, name, library(kind))


@functools.cache
def library(kind: str) -> dict[str, str]:
    """Return the names of all algorithms, or of all tasks, each with the first line of its docstring."""
    files = sorted((ROOT / f"{kind}s").glob("[!_]*.py"))
    read = _algorithms if kind == "algorithm" else _task
    return dict(sorted(item for file in files for item in read(file.stem, ast.parse(file.read_text("utf-8")))))


def _algorithms(file: str, module: ast.Module) -> Iterator[tuple[str, str]]:
    """Find the classes of a file that have a name."""
    for cls in module.body:
        for node in cls.body if isinstance(cls, ast.ClassDef) else []:
            match node:
                case ast.Assign(targets=[ast.Name(id="name")], value=ast.Constant(value=str(name))):
                    yield name, _first_line(cls)


def _task(file: str, module: ast.Module) -> Iterator[tuple[str, str]]:
    """Find the function that has the file's name; its module says what the task is."""
    if any(isinstance(node, ast.FunctionDef) and node.name == file for node in module.body):
        yield file, _first_line(module)


def _first_line(node: Any) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0].rstrip(".")


def listed(kind: str) -> str:
    """Return a line for each algorithm or task."""
    lines = [f"{name:<20} {text}" for name, text in library(kind).items()]
    return "\n".join([*lines, "", f"more about each: fedbilevel {kind}s NAME"])
