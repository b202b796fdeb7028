"""Define the base classes of methods and their parts: fields, the server's program, and the phases that clients run."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from functools import cache, partial
from typing import Any, ClassVar, TypeVar, dataclass_transform, get_args, get_type_hints, overload

from jax import Array

from fedbilevel.core import local_x
from fedbilevel.core.authored import check_arguments, reply_of
from fedbilevel.core.client import Client, Clients, RemoteClients
from fedbilevel.core.config import (
    config,
    counts,
    fraction,
    positive,
    positive_integer,
    share,
    static,
    step_sizes,
    wrapped,
)
from fedbilevel.core.errors import ConfigurationError, UnsupportedError, require, unknown
from fedbilevel.core.facts import Allows, Asks, Facts, Findings, No, OwnParts
from fedbilevel.core.fed import Fed, Phase, Reply
from fedbilevel.core.hyperparameters import field_values, local_epochs
from fedbilevel.core.own import as_client, check_own
from fedbilevel.core.own_y import server_y
from fedbilevel.core.problem import Bilevel, Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.core.weights import PlacedWeights

F = TypeVar("F", bound=Callable[..., Any])
Measures = Callable[[Any, Client, PyTree, Array], tuple[PyTree, PyTree]]
"""(algorithm, client, message, key) -> the (x, y) at which the client measures its curvature."""
ALGORITHMS: dict[str, type[Algorithm]] = {}
"""Every algorithm class that has a name, by that name."""


@overload
def phase(function: F) -> F: ...


@overload
def phase(
    *, takes: PyTree, gives: PyTree, measures: bool | Measures = False, multiplies: bool = False
) -> Callable[[F], F]: ...


def phase(
    function: Any = None,
    *,
    takes: PyTree = None,
    gives: PyTree = None,
    measures: bool | Measures = False,
    multiplies: bool = False,
) -> Any:
    """Mark a method as a phase, which a client runs when the server asks for it by name.

    A phase can read only its arguments and the fields of `self`. `takes` and `gives` are needed by `Asynchronous`, by
    clients of limited capacity, and by problems whose clients keep x. Each of them is a pytree with one word for each
    part of the message or of the update: "x" or "y" for a part that has the shape of this variable; "number" for a
    single number; and "whole" for any other part, which is never cut to a submodel.

    Args:
        function: the method.
        takes: the shapes of the parts of the message.
        gives: the shapes of the parts of the reply's update.
        measures: whether `AdaptiveSteps` may ask the client for its curvature in this phase, at the first x and the
            first y of the message; or a function of the phase's arguments that returns the (x, y) to use instead.
        multiplies: whether the phase replies with the product of ∇²yy g_i and the last part of the message.

    Raises:
        ConfigurationError: the method does not take (self, client, message, key).
    """

    def mark(function: Any) -> Any:
        check_arguments(function)
        function.__phase__, function.__takes_and_gives__ = True, None if takes is None else (takes, gives)
        function.__measures__, function.__multiplies__ = measures, multiplies
        return function

    return mark if function is None else mark(function)


def is_phase(value: object) -> bool:
    """Return whether a function or method is marked with `@phase`."""
    return callable(value) and hasattr(value, "__phase__")


def takes_and_gives(function: Any) -> tuple[PyTree, PyTree]:
    """Return `takes` and `gives` of a phase: the shapes of the parts of its message and of its update."""
    said = getattr(function, "__takes_and_gives__", None)
    name = getattr(function, "__name__", repr(function))
    require(
        said is not None,
        f"phase {name}: takes, gives",
        said,
        "declared by @phase(takes=…, gives=…), which submodels need",
    )
    assert said is not None
    return said[0], said[1]


@dataclass_transform(
    kw_only_default=True,
    frozen_default=False,  # see core/config.py
    field_specifiers=(static, wrapped, positive_integer, counts, step_sizes, positive, fraction, share),
)
class Part(ABC):
    """Base class of configurations with phases, such as a method, a linear solver, or the steps on y.

    A part can be a field of a method. A subclass is a frozen dataclass with keyword-only fields, and a pytree whose
    leaves are its step sizes and other real numbers. Counts, and fields made by `static`, are constants of the compiled
    program. Methods of a part that are marked with `@phase` are phases of the method to which the part belongs. Their
    names contain the field, as in "inner.descent".
    """

    kind: ClassVar[str]
    """The name of the part in specs. No other part that the same field may contain has this name."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        config(cls)

    def validate(self) -> None:
        """Refuse a part whose class the annotation of its field does not allow.

        This method runs when an instance is made. If several classes define `validate`, the base classes' run first.
        """
        made: Any = type(self)
        for field in fields(self):
            if isinstance(field.default, Part):
                hint, got = _hints(made)[field.name], getattr(self, field.name)
                allowed = " or ".join(f"{kind.__name__}(…)" for kind in get_args(hint) or (hint,))
                require(isinstance(got, hint), f"{type(self).__name__}.{field.name}", got, allowed)

    @property
    def phases(self) -> dict[str, Phase]:
        """Return all phases that a server may ask for, by name; a phase of a part has a name like "inner.descent"."""
        found: dict[str, Phase] = {name: getattr(self, name) for name in _own_phases(type(self))}
        for field, part in field_values(self).items():
            if isinstance(part, Part):
                found |= {f"{field}.{name}": asked for name, asked in part.phases.items()}
        return found


