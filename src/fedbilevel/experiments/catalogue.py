"""What there is to run, read from a file, so that a list of it does not wait for JAX and every method to load.

`catalogue.json` beside this module holds what `experiments.facts` finds in classes and signatures; `make catalogue`
writes it, and a test compares. What is a user's own is not in it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

FILE = Path(__file__).with_name("catalogue.json")
MISSING = "–"

Kinds = dict[str, dict[str, str]]
"""{kind of a part: that kind's fields with defaults}."""


@dataclass(frozen=True)
class AlgorithmFacts:
    """What is known of an algorithm: the facts of its class, its needs with the kinds of problem, and its fields.

    `fields` has the defaults in TOML's notation, and `parts` says what the fields that are parts may be; a field of a
    part is named by its dotted path.
    """

    name: str
    title: str
    paper: str
    exchanges: str
    needs: str
    good_for: str
    client_state: str
    cost: str
    up: str
    hvps: str
    bias: str
    submodels: str
    fields: dict[str, str]
    parts: dict[str, Kinds]


@dataclass(frozen=True)
class TaskFacts:
    """What is known of a task: a line about it, and its fields with their defaults in TOML's notation."""

    name: str
    title: str
    fields: dict[str, str]


Listed = TypeVar("Listed", AlgorithmFacts, TaskFacts)


def algorithms(name: str | None = None) -> list[AlgorithmFacts]:
    """Every algorithm of the library by name, or the one of that name.

    Raises:
        ConfigurationError: there is no such algorithm; the message names the nearest one.
    """
    return _chosen("algorithm", _library()[0], name)


def tasks(name: str | None = None) -> list[TaskFacts]:
    """Every task of the library by name, or the one of that name.

    Raises:
        ConfigurationError: there is no such task; the message names the nearest one.
    """
    return _chosen("task", _library()[1], name)


def is_file(place: str) -> bool:
    """Whether that is a path rather than a module's name."""
    return place.endswith(".py") or "/" in place


def is_own(name: str) -> bool:
    """Whether a name is that of a user's own task or algorithm: module:NAME, or in a file."""
    return ":" in name or is_file(name)


def is_task(name: str) -> bool:
    """Whether a name is that of a task of the library, or may be that of a user's own."""
    return ":" in name or name in _library()[1]


def require_known(*, task: str | None = None, algorithm: str | None = None) -> None:
    """Refuse the name of a task or algorithm that is neither the library's nor a user's own."""
    if task is not None and not is_own(task):
        tasks(task)
    if algorithm is not None and not is_own(algorithm):
        algorithms(algorithm)


@functools.cache
def _library() -> tuple[dict[str, AlgorithmFacts], dict[str, TaskFacts]]:
    saved: dict[str, list[dict[str, Any]]] = json.loads(FILE.read_text("utf-8"))
    found = [AlgorithmFacts(**one) for one in saved["algorithms"]], [TaskFacts(**one) for one in saved["tasks"]]
    return {one.name: one for one in found[0]}, {one.name: one for one in found[1]}


def _chosen(kind: str, known: Mapping[str, Listed], name: str | None) -> list[Listed]:
    if name is None:
        return list(known.values())
    if name not in known:
        from fedbilevel.core.errors import unknown

        raise unknown(kind, name, known)
    return [known[name]]
