"""The clients that are online: which of Flower's nodes is which client of the population."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

from fedbilevel.flower.server.clock import ServerClock
from fedbilevel.flower.server.keys import one_form
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.server.transport import Transport
from fedbilevel.flower.wire.contract import Contract, difference
from fedbilevel.flower.wire.layout import Refusal
from fedbilevel.flower.wire.messages import RequestMessage, ResponseMessage
from fedbilevel.flower.wire.records import decode, reading, request_message

log = logging.getLogger("fedbilevel.server")


class ClientRegistry:
    """Greets nodes. A node counts if it agrees to the contract and names a client of the population that is free.

    Where `keys` are given (client -> public key, as `credentials.one_form` writes it), it must have registered with
    that client's key. One that does not count is greeted again after `terms.deadline` seconds, and when a client has
    gone whom it may be now.
    """

    def __init__(
        self,
        transport: Transport,
        contract: Contract,
        run: str,
        population: int,
        terms: Terms,
        clock: ServerClock,
        own: Mapping[int, Contract] = MappingProxyType({}),
        keys: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        self.transport, self.contract, self.run, self.population = transport, contract, run, population
        self.terms, self.clock, self.own, self.keys = terms, clock, own, keys
        self.nodes: dict[int, int] = {}  # client -> node, of those that count
        self.greeted: dict[int, float] = {}  # node -> when
        self.greetings: dict[str, int] = {}  # message -> node, not answered yet
        self.refusals: dict[int, str] = {}  # node -> why it does not count

    def contract_of(self, client: int) -> Contract:
        """The contract with a client; a client that holds a submodel has one of its own."""
        return self.own.get(client, self.contract)

    def refresh(self) -> None:
        """Take note of nodes that have come or gone, and greet new ones."""
        online = self.transport.online()
        for client, node in list(self.nodes.items()):
            if node not in online:
                log.warning("client %d has gone (node %d)", client, node)
                del self.nodes[client]
                self.greeted.clear()
        self.greeted = {node: when for node, when in self.greeted.items() if node in online}
        self.refusals = {node: why for node, why in self.refusals.items() if node in online}
        self.listen()
        self.greet(online - set(self.nodes.values()))
        self.listen()

    def listen(self) -> None:
        """Admit or refuse the nodes whose responses to greetings have come."""
        for number, message in self.transport.pull(self.greetings).items():
            node = self.greetings.pop(number)
            try:
                with reading():
                    self.admit(node, decode(ResponseMessage, message))
            except Refusal as refusal:
                if self.refusals.get(node) != str(refusal):
                    log.warning("node %d does not take part: %s", node, refusal)
                self.refusals[node] = str(refusal)

    def greet(self, nodes: Collection[int]) -> None:
        """Greet those of the nodes that were not greeted within the last `terms.deadline` seconds."""
        now, deadline = self.clock.time(), self.terms.deadline
        due = sorted(node for node in nodes if now - self.greeted.get(node, -math.inf) >= deadline)
        request = RequestMessage(run=self.run, contract=self.contract.text)
        sent = self.transport.push([request_message(node, request, deadline) for node in due]) if due else []
        self.greetings = {message: node for message, node in self.greetings.items() if node not in due}
        self.greetings.update((message, node) for message, node in zip(sent, due, strict=True) if message)
        self.greeted.update((node, now) for message, node in zip(sent, due, strict=True) if message)

    def admit(self, node: int, response: ResponseMessage) -> None:
        """Register a node as the client that it says it is.

        Raises:
            Refusal: the node cannot be that client.
        """
        if response.refused:
            raise Refusal(response.refused)
        client = response.client
        if not 0 <= client < self.population:
            raise Refusal(f"it calls itself client {client}, of a population of {self.population}")
        if response.contract != (expected := self.contract_of(client).text):
            raise Refusal(f"we do not agree: {difference(expected, response.contract)}")
        if self.keys and one_form(self.transport.keys().get(node, b"")) != self.keys.get(client):
            raise Refusal(f"it calls itself client {client}, who has another key")
        if (holder := self.nodes.get(client, node)) != node:
            raise Refusal(f"it calls itself client {client}, which node {holder} is already")
        log.info("client %d is here (node %d)", client, node)
        self.nodes[client] = node
        self.refusals.pop(node, None)

    def wait(self, clients: Collection[int], hoped: int, needed: int) -> None:
        """Wait until `hoped` of these clients are registered, at most `terms.join` seconds; up to `terms.deadline` only
        while fewer than `needed` are and greetings are unanswered (a first response may have to wait for imports)."""
        began = self.clock.time()
        while True:
            self.refresh()
            here = sum(client in self.nodes for client in clients)
            waited = self.clock.time() - began
            patient = self.greetings and here < needed
            if here >= hoped or waited >= (max(self.terms.join, self.terms.deadline) if patient else self.terms.join):
                return
            self.clock.sleep(min(self.terms.poll, self.clock.tick + 0.05 * waited))
