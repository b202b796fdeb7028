"""Requests over Flower's push and pull: at most one per client at a time, each with a deadline."""

from __future__ import annotations

from typing import NamedTuple

from flwr.app import Message

from fedbilevel.flower.server.clock import ServerClock
from fedbilevel.flower.server.registry import ClientRegistry
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.server.transport import Transport
from fedbilevel.flower.wire.layout import Refusal
from fedbilevel.flower.wire.messages import RequestMessage, ResponseMessage
from fedbilevel.flower.wire.records import decode, reading, request_message

Outcome = ResponseMessage | Refusal


class ClientReply(NamedTuple):
    """What became of one request: the client's response, or the reason why there is none."""

    client: int
    request: RequestMessage
    outcome: Outcome


class Dispatcher:
    """Sends requests to clients and collects their responses."""

    def __init__(self, transport: Transport, registry: ClientRegistry, terms: Terms, clock: ServerClock) -> None:
        self.transport, self.registry, self.terms, self.clock = transport, registry, terms, clock
        self.under_way: dict[
            int, tuple[str, RequestMessage, float]
        ] = {}  # client -> (message, question, when it is worthless)
        self.ready: list[ClientReply] = []  # arrived, and not taken yet

    def send(self, requests: dict[int, RequestMessage]) -> dict[int, str]:
        """Send requests to clients that have none under way; client -> why its request could not be sent."""
        if not requests:
            return {}
        nodes = self.registry.nodes
        failed = {client: "it is not online" for client in requests if client not in nodes}
        going = [client for client in requests if client in nodes]
        end = self.clock.time() + self.terms.deadline
        messages = [request_message(nodes[client], requests[client], self.terms.deadline) for client in going]
        for client, sent in zip(going, self.transport.push(messages), strict=True):
            if sent:
                self.under_way[client] = (sent, requests[client], end)
            else:
                failed[client] = "Flower did not take the message (is it too large?)"
        return failed

    def requests(self) -> list[tuple[int, RequestMessage]]:
        """(client, request) for each request under way."""
        return [(client, request) for client, (_, request, _) in self.under_way.items()]

    def unsettled(self) -> list[tuple[int, RequestMessage]]:
        """(client, request) for each request under way, or whose reply was not taken yet."""
        return self.requests() + [(reply.client, reply.request) for reply in self.ready]

    def look(self, began: float) -> None:
        """Collect replies; if there are none wait a little, for longer the more time has passed since `began`."""
        if not self.collect():
            self.clock.sleep(min(self.terms.poll, self.clock.tick + 0.05 * (self.clock.time() - began)))

    def collect(self) -> bool:
        """Move replies, and requests whose deadline has passed, to `ready`; True if there are any."""
        senders = {sent: client for client, (sent, _, _) in self.under_way.items()}
        before = len(self.ready)
        now = self.clock.time()  # before a pull that may take long: what came meanwhile is looked for once more
        for number, message in self.transport.pull(senders).items():
            client = senders[number]
            self.ready.append(ClientReply(client, self.under_way.pop(client)[1], opened(message)))
        for client in [c for c, (_, _, end) in self.under_way.items() if now >= end]:
            request = self.under_way.pop(client)[1]
            self.ready.append(ClientReply(client, request, Refusal(f"no answer within {self.terms.deadline:g} s")))
        return len(self.ready) > before


def opened(message: Message) -> Outcome:
    """The response in a message, or a refusal that says why there is none."""
    try:
        with reading():
            response: ResponseMessage = decode(ResponseMessage, message)
    except Refusal as refusal:
        return refusal
    return Refusal(response.refused) if response.refused else response
