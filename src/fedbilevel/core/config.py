"""Define hyperparameters as fields of frozen dataclasses that are pytrees and are checked when built.

Numbers are leaves of the pytree, so that a sweep is a `vmap` over the configuration. A change of a static field needs a
new compilation. The default of a field is passed by keyword, as in `lr: float = positive(default=0.1)`, since type
checkers recognise a default only in this form. The functions that read a configuration are in core/hyperparameters.py.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, dataclass_transform

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

GREEK = {"alpha": "α", "beta": "β", "gamma": "γ", "eta": "η", "tau": "τ", "mu": "μ", "lambda_": "λ"}
"""The names by which users write the symbols of docstrings."""
SECTION = re.compile(r"^Args:\n((?:    .*\n?)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+):.*(?:\n        .*)*", re.MULTILINE)
KINDS = {bool: "True or False", optax.GradientTransformation: "an optax optimizer, such as optax.adam(1.0)"}
"""Type of the default of a static field -> the allowed values, which have this type, in words."""
StepKind = Literal["x", "local x", "shared", "total", "local", "drift", "short"]
"""The use of a step size that may be None and then adapts.

- "x": the server's step on x.
- "local x": a client's steps on x, whose changes the server adds up. Each part of a reply in the shape of x then counts
  as such a change, except in phases of parts that do not have this step.
- "shared": a step on y or v that the server and all clients share.
- "total": the total of a client's local steps on y.
- "local": one local step on x, y or v; the server moves along the sum of these steps. On x, the same holds as for
  "local x".
- "drift": one local step that only determines how far clients drift apart. It is longer if clients' directions agree.
  On x its size is 0.
- "short": as "drift", but equal to the server's step times TIED (core/hyperparameters.py).
"""
T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Hold a hyperparameter that depends on the round. Phases get only its value in the present round.

    `function` takes the round. If the field that holds the schedule allows this, it may also take the inner round k. A
    schedule is a pytree without leaves.
    """

    function: Callable[..., Any]

    @property
    def by_k(self) -> bool:
        """Return whether the function also takes the inner round."""
        return positional(self.function) == 2

    def at(self, round: Any) -> Any:
        """Return the value in a round, or the schedule over inner rounds in this round if the function takes both."""
        return Schedule(functools.partial(self.function, round)) if self.by_k else self.function(round)


def positional(function: Callable[..., Any]) -> int | None:
    """Return the number of positional arguments without a default, or None if a function has no signature."""
    try:
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    in_order = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return sum(argument.kind in in_order and argument.default is argument.empty for argument in arguments)


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """Make a field whose value is fixed in the compiled program: a count, a flag or a choice.

    Without a default the field is required.

    If the default is a flag or an optimizer, only values of this kind are allowed.
    """
    check = functools.partial(_check_kind, default)
    return dataclasses.field(default=default, metadata={"static": True, "prepare": check})


def wrapped(kw_only: bool) -> Any:
    """Make the required field in which a wrapper holds the method that it changes.

    With `kw_only` the field must be passed by name.
    """
    return dataclasses.field(kw_only=kw_only, metadata={"wrapped": True})


def positive_integer(
    *, default: Any = dataclasses.MISSING, optional: bool = False, own: bool = False, scheduled: bool = False
) -> Any:
    """Make a static field for a positive integer. Without a default it is required.

    Args:
        default: the default.
        optional: whether the value may be None.
        own: whether clients may have own values (`Clients.own`), which phases then find in the field.
        scheduled: whether the value may be a function of the round.
    """

    def prepare(name: str, value: Any) -> Any:
        if scheduled and (callable(value) or isinstance(value, Schedule)):
            allowed = "a positive integer, or a function of the round that returns a positive integer"
            return _scheduled(name, value, np.integer, allowed)
        require_count(name, value, optional)
        return value

    return dataclasses.field(default=default, metadata={"static": True, "prepare": prepare, "own": own})


def counts(*, default: int) -> Any:
    """Make a static field for a positive integer, or for one positive integer per client, stored as a tuple."""
    return dataclasses.field(default=default, metadata={"static": True, "prepare": _prepare_counts})


