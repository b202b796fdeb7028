"""Make objects from tables, and tables from objects, for files, presets, settings and sweeps.

`changed` sets the fields of an object, and of its parts, to the values of a table, by the annotations and checks of the
fields. It collects all mistakes with their paths. `merged` makes one table of several.

A table contains values of TOML. A part is a table with its kind under "name": {name = "momentum", decay = 0.9}. A name
without a table means the part with the defaults of its class. A table without a name changes the present part.
Schedules and optimizers are those of Optax, by their names: {schedule = "linear_schedule", init_value = 0.1, end_value
= 0.0, transition_steps = 100}, {name = "adam", b1 = 0.8}.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

import jax
import numpy as np
import optax

from fedbilevel.core.algorithm import ALGORITHMS, Algorithm
from fedbilevel.core.config import Schedule
from fedbilevel.core.errors import ConfigurationError, errors_in, refuse_together, require, unknown
from fedbilevel.core.tree import XYV
from fedbilevel.wording import nearest, printable

Fields = Mapping[str, Any]
"""The values of fields by name."""
Wrong = list[ConfigurationError]
PYTHON: dict[str, Any] = {"None": "none", "True": True, "False": False}
"""Words of Python, which users copy from messages, and their values in specs. A field for texts takes them as texts."""
NUMBERS = int | float | np.number | jax.Array
RATE = "learning_rate"


def changed(base: Any, table: Fields, path: str, wrong: Wrong) -> Any:
    """Return an object with the values of a table in its fields, and the values of `base` in all other fields.

    Args:
        base: an object; or a class, whose defaults are then used.
        table: values by the names of fields.
        path: the path of the object, for errors.
        wrong: a list to which all mistakes in the table are added. If the table has a mistake, the result is `base`.
    """
    cls = base if isinstance(base, type) else type(base)
    fields, hints = {field.name: field for field in dataclasses.fields(cls)}, hints_of(cls)
    mine: Wrong = []
    new = {}
    for name, value in table.items():
        if name in fields:
            rule, hint = fields[name].metadata.get("prepare"), hints[name]
            if hint is not XYV and any(fields[name].metadata.get(may) for may in ("adaptive", "tied")):
                hint |= None
            new[name] = _accepted(hint, value, f"{path}.{name}", getattr(base, name, None), rule, mine)
        else:
            holder = next((known for known, algorithm in ALGORITHMS.items() if algorithm is cls), path)
            mine.append(unknown_field(path, name, fields, holder))
    if cls is base:
        needed = [name for name, field in fields.items() if field.default is field.default_factory]
        mine += [_missing(f"{path}.{name}") for name in needed if name not in table]
    wrong += mine
    if mine:
        return base
    try:
        return cls(**new) if cls is base else dataclasses.replace(base, **new)
    except ConfigurationError as error:  # from a check of several fields together
        wrong += error.wrong
    except (TypeError, ValueError) as error:  # from a user's own class
        wrong.append(ConfigurationError(f"{path} cannot be made with these values: {error}"))
    return base


def arguments(function: Callable[..., Any], table: Fields, path: str, wrong: Wrong) -> dict[str, Any]:
    """Return the arguments for a call of a function: the values in a table of settings, and defaults for all others.

    Args:
        function: the function, such as that of a task.
        table: values by the names of arguments.
        path: the path of the table, for errors.
        wrong: a list to which all mistakes in the table are added.
    """
    hints, parameters = hints_of(function), parameters_of(function)
    wrong += [unknown_field(path, name, parameters) for name in table if name not in parameters]
    given = {name: table.get(name, default) for name, default in parameters.items()}
    wrong += [_missing(f"{path}.{name}") for name, value in given.items() if value is inspect.Parameter.empty]
    return {
        name: plain(_accepted(hints.get(name, Any), value, f"{path}.{name}", None, None, wrong))
        for name, value in given.items()
        if value is not inspect.Parameter.empty
    }


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a task's function with their defaults, except `party`, which the library sets."""
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = inspect.signature(function).parameters.items()
    return {name: each.default for name, each in parameters if each.kind in by_name and name != "party"}


