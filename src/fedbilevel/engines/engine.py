"""Define the interface of engines and of their runs, which do rounds, and the functions that engines share.

Which clients take part in a round, and how much work each does, depends only on the round's key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.authored import checked_init
from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.errors import (
    AbsenceWarning,
    ConfigurationError,
    diverged,
    is_count,
    require,
    require_count,
    warn,
)
from fedbilevel.core.fed import LoopBody, Means
from fedbilevel.core.local_x import gather_x, server_x
from fedbilevel.core.on_disk import repeated
from fedbilevel.core.own import OwnNumbers, Values, changing, numbers_of
from fedbilevel.core.own_y import own_leaves, parted_y, server_y
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, is_table, nonfinite_leaves
from fedbilevel.engines.costs import Book, RoundCosts
from fedbilevel.engines.evaluation import PerClient, PerClientRow
from fedbilevel.engines.in_flight import InFlight, early_replies, nothing_in_flight
from fedbilevel.engines.recorder import key_of_round
from fedbilevel.engines.submodels import RoundSubmodels, WholeModels
from fedbilevel.engines.virtual_time import Clock, ClockState, Pace
from fedbilevel.machinery.kept import compiled
from fedbilevel.machinery.threefry import uniform_below

FLOYD_LIMIT = 2048  # Floyd's algorithm compares P²/2 pairs; for larger cohorts a permutation of all M is faster


class Carry(NamedTuple):
    """Hold the whole state of a run between two rounds; a run can be resumed from its carry and its key."""

    round: Array  # the number of rounds done
    state: Any  # the server's state
    clients: PyTree  # all clients' states, leaves (M, ...); None: they have none; for remote clients see `first_carry`
    now: ClockState  # the state of the clock, for engines that have a clock
    queues: InFlight | None = None  # replies in flight, for asynchronous algorithms
    local_x: PyTree = None  # if clients keep x: x at the start, with leaves of shape (M, ...)
    own_y: PyTree = None  # if remote clients keep leaves of y: these leaves at the start
    best: PyTree = None  # in checkpoints only: x and y of the best row so far

    @property
    def x(self) -> PyTree:
        """Return the server's x. If clients keep x, return x at the start, whose shapes are those of the current x."""
        return self.state.x if self.local_x is None else self.local_x


class Stretch(NamedTuple):
    """Hold the result of `Run.advance`: the carry after some rounds, and their costs."""

    carry: Carry
    rounds: int  # the number of rounds that were done
    costs: RoundCosts  # the costs of these rounds, with leaves of shape (rounds,)
    undo: Callable[[], None] | None = None  # restores the rows of tables that the rounds changed in place, if any


class Run(Protocol):
    """Run an algorithm on a population round by round; `Engine.start` returns a run."""

    compile_seconds: float

    def advance(self, carry: Carry, rounds: int) -> Stretch:
        """Do at least one and at most `rounds` rounds from `carry`, which must not be used afterwards.

        Raises:
            NonFiniteError: an iterate is not finite; the message names the round, the phase and the quantity.
        """
        ...

    def per_client(self, metrics: Mapping[str, PerClient], fixed: tuple[PyTree, PyTree]) -> PerClientRow:
        """Return a function that measures metrics on each client.

        `fixed` has the leaves of x and of y that the run does not optimise.

        Raises:
            ConfigurationError: these clients cannot measure metrics.
        """
        ...

    def close(self) -> None:
        """Release threads, buffers, and the memory that compilation has taken."""
        ...


class Engine(Protocol):
    """Simulate clients, or reach them on other machines.

    The `repr` of an engine is the same in all processes of a simulation.
    """

    @property
    def clock(self) -> Clock | None:
        """Return the clock that gives exchanges their virtual durations; None if time is real time."""
        ...

    def start(
        self, algorithm: Algorithm, problem: Problem, clients: Any, cohort: Cohort, key: Array, carry: Carry
    ) -> Run:
        """Prepare a run on `Clients` or `RemoteClients`; only the shapes and dtypes of `carry` matter."""
        ...