def step_sizes(
    *, default: Any = dataclasses.MISSING, own: bool = False, adaptive: StepKind | None = None, tied: str | None = None
) -> Any:
    """Make a field for the step sizes of x, y and v. A single number or schedule is used for all three.

    Args:
        default: the default; without a default the field is required.
        own: whether clients may have own values (`Clients.own`), which phases then find in the field.
        adaptive: the use of the step sizes, a `StepKind`. If it is given, a step size may be None, and `AdaptiveSteps`
            chooses it.
        tied: the name of another field with step sizes. If it is given, a step size may be None, which means a
            twentieth of the step size in that field for the same variable. Such a step size only determines how far
            clients drift apart.
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
    by_k: bool = False,
    finite: bool = False,
    adaptive: StepKind | None = None,
    tied: str | None = None,
) -> Any:
    """Make a field for a positive number, or a schedule.

    Args:
        default: the default.
        optional: whether the value may be None.
        own: whether clients may have own values (`Clients.own`), which phases then find in the field.
        several: whether the value may be a list of numbers and schedules, which is stored as a tuple.
        by_k: whether the value may be a function of the round and the inner round.
        finite: whether infinity is refused. The values of a schedule are not checked.
        adaptive: the use of the step size, a `StepKind`. If it is given, the step size may be None, and `AdaptiveSteps`
            chooses it.
        tied: the name of another field with a step size. If it is given, the step size may be None, which means a
            twentieth of the step size in that field.
    """
    optional = bool(optional or adaptive or tied)

    def prepare(name: str, value: Any) -> Any:
        value = value.tolist() if several and isinstance(value, np.ndarray) else value
        if several and isinstance(value, list | tuple) and value:
            return tuple(_prepare_number(f"{name}[{place}]", number) for place, number in enumerate(value))
        number = "a finite positive number" if finite else "a positive number"
        kinds = number, "a schedule", *["a function (round, k)"] * by_k, *["None"] * optional
        allowed = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
        if by_k and callable(value) and positional(value) == 2:
            return _scheduled(name, value, np.number, allowed, arguments=2)
        below = math.inf if finite else None
        return None if optional and value is None else _prepare_number(name, value, below, allowed)

    return dataclasses.field(
        default=default, metadata={"prepare": prepare, "own": own, "adaptive": adaptive, "tied": tied}
    )


def fraction(*, default: float, own: bool = False) -> Any:
    """Make a field for a number strictly between 0 and 1, or a schedule."""
    allowed = "a number strictly between 0 and 1, or a schedule"
    prepare = functools.partial(_prepare_number, below=1.0, allowed=allowed)
    return dataclasses.field(default=default, metadata={"prepare": prepare, "own": own})


def share(*, default: float, own: bool = False) -> Any:
    """Make a field for a number of at least 0 and below 1, or a schedule."""

    def prepare(name: str, value: Any) -> Any:
        return value if _is_zero(value) else _prepare_number(name, value, 1.0, "at least 0 and below 1, or a schedule")

    return dataclasses.field(default=default, metadata={"prepare": prepare, "own": own})


@dataclass_transform(
    kw_only_default=True,
    frozen_default=False,  # it is frozen; but mypy gives inherited fields of frozen classes the type of their argument
    field_specifiers=(static, wrapped, positive_integer, counts, step_sizes, positive, fraction, share),
)
def config(cls: T) -> T:
    """Make a class a configuration: a frozen keyword-only dataclass and pytree whose fields are checked when built.

    A method `validate` may check several fields together. The methods `validate` of all base classes run before it, so
    that each class checks its own fields. The docstring of the class also gets the entries of inherited fields.
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
    explain_misspelt(made, "field", _place_of)
    made.__setattr__ = _refuse_change
    fields = dataclasses.fields(made)
    if written:
        made.__doc__ = _with_fields(written, cls, [field.name for field in fields])
    return jax.tree_util.register_dataclass(
        made,
        data_fields=[f.name for f in fields if not f.metadata.get("static")],
        meta_fields=[f.name for f in fields if f.metadata.get("static")],
    )


def _place_of(cls: Any, name: str) -> str:
    """Return how to set the fields that have a name or a symbol, in a class or its parts; "" if there are none.

    A symbol is the letter at the beginning of the field's entry in the docstring, such as T of `rounds: T, the number`.
    """
    symbol = GREEK.get(name, name)
    found = _calls(cls, re.compile(rf" *\w+: {re.escape(symbol)}(_\w)?[,;.]"), name)
    return f"{name} is set by {' or '.join(found)}" if found else ""


def _calls(cls: Any, symbol: re.Pattern[str], name: str) -> list[str]:
    """Return, as in "part=Part(field=…)", how to set the fields with a name or a symbol, in a class or its parts."""
    entries, found = _entries(cls.__doc__ or ""), []
    for field in dataclasses.fields(cls):
        if field.name == name or symbol.match(entries.get(field.name, "")):
            found.append(f"{field.name}=…")
        elif dataclasses.is_dataclass(part := type(field.default)):
            called = f"fb.parts.{part.__name__}" if part.__module__.startswith("fedbilevel.") else part.__name__
            found += [f"{field.name}={called}({inner})" for inner in _calls(part, symbol, name)]
    return found