@cache
def _hints(cls: type[Part]) -> dict[str, Any]:
    """Return the annotations of a class, with names resolved to types; the result is cached."""
    return get_type_hints(cls)


@cache
def _own_phases(cls: type[Part]) -> tuple[str, ...]:
    """Find the names of the methods marked with `@phase`."""
    return tuple(name for name in sorted(dir(cls)) if is_phase(inspect.getattr_static(cls, name)))


class Listed(Part):
    """Base class of `Algorithm` that lists methods by name and finds the names of their phases.

    A subclass that sets `name` is listed in `ALGORITHMS`. The text of `facts` is appended to the docstring of a
    subclass that sets them.
    """

    name: ClassVar[str]
    """The name of the method on the command line. A class that sets it is listed in `ALGORITHMS`."""

    solves: ClassVar[tuple[type[Problem], ...]] = (Bilevel,)
    """The kinds of problem that the method solves."""

    facts: ClassVar[Facts | None] = None
    """The costs, needs and uses of the method; the text is appended to the docstring of the class."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """For each task, by its name: values of fields that work on it. Runs on the command line use them as defaults."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "facts" in vars(cls):
            cls.__doc__ = f"{cls.__doc__}\n\n{cls.facts}"
        if "name" in vars(cls):
            method: Any = cls
            # if the same class is defined again, as in a notebook's cell, it replaces the earlier one
            holder = ALGORITHMS.setdefault(cls.name, method)
            same = (holder.__module__, holder.__qualname__) == (cls.__module__, cls.__qualname__)
            has_it = f"another name: {holder.__module__}.{holder.__qualname__} has it"
            require(same, f"{cls.__name__}.name", cls.name, has_it)
            ALGORITHMS[cls.name] = method

    @property
    def label(self) -> str:
        """Return the name of the method in messages, which is the name of its class."""
        return type(self).__name__

    @property
    def kinds_of_problem(self) -> tuple[type[Problem], ...]:
        """Return the kinds of problem that this instance solves."""
        return self.solves

    def phase_name(self, function: object) -> str:
        """Return the name of a phase, which is given as a bound method.

        Raises:
            ConfigurationError: the function is not a phase of this algorithm.
        """
        phases = self.phases
        for name, known in phases.items():
            if known == function:  # bound to this object; a method of another object with equal fields differs
                return name
        got = getattr(function, "__name__", repr(function))
        holder = getattr(function, "__self__", None)
        mark = ": mark it with @phase" if holder is self and not is_phase(function) else ""
        mark = (
            f" of a {type(holder).__name__} that is not a field: make it a field" if isinstance(holder, Part) else mark
        )
        raise ConfigurationError(
            f"an exchange takes one of its phases {sorted(phases)}, got {got}{mark}", where=self.label
        )


