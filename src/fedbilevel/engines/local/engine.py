"""The fast engine, on this machine or on several: many rounds per compiled program."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.authored import next_state
from fedbilevel.core.client import Clients
from fedbilevel.core.config import at
from fedbilevel.core.errors import ConfigurationError, NonFiniteError, diverged, require, require_count
from fedbilevel.core.kept import PROGRAMS, program_key, recalled, series, shapes_of
from fedbilevel.core.problem import Problem
from fedbilevel.core.threefry import written_out
from fedbilevel.core.tree import PyTree, is_floating, nbytes, rows_at
from fedbilevel.engines.costs import RoundCosts, packed, unpacked
from fedbilevel.engines.engine import (
    Carry,
    RoundKeys,
    Stretch,
    available_population,
    check_availability,
    check_simulated,
    draw_cohort,
    round_keys,
    work_of,
)
from fedbilevel.engines.in_flight import nonfinite_replies, with_tables
from fedbilevel.engines.local.fed import (
    AXIS,
    HOST,
    ExchangeState,
    LocalFed,
    Members,
    ProgramLayout,
    SampleArrays,
    chunk_of,
)
from fedbilevel.engines.local.placement import Shares
from fedbilevel.engines.local.samples import Resident, Streamed, is_memory_mapped, local, replicate
from fedbilevel.engines.machine import MEGABYTES, keep_on_disk
from fedbilevel.engines.multihost import ProcessGroup, current_group
from fedbilevel.engines.progress import COMPILING, TRACING, doing
from fedbilevel.engines.reference import ReferenceRun
from fedbilevel.engines.submodels import RoundSubmodels, SubmodelPlan
from fedbilevel.engines.virtual_time import Clock, Pace

FEW = 64  # samples
SMALL_STATE = 2**17  # bytes; above it one client's matrix products fill a CPU by themselves


class ProgramInputs(NamedTuple):
    """Arguments of the compiled program: nothing big is ever captured as a constant."""

    algorithm: Algorithm
    data: SampleArrays
    table: Members  # the population (M,), or, when streaming, the cohorts themselves (1 + fresh, P)
    ids: Array | None  # the cohorts (1 + fresh, P), when streaming; else they are drawn inside
    key: Array
    pace: Pace


@dataclass(frozen=True)
class Program:
    """Compiled rounds. They take and give leaves alone, so that what is kept knows no class and no function."""

    compiled: Any
    carry_tree: Any  # the structure of the carry, without `local_x`
    costs: RoundCosts  # of a round, as shapes

    def run(self, carry: Carry, count: int, inputs: ProgramInputs) -> tuple[Carry, int, dict[str, np.ndarray], Any]:
        """The next carry, the rounds done, a row of packed costs for each, and what was finite in the last one.

        All of the carry is used up but what others hold: the server's state, as results do, and the x of the start.
        """
        held, own = map(jax.tree.leaves, parted(carry))
        carried, done, rows, finite = self.compiled(held, own, np.int32(count), jax.tree.leaves(inputs))
        done = int(done)
        packed_rows = {kind: np.asarray(row)[:done] for kind, row in rows.items()}
        new: Carry = jax.tree.unflatten(self.carry_tree, carried)
        return new._replace(local_x=carry.local_x), done, packed_rows, np.asarray(finite)


def parted(carry: Carry) -> tuple[tuple[Any, PyTree], Carry]:
    """What others hold of a carry, and what is the program's alone."""
    return (carry.state, carry.local_x), carry._replace(state=None, local_x=None)


