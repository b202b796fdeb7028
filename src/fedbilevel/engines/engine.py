"""What every engine offers to `solve`: a run that advances a carry by some rounds; and what engines share.

Who takes part in a round, and how much each client works, are functions of the round's key alone.
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
from fedbilevel.core.errors import AbsenceWarning, ConfigurationError, is_count, require, require_count, warn
from fedbilevel.core.fed import LoopBody, Means
from fedbilevel.core.local_x import server_x
from fedbilevel.core.own import OwnNumbers, Values, changing, numbers_of
from fedbilevel.core.own_y import parted_y, server_y
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.costs import Book, RoundCosts
from fedbilevel.engines.evaluation import PerClient, PerClientRow
from fedbilevel.engines.in_flight import InFlight, early_replies, nothing_in_flight
from fedbilevel.engines.recorder import key_of_round
from fedbilevel.engines.submodels import RoundSubmodels
from fedbilevel.engines.virtual_time import Clock, ClockState, Pace
from fedbilevel.machinery.kept import compiled
from fedbilevel.machinery.threefry import uniform_below

FLOYD_LIMIT = 2048  # Floyd's algorithm compares P²/2 pairs; beyond this a permutation of all M is quicker


class Carry(NamedTuple):
    """All that a run is between two rounds; with the run's key, all that resuming needs."""

    round: Array  # rounds done
    state: Any  # the server's
    clients: PyTree  # leaves (M, ...): every client's own state, or None; see `first_carry` for remote ones
    now: ClockState  # of the clock, for engines that have a clock
    queues: InFlight | None = None  # replies in flight, for asynchronous algorithms
    local_x: PyTree = None  # where clients keep x: what it was at the start, leaves (M, ...)
    own_y: PyTree = None  # where clients elsewhere keep leaves of y: what these were at the start
    best: PyTree = None  # in checkpoints alone: x and y of the best row so far


class Stretch(NamedTuple):
    """The result of advancing."""

    carry: Carry
    rounds: int  # rounds that were done
    costs: RoundCosts  # leaves (rounds,)


class Run(Protocol):
    """An algorithm on a population, ready to go."""

    compile_seconds: float

    def advance(self, carry: Carry, rounds: int) -> Stretch:
        """Do at most `rounds` rounds (at least one), consuming `carry`.

        Raises NonFiniteError, naming round, phase and quantity, where an iterate is not finite.
        """
        ...

    def per_client(self, metrics: Mapping[str, PerClient], fixed: tuple[PyTree, PyTree]) -> PerClientRow:
        """Return what measures metrics on each client; `fixed`: the leaves of x and y that are no variables.

        Raises ConfigurationError where clients cannot be asked for them.
        """
        ...

    def close(self) -> None:
        """Release threads and buffers, and memory that compiling has taken."""
        ...


class Engine(Protocol):
    """A way to simulate (or reach) clients. What it prints is the same in all processes that run together."""

    @property
    def clock(self) -> Clock | None:
        """How long exchanges take, in virtual time; None where time is that of the world."""
        ...

    def start(
        self, algorithm: Algorithm, problem: Problem, clients: Any, cohort: Cohort, key: Array, carry: Carry
    ) -> Run:
        """Prepare a run on `Clients` or `RemoteClients`; `carry` gives shapes and dtypes."""
        ...


def first_carry(
    algorithm: Algorithm, problem: Problem, clients: Clients | RemoteClients, x: PyTree, y: PyTree
) -> Carry:
    """Make the carry before round 0. Of remote clients, which keep their states themselves, it has (population, 2):
    round and exchange of each client's last reply that counted, -1 before the first."""
    remote, population = isinstance(clients, RemoteClients), len(clients)
    found = None
    if algorithm.asks.asynchronous:
        found = early_replies(algorithm, problem, x, y, clients.examples())

    def begin(algorithm: Algorithm, x: PyTree, y: PyTree) -> tuple[Any, ...]:
        state = checked_init(algorithm, server_x(problem, x), server_y(problem.own, y))
        own = None if remote else algorithm.client_state(problem, x, y)
        states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (population, *jnp.shape(leaf))), own)
        queues = None if found is None else nothing_in_flight(found, population, remote)
        return jnp.zeros((), jnp.int32), state, states, ClockState.start(), queues

    key = key_of_round(algorithm, problem, x, y, population, remote)
    round, state, states, now, queues = compiled(begin, algorithm, x, y, key=key)(algorithm, x, y)
    if remote:
        states = jnp.full((population, 2), -1, jnp.int32)
    own_y = parted_y(problem.own, y)[1] if remote and problem.own is not None else None
    return Carry(round, state, states, now, queues, None if problem.local is None else x, own_y)


