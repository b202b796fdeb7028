"""The exchanges of one round inside a compiled program: clients by vmap × chunk × device mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Client, Samples
from fedbilevel.core.fed import Fed, Reply, check_reply
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.costs import RoundCosts, Sums, add_costs, empty_costs, exchange_costs, normalise, weigh
from fedbilevel.engines.engine import check_first
from fedbilevel.engines.local.rows import DeviceRows
from fedbilevel.engines.local.shares import Shares
from fedbilevel.engines.submodels import SubmodelPlan
from fedbilevel.engines.virtual_time import in_flight
from fedbilevel.engines.virtual_time.clock import Clock, ClockState, Pace
from fedbilevel.engines.virtual_time.in_flight import InFlight

AXIS = "clients"
HOST = "hosts"  # the mesh's axis over processes, where there are several


class Members(NamedTuple):
    """Clients as arrays: a table of the population (M,), or the cohort taken from it (P,)."""

    id: Any
    weight: Any
    outer_start: Any
    outer_size: Any
    inner_start: Any
    inner_size: Any
    work: Any
    counts: Any  # 1, or 0 for a place that only pads the cohort to a multiple of the chunk
    number: Any = None  # where clients have capacities: the class of its own, and its rank there (see SubmodelPlan)
    rank: Any = None


class SampleArrays(NamedTuple):
    """Flat samples that the members' windows point into."""

    outer: PyTree
    inner: PyTree


RunPhase = Callable[[str, Any, Client, PyTree, Array], Reply]
"""(name of a phase, algorithm, client but for the problem, message, key) -> its reply."""


def traced_once(problem: Problem) -> RunPhase:
    """What asks a phase, by its name. A program is traced many times over on its way to the compiler, a phase so only
    once for arguments of the same shapes; what is remembered of that, and of the problem, goes when the run does."""

    def ask(name: str, algorithm: Algorithm, client: Client, message: PyTree, key: Array) -> Reply:
        return algorithm.run_phase(name, replace(client, problem=problem), message, key)

    made: RunPhase = jax.jit(ask, static_argnums=0, inline=True)
    return made


@dataclass(frozen=True)
class ProgramLayout:
    """What shapes the program."""

    problem: Problem
    population: int
    cohort: int
    fresh: int  # fresh cohorts per round
    outer_longest: int
    outer_equal: bool
    inner_longest: int
    inner_equal: bool
    has_client_steps: bool  # whether the population says how many local steps each client makes
    chunk: int  # clients vectorised together
    axis: str | tuple[str, ...] | None  # names of the mesh's axes, if the cohort is spread over devices
    clock: Clock
    available_population: float  # see `available_population`
    shares: Shares | None = None  # of several processes
    submodel_plan: SubmodelPlan | None = None  # where clients hold submodels
    ask: RunPhase = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ask", traced_once(self.problem))


DrawMembers = Callable[[Array | int], Members]
"""Number of a fresh cohort -> its members on this device."""


ClientFunction = Callable[[Members, PyTree], tuple[Sums, PyTree]]
"""(a client, its state) -> its weighted answer and its next state."""


class ExchangeState(NamedTuple):
    """What changes from exchange to exchange within a round."""

    states: PyTree  # of this device's members
    now: ClockState
    queues: InFlight | None  # its tables are of this device's members, the rest is of everyone


