"""The fields of tasks, algorithms and their parts, and which values fit them.

A value has two forms: the spec's (numbers, text, lists and tables, which TOML can hold) and the program's (XYV, optax
objects, schedules, parts). `Field.accept` checks and completes a value in the spec's form; `Field.build` turns it into
the program's form.

Three kinds of field hold a table with a name:

- A part: the annotation is a configuration class (core/config.py) with a class attribute `kind`, or a union of several.
  The table has the kind under "name" and every field of that class, e.g. {name = "momentum", decay = 0.9}; these
  fields may be parts again.
- A server optimizer: {name = "adam", b1 = 0.9}.
- A schedule in place of a number: {schedule = "cosine", start = 0.1, steps = 500}.

The name alone stands for that class with its own defaults.
"""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import jax.numpy as jnp
import optax

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core import errors
from fedbilevel.core.errors import ConfigurationError, require, unknown
from fedbilevel.core.tree import XYV

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): '"none"'}


REQUIRED = float("nan")  # in place of a default


@dataclass(frozen=True)
class Maker:
    """A function of numbers and flags, with their defaults."""

    function: Callable[..., Any]
    defaults: Mapping[str, float | bool]


@dataclass(frozen=True)
class Choice:
    """A closed list of makers."""

    kind: str  # as errors call it
    key: str  # the entry of the table that holds the name
    makers: Mapping[str, Maker]
    # Which numbers are allowed.
    rules: Mapping[str, tuple[Callable[[Any], bool], str]] = dataclasses.field(default_factory=dict)

    def complete(self, place: str, given: Any) -> dict[str, Any]:
        """The table with every number filled in, or an error that names the field."""
        table = {self.key: given} if isinstance(given, str) else given
        if not isinstance(table, Mapping) or not isinstance(table.get(self.key), str):
            example = f'{{{self.key} = "{next(iter(self.makers))}", …}}'
            raise ConfigurationError(path=place, got=given, allowed=f"a table like {example}")
        name = table[self.key]
        if name not in self.makers:
            raise unknown(f"{self.kind} for {place}", name, self.makers)
        defaults = self.makers[name].defaults
        out: dict[str, Any] = {self.key: name}
        for extra in sorted(set(table) - set(defaults) - {self.key}):
            raise unknown(f"field of the {self.kind} {name!r} in {place}", extra, defaults)
        for entry, default in defaults.items():
            out[entry] = _number(f"{place}.{entry}", table.get(entry, default), isinstance(default, bool))
            if entry in self.rules:
                fits, allowed = self.rules[entry]
                require(fits(out[entry]), f"{place}.{entry}", out[entry], allowed)
        return out

    def build(self, table: Mapping[str, Any]) -> Any:
        """The object that a complete table describes: the same one for the same table, as JAX compares functions."""
        fields = {name: value for name, value in table.items() if name != self.key}
        return _built(self.makers[table[self.key]].function, **fields)


@functools.lru_cache(64, typed=True)
def _built(function: Callable[..., Any], **fields: Any) -> Any:
    return function(**fields)


def _number(field: str, value: Any, flag: bool) -> Any:
    if flag:
        require(isinstance(value, bool), field, value, "true or false")
        return value
    if isinstance(value, float) and value != value:
        raise ConfigurationError(f"{field} is missing: it must be given, a number")
    require(isinstance(value, int | float) and not isinstance(value, bool), field, value, "a number")
    return value


def cosine(start: float, steps: int, end: float) -> optax.Schedule:
    """From start to end along half a cosine in `steps` rounds, then constant."""
    return optax.cosine_decay_schedule(start, steps, alpha=end / start)


def linear(start: float, steps: int, end: float) -> optax.Schedule:
    """From start to end on a line in `steps` rounds, then constant."""
    return optax.linear_schedule(start, end, steps)


def exponential(start: float, steps: int, rate: float) -> optax.Schedule:
    """start · rate^(round/steps)."""
    return optax.exponential_decay(start, steps, rate)


def polynomial(start: float, steps: int, end: float, power: float) -> optax.Schedule:
    """end + (start − end)(1 − round/steps)^power until `steps`, then constant."""
    return optax.polynomial_schedule(start, end, power, steps)


def inverse_sqrt(start: float, steps: int) -> optax.Schedule:
    """start / √(1 + round/steps)."""
    return lambda round: start / jnp.sqrt(1 + round / steps)