def with_values(algorithm: Algorithm, values: Fields) -> Algorithm:
    """Return an algorithm with other values at some dotted paths, such as {"hypergradient.solver.terms": 5}.

    Raises:
        ConfigurationError: a path does not exist or a value is not allowed; the message lists all mistakes.
    """
    wrong: Wrong = []
    for path, value in values.items():
        algorithm = changed(algorithm, nested(path.split("."), value), type(algorithm).__name__, wrong)
    refuse_together(wrong)
    return algorithm


def nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return the nested table that contains only a value at a path."""
    *outside, last = path
    return functools.reduce(lambda table, name: {name: table}, reversed(outside), {last: value})


def _missing(path: str) -> ConfigurationError:
    return ConfigurationError(path=path, got=None, allowed="given: it has no default")


def _accepted(of: Any, value: Any, path: str, base: Any, rule: Callable[..., Any] | None, wrong: Wrong) -> Any:
    """Convert a value by its field's annotation `of`, and check it by the field's rule; add mistakes to `wrong`."""
    before = len(wrong)
    try:
        new = _read(of, value, path, base, wrong)
        if len(wrong) == before:
            new = rule(path, new) if rule else new
            _check(of, new, path, value)
        return new
    except ConfigurationError as error:
        wrong += error.wrong


def _read(of: Any, value: Any, path: str, base: Any, wrong: Wrong) -> Any:
    """Convert a value by its field's annotation `of`; fields that a table leaves out have the values of `base`."""
    if isinstance(value, str) and value in PYTHON and not _fits(of, value):
        value = PYTHON[value]
    if isinstance(value, str) and value == "none" and (of in (Any, XYV) or types.NoneType in _options(of)):
        return None
    if value is None or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return value
    if parts := parts_of(of):
        return _part(parts, value, path, base, wrong)
    if isinstance(value, Mapping):
        if dataclasses.is_dataclass(base) and not isinstance(base, type):  # its class has no name in specs
            return changed(base, value, path, wrong)
        if "schedule" in value and (of in (XYV, Any) or float in _options(of)):
            return _by_name(OptaxSchedule, "schedule", value, path)
        if of is XYV:
            return _step_sizes(value, path, base, wrong)
    if inspect.isclass(of) and issubclass(of, optax.GradientTransformation):
        return _optimizer(value, path, base)
    if isinstance(value, list) and float in _options(of):
        return tuple(_read(float, number, f"{path}[{place}]", None, wrong) for place, number in enumerate(value))
    return _tuples(value)


def _part(options: Mapping[str, Any], value: Any, path: str, base: Any, wrong: Wrong) -> Any:
    """Make a part. A table with a name changes the defaults of this class; a table without a name changes `base`."""
    table = {"name": value} if isinstance(value, str) else value
    require(isinstance(table, Mapping), path, value, f'a table like {{name = "{next(iter(options))}", …}}')
    if "name" in table:
        name = table["name"]
        if not isinstance(name, str) or name not in options:
            raise unknown(f"part for {path}", name, options)
        base = options[name]
    require(base is not None, f"{path}.name", None, f"one of {', '.join(options)}")
    return changed(base, {name: one for name, one in table.items() if name != "name"}, path, wrong)


def _step_sizes(table: Fields, path: str, base: Any, wrong: Wrong) -> Any:
    wrong += [unknown(f"part of {path}", name, "xyv") for name in table if name not in XYV._fields]
    known = {name: one for name, one in table.items() if name in XYV._fields}
    sizes = {name: _read(float | None, one, f"{path}.{name}", None, wrong) for name, one in known.items()}
    return base._replace(**sizes) if isinstance(base, XYV) else sizes


