"""What `fedbilevel algorithms NAME` and `fedbilevel tasks NAME` show."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from fedbilevel.core.tables import Fields, hints_of, names_of, parameters_of, parts_of, plain
from fedbilevel.experiments import toml
from fedbilevel.experiments.loader import algorithm_class, task_maker
from fedbilevel.experiments.names import is_own


def shown(kind: str, name: str) -> str:
    """Return the docstring of an algorithm or task, and its section of a spec with all defaults, to be copied.

    Raises:
        ConfigurationError: there is none of that name.
    """
    return _algorithm(name) if kind == "algorithm" else _task(name)


def _algorithm(name: str) -> str:
    cls = algorithm_class(name)
    problems = f"Problems: {', '.join(problem.__name__ for problem in cls.solves)}."
    fields = {one.name: one.default for one in dataclasses.fields(cls) if one.default is not dataclasses.MISSING}
    kinds = dict.fromkeys(_kinds(cls, ""))
    parts = "\n".join(["parts:", *kinds]) if kinds else None
    return "\n\n".join(filter(None, [inspect.getdoc(cls), problems, _section("algorithm", name, fields), parts]))


def _task(name: str) -> str:
    function = task_maker(name)
    about = None if is_own(name) else inspect.getdoc(inspect.getmodule(function))
    fields = {one: value for one, value in parameters_of(function).items() if value is not inspect.Parameter.empty}
    return "\n\n".join(filter(None, [about, inspect.getdoc(function), _section("task", name, fields)]))


def _section(kind: str, name: str, fields: Fields) -> str:
    return toml.dumps({kind: {"name": name, **plain(fields)}}).rstrip()


def _kinds(cls: Any, within: str) -> Iterator[str]:
    """A line for each field that is a part: its path, and the kinds that it may be."""
    for name in names_of(cls):
        parts = parts_of(hints_of(cls)[name])
        if parts:
            yield f"{within}{name}: {', '.join(parts)}"
        for part in parts.values():
            yield from _kinds(part, f"{within}{name}.")
