"""What the exchanges of a run share on the server: the log, replies that wait, the round as it is played."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel.core.algorithm import Algorithm, takes_and_gives
from fedbilevel.core.card import span
from fedbilevel.core.client import RemoteClients
from fedbilevel.core.errors import CheckpointError, ExchangeError, NumericalError, require
from fedbilevel.core.fed import Phase
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import UnitLayout, Units
from fedbilevel.core.tree import PyTree, join
from fedbilevel.engines import submodels
from fedbilevel.engines.costs import Sums
from fedbilevel.engines.engine import Carry
from fedbilevel.engines.in_flight import InFlight
from fedbilevel.engines.submodels import SubmodelPlan
from fedbilevel.flower.refusal import Refusal
from fedbilevel.flower.server.roster import Roster, ServerClock, WallClock, public_keys
from fedbilevel.flower.server.terms import Backoff, CheckedReply, NormBounds, Terms
from fedbilevel.flower.versions import quick_pulls, require_flower, tested
from fedbilevel.flower.wire import Contract, RequestMessage, ResponseMessage, draw_up

log = logging.getLogger("fedbilevel.server")


class ExchangeLog:
    """Writes exchanges to the program's log and, where a file is given, there as JSON lines. The file has every
    refusal; the log says again why a client is absent only when that has changed.

    Raises:
        CheckpointError: the file cannot be written. It is tried at once; a run without exchanges leaves none.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.absent: dict[int, Refusal] = {}  # client -> why, as the log has it
        self.counted: set[int] = set()  # clients whose replies have counted
        self.spent: dict[int, tuple[float, float]] = {}  # client -> the ε that it said to have spent, at which δ
        self.recall()
        there = path is None or path.exists()
        self.write("")
        if path is not None and not there:
            path.unlink()

    def __call__(
        self,
        place: tuple[int, int, str, int],
        seconds: float,
        requests: Sequence[RequestMessage],
        responses: Sequence[ResponseMessage],
        refused: Mapping[int, Refusal],
    ) -> None:
        """Write the line of an attempt at an exchange.

        Args:
            place: its round, its number in the round, its phase, and which attempt it is.
            requests, responses: what was sent, and the responses that count.
            refused: client -> why its response does not.
        """
        down = sum(len(request.payload) for request in requests)
        up = sum(len(response.payload) for response in responses)
        replied = sorted(response.client for response in responses)
        line: dict[str, Any] = dict(zip(("round", "exchange", "phase", "attempt"), place, strict=True))
        line |= {"asked": len(requests), "answered": replied, "bytes_down": down, "bytes_up": up}
        line["seconds"] = round(seconds, 4)
        if (epsilon := max((response.epsilon for response in responses), default=0.0)) > 0:
            line["epsilon"] = epsilon  # the most that any of them says to have spent of its privacy so far
            line["spent"] = {str(one.client): [one.epsilon, one.delta] for one in responses if one.epsilon > 0}
            self.remember(line)
        text = "round %d exchange %d %s: %d of %d replied, %d bytes down, %d up, %.3f s"
        log.info(text, *place[:3], len(replied), len(requests), down, up, seconds)
        self.counted |= set(replied)
        self.absent = {client: why for client, why in self.absent.items() if client not in replied}
        for client, refusal in sorted(refused.items()):
            line.setdefault("refused", {})[str(client)] = refusal.told()
            known, self.absent[client] = self.absent.get(client), refusal
            if known is None or known.line != refusal.line:
                log.warning("round %d exchange %d %s: client %s does not count: %s", *place[:3], client, refusal.line)
        self.note(line)

    def remember(self, line: Mapping[str, Any]) -> None:
        """Take note of what clients say to have spent of their privacy."""
        for client, (epsilon, delta) in line.get("spent", {}).items():
            self.spent[int(client)] = float(epsilon), float(delta)

    def recall(self) -> None:
        """Take note of what clients said before the server was started again; lines that a kill cut are left out."""
        if self.path is not None and self.path.is_file():
            for text in self.path.read_text(errors="replace").splitlines():
                with suppress(ValueError, TypeError, AttributeError):
                    self.remember(json.loads(text))

    def note(self, line: Mapping[str, Any]) -> None:
        self.write(json.dumps(line) + "\n")

    def write(self, text: str) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write(text)
        except OSError as error:
            raise CheckpointError(f"could not write {self.path}: {error.strerror or error}") from error


class CountedReply(NamedTuple):
    """A reply that counts in an exchange."""

    client: int
    checked: CheckedReply
    asked: int  # exchange of its kind in which the client was asked