def _optimizer(value: Any, path: str, base: Any) -> Any:
    if isinstance(value, optax.GradientTransformation):
        return value
    table = {"name": value} if isinstance(value, str) else value
    require(isinstance(table, Mapping), path, value, 'a name of Optax, or a table like {name = "adam", b1 = 0.9}')
    if table == {"name": UNNAMED} and base is not None:
        return base

    def make(name: str, given: tuple[tuple[str, Any], ...]) -> Optimizer:
        _check_values(name, given)
        return optimizer(name, **dict(given))

    return _by_name(make, "name", table, path)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _check(of: Any, value: Any, path: str, given: Any) -> None:
    """Refuse a value that the annotation of its field does not allow; `given` is the value's form in the table."""
    if path.endswith(".seed") and of is int:
        fits = type(value) is int and 0 <= value < 2**32
        require(fits, path, value, "a whole number from 0 to 2³² − 1")
    if not _fits(of, value):
        words = [word for one in _options(of) if typing.get_origin(one) is Literal for word in typing.get_args(one)]
        allowed = inspect.formatannotation(of).replace("typing.", "").replace("collections.abc.", "")
        near = nearest(value, words) if isinstance(value, str) else ""
        raise ConfigurationError(path=path, got=given, allowed=allowed, near=near)


def _fits(of: Any, value: Any) -> bool:
    origin, inside = typing.get_origin(of), typing.get_args(of)
    if of is Any or origin in (Union, types.UnionType):
        return of is Any or any(_fits(one, value) for one in inside)
    if origin is Literal:
        return any(value == word and type(value) is type(word) for word in inside)
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        whole = origin is not tuple or ... in inside or (isinstance(value, tuple) and len(value) == len(inside))
        return isinstance(value, tuple) and whole and all(_fits(inside[0] if inside else Any, one) for one in value)
    if of is float:
        number = isinstance(value, NUMBERS) and not isinstance(value, bool)
        return isinstance(value, Schedule) or (number and not (isinstance(value, float) and value != value))
    if of is int:
        return isinstance(value, int | np.integer) and not isinstance(value, bool)
    return isinstance(value, of if inspect.isclass(of) else origin or object)


def _options(of: Any) -> tuple[Any, ...]:
    return typing.get_args(of) if typing.get_origin(of) in (Union, types.UnionType) else (of,)


def parts_of(of: Any) -> dict[str, Any]:
    """Return the classes that an annotation allows for a part, by their kinds; empty for a field without parts.

    An abstract class in the annotation is ignored: it allows a user's own parts in Python.
    """
    classes = [option for option in _options(of) if option is not types.NoneType and not inspect.isabstract(option)]
    kinds = {_kind(cls): cls for cls in classes if dataclasses.is_dataclass(cls) and isinstance(_kind(cls), str)}
    return kinds if classes and len(kinds) == len(classes) else {}


def _kind(of: Any) -> Any:
    return getattr(of, "kind", None)


@functools.cache
def hints_of(annotated: Any) -> dict[str, Any]:
    """Return the annotations of a class's fields or of a function's arguments.

    Raises:
        ConfigurationError: an annotation names something that its module imports only for type checkers.
    """
    try:
        return typing.get_type_hints(annotated)
    except NameError as error:
        name = getattr(annotated, "__name__", repr(annotated))
        raise ConfigurationError(f"the annotations of {name} cannot be read: {error}") from error


def names_of(cls: Any) -> list[str]:
    """Return the names of a class's fields, in order."""
    return [field.name for field in dataclasses.fields(cls)]


def owners_of(name: str) -> str:
    """Say which algorithms have a field of this name, such as "adbo has one"; "" if there is none."""
    owners = sorted(owner for owner, cls in ALGORITHMS.items() if name in names_of(cls))
    return f"{', '.join(owners)} {'has' if len(owners) == 1 else 'have'} one" if owners else ""


def unknown_field(path: str, name: str, known: Iterable[str], holder: str = "") -> ConfigurationError:
    """Return the error for an unknown field, which names the algorithms that have a field of this name.

    Args:
        path: the path of the object that lacks the field.
        name: the unknown name.
        known: the names of the object's fields.
        holder: the name of the object in a message that also names algorithms; "": its path.
    """
    names = sorted(known)
    if not names:
        return ConfigurationError(f"{path}.{name} cannot be set: this {path} has no fields")
    owners, holder = owners_of(name), holder or path
    near = "" if owners else nearest(name, names)
    text = f"{holder} has no field {name!r}; {owners}. Fields of {holder}: {printable(', '.join(names), None)}"
    message = text if owners else ""
    return ConfigurationError(path=f"field of {path}", got=name, allowed=names, near=near, message=message)


