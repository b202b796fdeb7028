"""Store what the exchanges of a run share on the server: the log, waiting replies, and the present round."""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.card import span
from fedbilevel.core.client import RemoteClients
from fedbilevel.core.errors import CheckpointError, ExchangeError, NumericalError, require
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import UnitLayout
from fedbilevel.core.tree import join
from fedbilevel.engines import submodels
from fedbilevel.engines.costs import Sums
from fedbilevel.engines.engine import Carry
from fedbilevel.engines.in_flight import InFlight
from fedbilevel.engines.submodels import SubmodelPlan, WholeModels
from fedbilevel.flower.refusal import ClientNames, Refusal
from fedbilevel.flower.server.roster import Roster, ServerClock, WallClock, public_keys
from fedbilevel.flower.server.terms import Backoff, CheckedReply, NormBounds
from fedbilevel.flower.versions import quick_pulls, require_flower, tested
from fedbilevel.flower.wire import Contract, RequestMessage, ResponseMessage, draw_up

log = logging.getLogger("fedbilevel.server")


class ExchangeLog:
    """The log of exchanges: lines in the program's log and, if a path is given, JSON lines in a file.

    The file contains every refusal. The program's log says why a client is absent only when the reason has changed.
    Clients with the same reason share a line of the program's log.

    Args:
        path: the file; None: no file.
        names: the names of the clients. The first line of an attempt also contains the names of the sites.

    Raises:
        CheckpointError: the file cannot be written. This is checked before the first exchange; a run without exchanges
            leaves no file.
    """

    def __init__(self, path: Path | None, names: ClientNames = ClientNames()) -> None:  # noqa: B008  it is frozen
        self.path, self.names = path, names
        self.heading: dict[str, Any] = {"sites": [*names.sites]} if names.sites else {}  # for the next line
        self.absent: dict[int, Refusal] = {}  # client -> why it is absent, according to the last line of the log
        self.counted: set[int] = set()  # clients with a reply that counted
        self.spent: dict[int, tuple[float, float]] = {}  # client -> the (ε, δ) in its last reply that counted
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
            place: the round, the number of the exchange in the round, the phase, and the number of the attempt.
            seconds: the time that the attempt took.
            requests: the requests that were sent.
            responses: the responses that count.
            refused: client -> why its response does not count.
        """
        down = sum(len(request.payload) for request in requests)
        up = sum(len(response.payload) for response in responses)
        replied = sorted(response.client for response in responses)
        line: dict[str, Any] = dict(zip(("round", "exchange", "phase", "attempt"), place, strict=True))
        line |= self.heading | {"asked": len(requests), "answered": replied, "bytes_down": down, "bytes_up": up}
        line["seconds"] = round(seconds, 4)
        if (epsilon := max((response.epsilon for response in responses), default=0.0)) > 0:
            line["epsilon"] = epsilon  # the largest ε that a client has reported
            line["spent"] = {str(one.client): [one.epsilon, one.delta] for one in responses if one.epsilon > 0}
            self.remember(line)
        text = "round %d exchange %d %s: %d of %d replied, %d bytes down, %d up, %.3f s"
        log.info(text, *place[:3], len(replied), len(requests), down, up, seconds)
        self.counted |= set(replied)
        self.absent = {client: why for client, why in self.absent.items() if client not in replied}
        new: dict[str, list[int]] = {}  # a reason -> the clients for which the log has not named it yet
        for client, refusal in sorted(refused.items()):
            line.setdefault("refused", {})[str(client)] = refusal.told()
            known, self.absent[client] = self.absent.get(client), refusal
            if known is None or known.line != refusal.line:
                new.setdefault(refusal.line, []).append(client)
        for why, clients in new.items():
            whose, verb = self.names.several(clients), "does" if len(clients) == 1 else "do"
            log.warning("round %d exchange %d %s: %s %s not count: %s", *place[:3], whose, verb, why)
        self.note(line)
        self.heading = {}

    def remember(self, line: Mapping[str, Any]) -> None:
        """Read the (ε, δ) of clients from a line of the log, and remember them."""
        for client, (epsilon, delta) in line.get("spent", {}).items():
            self.spent[int(client)] = float(epsilon), float(delta)

    def recall(self) -> None:
        """Read the (ε, δ) of clients from the file of an earlier process. Incomplete lines are ignored."""
        if self.path is not None and self.path.is_file():
            for text in self.path.read_text(errors="replace").splitlines():
                with suppress(ValueError, TypeError, AttributeError):
                    self.remember(json.loads(text))

    def note(self, line: Mapping[str, Any]) -> None:
        """Append a line to the file."""
        self.write(json.dumps(line) + "\n")

    def write(self, text: str) -> None:
        """Append a text to the file, if there is one; raise CheckpointError if this fails."""
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:
                file.write(text)
        except OSError as error:
            text = f"could not write {self.path}: {error.strerror or error}"
            raise CheckpointError(text, path=self.path, errno=error.errno) from error


class CountedReply(NamedTuple):
    """A reply that counts in an exchange."""

    client: int
    checked: CheckedReply
    asked: int  # the number of the exchange in which the client was asked, counted separately for each phase


@dataclass
class PhaseQueues:
    """For each phase for which `Fed.sum_first` asks: its exchanges so far, and replies that wait for the next one."""

    exchanges: Counter[str] = field(default_factory=Counter)  # phase -> the number of its exchanges so far
    since: defaultdict[str, defaultdict[int, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    """Phase -> client -> the exchange of the phase in which the client was last asked or, if that is later, replied."""
    kept: dict[str, list[CountedReply]] = field(default_factory=lambda: defaultdict(list))
    """Phase -> replies that arrived during an exchange of another phase."""
    resumed: dict[str, tuple[Sums, float]] = field(default_factory=dict)
    """Phase -> the weighted sums of replies that a checkpoint has kept, and the sum of p_i·asked over these replies.

    Their metrics are not kept.
    """

    @classmethod
    def of(cls, queues: InFlight | None) -> PhaseQueues:
        """Return the queues that a checkpoint contains; empty queues for None."""
        found = cls()
        for phase, queue in {} if queues is None else queues.by_phase.items():
            found.exchanges[phase] = int(queue.exchanges)
            found.since[phase] |= dict(enumerate(queue.since.tolist()))
            if queue.early.responders > 0:
                found.resumed[phase] = queue.early, float(queue.early_asked)
        return found

    def overdue(self, phase: str, clients: Iterable[int], working: Container[int], max_staleness: int) -> set[int]:
        """Return the clients for which an exchange must wait (see `Fed.sum_first`).

        `working` contains the clients that work on a request of this phase.
        """
        ages = {client: self.exchanges[phase] - self.since[phase][client] for client in clients}
        return {c for c, age in ages.items() if age > max_staleness or (c in working and age == max_staleness)}


MOST = 3  # the largest number of clients that are left out of a repeated round


class SpoiledError(ExchangeError, NumericalError):
    """At least half of the clients of an exchange report numbers that are not finite.

    The cause is then probably the server's state, and not a client.
    """


@dataclass
class Take:
    """A round that may be repeated: the carry at its start, and a record of its clients.

    A round is a function of the state at its start, its key, and the clients that count in it. If its result is not
    finite, the round can therefore be repeated from its start without one client: the client whose update was the
    longest in proportion to the other updates of the same exchange. The states of clients are rolled back too, since
    each message names the state from which the client continues.
    """

    carry: Carry
    ratios: dict[int, float] = field(default_factory=dict)
    """Client -> the norm of its longest update that counted, divided by the median norm of the exchange."""
    without: list[int] = field(default_factory=list)  # clients that are left out

    def hear(self, norms: dict[int, float]) -> None:
        """Record the norms of an exchange's updates, by client."""
        some = [norm for norm in norms.values() if norm > 0]
        usual = statistics.median_low(some) if some else math.inf
        for client, norm in norms.items():
            self.ratios[client] = max(norm / usual, self.ratios.get(client, 0.0))

    def leave_out(self, cohort: int, needed: int) -> int | None:
        """Leave out another client and return its id; None if fewer clients than `needed` would be left."""
        left = {client: ratio for client, ratio in self.ratios.items() if client not in self.without}
        few = cohort - len(self.without) - 1 < needed
        if not left or few or len(self.without) == MOST:
            return None
        self.without.append(max(left, key=lambda client: (left[client], -client)))
        return self.without[-1]


