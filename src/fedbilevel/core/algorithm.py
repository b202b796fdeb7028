"""What an algorithm is: a configuration with an `init`, a `round`, and the phases that clients run.

init(x, y) -> state            the server's; it has .x and .y
round(fed, state, key) -> state

and, where the defaults do not fit:

solves                         the kinds of problem that it is for; left out: all but single-level ones
fresh                          how many fresh cohorts a round may ask (see Fed.mean); left out: none
asynchronous                   whether a round asks for the first answers alone (see Fed.first); left out: no
everyone                       whether all clients have to take part in every round; left out: where asynchronous
init_client(x, y) -> state     what each client keeps between rounds; left out: nothing
check_problem(problem, population, x)  raises ConfigurationError if its fields do not fit the problem or the number of
                               clients; for what needs no samples, and so on the server of a federation too
check_start(problem, clients, x, y)   the same, for what looks at samples
finished(state) -> Array       true where nothing is left to do: the run ends; left out: never
complaint(state) -> str        why the run must not go on, or ""
warning(state) -> str          what the user should know of it, or ""; said once
units(anatomy, kept, importance, holder)   the units of its submodel, for a client of limited capacity, and
alike                          whether those of one capacity hold the same; both left out: trains whole models alone
noise_objection() -> str       why it cannot do with replies that clients clip and noise, or ""; left out: it can
columns(state) -> {name: number}      what the server can say of itself, for the rows of the history
with_own(state, clients) -> state     the server's state with what clients keep for themselves put in its place, for
                               results and metrics of a simulation, which has their states (leaves (M, ...)) at hand
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar, dataclass_transform, overload

from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.config import config, fraction, positive, static, steps
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.fed import Fed
from fedbilevel.core.problem import Bilevel, Problem
from fedbilevel.core.tree import PyTree

T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
CLASSES: list[type] = []
"""Every algorithm class that was defined, for errors that say which one would do."""


class Algorithm(Protocol):
    """What engines need of an algorithm."""

    phases: ClassVar[frozenset[str]]

    def init(self, x: PyTree, y: PyTree) -> Any: ...

    def round(self, fed: Fed, state: Any, key: Array) -> Any: ...


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(static, steps, positive, fraction))
def algorithm(cls: T) -> T:
    """Make a class an algorithm: a configuration whose methods marked @phase are its allow-list."""
    made: Any = config(cls)
    made.phases = frozenset(name for name in dir(made) if hasattr(getattr(made, name), "__phase__"))
    CLASSES.append(made)
    return made


@overload
def phase(function: F) -> F: ...


@overload
def phase(*, takes: PyTree, gives: PyTree) -> Callable[[F], F]: ...


def phase(function: Any = None, *, takes: PyTree = None, gives: PyTree = None) -> Any:
    """Mark a method as a phase: what a client runs when the server names it. It sees its arguments alone.

    For clients with submodels, `takes` and `gives` say what of the message and of the reply's update is shaped like
    x, like y, or "whole": prefixes of these trees, with leaves "x", "y" and "whole".
    """

    def mark(function: Any) -> Any:
        function.__phase__, function.__parts__ = True, None if takes is None else (takes, gives)
        return function

    return mark if function is None else mark(function)


def parts_of(function: Any) -> tuple[PyTree, PyTree]:
    """What a phase takes and gives, of x and of y."""
    parts = getattr(function, "__parts__", None)
    name = getattr(function, "__name__", repr(function))
    require(parts is not None, f"phase {name}: takes, gives", parts, "said, for clients who hold submodels")
    assert parts is not None
    return parts[0], parts[1]


def init_client(algorithm: Any, x: PyTree, y: PyTree) -> PyTree:
    """The state that each client keeps between rounds, or None for an algorithm whose clients keep none."""
    return algorithm.init_client(x, y) if hasattr(algorithm, "init_client") else None


def with_own(algorithm: Any, state: Any, clients: PyTree) -> Any:
    """The server's state, with what the clients keep for themselves of the result."""
    return algorithm.with_own(state, clients) if hasattr(algorithm, "with_own") else state


def finished(algorithm: Any, state: Any) -> Any:
    """Whether the algorithm says that nothing is left to do, a boolean."""
    return algorithm.finished(state) if hasattr(algorithm, "finished") else False


def noise_objection(algorithm: Any) -> str:
    """Why clients must not clip and noise their replies, or ""."""
    return algorithm.noise_objection() if hasattr(algorithm, "noise_objection") else ""


def fresh_cohorts(algorithm: Any) -> int:
    """How many fresh cohorts a round may ask."""
    return getattr(algorithm, "fresh", 0)


def is_asynchronous(algorithm: Any) -> bool:
    """Whether a round may ask for the first answers alone."""
    return bool(getattr(algorithm, "asynchronous", False))


def takes_everyone(algorithm: Any) -> bool:
    """Whether all clients have to take part in every round, so that there are no cohorts."""
    return is_asynchronous(algorithm) or bool(getattr(algorithm, "everyone", False))


def check_solves(algorithm: Any, problem: Problem) -> None:
    """Refuse a problem of a kind that the algorithm is not for, naming the algorithms that are."""
    kinds_of = "a Bilevel, Minimax, Compositional, SingleLevel or SimpleBilevel"
    require(isinstance(problem, Problem), "problem", problem, kinds_of)
    if isinstance(problem, _solves(type(algorithm))):
        return
    ours = {cls.__name__ for cls in CLASSES if cls.__module__.startswith("fedbilevel.")}
    able = sorted(ours & {cls.__name__ for cls in CLASSES if isinstance(problem, _solves(cls))})
    kinds = " and ".join(kind.__name__ for kind in _solves(type(algorithm)))
    raise ConfigurationError(
        f"{type(algorithm).__name__} solves {kinds} problems, not {type(problem).__name__}; "
        f"methods that do: {', '.join(able)}"
    )


def _solves(cls: type) -> tuple[type[Problem], ...]:
    return getattr(cls, "solves", (Bilevel,))


def check_fields(algorithm: Any, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
    """Let the algorithm refuse a problem, or clients, that its fields do not fit."""
    if hasattr(algorithm, "check_problem"):
        algorithm.check_problem(problem, len(clients), x)
    if hasattr(algorithm, "check_start") and isinstance(clients, Clients):
        algorithm.check_start(problem, clients, x, y)


def check_algorithm(candidate: object) -> None:
    """Refuse what is no instance of a class made by @algorithm."""
    made = "phases" in vars(type(candidate))
    require(made, "algorithm", candidate, "an instance of a class decorated with @algorithm, e.g. SimFBO()")


def phase_name(algorithm: Algorithm, function: Any) -> str:
    """The name of a phase, after making sure that it is one of this algorithm's."""
    name = getattr(function, "__name__", repr(function))
    if getattr(function, "__self__", None) is not algorithm or name not in algorithm.phases:
        raise ConfigurationError(
            f"{type(algorithm).__name__}: an exchange takes one of its phases {sorted(algorithm.phases)}, got {name}"
        )
    return name