@dataclass
class PhaseQueues:
    """The exchanges so far of each phase that `Fed.sum_first` asks, and replies that wait for its next exchange."""

    exchanges: Counter[str] = field(default_factory=Counter)  # of each kind so far
    since: defaultdict[str, defaultdict[int, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    """Phase -> client -> exchange of the phase in which it was last asked or, if that is later, replied."""
    kept: dict[str, list[CountedReply]] = field(default_factory=lambda: defaultdict(list))
    """Phase -> replies that came in while another phase was waited for."""
    resumed: dict[str, tuple[Sums, float]] = field(default_factory=dict)
    """Phase -> the weighted sums of kept replies that a checkpoint has, and their Σ p_i·asked; metrics are not kept."""

    @classmethod
    def of(cls, queues: InFlight | None) -> PhaseQueues:
        """Read the queues that a checkpoint has; empty ones for None."""
        found = cls()
        for phase, queue in {} if queues is None else queues.by_phase.items():
            found.exchanges[phase] = int(queue.exchanges)
            found.since[phase] |= dict(enumerate(queue.since.tolist()))
            if queue.early.responders > 0:
                found.resumed[phase] = queue.early, float(queue.early_asked)
        return found

    def overdue(self, phase: str, clients: Iterable[int], working: Container[int], max_staleness: int) -> set[int]:
        """Find the clients that an exchange must wait for (see `Fed.sum_first`); `working`: those at work on this
        phase."""
        ages = {client: self.exchanges[phase] - self.since[phase][client] for client in clients}
        return {c for c, age in ages.items() if age > max_staleness or (c in working and age == max_staleness)}


MOST = 3  # clients that a round is repeated without, each after the last


class SpoiledError(ExchangeError, NumericalError):
    """Most clients of an exchange met numbers that are not finite: the state, not a client, must be at fault."""


@dataclass
class Take:
    """A round, as often as it is played: where it begins, and what is known of its clients.

    A round is a function of its state, its key and the clients that count in it. One whose result is no use is
    therefore played again from where it began, without the client whose update was the longest in proportion to the
    others of its exchange; what clients keep goes back with it, since each message says what it goes on from.
    """

    carry: Carry
    ratios: dict[int, float] = field(default_factory=dict)
    """Client -> its longest update that counted, in units of what was usual."""
    without: list[int] = field(default_factory=list)  # clients that are left out

    def hear(self, norms: dict[int, float]) -> None:
        """Note the replies of an exchange, by their norms."""
        some = [norm for norm in norms.values() if norm > 0]
        usual = statistics.median_low(some) if some else math.inf
        for client, norm in norms.items():
            self.ratios[client] = max(norm / usual, self.ratios.get(client, 0.0))

    def leave_out(self, cohort: int, terms: Terms) -> int | None:
        """Leave out a further client and return which; None if there must be no fewer."""
        left = {client: ratio for client, ratio in self.ratios.items() if client not in self.without}
        few = cohort - len(self.without) - 1 < terms.needed(cohort)
        if not left or few or len(self.without) == MOST:
            return None
        self.without.append(max(left, key=lambda client: (left[client], -client)))
        return self.without[-1]


class SubmodelPrograms:
    """What a server computes for submodels of a unit layout, compiled: `cut` gives the part of a phase's message that a
    client with some units is sent, `put_back` gives sums over such clients the shapes of the whole model."""

    def __init__(self, unit_layout: UnitLayout) -> None:
        def cut(phase: Phase, message: PyTree, units: Units) -> PyTree:
            return unit_layout.sent(takes_and_gives(phase)[0], message, units)

        def put_back(phase: Phase, sums: Sums, units: Units) -> Sums:
            return submodels.put_back(unit_layout, takes_and_gives(phase)[1], sums, units)

        self.cut: Any = jax.jit(cut, static_argnums=0)
        self.put_back: Any = jax.jit(put_back, static_argnums=0)


def roster_of(flower: Any, contract: Contract, clients: int, own: Mapping[int, Contract] | None = None) -> Roster:
    """Make the connections of a `Flower` to this many clients, who agree to a contract or to one of their own."""
    clock: ServerClock = getattr(flower.grid, "clock", None) or WallClock()
    if isinstance(clock, WallClock) and tested(require_flower()):
        quick_pulls(flower.terms.deadline)
    public = {} if flower.keys is None else public_keys(Path(flower.keys), clients)
    return Roster(flower.grid, contract, flower.name, clients, flower.terms, clock, own or {}, public)


class Session:
    """A run on the server: its clients, the connections to them, and what their replies have left behind.

    Args:
        flower: a `Flower`, whose file imports this one.
        algorithm, problem: as given to `solve`; the fields of the algorithm are not those of a round.
        clients: the population, M clients.
        cohort: how many clients a round draws.
        carry: what the run begins with, or is resumed from.

    Attributes:
        submodel_plan: which clients hold which submodels; None where all hold the whole model.
        backoff: which clients are not asked for some rounds, since they failed.
        norms: which Euclidean norms of updates are usual, by phase.
        counted: (M, 2) round and exchange of each client's last reply that counted and could change its state.
        take: the current round.
    """

    def __init__(
        self, flower: Any, algorithm: Algorithm, problem: Problem, clients: RemoteClients, cohort: int, carry: Carry
    ) -> None:
        self.name, self.terms = flower.name, flower.terms
        self.algorithm, self.problem, self.clients, self.cohort = algorithm, problem, clients, cohort
        x, y = carry.state.x if carry.local_x is None else carry.local_x, carry.state.y
        start = x, y if carry.own_y is None else join(y, carry.own_y)
        contract = draw_up(algorithm, problem, *start, clients.examples())
        self.submodel_plan = SubmodelPlan.of(algorithm, problem, clients, *start)
        own: dict[int, Contract] = {}  # of clients who hold submodels
        if (plan := self.submodel_plan) is not None:
            once = "a number for each client: a site serves messages of one size"
            require(plan.number.ndim == 1, "RemoteClients.capacity", f"{span(clients.capacity, '.3g')}, by round", once)
            self.submodel_programs = SubmodelPrograms(plan.unit_layout)
            by_class = [contract.cut(plan.unit_layout, kept) for kept in plan.kept]
            own = {client: by_class[number] for client, number in enumerate(plan.number.tolist())}
        self.roster = roster_of(flower, contract, len(clients), own)
        self.clock = self.roster.clock
        self.backoff, self.norms = Backoff(), NormBounds(self.terms)
        self.exchange_log = ExchangeLog(None if flower.log is None else Path(flower.log))
        self.take = Take(carry)
        self.phase_queues = PhaseQueues.of(carry.queues)
        self.counted = np.array(carry.clients)

    def never_counted(self) -> list[Refusal]:
        """List why clients that were asked have never counted."""
        log = self.exchange_log
        return [why for client, why in log.absent.items() if client not in log.counted and self.counted[client, 0] < 0]
