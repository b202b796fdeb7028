"""Make the exchanges of a round in a compiled program, by class of capacity, device, and chunk of clients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Client, Samples
from fedbilevel.core.fed import LoopBody, Means, Phase, Total
from fedbilevel.core.own import changing
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.engines import in_flight
from fedbilevel.engines.costs import Book, RoundCosts, Sums, weigh
from fedbilevel.engines.engine import Cohort, Cohorts, check_first
from fedbilevel.engines.in_flight import InFlight
from fedbilevel.engines.local.placement import DeviceRows, Shares, vectorised
from fedbilevel.engines.submodels import Holders, RoundSubmodels, SubmodelPlan, WholeModels
from fedbilevel.engines.virtual_time import ClockState, Pace

AXIS = "clients"
HOST = "hosts"  # the mesh's axis over processes, if there are several


class Members(NamedTuple):
    """Hold clients as arrays: all clients of the population, of shape (M,), or those of a cohort, of shape (P,)."""

    id: Any
    state: Any  # the number of the client's row in `Carry.clients`
    weight: Any
    outer_start: Any
    outer_size: Any
    inner_start: Any
    inner_size: Any
    counts: Any  # in a cohort: 1, or 0 for a place that only pads the cohort to a multiple of the chunk
    number: Any = None  # in a cohort whose clients have capacities: the client's class (see SubmodelPlan)
    rank: Any = None  # in a cohort whose clients have capacities: the client's rank in its class
    own: Any = None  # in a cohort: the clients' own numbers in the round, by name
    place: Any = None  # in a cohort with replacement: the number of the draw


class SampleArrays(NamedTuple):
    """Hold the samples of all clients one after another; each member has a start and a size in these arrays."""

    outer: PyTree
    inner: PyTree


@dataclass(frozen=True)
class ProgramLayout:
    """Hold the values on which the program of a method and a problem depends; equal layouts share a program."""

    population: int
    cohort: Cohort
    fresh: int  # the number of fresh cohorts per round
    outer_longest: int
    outer_equal: bool
    inner_longest: int
    inner_equal: bool
    chunk: int  # the number of clients that are vectorised together
    axis: str | tuple[str, ...] | None  # names of the mesh's axes, if the cohort is distributed over devices
    available: int  # the number of clients that are ever available
    available_population: float  # the result of the function `available_population`, for unbiased means
    rounds_per_call: int  # the largest number of rounds in a call, whose costs are stored
    shares: Shares | None = None  # the clients of each process, if there are several processes
    submodel_plan: SubmodelPlan | None = None  # the submodels of clients, if they hold any

    @property
    def gaps(self) -> bool:
        """Return whether places for the clients of a process, or of a class of capacity, may stay empty in a cohort."""
        drawn = self.cohort.some(self.population)
        return self.shares is not None or (drawn and self.submodel_plan is not None)


GatherMembers = Callable[[Cohorts, Array | int], tuple[Members, ...]]
"""(the round's cohorts, the number of a fresh cohort) -> its members on this device, by class of capacity."""

ClientFunction = Callable[[Members, PyTree], tuple[Sums, PyTree]]
"""(a client, its state) -> its weighted reply and its next state."""


class ExchangeState(NamedTuple):
    """Hold the values that change from exchange to exchange within a round."""

    states: PyTree  # the states of this device's members
    now: ClockState
    queues: InFlight | None  # its tables have rows for this device's members, and its other fields for all clients


@dataclass(eq=False)
class LocalFed(Means):
    """Make the exchanges of a round, as `Fed` describes.

    Sums are accumulated chunk by chunk. The replies of single clients are stacked only if a layer asks for them. The
    members of a cohort are grouped by class of capacity, and each class is sent its part of a message. Without
    capacities there is a single class, which is sent the whole message.
    """

    layout: ProgramLayout
    problem: Problem
    algorithm: Algorithm
    data: SampleArrays
    pace: Pace
    cohorts: Cohorts
    members: tuple[Members, ...]
    underway: ExchangeState
    fresh: GatherMembers
    models: WholeModels | RoundSubmodels
    book: Book = field(init=False, default_factory=Book)

    def __post_init__(self) -> None:
        self.sampled = self.cohorts.sampled

    @property
    def repetition(self) -> int | Array:
        return self.cohorts.repetition

    def sum(self, phase: Phase, message: PyTree, key: Array, *, fresh: Any = None, each: bool = False) -> Total:
        classes = self.members if fresh is None else self.fresh(self.cohorts, fresh)
        parts, units, rows = [], [], []
        for number, members in enumerate(classes):
            of_class, (states, computed, row), down = self.sums_of(phase, message, key, fresh, number, members, each)
            if fresh is None:
                self.underway = self.underway._replace(states=states)
            parts.append((down, of_class, of_class.responders))
            units.append(computed)
            rows.append(row)
        ticks = self.wait_for(_joined(classes), None if self.pace.compute is None else _joined(units))
        self.book.enter(self.algorithm.phase_name(phase), parts, ticks)
        total = reduce(partial(jax.tree.map, jnp.add), [of_class._replace(sent=None) for _, of_class, _ in parts])
        return total.total(self.layout.available_population, _joined(rows) if each else None)

    def sums_of(
        self, phase: Phase, message: PyTree, key: Array, fresh: Any, number: int, members: Members, each: bool
    ) -> tuple[Sums, tuple[PyTree, Any, Any], PyTree]:
        """Make the exchange with a class of capacity.

        Args:
            phase, message, key, fresh, each: see `Fed`.
            number: the number of the class.
            members: the members of the class on this device.

        Returns:
            Three values: the sums over the class, in the shapes of the whole model; a tuple of the members' next
            states, the number of gradients and hvps of each member (None if the clock does not need it), and, with
            `each`, all replies of the cohort; and a message, of which only the shapes matter.
        """
        models = self.models
        units = models.units(number)
        part = models.cut(phase, message, units)

        def contribute(member: Members, state: PyTree) -> tuple[Sums, tuple[PyTree, Any]]:
            if models.alike:
                sums, kept = self.question(phase, part, key)[1](member, state)
            else:
                own = models.units(number, member.id, member.rank)
                sums, kept = self.question(phase, models.cut(phase, message, own), key)[1](member, state)
                sums = models.put_back(phase, sums, own)
            work = None if self.pace.compute is None else sums.gradients + sums.hvps
            return sums, (kept, (work, sums.row if each else None))

        states, chunk = self.underway.states if fresh is None else None, chunk_of(self.layout, number)
        sums, (states, (computed, rows)) = sum_over_clients(contribute, members, states, chunk, self.layout.gaps)
        if self.layout.axis:
            sums = lax.psum(sums, self.layout.axis)
            rows = lax.all_gather(rows, self.layout.axis, tiled=True) if each else None
        if models.alike:
            sums = models.put_back(phase, sums, units)
        return sums, (states, computed, rows), part

    @property
    def everyone(self) -> Members:
        """Return the members on this device, for methods in which all clients train whole models."""
        (members,) = self.members
        return members

    def sum_first(
        self, n: int, phase: Phase, message: PyTree, key: Array, *, max_staleness: int | None = None
    ) -> PyTree:
        queues = check_first(n, self.layout.available, max_staleness, self.underway.queues, self.pace)
        name, respond = self.question(phase, message, key)
        rows = self.rows(n if self.pace.arrivals is None else self.layout.population)
        units = self.units(respond) if self.pace.compute is not None else 0
        plan = in_flight.first(queues, self.pace, self.underway.now, name, n, units, max_staleness)
        table, states = rows.update(
            rows.here(plan.asked), respond, self.everyone, (queues.by_phase[name].replies, self.underway.states)
        )
        queues = in_flight.handed_in(in_flight.written(queues, name, table), plan, rows.total)
        queues, total, age = in_flight.counted(queues, plan, name, rows.total)
        self.underway = ExchangeState(states, self.underway.now.later(self.pace, plan.ticks), queues)
        self.book.enter(name, [(message, total, jnp.sum(plan.asked))], plan.ticks, age)
        return total.rounded

    def question(self, phase: Phase, message: PyTree, key: Array) -> tuple[str, ClientFunction]:
        """Return a phase's name, and the function that runs it on a client."""
        name = self.algorithm.phase_name(phase)

        def respond(member: Members, state: PyTree) -> tuple[Sums, PyTree]:
            again = key if member.place is None else jax.random.fold_in(key, member.place)
            own = self.client(member, state), message, jax.random.fold_in(again, member.id)
            reply = self.algorithm.run_phase(name, *own)
            kept = state if reply.state is None else reply.state
            replied = weigh(reply, member.weight, member.counts), kept
            if self.pace.lasts is None:
                return replied
            nothing = jax.tree.map(jnp.zeros_like, replied[0]), state  # the reply of clients that are never available
            return optax.tree.where(member.counts > 0, replied, nothing)

        return name, respond

    def wait_for(self, members: Members, units: Any) -> Any:
        """Advance the clock until all of these clients have replied, and return the ticks that this takes."""
        pace, (states, now, queues) = self.pace, self.underway
        ticks: Any
        if queues is None and pace.even is not None and pace.lasts is None:
            ticks = pace.even.number
        elif queues is None:
            needed = pace.waits(now, members.id) + pace.durations(now, members.id, units)
            ticks = jnp.max(jnp.where(members.counts > 0, needed, 0))
            ticks = lax.pmax(ticks, self.layout.axis) if self.layout.axis else ticks
        else:
            plan = in_flight.everyone(queues, pace, now, 0 if units is None else self.of_all(units))
            ticks, queues = plan.ticks, in_flight.handed_in(queues, plan, self.rows(self.layout.population).total)
        self.underway = ExchangeState(states, now.later(pace, ticks), queues)
        return ticks

    def units(self, respond: ClientFunction) -> Array:
        """Count the gradients and hvps of each client's reply, as an array (M,), without computing the replies."""

        def count(member: Members, state: PyTree) -> Array:
            sums, _ = respond(member, state)
            return sums.gradients + sums.hvps

        return self.of_all(jax.vmap(count)(self.everyone, self.underway.states))

    def of_all(self, mine: Array) -> Array:
        """Gather the values of all devices' members, as an array of shape (M,)."""
        all_ = lax.all_gather(mine, self.layout.axis, tiled=True) if self.layout.axis else mine
        return all_[: self.layout.population]

    def rows(self, n: int) -> DeviceRows:
        """Return the rows of the queues' tables on this device, with a block size that suits exchanges of n replies."""
        mine = self.everyone.id.shape[0]
        devices = -(-self.layout.population // mine)
        first = lax.axis_index(self.layout.axis) * mine if self.layout.axis else 0
        return DeviceRows(mine, first, min(self.layout.chunk, -(-n // devices)), self.layout.axis)

    def repeat(
        self, n: int | Array, body: LoopBody, carry: PyTree, key: Array, *, until: Callable[[Any], Array] | None = None
    ) -> PyTree:
        @partial(jax.jit, inline=True)  # traced once for the shapes of the costs; the loop reuses this trace
        def once(i: Array, carry: PyTree, underway: ExchangeState) -> tuple[PyTree, ExchangeState, RoundCosts]:
            cohorts = self.cohorts.repeated(i)
            fed = replace(self, cohorts=cohorts, members=renumbered(self.members, cohorts), underway=underway)
            carry = body(fed, carry, jax.random.fold_in(key, i))
            return carry, fed.underway, fed.book.costs

        def unfinished(loop: tuple[Array, PyTree, ExchangeState, RoundCosts]) -> Array:
            i, carry, *_ = loop
            return i < n if until is None else (i < n) & ~until(carry)

        def step(
            loop: tuple[Array, PyTree, ExchangeState, RoundCosts],
        ) -> tuple[Array, PyTree, ExchangeState, RoundCosts]:
            i, carry, underway, total = loop
            carry, underway, new = once(i, carry, underway)
            return i + 1, carry, underway, jax.tree.map(jnp.add, total, new)

        shape = jax.eval_shape(once, jnp.zeros((), jnp.int32), carry, self.underway)[2]
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
        start = (jnp.zeros((), jnp.int32), carry, self.underway, zero)
        _, carry, self.underway, total = lax.while_loop(unfinished, step, start)
        self.book.add(total)
        return carry

    def total_costs(self) -> RoundCosts:
        """Return the costs of the round, at its end; with submodels, they include how many clients hold each entry."""
        return self.models.covered(self.book.costs, itertools.starmap(self.holders, enumerate(self.members)))

    def holders(self, number: int, members: Members) -> Holders:
        """Count, for each entry, the members of a capacity class that hold it, over all devices."""
        models, axis = self.models, self.layout.axis

        def contribute(member: Members, _: Any) -> tuple[Any, tuple[None, Any]]:
            units = models.units(number, member.id, member.rank)
            counts, noise = models.holders(units, member.counts)
            return counts, (None, noise)

        if models.alike:
            count = jnp.sum(members.counts)
            return models.holders(models.units(number), lax.psum(count, axis) if axis else count)
        counts, (_, noise) = sum_over_clients(contribute, members, None, 1)
        most = jax.tree.map(jnp.max, noise)
        return Holders(lax.psum(counts, axis), lax.pmax(most, axis)) if axis else Holders(counts, most)

    def client(self, member: Members, state: PyTree) -> Client:
        layout, samples = self.layout, partial(Samples, unbatched=self.layout.chunk == 1)
        outer = self.data.outer, member.outer_start, member.outer_size, layout.outer_longest, layout.outer_equal
        inner = self.data.inner, member.inner_start, member.inner_size, layout.inner_longest, layout.inner_equal
        return Client(
            problem=self.problem,
            outer=samples(*outer),
            inner=samples(*inner),
            id=member.id,
            weight=member.weight,
            state=state,
            own=member.own or {},
        )


def renumbered(members: tuple[Members, ...], cohorts: Cohorts) -> tuple[Members, ...]:
    """Return the members with their own numbers, such as local steps, for this repetition of `cohorts`."""
    if not (own := changing(cohorts.own)):
        return members
    numbers = replace(cohorts, own=own).numbers
    return tuple(of_class._replace(own=of_class.own | numbers(of_class.id)) for of_class in members)


def chunk_of(layout: ProgramLayout, number: int) -> int:
    """Choose how many clients of a capacity class to vectorise together: at most as many as a cohort has on average."""
    if layout.submodel_plan is None:
        return layout.chunk
    average = -(-layout.cohort.size * layout.submodel_plan.places[number] // layout.population)
    return max(1, min(layout.chunk, average))


def _joined(columns: Sequence[Any]) -> Any:
    """Join the trees of all capacity classes, with leaves of shape (P_c,), to one tree with leaves of shape (P,)."""
    if len(columns) == 1:
        return columns[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *columns)


def sum_over_clients(
    contribute: Callable[[Members, PyTree], tuple[Sums, PyTree]],
    members: Members,
    states: PyTree,
    chunk: int,
    gaps: bool = False,
) -> tuple[Sums, PyTree]:
    """Sum the replies of clients; `chunk` clients at a time are computed together.

    Args:
        contribute: (a client, its state) -> (its sums, (its next state, other values)).
        members: the clients.
        states: their states.
        chunk: how many clients are vectorised together.
        gaps: whether to skip chunks that contain only padding. There, states do not change, and other values are 0.

    Returns:
        The sum of the sums, and the next states and other values of all clients, in order.
    """
    count = members.id.shape[0]
    if chunk == count and not gaps:
        return _summed(contribute, members, states)
    blocks = jax.tree.map(lambda a: a.reshape(count // chunk, chunk, *a.shape[1:]), (members, states))

    def play(total: Sums, inputs: tuple[Members, PyTree]) -> tuple[Sums, PyTree]:
        sums, new = _summed(contribute, *inputs)
        return jax.tree.map(jnp.add, total, sums), new

    def block(total: Sums, inputs: tuple[Members, PyTree]) -> tuple[Sums, PyTree]:
        if not gaps:
            return play(total, inputs)
        counts = inputs[0].counts
        rest = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(play, total, inputs)[1][1])
        return lax.cond(jnp.any(counts > 0), play, lambda total, inputs: (total, (inputs[1], rest)), total, inputs)

    shape = jax.eval_shape(contribute, *jax.tree.map(lambda a: a[0], (members, states)))[0]
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
    total, new = lax.scan(block, zero, blocks)
    return total, jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), new)


def _summed(
    contribute: Callable[[Members, PyTree], tuple[Sums, PyTree]], members: Members, states: PyTree
) -> tuple[Sums, PyTree]:
    sums, new = vectorised(contribute, members, states)
    return jax.tree.map(lambda a: jnp.sum(a, axis=0, dtype=a.dtype), sums), new
