"""Hyperparameters read from a configuration and its parts: listed by path, or replaced.

A path is that of the field, "inner.lr". Each of three step sizes has a path of its own, "client_lr.x", and so has each
of several numbers in a field, "inner.lr[0]".
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.config import Schedule
from fedbilevel.core.errors import is_count
from fedbilevel.core.tree import XYV

TIED = 0.05
"""A client's step that is None is this part of the server's step that it is tied to."""

Keys = tuple[str | int, ...]
"""Names of fields, from outside to inside; at the end x, y, v or a number where the field has several values."""


class FieldEntry(NamedTuple):
    """A value in a field of a configuration or of one of its parts."""

    keys: Keys
    holders: tuple[Any, ...]  # the configuration, its part, …, down to the one whose field it is
    field: dataclasses.Field[Any]
    value: Any

    @property
    def path(self) -> str:
        """Write the keys as one path."""
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys).lstrip(".")

    @property
    def of(self) -> str | None:
        """Return x, y or v for one of three step sizes, None for any other value."""
        return str(self.keys[-1]) if isinstance(getattr(self.holders[-1], self.field.name), XYV) else None

    @property
    def tied_to(self) -> Any:
        """Return the server's step that this step is tied to, or None."""
        name = self.field.metadata.get("tied")
        step = getattr(self.holders[-1], name) if name else None
        return getattr(step, self.of) if self.of and step is not None else step


class OpenStep(NamedTuple):
    """A step that is None and adapts."""

    part: Any  # the method, or the part of it, whose field it is
    kind: str  # a StepKind, or "alone" where each client solves a system of its own
    of: str  # x, y or v


def entries(
    configuration: Any, *, unwrapped: bool = False, keys: Keys = (), holders: tuple[Any, ...] = ()
) -> Iterator[FieldEntry]:
    """List the values of all fields, in order; after a part, those of its fields.

    Args:
        configuration: a method or a part.
        unwrapped: whether the keys leave out the field of a wrapper that holds what it changes.
        keys, holders: of the field that has the configuration, if it is a part.
    """
    holders = (*holders, configuration)
    for field in dataclasses.fields(configuration):
        for inside, value in _values(field, getattr(configuration, field.name)):
            entry = FieldEntry((*keys, field.name, *inside), holders, field, value)
            yield entry
            if is_part(value):
                hidden = unwrapped and field.metadata.get("wrapped")
                yield from entries(value, unwrapped=unwrapped, keys=keys if hidden else entry.keys, holders=holders)


def _values(field: dataclasses.Field[Any], value: Any) -> Iterator[tuple[Keys, Any]]:
    """List the values of a field, each with its key; those of a static field are one."""
    if isinstance(value, XYV):
        yield from (((name,), size) for name, size in value._asdict().items())
    elif type(value) is tuple and not field.metadata.get("static"):
        yield from (((place,), one) for place, one in enumerate(value))
    else:
        yield (), value


