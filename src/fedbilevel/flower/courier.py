"""Our own loop over Flower's push and pull: one message per client under way at most, none for ever."""

from __future__ import annotations

from typing import NamedTuple

from flwr.app import Message

from fedbilevel.flower.clock import Clock
from fedbilevel.flower.records import Post, question, reading, said_in
from fedbilevel.flower.roster import Roster
from fedbilevel.flower.terms import Terms
from fedbilevel.flower.wire import Answer, Ask, Refusal

Outcome = Answer | Refusal


class Letter(NamedTuple):
    """What has come back from a client."""

    client: int
    ask: Ask
    outcome: Outcome


class Courier:
    """Brings questions to clients and their answers back."""

    def __init__(self, post: Post, roster: Roster, terms: Terms, clock: Clock) -> None:
        self.post, self.roster, self.terms, self.clock = post, roster, terms, clock
        self.under_way: dict[int, tuple[str, Ask, float]] = {}  # client -> (message, question, when it is worthless)
        self.ready: list[Letter] = []  # arrived, and not taken yet

    def send(self, asks: dict[int, Ask]) -> dict[int, str]:
        """Send what can be sent, to clients with nothing under way; of the others, why not."""
        if not asks:
            return {}
        nodes = self.roster.nodes
        failed = {client: "it is not online" for client in asks if client not in nodes}
        going = [client for client in asks if client in nodes]
        end = self.clock.time() + self.terms.deadline
        messages = [question(nodes[client], asks[client], self.terms.deadline) for client in going]
        for client, sent in zip(going, self.post.push(messages), strict=True):
            if sent:
                self.under_way[client] = (sent, asks[client], end)
            else:
                failed[client] = "Flower did not take the message (is it too large?)"
        return failed

    def asks(self) -> list[tuple[int, Ask]]:
        """Who works on what."""
        return [(client, ask) for client, (_, ask, _) in self.under_way.items()]

    def unsettled(self) -> list[tuple[int, Ask]]:
        """Those, and whose answers were not taken yet."""
        return self.asks() + [(letter.client, letter.ask) for letter in self.ready]

    def look(self, began: float) -> None:
        """Take in what has arrived since the last look, or else wait a little, longer as time goes on."""
        if not self.collect():
            self.clock.sleep(min(self.terms.poll, self.clock.tick + 0.05 * (self.clock.time() - began)))

    def collect(self) -> bool:
        """Take in what has come back, deadlines that have passed included; whether anything has."""
        senders = {sent: client for client, (sent, _, _) in self.under_way.items()}
        before = len(self.ready)
        now = self.clock.time()  # before a pull that may take long: what came meanwhile is looked for once more
        for number, message in self.post.pull(senders).items():
            client = senders[number]
            self.ready.append(Letter(client, self.under_way.pop(client)[1], opened(message)))
        for client in [c for c, (_, _, end) in self.under_way.items() if now >= end]:
            ask = self.under_way.pop(client)[1]
            self.ready.append(Letter(client, ask, Refusal(f"no answer within {self.terms.deadline:g} s")))
        return len(self.ready) > before


def opened(message: Message) -> Outcome:
    """The answer in a message, or why there is none."""
    try:
        with reading():
            answer: Answer = said_in(Answer, message)
    except Refusal as refusal:
        return refusal
    return Refusal(answer.refused) if answer.refused else answer
