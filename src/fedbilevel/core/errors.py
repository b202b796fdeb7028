"""Define errors and warnings, and helpers whose messages name the field, its value and what is allowed."""

import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from fedbilevel.wording import nearest as nearest
from fedbilevel.wording import printable, shown

__all__ = [
    "AbsenceWarning",
    "CapacityWarning",
    "CheckError",
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
    "TrackerWarning",
    "UnsupportedError",
]


ChangedValues = Mapping[str, tuple[Any, Any] | None]
T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable)
Hint = Callable[[type, str], str]
"""(class, the wrong name of an argument) -> what to write in its place; "" if this is not known."""
LARGEST = 10**9  # the largest allowed count: compiled programs count in 32 bits, sometimes up to twice this number
HERE = f"{Path(__file__).parents[1]}{os.sep}"


def no_hint(cls: type, name: str) -> str:
    """Return "": there is no hint for a wrong name of an argument."""
    return ""


class FedbilevelError(Exception):
    """Base class of all errors that this library raises on purpose."""

    appended: str = ""  # the texts that were added at the end of the message, each after "; "

    def __str__(self) -> str:
        """Return the message, with the texts that were added at its end."""
        return f"{super().__str__()}{self.appended}"

    def append(self, text: str) -> None:
        """Add a text at the end of the message; the class and the fields of the error do not change."""
        self.appended += f"; {text}"

    def begin_with(self, text: str) -> None:
        """Put a text before the message, which then follows in parentheses; the fields of the error do not change."""
        self.args = (f"{text} ({super().__str__()})",)


class ConfigurationError(FedbilevelError, ValueError):
    """Report a value that is not allowed; the message names the field, the value and what is allowed.

    Attributes:
        path: the dotted path of the field, or the kind of an unknown name; "" if the error has only a text.
        got: the value, or the unknown name.
        allowed: the allowed values in words, or the valid names.
        near: the valid name that is most similar to `got`; "" if none is similar.
        message: a text to show in place of the message that is made from `path`, `got` and `allowed`; "" to show that
            message.
        where: what begins the message, such as the file that has the field; "" if the message begins with the field.
    """

    def __init__(
        self,
        text: str = "",
        *,
        path: str = "",
        got: object = None,
        allowed: str | Sequence[str] = "",
        near: str = "",
        message: str = "",
        where: str = "",
        wrong: "Sequence[ConfigurationError]" = (),
    ) -> None:
        super().__init__(text)
        self.path, self.got, self.allowed, self.near, self.message = path, got, allowed, near, message
        self.where = where
        self.several = tuple(wrong)

    @property
    def wrong(self) -> "tuple[ConfigurationError, ...]":
        """Return an error for each mistake that the message lists; if there is one mistake, it is this error itself."""
        return self.several or (self,)

    def __str__(self) -> str:
        """Return the message, with a line for each mistake."""
        mistakes = map(str, self.several) if self.several else [self._mistake()]
        return "\n".join(mistakes) + self.appended

    def _mistake(self) -> str:
        """Return the message of a single mistake."""
        where = f"{self.where}: " if self.where else ""
        text, near = self.args[0], f"; did you mean {self.near!r}?" if self.near else ""
        if self.message:
            return f"{where}{self.message}{near}"
        if not self.path:
            return f"{where}{text}"
        if isinstance(self.allowed, str):
            first, *more = shown(self.got).splitlines() or [""]
            message = f"{self.path} = {first}{' …' if more else ''} is not allowed: it must be {self.allowed}{near}"
            return f"{where}{message}; {text}" if text else f"{where}{message}"
        kind, *place = re.split(r" (?=(?:in|of|on|to|with|for) )", self.path, maxsplit=1)
        named = " ".join([f"unknown {kind} {shown(self.got, str)[:200]!r}", *place])
        message = f"{named}{near}{f'; {text}' if text else ''}"
        names = ", ".join(self.allowed) or "none"
        return f"{where}{message} (allowed: {printable(names, len(names))})"


class UnsupportedError(ConfigurationError):
    """Report that a method does not support what the problem or the run asks for; another method may support it."""


class NumericalError(FedbilevelError, ArithmeticError):
    """Report numbers from which a run cannot continue; the message names the round and the problem.

    Attributes:
        round: the round; None if the error has none.
        costs: the costs of the rounds that are not in the run's ledger, the failed round included; None if the engine
            does not know these costs.
        ledger: the `Ledger` of everything that the run has cost; None if it is not known. It includes the failed round,
            unless the engine does not know the costs of this round, as over Flower.
    """

    costs: Any = None
    ledger: Any = None

    def __init__(self, text: str = "", *, round: int | None = None) -> None:
        super().__init__(text)
        self.round = round