def _refuse_change(self: Any, name: str, value: object) -> None:
    remedy = f"dataclasses.replace(…, {name}=…) returns a changed copy"
    raise dataclasses.FrozenInstanceError(f"{type(self).__name__} cannot be changed: {remedy}")


def _check_annotated(cls: type) -> None:
    """Refuse an attribute without annotation that looks like a field, or would silently shadow a base's field."""
    bases = cls.__mro__[1:]
    inherited = {name for base in bases for name in (*vars(base), *inspect.get_annotations(base))}
    fields = {field.name for base in bases if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)}
    annotated = inspect.get_annotations(cls)
    for name, value in vars(cls).items():
        number = isinstance(value, int | float | XYV) and name not in inherited
        if (number or name in fields) and name not in annotated and not name.startswith("_"):
            field = f"{name}: {'…' if isinstance(value, property) else type(value).__name__} = "
            path = f"{cls.__name__}.{name}"
            allowed = f"a field, {field}positive(…), or a constant, {name}: ClassVar = …"
            message = (
                f"{path} = {value!r} has no annotation; make it a field: write {field}positive(…), "
                f"{field}static(…) or another function for fields; for a constant, write {name}: ClassVar = …"
            )
            raise ConfigurationError(path=path, got=value, allowed=allowed, message=message)


def _prepare_number(
    name: str, value: Any, below: float | None = None, allowed: str = "a positive number or a schedule"
) -> Any:
    if callable(value) or isinstance(value, Schedule):
        return _scheduled(name, value, np.number, allowed)
    refuse_no_number(name, value, allowed)
    if is_concrete(value):
        try:
            numbers = np.asarray(value, float)
            fits = bool(np.all(numbers > 0) and (below is None or np.all(numbers < below)))
        except OverflowError:  # a whole number that no float can hold
            fits = False
        require(fits, name, value, allowed)
    return value


def is_concrete(value: Any) -> bool:
    """Return whether a value is a number or an array of numbers, and not a schedule, a tracer or a placeholder."""
    return isinstance(value, int | float | np.number | np.ndarray | Array) and not isinstance(value, Tracer)


def _scheduled(name: str, value: Any, kind: type, allowed: str, arguments: int = 1) -> Schedule:
    if isinstance(value, Schedule):
        return value
    indices = [jax.ShapeDtypeStruct((), np.int32)] * arguments
    try:
        result = jax.eval_shape(lambda *given: jax.numpy.asarray(value(*given)), *indices)
    except Exception as error:  # a function of the user may raise anything
        text = f"it cannot be called with a round{' and an inner round' if arguments == 2 else ''}: {error}"
        raise ConfigurationError(text, path=name, got=value, allowed=allowed) from error
    require(result.shape == () and np.issubdtype(result.dtype, kind), name, value, allowed)
    return Schedule(value)


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and value == 0


def refuse_no_number(name: str, value: Any, allowed: str) -> None:
    """Refuse a value that cannot be a number.

    Objects of unknown classes are accepted, since JAX puts placeholders in the place of numbers.
    """
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
    return tuple(map(int, each)) if several else value


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
        else:  # placeholders of JAX are allowed; sequences are refused, since their order is ambiguous
            refuse_no_number(name, value, "a number, or one for each of x, y and v: fb.XYV(x=…, y=…, v=…)")
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
    """Return the entries of the section "Args:" of a docstring, with their indentation, by the name of the field."""
    section = SECTION.search(docstring)
    return {entry[1]: entry[0] for entry in ENTRY.finditer(section[1])} if section else {}


def _with_fields(written: str, cls: type, fields: list[str]) -> str:
    """Return a class's docstring, `written`, with the entries of inherited fields added to its section "Args:".

    The entry of a field comes from the nearest base class whose docstring has an entry for it.
    """
    explained: dict[str, str] = {}
    for base in reversed(cls.__mro__[1:]):
        explained |= _entries(vars(base).get("__doc__") or "")
    written = inspect.cleandoc(written)
    explained |= _entries(written)
    shown = "\n".join(explained[field] for field in fields if field in explained)
    if not shown:
        return written
    if SECTION.search(written):
        return SECTION.sub(lambda match: f"Args:\n{shown}" + "\n" * match[0].endswith("\n"), written)
    return f"{written}\n\nArgs:\n{shown}"