def first_carry(
    algorithm: Algorithm,
    problem: Problem,
    clients: Clients | RemoteClients,
    x: PyTree,
    y: PyTree,
    states_on_disk: bool = False,
) -> Carry:
    """Make the carry before round 0; with `states_on_disk`, the clients' states are tables (core/on_disk.py).

    Remote clients keep their states themselves. For them, `Carry.clients` is an array of shape (population, 2) with the
    round and the exchange of each client's last reply that was used, or -1 before the first reply.
    """
    remote, population = isinstance(clients, RemoteClients), len(clients)
    found = None
    if algorithm.asks.asynchronous:
        found = early_replies(algorithm, problem, x, y, clients.examples())

    def begin(algorithm: Algorithm, x: PyTree, y: PyTree) -> tuple[Any, ...]:
        state = checked_init(algorithm, server_x(problem, x), server_y(problem.own, y))
        own = None if remote else algorithm.client_state(problem, x, y)
        many = () if states_on_disk else (population,)
        states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*many, *jnp.shape(leaf))), own)
        queues = None if found is None else nothing_in_flight(found, population, remote)
        return jnp.zeros((), jnp.int32), state, states, ClockState.start(), queues

    key = key_of_round(algorithm, problem, x, y, population, remote, states_on_disk)
    round, state, states, now, queues = compiled(begin, algorithm, x, y, key=key)(algorithm, x, y)
    if states_on_disk:
        states = repeated(states, population)
    if remote:
        states = jnp.full((population, 2), -1, jnp.int32)
    own_y = parted_y(problem.own, y)[1] if remote and problem.own is not None else None
    return Carry(round, state, states, now, queues, None if problem.local is None else x, own_y)


def check_own_parts(carry: Carry) -> None:
    """Check the parts of x and y that simulated clients keep.

    Tables on disk are left out: their rows are checked before they are written.

    Raises:
        NonFiniteError: a part is not finite.
    """
    x = None if carry.local_x is None else gather_x(carry.clients)
    for name, part in (("x", x), ("y", own_leaves(carry.clients))):
        in_memory = jax.tree.map(lambda leaf: None if is_table(leaf) else leaf, part)
        if bad := nonfinite_leaves(in_memory):
            raise diverged(
                [f"{name}{'' if leaf == 'value' else leaf}" for leaf in bad], int(carry.round), "or a round before it"
            )


def check_simulated(clients: Any) -> None:
    """Reject clients whose samples are not on this machine; engines that simulate clients call this."""
    here = isinstance(clients, Clients)
    require(here, "clients", type(clients).__name__, "Clients, unless the engine reaches them elsewhere")


class Cohort(NamedTuple):
    """Describe how many clients take part in a round, and how they are drawn: uniformly, with or without replacement.

    Args:
        size: the number of draws in a round.
        replacement: whether a client may be drawn several times in a round. Each draw is then a separate reply, with a
            batch, a weight and bytes of its own.
    """

    size: int
    replacement: bool = False

    @classmethod
    def of(cls, cohort: int | Cohort) -> Cohort:
        """Return a `Cohort` as it is, and for a number, a cohort of that size without replacement."""
        return cohort if isinstance(cohort, Cohort) else cls(cohort)

    def some(self, population: int) -> bool:
        """Return whether a round may leave out some clients of a population of that size."""
        return self.replacement or self.size < population

    def draw(self, key: Array, population: int) -> Array:
        """Draw the ids of a round's clients, as int32 of shape (size,); all clients are in ascending order."""
        if self.replacement:
            return uniform_below(key, population, (self.size,))
        return draw_cohort(key, population, self.size)


def check_everyone(algorithm: Algorithm, population: int, cohort: Cohort, field: str = "cohort") -> None:
    """Reject a cohort that is too small for the method, or a part of the clients if it needs all in every round."""
    whole = algorithm.asks.cohorts or not cohort.some(population)
    require(whole, field, cohort.size, f"None: {algorithm.label} needs all clients in every round")
    least = algorithm.asks.replies
    needs = f"{least} or more: {algorithm.label} needs {least} replies in each exchange"
    require(cohort.size >= least, field, cohort.size, needs)


def check_drawn_again(cohort: Cohort, carry: Carry) -> None:
    """Reject drawing with replacement if clients keep a state between rounds.

    A client that is drawn twice would have two new states.
    """
    kept = cohort.replacement and bool(jax.tree.leaves(carry.clients))
    allowed = (
        "False if clients keep a state between rounds, as under privacy and with steps of None; give steps as numbers"
    )
    require(not kept, "Cohort.replacement", True, allowed)


