"""The engine that reaches real clients: `solve` on a server, its exchanges over Flower's Grid."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.authored import next_state
from fedbilevel.core.config import at
from fedbilevel.core.errors import ExchangeError, NonFiniteError, diverged, require
from fedbilevel.core.problem import Problem
from fedbilevel.core.remote import RemoteClients
from fedbilevel.core.tree import nonfinite_leaves
from fedbilevel.engines.cohort import RoundKeys, round_keys
from fedbilevel.engines.costs import add_costs, empty_costs, in_parts, stack_costs
from fedbilevel.engines.engine import Carry, Stretch
from fedbilevel.engines.evaluation import PerClient
from fedbilevel.engines.progress import AWAITING, doing
from fedbilevel.engines.submodels import RoundSubmodels, SubmodelPlan
from fedbilevel.engines.virtual_time.clock import TICK
from fedbilevel.engines.virtual_time.in_flight import InFlight, PhaseQueue
from fedbilevel.flower.server.client_metrics import ClientMetrics
from fedbilevel.flower.server.connections import (
    ClientRegistry,
    Dispatcher,
    ServerClock,
    Transport,
    WallClock,
    public_keys,
)
from fedbilevel.flower.server.fed import FlowerFed, contracts
from fedbilevel.flower.server.session import CorruptedStateError, ExchangeLog, PhaseQueues, Rollback, Session
from fedbilevel.flower.server.terms import Backoff, NormBounds, Terms
from fedbilevel.flower.versions import quick_pulls, require_flower, tested
from fedbilevel.flower.wire.contract import draw_up
from fedbilevel.flower.wire.messages import is_run


@dataclass(frozen=True, kw_only=True)
class Flower:
    """Reach clients through Flower.

    Args:
        grid: what Flower gives to a ServerApp's main, or an `InProcess` one.
        terms: what is expected of clients.
        name: of the whole run, 8 to 64 hexadecimal digits, the same when it is resumed: clients keep their state under
            it. Where an algorithm has clients keep any, a run resumes from its last round alone: save every round
            (`checkpoint_every=1`). An asynchronous one resumes without the answers that were under way, so not
            bit for bit: see docs/how-to/federation.md.
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
        return FlowerRun(open_session(self, algorithm, problem, clients, cohort, carry), key)


class FlowerRun:
    """A run in progress: its carry has the state and the round, its session what is known of clients."""

    compile_seconds = 0.0

    def __init__(self, session: Session, key: Array) -> None:
        self.session, self.key = session, key
        self.seconds = 0.0  # that the rounds so far took
        doing(AWAITING)
        await_clients(session)

    def advance(self, carry: Carry, rounds: int) -> Stretch:
        """One round, with the rounds that are repeated after a rollback. Of a round that was undone only costs stay."""
        session, end, undone = self.session, int(carry.round) + 1, empty_costs()
        began, session.rollback.times = session.clock.time(), 0
        while True:
            fed = self.fed(at(session.algorithm, carry.round), round_keys(self.key, int(carry.round)), carry)
            try:
                carry = self.play(fed, carry)
            except (CorruptedStateError, NonFiniteError) as error:
                carry = session.rollback.back(error)
                session.counted = np.array(carry.clients)
            except ExchangeError as error:
                if int(carry.round) == end - 1:
                    raise
                raise CorruptedStateError(str(error), 0, carry) from error  # its result must not be saved
            else:
                if int(carry.round) == end:
                    break
            undone = add_costs(undone, fed.round_costs._replace(metrics={}))
        before, self.seconds = self.seconds, self.seconds + session.clock.time() - began
        ticks = round_ticks(self.seconds) - round_ticks(before)  # of the totals: they do not drift
        costs = stack_costs([add_costs(undone, fed.total_costs())])
        return Stretch(carry, 1, costs._replace(privacy=fed.privacy, time=in_parts(ticks)[None]))

    def play(self, fed: FlowerFed, carry: Carry) -> Carry:
        """Run the round that begins with this carry."""
        session = self.session
        session.settled = session.counted.copy()
        session.rollback.begin(carry, fed.own)
        state = next_state(fed.algorithm, fed, carry.state, fed.keys.algorithm)
        if bad := nonfinite_leaves(state):
            raise diverged(f"round {fed.round}, server update: ", ", ".join(bad))
        session.rollback.end()
        counted, queues = jnp.asarray(session.counted), self.saved_queues(fed, carry.queues)
        return Carry(carry.round + 1, state, counted, carry.now, queues, carry.own_x)

    def fed(self, algorithm: Algorithm, keys: RoundKeys, carry: Carry) -> FlowerFed:
        """The exchanges of the round that begins with this carry."""
        plan, start = self.session.submodel_plan, (carry.state.x, carry.state.y)
        submodels = None if plan is None else RoundSubmodels(plan, algorithm, self.key, carry.round, *start)
        return FlowerFed(self.session, algorithm, int(carry.round), keys, submodels)

    def saved_queues(self, fed: FlowerFed, queues: InFlight | None) -> InFlight | None:
        """The phase queues as a checkpoint has them: replies that came early are summed, since their clients already
        know that these count."""
        if queues is None:
            return None
        lanes, now = {}, self.session.phase_queues
        for phase, lane in queues.lanes.items():
            early, asked, kept = jax.tree.map(jnp.zeros_like, lane.early), 0.0, now.kept.get(phase, [])
            if kept or phase in now.resumed:
                sums, asked = fed.early(phase, kept)
                early = jax.tree.map(jnp.asarray, sums._replace(metrics=early.metrics))
            exchanges = jnp.asarray(now.exchanges[phase], jnp.int32)
            population = range(len(self.session.clients))
            since = jnp.asarray([now.since[phase][client] for client in population], jnp.int32)
            lanes[phase] = PhaseQueue(exchanges, since, lane.answers, early, jnp.asarray(asked, float))
        return queues._replace(lanes=lanes)

    def per_client(self, metrics: Mapping[str, PerClient]) -> ClientMetrics:
        return ClientMetrics(self.session, metrics)

    def close(self) -> None:
        pass


