"""Which fields a task and an algorithm have, and which values fit them.

Two forms of a value: the spec's (numbers, text, lists, tables: what TOML can hold) and the program's (XYV, optax
objects, schedules). `accept` checks and completes the first; `build` turns the first into the second.
"""

import dataclasses
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import optax

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.algorithms.parts.local_optimizers import Coefficients
from fedbilevel.core import errors
from fedbilevel.core.errors import ConfigurationError, require, unknown
from fedbilevel.core.renames import FIELDS
from fedbilevel.core.tree import XYV
from fedbilevel.experiments.choices import COEFFICIENTS, OPTIMIZERS, SCHEDULES

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): '"none"'}


@dataclass(frozen=True)
class Field:
    """A field: where errors say it is, its type, its default in the program's form."""

    name: str
    hint: Any
    default: Any
    schedulable: bool = False

    def accept(self, where: str, value: Any, fallback: Any) -> Any:
        """The value in the spec's form, checked and complete; parts that it leaves out come from `fallback`."""
        place = f"{where}.{self.name}"
        if self.hint is XYV:
            return _accept_steps(place, value, fallback)
        if self.hint is Coefficients:
            return COEFFICIENTS.complete(place, _described(value))
        if _is_optimizer(self.hint):
            return OPTIMIZERS.complete(place, "sgd" if value is self.default else value)
        if self.schedulable and isinstance(value, Mapping):
            return SCHEDULES.complete(place, value)
        if self.name == "seed":
            require(type(value) is int and 0 <= value < 2**32, place, value, "a whole number from 0 to 2³² − 1")
        if self.name == "local_steps" and self.hint is Any:
            return _accept_population_steps(place, value)
        return _fitting(place, self.hint, value)

    def build(self, value: Any) -> Any:
        """An accepted value in the program's form."""
        if self.hint is XYV:
            return XYV(*(_number_or_schedule(value[part]) for part in "xyv"))
        if self.hint is Coefficients:
            return COEFFICIENTS.build(value)
        if _is_optimizer(self.hint):
            return OPTIMIZERS.build(value)
        if self.name == "local_steps" and isinstance(value, Mapping):
            return (value["low"], value["high"])
        return _number_or_schedule(value) if self.schedulable else value


def of_algorithm(cls: Any) -> dict[str, Field]:
    """The fields of an algorithm, which is a dataclass."""
    hints = typing.get_type_hints(cls)
    return {
        f.name: Field(f.name, hints[f.name], f.default, "prepare" in f.metadata and not f.metadata.get("static"))
        for f in dataclasses.fields(cls)
    }


def of_function(function: Callable[..., Any]) -> dict[str, Field]:
    """The keyword arguments of a task, but for `party`, which says who is to see it (see federation.py)."""
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:  # a name that its module imports for type checkers alone
        name = getattr(function, "__name__", repr(function))
        raise ConfigurationError(f"the annotations of {name} cannot be read: {error}") from error
    parameters = inspect.signature(function).parameters
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named.pop("party", None)
    return {name: Field(name, hints.get(name, Any), parameter.default) for name, parameter in named.items()}


def complete(
    where: str, fields: Mapping[str, Field], given: Mapping[str, Any], preset: Mapping[str, Any]
) -> dict[str, Any]:
    """Every field in the spec's form: as given, else as the preset says, else the default."""
    for name in given:
        if not fields:
            raise ConfigurationError(f"{where}.{name} cannot be set: this {where} has no fields")
        if name not in fields:
            raise unknown_field(f"field of {where}", name, fields)
    out = {}
    for name, field in fields.items():
        fallback = preset.get(name, field.default)
        require(fallback is not inspect.Parameter.empty or name in given, f"{where}.{name}", "nothing", "given")
        out[name] = field.accept(where, given.get(name, fallback), fallback)
    return out


