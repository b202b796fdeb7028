"""Run `solve` on a server with real clients: an engine whose exchanges go over Flower's Grid."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from jax import Array

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.authored import checked_round
from fedbilevel.core.card import counted
from fedbilevel.core.client import RemoteClients
from fedbilevel.core.errors import (
    AbsenceWarning,
    ExchangeError,
    FedbilevelError,
    NonFiniteError,
    diverged,
    require,
    warn,
    warnings_in_a_line,
)
from fedbilevel.core.hyperparameters import at
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, nonfinite_leaves
from fedbilevel.engines.costs import add_costs, empty_costs, split_count, stack_costs
from fedbilevel.engines.engine import Carry, Cohort, Stretch, check_everyone, round_keys
from fedbilevel.engines.evaluation import PerClient, spread
from fedbilevel.engines.history import Row
from fedbilevel.engines.in_flight import InFlight, PhaseQueue
from fedbilevel.engines.machine import trim_heap
from fedbilevel.engines.progress import AWAITING, report_stage
from fedbilevel.engines.submodels import models_of_round
from fedbilevel.engines.virtual_time import TICK
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.server.fed import FlowerFed
from fedbilevel.flower.server.roster import ask
from fedbilevel.flower.server.session import Session, SpoiledError, Take
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import METRICS, RequestMessage, is_run, reading, to_bytes
from fedbilevel.wording import in_a_line

log = logging.getLogger("fedbilevel.server")


@dataclass(frozen=True, kw_only=True)
class Flower:
    """Make the exchanges of `solve` with clients that are reached through Flower.

    Args:
        grid: the Grid that Flower passes to a ServerApp's main, or an `InProcess`.
        terms: the rules that say which replies and exchanges count.
        name: the name of the whole run, 8 to 64 hexadecimal digits. It must be the same when the run is resumed, since
            clients keep their state under it. If the algorithm keeps a state at clients, a run can resume only from its
            last round. `solve` then saves after every round, and refuses a larger `checkpoint_every`. An asynchronous
            run resumes without the pending replies, so its numbers differ from an uninterrupted run: see
            docs/how-to/federation-server.md.
        log: a file to which a JSON line is appended for each attempt at an exchange; None: no file.
        keys: a folder with every client's public key, client-0.pub, client-1.pub, …. A node is accepted as a client
            only if it has registered with the key of this client. None: any registered node can claim to be any absent
            client.
        sites: the names of the clients' sites, in the order of clients, for messages and for `log`; (): the clients
            have no names.
    """

    grid: Grid
    terms: Terms = field(default_factory=Terms)
    name: str = field(default_factory=lambda: secrets.token_hex(16))
    log: str | Path | None = None
    keys: str | Path | None = None
    sites: Sequence[str] = ()
    clock: ClassVar[None] = None

    def __post_init__(self) -> None:
        require(is_run(self.name), "Flower.name", self.name, "8 to 64 hexadecimal digits, in lower case")
        texts = not isinstance(self.sites, str) and all(isinstance(site, str) for site in self.sites)
        require(texts, "Flower.sites", self.sites, "a sequence of texts, with the name of each client's site")

    def start(
        self,
        algorithm: Algorithm,
        problem: Problem,
        clients: RemoteClients,
        cohort: int | Cohort,
        key: Array,
        carry: Carry,
    ) -> FlowerRun:
        known = isinstance(clients, RemoteClients)
        require(known, "clients", type(clients).__name__, "RemoteClients, which describe clients on other machines")
        named = len(self.sites) in (0, len(clients))
        require(named, "the number of Flower.sites", len(self.sites), f"0 or {len(clients)}, a name for each client")
        cohort = Cohort.of(cohort)
        check_everyone(algorithm, len(clients), cohort)
        require(not cohort.replacement, "Cohort.replacement", True, "False: a site works on one request at a time")
        return FlowerRun(Session(self, algorithm, problem, clients, cohort.size, carry), key)


class FlowerRun:
    """Advance a run over Flower, round by round.

    The carry has the state and the number of the round; the session has the records of clients.
    """

    compile_seconds = 0.0

    def __init__(self, session: Session, key: Array) -> None:
        self.session, self.key = session, key
        self.seconds = 0.0  # the time of all rounds so far
        self.before: Take | None = None  # the latest round that this process has run
        report_stage(AWAITING)
        self.await_clients()

    def await_clients(self) -> None:
        """Wait until all clients are online, for at most `Terms.join` seconds.

        Then continue if at least a quorum of the clients is online.

        Raises:
            ExchangeError: there is no quorum.
        """
        roster, count = self.session.roster, len(self.session.clients)
        needed = self.session.needed(count)
        roster.wait(range(count), count, needed)
        if (here := len(roster.nodes)) < needed:
            absent = roster.why_absent(client for client in range(count) if client not in roster.nodes)
            refused = list(roster.refusals.values())
            refusals = [*refused, *(why for why in absent.values() if why not in refused)]
            present = f"{counted(here, 'client')} {'is' if here == 1 else 'are'} online"
            text = f"{present}, but {needed} of {count} are needed ({roster.names.in_words(refusals, 3)})"
            raise ExchangeError(text, replies=here, needed=needed, refusals=refusals)

    def advance(self, carry: Carry, rounds: int) -> Stretch:
        """Run one round. If its result is not finite, repeat the round without one of the clients.

        If too few replies count, and at least half of the clients report numbers that are not finite, the previous
        round is repeated too. The costs of rounds that were undone remain in the ledger.
        """
        session, undone, began = self.session, empty_costs(), self.session.clock.time()
        this, again = Take(carry), None  # this round; and the previous round, if that is repeated
        while True:
            take = session.take = again or this
            take.ratios, session.counted = {}, np.array(take.carry.clients)
            fed = self.fed(take.carry)
            try:
                carry = self.play(fed, take.carry)
            except NonFiniteError as error:
                self.undo(take, error)
            except ExchangeError as error:
                error.carry = take.carry
                if again or self.before is None or not isinstance(error, SpoiledError):
                    raise
                again = self.before
                self.undo(again, error)
            else:
                self.before = take
                if take is this:
                    break
                this, again = Take(carry), None
            undone = add_costs(undone, fed.book.costs._replace(metrics={}))
        before, self.seconds = self.seconds, self.seconds + session.clock.time() - began
        ticks = round(self.seconds / TICK) - round(before / TICK)  # rounding errors do not add up
        costs = stack_costs([add_costs(undone, fed.total_costs())])
        return Stretch(carry, 1, costs._replace(privacy=fed.privacy, time=split_count(ticks)[None]))

    def undo(self, take: Take, error: ExchangeError | NonFiniteError) -> None:
        """Choose one more client to leave out when this round is repeated, and log the choice.

        Raises:
            ExchangeError, NonFiniteError: too few clients would be left, or the algorithm is asynchronous.
        """
        session, round = self.session, int(take.carry.round)
        if session.algorithm.asks.asynchronous:
            raise error
        out = take.leave_out(session.cohort, session.needed(session.cohort))
        if out is None:
            tried = (
                f"this also happens without {session.roster.names.several(take.without)}, and " if take.without else ""
            )
            end = f"{tried}the last good state is the one before round {round}"
            error.append(end)
            error.carry = take.carry
            raise error
        session.backoff.failed(out, round + isinstance(error, SpoiledError))
        text = "round %d is undone (%s) and repeated without %s, whose update was %.3g times as long as usual"
        log.warning(text, round, error, session.roster.names.one(out), take.ratios[out])
        session.exchange_log.note({"round": round, "undone": str(error), "without": sorted(take.without)})

    def play(self, fed: FlowerFed, carry: Carry) -> Carry:
        """Run the round that begins with this carry, and return the next carry."""
        state = checked_round(fed.algorithm, fed, carry.state, fed.cohorts.keys.algorithm)
        if bad := nonfinite_leaves(state):
            raise diverged(bad, fed.round, "server update")
        counted, queues = jnp.asarray(self.session.counted), self.saved_queues(fed, carry.queues)
        return Carry(carry.round + 1, state, counted, carry.now, queues, carry.local_x, carry.own_y)

    def fed(self, carry: Carry) -> FlowerFed:
        """Return the `FlowerFed` for the exchanges of the round that begins with this carry."""
        algorithm, keys = at(self.session.algorithm, carry.round), round_keys(self.key, int(carry.round))
        models = models_of_round(self.session.submodel_plan, algorithm, self.key, carry.round, carry.state)
        return FlowerFed(self.session, algorithm, int(carry.round), keys, models)

    def saved_queues(self, fed: FlowerFed, queues: InFlight | None) -> InFlight | None:
        """Return the queues of waiting replies in the form of a checkpoint; None if `queues` is None.

        Replies that came before their exchange are stored as a weighted sum, since the server has already reported to
        their clients that these replies count.
        """
        if queues is None:
            return None
        saved, now = {}, self.session.phase_queues
        for phase, queue in queues.by_phase.items():
            early, asked, kept = jax.tree.map(jnp.zeros_like, queue.early), 0.0, now.kept.get(phase, [])
            if kept or phase in now.resumed:
                sums, asked = fed.early(phase, kept)
                early = jax.tree.map(jnp.asarray, sums._replace(metrics=early.metrics))
            exchanges = jnp.asarray(now.exchanges[phase], jnp.int32)
            population = range(len(self.session.clients))
            since = jnp.asarray([now.since[phase][client] for client in population], jnp.int32)
            saved[phase] = PhaseQueue(exchanges, since, queue.replies, early, jnp.asarray(asked, float))
        return queues._replace(by_phase=saved)

    def per_client(self, metrics: Mapping[str, PerClient], fixed: tuple[PyTree, PyTree]) -> ClientMetrics:
        return ClientMetrics(self.session, metrics)  # clients have their own copies of the fixed leaves

    def close(self) -> None:
        if self.before is not None and (never := self.session.never_counted()):
            count = len(self.session.clients)
            reasons = self.session.roster.names.in_words(never)
            warn(AbsenceWarning(f"no reply of {len(never)} of {count} clients has counted in this run ({reasons})"))
        trim_heap()


def in_a_sentence(record: logging.LogRecord) -> bool:
    """Filter Flower's log: reduce errors of this library to their message, without a traceback.

    Flower's own line about an unhandled exception is removed. This function is a filter for Python's `logging`.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FedbilevelError):
        record.msg, record.args, record.exc_info = "fedbilevel: %s", (in_a_line(error, 2000),), None
    return "An unhandled exception occurred in the ServerApp" not in record.getMessage()