def check_availability(clock: Clock, algorithm: Algorithm, population: int, cohort: Cohort) -> None:
    """Check that every round can take place with this cohort and clock, and warn of clients that are never available.

    Raises:
        ConfigurationError: the method does not allow the cohort or `Clock.arrivals`, or a cohort might consist of
            clients that are never available.
    """
    check_everyone(algorithm, population, cohort)
    late = clock.arrivals is None or algorithm.asks.asynchronous
    allowed = f"None with {algorithm.label}, which waits for all replies; use Asynchronous(…, wait_for=1)"
    require(late, "Clock.arrivals", "a schedule", allowed)
    if isinstance(clock.arrivals, tuple):
        never = [i for i, column in enumerate(zip(*clock.arrivals, strict=True)) if not any(column)]
        require(len(never) < population, "Clock.arrivals", "False in all rows", "True for some client")
        if never:
            warn(AbsenceWarning(f"by Clock.arrivals, clients {never[:10]} never reply"))
    absent = clock.never_available(population)
    if not absent.size:
        return
    some = "Clock.availability", f"0 for {absent.size} of {population} clients"
    enough = cohort.size > absent.size and not cohort.replacement
    require(enough, *some, f"positive for more clients, since a cohort of {cohort.size} may have only such clients")
    named = ", ".join(map(str, absent[:10])) + (", …" if absent.size > 10 else "")
    text = f"{absent.size} of {population} clients are never available, and the run continues without them: {named}"
    warn(AbsenceWarning(text))


def available_population(clock: Clock, clients: Clients) -> float:
    """Return the factor M of the unbiased mean (M/P) Σ p_i u_i over P clients: the number of all clients.

    If some clients are never available, the mean is over the others. Then the factor is M'/w, where M' is the number of
    the available clients, and w is the sum of their weights.
    """
    weights = np.delete(clients.weights, clock.never_available(len(clients)))
    return len(clients) if len(weights) == len(clients) else len(weights) / float(weights.sum())


def check_first(n: int, available: int, max_staleness: int | None, queues: InFlight | None, pace: Pace) -> InFlight:
    """Check the arguments of `fed.sum_first`, and return the queues.

    Raises:
        ConfigurationError: the exchange could never end, an argument is not allowed, or the algorithm does not declare
            that it is asynchronous (`Asks.first`).
    """
    if queues is None:
        message = "a round calls fed.sum_first: its algorithm must declare asks = Asks(first=…)"
        raise ConfigurationError(path="asks", got="without first", allowed="Asks(first=…)", message=message)
    allowed = f"1 to {available}, the number of clients that are ever available"
    require(1 <= n <= available, "fed.sum_first: n", n, allowed)
    require_count("fed.sum_first: max_staleness", max_staleness, optional=True)
    if pace.arrivals is not None:
        said = "with Clock.arrivals, which says which replies end an exchange"
        require(n == 1, "wait_for", n, f"1 {said}")
        require(max_staleness is None, "max_staleness", max_staleness, f"None {said}")
    return queues


def check_cohort(cohort: int | Cohort | None, population: int) -> Cohort:
    """Check a cohort, and return it as a `Cohort`; None is all clients.

    Raises:
        ConfigurationError: its size is not a positive integer, or is larger than the population without replacement.
    """
    given = Cohort.of(population if cohort is None else cohort)
    most = f"1 to {population} (all clients)"
    require(isinstance(given.replacement, bool), "Cohort.replacement", given.replacement, "True or False")
    fits = is_count(given.size) and (given.replacement or given.size <= population)
    require(fits, "cohort", given.size, "a positive integer" if given.replacement else most)
    return given._replace(size=int(given.size))


class RoundKeys(NamedTuple):
    """Hold the independent random streams of a round, and its number."""

    cohort: Array
    own: Array  # the key for clients' own numbers
    algorithm: Array
    round: Array | int

    def of_fresh(self, number: Array | int) -> RoundKeys:
        """Derive the streams of the round's fresh cohort of this number; the algorithm's stream does not change."""
        return self._replace(cohort=jax.random.fold_in(self.cohort, number), own=jax.random.fold_in(self.own, number))


def round_keys(key: Array, round: Array | int) -> RoundKeys:
    """Derive a round's random streams only from the run's key and the round's number, so that runs can resume."""
    cohort, own, algorithm = jax.random.split(jax.random.fold_in(key, round), 3)
    return RoundKeys(cohort, own, algorithm, round)