def unknown_field(kind: str, name: str, allowed: Iterable[str]) -> ConfigurationError:
    """The error for a field that is not there; where some algorithms have it, they are named."""
    owners = sorted(owner for owner, cls in ALGORITHMS.items() if name in of_algorithm(cls))
    if not owners or name in FIELDS:
        return errors.unknown_field(kind, name, allowed)
    return ConfigurationError(
        f"unknown {kind} {name!r}, a field of {', '.join(owners)} (allowed: {', '.join(sorted(allowed))})"
    )


def _accept_steps(place: str, value: Any, fallback: Any) -> dict[str, Any]:
    """Three step sizes: numbers or schedules; one serves all three."""
    allowed = "a positive number or a schedule, or one for each of x, y and v"
    if isinstance(value, XYV):
        value = value._asdict()
    if isinstance(value, Mapping) and SCHEDULES.key not in value:
        for part in value:
            if part not in ("x", "y", "v"):
                raise unknown(f"part of {place}", part, "xyv")
        start = fallback._asdict() if isinstance(fallback, XYV) else fallback
        parts = {**(start if isinstance(start, Mapping) else dict.fromkeys("xyv", start)), **value}
    else:
        parts = dict.fromkeys("xyv", value)
    return {part: _accept_step(f"{place}.{part}", parts[part], allowed) for part in "xyv"}


def _accept_step(place: str, value: Any, allowed: str) -> Any:
    if isinstance(value, Mapping):
        return SCHEDULES.complete(place, value)
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
    require(fits, place, value, allowed)
    return value


def _number_or_schedule(value: Any) -> Any:
    return SCHEDULES.build(value) if isinstance(value, Mapping) else value


def _accept_population_steps(place: str, value: Any) -> Any:
    """How many local steps the clients make: None, one number per client, or {low, high} to draw from."""
    if value is None or value == "none":
        return None
    if isinstance(value, Mapping):
        require(set(value) == {"low", "high"}, place, value, "{low = …, high = …}, a list, or none")
        return {name: _fitting(f"{place}.{name}", int, value[name]) for name in ("low", "high")}
    return _fitting(place, list[int], value)


def _is_optimizer(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, optax.GradientTransformation)


def _described(value: Any) -> Any:
    """Local coefficients that were given as an object, as a table."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            "name": type(value).__name__.lower(),
            **{f.name: getattr(value, f.name) for f in dataclasses.fields(value)},
        }
    return value


def _fitting(place: str, hint: Any, value: Any) -> Any:
    """The value if it has the type, with lists for all sequences and None for "none" where None may be."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return None if value == "none" else list(value) if isinstance(value, tuple) else value
    if origin in (Union, types.UnionType):
        if type(None) in inside and (value is None or value == "none"):
            return None
        for option in inside:
            try:
                return _fitting(place, option, value)
            except ConfigurationError:
                continue
    elif origin is typing.Literal:
        if any(value == word and type(value) is type(word) for word in inside):
            return value
    elif inspect.isclass(origin) and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return dict(value)
    elif inspect.isclass(origin) and issubclass(origin, Sequence):
        length = len(inside) if origin is tuple and Ellipsis not in inside else None
        if isinstance(value, list | tuple) and length in (None, len(value)):
            return [_fitting(f"{place}[{i}]", inside[0] if inside else Any, item) for i, item in enumerate(value)]
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            return value
    elif inspect.isclass(hint) and type(value) is hint:
        return value
    near = difflib.get_close_matches(value, _choices(hint), n=1, cutoff=0.5) if isinstance(value, str) else []
    suggestion = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigurationError(f"{place} = {value!r} is not allowed: it must be {_in_words(hint)}{suggestion}")


def _choices(hint: Any) -> list[str]:
    """The words that a hint allows."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return [word for word in inside if isinstance(word, str)]
    if origin in (Union, types.UnionType):
        return [word for option in inside for word in _choices(option)]
    return []


def _in_words(hint: Any) -> str:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_in_words(option) for option in inside)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inside))}"
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return "a table"
    if origin is tuple and Ellipsis not in inside:
        return f"a list of {len(inside)}, each {_in_words(inside[0])}"
    if origin is not None:
        return f"a list, each {_in_words(inside[0])}" if inside else "a list"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))
