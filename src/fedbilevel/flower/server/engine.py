"""The engine that reaches real clients: `solve` on a server, its exchanges over Flower's Grid."""

from __future__ import annotations

import math
import secrets
import warnings
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
from fedbilevel.core.errors import AbsenceWarning, ExchangeError, NonFiniteError, diverged, require
from fedbilevel.core.problem import Problem
from fedbilevel.core.remote import RemoteClients
from fedbilevel.core.tree import PyTree, nonfinite_leaves
from fedbilevel.engines.costs import add_costs, empty_costs, in_parts, stack_costs
from fedbilevel.engines.engine import Carry, RoundKeys, Stretch, check_everyone, round_keys
from fedbilevel.engines.evaluation import PerClient, spread
from fedbilevel.engines.history import Row
from fedbilevel.engines.in_flight import InFlight, PhaseQueue
from fedbilevel.engines.progress import AWAITING, doing
from fedbilevel.engines.submodels import RoundSubmodels
from fedbilevel.engines.virtual_time import TICK
from fedbilevel.flower.server.connections import ClientReply
from fedbilevel.flower.server.fed import FlowerFed
from fedbilevel.flower.server.session import CorruptedStateError, Session
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import METRICS, Refusal, RequestMessage, is_run, reading, to_bytes


@dataclass(frozen=True, kw_only=True)
class Flower:
    """Reach clients through Flower.

    Args:
        grid: what Flower gives to a ServerApp's main, or an `InProcess` one.
        terms: what is expected of clients.
        name: of the whole run, 8 to 64 hexadecimal digits, the same when it is resumed: clients keep their state under
            it. Where an algorithm has clients keep any, a run resumes from its last round alone: `solve` saves after
            every round, and refuses a larger `checkpoint_every`. An asynchronous run resumes without the replies that
            were under way, so not bit for bit: see docs/how-to/federation.md.
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
        check_everyone(algorithm, len(clients), cohort)
        own = self.grid, self.terms, self.name, self.log, self.keys
        return FlowerRun(Session(*own, algorithm, problem, clients, cohort, carry), key)


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
        return Carry(carry.round + 1, state, counted, carry.now, queues, carry.local_x)

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
            lanes[phase] = PhaseQueue(exchanges, since, lane.replies, early, jnp.asarray(asked, float))
        return queues._replace(lanes=lanes)

    def per_client(self, metrics: Mapping[str, PerClient]) -> ClientMetrics:
        return ClientMetrics(self.session, metrics)

    def close(self) -> None:
        pass


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


class ClientMetrics:
    """The columns of per-client metrics, over the clients that are online and share them; NAME.clients is their number.

    The questions are no exchange of the algorithm's: nothing of them is in the ledger, and no reply reaches a round.
    """

    def __init__(self, session: Session, metrics: Mapping[str, PerClient]) -> None:
        whole = session.submodel_plan is None
        require(whole, "metrics_per_client", list(metrics), "left out over Flower where clients hold submodels")
        waits = not session.algorithm.asynchronous
        name = session.algorithm.label
        require(waits, "metrics_per_client", list(metrics), f"left out over Flower with {name}, which is asynchronous")
        alike = session.problem.local is None
        require(alike, "metrics_per_client", list(metrics), "left out over Flower where clients keep their own x")
        self.session, self.metrics, self.names, self.warned = session, metrics, sorted(metrics), False

    def __call__(self, round: int, x: PyTree, y: PyTree) -> Row:
        """Ask all clients that are online, wait for responses until the deadline, and summarise them in a row."""
        shared, silent = self.collect(round, to_bytes(jax.tree.map(np.asarray, (x, y))))
        population = len(self.session.clients)
        if len(shared) < population and not self.warned:
            reasons = "; ".join(sorted(set(silent.values()))[:3]) or "they are not online"
            text = f"per-client metrics are those of {len(shared)} of {population} clients ({reasons})"
            warnings.warn(AbsenceWarning(text), stacklevel=4)
            self.warned = True
        row: Row = {}
        for name in self.names:
            row[f"{name}.clients"] = len(shared)
            if shared:
                values = np.array([numbers[name] for numbers in shared.values()])
                row |= spread(name, values, self.session.weights[list(shared)], self.metrics[name].larger_is_better)
        return row

    def collect(self, round: int, payload: bytes) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
        """Client -> its metrics by name; and client -> why it has sent none that can be used."""
        dispatcher, registry = self.session.dispatcher, self.session.registry
        registry.refresh()
        requests = {
            client: RequestMessage(
                run=self.session.name,
                contract=registry.contract_of(client).digest,
                round=round,
                phase=METRICS,
                weight=float(self.session.weights[client]),
                payload=payload,
            )
            for client in sorted(registry.nodes)
        }
        began = self.session.clock.time()
        silent, shared = dispatcher.send(requests), {}
        while any(request.phase == METRICS for _, request in dispatcher.requests()):
            dispatcher.look(began)
        for reply in [reply for reply in dispatcher.ready if reply.request.phase == METRICS]:
            dispatcher.ready.remove(reply)
            try:
                with reading():
                    shared[reply.client] = self.checked(reply)
            except Refusal as refusal:
                silent[reply.client] = str(refusal)
        return dict(sorted(shared.items())), silent

    def checked(self, reply: ClientReply) -> dict[str, float]:
        """The metrics in a reply.

        Raises:
            Refusal: the reply is not valid.
        """
        client, request, outcome = reply
        if isinstance(outcome, Refusal):
            raise outcome
        if (outcome.run, outcome.round, outcome.client) != (request.run, request.round, client):
            raise Refusal("it replies to another message")
        numbers = outcome.numbers()
        if sorted(numbers) != self.names:
            raise Refusal(f"it measures {', '.join(sorted(numbers)) or 'nothing'}, not {', '.join(self.names)}")
        if not all(map(math.isfinite, numbers.values())):
            raise Refusal("its metrics are not finite")
        return numbers
