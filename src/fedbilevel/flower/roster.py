"""Who is there: which of Flower's nodes is which client of the population."""

from __future__ import annotations

import logging

from flwr.serverapp import Grid

from fedbilevel.flower.clock import Clock
from fedbilevel.flower.contract import Contract, difference
from fedbilevel.flower.records import question, said_in
from fedbilevel.flower.terms import Terms
from fedbilevel.flower.wire import Answer, Ask, Refusal

log = logging.getLogger("fedbilevel.server")


class Roster:
    """Greets every node once. A node counts if it agrees to the contract and names a client of the population."""

    def __init__(self, grid: Grid, contract: Contract, run: str, population: int, terms: Terms, clock: Clock) -> None:
        self.grid, self.contract, self.run, self.population = grid, contract, run, population
        self.terms, self.clock = terms, clock
        self.nodes: dict[int, int] = {}  # client -> node, of those online
        self.known: set[int] = set()  # nodes that were greeted
        self.greetings: dict[str, int] = {}  # message -> node, not answered yet
        self.refusals: dict[int, str] = {}  # node -> why it does not count
        self.spare: dict[int, int] = {}  # client -> node that is it as well: a restarted one, the old not given up yet

    def refresh(self) -> None:
        """See who has come and gone."""
        online = set(self.grid.get_node_ids())
        for client, node in list(self.nodes.items()):
            if node not in online:
                log.warning("client %d has gone (node %d)", client, node)
                del self.nodes[client]
                if (other := self.spare.pop(client, -1)) in online:
                    log.info("client %d is here (node %d)", client, other)
                    self.nodes[client] = other
        self.known &= online
        new = sorted(online - self.known)
        ask = Ask(run=self.run, contract=self.contract.text)
        sent = self.grid.push_messages([question(node, ask, self.terms.deadline) for node in new])
        self.greetings.update(zip(sent, new, strict=True))
        self.known.update(new)
        for message in list(self.grid.pull_messages(list(self.greetings))) if self.greetings else []:
            node = self.greetings.pop(message.metadata.reply_to_message_id)
            try:
                self.admit(node, said_in(Answer, message))
            except Refusal as refusal:
                log.warning("node %d does not take part: %s", node, refusal)
                self.refusals[node] = str(refusal)

    def admit(self, node: int, answer: Answer) -> None:
        """Note which client a node is."""
        if answer.refused:
            raise Refusal(answer.refused)
        if answer.contract != self.contract.text:
            raise Refusal(f"we do not agree: {difference(self.contract.text, answer.contract)}")
        client = answer.client
        if not 0 <= client < self.population:
            raise Refusal(f"it calls itself client {client}, of a population of {self.population}")
        if client in self.nodes:
            self.spare[client] = node
            raise Refusal(f"it calls itself client {client}, which node {self.nodes[client]} is already")
        log.info("client %d is here (node %d)", client, node)
        self.nodes[client] = node

    def wait(self, clients: list[int], enough: int) -> None:
        """Wait until all of these are here, at most `terms.join` seconds; longer only while fewer than `enough` are
        here and greetings are out (a first answer may have to wait for imports)."""
        began = self.clock.time()
        while True:
            self.refresh()
            here = sum(client in self.nodes for client in clients)
            waited = self.clock.time() - began
            limit = self.terms.deadline if self.greetings and here < enough else self.terms.join
            if here == len(clients) or waited >= limit:
                return
            self.clock.sleep(min(self.terms.poll, 0.002 + 0.05 * waited))
