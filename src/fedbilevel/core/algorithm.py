"""Algorithms: a configuration, what the server does in a round, and the phases that clients run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from functools import cache, partial
from typing import Any, ClassVar, TypeVar, dataclass_transform, get_args, get_type_hints, overload

from jax import Array

from fedbilevel.core import local_x
from fedbilevel.core.authored import check_arguments, reply_of
from fedbilevel.core.client import Client, Clients
from fedbilevel.core.config import (
    config,
    counts,
    field_values,
    fraction,
    positive,
    positive_integer,
    static,
    step_sizes,
    wrapped,
)
from fedbilevel.core.errors import ConfigurationError, require, unknown
from fedbilevel.core.fed import Fed, Phase, Reply
from fedbilevel.core.problem import Bilevel, Problem
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tree import PyTree

F = TypeVar("F", bound=Callable[..., Any])
ALGORITHMS: dict[str, type[Algorithm]] = {}
"""Every algorithm class that has a name, by that name."""


@overload
def phase(function: F) -> F: ...


@overload
def phase(*, takes: PyTree, gives: PyTree) -> Callable[[F], F]: ...


def phase(function: Any = None, *, takes: PyTree = None, gives: PyTree = None) -> Any:
    """Mark a method as a phase: what a client runs when the server names it. It sees its arguments alone.

    `takes` and `gives` say what of the message and of the reply's update is shaped like x or like y, is one "number",
    or is something else, which no client gets in part, "whole": prefixes of these trees, with these four leaves.
    Clients of limited capacity, problems whose clients keep x, and `Asynchronous` go by them.

    Raises:
        ConfigurationError: the method does not take (self, client, message, key).
    """

    def mark(function: Any) -> Any:
        check_arguments(function)
        function.__phase__, function.__takes_and_gives__ = True, None if takes is None else (takes, gives)
        return function

    return mark if function is None else mark(function)


def is_phase(value: object) -> bool:
    """Whether a function or method is marked with `@phase`."""
    return callable(value) and hasattr(value, "__phase__")


def takes_and_gives(function: Any) -> tuple[PyTree, PyTree]:
    """`takes` and `gives` of a phase: what of its message and its update is shaped like x, like y, or otherwise."""
    said = getattr(function, "__takes_and_gives__", None)
    name = getattr(function, "__name__", repr(function))
    require(said is not None, f"phase {name}: takes, gives", said, "said, for clients who hold submodels")
    assert said is not None
    return said[0], said[1]


@dataclass_transform(
    kw_only_default=True,
    frozen_default=True,
    field_specifiers=(static, wrapped, positive_integer, counts, step_sizes, positive, fraction),
)
class Part(ABC):
    """A configuration with phases, that can be a field of a method: a linear solver, the steps on y, a method itself.

    A subclass is a frozen dataclass with keyword-only fields, and a pytree whose leaves are its step sizes and
    other real numbers; counts, and what `static` makes, shape the compiled program. Its methods that are marked with
    `@phase` are phases of the method that it is a part of, named by the way to them: "inner.descent".
    """

    kind: ClassVar[str]
    """What specs call it, among the parts that a field may have."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    own_phases: ClassVar[frozenset[str]]
    """The names of the methods marked with `@phase`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        config(cls)
        names = {name for base in cls.__mro__ for name, value in vars(base).items() if is_phase(value)}
        cls.own_phases = frozenset(name for name in names if is_phase(getattr(cls, name)))

    def validate(self) -> None:
        """Refuse in a field for parts what is none of those that its annotation names.

        As each `validate`, it runs when an instance is made, before those of the classes below.
        """
        made: Any = type(self)
        for field in fields(self):
            if isinstance(field.default, Part):
                hint, got = _hints(made)[field.name], getattr(self, field.name)
                allowed = " or ".join(f"{kind.__name__}(…)" for kind in get_args(hint) or (hint,))
                require(isinstance(got, hint), f"{type(self).__name__}.{field.name}", got, allowed)

    @property
    def parts(self) -> dict[str, Part]:
        """The fields that are parts themselves, by name."""
        return {name: value for name, value in field_values(self).items() if isinstance(value, Part)}

    @property
    def phases(self) -> frozenset[str]:
        """The names of the phases: all that a server may ask of a client."""
        inside = (f"{name}.{phase}" for name, part in self.parts.items() for phase in part.phases)
        return self.own_phases.union(inside)

    def find_phase(self, function: object) -> str | None:
        """The name of a phase, given as a bound method of this part or of one in it; None: it is no such phase."""
        name = str(getattr(function, "__name__", ""))
        if getattr(function, "__self__", None) is self and name in self.own_phases:
            return name
        found = ((field, part.find_phase(function)) for field, part in self.parts.items())
        return next((f"{field}.{name}" for field, name in found if name), None)

    def get_phase(self, name: str) -> Phase:
        """The phase of that name."""
        field, dot, rest = name.partition(".")
        found: Phase = self.parts[field].get_phase(rest) if dot else getattr(self, name)
        return found


@cache
def _hints(cls: type[Part]) -> dict[str, Any]:
    """The annotations of a class, resolved once."""
    return get_type_hints(cls)


class Algorithm(Part):
    """Base class of every federated method.

    A subclass is a frozen dataclass with keyword-only fields, and a pytree whose leaves are its step sizes and
    other real numbers; counts, and what `static` makes, shape the compiled program. It has to define `init` and
    `round`; every other method here is a hook with a default. A method marked with `@phase` is what a client runs when
    the server names it.
    """

    name: ClassVar[str]
    """What the command line calls the method. A class that sets it is listed in `ALGORITHMS`."""

    solves: ClassVar[tuple[type[Problem], ...]] = (Bilevel,)
    """The kinds of problem that the method is for."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Values of fields that work, by the name of a task: specs start from them. On the command line alone."""

    trains_submodels: ClassVar[bool] = False
    """Whether clients of limited capacity may train submodels: every phase then says what it takes and gives."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "name" in vars(cls):
            _register(cls)

    @abstractmethod
    def init(self, x: PyTree, y: PyTree) -> Any:
        """The server's state before round 0. It has the attributes `x` and `y`, like x0 and y0."""

    @abstractmethod
    def round(self, fed: Fed, state: Any, key: Array) -> Any:
        """The server's state after one round, whose exchanges go through `fed`: like `state` in all leaves."""

    def init_client(self, x: PyTree, y: PyTree) -> PyTree:
        """The state of each client before round 0, kept between rounds and never sent; None: clients keep nothing."""
        return None

    @property
    def label(self) -> str:
        """The name of the method in messages to the user: that of its class."""
        return type(self).__name__

    @property
    def kinds_of_problem(self) -> tuple[type[Problem], ...]:
        """The kinds of problem that this instance is for."""
        return self.solves

    @property
    def batch_size(self) -> int | None:
        """Samples that a client draws at a time, with replacement; None: all. Most methods have such a field."""
        return None

    def validate(self) -> None:
        """Raise ConfigurationError if fields do not fit together.

        It runs when an instance is made, after that of every base class, so that it need not call theirs.
        """
        return

    def check_problem(self, problem: Problem, population: int, x: PyTree) -> None:
        """Raise ConfigurationError if the fields do not fit the problem or the number of clients.

        For checks that need no samples: the server of a federation makes them, too.
        """
        return

    def check_start(self, problem: Problem, clients: Clients, x: PyTree, y: PyTree) -> None:
        """Raise ConfigurationError if the fields do not fit the clients' samples: in simulations alone."""
        return

    @property
    def extra_cohorts(self) -> int:
        """How many fresh cohorts a round may ask beside its own: the bound of `fresh` in `Fed.mean`."""
        return 0

    @property
    def asynchronous(self) -> bool:
        """Whether a round goes on with the first replies (`Fed.first`): if it waits for some number of them."""
        return self.waits_for is not None

    @property
    def asynchronous_phases(self) -> tuple[str, ...]:
        """The phases whose replies may be those of earlier exchanges, all that a round asks; the wrapper `Asynchronous`
        keeps the last ones. Empty: the method cannot go on without everyone's replies to the present message.

        What such a phase gives has to be declared, with the leaves "x", "y" and "number" alone: see `phase`.
        """
        return ()

    def asynchronous_objection(self) -> str:
        """Why the method cannot be `Asynchronous`; "" where it can."""
        return "" if self.asynchronous_phases else "it lists no asynchronous_phases, whose replies may be late"

    @property
    def waits_for(self) -> int | None:
        """How many replies an asynchronous exchange waits for; None: all."""
        return None

    @property
    def needs_everyone(self) -> bool:
        """Whether all clients have to take part in every round, so that there are no cohorts."""
        return self.asynchronous

    @property
    def submodels(self) -> UnitPolicy | None:
        """Which units clients of limited capacity hold; None: everyone trains the whole model."""
        return None if self.submodels_objection() else UnitPolicy()

    def submodels_objection(self) -> str:
        """Why clients of limited capacity cannot train parts of the model; "" where they can."""
        return "" if self.trains_submodels else "it does not set trains_submodels, for phases that say what they take"

    @property
    def local_x_lr(self) -> Any:
        """The size of the step on x along the x of a reply, for problems whose clients keep x and make it themselves.

        What every phase takes and gives has then to be declared. None: the method needs x on the server.
        """
        return None

    def client_state(self, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        """The state of each client before round 0: `init_client`, and its block of x where clients keep x."""
        if problem.local is None:
            return self.init_client(x, y)
        return local_x.LocalX(local_x.local_block(x), self.init_client(None, y))

    def hypergradient_at(self, fed: Fed, x: PyTree, y: PyTree, key: Array) -> PyTree:
        """One estimate of the hypergradient at (x, y), in the shape of x, by the exchanges of a round.

        A method that defines it can be checked against the exact hypergradient (`check_hypergradient`).
        """
        raise ConfigurationError(
            f"{self.label} estimates no hypergradient apart from its rounds: it does not define hypergradient_at"
        )

    def finished(self, state: Any) -> Any:
        """True if the run may end at this state because nothing is left to do."""
        return False

    def complaint(self, state: Any) -> str:
        """Why the run must end with an error at this state; "" where it may go on."""
        return ""

    def warning(self, state: Any) -> str:
        """A warning for the user about this state, given once in a run; "" for none."""
        return ""

    def noise_objection(self) -> str:
        """Why the method does not work with replies that clients clip and add noise to; "" where it does."""
        return ""

    def columns(self, state: Any) -> dict[str, Any]:
        """Further columns of the history: numbers by name, computed from the server's state at each evaluation."""
        return {}

    def named_phase(self, name: str) -> Phase:
        """The phase of that name, as its author wrote it; clients run it by `run_phase`.

        Raises:
            ConfigurationError: the method has no such phase.
        """
        if name not in self.phases:
            raise unknown(f"phase of {self.label}", name, self.phases)
        return self.get_phase(name)

    def run_phase(self, name: str, client: Client, message: PyTree, key: Array) -> Reply:
        """The reply of a client that runs the phase of this name.

        Raises:
            ConfigurationError: the method has no such phase, or its reply is not what engines need.
        """
        phase, client = self.named_phase(name), replace(client, batch_size=self.batch_size)
        checked = partial(reply_of, f"{self.label}.{name}", phase)
        if client.problem.local is None:
            return checked(client, message, key)
        return local_x.run(checked, takes_and_gives(phase), self.local_x_lr, client, message, key)

    def phase_name(self, function: object) -> str:
        """The name of a phase, given as the bound method that an exchange gets.

        Raises:
            ConfigurationError: it is none of this algorithm's phases.
        """
        name = self.find_phase(function)
        if name is None:
            got = getattr(function, "__name__", repr(function))
            own = getattr(function, "__self__", None) is self and not is_phase(function)
            mark = ": mark it with @phase" if own else ""
            raise ConfigurationError(
                f"{self.label}: an exchange takes one of its phases {sorted(self.phases)}, got {got}{mark}"
            )
        return name

    @classmethod
    def estimates_hypergradient(cls) -> bool:
        """Whether the class defines `hypergradient_at`."""
        return cls.hypergradient_at is not Algorithm.hypergradient_at


def _register(cls: type[Algorithm]) -> None:
    """Enter a class in `ALGORITHMS`. The same class defined again, as in a notebook's cell, replaces the one before."""
    holder = ALGORITHMS.setdefault(cls.name, cls)
    same = (holder.__module__, holder.__qualname__) == (cls.__module__, cls.__qualname__)
    require(same, f"{cls.__name__}.name", cls.name, f"another name: {holder.__module__}.{holder.__qualname__} has it")
    ALGORITHMS[cls.name] = cls


def methods_that(can: Callable[[Algorithm], bool]) -> str:
    """The names of the classes of `ALGORITHMS` that can, with the defaults of their fields, as one string."""
    classes = (cls for cls in ALGORITHMS.values() if not any(field.default is MISSING for field in fields(cls)))
    return ", ".join(sorted(cls.__name__ for cls in classes if can(cls())))


def check_solves(algorithm: Algorithm, problem: Problem) -> None:
    """Refuse a problem of a kind that the algorithm is not for, naming the algorithms that are."""
    kinds_of = "a Bilevel, Minimax, Compositional, SingleLevel or SimpleBilevel"
    require(isinstance(problem, Problem), "problem", problem, kinds_of)
    if isinstance(problem, algorithm.kinds_of_problem):
        return
    able = sorted(cls.__name__ for cls in ALGORITHMS.values() if isinstance(problem, cls.solves))
    kinds = " and ".join(kind.__name__ for kind in algorithm.kinds_of_problem)
    raise ConfigurationError(
        f"{algorithm.label} solves {kinds} problems, not {type(problem).__name__}; methods that do: {', '.join(able)}"
    )


def check_fields(algorithm: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
    """Let the algorithm refuse a problem, or clients, that its fields do not fit."""
    if problem.local is not None and algorithm.local_x_lr is None:
        able = methods_that(lambda method: method.local_x_lr is not None)
        needs = f"None: {algorithm.label} needs x on the server; methods that do not: {able}"
        require(False, "Bilevel.local", problem.local, needs)
    algorithm.check_problem(problem, len(clients), x)
    if isinstance(clients, Clients):
        if problem.local is not None:
            local_x.check_split(clients, x)
        algorithm.check_start(problem, clients, x, y)


def check_algorithm(candidate: object) -> None:
    """Refuse what is no instance of a subclass of `Algorithm`."""
    made = isinstance(candidate, Algorithm)
    require(made, "algorithm", candidate, "an instance of a subclass of Algorithm, e.g. SimFBO()")