POSITIVE = (lambda value: 0 < value < math.inf, "a positive finite number")
STEPS = {
    "start": POSITIVE,
    "end": (lambda value: 0 <= value < math.inf, "zero or a positive finite number"),
    "rate": POSITIVE,
    "power": POSITIVE,
    "steps": (lambda value: isinstance(value, int) and value >= 1, "a positive whole number of rounds"),
}

SCHEDULES = Choice(
    "schedule",
    "schedule",
    {
        "cosine": Maker(cosine, {"start": REQUIRED, "steps": REQUIRED, "end": 0.0}),
        "exponential": Maker(exponential, {"start": REQUIRED, "steps": REQUIRED, "rate": REQUIRED}),
        "inverse_sqrt": Maker(inverse_sqrt, {"start": REQUIRED, "steps": 1}),
        "linear": Maker(linear, {"start": REQUIRED, "steps": REQUIRED, "end": 0.0}),
        "polynomial": Maker(polynomial, {"start": REQUIRED, "steps": REQUIRED, "end": 0.0, "power": 2.0}),
    },
    STEPS,
)
"""Step sizes that depend on the round."""

OPTIMIZERS = Choice(
    "server optimizer",
    "name",
    {
        "sgd": Maker(lambda: optax.sgd(1.0), {}),
        "momentum": Maker(lambda decay, nesterov: optax.sgd(1.0, decay, nesterov), {"decay": 0.9, "nesterov": False}),
        "adagrad": Maker(lambda initial, eps: optax.adagrad(1.0, initial, eps), {"initial": 0.1, "eps": 1e-7}),
        "adam": Maker(lambda b1, b2, eps: optax.adam(1.0, b1, b2, eps), {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
        "amsgrad": Maker(lambda b1, b2, eps: optax.amsgrad(1.0, b1, b2, eps), {"b1": 0.9, "b2": 0.999, "eps": 1e-8}),
        "yogi": Maker(lambda b1, b2, eps: optax.yogi(1.0, b1, b2, eps), {"b1": 0.9, "b2": 0.999, "eps": 1e-3}),
    },
)
"""Optax optimizers of learning rate 1, since the server's own step size multiplies what they give."""


@dataclass(frozen=True)
class Field:
    """A field: its name, its annotated type, its default in the program's form, and whether it takes schedules."""

    name: str
    hint: Any
    default: Any
    schedulable: bool = False

    @property
    def parts(self) -> dict[str, Any]:
        """The classes of which a value is an instance, by their kinds; empty where the field holds no part."""
        return _parts(self.hint)

    def accept(self, where: str, value: Any, *below: Any) -> Any:
        """The value in the spec's form, checked and complete.

        Args:
            where: the dotted path of what the field belongs to, for errors.
            value: in the spec's form or in the program's.
            below: the values that `value` takes the place of, the nearest first (the presets', the default). A table
                that leaves out a name, or one of x, y and v, takes it from them.
        """
        place = f"{where}.{self.name}"
        if self.parts:
            return _accept_part(place, self, value, *below)
        if self.hint is XYV:
            return _accept_steps(place, value, *below)
        if _is_optimizer(self.hint):
            return OPTIMIZERS.complete(place, "sgd" if value is self.default else value)
        if self.schedulable and isinstance(value, Mapping):
            return SCHEDULES.complete(place, value)
        if self.name == "seed":
            require(type(value) is int and 0 <= value < 2**32, place, value, "a whole number from 0 to 2³² − 1")
        if self.name == "local_steps" and self.hint is Any:
            return _accept_population_steps(place, value)
        return _fitting(place, self.hint, value)

    def changed(self, where: str, current: Any, path: Sequence[str], value: Any) -> Any:
        """`current`, a value in the spec's form, with the entry at `path` inside it replaced by `value`.

        The result is complete where it is a part or step sizes, and otherwise still to be accepted.
        """
        place = f"{where}.{self.name}"
        if self.hint is XYV and not path:
            return self.accept(where, value, current)
        if not self.parts:
            return value if not path else _with_entry(place, current, path, value)
        if not path:
            return self.accept(where, value, current)
        name, *rest = path
        if name == "name" and not rest:
            return self.accept(where, {"name": value}, current)
        require(isinstance(current, Mapping), place, "none", f"a part before {place}.{'.'.join(path)} can be set")
        fields = of_class(self.parts[current["name"]])
        if name not in fields:
            kind = f"field of {current['name']!r} in {place}"
            raise unknown(kind, name, ["name", *fields])
        return {**current, name: fields[name].changed(place, current[name], rest, value)}

    def build(self, value: Any) -> Any:
        """The program's form of an accepted value."""
        if self.parts:
            if value is None:
                return None
            cls = self.parts[value["name"]]
            return cls(**{name: field.build(value[name]) for name, field in of_class(cls).items()})
        if self.hint is XYV:
            return XYV(*(_number_or_schedule(value[part]) for part in "xyv"))
        if _is_optimizer(self.hint):
            return OPTIMIZERS.build(value)
        if self.name == "local_steps" and isinstance(value, Mapping):
            return (value["low"], value["high"])
        return _number_or_schedule(value) if self.schedulable else value


@functools.cache
def of_class(cls: Any) -> dict[str, Field]:
    """The fields of an algorithm, or of another dataclass, by name."""
    hints = _hints(cls)
    return {
        f.name: Field(f.name, hints[f.name], _default(f), "prepare" in f.metadata and not f.metadata.get("static"))
        for f in dataclasses.fields(cls)
    }


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return inspect.Parameter.empty if field.default_factory is dataclasses.MISSING else field.default_factory()


def _hints(annotated: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(annotated)
    except NameError as error:  # a name that its module imports for type checkers alone
        name = getattr(annotated, "__name__", repr(annotated))
        raise ConfigurationError(f"the annotations of {name} cannot be read: {error}") from error


def of_function(function: Callable[..., Any]) -> dict[str, Field]:
    """The keyword arguments of a task, but for `party`, which says who is to see it (see federation.py)."""
    hints = _hints(function)
    parameters = inspect.signature(function).parameters
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named.pop("party", None)
    return {name: Field(name, hints.get(name, Any), parameter.default) for name, parameter in named.items()}


def complete(
    where: str, fields: Mapping[str, Field], given: Mapping[str, Any], preset: Mapping[str, Any], owner: str = ""
) -> dict[str, Any]:
    """Every field in the spec's form: as given, else as the preset says, else the default. Errors name `owner`,
    where that says more than `where` of what has the fields.

    Raises:
        ConfigurationError: fields that are not there, and values that do not fit: it names all of them.
    """
    for name in given:
        if not fields:
            raise ConfigurationError(f"{where}.{name} cannot be set: {owner or f'this {where}'} has no fields")
    wrong = [unknown_field(f"field of {owner or where}", name, fields) for name in given if name not in fields]
    out = {}
    for name, field in fields.items():
        values = [layer[name] for layer in (given, preset) if name in layer]
        if field.default is not inspect.Parameter.empty:
            values.append(field.default)
        try:
            require(bool(values), f"{where}.{name}", "nothing", "given")
            out[name] = field.accept(where, *values)
        except ConfigurationError as error:
            wrong.append(error)
    errors.refuse_together(wrong)
    return out


def shared_by(fields: Mapping[str, Field], preset: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a preset for many methods that these fields have, inside parts too."""
    out = {}
    for name in preset.keys() & fields.keys():
        field, value = fields[name], preset[name]
        if field.parts and isinstance(value, Mapping):
            kind = value.get("name", getattr(field.default, "kind", None))
            if kind not in field.parts:
                continue
            inside = shared_by(of_class(field.parts[kind]), value)
            value = {**inside, "name": kind} if "name" in value else inside
        out[name] = value
    return out


def unknown_field(kind: str, name: str, allowed: Iterable[str]) -> ConfigurationError:
    """The error for a field that is not there; where some algorithms have it, they are named."""
    owners = sorted(owner for owner, cls in ALGORITHMS.items() if name in of_class(cls))
    if not owners:
        return unknown(kind, name, allowed)
    return ConfigurationError(f"a field of {', '.join(owners)}", path=kind, got=name, allowed=sorted(allowed))


def unknown_setting(name: str, sections: Mapping[str, Iterable[str]]) -> ConfigurationError:
    """The error for a setting that is a field of no section: their fields in the order of `sections`, the
    algorithm's first."""
    every = {field for fields in sections.values() for field in fields}
    owners = sorted(owner for owner, cls in ALGORITHMS.items() if name in of_class(cls))
    text = f"a field of {', '.join(owners)}" if owners else ""
    said = [f"{section}: {', '.join(sorted(fields))}" for section, fields in sections.items() if fields]
    near = "" if owners else errors.nearest(name, sorted(every))
    return ConfigurationError(text, path="field", got=name, allowed=["; ".join(said)], near=near)


def _accept_part(place: str, field: Field, value: Any, *below: Any) -> dict[str, Any] | None:
    """A part as a complete table: its kind under "name", then its fields."""
    options = field.parts
    if value in (None, "none") and type(None) in _options(field.hint):
        return None
    table = _described(value)
    if not isinstance(table, Mapping) or not isinstance(table.get("name", ""), str):
        example = f'{{name = "{next(iter(options))}", …}}'
        raise ConfigurationError(path=place, got=value, allowed=f"a table like {example}")
    fields_given = {name: item for name, item in table.items() if name != "name"}
    if "name" in table:
        kind, current = table["name"], {}
        if kind not in options:
            raise unknown(f"part for {place}", kind, options)
    else:
        current = (_accept_part(place, field, *below) if below else None) or {}
        kind = current.get("name") or next(iter(options))
        require(bool(current) or len(options) == 1, f"{place}.name", "nothing", f"one of {', '.join(options)}")
    fields = of_class(options[kind])
    return {"name": kind, **complete(place, fields, fields_given, current, f"{kind!r} in {place}")}


def _parts(hint: Any) -> dict[str, Any]:
    """The classes of a part's annotation by their kinds; empty where anything in it is no such class. An abstract one
    lets parts of one's own be given in Python; a spec knows those of the library."""
    options = [option for option in _options(hint) if option is not type(None) and not inspect.isabstract(option)]
    if not options or not all(dataclasses.is_dataclass(option) and _kind(option) for option in options):
        return {}
    return {_kind(option): option for option in options}


def _kind(cls: Any) -> str:
    kind = getattr(cls, "kind", "")
    return kind if isinstance(kind, str) else ""


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def _described(value: Any) -> Any:
    """The table of a part that is an instance, or of a kind alone; other values as they are."""
    if isinstance(value, str):
        return {"name": value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"name": _kind(type(value)), **fields}
    return value


def _with_entry(place: str, current: Any, path: Sequence[str], value: Any) -> Any:
    name, *rest = path
    if not isinstance(current, Mapping):
        raise ConfigurationError(f"{place} has no parts, so {place}.{'.'.join(path)} is not a field")
    return {**current, name: _with_entry(f"{place}.{name}", current.get(name), rest, value) if rest else value}


def _accept_steps(place: str, value: Any, *below: Any) -> dict[str, Any]:
    """Three step sizes: numbers or schedules; one serves all three."""
    allowed = "a positive number or a schedule, or one for each of x, y and v"
    if isinstance(value, XYV):
        value = value._asdict()
    if isinstance(value, Mapping) and SCHEDULES.key not in value:
        for part in value:
            if part not in ("x", "y", "v"):
                raise unknown(f"part of {place}", part, "xyv")
        parts = {**(_accept_steps(place, *below) if len(value) < 3 and below else {}), **value}
        missing = [part for part in "xyv" if part not in parts]
        require(not missing, f"{place}.{missing[0] if missing else ''}", "nothing", "given")
    else:
        parts = dict.fromkeys("xyv", value)
    return {part: _accept_step(f"{place}.{part}", parts[part], allowed) for part in "xyv"}


def _accept_step(place: str, value: Any, allowed: str) -> Any:
    if isinstance(value, Mapping):
        return SCHEDULES.complete(place, value)
    require(errors.is_number(value) and value > 0, place, value, allowed)
    return value


def _number_or_schedule(value: Any) -> Any:
    return SCHEDULES.build(value) if isinstance(value, Mapping) else value


def _accept_population_steps(place: str, value: Any) -> Any:
    """The clients' numbers of local steps: None, a list with one for each client, or {low, high} to draw from."""
    if value is None or value == "none":
        return None
    if isinstance(value, Mapping):
        require(set(value) == {"low", "high"}, place, value, "{low = …, high = …}, a list, or none")
        return {name: _fitting(f"{place}.{name}", int, value[name]) for name in ("low", "high")}
    return _fitting(place, list[int], value)


def _is_optimizer(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, optax.GradientTransformation)


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
    near = errors.nearest(value, _choices(hint)) if isinstance(value, str) else ""
    raise ConfigurationError(path=place, got=value, allowed=_in_words(hint), near=near)


def _choices(hint: Any) -> list[str]:
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