def check_simulated(clients: Any) -> None:
    """Refuse clients whose samples are not on this machine, for engines that simulate them."""
    here = isinstance(clients, Clients)
    require(here, "clients", type(clients).__name__, "Clients, unless the engine reaches them elsewhere")


class Cohort(NamedTuple):
    """How many clients take part in a round, and how they are drawn: uniformly.

    Args:
        size: how many draws there are.
        replacement: whether a client may be drawn several times in a round. Each draw is then a reply of its own, with
            its own batch, weight and bytes.
    """

    size: int
    replacement: bool = False

    @classmethod
    def of(cls, cohort: int | Cohort) -> Cohort:
        """Return the cohort; a number is one without replacement."""
        return cohort if isinstance(cohort, Cohort) else cls(cohort)

    def some(self, population: int) -> bool:
        """Say whether a round may leave out some of so many clients."""
        return self.replacement or self.size < population

    def draw(self, key: Array, population: int) -> Array:
        """Draw the clients of a round, (size,) int32, in no special order; everyone in order, where that is all."""
        if self.replacement:
            return uniform_below(key, population, (self.size,))
        return draw_cohort(key, population, self.size)


def check_everyone(algorithm: Algorithm, population: int, cohort: Cohort, field: str = "cohort") -> None:
    """Refuse a cohort of some clients for a method that needs all in every round."""
    whole = algorithm.asks.cohorts or not cohort.some(population)
    require(whole, field, cohort.size, f"None: {algorithm.label} needs all clients in every round")


def check_drawn_again(cohort: Cohort, carry: Carry) -> None:
    """Refuse to draw a client twice in a round where clients keep something between rounds: of which draw?"""
    kept = cohort.replacement and bool(jax.tree.leaves(carry.clients))
    allowed = (
        "False where clients keep something between rounds, as under privacy, or for steps that are None: give numbers"
    )
    require(not kept, "Cohort.replacement", True, allowed)


def check_availability(clock: Clock, algorithm: Algorithm, population: int, cohort: Cohort) -> None:
    """Refuse a cohort that the method does not allow, or that may consist of clients that are never available; warn of
    these.

    Raises:
        ConfigurationError: `cohort`, or `Clock.availability`, does not allow a round.
    """
    check_everyone(algorithm, population, cohort)
    late = clock.arrivals is None or algorithm.asks.asynchronous
    allowed = f"None with {algorithm.label}, which waits for everyone: for Asynchronous(…, wait_for=1)"
    require(late, "Clock.arrivals", "a schedule", allowed)
    if isinstance(clock.arrivals, tuple):
        never = [i for i, column in enumerate(zip(*clock.arrivals, strict=True)) if not any(column)]
        require(len(never) < population, "Clock.arrivals", "False in all rows", "True for some client")
        if never:
            warn(AbsenceWarning(f"by Clock.arrivals clients {never[:10]} never reply"))
    absent = clock.never_available(population)
    if not absent.size:
        return
    some = "Clock.availability", f"0 for {absent.size} of {population} clients"
    enough = cohort.size > absent.size and not cohort.replacement
    require(enough, *some, f"positive for more of them: a cohort of {cohort.size} may have nobody else")
    named = ", ".join(map(str, absent[:10])) + (", …" if absent.size > 10 else "")
    text = f"{absent.size} of {population} clients are never available, and the run goes on without them: {named}"
    warn(AbsenceWarning(text))


def available_population(clock: Clock, clients: Clients) -> float:
    """Compute M' / Σ p_i over the M' clients that are ever available, for `costs.normalise`."""
    weights = np.delete(clients.weights, clock.never_available(len(clients)))
    return len(clients) if len(weights) == len(clients) else len(weights) / float(weights.sum())