def open_session(
    engine: Flower, algorithm: Algorithm, problem: Problem, clients: RemoteClients, cohort: int, carry: Carry
) -> Session:
    """The session of a run that begins, or is resumed, with this carry."""
    terms, start = engine.terms, (carry.state.x if carry.own_x is None else carry.own_x, carry.state.y)
    contract = draw_up(algorithm, problem, *start, clients.examples(), clients.local_steps is not None)
    plan = SubmodelPlan.of(algorithm, problem, clients, *start)
    clock: ServerClock = getattr(engine.grid, "clock", None) or WallClock()
    if isinstance(clock, WallClock) and tested(require_flower()):
        quick_pulls(terms.deadline)
    transport = Transport(engine.grid)
    own = {} if plan is None else contracts(contract, plan)
    keys = {} if engine.keys is None else public_keys(Path(engine.keys), len(clients))
    registry = ClientRegistry(transport, contract, engine.name, len(clients), terms, clock, own, keys)
    backoff, log = Backoff(), ExchangeLog(None if engine.log is None else Path(engine.log))
    stateful = contract.state is not None
    return Session(
        name=engine.name,
        algorithm=algorithm,
        problem=problem,
        clients=clients,
        cohort=cohort,
        terms=terms,
        clock=clock,
        contract=contract,
        submodel_plan=plan,
        registry=registry,
        dispatcher=Dispatcher(transport, registry, terms, clock),
        backoff=backoff,
        norms=NormBounds(terms),
        rollback=Rollback(terms, backoff, log, stateful=stateful, asynchronous=algorithm.asynchronous),
        exchange_log=log,
        phase_queues=PhaseQueues.of(carry.queues),
        counted=np.array(carry.clients),
        settled=np.array(carry.clients),
    )


def await_clients(session: Session) -> None:
    """Wait until the population is online; go on with a quorum of it after `Terms.join` seconds.

    Raises:
        ExchangeError: fewer clients are online.
    """
    everyone, registry = list(range(len(session.clients))), session.registry
    needed = session.terms.needed(len(everyone))
    registry.wait(everyone, len(everyone), needed)
    if (here := len(registry.nodes)) < needed:
        reasons = "; ".join(sorted(set(registry.refusals.values()))[:3])
        because = f" ({reasons})" if reasons else ""
        raise ExchangeError(f"{here} clients are here where {needed} of {len(everyone)} are needed{because}")


def round_ticks(seconds: float) -> int:
    return round(seconds / TICK)


def server_app(main: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """A ServerApp whose main is `main`(grid, run configuration), which ends in `solve(…, engine=Flower(grid=grid))`."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid, context.run_config)

    return app