class Algorithm(Listed):
    """Base class of all federated methods.

    A subclass is a frozen dataclass with keyword-only fields, and a pytree whose leaves are its step sizes and other
    real numbers. Counts, and fields made by `static`, are constants of the compiled program. A subclass has to define
    `init` and `round`; all other methods of this class have a default. A method of the class that is marked with
    `@phase` is a phase: a client runs it when the server asks for it by name.
    """

    def validate(self) -> None:
        """Refuse a number of epochs, in a field `local_epochs` of the method or its parts, if `batch_size` is None."""
        for path in local_epochs(self):
            allowed = f"a number of samples, with {path}"
            require(self.batch_size is not None, f"{self.label}.batch_size", None, allowed)

    @abstractmethod
    def init(self, x: PyTree, y: PyTree) -> Any:
        """Return the server's state before round 0. Its attributes `x` and `y` have the shapes of x0 and y0."""

    @abstractmethod
    def round(self, fed: Fed, state: Any, key: Array) -> Any:
        """Run one round, which reaches clients by exchanges of `fed`, and return the server's new state.

        The new state has the same structure, shapes and dtypes as `state`. `key` is the round's random key.
        """

    def init_client(self, x: PyTree, y: PyTree) -> PyTree:
        """Return a client's state before round 0; None: no state. A client keeps its state and never sends it."""
        return None

    @property
    def batch_size(self) -> int | None:
        """Return the number of samples in a batch, drawn with replacement; None: all samples of the client.

        Most methods define it as a field.
        """
        return None

    def check(self, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree) -> None:
        """Raise ConfigurationError if the fields do not fit the problem or the clients.

        The server of a federation calls this with `RemoteClients`, which have no samples.
        """
        return

    @property
    def asks(self) -> Asks:
        """Return what rounds demand of an engine, such as all clients, the first replies or fresh cohorts."""
        return Asks()

    @property
    def allows(self) -> Allows:
        """Return the optional features that the method supports; `No(reason)` says why a feature is not supported."""
        return Allows()

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        """Return a client's state before round 0: that of `init_client(x, y)` for the leaves that the server has.

        Leaves of x and y that only clients have, by `local` or `own` of the problem, are left out.
        """
        return self.init_client(local_x.server_x(problem, x), server_y(problem.own, y))

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """Estimate the hypergradient at (x, y), in the shape of x, by the exchanges of a round.

        A method that defines this function can be checked against the exact hypergradient (`check_hypergradient`).
        """
        raise ConfigurationError(
            f"{self.label} estimates no hypergradient apart from its rounds: it does not define hypergradient_at"
        )

    def finished(self, state: Any) -> Any:
        """Return whether the run may end at this state because nothing is left to do."""
        return False

    def findings(self, state: Any) -> Findings:
        """Return what the server's state shows after some rounds: an error, a warning, and columns for the history."""
        return Findings()

    def remarks(self, state: Any) -> tuple[str, ...]:
        """Return remarks for the user about the server's state at the end of a run; each remark is a sentence."""
        return ()

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        """Run the phase of this name on a client; return its reply.

        Raises:
            ConfigurationError: the method has no such phase, or its reply is not what engines need.
        """
        if name not in self.phases:
            raise unknown(f"phase of {self.label}", name, self.phases)
        phase, client = as_client(self, client.own).phases[name], replace(client, batch_size=self.batch_size)
        checked = partial(reply_of, f"{self.label}.{name}", phase)
        if isinstance(message, PlacedWeights):
            client, message = replace(client, problem=message.on_whole_models(client.problem)), message.content
        return checked(client, message, key)

    @classmethod
    def estimates_hypergradient(cls) -> bool:
        """Return whether the class defines `hypergradient_at`."""
        return cls.hypergradient_at is not Algorithm.hypergradient_at