def server_app(main: Callable[[Grid, Mapping[str, Any]], None]) -> ServerApp:
    """Return a ServerApp that calls `main`(grid, run configuration).

    `main` should call `solve(…, engine=Flower(grid=grid))`.
    """
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        logging.getLogger("flwr").addFilter(in_a_sentence)
        with warnings_in_a_line():
            main(grid, context.run_config)  # if it raises, Flower reports a failed run, with the text of the error

    return app


class ClientMetrics:
    """Measure per-client metrics, as columns of the history, over the clients that are online and share their metrics.

    The column NAME.clients has the number of these clients. The requests are not exchanges of the algorithm: they are
    not in the ledger, and their replies do not influence a round.
    """

    def __init__(self, session: Session, metrics: Mapping[str, PerClient]) -> None:
        whole = session.submodel_plan is None
        require(whole, "metrics_per_client", list(metrics), "left out over Flower if clients hold submodels")
        waits = not session.algorithm.asks.asynchronous
        name = session.algorithm.label
        require(waits, "metrics_per_client", list(metrics), f"left out over Flower with {name}, which is asynchronous")
        alike = session.problem.local is None
        require(alike, "metrics_per_client", list(metrics), "left out over Flower if clients keep their own x")
        shared = session.problem.own is None
        require(shared, "metrics_per_client", list(metrics), "left out over Flower if leaves of y are clients' own")
        self.session, self.metrics, self.names, self.warned = session, metrics, sorted(metrics), False
        self.told = True  # False if all clients have replied that they do not share metrics

    def __call__(self, round: int, x: PyTree, y: PyTree) -> Row:
        """Measure the metrics at x and y, and return them as columns of a row of the history.

        All clients that are online are asked, and responses count until the deadline. If all clients reply that they do
        not share metrics, no client is asked again.
        """
        payload = to_bytes(jax.tree.map(np.asarray, (x, y)))
        shared, silent = self.collect(round, payload) if self.told else ({}, {})
        self.told = bool(shared) or any(refusal.code is not Code.SILENT for refusal in silent.values())
        population = len(self.session.clients)
        if len(shared) < population and not self.warned:
            text = f"per-client metrics come from only {len(shared)} of {population} clients"
            text += f" ({self.session.roster.names.in_words(silent.values(), 3)})"
            warn(AbsenceWarning(text))
            self.warned = True
        row: Row = {}
        for name in self.names:
            row[f"{name}.clients"] = len(shared)
            if shared:
                values = np.array([numbers[name] for numbers in shared.values()])
                weights = self.session.clients.weights[list(shared)]
                row |= spread(name, values, weights, self.metrics[name].larger_is_better)
        return row

    def collect(self, round: int, payload: bytes) -> tuple[dict[int, dict[str, float]], dict[int, Refusal]]:
        """Ask all clients for their metrics.

        Return two dictionaries: client -> its metrics, and client -> why it sent none.
        """
        roster = self.session.roster
        roster.refresh()
        requests = {
            client: RequestMessage(
                run=self.session.name,
                contract=roster.contract_of(client).digest,
                round=round,
                phase=METRICS,
                weight=float(self.session.clients.weights[client]),
                payload=payload,
            )
            for client in range(len(self.session.clients))
        }
        (replies, silent), shared = ask(roster, requests), {}
        for reply in replies:
            try:
                with reading(reply.client):
                    numbers = reply.response().numbers()
                    if sorted(numbers) != self.names:
                        told, asked = ", ".join(sorted(numbers)) or "nothing", ", ".join(self.names)
                        raise Refusal(Code.CONTRACT, f"its metrics are {told}, and {asked} was requested")
                    if not all(map(math.isfinite, numbers.values())):
                        raise Refusal(Code.NUMBERS, "its metrics are not finite")
                    shared[reply.client] = numbers
            except Refusal as refusal:
                silent[reply.client] = refusal
        return dict(sorted(shared.items())), silent