# ------------------------------------------------------------------------------------------------ functions of Optax

DECAYS = "b1", "b2", "b3", "decay", "momentum"  # the decay rates of averages among optimizers' arguments
FLOATING = "bfloat16", "float16", "float32", "float64"
UNNAMED = "default"
"""The name of an optimizer that is the default of a class and was not made by the function `optimizer`."""


@dataclass(frozen=True)
class OptaxSchedule:
    """Hold a schedule of Optax by its name and arguments; schedules with equal names and arguments are equal."""

    name: str
    arguments: tuple[tuple[str, Any], ...]

    def __post_init__(self) -> None:
        names = [name for name in vars(optax.schedules) if re.fullmatch(r"[a-z]\w*(_schedule|_decay)", name)]
        if self.name not in names:
            raise unknown("schedule of Optax", self.name, names)
        arguments = {name: _keyed_by_round(value) for name, value in self.arguments}
        _check_arguments(getattr(optax.schedules, self.name), arguments)
        first = self(0)
        fits = isinstance(first, NUMBERS) and np.ndim(first) == 0 and math.isfinite(first)
        require(fits, "value at round 0", first, "a finite number")

    def __hash__(self) -> int:
        return hash(self.name)  # an argument may be a table, which has no hash

    def __call__(self, round: Any) -> Any:
        arguments = {name: _keyed_by_round(value) for name, value in self.arguments}
        return getattr(optax.schedules, self.name)(**arguments)(round)

    @property
    def table(self) -> dict[str, Any]:
        """Return the schedule as a table of a spec."""
        return {"schedule": self.name, **dict(self.arguments)}


def _keyed_by_round(value: Any) -> Any:
    """Return a table with integers as keys if all keys are whole numbers, which are texts in TOML."""
    table = isinstance(value, Mapping) and all(str(key).isdecimal() for key in value)
    return {int(key): one for key, one in value.items()} if table else value


def _check_arguments(function: Callable[..., Any], given: Fields) -> None:
    """Refuse unknown arguments of a function of Optax, its learning rate, and values that its annotations forbid."""
    known = {name: each.annotation for name, each in inspect.signature(function).parameters.items() if name != RATE}
    kinds = {"a number": 0.5, "a whole number": 1, "true or false": True, "text": ""}
    wrong: Wrong = []
    for name, value in given.items():
        if name not in known:
            wrong.append(unknown(f"argument of {function.__name__}", name, known))
        elif isinstance(value, bool) and known[name] is not bool:  # Optax would use a boolean as a number
            wrong.append(ConfigurationError(path=f"{name} of {function.__name__}", got=value, allowed="a number"))
        elif isinstance(value, Mapping) and not all(_fits(float, one) for one in value.values()):
            got = dict(value)
            wrong.append(ConfigurationError(path=f"{name} of {function.__name__}", got=got, allowed="numbers by round"))
        elif value == value and not _fits(known[name], value):  # NaN passes: other checks refuse it
            allowed = next((words for words, one in kinds.items() if _fits(known[name], one)), str(known[name]))
            wrong.append(ConfigurationError(path=f"{name} of {function.__name__}", got=value, allowed=allowed))
    refuse_together(wrong)


class Optimizer(optax.GradientTransformation):  # type: ignore[misc]
    """Hold an optimizer of Optax together with the table of its name and arguments."""

    table: Fields

    def __repr__(self) -> str:
        given = "".join(f", {name}={value!r}" for name, value in self.table.items() if name != "name")
        return f"optax.{self.table['name']}(1.0{given})"


@functools.lru_cache(64, typed=True)
def optimizer(name: str, **arguments: Any) -> Optimizer:
    """Make an optimizer of Optax with the learning rate 1, since a method multiplies its updates by a step size.

    The same name and arguments give the same object.
    """
    if not callable(getattr(optax, name, None)) or RATE not in inspect.signature(getattr(optax, name)).parameters:
        raise unknown("optimizer of Optax", name, ["adagrad", "adam", "amsgrad", "sgd", "yogi"])
    _check_arguments(getattr(optax, name), arguments)
    made = Optimizer(*getattr(optax, name)(**{RATE: 1.0}, **arguments))
    jax.eval_shape(lambda x: made.update(x, made.init(x), x), np.ones(1))  # raises if an argument is wrong
    made.table = {"name": name, **arguments}
    return made


