"""Hyperparameters: frozen dataclasses that are pytrees, checked when built.

Numbers are pytree leaves, so that a sweep is a `vmap` over the configuration itself; static fields recompile. A field
states its default by name, `lr: float = positive(default=0.1)`: type checkers do not see it otherwise. What is read
from a configuration is in core/hyperparameters.py.
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
- "short": the same, as the part TIED (core/hyperparameters.py) of the server's step.
"""
T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Schedule:
    """A hyperparameter that depends on the round; a pytree without leaves: phases see its value alone.

    Its function takes the round or, where the field allows it, the round and the inner round k.
    """

    function: Callable[..., Any]

    @property
    def by_k(self) -> bool:
        """Whether the function takes the inner round, too."""
        return positional(self.function) == 2

    def at(self, round: Any) -> Any:
        """Return the value in a round; where it differs between inner rounds, the schedule of k that is left."""
        return Schedule(functools.partial(self.function, round)) if self.by_k else self.function(round)


def positional(function: Callable[..., Any]) -> int | None:
    """Count the positional arguments without a default; None of a function that is not written in Python."""
    try:
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    in_order = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return sum(one.kind in in_order and one.default is one.empty for one in arguments)


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
    by_k: bool = False,
    adaptive: StepKind | None = None,
    tied: str | None = None,
) -> Any:
    """A field that must be a positive number or a schedule, or, if `optional`, None; infinity is allowed.

    `several`: it may be a list of these, kept as a tuple. `by_k`: it may be a function of the round and the inner
    round. `adaptive`, `tied`: as in `step_sizes`.
    """
    optional = bool(optional or adaptive or tied)

    def prepare(name: str, value: Any) -> Any:
        value = value.tolist() if several and isinstance(value, np.ndarray) else value
        if several and isinstance(value, list | tuple) and value:
            return tuple(_prepare_number(f"{name}[{place}]", one) for place, one in enumerate(value))
        kinds = "a positive number", "a schedule", *["a function (round, k)"] * by_k, *["None"] * optional
        allowed = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
        if by_k and callable(value) and positional(value) == 2:
            return _scheduled(name, value, np.number, allowed, arguments=2)
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


def _scheduled(name: str, value: Any, kind: type, allowed: str, arguments: int = 1) -> Schedule:
    if isinstance(value, Schedule):
        return value
    indices = [jax.ShapeDtypeStruct((), np.int32)] * arguments
    try:
        found = jax.eval_shape(lambda *given: jax.numpy.asarray(value(*given)), *indices)
    except Exception as error:  # whatever a function of the user raises
        text = f"it cannot be called with a round{' and an inner round' if arguments == 2 else ''}: {error}"
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
