"""Our own loop over Flower's push and pull: one message per client under way at most, none for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from flwr.app import Message

from fedbilevel.flower.clock import Clock
from fedbilevel.flower.records import Post, question, reading, said_in
from fedbilevel.flower.roster import Roster
from fedbilevel.flower.terms import Terms
from fedbilevel.flower.wire import Answer, Ask, Refusal

Outcome = Answer | Refusal


class Courier:
    """Brings questions to clients and their answers back."""

    def __init__(self, post: Post, roster: Roster, terms: Terms, clock: Clock) -> None:
        self.post, self.roster, self.terms, self.clock = post, roster, terms, clock
        self.under_way: dict[int, tuple[str, Ask, float]] = {}  # client -> (message, question, when it is worthless)
        self.ready: list[tuple[int, Ask, Outcome]] = []  # arrived, and not handed out yet

    def send(self, asks: dict[int, Ask]) -> dict[int, str]:
        """Send what can be sent, to clients with nothing under way; of the others, why not."""
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

    def listen(
        self, wanted: Callable[[Ask], bool], enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[int, Ask, Outcome]]:
        """Answers to the questions that are wanted, as they arrive, until there are enough or none can come.

        Answers to others are kept for whoever wants them.
        """
        began = self.clock.time()
        while not enough():
            place = next((i for i, (_, ask, _) in enumerate(self.ready) if wanted(ask)), None)
            if place is not None:
                yield self.ready.pop(place)
            elif any(wanted(ask) for _, ask, _ in self.under_way.values()):
                self.look(began)
            else:
                return

    def settle(self, clients: Iterable[int]) -> None:
        """Wait until none of these has a message under way."""
        began, clients = self.clock.time(), set(clients)
        while clients & set(self.under_way):
            self.look(began)

    def busy(self, client: int, wanted: Callable[[Ask], bool]) -> bool:
        """Whether the client has a message that was not answered, or an answer that is wanted here."""
        return client in self.under_way or any(one == client and wanted(ask) for one, ask, _ in self.ready)

    def look(self, began: float) -> None:
        """Take in what has arrived since the last look, or else wait a little, longer as time goes on."""
        if new := self.arrivals():
            self.ready += new
        else:
            self.clock.sleep(min(self.terms.poll, self.clock.tick + 0.05 * (self.clock.time() - began)))

    def arrivals(self) -> list[tuple[int, Ask, Outcome]]:
        """What has come back, deadlines that have passed included."""
        senders = {sent: client for client, (sent, _, _) in self.under_way.items()}
        arrived: list[tuple[int, Ask, Outcome]] = []
        now = self.clock.time()  # before a pull that may take long: what came meanwhile is looked for once more
        for number, message in self.post.pull(senders).items():
            client = senders[number]
            arrived.append((client, self.under_way.pop(client)[1], opened(message)))
        for client in [c for c, (_, _, end) in self.under_way.items() if now >= end]:
            ask = self.under_way.pop(client)[1]
            arrived.append((client, ask, Refusal(f"no answer within {self.terms.deadline:g} s")))
        return arrived


def opened(message: Message) -> Outcome:
    """The answer in a message, or why there is none."""
    try:
        with reading():
            answer: Answer = said_in(Answer, message)
    except Refusal as refusal:
        return refusal
    return Refusal(answer.refused) if answer.refused else answer