def own_parts(algorithm: Algorithm, phase: str) -> OwnParts:
    """Return the entry of a phase in the method's declaration `own_y`, which is supported.

    Raises:
        ConfigurationError: there is no entry.
    """
    declared = algorithm.allows.own_y
    assert not isinstance(declared, No)
    with_entry = f"declared with an entry for the phase {phase!r}, which a round asks for"
    require(phase in declared, f"{algorithm.label}.allows.own_y", sorted(declared), with_entry)
    return declared[phase]


def refuse_unless_allowed(algorithm: Algorithm, entry: str, cannot: str, allows: Allows | None = None) -> None:
    """Raise UnsupportedError if a method does not support a feature; the message names methods that support it.

    Args:
        algorithm: the method.
        entry: the feature, an entry of `Allows`.
        cannot: the words of the message that say what the method cannot do.
        allows: the features that the method supports within its layers; None: those that it supports without layers.
    """

    def reason(allows: Allows) -> str:
        found = allows._asdict()[entry]
        return found.why if isinstance(found, No) else ""

    if why := reason(algorithm.allows if allows is None else allows):
        able = methods_that(lambda method: not reason(method.allows) and method.label != algorithm.label)
        raise UnsupportedError(f"{algorithm.label} {cannot}: {why}; these methods can: {able}")


def methods_that(fit: Callable[[Algorithm], bool]) -> str:
    """List the names of the methods for which `fit` is true of an instance with the default of every field."""
    made = [cls() for cls in ALGORITHMS.values() if all(field.default is not MISSING for field in fields(cls))]
    return ", ".join(sorted({type(method).__name__ for method in made if fit(method)}))


def check_solves(algorithm: Algorithm, problem: Problem) -> None:
    """Refuse a problem of a kind that the algorithm does not solve; the message names algorithms that solve it."""
    kinds_of = "a Bilevel, Minimax, Compositional, SingleLevel or SimpleBilevel"
    require(isinstance(problem, Problem), "problem", problem, kinds_of)
    if isinstance(problem, algorithm.kinds_of_problem):
        return
    able = sorted(cls.__name__ for cls in ALGORITHMS.values() if isinstance(problem, cls.solves))
    kinds = " or ".join(kind.__name__ for kind in algorithm.kinds_of_problem)
    text = f"{algorithm.label} solves {kinds} problems, not {type(problem).__name__} problems"
    message = f"{text}; these methods do: {', '.join(able)}"
    got = type(problem).__name__
    allowed = f"a {kinds} problem; {got} problems are solved by {', '.join(able)}"
    raise ConfigurationError(path="problem", got=got, allowed=allowed, message=message)


def check_fields(algorithm: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree, rounds: int) -> None:
    """Raise ConfigurationError if the algorithm's fields do not fit the problem, the clients or their own numbers."""
    check_own(algorithm, clients.own, len(clients), rounds)
    if problem.whole:
        why = f"None: the {' and the '.join(problem.whole)} loss takes all of a client's samples (WholeLoss)"
        for path, epochs in local_epochs(algorithm).items():
            raise ConfigurationError(path=f"{algorithm.label}.{path}", got=epochs, allowed=why)
        require(algorithm.batch_size is None, f"{algorithm.label}.batch_size", algorithm.batch_size, why)
    algorithm.check(problem, clients, x, y)


def check_algorithm(candidate: object) -> None:
    """Refuse an object that is not an instance of a subclass of `Algorithm`."""
    allowed = "an instance of a subclass of Algorithm, e.g. SimFBO()"
    if isinstance(candidate, Part):
        kind = type(candidate).__name__
        allowed += f"; {kind} goes around a method: fb.layered(SimFBO(), …), or is a field of a method"
    require(isinstance(candidate, Algorithm), "algorithm", candidate, allowed)
