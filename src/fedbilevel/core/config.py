"""Hyperparameters: frozen dataclasses that are pytrees, checked when built.

Numbers are pytree leaves, so that a sweep is a `vmap` over the configuration itself; static fields recompile. A step
size may be an optax schedule: `at` replaces it by its value at a round. A field says its default by name,
`lr: float = positive(default=0.1)`: type checkers do not see it otherwise.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, dataclass_transform

import jax
import numpy as np
import optax
from jax import Array
from jax.core import Tracer

from fedbilevel.core.errors import (
    ConfigurationError,
    explain_misspelt,
    is_count,
    refuse_together,
    require,
    require_count,
)
from fedbilevel.core.tree import XYV

SECTION = re.compile(r"^Args:\n((?:    .*\n?)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+):.*(?:\n        .*)*", re.MULTILINE)
KINDS = {bool: "True or False", optax.GradientTransformation: "an optax optimizer, such as optax.adam(1.0)"}
"""Kinds of static fields that are known by their defaults."""
StepKind = Literal["x", "local x", "shared", "total", "local", "drift", "short"]
"""What a step that may be None, to be adapted, is used for.

- "x": the server's step on x;
- "local x": a client's steps on x, whose changes the server adds up;
- "shared": a step on y or v, the same for the server and all clients;
- "total": the total of a client's local steps on y;
- "local": one local step on x, y or v, along whose sum the server moves;
- "drift": one local step that only decides how far clients drift apart, as far as they agree; on x it is 0;
- "short": the same, as the part TIED of the server's step.
"""
TIED = 0.05
"""A client's step that is None is this part of the server's step that it is tied to."""
T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Schedule:
    """A hyperparameter that depends on the round; a pytree without leaves: phases see its value alone."""

    function: Callable[[Any], Any]


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that shapes the compiled program (a count, a flag, a choice); without a default it has to be given. Where
    that is a flag or an optimizer, nothing else is allowed."""
    check = functools.partial(_check_kind, default)
    return dataclasses.field(default=default, metadata={"static": True, "prepare": check})


def wrapped(kw_only: bool) -> Any:
    """The field of the configuration that a wrapper changes; it has to be given, and if not `kw_only` needs no name."""
    return dataclasses.field(kw_only=kw_only, metadata={"wrapped": True})


def positive_integer(
    *, default: Any = dataclasses.MISSING, optional: bool = False, own: bool = False, scheduled: bool = False
) -> Any:
    """A static field that must be a positive integer, or, if `optional`, None; without a default it has to be given.

    `own`, here and below: it may be a number of a client's own (`Clients.own`), which phases find in its place.
    `scheduled`: it may be a function of the round.
    """

    def prepare(name: str, value: Any) -> Any:
        if scheduled and (callable(value) or isinstance(value, Schedule)):
            return _scheduled(name, value, np.integer, "a positive integer, or a function of the round that gives one")
        require_count(name, value, optional)
        return value

    return dataclasses.field(default=default, metadata={"static": True, "prepare": prepare, "own": own})


def counts(*, default: int) -> Any:
    """A static field that must be a positive integer, or several of them, one for each client; kept as a tuple then."""
    return dataclasses.field(default=default, metadata={"static": True, "prepare": _prepare_counts})


def step_sizes(
    *, default: Any = dataclasses.MISSING, own: bool = False, adaptive: StepKind | None = None, tied: str | None = None
) -> Any:
    """A field of three step sizes; a single number or schedule given for it serves all three. Without a default it has
    to be given.

    `adaptive`: each may be None, and is then such a step of `AdaptiveSteps`. `tied`: each may be None, and is then the
    part TIED of that of the field of this name: it decides only how far clients drift apart.
    """
    prepare = functools.partial(_prepare_step_sizes, bool(adaptive or tied))
    metadata = {"prepare": prepare, "own": own, "adaptive": adaptive, "tied": tied}
    default = XYV(None, None, None) if default is None else default
    return dataclasses.field(default=default, metadata=metadata)


def positive(
    *,
    default: float | None,
    optional: bool = False,
    own: bool = False,
    several: bool = False,
    adaptive: StepKind | None = None,
    tied: str | None = None,
) -> Any:
    """A field that must be a positive number or a schedule, or, if `optional`, None; infinity is allowed.

    `several`: it may be a list of these, kept as a tuple. `adaptive`, `tied`: as in `step_sizes`.
    """
    optional = bool(optional or adaptive or tied)

    def prepare(name: str, value: Any) -> Any:
        value = value.tolist() if several and isinstance(value, np.ndarray) else value
        if several and isinstance(value, list | tuple) and value:
            return tuple(_prepare_number(f"{name}[{place}]", one) for place, one in enumerate(value))
        allowed = "a positive number, a schedule or None" if optional else "a positive number or a schedule"
        return None if optional and value is None else _prepare_number(name, value, allowed=allowed)

    return dataclasses.field(
        default=default, metadata={"prepare": prepare, "own": own, "adaptive": adaptive, "tied": tied}
    )