class LocalFed:
    """See `Fed`. Sums stream over chunks; per-client replies are never stacked."""

    def __init__(
        self,
        layout: ProgramLayout,
        algorithm: Algorithm,
        data: SampleArrays,
        pace: Pace,
        members: Members,
        underway: ExchangeState,
        draw: DrawMembers,
    ) -> None:
        self.layout, self.algorithm, self.data, self.pace = layout, algorithm, data, pace
        self.members, self.underway, self.draw = members, underway, draw
        self.problem = layout.problem
        self.has_client_steps, self.sampled = layout.has_client_steps, layout.cohort < layout.population
        self.round_costs = empty_costs()

    def mean(
        self,
        phase: Callable[..., Reply],
        message: PyTree,
        key: Array,
        *,
        unbiased: bool = False,
        fresh: int | Array | None = None,
    ) -> PyTree:
        name, answer = self.question(phase, message, key, fresh)

        def one(member: Members, state: PyTree) -> tuple[Sums, tuple[PyTree, Any]]:
            sums, kept = answer(member, state)
            return sums, (kept, None if self.pace.compute is None else sums.gradients + sums.hvps)

        chunk, gaps = self.layout.chunk, self.layout.shares is not None
        members = self.members if fresh is None else self.draw(fresh)
        sums, (states, units) = sum_over_clients(
            one, members, self.underway.states if fresh is None else None, chunk, gaps
        )
        if fresh is None:
            self.underway = self.underway._replace(states=states)
        if self.layout.axis:
            sums = lax.psum(sums, self.layout.axis)
        ticks = self.wait_for(members, units)
        asked = self.layout.cohort if self.pace.lasts is None else sums.responders
        self.round_costs = add_costs(self.round_costs, exchange_costs(name, message, sums, asked, ticks))
        return normalise(sums, self.layout.available_population, unbiased)

    def first(
        self,
        n: int,
        phase: Callable[..., Reply],
        message: PyTree,
        key: Array,
        *,
        max_staleness: int | None = None,
    ) -> PyTree:
        queues = check_first(n, self.layout.clock, self.layout.population, max_staleness, self.underway.queues)
        name, answer = self.question(phase, message, key, None)
        rows = self.rows(n)
        units = self.units(answer) if self.pace.compute is not None else 0
        plan = in_flight.first(queues, self.pace, self.underway.now, name, n, units, max_staleness)
        table, states = rows.update(
            rows.here(plan.asked), answer, self.members, (queues.lanes[name].answers, self.underway.states)
        )
        queues = in_flight.handed_in(in_flight.written(queues, name, table), plan, rows.total)
        queues, total, age = in_flight.counted(queues, plan, name, rows.total)
        self.underway = ExchangeState(states, self.underway.now.later(self.pace, plan.ticks), queues)
        self.round_costs = add_costs(
            self.round_costs, exchange_costs(name, message, total, jnp.sum(plan.asked), plan.ticks, age)
        )
        return total.update

    def question(
        self, phase: Callable[..., Reply], message: PyTree, key: Array, fresh: Any
    ) -> tuple[str, ClientFunction]:
        """A phase's name, and what asks it of a client."""
        name = self.algorithm.phase_name(phase)

        def answer(member: Members, state: PyTree) -> tuple[Sums, PyTree]:
            own = self.client(member, state), message, jax.random.fold_in(key, member.id)
            reply = self.layout.ask(name, self.algorithm, *own)
            check_reply(reply, name, fresh)
            kept = state if reply.state is None else reply.state
            answered = weigh(reply, member.weight, member.counts), kept
            if self.pace.lasts is None:
                return answered
            nothing = jax.tree.map(jnp.zeros_like, answered[0]), state  # from those who are never available
            return jax.tree.map(lambda a, b: jnp.where(member.counts > 0, a, b), answered, nothing)

        return name, answer

    def wait_for(self, members: Members, units: Any) -> Array:
        """Let the time pass that these clients need, all of them; the ticks that it takes."""
        pace, (states, now, queues) = self.pace, self.underway
        if queues is None:
            needed = pace.waits(now, members.id) + pace.durations(now, members.id, units)
            ticks = jnp.max(jnp.where(members.counts > 0, needed, 0))
            ticks = lax.pmax(ticks, self.layout.axis) if self.layout.axis else ticks
        else:
            plan = in_flight.everyone(queues, pace, now, 0 if units is None else self.of_all(units))
            ticks, queues = plan.ticks, in_flight.handed_in(queues, plan, self.rows(self.layout.population).total)
        self.underway = ExchangeState(states, now.later(pace, ticks), queues)
        return ticks

    def units(self, answer: ClientFunction) -> Array:
        """(M,) what each client would have to compute; all else of its answer is left to the compiler to leave out."""

        def count(member: Members, state: PyTree) -> Array:
            sums, _ = answer(member, state)
            return sums.gradients + sums.hvps

        return self.of_all(jax.vmap(count)(self.members, self.underway.states))

    def of_all(self, mine: Array) -> Array:
        """(M,) what every device has for its members."""
        all_ = lax.all_gather(mine, self.layout.axis, tiled=True) if self.layout.axis else mine
        return all_[: self.layout.population]

    def rows(self, n: int) -> DeviceRows:
        """The rows of the queues' tables on this device, in blocks that suit exchanges of n answers."""
        mine = self.members.id.shape[0]
        devices = -(-self.layout.population // mine)
        first = lax.axis_index(self.layout.axis) * mine if self.layout.axis else 0
        return DeviceRows(mine, first, min(self.layout.chunk, -(-n // devices)), self.layout.axis)

    def repeat(
        self,
        n: int | Array,
        body: Callable[[Fed, Any, Array], Any],
        carry: PyTree,
        key: Array,
        *,
        until: Callable[[Any], Array] | None = None,
    ) -> PyTree:
        def once(i: Array | int, carry: PyTree, underway: ExchangeState) -> tuple[PyTree, ExchangeState, RoundCosts]:
            fed = self.again(underway)
            carry = body(fed, carry, jax.random.fold_in(key, i))
            return carry, fed.underway, fed.round_costs

        def unfinished(loop: tuple[Array, PyTree, ExchangeState, RoundCosts]) -> Array:
            i, carry, *_ = loop
            return i < n if until is None else (i < n) & ~until(carry)

        def step(
            loop: tuple[Array, PyTree, ExchangeState, RoundCosts],
        ) -> tuple[Array, PyTree, ExchangeState, RoundCosts]:
            i, carry, underway, total = loop
            carry, underway, new = once(i, carry, underway)
            return i + 1, carry, underway, jax.tree.map(jnp.add, total, new)

        shape = jax.eval_shape(once, 0, carry, self.underway)[2]
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
        start = (jnp.zeros((), jnp.int32), carry, self.underway, zero)
        _, carry, self.underway, total = lax.while_loop(unfinished, step, start)
        self.round_costs = add_costs(self.round_costs, total)
        return carry

    def total_costs(self) -> RoundCosts:
        """The costs of the round, at its end."""
        return self.round_costs

    def again(self, underway: ExchangeState) -> LocalFed:
        """The same round further on, with no costs yet."""
        return LocalFed(self.layout, self.algorithm, self.data, self.pace, self.members, underway, self.draw)

    def client(self, member: Members, state: PyTree) -> Client:
        layout = self.layout
        return Client(
            problem=None,  # type: ignore[arg-type]  # see traced_once
            outer=Samples(
                self.data.outer,
                member.outer_start,
                member.outer_size,
                layout.outer_longest,
                layout.outer_equal,
            ),
            inner=Samples(
                self.data.inner,
                member.inner_start,
                member.inner_size,
                layout.inner_longest,
                layout.inner_equal,
            ),
            id=member.id,
            weight=member.weight,
            state=state,
            work=member.work,
        )


def sum_over_clients(
    one: Callable[[Members, PyTree], tuple[Sums, PyTree]],
    members: Members,
    states: PyTree,
    chunk: int,
    gaps: bool = False,
) -> tuple[Sums, PyTree]:
    """Σ of `one` over clients, `chunk` of them vectorised at a time, and what else it gives of each, in order.

    With `gaps`, chunks in which nobody counts are left out: their states stay, of the rest there are zeros. `one` gives
    (its sums, (the next state, the rest)).
    """
    count = members.id.shape[0]
    if chunk == count and not gaps:
        return _vectorised(one, members, states)
    blocks = jax.tree.map(lambda a: a.reshape(count // chunk, chunk, *a.shape[1:]), (members, states))

    def play(total: Sums, inputs: tuple[Members, PyTree]) -> tuple[Sums, PyTree]:
        sums, new = _vectorised(one, *inputs)
        return jax.tree.map(jnp.add, total, sums), new

    def block(total: Sums, inputs: tuple[Members, PyTree]) -> tuple[Sums, PyTree]:
        if not gaps:
            return play(total, inputs)
        counts = inputs[0].counts
        rest = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(play, total, inputs)[1][1])
        return lax.cond(jnp.any(counts > 0), play, lambda total, inputs: (total, (inputs[1], rest)), total, inputs)

    shape = jax.eval_shape(one, *jax.tree.map(lambda a: a[0], (members, states)))[0]
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
    total, new = lax.scan(block, zero, blocks)
    return total, jax.tree.map(lambda a: a.reshape(count, *a.shape[2:]), new)


def _vectorised(
    one: Callable[[Members, PyTree], tuple[Sums, PyTree]], members: Members, states: PyTree
) -> tuple[Sums, PyTree]:
    if members.id.shape[0] == 1:  # a batch axis of one would only hide matrix products from the compiler
        sums, new = one(*jax.tree.map(lambda a: a[0], (members, states)))
        return sums, jax.tree.map(lambda a: a[None], new)
    sums, new = jax.vmap(one)(members, states)
    return jax.tree.map(lambda a: jnp.sum(a, axis=0, dtype=a.dtype), sums), new