def is_part(value: Any) -> bool:
    """Say whether a field's value is a configuration itself."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Schedule)


def replaced(node: Any, keys: Sequence[str | int], value: Any) -> Any:
    """Return a configuration, or a part or field of it, with a value in the place that the keys lead to.

    Nothing is checked again: numbers may be of a round that is traced.
    """
    if not keys:
        return value
    key, *rest = keys
    if isinstance(key, int):
        return (*node[:key], replaced(node[key], rest, value), *node[key + 1 :])
    inside = replaced(getattr(node, key), rest, value)
    if isinstance(node, XYV):
        return node._replace(**{key: inside})
    changed = copy.copy(node)
    object.__setattr__(changed, key, inside)
    return changed


def at(configuration: Any, round: Array | int) -> Any:
    """Return the configuration with every schedule replaced by its value at `round` (0 is the first), one by inner
    round too by a schedule of that alone.

    Values of schedules are not checked: a step size may well begin or end at 0.
    """
    for entry in entries(configuration):
        if isinstance(entry.value, Schedule):
            configuration = replaced(configuration, entry.keys, entry.value.at(round))
    return configuration


def halved(configuration: Any) -> Any:
    """Return the configuration with every step size halved, in its parts too."""

    def half(size: Any) -> Any:
        if not isinstance(size, Schedule):
            return size / 2
        function = size.function
        return Schedule((lambda round, k: function(round, k) / 2) if size.by_k else lambda round: function(round) / 2)

    for step in _steps(configuration):
        configuration = replaced(configuration, step.keys, half(step.value))
    return configuration


def tied(configuration: Any) -> Any:
    """Return the configuration with a number for every step that is None and tied to another, in parts too."""
    for entry in entries(configuration):
        server = entry.tied_to
        if entry.value is None and server is not None:
            server = server.function(0) if isinstance(server, Schedule) else server  # by inner round: that of the first
            number = TIED * (jnp.min(jnp.asarray(server)) if isinstance(server, tuple) else server)
            configuration = replaced(configuration, entry.keys, number)
    return configuration


def is_step(name: str) -> bool:
    """Say whether a field is a step size: it is called lr, step, or something_lr."""
    return name in ("lr", "step") or name.endswith("_lr")


def given_steps(configuration: Any) -> list[str]:
    """List the step sizes that are numbers or schedules, in parts too, by path; three of a field by its name."""
    return list(dict.fromkeys(re.sub(r"\.[xyv]$", "", step.path) for step in _steps(configuration)))


def _steps(configuration: Any) -> Iterator[FieldEntry]:
    found = (entry for entry in entries(configuration) if is_step(entry.field.name))
    return (entry for entry in found if entry.value is not None and not is_part(entry.value))


def schedules(configuration: Any) -> Iterator[tuple[str, Schedule]]:
    """List the schedules, in parts too, each with its path."""
    return ((entry.path, entry.value) for entry in entries(configuration) if isinstance(entry.value, Schedule))


def open_steps(configuration: Any) -> dict[str, OpenStep]:
    """List the steps that are None and adapt, in parts too, by path."""
    found: dict[str, OpenStep] = {}
    for entry in entries(configuration):
        kind = entry.field.metadata.get("adaptive")
        if kind is None or entry.value is not None or entry.tied_to is not None:
            continue
        alone = entry.of is None and any(getattr(holder, "alone", False) for holder in entry.holders)
        of = entry.of or ("x" if kind.endswith("x") else "y")
        found[entry.path] = OpenStep(entry.holders[-1], "alone" if alone else kind, of)
    return found


def hyperparameters(configuration: Any) -> dict[str, Any]:
    """Return every number and plain choice of a configuration by its path, as JSON has it; functions are left out."""
    leaves = jax.tree_util.tree_leaves_with_path(configuration)
    values = {jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf).tolist() for path, leaf in leaves}
    return values | _choices(configuration)


def local_epochs(configuration: Any) -> dict[str, int]:
    """List the fields `local_epochs` that are not None, in parts too, by path."""
    found = {path: value for path, value in _choices(configuration).items() if path.split(".")[-1] == "local_epochs"}
    return {path: epochs for path, epochs in found.items() if epochs is not None}


def _choices(configuration: Any) -> dict[str, Any]:
    """List the static fields that JSON can hold, in parts too, by path."""
    values: dict[str, Any] = {}
    for entry in entries(configuration):
        value = entry.value
        several = isinstance(value, tuple) and all(map(is_count, value))  # an optax optimizer is a tuple, too
        if entry.field.metadata.get("static") and (several or isinstance(value, int | float | str | None)):
            values[entry.path] = list(value) if several else value
    return values


def field_values(configuration: Any) -> dict[str, Any]:
    """Return the fields of a configuration by name."""
    return {field.name: getattr(configuration, field.name) for field in dataclasses.fields(configuration)}


def own_values(configuration: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults, by name."""
    defaults = {field.name: field.default for field in dataclasses.fields(configuration)}
    return {name: value for name, value in field_values(configuration).items() if value != defaults[name]}