def fraction(*, default: float, own: bool = False) -> Any:
    """A field that must be a number strictly between 0 and 1, or a schedule."""
    allowed = "a number strictly between 0 and 1, or a schedule"
    prepare = functools.partial(_prepare_number, below=1.0, allowed=allowed)
    return dataclasses.field(default=default, metadata={"prepare": prepare, "own": own})


def share(*, default: float, own: bool = False) -> Any:
    """A field that must be a number from 0 to below 1."""

    def prepare(name: str, value: Any) -> Any:
        return value if _is_zero(value) else _prepare_number(name, value, 1.0, "at least 0 and below 1, or a schedule")

    return dataclasses.field(default=default, metadata={"prepare": prepare, "own": own})


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    field_specifiers=(static, wrapped, positive_integer, counts, step_sizes, positive, fraction, share),
)
def config(cls: T) -> T:
    """Make a class a configuration: frozen keyword-only dataclass and pytree, its fields checked when built.

    A method `validate` checks what concerns several fields or a static one. That of every base class runs too, before
    it: each class checks what it declares. The docstring gets the entries of fields that a base class explains.
    """

    def post_init(self: Any) -> None:
        for field in dataclasses.fields(self):
            if prepare := field.metadata.get("prepare"):
                name = f"{type(self).__name__}.{field.name}"
                object.__setattr__(self, field.name, prepare(name, getattr(self, field.name)))
        for declaring in reversed(type(self).__mro__):
            if check := vars(declaring).get("validate"):
                check(self)

    _check_annotated(cls)
    written = vars(cls).get("__doc__")
    cls.__post_init__ = post_init  # type: ignore[attr-defined]
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    explain_misspelt(made, "field")
    made.__setattr__ = _refuse_change
    fields = dataclasses.fields(made)
    if written:
        made.__doc__ = _with_fields(written, cls, [field.name for field in fields])
    return jax.tree_util.register_dataclass(
        made,
        data_fields=[f.name for f in fields if not f.metadata.get("static")],
        meta_fields=[f.name for f in fields if f.metadata.get("static")],
    )


def _refuse_change(self: Any, name: str, value: object) -> None:
    made_anew = f"dataclasses.replace(…, {name}=…) makes another one"
    raise dataclasses.FrozenInstanceError(f"{type(self).__name__} is never changed: {made_anew}")


def at(configuration: Any, round: Array | int) -> Any:
    """The configuration with every schedule replaced by its value at `round` (0 is the first).

    Values of schedules are not checked: a step size may well begin or end at 0.
    """
    return _changed(configuration, lambda _, value: value.function(round) if isinstance(value, Schedule) else value)


def is_step(name: str) -> bool:
    """Whether a field is a step size: it is called lr, step, or something_lr."""
    return name in ("lr", "step") or name.endswith("_lr")


def given_steps(configuration: Any) -> list[str]:
    """The step sizes that are numbers or schedules, in parts too, by path; three of one field by its name alone."""
    given = (*hyperparameters(configuration), *dict(schedules(configuration)))
    paths = (re.sub(r"\.[xyv]$", "", path) for path in given)
    return list(dict.fromkeys(path for path in paths if is_step(re.sub(r"\[\d+\]$", "", path).split(".")[-1])))


def halved(configuration: Any) -> Any:
    """The configuration with every step size halved, in its parts too."""

    def half(name: str, value: Any) -> Any:
        if value is None or not is_step(name):
            return value
        return Schedule(lambda round: value.function(round) / 2) if isinstance(value, Schedule) else value / 2

    return _changed(configuration, half)


def _changed(configuration: Any, change: Callable[[str, Any], Any]) -> Any:
    """The configuration with change(field's name, value) for each value in it, of several in a field and of parts too.

    Nothing is checked again.
    """

    def value_of(name: str, value: Any) -> Any:
        if isinstance(value, XYV):
            return XYV(*(value_of(name, one) for one in value))
        if type(value) is tuple:
            return tuple(value_of(name, one) for one in value)
        part = dataclasses.is_dataclass(value) and not isinstance(value, type | Schedule)
        return _changed(value, change) if part else change(name, value)

    changed = copy.copy(configuration)
    for field in dataclasses.fields(changed):
        object.__setattr__(changed, field.name, value_of(field.name, getattr(changed, field.name)))
    return changed