class SubmodelPrograms:
    """The server's compiled programs for submodels, for one layout of units.

    `cut` returns the part of a phase's message for a client with some units. `put_back` puts sums over clients with the
    same units into the shapes of the whole model.
    """

    def __init__(self, unit_layout: UnitLayout) -> None:
        self.cut: Any = jax.jit(partial(submodels.cut, unit_layout), static_argnums=0)
        self.put_back: Any = jax.jit(partial(submodels.put_back, unit_layout), static_argnums=0)


def roster_of(flower: Any, contract: Contract, clients: int, own: Mapping[int, Contract] | None = None) -> Roster:
    """Return the roster of a `Flower` for this many clients; `own` has the contracts of clients with submodels."""
    clock: ServerClock = getattr(flower.grid, "clock", None) or WallClock()
    if isinstance(clock, WallClock) and tested(require_flower()):
        quick_pulls(flower.terms.deadline)
    public = {} if flower.keys is None else public_keys(Path(flower.keys), clients)
    names = ClientNames(flower.sites)
    return Roster(flower.grid, contract, flower.name, clients, flower.terms, clock, own or {}, public, names)


class Session:
    """A run on the server: its clients, the connections to them, and the records of their replies.

    Args:
        flower: a `Flower`. The annotation is Any because the module of this class imports this module.
        algorithm, problem: as for `solve`. Fields of the algorithm that are schedules have not been replaced by
            numbers.
        clients: the population, M clients.
        cohort: the number of clients that a round draws.
        carry: the carry from which the run starts or is resumed.

    Attributes:
        submodel_plan: which submodels clients hold; None: all clients hold the whole model.
        programs: the functions that cut messages for clients, and put sums back into the shapes of the whole model.
        backoff: which clients are not asked for some rounds, because they failed.
        norms: the usual Euclidean norms of updates, by phase, and the bounds that follow from them.
        counted: the round and the exchange of each client's last reply that counted and may have changed the client's
            state, as an array of shape (M, 2).
        take: the present round.
    """

    def __init__(
        self, flower: Any, algorithm: Algorithm, problem: Problem, clients: RemoteClients, cohort: int, carry: Carry
    ) -> None:
        self.name, self.terms = flower.name, flower.terms
        self.algorithm, self.problem, self.clients, self.cohort = algorithm, problem, clients, cohort
        y = carry.state.y
        start = carry.x, y if carry.own_y is None else join(y, carry.own_y)
        contract = draw_up(algorithm, problem, *start, clients.examples())
        self.submodel_plan = SubmodelPlan.of(algorithm, problem, clients, *start)
        self.programs: WholeModels | SubmodelPrograms = WholeModels()
        own: dict[int, Contract] = {}  # the contracts of clients that hold submodels
        if (plan := self.submodel_plan) is not None:
            once = "one number for each client, since a site accepts messages of one size"
            require(plan.number.ndim == 1, "RemoteClients.capacity", f"{span(clients.capacity, '.3g')}, by round", once)
            self.programs = SubmodelPrograms(plan.unit_layout)
            by_class = [contract.cut(plan.unit_layout, kept) for kept in plan.kept]
            own = {client: by_class[number] for client, number in enumerate(plan.number.tolist())}
        self.roster = roster_of(flower, contract, len(clients), own)
        self.clock = self.roster.clock
        self.backoff, self.norms = Backoff(), NormBounds(self.terms, algorithm.asks.differences)
        self.exchange_log = ExchangeLog(None if flower.log is None else Path(flower.log), self.roster.names)
        self.take = Take(carry)
        self.phase_queues = PhaseQueues.of(carry.queues)
        self.counted = np.array(carry.clients)

    def needed(self, clients: int) -> int:
        """Return how many of these clients must reply, by the quorum and by what the method needs."""
        return max(self.terms.needed(clients), self.algorithm.asks.replies)

    def never_counted(self) -> list[Refusal]:
        """Return a refusal for each client that was asked, but has no reply that counted."""
        log = self.exchange_log
        return [why for client, why in log.absent.items() if client not in log.counted and self.counted[client, 0] < 0]