class NonFiniteError(NumericalError):
    """Report a NaN or an infinity; the message names the round, the part of the round and the quantities.

    Attributes:
        during: the part of the round, such as "phase inner", "server update" or "evaluation"; "" if it is not known.
        client: the client that computed the quantities; None if it is not known, or if the server computed them.
        names: the quantities: leaves of an update or of the state, losses or metrics.
    """

    def __init__(
        self,
        text: str = "",
        *,
        round: int | None = None,
        during: str = "",
        client: int | None = None,
        names: Iterable[str] = (),
    ) -> None:
        super().__init__(text, round=round)
        self.during, self.client, self.names = during, client, tuple(names)

    carry: object = None  # the carry before the round, if the engine still has it; `solve` saves it
    result: Any = None
    """The result of the run before that round, with finite x and y; None if it is not known any more."""
    of_iterate: bool = False  # whether the iterate is not finite, and not only a metric; `solve` then names remedies


class NumericalWarning(UserWarning):
    """Warn that an assumption of the method does not hold; the run continues."""


class AbsenceWarning(UserWarning):
    """Warn that some clients are never available; the run continues without them."""


class CapacityWarning(UserWarning):
    """Warn that clients are sent more than their capacity; the run continues."""


class InfluenceWarning(UserWarning):
    """Warn that x or y has no influence on a loss that should determine it; the run continues."""


class DataWarning(UserWarning):
    """Warn that samples, a table or its sites look different from what was probably intended; the call continues."""


class CheckpointWarning(UserWarning):
    """Warn that a run resumes from another state or setup than its newest checkpoint, or cannot lock or save files.

    Attributes:
        path: the file or folder; None if the warning is about none.
        differences: in what the run differs from the run that wrote the file, as in `CheckpointError.differences`.
    """

    def __init__(
        self, text: str = "", *, path: Path | str | None = None, differences: ChangedValues | None = None
    ) -> None:
        super().__init__(text)
        self.path, self.differences = None if path is None else Path(path), dict(differences or {})


class TrackerWarning(UserWarning):
    """Warn that an experiment tracker could not record a run; the run continues without it."""


class ExchangeError(FedbilevelError):
    """Report that too few clients replied; the message names the round, the phase and the reasons of refusals.

    Attributes:
        round, phase: the round and the phase; None and "" if the error is not about an exchange of a round.
        replies, needed: the number of replies that count, or of clients that are online, and the number that is needed;
            None if the error is about something else.
        refusals: for each client without a reply, if the reason is known, an object with the attributes `client`,
            `why`, and `code`, the kind of the problem.
    """

    carry: object = None  # the carry to continue from; None: the carry at the start of the stretch of rounds

    def __init__(
        self,
        text: str = "",
        *,
        round: int | None = None,
        phase: str = "",
        replies: int | None = None,
        needed: int | None = None,
        refusals: Iterable[Any] = (),
    ) -> None:
        super().__init__(text)
        self.round, self.phase, self.replies, self.needed = round, phase, replies, needed
        self.refusals = tuple(refusals)


class FloorError(FedbilevelError):
    """Report that a client refuses to draw fewer samples than its rule allows; the message has the rule and no data.

    Attributes:
        floor: the least number of samples that the client's rule allows in a draw; None if it is not known.
    """

    def __init__(self, text: str = "", *, floor: int | None = None) -> None:
        super().__init__(text)
        self.floor = floor


class CheckError(FedbilevelError, AssertionError):
    """Report that a method failed a check of `check_method`; the message has all outcomes."""


class CheckpointError(FedbilevelError, OSError):
    """Report a checkpoint, or another file of a run, that cannot be written or read, or belongs to another run.

    Attributes:
        path: the file or folder; None if it is not known.
        errno: the operating system's number of the error, as in Python's module errno; None if the file can be read and
            written, but has a wrong content.
        differences: in what the file and this run differ, if the file belongs to another run: the name of an argument,
            field or array -> (the value in the file, the value of this run), or None if only hashes are compared.
        remedy: how to go on, at the end of the message; "" if the message does not say this.
    """

    def __init__(
        self,
        text: str = "",
        *,
        path: Path | str | None = None,
        errno: int | None = None,
        differences: ChangedValues | None = None,
        remedy: str = "",
    ) -> None:
        super().__init__(text)
        self.path, self.errno, self.remedy = None if path is None else Path(path), errno, remedy
        self.differences: ChangedValues = differences or {}

    def __str__(self) -> str:
        """Return the message, with the remedy and added texts at its end."""
        return "; ".join(filter(None, (self.args[0], self.remedy))) + self.appended


class InUse(CheckpointError):
    """Report that another process is writing to the same place; the message names the process.

    Attributes:
        holder: the process, its machine and the time at which it began, in words; "" if they are not known.
    """

    holder: str = ""


def unknown(kind: str, name: object, allowed: Iterable[str], hint: str = "") -> ConfigurationError:
    """Return the error for an unknown name, with the most similar valid name and all valid names.

    Args:
        kind: the kind of the name, such as "layout", for the message.
        name: the unknown name.
        allowed: the valid names.
        hint: what to write in place of the name, for the message; "" if this is not known.
    """
    names = sorted(allowed)
    return ConfigurationError(hint, path=kind, got=name, allowed=names, near=nearest(shown(name, str), names))


