"""Define the semantics of rounds by a simple engine, a Python loop over clients, for tests and for debugging."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.authored import checked_round
from fedbilevel.core.client import Client, Clients, Samples
from fedbilevel.core.errors import NonFiniteError, diverged
from fedbilevel.core.fed import Phase, Reply, Total
from fedbilevel.core.hyperparameters import at
from fedbilevel.core.own import OwnNumbers
from fedbilevel.core.problem import Problem
from fedbilevel.core.ragged import Ragged, check_finite
from fedbilevel.core.tree import PyTree, nonfinite_leaves
from fedbilevel.engines import in_flight
from fedbilevel.engines.costs import RoundCosts, Sums, added_up, joined, stack_costs, weigh
from fedbilevel.engines.engine import (
    Carry,
    Cohort,
    Cohorts,
    PythonFed,
    RoundKeys,
    Stretch,
    available_population,
    check_availability,
    check_drawn_again,
    check_first,
    check_simulated,
    round_keys,
)
from fedbilevel.engines.evaluation import PerClient, PerClientEvaluation, PerClientRow
from fedbilevel.engines.machine import trim_heap
from fedbilevel.engines.submodels import RoundSubmodels, SubmodelPlan, WholeModels, models_of_round
from fedbilevel.engines.virtual_time import Clock

AskClient = Callable[[int, OwnNumbers], tuple[Sums, Reply]]


class ReferenceFed(PythonFed):
    """Make the exchanges of a round client by client. An error names the client.

    If clients hold submodels, each client is sent its part of a message, and each entry is averaged over the clients
    that hold this entry. Otherwise, all clients are sent the whole message.
    """

    def __init__(
        self,
        run: ReferenceRun,
        algorithm: Algorithm,
        keys: RoundKeys,
        carry: Carry,
        models: WholeModels | RoundSubmodels,
    ) -> None:
        cohorts = Cohorts(run.cohort, len(run.clients), run.clients.own, keys)
        super().__init__(algorithm, run.problem, cohorts, models)
        self.run, self.round = run, int(carry.round)
        self.before, self.now, self.queues = carry.clients, carry.now, carry.queues
        self.kept: dict[int, PyTree] = {}  # the new states of clients that replied

    def sum(self, phase: Phase, message: PyTree, key: Array, *, fresh: Any = None, each: bool = False) -> Total:
        members = self.members if fresh is None else self.cohorts.fresh(fresh).members()
        name, asked, parts, totals = self.algorithm.phase_name(phase), [], [], []
        try:
            for place, (i, own) in enumerate(members):
                if not self.run.pace.ever_available(i):
                    continue
                units = self.models.units_of(i)
                part = self.models.cut(phase, message, units)
                again = jax.random.fold_in(key, place) if self.run.cohort.replacement else key
                sums, reply = self.question(name, part, again, fresh)(i, own)
                asked.append(i)
                parts.append((part, sums, 1))
                self.check(name, i, reply, fresh is None)
                totals.append(self.models.put_back(phase, sums, units)._replace(sent=None))
        finally:  # the costs of replies include those of a reply that is not finite
            if parts:
                work = jnp.asarray(np.array([np.add(sums.gradients, sums.hvps) for _, sums, _ in parts]))
                self.book.enter(name, joined(parts), self.wait_for(jnp.array(asked), work))
        rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(sums.row for _, sums, _ in parts)) if each else None
        return added_up(totals).total(self.run.population, rows)

    def sum_first(
        self, n: int, phase: Phase, message: PyTree, key: Array, *, max_staleness: int | None = None
    ) -> PyTree:
        count = len(self.run.clients)
        available = count - self.run.clock.never_available(count).size
        queues = check_first(n, available, max_staleness, self.queues, self.run.pace)
        name, own = self.algorithm.phase_name(phase), dict(self.members)
        ask = self.question(name, message, key, None)
        number, table = queues.number(name), queues.by_phase[name].replies
        units = jnp.zeros(count, jnp.int32)
        if self.run.pace.compute is not None:
            idle = [i for i in range(count) if queues.kind[i] != number]
            spent = {i: ask(i, own[i])[0] for i in idle}
            units = jnp.array([spent[i].gradients + spent[i].hvps if i in spent else 0 for i in range(count)])
        plan, parts = in_flight.first(queues, self.run.pace, self.now, name, n, units, max_staleness), []
        for i in np.flatnonzero(plan.asked).tolist():
            sums, reply = ask(i, own[i])
            parts.append((message, sums, 1))
            try:
                self.check(name, i, reply, True)
            except NonFiniteError:
                self.book.enter(name, joined(parts), plan.ticks)
                raise
            table = jax.tree.map(lambda rows, new, i=i: rows.at[i].set(new), table, sums)
        queues = in_flight.handed_in(in_flight.written(queues, name, table), plan, total_of)
        self.queues, total, age = in_flight.counted(queues, plan, name, total_of)
        self.now = self.now.later(self.run.pace, plan.ticks)
        self.book.enter(name, [(message, total, jnp.sum(plan.asked))], plan.ticks, age)
        return total.rounded

    def question(self, name: str, message: PyTree, key: Array, fresh: Any) -> AskClient:
        """Return the function (client, its own numbers) -> (weighted sums, reply) that runs a phase."""

        def ask(i: int, own: OwnNumbers) -> tuple[Sums, Reply]:
            state = None if fresh is not None else self.state_of(i)
            client, round = self.client(i, own, state), jnp.asarray(self.round)
            with jax.disable_jit(self.run.stepping):
                return self.run.program(name, self.run.algorithm, round, client, message, jax.random.fold_in(key, i))

        return ask

    def check(self, name: str, i: int, reply: Reply, keep: bool) -> None:
        """Raise an error if the reply of client i is not finite; with `keep`, store the client's new state."""
        losses = [metric for metric, value in (reply.metrics or {}).items() if not np.all(np.isfinite(value))]
        if bad := nonfinite_leaves(reply.update) + losses:
            raise diverged(bad, self.round, f"phase {name}", i)
        if self.run.on_reply is not None:
            self.run.on_reply(name, i, reply)
        if reply.state is not None and keep:
            self.kept[i] = reply.state

    def state_of(self, i: int) -> PyTree:
        """Return the state of client i."""
        return self.kept[i] if i in self.kept else jax.tree.map(lambda leaf: leaf[i], self.before)

    def states(self) -> PyTree:
        """Return the states of all clients, with leaves of shape (M, ...)."""
        states = self.before
        for i, state in self.kept.items():
            states = jax.tree.map(lambda full, new, i=i: full.at[i].set(new), states, state)
        return states

    def wait_for(self, ids: Array, units: Array) -> Array:
        """Advance the clock until all these clients have replied, and return the ticks that this takes."""
        pace = self.run.pace
        if self.queues is None:
            ticks = jnp.max(pace.waits(self.now, ids) + pace.durations(self.now, ids, units))
        else:
            every = jnp.zeros(len(self.run.clients), jnp.int32).at[ids].set(units)
            plan = in_flight.everyone(self.queues, pace, self.now, every)
            ticks, self.queues = plan.ticks, in_flight.handed_in(self.queues, plan, total_of)
        self.now = self.now.later(pace, ticks)
        return ticks

    def total_costs(self) -> RoundCosts:
        """Return the costs of the round, after its last exchange.

        With submodels, they also contain the number of clients that hold each entry of the model.
        """
        available = ((i, jnp.asarray(self.run.pace.ever_available(i), float)) for i, _ in self.members)
        holders = (self.models.holders(self.models.units_of(i), counts) for i, counts in available)
        return self.models.covered(self.book.costs, holders)

    def client(self, i: int, own: OwnNumbers, state: PyTree) -> Client:
        without: Any = None  # the compiled phase adds the problem
        clients = self.run.clients
        return Client(
            problem=without,
            outer=_samples("outer", clients, i),
            inner=_samples("inner", clients, i),
            id=jnp.asarray(i),
            weight=jnp.asarray(clients.weights[i], float),
            state=state,
            own=jax.tree.map(jnp.asarray, own),
        )


