"""Compile the rounds of a run as one program, whose arguments are all arrays of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.authored import checked_round
from fedbilevel.core.hyperparameters import at
from fedbilevel.core.own import Values
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, is_floating, rows_at
from fedbilevel.engines.costs import RoundCosts, packed
from fedbilevel.engines.engine import Carry, Cohorts, RoundKeys, round_keys
from fedbilevel.engines.fingerprint import method_key
from fedbilevel.engines.in_flight import with_tables
from fedbilevel.engines.local.fed import HOST, ExchangeState, LocalFed, Members, ProgramLayout, SampleArrays, chunk_of
from fedbilevel.engines.machine import once_for_all_processes
from fedbilevel.engines.progress import COMPILING, TRACING, report_stage
from fedbilevel.engines.submodels import models_of_round
from fedbilevel.engines.virtual_time import Pace
from fedbilevel.machinery.kept import kept, program_key
from fedbilevel.machinery.threefry import computed_once, written_out


class ProgramInputs(NamedTuple):
    """Hold the arguments of the compiled program; no large array is a constant of the program."""

    algorithm: Algorithm
    data: SampleArrays
    table: Members  # the population, arrays of shape (M,), or, when streaming, the cohorts, of shape (1 + fresh, P)
    ids: Array | None  # when streaming, the ids of the cohorts, of shape (1 + fresh, P); None: the program draws them
    key: Array
    pace: Pace
    own: Mapping[str, Values]  # clients' own numbers
    classes: tuple[Array, Array] | None  # with submodels: number and rank of clients (see SubmodelPlan), (M,) or (T, M)


def parted(carry: Carry) -> tuple[tuple[Any, PyTree], Carry]:
    """Split a carry into the part that results also refer to, and the part that only the program uses."""
    return (carry.state, carry.local_x), carry._replace(state=None, local_x=None)


@dataclass(frozen=True)
class Program:
    """Hold compiled rounds. They take and return only leaves, so that a cached program refers to no user's class."""

    compiled: Any
    costs: RoundCosts  # the shapes of a round's costs

    def run(self, carry: Carry, count: int, inputs: ProgramInputs) -> tuple[Carry, int, dict[str, np.ndarray], Any]:
        """Run up to `count` rounds.

        The buffers of the carry are consumed, except the server's state, to which results refer, and x at the start.

        Returns:
            Four values: the next carry; the number of rounds done; a row of packed costs for each of these rounds, and
            for the round that was not finite, if there was one; and which quantities were finite in the last round.
        """
        held, own = map(jax.tree.leaves, parted(carry))
        leaves, done, rows, finite = self.compiled(held, own, np.int32(count), jax.tree.leaves(inputs))
        done, finite = int(done), np.asarray(finite)
        packed_rows = {kind: np.asarray(row)[: done + (not finite.all())] for kind, row in rows.items()}
        new: Carry = jax.tree.unflatten(jax.tree.structure(carry._replace(local_x=None)), leaves)
        return new._replace(local_x=carry.local_x), done, packed_rows, finite


