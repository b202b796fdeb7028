"""One exchange over Flower: whom it asks and when, which answers end it, what it does about those who fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import Array

from fedbilevel.core.errors import ExchangeError
from fedbilevel.flower.contract import Call, Contract
from fedbilevel.flower.counting import Counted, accepted, euclidean
from fedbilevel.flower.courier import Letter
from fedbilevel.flower.exchange_log import Exchange
from fedbilevel.flower.lanes import Arrival
from fedbilevel.flower.records import reading
from fedbilevel.flower.undoing import SpoiledError
from fedbilevel.flower.wire import Ask, Refusal, from_bytes, tells_of_numbers

if TYPE_CHECKING:
    from fedbilevel.flower.engine import FlowerRun


class Wording(NamedTuple):
    """What one client is asked."""

    contract: Contract
    call: Call
    payload: bytes


@dataclass(frozen=True)
class Question:
    """What an exchange asks."""

    phase: str
    round: int
    number: int  # of the exchange, within its round
    wording: Callable[[int], Wording]  # for each client
    key: Array
    fresh: bool
    first: bool  # it ends with the first answers, to earlier questions of the phase too

    def concerns(self, ask: Ask) -> bool:
        """Whether an answer to `ask` is one that this exchange waits for."""
        return ask.phase == self.phase if self.first else (ask.round, ask.exchange) == (self.round, self.number)


class Gathering:
    """An exchange as it goes on.

    A client works on one question at a time: whoever is idle is asked at once, the others as soon as they are. What
    they then hand in is of another kind, and kept for the next exchange of that.

    Args:
        works: the local steps of each client that is to be asked.
        needed: how many answers have to count.
        overdue: clients that `first` waits for in any case.
    """

    def __init__(
        self, run: FlowerRun, question: Question, works: dict[int, int | None], needed: int, overdue: set[int]
    ) -> None:
        self.run, self.question, self.works, self.needed, self.overdue = run, question, works, needed, overdue
        self.answers: list[Arrival] = run.lanes.kept.pop(question.phase, []) if question.first else []
        self.done: set[int] = set()  # clients that have answered since the exchange began
        self.asked: list[int] = []  # the client of each message sent
        self.failed: dict[int, str] = {}  # client -> why, in this attempt

    def gather(self) -> list[Arrival]:
        """Ask, again where too few answer; the answers that count, in the order of `works`.

        Raises:
            ExchangeError: they are too few; a SpoiledError where most of those who are asked met such numbers.
        """
        run, logged = self.run, 0
        reasons: dict[int, str] = {}
        places = {client: place for place, client in enumerate(self.works)}
        without = run.undoing.without.get(self.question.round, set())
        for attempt in range(run.terms.attempts):
            here = [client for client in self.works if client not in without]
            rested = [c for c in here if attempt or not run.rests.resting(c, self.question.round)]
            left = [client for client in rested if client not in self.done]
            if attempt:
                run.roster.wait(left, missing := self.needed - len(self.answers), missing)
            exchange = Exchange(run.clock, self.question.round, self.question.number, self.question.phase, attempt)
            sent = self.attempt(left)
            exchange.done(sent, [one.counted.answer for one in self.answers[logged:]], self.failed)
            run.exchange_log(exchange)
            reasons |= self.failed
            logged = len(self.answers)
            if len(self.answers) >= self.needed:
                norms = {one.client: one.counted.norm for one in self.answers}
                run.norms.note(self.question.phase, list(norms.values()))
                run.undoing.hear(norms)
                return sorted(self.answers, key=lambda one: places[one.client])
        spoiled = [why for why in reasons.values() if tells_of_numbers(why)]
        if 2 * len(spoiled) >= len(self.works):
            raise SpoiledError(self.complaint(reasons), self.question.number)
        raise ExchangeError(self.complaint(reasons))

    def attempt(self, left: list[int]) -> list[Ask]:
        """Ask each of these clients once, and listen until there is enough or nothing more can come; what was sent."""
        courier, began, sent = self.run.courier, self.run.clock.time(), []
        self.failed, wanted = {}, set(left)
        self.overdue &= wanted | {client for client, _ in courier.unsettled()}
        courier.collect()
        while True:
            self.keep_others()
            sent += self.send(left)
            hope = any(self.question.concerns(ask) or client in wanted for client, ask in courier.asks())
            if self.question.first or not hope:  # all of them at once, where all are waited for
                self.count()
            if self.enough() or not hope:
                return sent
            courier.look(began)

    def enough(self) -> bool:
        return self.question.first and len(self.answers) >= self.needed and not self.overdue

    def keep_others(self) -> None:
        """Put aside what has come in for another kind of question: its clients are idle."""
        for letter in [letter for letter in self.run.courier.ready if not self.question.concerns(letter.ask)]:
            kept, opened = self.run.lanes.kept[letter.ask.phase], self.opened(letter)
            own = [opened.norm] if isinstance(opened, Counted) else []
            if one := self.accept(letter, opened, [*own, *(other.counted.norm for other in kept)]):
                kept.append(one)

    def send(self, left: list[int]) -> list[Ask]:
        """Ask whoever is idle and was not asked yet."""
        run = self.run
        busy = {client for client, _ in run.courier.unsettled()}
        asks = {c: self.ask(c) for c in left if c not in self.failed and c not in self.done and c not in busy}
        failed = run.courier.send(asks)
        self.asked += [client for client in asks if client not in failed]
        self.failed |= failed
        self.overdue -= failed.keys()
        if self.question.first:
            now = run.lanes.exchanges[self.question.phase]
            run.lanes.since[self.question.phase] |= {client: now for client in asks if client not in failed}
        return [ask for client, ask in asks.items() if client not in failed]

    def count(self) -> None:
        """Take what has come, as much as is needed: of what came together older questions first, then lower ids.

        Where one of those came whom the exchange waits for in any case, all count that came with it.
        """
        asked = self.run.lanes.since[self.question.phase]

        def turn(letter: Letter) -> tuple[bool, int, int]:
            return letter.client in self.overdue, asked[letter.client], letter.client

        letters = [(letter, self.opened(letter)) for letter in sorted(self.run.courier.ready, key=turn)]
        here = [one.counted.norm for one in self.answers] + [c.norm for _, c in letters if isinstance(c, Counted)]
        for letter, opened in letters:
            if self.enough():
                return
            if one := self.accept(letter, opened, here):
                self.answers.append(one)
                self.done.add(letter.client)
            self.overdue.discard(letter.client)

    def opened(self, letter: Letter) -> Counted | Refusal:
        """An answer that is right in itself, or why it is not."""
        run, (client, ask, outcome) = self.run, letter
        try:
            with reading():
                call = run.roster.contract_of(client).calls[ask.call]
                return accepted(outcome, ask, call, client, run.terms, len(run.clients))
        except Refusal as refusal:
            return refusal

    def accept(self, letter: Letter, counted: Counted | Refusal, here: Sequence[float]) -> Arrival | None:
        """Take an answer, if it is right in itself and of a usual norm; else say why not. `here`: see `Norms.check`.

        From now on its client is told that it counts, which what it keeps goes by, though it may be used only later.
        """
        run, (client, ask, _) = self.run, letter
        run.courier.ready.remove(letter)
        try:
            if isinstance(counted, Refusal):
                raise counted
            call = counted.call
            run.norms.check(ask.phase, counted.norm, here, lambda: euclidean(from_bytes(ask.payload, call.message)))
        except Refusal as refusal:
            other = "" if self.question.concerns(ask) else f"round {ask.round}, phase {ask.phase}: "
            self.failed[client] = other + str(refusal)
            run.rests.failed(client, self.question.round)
            return None
        run.rests.answered(client)
        if not ask.fresh:
            run.counted[client] = ask.round, ask.exchange
        since, now = run.lanes.since[ask.phase], run.lanes.exchanges[ask.phase]
        asked, since[client] = since[client], now
        return Arrival(client, counted, asked)

    def ask(self, client: int) -> Ask:
        """The question as one client gets it."""
        run, question, work = self.run, self.question, self.works[client]
        contract, call, payload = question.wording(client)
        return Ask(
            run=run.name,
            contract=contract.digest,
            round=question.round,
            exchange=question.number,
            phase=question.phase,
            call=call.name,
            key=np.asarray(jax.random.key_data(question.key)).tobytes(),
            key_kind=str(jax.random.key_impl(question.key)),
            weight=float(run.weights[client]),
            work=-1 if work is None else work,
            fresh=question.fresh,
            counted_round=int(run.counted[client, 0]),
            counted_exchange=int(run.counted[client, 1]),
            settled_round=int(run.settled[client, 0]),
            settled_exchange=int(run.settled[client, 1]),
            payload=payload,
        )

    def complaint(self, reasons: dict[int, str]) -> str:
        said = [f"client {client}: {why}" for client, why in sorted(reasons.items())]
        left_out = [] if len(said) <= 5 else [f"and {len(said) - 5} more"]
        attempts = self.run.terms.attempts
        times = "" if attempts == 1 else f" after {attempts} attempts"
        return (
            f"round {self.question.round}, phase {self.question.phase}: {len(self.answers)} clients answered "
            f"where {self.needed} are needed{times} ({'; '.join(said[:5] + left_out)})"
        )