@dataclass
class ReferenceRun:
    algorithm: Algorithm
    problem: Problem
    clients: Clients
    cohort: Cohort
    key: Array
    clock: Clock
    submodel_plan: SubmodelPlan | None = None
    on_reply: Callable[[str, int, Reply], None] | None = None
    compile_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.pace = self.clock.pace(len(self.clients))
        self.population = available_population(self.clock, self.clients)
        self.stepping: bool = jax.config.jax_disable_jit  # type: ignore[attr-defined]
        self.program = jax.jit(self.phase, static_argnums=0)

    def phase(
        self, name: str, algorithm: Algorithm, round: Array, client: Client, message: PyTree, key: Array
    ) -> tuple[Sums, Reply]:
        """Run a phase at a client, and return (its weighted sums, its reply)."""
        reply = at(algorithm, round).run_phase(name, replace(client, problem=self.problem), message, key)
        return weigh(reply, client.weight, jnp.ones(())), reply

    def advance(self, carry: Carry, rounds: int) -> Stretch:
        costs: list[RoundCosts] = []
        for _ in range(rounds):
            try:
                fed, state = self.one_round(carry)
            except NonFiniteError as error:
                error.costs = stack_costs([*costs, error.costs])
                raise
            with jax.disable_jit():
                costs.append(fed.total_costs())
            carry = Carry(carry.round + 1, state, fed.states(), fed.now, fed.queues, carry.local_x)
            if fed.algorithm.finished(state):
                break
        return Stretch(carry, len(costs), stack_costs(costs))

    def one_round(self, carry: Carry) -> tuple[ReferenceFed, Any]:
        """Run a round; return its exchanges, which have the clients' new states, and the server's new state."""
        keys = round_keys(self.key, int(carry.round))
        algorithm = at(self.algorithm, carry.round)  # schedules get the round as an array, as in Local
        models = models_of_round(self.submodel_plan, algorithm, self.key, carry.round, carry.state)
        fed = ReferenceFed(self, algorithm, keys, carry, models)
        with jax.disable_jit():  # loops over exchanges run in Python
            try:
                state = checked_round(algorithm, fed, carry.state, keys.algorithm)
                if bad := nonfinite_leaves(state):
                    raise diverged(bad, int(carry.round), "server update")
            except NonFiniteError as error:
                error.costs = fed.book.costs
                raise
        return fed, state

    def per_client(self, metrics: Mapping[str, PerClient], fixed: tuple[PyTree, PyTree]) -> PerClientRow:
        return PerClientEvaluation(metrics, self.clients, fixed, own=self.problem.own, local=self.problem.local)

    def close(self) -> None:
        trim_heap()


