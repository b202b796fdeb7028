"""The fields of an algorithm by their dotted paths, and values of theirs as JSON can hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.config import Schedule, field_values, hyperparameters
from fedbilevel.core.errors import ConfigurationError, unknown_field
from fedbilevel.core.tree import XYV


def with_values(algorithm: Algorithm, values: Mapping[str, Any]) -> Algorithm:
    """The algorithm with some fields replaced: {"server_lr.x": 0.1, "hypergradient.solver.max_steps": 5}.

    Fields are replaced in the order in which they are given: a part comes before fields of it.

    Raises:
        ConfigurationError: there is no such field, or the algorithm refuses the value.
    """
    for path, value in values.items():
        algorithm = _with_value(algorithm, path, path.split("."), value)
    return algorithm


def _with_value(holder: Any, path: str, names: list[str], value: Any) -> Any:
    fields, kind = _fields(holder), type(holder).__name__
    if not fields:
        within = path.removesuffix(".".join(names)).rstrip(".")
        raise ConfigurationError(f"{path} is no field: {within} is {holder!r}, which has none")
    name, *rest = names
    if name not in fields:
        raise unknown_field(f"field of {kind}", name, fields)
    new = _with_value(fields[name], path, rest, value) if rest else value
    return holder._replace(**{name: new}) if isinstance(holder, XYV) else dataclasses.replace(holder, **{name: new})


def _fields(holder: Any) -> dict[str, Any]:
    """The members of an algorithm, a part or a triple of step sizes, by name; nothing of anything else."""
    if isinstance(holder, XYV):
        return holder._asdict()
    whole = dataclasses.is_dataclass(holder) and not isinstance(holder, type | Schedule)
    return field_values(holder) if whole else {}


def plain(value: Any) -> Any:
    """A value of a field as JSON can hold it: numbers, text and lists as they are, a part by its name and numbers.

    What has no such form, such as a schedule, is its text in Python.
    """
    if value is None or isinstance(value, str | bool | np.bool_):
        return bool(value) if isinstance(value, np.bool_) else value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, XYV):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        numbers = ", ".join(f"{name}={one}" for name, one in hyperparameters(value).items())
        return f"{type(value).__name__}({numbers})"
    return repr(value)