def explain_misspelt(cls: T, kind: str = "argument", hint: Hint = no_hint) -> T:
    """Make a class and its subclasses suggest the most similar name for a wrong argument, as `explain_call` does.

    Args:
        cls: the class.
        kind: what the class calls its arguments, for the message.
        hint: a function of the class and the wrong argument's name that returns what to write in its place, or "".
    """
    original: Any = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(original)

    @wraps(original)
    def __init__(self: Any, *given: Any, **named: Any) -> None:
        _require_bound(type(self).__name__, kind, signature, (self, *given), named, partial(hint, type(self)))
        original(self, *given, **named)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def explain_call(function: F) -> F:
    """Make a function suggest the most similar name for a misspelt keyword, and name missing arguments.

    Its calls then raise ConfigurationError where Python raises TypeError.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def called(*given: Any, **named: Any) -> Any:
        _require_bound(function.__qualname__, "argument", signature, given, named)
        return function(*given, **named)

    return called  # type: ignore[return-value]


def _require_bound(
    name: str,
    kind: str,
    signature: inspect.Signature,
    given: Any,
    named: dict[str, Any],
    hint: Callable[[str], str] = lambda keyword: "",
) -> None:
    names = [parameter for parameter in signature.parameters if parameter not in ("self", "cls")]
    wrong = [keyword for keyword in named if keyword not in names]
    refuse_together([unknown(f"{kind} of {name}", keyword, names, hint(keyword)) for keyword in wrong])
    try:
        signature.bind(*given, **named)
    except TypeError as error:
        raise ConfigurationError(f"{error} ({kind}s: {', '.join(names)})", where=name) from None


def refuse_together(wrong: Iterable[ConfigurationError]) -> None:
    """Raise one error for all errors in `wrong`, with a line for each different mistake; do nothing without errors."""
    each = list({str(mistake): mistake for error in wrong for mistake in error.wrong}.values())
    if each:
        raise each[0] if len(each) == 1 else ConfigurationError(wrong=each)


@contextmanager
def errors_in(place: str) -> Iterator[None]:
    """Begin the messages of ConfigurationErrors in the block with `place`, such as a file; their fields do not change.

    If an error has several mistakes, the message of each mistake begins with `place`.
    """
    try:
        yield
    except ConfigurationError as error:
        for mistake in error.wrong:
            mistake.where = f"{place}: {mistake.where}" if mistake.where else place
        raise


def diverged(names: Sequence[str], round: int, during: str = "", client: int | None = None) -> NonFiniteError:
    """Return the error for quantities of an iterate that have become NaN or infinite during a run."""
    place = [f"round {round}", *filter(None, [during]), *([] if client is None else [f"client {client}"])]
    text = f"{', '.join(place)}: {', '.join(names)} {'is' if len(names) == 1 else 'are'} not finite"
    error = NonFiniteError(text, round=round, during=during, client=client, names=names)
    error.of_iterate = True
    return error


_PLACE: ContextVar[str] = ContextVar("_PLACE", default="")


@contextmanager
def warnings_in(place: str) -> Iterator[None]:
    """Begin the messages of warnings that `warn` issues in the block with `place`, such as the table of a site."""
    before = _PLACE.set(place)
    try:
        yield
    finally:
        _PLACE.reset(before)


def warn(warning: Warning) -> None:
    """Issue a warning that points at the line outside this library that made the call."""
    if place := _PLACE.get():
        warning.args = (f"{place}: {warning}",)
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back and frame.f_code.co_filename.startswith(HERE):
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Print each warning in the block as a single line on standard error, without the line of code."""

    with warnings.catch_warnings():
        warnings.showwarning = lambda said, *_, **__: print(
            printable(f"fedbilevel: warning: {said}", None), file=sys.stderr, flush=True
        )
        yield


def require(holds: bool, field: str, got: object, allowed: str) -> None:
    """Raise ConfigurationError unless `holds`: "FIELD = GOT is not allowed: it must be ALLOWED"."""
    if not holds:
        raise ConfigurationError(path=field, got=got, allowed=allowed)


def is_number(got: object) -> bool:
    """Return whether a value is a finite real number of Python or NumPy, and not a boolean."""
    try:
        return isinstance(got, Real) and not isinstance(got, bool) and math.isfinite(got)
    except OverflowError:  # a whole number that no float can hold
        return False


def is_count(got: object) -> bool:
    """Return whether a value is a positive integer, and not a boolean."""
    return isinstance(got, Integral) and not isinstance(got, bool) and int(got) >= 1


def require_count(field: str, got: object, optional: bool = False, largest: int = LARGEST) -> None:
    """Raise ConfigurationError unless `got` is a positive integer of at most `largest`, or, if `optional`, None."""
    require(not is_count(got) or got <= largest, field, got, f"at most {largest:,}")  # type: ignore[operator]
    fits = (optional and got is None) or is_count(got)
    require(fits, field, got, "a positive integer or None" if optional else "a positive integer")