@dataclass(frozen=True)
class Reference:
    """Simulate clients one after another: slow and exact, and easy to step through with a debugger.

    A phase is compiled for each number of samples that clients have. Within `jax.disable_jit()` nothing is compiled,
    loops of jax.lax run in Python, and every intermediate value can be inspected.

    Args:
        clock: how long exchanges take, in virtual time.
        on_reply: a function (phase's name, client, `Reply`) that is called with each reply.
    """

    clock: Clock = field(default_factory=Clock)
    on_reply: Callable[[str, int, Reply], None] | None = None

    def start(
        self, algorithm: Algorithm, problem: Problem, clients: Clients, cohort: int | Cohort, key: Array, carry: Carry
    ) -> ReferenceRun:
        """Prepare a run of the algorithm on simulated clients; `carry` gives shapes and dtypes of all states."""
        check_simulated(clients)
        cohort = Cohort.of(cohort)
        check_availability(self.clock, algorithm, len(clients), cohort)
        check_drawn_again(cohort, carry)
        away = self.clock.never_available(len(clients))
        submodel_plan = SubmodelPlan.of(algorithm, problem, clients, carry.state.x, carry.state.y, away)
        return ReferenceRun(algorithm, problem, clients, cohort, key, self.clock, submodel_plan, self.on_reply)


def total_of(table: Sums, asked: Array, who: Array) -> tuple[Sums, Array]:
    """Return the sum of the replies that `who` chooses, and the sum of their weights times the entries of `asked`."""
    rows = jax.tree.map(lambda leaf: leaf[np.flatnonzero(who)], (table, table.weight * asked))
    total: tuple[Sums, Array] = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0, dtype=leaf.dtype), rows)
    return total


def _samples(name: str, clients: Clients, i: int) -> Samples:
    """Return the samples of client i, without padding."""
    rows: Ragged = getattr(clients, name)
    size, row = int(rows.size[i]), rows.row(i)
    for path, leaf in jax.tree_util.tree_leaves_with_path(row):
        if isinstance(leaf, np.memmap):
            what = f"Clients.{name}{jax.tree_util.keystr(path)}"
            check_finite(what, leaf, lambda row: f"in sample {row} of client {i}")
    values = jax.tree.map(jnp.asarray, row)
    return Samples(values, jnp.asarray(0), jnp.asarray(size), longest=size, equal=True)
