"""The engine that reaches real clients: `solve` on a server, its exchanges over Flower's Grid."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flwr.serverapp import Grid
from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.config import at
from fedbilevel.core.errors import ExchangeError, NonFiniteError, diverged, require
from fedbilevel.core.problem import Problem
from fedbilevel.core.remote import RemoteClients
from fedbilevel.core.tree import nonfinite_leaves
from fedbilevel.engines.cohort import RoundKeys, round_keys
from fedbilevel.engines.costs import add_costs, empty_costs, in_parts, stack_costs
from fedbilevel.engines.engine import Carry, Stretch
from fedbilevel.engines.evaluation import PerClient
from fedbilevel.engines.submodels import RoundSubmodels, SubmodelPlan
from fedbilevel.engines.virtual_time.clock import TICK
from fedbilevel.engines.virtual_time.in_flight import InFlight, PhaseQueue
from fedbilevel.flower.clock import Clock, WallClock
from fedbilevel.flower.contract import draw_up
from fedbilevel.flower.courier import Courier
from fedbilevel.flower.credentials import public_keys
from fedbilevel.flower.exchange_log import ExchangeLog
from fedbilevel.flower.fed import FlowerFed
from fedbilevel.flower.lanes import Lanes
from fedbilevel.flower.measuring import Measuring
from fedbilevel.flower.norms import Norms
from fedbilevel.flower.records import Post
from fedbilevel.flower.roster import Roster
from fedbilevel.flower.submodels import SubmodelFlowerFed, contracts
from fedbilevel.flower.terms import Rests, Terms
from fedbilevel.flower.undoing import SpoiledError, Undoing
from fedbilevel.flower.versions import require_flower, tested
from fedbilevel.flower.wire import is_run


@dataclass(frozen=True, kw_only=True)
class Flower:
    """Reach clients through Flower.

    Args:
        grid: what Flower gives to a ServerApp's main, or an `InProcess` one.
        terms: what is expected of clients.
        name: of the whole run, 8 to 64 hexadecimal digits, the same when it is resumed: clients keep their state under
            it. Where an algorithm has clients keep any, a run resumes from its last round alone: save every round
            (`checkpoint_every=1`). An asynchronous one resumes without the answers that were under way, so not
            bit for bit: see docs/federation.md.
        log: a file that gets one JSON line for each exchange.
        keys: a folder with every client's public key, client-0.pub, client-1.pub, …; a node then counts as a client
            only if it has registered with that client's key. None: any registered node may be any absent client.
    """

    grid: Grid
    terms: Terms = field(default_factory=Terms)
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    log: str | Path | None = None
    keys: str | Path | None = None

    def __post_init__(self) -> None:
        require(is_run(self.name), "Flower.name", self.name, "8 to 64 hexadecimal digits, in lower case")

    def start(
        self, algorithm: Algorithm, problem: Problem, clients: RemoteClients, cohort: int, key: Array, carry: Carry
    ) -> FlowerRun:
        known = isinstance(clients, RemoteClients)
        require(known, "clients", type(clients).__name__, "RemoteClients: what a server knows of them")
        whole = not algorithm.needs_everyone or cohort == len(clients)
        require(whole, "cohort", cohort, f"None: {algorithm.label} needs all clients in every round")
        return FlowerRun(self, algorithm, problem, clients, cohort, key, carry)


class FlowerRun:
    """A run in progress. State and round live in the carry; here is only who is there."""

    compile_seconds = 0.0

    def __init__(
        self,
        engine: Flower,
        algorithm: Algorithm,
        problem: Problem,
        clients: RemoteClients,
        cohort: int,
        key: Array,
        carry: Carry,
    ) -> None:
        self.algorithm, self.problem, self.clients, self.cohort, self.key = algorithm, problem, clients, cohort, key
        self.name, self.terms, self.weights = engine.name, engine.terms, clients.weights
        has_client_steps = clients.local_steps is not None
        start = carry.state.x if carry.own_x is None else carry.own_x, carry.state.y
        self.contract = draw_up(algorithm, problem, *start, clients.examples(), has_client_steps)
        self.submodel_plan = SubmodelPlan.of(algorithm, problem, clients, *start)
        self.clock: Clock = getattr(engine.grid, "clock", None) or WallClock()
        if isinstance(self.clock, WallClock):
            pull_quickly(self.terms.deadline)
        post = Post(engine.grid)
        own = {} if self.submodel_plan is None else contracts(self.contract, self.submodel_plan)
        keys = {} if engine.keys is None else public_keys(Path(engine.keys), len(clients))
        self.roster = Roster(post, self.contract, self.name, len(clients), self.terms, self.clock, own, keys)
        self.courier = Courier(post, self.roster, self.terms, self.clock)
        self.rests, self.norms = Rests(), Norms(self.terms)
        self.undoing = Undoing(self)
        self.counted = np.array(carry.clients)  # (M, 2): round and exchange of each client's last answer that counted
        self.settled = self.counted.copy()  # the same before this round
        self.lanes = Lanes.of(carry.queues)
        self.seconds = 0.0  # in rounds
        self.exchange_log = ExchangeLog(None if engine.log is None else Path(engine.log))
        self.gather_clients()

    def gather_clients(self) -> None:
        """Wait for the population; go on with a quorum of it."""
        everyone = list(range(len(self.clients)))
        needed = self.terms.needed(len(everyone))
        self.roster.wait(everyone, len(everyone), needed)
        if (here := len(self.roster.nodes)) < needed:
            reasons = "; ".join(sorted(set(self.roster.refusals.values()))[:3])
            told = f" ({reasons})" if reasons else ""
            raise ExchangeError(f"{here} clients are here where {needed} of {len(everyone)} are needed{told}")

    def advance(self, carry: Carry, rounds: int) -> Stretch:
        """One round, and again what has to be undone; of that only the costs are left."""
        end, began, undone = int(carry.round) + 1, self.clock.time(), empty_costs()
        self.undoing.times = 0
        while True:
            fed = self.fed(at(self.algorithm, carry.round), round_keys(self.key, int(carry.round)), carry)
            try:
                carry = self.play(fed, carry)
            except (SpoiledError, NonFiniteError) as error:
                carry = self.undoing.back(error)
                self.counted = np.array(carry.clients)
            except ExchangeError as error:
                if int(carry.round) == end - 1:
                    raise
                raise SpoiledError(str(error), 0, carry) from error  # what it was to go on from is not to be kept
            else:
                if int(carry.round) == end:
                    break
            undone = add_costs(undone, fed.round_costs._replace(metrics={}))
        before, self.seconds = self.seconds, self.seconds + self.clock.time() - began
        ticks = round_ticks(self.seconds) - round_ticks(before)  # of the totals: they do not drift
        costs = stack_costs([add_costs(undone, fed.total_costs())])
        return Stretch(carry, 1, costs._replace(privacy=fed.privacy, time=in_parts(ticks)[None]))

    def play(self, fed: FlowerFed, carry: Carry) -> Carry:
        """The round that the carry begins."""
        self.settled = self.counted.copy()
        self.undoing.begin(carry, fed.own)
        state = fed.algorithm.round(fed, carry.state, fed.keys.algorithm)
        if bad := nonfinite_leaves(state):
            raise diverged(f"round {fed.round}, server update: ", ", ".join(bad))
        self.undoing.end()
        counted, queues = jnp.asarray(self.counted), self.queues(fed, carry.queues)
        return Carry(carry.round + 1, state, counted, carry.now, queues, carry.own_x)

    def fed(self, algorithm: Algorithm, keys: RoundKeys, carry: Carry) -> FlowerFed:
        """The exchanges of the round that the carry begins."""
        given = self, algorithm, int(carry.round), keys
        if self.submodel_plan is None:
            return FlowerFed(*given)
        start = carry.state.x, carry.state.y
        return SubmodelFlowerFed(*given, RoundSubmodels(self.submodel_plan, algorithm, self.key, carry.round, *start))

    def queues(self, fed: FlowerFed, queues: InFlight | None) -> InFlight | None:
        """What a checkpoint keeps of the lanes: what has come in early counts, and clients go by that it does."""
        if queues is None:
            return None
        lanes = {}
        for phase, lane in queues.lanes.items():
            early, asked, kept = jax.tree.map(jnp.zeros_like, lane.early), 0.0, self.lanes.kept.get(phase, [])
            if kept or phase in self.lanes.resumed:
                sums, asked = fed.early(phase, kept)
                early = jax.tree.map(jnp.asarray, sums._replace(metrics=early.metrics))
            exchanges = jnp.asarray(self.lanes.exchanges[phase], jnp.int32)
            since = jnp.asarray([self.lanes.since[phase][client] for client in range(len(self.clients))], jnp.int32)
            lanes[phase] = PhaseQueue(exchanges, since, lane.answers, early, jnp.asarray(asked, float))
        return queues._replace(lanes=lanes)

    def per_client(self, metrics: Mapping[str, PerClient]) -> Measuring:
        """Who asks clients for their own metrics."""
        return Measuring(self, metrics)

    def close(self) -> None:
        pass


def round_ticks(seconds: float) -> int:
    return round(seconds / TICK)


def pull_quickly(deadline: float) -> None:
    """Shorten Flower's wait for an answer that is announced before it is complete, where its version was tried."""
    if tested(require_flower()):
        from fedbilevel.flower import private

        private.quick_pulls(deadline)