@dataclass(frozen=True)
class Rounds:
    """Describe the rounds of a run, and compile them."""

    problem: Problem
    layout: ProgramLayout
    mesh: Mesh | None

    def program(self, carry: Carry, inputs: ProgramInputs, quick_keys: bool) -> Program:
        """Trace and compile the rounds; for a user's own method, reuse a cached program if the trace is the same.

        With `quick_keys`, keys are used that have the same bits and compile quickly: see `written_out`.
        """

        @partial(jax.jit, inline=True)  # traced once, here; the loop over rounds reuses this trace
        def play(carry: Carry, inputs: ProgramInputs) -> tuple[Carry, RoundCosts, Array]:
            return self.one_round(carry, inputs._replace(key=written_out(inputs.key)) if quick_keys else inputs)

        report_stage(TRACING)
        _, costs, finite = jax.eval_shape(play, carry, inputs)
        (held, held_tree), (own, own_tree) = map(jax.tree.flatten, parted(carry))
        given, inputs_tree = jax.tree.flatten(inputs)
        arguments = held, own, np.int32(1), given

        def rounds(
            held: list[Any], own: list[Any], count: Array, given: list[Any]
        ) -> tuple[list[Any], Array, dict[str, Array], Array]:
            state, local_x = jax.tree.unflatten(held_tree, held)
            whole = jax.tree.unflatten(own_tree, own)._replace(state=state, local_x=local_x)
            inputs = jax.tree.unflatten(inputs_tree, given)
            whole, done, rows, good = self.loop(play, costs, finite, whole, count, inputs)
            return jax.tree.leaves(whole._replace(local_x=None)), done, rows, good

        shares = self.mesh and self.layout.shares
        everywhere = NamedSharding(self.mesh, PartitionSpec()) if self.mesh and shares else None
        traced = jax.jit(rounds, donate_argnums=1, out_shardings=everywhere).trace(*arguments)

        def finish() -> Any:
            report_stage(f"{COMPILING}{once_for_all_processes()}")
            return traced.lower().compile()

        known = shares or method_key(inputs.algorithm)
        key = None if known else program_key(traced.jaxpr, jax.tree.leaves(arguments), self.mesh)
        return Program(kept(key, finish), costs)

    def loop(
        self,
        play: Callable[[Carry, ProgramInputs], tuple[Carry, RoundCosts, Array]],
        like: RoundCosts,
        flags: jax.ShapeDtypeStruct,
        carry: Carry,
        count: Array,
        inputs: ProgramInputs,
    ) -> tuple[Carry, Array, dict[str, Array], Array]:
        """Run up to `count` rounds; stop if the algorithm has finished, and before a state that is not finite.

        The number of rounds is an argument of the compiled program. So all calls run the same program, and a run gives
        the same bits however it is divided into calls.

        Args:
            play: runs one round; see `one_round`.
            like: the shapes of a round's costs.
            flags: the shape of the flags (True or False) of a round, which say which of its quantities are finite.
            carry: the carry at the start.
            count: the largest number of rounds.
            inputs: the other arguments of the program.

        Returns:
            The carry, the number of rounds done, a row of packed costs for each round, and the flags of the last round.
        """
        row = jax.eval_shape(packed, like)
        rows = jax.tree.map(lambda s: jnp.zeros((self.layout.rounds_per_call, *s.shape), s.dtype), row)

        def unfinished(loop: tuple[Carry, Array, dict[str, Array], Array]) -> Array:
            return (loop[1] < count) & jnp.all(loop[3]) & jnp.logical_not(inputs.algorithm.finished(loop[0].state))

        def step(loop: tuple[Carry, Array, dict[str, Array], Array]) -> tuple[Carry, Array, dict[str, Array], Array]:
            carry, done, rows, _ = loop
            new, costs, finite = play(carry, inputs)
            rows = jax.tree.map(partial(lax.dynamic_update_index_in_dim, index=done, axis=0), rows, packed(costs))
            return new, done + jnp.all(finite), rows, finite

        return lax.while_loop(unfinished, step, (carry, jnp.zeros((), jnp.int32), rows, jnp.ones(flags.shape, bool)))

    def one_round(self, carry: Carry, inputs: ProgramInputs) -> tuple[Carry, RoundCosts, Array]:
        """Run a round; return (carry, costs, whether each floating leaf of the state and each metric is finite).

        If something is not finite, the given carry is returned, except for methods with late replies.
        """
        keys = round_keys(inputs.key, carry.round)
        where, members = self.members(self.cohorts(keys, inputs), inputs)
        queues = None
        if self.layout.submodel_plan:  # clients with submodels keep no state
            states = None
        elif inputs.algorithm.asks.asynchronous:  # all clients take part, in order, so that no state has to be moved
            pad = partial(padded, extra=members[0].id.shape[0] - self.layout.population)
            states, queues = pad(carry.clients), with_tables(carry.queues, pad)
        else:
            states = rows_at(carry.clients, members[0].state)
        underway = ExchangeState(states, carry.now, queues)

        def play(
            members: Any,
            underway: ExchangeState,
            state: Any,
            keys: RoundKeys,
            inputs: ProgramInputs,
        ) -> Any:
            algorithm = at(inputs.algorithm, keys.round)
            models = models_of_round(self.layout.submodel_plan, algorithm, inputs.key, keys.round, state)
            whole = self.layout, self.problem, algorithm, inputs.data, inputs.pace, self.cohorts(keys, inputs)
            fed = LocalFed(*whole, members, underway, partial(self.fresh, inputs), models)
            state = checked_round(algorithm, fed, state, keys.algorithm)
            return state, fed.underway, fed.total_costs()

        if self.mesh:
            spread, same = PartitionSpec(self.layout.axis), PartitionSpec()
            held: Any = PartitionSpec(HOST) if self.layout.shares else same  # the samples
            inputs_are: Any = ProgramInputs._make((same, held, same, same, same, same, same, same))
            desk_is = with_tables(
                jax.tree.map(lambda _: same, carry.queues), lambda table: jax.tree.map(lambda _: spread, table)
            )
            underway_is: Any = ExchangeState._make((spread, same, desk_is))
            play = jax.shard_map(  # check_vma=False: values of phases differ between devices, without annotations
                play,
                mesh=self.mesh,
                in_specs=(spread, underway_is, same, same, inputs_are),
                out_specs=(same, underway_is, same),
                check_vma=False,
            )
        state, underway, round_costs = play(members, underway, carry.state, keys, inputs)
        flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(state) if is_floating(leaf)]
        flags += [jnp.all(jnp.isfinite(round_costs.metrics[name][0])) for name in sorted(round_costs.metrics)]
        # `computed_once`: otherwise the kernel of each leaf of the state would compute all flags again.
        finite = computed_once(jnp.stack(flags).astype(jnp.int32)) > 0
        # the places that pad the cohort are dropped here
        if inputs.algorithm.asks.asynchronous:
            cut = partial(jax.tree.map, lambda leaf: leaf[: self.layout.population])
            clients, queues = cut(underway.states), with_tables(underway.queues, cut)
            return Carry(carry.round + 1, state, clients, underway.now, queues, carry.local_x), round_costs, finite
        good, rows = jnp.all(finite), members[0].state[where]
        after = carry.round + 1, state, underway.now, underway.states
        before = carry.round, carry.state, carry.now, states
        number, state, now, states = optax.tree.where(good, after, before)
        # the states of clients outside of the cohort are not copied
        clients = jax.tree.map(lambda full, kept: full.at[rows].set(kept[where]), carry.clients, states)
        return Carry(number, state, clients, now, carry.queues, carry.local_x), round_costs, finite

    def cohorts(self, keys: RoundKeys, inputs: ProgramInputs) -> Cohorts:
        """Return the object that draws the cohorts of the round with these keys."""
        return Cohorts(self.layout.cohort, self.layout.population, inputs.own, keys)

    def fresh(self, inputs: ProgramInputs, cohorts: Cohorts, number: Array | int) -> tuple[Members, ...]:
        """Gather those members of a fresh cohort that are on this device; `number` counts the fresh cohorts of the
        round."""
        _, members = self.members(cohorts.fresh(number), inputs, number + 1)
        if self.mesh is None:
            return members
        devices, mine = self.mesh.size, lax.axis_index(self.layout.axis)

        def of_this_device(column: Array) -> Array:
            share = column.shape[0] // devices
            return lax.dynamic_slice_in_dim(column, mine * share, share)

        return jax.tree.map(of_this_device, members)

    def members(
        self, cohorts: Cohorts, inputs: ProgramInputs, place: Array | int = 0
    ) -> tuple[Any, tuple[Members, ...]]:
        """Gather a cohort; `place` is its number among the cohorts of the round.

        Returns:
            The places of the cohort's clients among the members; and the members of each class of capacity, padded and
            sorted by work. Without capacities there is one class.
        """
        size = self.layout.cohort.size
        if inputs.ids is None:
            ids = cohorts.ids()
            members = rows_at(inputs.table, ids) if cohorts.sampled else inputs.table
        else:  # the source has already gathered the cohort
            ids, members = jax.tree.map(lambda column: column[place], (inputs.ids, inputs.table))
        members = members._replace(own=cohorts.numbers(ids) or None)
        if self.layout.cohort.replacement:
            members = members._replace(place=jnp.arange(size))
        everyone = jnp.ones(
            size, jnp.result_type(float)
        )  # a constant if no client is masked, so that no product is computed
        members = members._replace(counts=everyone * inputs.pace.ever_available(ids))
        counts = [n for n in jax.tree.leaves(members.own) if jnp.issubdtype(n.dtype, jnp.integer)]
        if counts and not inputs.algorithm.asks.asynchronous:
            order = jnp.argsort(sum(counts))  # clients of a chunk get similar work: the slowest one determines its time
            ids, members = ids[order], jax.tree.map(lambda column: column[order], members)
        if inputs.classes is not None:
            now = [column if column.ndim == 1 else column[cohorts.keys.round] for column in inputs.classes]
            number, rank = rows_at(now, ids)
            members = members._replace(number=number, rank=rank)
        if shares := self.layout.shares:
            where, member, taken = shares.place(ids, shares.places(size, self.layout.chunk))
            members = jax.tree.map(lambda column: column[member], members)
            return where, (members._replace(counts=members.counts * taken),)
        if submodel_plan := self.layout.submodel_plan:
            classes = range(len(submodel_plan.places))
            return slice(size), tuple(self.of_class(members, number) for number in classes)
        return slice(size), (self.in_chunks(members, self.layout.chunk),)

    def of_class(self, members: Members, number: int) -> Members:
        """Return the cohort's members of a capacity class, padded to the largest number that a cohort can have."""
        assert self.layout.submodel_plan is not None
        cohort, most = self.layout.cohort, self.layout.submodel_plan.places[number]
        places = cohort.size if cohort.replacement else min(cohort.size, most)
        order = jnp.argsort(members.number != number, stable=True)[:places]
        members = jax.tree.map(lambda column: column[order], members)
        members = members._replace(counts=members.counts * (members.number == number))
        return self.in_chunks(members, chunk_of(self.layout, number))

    def in_chunks(self, members: Members, chunk: int) -> Members:
        """Pad the cohort with clients of weight 0, so that every device has the same number of whole chunks."""
        size = members.id.shape[0]
        places = np.arange(size + -size % (chunk * (self.mesh.size if self.mesh else 1)))
        if len(places) == size:
            return members
        taken = np.minimum(places, size - 1)  # rows are gathered: XLA's partitioner does not handle concatenation well
        members = jax.tree.map(lambda column: column[taken], members)
        return members._replace(counts=members.counts * (places < size))


def padded(tree: PyTree, extra: int) -> PyTree:
    """Pad leaves of shape (n, ...) at the end with `extra` copies of the first row."""
    if not extra:
        return tree
    return jax.tree.map(lambda a: jnp.concatenate([a, jnp.broadcast_to(a[:1], (extra, *a.shape[1:]))]), tree)
