"""List and replace the hyperparameters of a configuration and of its parts, by their paths.

A path names a field, such as "inner.lr". Each of the step sizes of x, y and v has its own path, such as "client_lr.x",
and so has each of several numbers in a field, such as "inner.lr[0]".
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
"""The ratio of a client's step size to the server's, if the client's is None and therefore tied to the server's."""

Keys = tuple[str | int, ...]
"""The names of nested fields, the outermost first; then x, y, v or an index if a field has several values."""


class FieldEntry(NamedTuple):
    """Describe a value in a field of a configuration or of one of its parts."""

    keys: Keys
    holders: tuple[Any, ...]  # the configuration, then its part, and so on; the last one has the field
    field: dataclasses.Field[Any]
    value: Any

    @property
    def path(self) -> str:
        """Return the keys as one path."""
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys).lstrip(".")

    @property
    def of(self) -> str | None:
        """Return the variable of a step size, "x", "y" or "v".

        The result is None if the field does not have a step size for each of these three variables.
        """
        return str(self.keys[-1]) if isinstance(getattr(self.holders[-1], self.field.name), XYV) else None

    @property
    def default(self) -> Any:
        """Return the default of the value's field.

        If the value is one of the three step sizes of a field, for x, y or v, this is the default of that step size.
        """
        default = self.field.default
        return getattr(default, self.of) if self.of and isinstance(default, XYV) else default

    @property
    def tied_to(self) -> Any:
        """Return the server's step size to which this step size is tied, or None."""
        name = self.field.metadata.get("tied")
        step = getattr(self.holders[-1], name) if name else None
        return getattr(step, self.of) if self.of and step is not None else step


class OpenStep(NamedTuple):
    """Describe a step size that is None, so that it adapts."""

    part: Any  # the method or the part that has the field
    kind: str  # a StepKind, or "alone" if each client solves a linear system of its own
    of: str  # the variable that the step changes: "x", "y" or "v"


def entries(
    configuration: Any, *, unwrapped: bool = False, keys: Keys = (), holders: tuple[Any, ...] = ()
) -> Iterator[FieldEntry]:
    """Yield the value of each field in order. After a value that is a part, the values of the part's fields follow.

    Args:
        configuration: a method or a part.
        unwrapped: whether keys leave out the field in which a wrapper holds another configuration.
        keys: for a part, the keys that lead from the method to the part; for a method, ().
        holders: for a part, the method and the parts that contain it, from outside to inside; for a method, ().
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
    """Yield the values of a field with their keys; a static field is yielded as one value."""
    if isinstance(value, XYV):
        yield from (((name,), size) for name, size in value._asdict().items())
    elif type(value) is tuple and not field.metadata.get("static"):
        yield from (((place,), number) for place, number in enumerate(value))
    else:
        yield (), value


def is_part(value: Any) -> bool:
    """Return whether a field's value is itself a configuration."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type | Schedule)


def replaced(node: Any, keys: Sequence[str | int], value: Any) -> Any:
    """Return a copy of a configuration, or of a part or field, with another value at the place that `keys` names.

    Values are not checked again, since numbers may be tracers.
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
    """Return the configuration with every schedule replaced by its value in a round, where 0 is the first round.

    A schedule that also depends on the inner round becomes a schedule that depends only on the inner round. Values of
    schedules are not checked, since a step size may begin or end at 0.
    """
    for entry in entries(configuration):
        if isinstance(entry.value, Schedule):
            configuration = replaced(configuration, entry.keys, entry.value.at(round))
    return configuration


def halved(configuration: Any) -> Any:
    """Return the configuration with all step sizes halved, including the step sizes of its parts."""

    def half(size: Any) -> Any:
        if not isinstance(size, Schedule):
            return size / 2
        function = size.function
        return Schedule((lambda round, k: function(round, k) / 2) if size.by_k else lambda round: function(round) / 2)

    for step in _steps(configuration):
        configuration = replaced(configuration, step.keys, half(step.value))
    return configuration


def tied(configuration: Any) -> Any:
    """Return the configuration with a number in place of every step size that is None and tied to another.

    Step sizes in the configuration's parts are included.
    """
    for entry in entries(configuration):
        server = entry.tied_to
        if entry.value is None and server is not None:
            server = (
                server.function(0) if isinstance(server, Schedule) else server
            )  # the value of the first inner round
            number = TIED * (jnp.min(jnp.asarray(server)) if isinstance(server, tuple) else server)
            configuration = replaced(configuration, entry.keys, number)
    return configuration


def is_step(name: str) -> bool:
    """Return whether a field is a step size: its name is lr, step, or ends in _lr."""
    return name in ("lr", "step") or name.endswith("_lr")


def given_steps(configuration: Any, halvings: int = 0) -> list[str]:
    """Return the paths of the step sizes that the user set, including those in parts; x, y and v share one path.

    The user has set a step size if it differs from the default of its field. If the user set none and none adapts, the
    paths of all step sizes are returned.

    Args:
        configuration: a method or a part.
        halvings: how often the run has halved the step sizes that the user set.
    """
    steps = list(_steps(configuration))
    given = [step for step in steps if isinstance(step.value, Schedule) or step.value * 2**halvings != step.default]
    named = given if given or open_steps(configuration) else steps
    return list(dict.fromkeys(re.sub(r"\.[xyv]$", "", step.path) for step in named))


def _steps(configuration: Any) -> Iterator[FieldEntry]:
    steps = (entry for entry in entries(configuration) if is_step(entry.field.name))
    return (entry for entry in steps if entry.value is not None and not is_part(entry.value))


def schedules(configuration: Any) -> Iterator[tuple[str, Schedule]]:
    """Yield the schedules with their paths, including those in parts."""
    return ((entry.path, entry.value) for entry in entries(configuration) if isinstance(entry.value, Schedule))


def open_steps(configuration: Any) -> dict[str, OpenStep]:
    """Return the step sizes of a method and its parts that are None and adapt, by their paths."""
    steps: dict[str, OpenStep] = {}
    for entry in entries(configuration):
        kind = entry.field.metadata.get("adaptive")
        if kind is None or entry.value is not None or entry.tied_to is not None:
            continue
        alone = entry.of is None and any(getattr(holder, "alone", False) for holder in entry.holders)
        of = entry.of or ("x" if kind.endswith("x") else "y")
        steps[entry.path] = OpenStep(entry.holders[-1], "alone" if alone else kind, of)
    return steps


def hyperparameters(configuration: Any) -> dict[str, Any]:
    """Return all numbers and plain choices of a configuration by path, as JSON values; functions are left out."""
    leaves = jax.tree_util.tree_leaves_with_path(configuration)
    values = {jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf).tolist() for path, leaf in leaves}
    return values | _choices(configuration)


def local_epochs(configuration: Any) -> dict[str, int]:
    """Return the fields `local_epochs` that are not None, by path without wrappers, including those in parts."""
    fields = {entry.path: entry.value for entry in entries(configuration, unwrapped=True)}
    return {path: n for path, n in fields.items() if path.split(".")[-1] == "local_epochs" and n is not None}


def _choices(configuration: Any) -> dict[str, Any]:
    """Return the static fields whose values JSON can hold, by path, including those in parts."""
    values: dict[str, Any] = {}
    for entry in entries(configuration):
        value = entry.value
        several = isinstance(value, tuple) and all(map(is_count, value))  # an optimizer of Optax is a tuple too
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