def check_first(n: int, available: int, max_staleness: int | None, queues: InFlight | None, pace: Pace) -> InFlight:
    """Refuse an exchange that could never end, or of an algorithm that does not say that it is asynchronous."""
    if queues is None:
        raise ConfigurationError("a round asks fed.sum_first: its algorithm has to say asks = Asks(first=…)")
    allowed = f"1 to {available}, the number of clients that are ever available"
    require(1 <= n <= available, "fed.sum_first: n", n, allowed)
    require_count("fed.sum_first: max_staleness", max_staleness, optional=True)
    if pace.arrivals is not None:
        said = "where Clock.arrivals say who ends an exchange"
        require(n == 1, "wait_for", n, f"1 {said}")
        require(max_staleness is None, "max_staleness", max_staleness, f"None {said}")
    return queues


def check_cohort(cohort: int | Cohort | None, population: int) -> Cohort:
    """Check the size of the cohort, and return it: everyone when it is None."""
    given = Cohort.of(population if cohort is None else cohort)
    most = f"1 to {population} (all clients)"
    require(isinstance(given.replacement, bool), "Cohort.replacement", given.replacement, "True or False")
    fits = is_count(given.size) and (given.replacement or given.size <= population)
    require(fits, "cohort", given.size, "a positive integer" if given.replacement else most)
    return given._replace(size=int(given.size))


class RoundKeys(NamedTuple):
    """The independent random streams of a round, and its number."""

    cohort: Array
    own: Array  # for clients' own numbers
    algorithm: Array
    round: Array | int

    def of_fresh(self, number: Array | int) -> RoundKeys:
        """Derive the streams of the round's fresh cohort of that number; the algorithm's stream stays the round's."""
        return self._replace(cohort=jax.random.fold_in(self.cohort, number), own=jax.random.fold_in(self.own, number))


def round_keys(key: Array, round: Array | int) -> RoundKeys:
    """Derive the streams of round `round` from the run's key: resuming needs only the number of the round."""
    cohort, own, algorithm = jax.random.split(jax.random.fold_in(key, round), 3)
    return RoundKeys(cohort, own, algorithm, round)


@dataclass(frozen=True)
class Cohorts:
    """The cohorts of a round: which clients take part in its exchanges, and with which own numbers.

    Args:
        cohort: how many clients are drawn, and how.
        population: the number of clients to draw from.
        own: the clients' own numbers, by name.
        keys: the random streams of the round, or of one of its fresh cohorts.
        repetition: the number of the repetition within the innermost `Fed.repeat`; outside 0.
    """

    cohort: Cohort
    population: int
    own: Mapping[str, Values]
    keys: RoundKeys
    repetition: Array | int = 0

    @property
    def sampled(self) -> bool:
        """Whether a round may leave out some clients."""
        return self.cohort.some(self.population)

    def fresh(self, number: Array | int) -> Cohorts:
        """Return the same for the round's fresh cohort of that number."""
        return replace(self, keys=self.keys.of_fresh(number))

    def repeated(self, i: Array | int) -> Cohorts:
        """Return the same clients with their own numbers in the i-th repetition."""
        return replace(self, repetition=i)

    def ids(self) -> Array:
        """Draw the ids of the clients, (P,)."""
        return self.cohort.draw(self.keys.cohort, self.population)

    def numbers(self, ids: Array) -> dict[str, Array]:
        """Return the own numbers of these clients, (P,) each, by name."""
        return numbers_of(self.own, self.keys.own, self.keys.round, ids, self.repetition)

    def members(self) -> list[tuple[int, OwnNumbers]]:
        """Draw the clients, and list their ids with their own numbers: the same bits within `jax.disable_jit()`."""
        with jax.disable_jit(False):
            ids = self.ids()
            numbers = jax.tree.map(np.asarray, self.numbers(ids))
        return [(i, {name: column[place] for name, column in numbers.items()}) for place, i in enumerate(ids.tolist())]


class PythonFed(Means):
    """The part of a `Fed` that `Reference` and `Flower` share: their rounds run in Python and are not compiled."""

    sum_first: Callable[..., PyTree]

    def __init__(
        self, algorithm: Algorithm, problem: Problem, cohorts: Cohorts, submodels: RoundSubmodels | None
    ) -> None:
        self.algorithm, self.problem, self.cohorts, self.submodels = algorithm, problem, cohorts, submodels
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
    """Draw `size` distinct clients out of `population`, every subset equally likely; (size,) int32, in no special
    order.

    Everyone, in order, when size = population. Small cohorts cost O(size²), whatever the population (Floyd's
    algorithm: Bentley and Floyd, "A sample of brilliance", Communications of the ACM 30(9), 1987).
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