@dataclass(frozen=True)
class Cohorts:
    """Determine the cohorts of a round: which clients take part in its exchanges, and their own numbers.

    Args:
        cohort: how many clients are drawn, and how.
        population: the number of clients to draw from.
        own: the clients' own numbers, by name.
        keys: the random streams of the round, or of one of its fresh cohorts.
        repetition: the number of the repetition within the innermost `Fed.repeat`; 0 outside such a loop.
    """

    cohort: Cohort
    population: int
    own: Mapping[str, Values]
    keys: RoundKeys
    repetition: Array | int = 0

    @property
    def sampled(self) -> bool:
        """Return whether a round may leave out some clients."""
        return self.cohort.some(self.population)

    def fresh(self, number: Array | int) -> Cohorts:
        """Return a copy for the round's fresh cohort with this number.

        A round can have several fresh cohorts, each with newly drawn clients.
        """
        return replace(self, keys=self.keys.of_fresh(number))

    def repeated(self, i: Array | int) -> Cohorts:
        """Return a copy for the i-th repetition of a loop: the same clients, with their numbers in this repetition."""
        return replace(self, repetition=i)

    def ids(self) -> Array:
        """Draw the ids of the clients, as an array of shape (P,)."""
        return self.cohort.draw(self.keys.cohort, self.population)

    def numbers(self, ids: Array) -> dict[str, Array]:
        """Return the own numbers of these clients, by name, each as an array of shape (P,)."""
        return numbers_of(self.own, self.keys.own, self.keys.round, ids, self.repetition)

    def members(self) -> list[tuple[int, OwnNumbers]]:
        """Draw the clients, and list their ids with their own numbers.

        The draws are compiled even within `jax.disable_jit()`, so that they have the same bits.
        """
        with jax.disable_jit(False):
            ids = self.ids()
            numbers = jax.tree.map(np.asarray, self.numbers(ids))
        return [(i, {name: column[place] for name, column in numbers.items()}) for place, i in enumerate(ids.tolist())]


class PythonFed(Means):
    """Implement the part of `Fed` that `Reference` and `Flower` share: their rounds run in Python, not compiled."""

    sum_first: Callable[..., PyTree]

    def __init__(
        self, algorithm: Algorithm, problem: Problem, cohorts: Cohorts, models: WholeModels | RoundSubmodels
    ) -> None:
        self.algorithm, self.problem, self.cohorts, self.models = algorithm, problem, cohorts, models
        self.sampled, self.members, self.book = cohorts.sampled, cohorts.members(), Book()

    @property
    def repetition(self) -> int | Array:
        return self.cohorts.repetition

    def repeat(
        self, n: int | Array, body: LoopBody, carry: PyTree, key: Array, *, until: Callable[[Any], Array] | None = None
    ) -> PyTree:
        outside = self.cohorts, self.members
        for i in range(int(n)):
            if until is not None and until(carry):
                break
            self.cohorts = self.cohorts.repeated(i)
            self.members = self.cohorts.members() if changing(self.cohorts.own) else self.members
            carry = body(self, carry, jax.random.fold_in(key, i))
        self.cohorts, self.members = outside
        return carry


@partial(jax.jit, static_argnums=(1, 2))
def draw_cohort(key: Array, population: int, size: int) -> Array:
    """Draw `size` distinct clients out of `population`, every subset equally likely, and return their ids.

    The ids are an int32 array of shape (size,), in no special order; if size = population, they are in ascending order.
    A small cohort costs O(size²), however large the population is (Floyd's algorithm: Bentley and Floyd, "A sample of
    brilliance", Communications of the ACM 30(9), 1987).
    """
    if size == population:
        return jnp.arange(population, dtype=jnp.int32)
    if size > FLOYD_LIMIT:
        return jax.random.permutation(key, population)[:size].astype(jnp.int32)

    def add(j: Array, chosen: Array) -> Array:
        top = population - size + j
        draw = uniform_below(jax.random.fold_in(key, j), top + 1)
        return chosen.at[j].set(jnp.where(jnp.any(chosen == draw), top, draw))

    return lax.fori_loop(0, size, add, jnp.full(size, -1, jnp.int32))