def _check_values(name: str, given: Iterable[tuple[str, Any]]) -> None:
    """Refuse wrong values of an optimizer's arguments, which Optax accepts or refuses without naming the argument."""
    for argument, value in given:
        path = f"{argument} of {name}"
        plain_value = isinstance(value, NUMBERS | str)
        require(
            plain_value, path, value, "a number, true, false or a text; an optimizer of a method takes no schedules"
        )
        if argument.endswith("_dtype"):
            fits = isinstance(value, str) and value in FLOATING
            require(fits, path, value, f"one of {', '.join(FLOATING)}")
        elif isinstance(value, float | int):
            require(math.isfinite(value), path, value, "a finite number")
            below = argument not in DECAYS or 0 <= value < 1
            require(below, path, value, "a number from 0 to below 1")


def _by_name(make: Callable[..., Any], key: str, table: Fields, path: str) -> Any:
    """Call `make` with the name under `key` and the other entries of a table; errors begin with the path."""
    given = tuple((name, _tuples(value)) for name, value in table.items() if name != key)
    require(isinstance(table.get(key), str), f"{path}.{key}", table.get(key), "a name of Optax")
    try:
        with errors_in(path):
            return make(table[key], given)
    except ConfigurationError:
        raise
    except Exception as error:  # Optax and JAX raise many kinds of errors for wrong arguments
        raise ConfigurationError(str(error), where=path) from error


# ------------------------------------------------------------------------------------------------- objects to tables


def plain(value: Any) -> Any:
    """Convert an object to a table with all its fields, and other values to values that TOML and JSON can contain."""
    if isinstance(value, Schedule):
        return plain(value.function)
    if isinstance(value, OptaxSchedule | Optimizer):
        return plain(dict(value.table))
    if isinstance(value, optax.GradientTransformation):
        return {"name": UNNAMED}
    if isinstance(value, XYV):
        return plain(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = {"name": kind} if isinstance(kind := _kind(value), str) else {}
        return name | {name: plain(getattr(value, name)) for name in names_of(value)}
    if isinstance(value, Mapping):
        return {name: plain(entry) for name, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, tuple | list) else value


def merged(first: Fields, *others: Fields) -> dict[str, Any]:
    """Merge tables; for entries of the same name, the later table takes precedence.

    An entry that is a table without a name changes the earlier entry, which may be a table, the name of a part, or the
    step size of x, y and v.
    """
    out = dict(first)
    for name, value in (item for other in others for item in other.items()):
        if isinstance(value, Mapping) and not {"name", "schedule"} & value.keys():
            value = merged(_as_table(out.get(name), value), value)
        out[name] = value
    return out


def _as_table(there: Any, change: Collection[str]) -> Fields:
    """Return an earlier entry as a table that `change` can change, or an empty table if `change` replaces it."""
    if isinstance(there, XYV):
        return there._asdict()
    if isinstance(there, str) and there != "none":
        return {"name": there}
    single = isinstance(there, NUMBERS) or (isinstance(there, Mapping) and "schedule" in there)
    if single and set(change) <= {"x", "y", "v"}:
        return dict.fromkeys("xyv", there)
    return there if isinstance(there, Mapping) and "schedule" not in there else {}


def shared_by(cls: Any, shared: Fields) -> dict[str, Any]:
    """Return the entries of `shared`, a table for many methods, that are fields of a class or of its parts."""
    out: dict[str, Any] = {}
    for name in names_of(cls):
        if name not in shared:
            continue
        value, parts = shared[name], parts_of(hints_of(cls)[name])
        if parts and isinstance(value, Mapping):
            kind = value.get("name", _kind(getattr(cls, name, None)))
            if kind not in parts:
                continue
            value = shared_by(parts[kind], value) | ({"name": kind} if "name" in value else {})
        out[name] = value
    return out
