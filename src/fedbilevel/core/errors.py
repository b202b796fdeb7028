"""Errors and warnings, one class per kind, each message saying which field, what it got and what is allowed."""

import difflib
import functools
import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from fedbilevel.wording import printable

__all__ = [
    "AbsenceWarning",
    "CapacityWarning",
    "CheckpointError",
    "CheckpointWarning",
    "ConfigurationError",
    "DataWarning",
    "ExchangeError",
    "FedbilevelError",
    "FloorError",
    "InUse",
    "InfluenceWarning",
    "NonFiniteError",
    "NumericalError",
    "NumericalWarning",
]


T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable)
LARGEST = 10**9  # of counts: compiled programs count in 32 bits, twice as many, too
HERE = f"{Path(__file__).parents[1]}{os.sep}"


class FedbilevelError(Exception):
    """Base of every error that this library raises on purpose."""


class ConfigurationError(FedbilevelError, ValueError):
    """A field has a value that is not allowed; the message names the field, the value and what is allowed.

    Attributes:
        path: the dotted path of the field, or the kind of the name; "" where a text is all that is known.
        got: the value, or the unknown name.
        allowed: what the value must be, in words; or the valid names.
        near: the valid name that is nearest to `got`; "" where none is near.
    """

    def __init__(
        self,
        text: str = "",
        *,
        path: str = "",
        got: object = None,
        allowed: str | Sequence[str] = "",
        near: str = "",
        wrong: "Sequence[ConfigurationError]" = (),
    ) -> None:
        super().__init__(text)
        self.path, self.got, self.allowed, self.near = path, got, allowed, near
        self.several = tuple(wrong)

    @property
    def wrong(self) -> "tuple[ConfigurationError, ...]":
        """Each mistake by itself: those that this error reports together, or this error alone."""
        return self.several or (self,)

    def __str__(self) -> str:
        """The message: a line for each mistake."""
        if self.several:
            return "\n".join(map(str, self.several))
        text, near = super().__str__(), f"; did you mean {self.near!r}?" if self.near else ""
        if not self.path:
            return text
        if isinstance(self.allowed, str):
            first, *more = repr(self.got).splitlines() or [""]
            said = f"{self.path} = {first}{' …' if more else ''} is not allowed: it must be {self.allowed}{near}"
            return f"{said}; {text}" if text else said
        said = f"unknown {self.path} {str(self.got)[:200]!r}{near}{f', {text}' if text else ''}"
        names = ", ".join(self.allowed) or "none"
        return f"{said} (allowed: {printable(names, len(names))})"


class NumericalError(FedbilevelError, ArithmeticError):
    """The run cannot go on from these numbers; the message names the round and what was met."""


class NonFiniteError(NumericalError):
    """A NaN or an infinity appeared; the message names the round, the phase and the quantity."""

    carry: object = None  # that of the run before the round, where the engine still has it: `solve` saves it
    result: Any = None
    """What `solve` would have returned before that round, where it is still known: x and y are finite."""
    of_iterate: bool = False  # of the run, and not of a metric alone: `solve` adds what may help


class NumericalWarning(UserWarning):
    """The run goes on, but what its method assumes was seen not to hold."""


class AbsenceWarning(UserWarning):
    """The run goes on without clients that are never available."""


class CapacityWarning(UserWarning):
    """The run goes on, but clients are sent more than their capacity."""


class InfluenceWarning(UserWarning):
    """The run goes on, but x or y does not enter a loss that it should be chosen by."""


class DataWarning(UserWarning):
    """The call goes on, but a table or its sites look otherwise than they were meant."""


class CheckpointWarning(UserWarning):
    """A run resumes from another state or setup than its newest checkpoint has, or could not lock or save its files."""


class ExchangeError(FedbilevelError):
    """Too few clients replied; the message names round and phase, and what those said who refused."""

    carry: object = None  # the state to go on from, if another than that with which the stretch began


