"""Define `Local`, the fast engine, on one machine or several: a compiled program runs many rounds."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import (
    CheckpointWarning,
    ConfigurationError,
    NonFiniteError,
    diverged,
    require,
    require_count,
    warn,
)
from fedbilevel.core.on_disk import on_disk, read, write
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, is_floating, nbytes, on_device
from fedbilevel.engines.costs import unpacked
from fedbilevel.engines.engine import (
    Carry,
    Cohort,
    Stretch,
    available_population,
    check_availability,
    check_drawn_again,
    check_own_parts,
    check_simulated,
)
from fedbilevel.engines.evaluation import PerClient, PerClientEvaluation, PerClientRow
from fedbilevel.engines.fingerprint import method_key, of_rules
from fedbilevel.engines.in_flight import nonfinite_replies
from fedbilevel.engines.local.fed import AXIS, HOST, ProgramLayout
from fedbilevel.engines.local.placement import Shares
from fedbilevel.engines.local.rounds import Program, ProgramInputs, Rounds
from fedbilevel.engines.local.samples import Resident, Streamed, is_memory_mapped, local, replicate
from fedbilevel.engines.machine import advise_of_cores, keep_on_disk, trim_heap
from fedbilevel.engines.multihost import meet
from fedbilevel.engines.process_group import ProcessGroup, current_group
from fedbilevel.engines.reference import ReferenceRun
from fedbilevel.engines.submodels import SubmodelPlan
from fedbilevel.engines.virtual_time import Clock
from fedbilevel.machinery.kept import forget, kept, shapes_of
from fedbilevel.machinery.threefry import about_keys

FEW = 64  # a client with fewer samples is small (see `longest_in_steps`)
CACHE = 2**18  # the bytes of clients' states for a core: a part of its second-level cache, which also holds samples
TOGETHER = 2**28  # the most bytes of clients' states on a GPU at once; intermediate values take a multiple of this
MUCH_STATE = 10**6  # if a cohort has fewer bytes of states, devices wait for each other longer than they compute


@dataclass(frozen=True)
class Local:
    """Simulate clients on this machine's devices, or on those of all processes that called `multihost.join`.

    Args:
        chunk: the number of clients that are vectorised together. None: the engine chooses it. On a GPU, a chunk has
            all clients, or as many as have at most 256 MiB of states; if clients do unequal work, there are at least
            four chunks, sorted by work. On a CPU, a chunk has as many clients as fit with their states into the cache
            of a core, and at least one.
        devices: the number of devices of each process over which a cohort is distributed. None chooses it: all devices
            of a CPU, one for each core, if the cohort's states take more than a megabyte; else 1, as on a GPU and with
            several processes. A resumed run keeps its number.
        stream: whether to keep the samples on the host and copy each round's cohort to the device in advance, for
            populations that do not fit into its memory. None streams if some leaf is a NumPy memory map. In one
            process, the clients' states are then in memory-mapped scratch files in the folder for temporary files,
            which `TMPDIR` names. These states include leaves of y that are each client's own. The folder has to be on a
            disk, and not a tmpfs. With SimFBO it needs as much space as four copies of all own leaves. If step sizes
            adapt, it needs as much space as 13 copies of all own leaves, and, for each client, four copies of the
            shared leaves of y.
        prefetch: the number of rounds that are read in advance when streaming.
        clock: how long exchanges take, in virtual time.
    """

    chunk: int | None = None
    devices: int | None = None
    stream: bool | None = None
    prefetch: int = 2
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        require_count("Local.chunk", self.chunk, optional=True)
        require_count("Local.devices", self.devices, optional=True)
        require_count("Local.prefetch", self.prefetch)

    def start(
        self, algorithm: Algorithm, problem: Problem, clients: Clients, cohort: int | Cohort, key: Array, carry: Carry
    ) -> LocalRun:
        """Prepare a run of the algorithm on simulated clients; `carry` gives shapes and dtypes of all states."""
        check_simulated(clients)
        cohort = Cohort.of(cohort)
        if self.devices is None:
            return self.settled(carry.state, cohort).start(algorithm, problem, clients, cohort, key, carry)
        require(
            self.devices <= cohort.size, "Local.devices", self.devices, f"at most {cohort.size}, the clients of a round"
        )
        check_availability(self.clock, algorithm, len(clients), cohort)
        check_drawn_again(cohort, carry)
        group = current_group()
        mesh, processes = self.mesh(group, self.devices), group.processes
        shares = Shares(len(clients), processes, group.process, self.devices) if processes > 1 else None
        share = -(-cohort.size // (self.devices * processes))  # clients per device, rounded up
        lumpy = shares is not None and cohort.some(len(clients))
        chunk = min(self.chunk or default_chunk(carry.state, clients, share, self.devices, lumpy), share)
        away = self.clock.never_available(len(clients))
        stream = self.streams(clients)
        make: type[Streamed | Resident] = Streamed if stream else Resident
        layout = ProgramLayout(
            population=len(clients),
            cohort=cohort,
            fresh=algorithm.asks.fresh_cohorts,
            outer_longest=longest_in_steps(clients.outer.size),
            outer_equal=bool(np.all(clients.outer.size == clients.outer.size[0])),
            inner_longest=longest_in_steps(clients.inner.size),
            inner_equal=bool(np.all(clients.inner.size == clients.inner.size[0])),
            chunk=chunk,
            axis=(HOST, AXIS) if shares else AXIS if mesh else None,
            available=len(clients) - len(away),
            available_population=available_population(self.clock, clients),
            rounds_per_call=make.rounds_per_call,
            shares=shares,
            submodel_plan=SubmodelPlan.of(algorithm, problem, clients, carry.state.x, carry.state.y, away),
        )
        require(not (shares and layout.submodel_plan), "Clients.capacity", "given", "None with several processes")
        require(not (shares and cohort.replacement), "Cohort.replacement", True, "False with several processes")
        together = not algorithm.asks.asynchronous or not (stream or shares)
        how = "streamed samples" if stream else "several processes"
        require(together, "algorithm", algorithm.label, f"a method that waits for all clients, with {how}")
        if shares:
            assert mesh is not None
            meet(group, mesh)
        source = make(clients, layout, key, mesh, self.prefetch)
        return LocalRun(algorithm, layout, source, mesh, key, clients, problem, group, self.clock)

    def streams(self, clients: Clients) -> bool:
        """Return whether a run with these clients keeps the samples on the host."""
        return is_memory_mapped(clients) if self.stream is None else self.stream

    def keeps_states_on_disk(self, clients: Clients) -> bool:
        """Return whether a run with these clients keeps their states in scratch files."""
        return self.streams(clients) and current_group().processes == 1

    forget = staticmethod(forget)
    keep_on_disk = staticmethod(keep_on_disk)

    def settled(self, state: PyTree, cohort: Cohort, before: int | None = None) -> Local:
        """Choose the number of devices if it is None: the number before the run was resumed, or `default_devices`."""
        if self.devices is not None:
            return self
        if current_group().processes > 1:
            return replace(self, devices=1)
        wanted, there = before or default_devices(state, cohort), jax.local_device_count()
        if wanted > there:
            text = (
                f"the run began on {wanted} devices and continues on {there}, all that this machine has: its numbers "
                "agree to rounding with those on as many devices as before"
            )
            warn(CheckpointWarning(text))
        return replace(self, devices=min(wanted, there))

    def mesh(self, group: ProcessGroup, devices: int) -> Mesh | None:
        """Return the mesh of devices: with one axis, or two if there are several processes; None for one device."""
        joined = jax.process_count() == group.processes
        require(joined, "jax.distributed.initialize", "called", "left to fedbilevel.engines.multihost.join")
        own = [[d for d in jax.devices() if d.process_index == process] for process in range(group.processes)]
        available = min(map(len, own))
        whose = "this machine" if len(own) == 1 else "the machine with the fewest"
        more = "; fb.tune_cpu(n) before JAX's first computation presents a CPU as n devices"
        allowed = f"at most {available}, the devices of {whose}{more if jax.default_backend() == 'cpu' else ''}"
        require(devices <= available, "Local.devices", devices, allowed)
        chosen = np.array([of_process[:devices] for of_process in own])
        if len(own) > 1:
            return Mesh(chosen, (HOST, AXIS))
        return Mesh(chosen[0], (AXIS,)) if devices > 1 else None


def longest_in_steps(sizes: np.ndarray) -> int:
    """Return the number of samples to which a client's full batch is padded.

    It is the largest number of any client. If clients are small and unequal, it is up to a quarter larger, so that
    populations of similar sizes share a program.
    """
    longest = int(sizes.max())
    if longest >= FEW or np.all(sizes == longest):
        return longest
    step = max(1, 2 ** (longest.bit_length() - 3))
    return -(-longest // step) * step


def default_devices(state: PyTree, cohort: Cohort) -> int:
    """Choose the number of devices for a cohort: on a CPU with large states as many as get clients, and otherwise 1.

    With small states, the sum over devices takes longer than the clients' work: two devices took many times as long as
    one.
    """
    if jax.default_backend() != "cpu" or cohort.size * nbytes(state) <= MUCH_STATE or cohort.size == 1:
        return 1
    advise_of_cores()
    share = -(-cohort.size // jax.local_device_count())
    return -(-cohort.size // share)


def default_chunk(state: PyTree, clients: Clients, share: int, devices: int, lumpy: bool) -> int:
    """Choose how many clients to vectorise together.

    On a CPU the states of a chunk's clients fill a core's cache. A single device, for which several cores work, gets
    chunks of twice this size. The chunk is smaller if more than a tenth of all places would be empty. With states of
    4 kB and 40 kB, and cohorts of 1,000 and 100, this took a third to a seventh of the time of a single chunk. On a GPU
    with 1,000 states of 210 kB, chunks of 50 took 1.27 times as long as a single chunk, and chunks of 250 took 1.13
    times as long; 10,000 clients at once did not fit into 80 GB.

    Args:
        state: the server's state, whose size is that of a client's state.
        clients: the population.
        share: the number of clients per device.
        devices: the number of devices.
        lumpy: whether the number of a cohort's clients on a device is random.
    """
    if lumpy:
        share = -(-share // 2)  # a device often has fewer clients; chunks without clients are skipped
    if jax.default_backend() != "cpu":
        parts = 4 if clients.own else 1  # a chunk lasts as long as its slowest client
        return -(-share // max(parts, -(-share * nbytes(state) // TOGETHER)))
    most = min(share, max(1, CACHE * (1 + (devices == 1)) // max(1, nbytes(state))))
    return next(chunk for chunk in range(most, 0, -1) if 10 * (-share % chunk) <= share)


@dataclass(eq=False)
class LocalRun:
    """Hold a compiled program and its data, and run it from the host."""

    algorithm: Algorithm
    layout: ProgramLayout
    source: Resident | Streamed
    mesh: Mesh | None
    key: Array
    clients: Clients
    problem: Problem
    group: ProcessGroup
    clock: Clock
    program: Program | None = None
    compile_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.pace, self.own = self.clock.pace(len(self.clients)), on_device(self.clients.own)
        plan = self.layout.submodel_plan
        self.classes = None if plan is None else on_device((plan.number, plan.rank))
        if self.layout.shares:
            everywhere = self.algorithm, self.key, self.pace, self.own
            self.algorithm, self.key, self.pace, self.own = replicate(everywhere, self.mesh)

    def advance(self, carry: Carry, rounds: int) -> Stretch:
        data, table, ids = self.source.inputs(int(carry.round))
        inputs = ProgramInputs(self.algorithm, data, table, ids, self.key, self.pace, self.own, self.classes)
        before, tables, members, rows_before, undo = carry, None, np.zeros(0, np.int32), None, None
        if self.source.states_on_disk:
            tables, members = on_disk(carry.clients), np.asarray(ids)[0]
            round, now = jax.tree.map(jnp.copy, (carry.round, carry.now))  # the program consumes them
            before = carry._replace(round=round, clients=tables, now=now)
            rows_before = read(tables, members)
            carry = carry._replace(clients=rows_before)
        if self.layout.shares:
            carry = replicate(carry, self.mesh)
        if self.program is None:
            self.program = kept(self.program_key(carry, inputs), lambda: self.compile(carry, inputs))
        count = min(rounds, self.layout.rounds_per_call)
        with self.group.exchange():
            carry, done, rows, finite = self.program.run(carry, count, inputs)
        if self.source.states_on_disk:
            if done:
                try:
                    check_own_parts(carry)
                except NonFiniteError as error:
                    error.carry, error.costs = before, unpacked(rows, self.program.costs)
                    raise
                write(tables, members, carry.clients)
                undo = partial(write, tables, members, rows_before)
            carry = carry._replace(clients=tables)
        costs = unpacked({kind: row[:done] for kind, row in rows.items()}, self.program.costs)
        good = carry.queues is None  # otherwise the bad round has changed the replies in flight
        if not np.all(finite) and not (good and done):  # after good rounds, the next call begins with the bad round
            try:
                self.explain(carry, finite, sorted(costs.metrics))
            except NonFiniteError as error:
                error.carry, error.costs = carry if good else None, unpacked(rows, self.program.costs)
                raise
        return Stretch(carry, done, costs, undo)

    def program_key(self, carry: Carry, inputs: ProgramInputs) -> Hashable | None:
        """Return a cache key of everything on which the program depends; None if only a trace of it can show this."""
        method = method_key(self.algorithm)
        if self.problem.key is None or method is None or self.layout.shares:
            return None
        shapes = (
            shapes_of(jax.tree.leaves((carry, inputs))),
            str(jax.tree.structure((inputs.ids, self.pace, self.classes))),
        )
        kinds = [(name, type(values)) for name, values in sorted(self.own.items())]
        rules = of_rules(self.own | {"arrivals": self.pace.arrivals}).values()
        return self.problem.key, method, self.layout, self.mesh, shapes, *kinds, *rules

    def compile(self, carry: Carry, inputs: ProgramInputs) -> Program:
        began = time.perf_counter()
        rounds = Rounds(self.problem.over_batches(), self.layout, self.mesh)
        try:
            return rounds.program(carry, inputs, quick_keys=True)
        except (ConfigurationError, NotImplementedError, TypeError) as error:  # a method may need JAX's own keys
            if not about_keys(error):
                raise
        finally:
            self.compile_seconds = time.perf_counter() - began
        return rounds.program(carry, inputs, quick_keys=False)

    def explain(self, carry: Carry, finite: np.ndarray, metrics: list[tuple[str, str]]) -> None:
        """Run the failing round again, client by client, and raise an error that names what is not finite."""
        round = int(carry.round)
        leaves = jax.tree_util.tree_leaves_with_path(carry.state)
        names = [f"server update: {jax.tree_util.keystr(path)}" for path, leaf in leaves if is_floating(leaf)]
        names += [f"phase {phase}: {metric}" for phase, metric in metrics]
        bad = [name for name, good in zip(names, finite, strict=True) if not good]
        algorithm, key, carry = local((self.algorithm, self.key, carry))  # every process runs the whole round
        if carry.queues is not None:  # the clients' earlier states are lost; their replies are still in the queues
            bad += nonfinite_replies(carry.queues)
        else:
            clock, submodel_plan = self.clock, self.layout.submodel_plan
            replay = ReferenceRun(algorithm, self.problem, self.clients, self.layout.cohort, key, clock, submodel_plan)
            replay.one_round(carry)  # raises an error, unless the round is finite here, with other rounding errors
        raise diverged(bad, round)

    def per_client(self, metrics: Mapping[str, PerClient], fixed: tuple[PyTree, PyTree]) -> PerClientRow:
        return PerClientEvaluation(metrics, self.clients, fixed, self.group, self.problem.own, self.problem.local)

    def close(self) -> None:
        self.source.close()
        if self.compile_seconds:  # otherwise this run has used programs of earlier runs
            trim_heap()