@dataclass(frozen=True)
class Local:
    """Simulate clients on this machine's devices, or on those of all processes that called `multihost.join`.

    Args:
        chunk: clients vectorised together; None chooses: everyone where models are small or on a GPU (in quarters
            sorted by work where clients work unequally), one at a time where one client's products fill the CPU.
        devices: how many devices of each process to spread each cohort over.
        stream: keep the samples on the host and bring each round's cohort to the device, prefetched: for populations
            that do not fit. None streams exactly when some leaf is a NumPy memory map.
        prefetch: cohorts to read ahead when streaming.
        clock: how long exchanges take, in virtual time.
    """

    chunk: int | None = None
    devices: int = 1
    stream: bool | None = None
    prefetch: int = 2
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        require_count("Local.chunk", self.chunk, optional=True)
        require_count("Local.devices", self.devices)
        require_count("Local.prefetch", self.prefetch)

    def start(
        self, algorithm: Algorithm, problem: Problem, clients: Clients, cohort: int, key: Array, carry: Carry
    ) -> LocalRun:
        """Prepare a run of the algorithm on simulated clients; `carry` gives shapes and dtypes of all states."""
        check_simulated(clients)
        check_availability(self.clock, algorithm, len(clients), cohort)
        group = current_group()
        mesh, processes = self.mesh(group), group.processes
        shares = Shares(len(clients), processes, group.process, self.devices) if processes > 1 else None
        share = -(-cohort // (self.devices * processes))  # clients per device, rounded up
        lumpy = shares is not None and cohort < len(clients)
        chunk = min(self.chunk or default_chunk(carry.state, clients, share, lumpy), share)
        away = self.clock.never_available(len(clients))
        layout = ProgramLayout(
            problem=problem.over_batches(),
            population=len(clients),
            cohort=cohort,
            fresh=algorithm.asks.fresh_cohorts,
            outer_longest=longest_in_steps(clients.outer.size),
            outer_equal=bool(np.all(clients.outer.size == clients.outer.size[0])),
            inner_longest=longest_in_steps(clients.inner.size),
            inner_equal=bool(np.all(clients.inner.size == clients.inner.size[0])),
            chunk=chunk,
            axis=(HOST, AXIS) if shares else AXIS if mesh else None,
            clock=self.clock,
            available_population=available_population(self.clock, clients),
            shares=shares,
            submodel_plan=SubmodelPlan.of(algorithm, problem, clients, carry.state.x, carry.state.y, away),
        )
        require(not (shares and layout.submodel_plan), "Clients.capacity", "given", "None with several processes")
        stream = is_memory_mapped(clients) if self.stream is None else self.stream
        together = not algorithm.asks.asynchronous or not (stream or shares)
        how = "streamed samples" if stream else "several processes"
        require(together, "algorithm", algorithm.label, f"one that waits for all, with {how}")
        make: Callable[..., Any] = Streamed if stream else Resident
        if shares:
            assert mesh is not None
            group.meet(mesh)
        return LocalRun(
            algorithm, layout, make(clients, layout, key, mesh, self.prefetch), mesh, key, clients, problem, group
        )

    @staticmethod
    def forget() -> None:
        """Free the compiled programs that this process keeps for later runs, the latest 32."""
        PROGRAMS.clear()

    @staticmethod
    def series() -> AbstractContextManager[None]:
        """`with fb.Local.series():` around runs of your own, as in sweeps: what was traced is not traced again.

        A further run with other step sizes, seeds, weights or samples of the same shapes then begins almost at once.
        Within it a loss that is the same object must stay the same function: nothing that it reads may change.
        """
        return series()

    @staticmethod
    def keep_on_disk(folder: str | Path | None = None, megabytes: int = MEGABYTES) -> Path:
        """Keep compiled programs on disk for later processes, as the command line does: JAX's persistent cache.

        Args:
            folder: None is fedbilevel/programs in the user's cache, or, where it is set, JAX_COMPILATION_CACHE_DIR,
                whose other settings then stay as they are.
            megabytes: beyond these the programs that were not used for longest are removed.

        Returns:
            The folder; a later call may choose another one.

        Raises:
            ConfigurationError: the folder cannot be written, or the package filelock is missing; all stays as it was.
        """
        return keep_on_disk(folder, megabytes)

    def mesh(self, group: ProcessGroup) -> Mesh | None:
        """The devices to use: none named where one will do, else one axis, or two where there are several processes."""
        joined = jax.process_count() == group.processes
        require(joined, "jax.distributed.initialize", "called", "left to fedbilevel.engines.multihost.join")
        own = [[d for d in jax.devices() if d.process_index == process] for process in range(group.processes)]
        available = min(map(len, own))
        whose = "this machine" if len(own) == 1 else "the machine with the fewest"
        require(
            self.devices <= available,
            "Local.devices",
            self.devices,
            f"at most {available}, the devices of {whose}",
        )
        chosen = np.array([devices[: self.devices] for devices in own])
        if len(own) > 1:
            return Mesh(chosen, (HOST, AXIS))
        return Mesh(chosen[0], (AXIS,)) if self.devices > 1 else None


def longest_in_steps(sizes: np.ndarray) -> int:
    """How many samples a client's whole batch is padded to: the most that a client has; where clients are small and
    unequal, up to a quarter more, so that populations of like sizes share a program."""
    longest = int(sizes.max())
    if longest >= FEW or np.all(sizes == longest):
        return longest
    step = max(1, 2 ** (longest.bit_length() - 3))
    return -(-longest // step) * step


def default_chunk(state: PyTree, clients: Clients, share: int, lumpy: bool) -> int:
    """How many clients to vectorise together; `lumpy`: a device's part of a cohort is random, `share` on average."""
    if lumpy:
        share = -(-share // 2)  # places are played chunk by chunk: of the last one some are empty
    if nbytes(state) <= SMALL_STATE:
        return share
    if jax.default_backend() == "cpu":
        return 1
    return share if clients.local_steps is None else -(-share // 4)  # a chunk lasts as long as its slowest client


class LocalRun:
    """A compiled program, its data, and the host's side of it."""

    def __init__(
        self,
        algorithm: Algorithm,
        layout: ProgramLayout,
        source: Any,
        mesh: Mesh | None,
        key: Array,
        clients: Clients,
        problem: Problem,
        group: ProcessGroup,
    ) -> None:
        self.algorithm, self.layout, self.source, self.mesh, self.key = algorithm, layout, source, mesh, key
        self.clients, self.problem, self.group = clients, problem, group
        self.local_steps = clients.local_steps if isinstance(clients.local_steps, tuple) else None
        self.pace, self.asynchronous = layout.clock.pace(len(clients)), algorithm.asks.asynchronous
        if layout.shares:
            self.algorithm, self.key, self.pace = replicate((algorithm, key, self.pace), mesh)
        self.program: Program | None = None
        self.compile_seconds = 0.0

    def advance(self, carry: Carry, rounds: int) -> Stretch:
        data, table, ids = self.source.inputs(int(carry.round))
        inputs = ProgramInputs(self.algorithm, data, table, ids, self.key, self.pace)
        if self.layout.shares:
            carry = replicate(carry, self.mesh)
        if self.program is None:
            self.program = self.compile(carry, inputs)
        count = min(rounds, self.source.rounds_per_call)
        with self.group.exchange():
            carry, done, rows, finite = self.program.run(carry, count, inputs)
        costs = unpacked(rows, self.program.costs)
        good = carry.queues is None  # else the bad round has changed them
        if not np.all(finite) and not (good and done):  # with both the next call begins with the bad round
            try:
                self.explain(carry, finite, sorted(costs.metrics))
            except NonFiniteError as error:
                error.carry = carry if good else None
                raise
        return Stretch(carry, done, costs)

    def compile(self, carry: Carry, inputs: ProgramInputs) -> Program:
        began = time.perf_counter()
        program = recalled(self.key_in_series(carry, inputs), lambda: self.made(carry, inputs))
        self.compile_seconds = time.perf_counter() - began
        return program

    def key_in_series(self, carry: Carry, inputs: ProgramInputs) -> Hashable | None:
        """All that the program depends on; None where that is not told by a few plain values."""
        layout = self.layout
        if layout.shares or layout.submodel_plan:
            return None
        plain = {one.name: getattr(layout, one.name) for one in fields(layout) if one.name not in ("problem", "ask")}
        plain["clock"] = replace(layout.clock, seed=0)  # its tables are among the inputs
        source = type(self.source), self.source.rounds_per_call, self.mesh
        return self.problem.key("rounds", *plain.values(), *source, self.local_steps, shapes_of((carry, inputs)))

    def made(self, carry: Carry, inputs: ProgramInputs) -> Program:
        try:
            return self.compiled(carry, inputs, quick_keys=True)
        except (ConfigurationError, NotImplementedError, TypeError):  # a method may need keys of JAX's own kind
            return self.compiled(carry, inputs, quick_keys=False)

    def compiled(self, carry: Carry, inputs: ProgramInputs, quick_keys: bool) -> Program:
        """The compiled program, that of an earlier run where tracing gives the same.

        `quick_keys`: with keys of the same bits whose program compiles quickly, see `written_out`.
        """

        @partial(jax.jit, inline=True)  # traced once, here; the loop over rounds takes up what this gives
        def play(carry: Carry, inputs: ProgramInputs) -> tuple[Carry, RoundCosts, Array]:
            return self.one_round(carry, inputs._replace(key=written_out(inputs.key)) if quick_keys else inputs)

        doing(TRACING)
        _, costs, finite = jax.eval_shape(play, carry, inputs)
        shares = self.layout.shares
        everywhere = NamedSharding(self.mesh, PartitionSpec()) if self.mesh and shares else None
        (held, held_tree), (own, own_tree) = map(jax.tree.flatten, parted(carry))
        given, inputs_tree = jax.tree.flatten(inputs)
        arguments = held, own, np.int32(1), given

        def rounds(
            held: list[Any], own: list[Any], count: Array, given: list[Any]
        ) -> tuple[list[Any], Array, dict[str, Array], Array]:
            state, local_x = jax.tree.unflatten(held_tree, held)
            whole = jax.tree.unflatten(own_tree, own)._replace(state=state, local_x=local_x)
            inputs = jax.tree.unflatten(inputs_tree, given)
            whole, done, rows, good = self.rounds(play, costs, finite, whole, count, inputs)
            return jax.tree.leaves(whole._replace(local_x=None)), done, rows, good

        traced = jax.jit(rounds, donate_argnums=1, out_shardings=everywhere).trace(*arguments)

        def finish() -> Any:
            doing(COMPILING)
            return traced.lower().compile()

        key = None if shares else program_key(traced.jaxpr, arguments, self.mesh)
        carry_tree = jax.tree.structure(carry._replace(local_x=None))
        return Program(PROGRAMS.get(key, finish), carry_tree, costs)

    def rounds(
        self,
        play: Callable[[Carry, ProgramInputs], tuple[Carry, RoundCosts, Array]],
        like: RoundCosts,
        flags: jax.ShapeDtypeStruct,
        carry: Carry,
        count: Array,
        inputs: ProgramInputs,
    ) -> tuple[Carry, Array, dict[str, Array], Array]:
        """Up to `count` rounds, fewer where the algorithm has finished; stops before committing a state not finite.

        The trip count is an argument, so that the same program, hence the same bits, serve any partition of a run.

        Args:
            play: one round; see `one_round`.
            like, flags: its costs, and what says whether it is finite, as shapes.

        Returns:
            The carry, the rounds done, a row of packed costs for each, and what was finite in the last one.
        """
        row = jax.eval_shape(packed, like)
        rows = jax.tree.map(lambda s: jnp.zeros((self.source.rounds_per_call, *s.shape), s.dtype), row)

        def unfinished(loop: tuple[Carry, Array, dict[str, Array], Array]) -> Array:
            return (loop[1] < count) & jnp.all(loop[3]) & jnp.logical_not(inputs.algorithm.finished(loop[0].state))

        def step(loop: tuple[Carry, Array, dict[str, Array], Array]) -> tuple[Carry, Array, dict[str, Array], Array]:
            carry, done, rows, _ = loop
            new, costs, finite = play(carry, inputs)
            good = jnp.all(finite)
            kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, carry) if new.queues is None else new
            rows = jax.tree.map(partial(lax.dynamic_update_index_in_dim, index=done, axis=0), rows, packed(costs))
            return kept, done + good, rows, finite

        return lax.while_loop(unfinished, step, (carry, jnp.zeros((), jnp.int32), rows, jnp.ones(flags.shape, bool)))

    def one_round(self, carry: Carry, inputs: ProgramInputs) -> tuple[Carry, RoundCosts, Array]:
        """One round, its costs, and whether each floating leaf of the new state and each metric is finite."""
        keys = round_keys(inputs.key, carry.round)
        ids, where, members = self.cohort(keys, inputs)
        if self.layout.submodel_plan:  # whose clients keep nothing
            underway = ExchangeState(None, carry.now, None)
        elif self.asynchronous:  # everyone, in order: what clients keep is not moved about
            pad = partial(padded, extra=members[0].id.shape[0] - len(self.clients))
            underway = ExchangeState(pad(carry.clients), carry.now, with_tables(carry.queues, pad))
        else:
            states = rows_at(carry.clients, members[0].id)
            underway = ExchangeState(states, carry.now, None)
        algorithm = at(inputs.algorithm, carry.round)

        def play(
            members: Any,
            underway: ExchangeState,
            algorithm: Algorithm,
            state: Any,
            now: tuple[Array, RoundKeys],
            inputs: ProgramInputs,
        ) -> Any:
            round, keys = now
            given = (
                self.layout,
                algorithm,
                inputs.data,
                inputs.pace,
                members,
                underway,
                partial(self.fresh, keys, inputs),
            )
            plan = self.layout.submodel_plan
            x, y = state.x, state.y
            submodels = None if plan is None else RoundSubmodels(plan, algorithm, inputs.key, round, x, y)
            fed = LocalFed(*given, submodels)
            state = next_state(algorithm, fed, state, keys.algorithm)
            return state, fed.underway, fed.total_costs()

        if self.mesh:
            spread, same = PartitionSpec(self.layout.axis), PartitionSpec()
            held: Any = PartitionSpec(HOST) if self.layout.shares else same  # the samples
            inputs_are: Any = ProgramInputs._make((same, held, same, same, same, same))
            desk_is = with_tables(
                jax.tree.map(lambda _: same, carry.queues), lambda table: jax.tree.map(lambda _: spread, table)
            )
            underway_is: Any = ExchangeState._make((spread, same, desk_is))
            play = jax.shard_map(  # check_vma=False: what phases compute stays per device, without annotations
                play,
                mesh=self.mesh,
                in_specs=(spread, underway_is, same, same, same, inputs_are),
                out_specs=(same, underway_is, same),
                check_vma=False,
            )
        state, underway, round_costs = play(members, underway, algorithm, carry.state, (carry.round, keys), inputs)
        # the places that pad the cohort are dropped here
        if self.asynchronous:
            cut = partial(jax.tree.map, lambda leaf: leaf[: len(self.clients)])
            clients, queues = cut(underway.states), with_tables(underway.queues, cut)
        else:
            clients = jax.tree.map(lambda full, new: full.at[ids].set(new[where]), carry.clients, underway.states)
            queues = None
        flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(state) if is_floating(leaf)]
        flags += [jnp.isfinite(round_costs.metrics[name][0]) for name in sorted(round_costs.metrics)]
        return (
            Carry(carry.round + 1, state, clients, underway.now, queues, carry.local_x),
            round_costs,
            jnp.stack(flags),
        )

    def fresh(self, keys: RoundKeys, inputs: ProgramInputs, number: Array | int) -> tuple[Members, ...]:
        """This device's share of the round's fresh cohort of that number."""
        *_, members = self.cohort(keys.of_fresh(number), inputs, number + 1)
        if self.mesh is None:
            return members
        devices, mine = self.mesh.size, lax.axis_index(self.layout.axis)

        def of_this_device(column: Array) -> Array:
            share = column.shape[0] // devices
            return lax.dynamic_slice_in_dim(column, mine * share, share)

        return jax.tree.map(of_this_device, members)

    def cohort(
        self, keys: RoundKeys, inputs: ProgramInputs, place: Array | int = 0
    ) -> tuple[Array, Any, tuple[Members, ...]]:
        """A cohort.

        Returns:
            Its ids, (P,); their places among the members; the members of each class of capacity, padded and sorted by
            work. Without capacities there is one class.
        """
        size = self.layout.cohort
        if inputs.ids is None:
            ids = draw_cohort(keys.cohort, self.layout.population, size)
            members = inputs.table if size == self.layout.population else rows_at(inputs.table, ids)
        else:  # the cohort at `place` of those that the source gathered
            ids, members = jax.tree.map(lambda column: column[place], (inputs.ids, inputs.table))
        if self.local_steps is not None:
            members = members._replace(work=work_of(keys.work, ids, self.local_steps))
        everyone = jnp.ones(size, jnp.result_type(float))  # where nobody is masked a constant: nothing is multiplied
        members = members._replace(counts=everyone * inputs.pace.ever_available(ids))
        if members.work is not None and not self.asynchronous:
            order = jnp.argsort(members.work)  # chunks of like work: a chunk lasts as long as its slowest
            ids, members = ids[order], jax.tree.map(lambda column: column[order], members)
        if shares := self.layout.shares:
            where, member, taken = shares.place(ids, shares.places(size, self.layout.chunk))
            members = jax.tree.map(lambda column: column[member], members)
            return ids, where, (members._replace(counts=members.counts * taken),)
        if submodel_plan := self.layout.submodel_plan:
            return (
                ids,
                slice(size),
                tuple(self.of_class(members, number) for number in range(len(submodel_plan.places))),
            )
        return ids, slice(size), (self.in_chunks(members, self.layout.chunk),)

    def of_class(self, members: Members, number: int) -> Members:
        """Places for as many members as a class of capacity can have in a cohort; members fill the first ones."""
        assert self.layout.submodel_plan is not None
        places = min(self.layout.cohort, self.layout.submodel_plan.places[number])
        order = jnp.argsort(members.number != number, stable=True)[:places]
        members = jax.tree.map(lambda column: column[order], members)
        members = members._replace(counts=members.counts * (members.number == number))
        return self.in_chunks(members, chunk_of(self.layout, number))

    def in_chunks(self, members: Members, chunk: int) -> Members:
        """Members and places that count for nothing, chunks of the same number for each device."""
        size = members.id.shape[0]
        places = np.arange(size + -size % (chunk * (self.mesh.size if self.mesh else 1)))
        if len(places) == size:
            return members
        taken = np.minimum(places, size - 1)  # gathered: XLA's partitioner loses track of concatenations
        members = jax.tree.map(lambda column: column[taken], members)
        return members._replace(counts=members.counts * (places < size))

    def explain(self, carry: Carry, finite: np.ndarray, metrics: list[tuple[str, str]]) -> None:
        """Play the failing round again, client by client, and raise what it finds."""
        round = int(carry.round)
        leaves = jax.tree_util.tree_leaves_with_path(carry.state)
        names = [f"server update: {jax.tree_util.keystr(path)}" for path, leaf in leaves if is_floating(leaf)]
        names += [f"phase {phase}: {metric}" for phase, metric in metrics]
        bad = ", ".join(name for name, good in zip(names, finite, strict=True) if not good)
        algorithm, key, carry = local((self.algorithm, self.key, carry))  # every process plays it all by itself
        if carry.queues is not None:  # what clients kept is gone with the round; their replies are still on the queues
            bad += "".join(f"; {name}" for name in nonfinite_replies(carry.queues))
        else:
            clock, submodel_plan = self.layout.clock, self.layout.submodel_plan
            replay = ReferenceRun(algorithm, self.problem, self.clients, self.layout.cohort, key, clock, submodel_plan)
            replay.advance(carry, 1)  # raises, unless the compiler's rounding alone overflowed
        raise diverged(f"round {round}, ", bad)

    def close(self) -> None:
        self.source.close()


def padded(tree: PyTree, extra: int) -> PyTree:
    """Leaves (n, ...) with the first row once more at the end, so many times."""
    if not extra:
        return tree
    return jax.tree.map(lambda a: jnp.concatenate([a, jnp.broadcast_to(a[:1], (extra, *a.shape[1:]))]), tree)