class FloorError(FedbilevelError):
    """A client's own rule forbids to draw so few samples; the message names the rule, and no data."""


class CheckpointError(FedbilevelError, OSError):
    """A checkpoint could not be written, or does not belong to this run."""


class InUse(CheckpointError):
    """Another process is writing there; the message names it."""


def unknown(kind: str, name: object, allowed: Iterable[str]) -> ConfigurationError:
    """Return the error for a misspelt name: it offers the nearest valid name and lists them all."""
    names = sorted(allowed)
    return ConfigurationError(path=kind, got=name, allowed=names, near=nearest(str(name), names))


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the nearest of the names; "" where none is near."""
    lower = {one.lower(): one for one in names}
    if SAME.get(name) in lower:
        return SAME[name]
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
    return lower[near[0]] if near else ""


SAME = {"seed": "key", "x_bounds": "project_x", "higher_is_better": "larger_is_better"}
"""Names that people try, and what they are here."""


def explain_misspelt(cls: T, kind: str = "argument") -> T:
    """Refuse wrong arguments of a class, and of its subclasses, as `explain_call` does."""
    original: Any = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        _require_bound(type(self).__name__, kind, signature, (self, *given), named)
        original(self, *given, **named)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def explain_call(function: F) -> F:
    """Refuse misspelt keywords of a function with the nearest name and all names, and name those that are missing."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        _require_bound(function.__qualname__, "argument", signature, given, named)
        return function(*given, **named)

    return called  # type: ignore[return-value]


def _require_bound(name: str, kind: str, signature: inspect.Signature, given: Any, named: dict[str, Any]) -> None:
    names = [one for one in signature.parameters if one not in ("self", "cls")]
    refuse_together([unknown(f"{kind} of {name}", one, names) for one in named if one not in names])
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        raise ConfigurationError(f"{name}: {error} ({kind}s: {', '.join(names)})") from None


def refuse_together(wrong: Iterable[ConfigurationError]) -> None:
    """Raise an error with all that is wrong, a line for each different mistake; nothing where nothing is wrong."""
    each = list({str(mistake): mistake for error in wrong for mistake in error.wrong}.values())
    if each:
        raise each[0] if len(each) == 1 else ConfigurationError(wrong=each)


def diverged(where: str, what: str) -> NonFiniteError:
    """The error for numbers that stopped being finite in the course of a run."""
    error = NonFiniteError(f"{where}{what} is not finite")
    error.of_iterate = True
    return error


def warn(warning: Warning) -> None:
    """Warn, and point at the line outside of this library that called it."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back and frame.f_code.co_filename.startswith(HERE):
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Print each warning as a single line on standard error while this is held, without the code that led to it."""

    with warnings.catch_warnings():
        warnings.showwarning = lambda said, *_, **__: print(
            printable(f"fedbilevel: warning: {said}", None), file=sys.stderr, flush=True
        )
        yield


def require(holds: bool, field: str, got: object, allowed: str) -> None:
    """Raise ConfigurationError unless `holds`: «field = got is not allowed: it must be allowed»."""
    if not holds:
        raise ConfigurationError(path=field, got=got, allowed=allowed)


def is_number(got: object) -> bool:
    """Tell whether that is a finite plain number, and no boolean."""
    return isinstance(got, Real) and not isinstance(got, bool) and math.isfinite(got)  # NumPy's are of these, too


def is_count(got: object) -> bool:
    """Tell whether that is a positive integer, and no boolean."""
    return isinstance(got, Integral) and not isinstance(got, bool) and int(got) >= 1


def require_count(field: str, got: object, optional: bool = False, largest: int = LARGEST) -> None:
    """Raise ConfigurationError unless `got` is a positive integer of at most `largest`, or, if `optional`, None."""
    require(not is_count(got) or got <= largest, field, got, f"at most {largest:,}")  # type: ignore[operator]
    fits = (optional and got is None) or is_count(got)
    require(fits, field, got, "a positive integer or None" if optional else "a positive integer")