def schedules(configuration: Any, within: str = "") -> Iterator[tuple[str, Schedule]]:
    """List the schedules of a configuration and of those in its fields, by path."""
    for name, value in field_values(configuration).items():
        sizes = {f".{part}": size for part, size in value._asdict().items()} if isinstance(value, XYV) else {"": value}
        if type(value) is tuple:
            sizes = {f"[{place}]": size for place, size in enumerate(value)}
        yield from ((f"{within}{name}{part}", size) for part, size in sizes.items() if isinstance(size, Schedule))
        if dataclasses.is_dataclass(value) and not isinstance(value, type | Schedule):
            yield from schedules(value, f"{within}{name}.")


def tied(configuration: Any) -> Any:
    """The configuration with a number for every step that is None and tied to another, in parts too."""
    changed = copy.copy(configuration)
    for field in dataclasses.fields(changed):
        value, to = getattr(changed, field.name), field.metadata.get("tied")
        if to and isinstance(value, XYV):
            pairs = zip(value, getattr(changed, to), strict=True)
            value = XYV(*(TIED * server if size is None and server is not None else size for size, server in pairs))
        elif to and value is None and (server := getattr(changed, to)) is not None:
            value = TIED * (jax.numpy.min(jax.numpy.asarray(server)) if isinstance(server, tuple) else server)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type | Schedule):
            value = tied(value)
        object.__setattr__(changed, field.name, value)
    return changed


class OpenStep(NamedTuple):
    """A step that is None and adapts."""

    part: Any  # the method, or the part of it, whose field it is
    kind: str  # a StepKind, or "alone" where each client solves a system of its own
    of: str  # x, y or v


def open_steps(configuration: Any, within: str = "", alone: bool = False) -> dict[str, OpenStep]:
    """List the steps that are None and adapt, in parts too, by path."""
    found: dict[str, OpenStep] = {}
    alone = alone or getattr(configuration, "alone", False)
    for field in dataclasses.fields(configuration):
        value, kind, path = getattr(configuration, field.name), field.metadata.get("adaptive"), within + field.name
        server = getattr(configuration, field.metadata.get("tied") or field.name)
        if kind and isinstance(value, XYV):
            sizes = zip(XYV._fields, value, server, strict=True)
            both = (of for of, size, same in sizes if size is None and same is None)
            found |= {f"{path}.{of}": OpenStep(configuration, kind, of) for of in both}
        elif kind and value is None and server is None:
            found[path] = OpenStep(configuration, "alone" if alone else kind, "x" if kind.endswith("x") else "y")
        elif dataclasses.is_dataclass(value) and not isinstance(value, type | Schedule):
            found |= open_steps(value, f"{path}.", alone)
    return found


def field_values(configuration: Any) -> dict[str, Any]:
    """The fields of a configuration by name."""
    return {field.name: getattr(configuration, field.name) for field in dataclasses.fields(configuration)}


def own_values(configuration: Any) -> dict[str, Any]:
    """The fields that differ from their defaults, by name."""
    defaults = {field.name: field.default for field in dataclasses.fields(configuration)}
    return {name: value for name, value in field_values(configuration).items() if value != defaults[name]}


def hyperparameters(configuration: Any) -> dict[str, Any]:
    """Every number and plain choice of a configuration by its path, as JSON has it; functions are left out."""
    leaves = jax.tree_util.tree_leaves_with_path(configuration)
    values = {jax.tree_util.keystr(path).lstrip("."): np.asarray(leaf).tolist() for path, leaf in leaves}
    return values | _choices(configuration)


def local_epochs(configuration: Any) -> dict[str, int]:
    """The fields `local_epochs` that are not None, in parts too, by path."""
    found = {path: value for path, value in _choices(configuration).items() if path.split(".")[-1] == "local_epochs"}
    return {path: epochs for path, epochs in found.items() if epochs is not None}


