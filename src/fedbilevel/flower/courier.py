"""Our own loop over Flower's push and pull: one message per client under way at most, none for ever."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from flwr.serverapp import Grid

from fedbilevel.flower.clock import Clock
from fedbilevel.flower.records import question, said_in
from fedbilevel.flower.roster import Roster
from fedbilevel.flower.terms import Terms
from fedbilevel.flower.wire import Answer, Ask, Refusal

log = logging.getLogger("fedbilevel.server")

Outcome = Answer | Refusal


class Courier:
    """Brings questions to clients and their answers back."""

    def __init__(self, grid: Grid, roster: Roster, terms: Terms, clock: Clock) -> None:
        self.grid, self.roster, self.terms, self.clock = grid, roster, terms, clock
        self.under_way: dict[int, tuple[str, Ask, float]] = {}  # client -> (message, question, when it is worthless)
        self.ready: list[tuple[int, Ask, Outcome]] = []  # arrived, and not handed out yet

    def send(self, asks: dict[int, Ask]) -> dict[int, Refusal]:
        """Send what can be sent; the rest is answered at once by the reason."""
        refused: dict[int, Refusal] = {}
        going: dict[int, Ask] = {}
        for client, ask in asks.items():
            if client not in self.roster.nodes:
                refused[client] = Refusal("it is not online")
            elif self.busy(client):
                refused[client] = Refusal("it has not answered an earlier message yet")
            else:
                going[client] = ask
        end = self.clock.time() + self.terms.deadline
        messages = [question(self.roster.nodes[c], ask, self.terms.deadline) for c, ask in going.items()]
        for (client, ask), sent in zip(going.items(), self.grid.push_messages(messages), strict=True):
            if sent:
                self.under_way[client] = (sent, ask, end)
            else:
                refused[client] = Refusal("Flower did not take the message")
        return refused

    def arrivals(self) -> list[tuple[int, Ask, Outcome]]:
        """What has come back since the last look, deadlines that have passed included."""
        if not self.under_way:
            return []
        senders = {sent: client for client, (sent, _, _) in self.under_way.items()}
        arrived: list[tuple[int, Ask, Outcome]] = []
        for message in self.grid.pull_messages(list(senders)):
            client = senders.get(message.metadata.reply_to_message_id)
            if client is None or client not in self.under_way:
                continue
            ask = self.under_way.pop(client)[1]
            arrived.append((client, ask, opened(message)))
        now = self.clock.time()
        for client in [c for c, (_, _, end) in self.under_way.items() if now >= end]:
            ask = self.under_way.pop(client)[1]
            arrived.append((client, ask, Refusal(f"no answer within {self.terms.deadline:g} s")))
        return arrived

    def listen(self, enough: Callable[[], bool] = lambda: False) -> Iterator[tuple[int, Ask, Outcome]]:
        """Answers as they arrive, until there are enough or nothing is under way."""
        began = self.clock.time()
        while (self.ready or self.under_way) and not enough():
            self.ready += [] if self.ready else self.arrivals()
            if self.ready:
                yield self.ready.pop(0)
            else:
                self.clock.sleep(min(self.terms.poll, 0.001 + 0.05 * (self.clock.time() - began)))

    def busy(self, client: int) -> bool:
        """Whether the client has a message that was not answered, or an answer that nobody has asked for yet."""
        return client in self.under_way or any(ready[0] == client for ready in self.ready)


def opened(message: object) -> Outcome:
    """The answer in a message, or why there is none."""
    try:
        answer: Answer = said_in(Answer, message)  # type: ignore[arg-type]
    except Refusal as refusal:
        return refusal
    return Refusal(answer.refused) if answer.refused else answer