def _choices(configuration: Any, within: str = "") -> dict[str, Any]:
    """The static fields, with those of configurations in fields."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(configuration):
        value, path = getattr(configuration, field.name), f"{within}{field.name}"
        several = isinstance(value, tuple) and all(map(is_count, value))  # an optax optimizer is a tuple, too
        if dataclasses.is_dataclass(value) and not isinstance(value, type | Schedule):
            values |= _choices(value, f"{path}.")
        elif field.metadata.get("static") and (several or isinstance(value, int | float | str | None)):
            values[path] = list(value) if several else value
    return values


def _check_annotated(cls: type) -> None:
    """Refuse an attribute without annotation that looks like a field, or that a field of a base would not heed."""
    bases = cls.__mro__[1:]
    known = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    fields = {field.name for base in bases if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)}
    own = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
        number = isinstance(value, int | float | XYV) and name not in known
        if (number or name in fields) and name not in own and not name.startswith("_"):
            field = f"{name}: {'…' if isinstance(value, property) else type(value).__name__} = "
            raise ConfigurationError(
                f"{cls.__name__}.{name} = {value!r} has no annotation; make it a field: write {field}positive(…), "
                f"{field}static(…) or another maker of fields; for a constant, {name}: ClassVar = …"
            )


def _prepare_number(
    name: str, value: Any, below: float = math.inf, allowed: str = "a positive number or a schedule"
) -> Any:
    if callable(value) or isinstance(value, Schedule):
        return _scheduled(name, value, np.number, allowed)
    refuse_no_number(name, value, allowed)
    if is_concrete(value):
        numbers = np.asarray(value, float)
        require(bool(np.all(numbers > 0) and (below == math.inf or np.all(numbers < below))), name, value, allowed)
    return value


def is_concrete(value: Any) -> bool:
    """Say whether a field's value is a number or several, and no schedule, tracer, or placeholder in a tree map."""
    return isinstance(value, int | float | np.number | np.ndarray | Array) and not isinstance(value, Tracer)


def _scheduled(name: str, value: Any, kind: type, allowed: str) -> Schedule:
    if isinstance(value, Schedule):
        return value
    try:
        found = jax.eval_shape(lambda round: jax.numpy.asarray(value(round)), jax.ShapeDtypeStruct((), np.int32))
    except Exception as error:  # whatever a function of the user raises
        text = f"it cannot be called with a round: {error}"
        raise ConfigurationError(text, path=name, got=value, allowed=allowed) from error
    require(found.shape == () and np.issubdtype(found.dtype, kind), name, value, allowed)
    return Schedule(value)


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and value == 0


def refuse_no_number(name: str, value: Any, allowed: str) -> None:
    """Refuse what can stand for no number, not even as a placeholder in a tree map."""
    none = isinstance(value, str | bool | list | tuple | dict | set | None) or dataclasses.is_dataclass(value)
    require(not none, name, value, allowed)


def _check_kind(default: Any, name: str, value: Any) -> Any:
    value = bool(value) if isinstance(value, np.bool_) else value
    for kind, allowed in KINDS.items():
        require(isinstance(value, kind) or not isinstance(default, kind), name, value, allowed)
    return value


def _prepare_counts(name: str, value: Any) -> Any:
    several = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)
    each = list(value) if several else [value]
    fits = len(each) > 0 and all(map(is_count, each))
    require(fits, name, value, "a positive integer, or one for each client")
    return tuple(int(one) for one in each) if several else value


def _prepare_step_sizes(optional: bool, name: str, value: Any) -> Any:
    largest = sys.float_info.max
    if not isinstance(value, XYV):
        if optional and (value is None or (isinstance(value, dict) and set(value) <= {"x", "y", "v"})):
            value = XYV(**dict.fromkeys(("x", "y", "v")) | (value or {}))
        elif isinstance(value, dict):
            require(set(value) == {"x", "y", "v"}, name, value, "a number, or one for each of x, y and v")
            value = XYV(**value)
        elif callable(value) or isinstance(value, int | float | str | np.number | np.ndarray | Array):
            value = _prepare_number(f"{name}.x", value, largest)
            return XYV(value, value, value)
        else:  # a placeholder in a tree map; a sequence is none, whose order nobody could know
            refuse_no_number(name, value, "a number, or one for each of x, y and v by name")
            return value
    sizes, wrong = dict[str, Any](), list[ConfigurationError]()
    for part, size in value._asdict().items():
        try:
            missing = optional and size is None
            sizes[part] = None if missing else _prepare_number(f"{name}.{part}", size, largest)
        except ConfigurationError as error:
            wrong.append(error)
    refuse_together(wrong)
    return XYV(**sizes)


def _entries(docstring: str) -> dict[str, str]:
    """The entries of the section "Args:", indented as they stand there, by the name of the field."""
    section = SECTION.search(docstring)
    return {entry[1]: entry[0] for entry in ENTRY.finditer(section[1])} if section else {}


def _with_fields(written: str, cls: type, fields: list[str]) -> str:
    """The docstring as `written` for the class, its section "Args:" made to hold all fields that a base explains.

    A class has the text of a base about a field, unless it explains the field again, where it means something narrower.
    """
    known: dict[str, str] = {}
    for base in reversed(cls.__mro__[1:]):
        known |= _entries(vars(base).get("__doc__") or "")
    written = inspect.cleandoc(written)
    known |= _entries(written)
    shown = "\n".join(known[field] for field in fields if field in known)
    if not shown:
        return written
    if SECTION.search(written):
        return SECTION.sub(lambda found: f"Args:\n{shown}" + "\n" * found[0].endswith("\n"), written)
    return f"{written}\n\nArgs:\n{shown}"
