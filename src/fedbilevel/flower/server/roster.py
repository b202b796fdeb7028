"""Connect to clients: find which node of Flower is which client, send requests, and collect replies."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

from flwr.serverapp import Grid

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.flower import wire
from fedbilevel.flower.refusal import ClientNames, Code, Refusal
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.server.tolerant_grid import TolerantGrid
from fedbilevel.flower.wire import Contract, RequestMessage, ResponseMessage

log = logging.getLogger("fedbilevel.server")


class ServerClock(Protocol):
    """A clock: `time` returns seconds since some moment, `sleep` waits, and `tick` is the shortest wait."""

    tick: float

    def time(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class WallClock:
    """The machine's clock. A tick is so long that the SuperLink has time for messages between two requests."""

    tick = 0.03

    def time(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def public_keys(directory: Path, clients: int) -> dict[int, bytes]:
    """Read the public keys of all clients, in the form of `der_of`, from client-0.pub, client-1.pub, … in a folder.

    Raises:
        ConfigurationError: a client's file is missing or has no public key, or two clients have the same key.
    """
    found: dict[int, bytes] = {}
    for client in range(clients):
        path = directory / f"client-{client}.pub"
        try:
            key = der_of(path.read_bytes())
        except OSError as error:
            why = error.strerror or error
            raise ConfigurationError(
                f"client {client} of {clients} has no public key: {why}", where=str(path)
            ) from error
        if key is None:
            raise ConfigurationError("it has no public key in the format of OpenSSH or PEM", where=str(path))
        if key in found.values():
            other = next(holder for holder, theirs in found.items() if theirs == key)
            raise ConfigurationError(f"client {client} has the same key as client {other}", where=str(path))
        found[client] = key
    return found


def der_of(key: bytes) -> bytes | None:
    """Return a public key in DER form; None if `key` is not a public key.

    In DER form, equal keys are equal bytes.

    `key` is in the form of OpenSSH or PEM.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    load = serialization.load_pem_public_key if b"-----BEGIN" in key[:64] else serialization.load_ssh_public_key
    try:
        known = load(key)
    except (ValueError, UnsupportedAlgorithm):
        return None
    return known.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


GREETING = 20
"""How long a reply to a greeting is awaited, in units of `Terms.deadline`.

The time is long because replies to greetings are fetched only between rounds, and a round may last several deadlines.
"""

Outcome = ResponseMessage | Refusal


class ClientReply(NamedTuple):
    """The outcome of a request: the client's response, or the reason why there is none."""

    client: int
    request: RequestMessage
    outcome: Outcome

    def response(self) -> ResponseMessage:
        """Return the response of this client to this request.

        Raises:
            Refusal: there is no response, or it comes from another client or belongs to another request.
        """
        outcome, request = self.outcome, self.request
        if isinstance(outcome, Refusal):
            raise outcome
        outcome.check()
        if (outcome.run, outcome.round, outcome.exchange) != (request.run, request.round, request.exchange):
            raise Refusal(Code.MALFORMED, "it replies to another message")
        if outcome.client != self.client:
            raise Refusal(Code.MALFORMED, f"client {self.client} replies as client {outcome.client}")
        return outcome


class Roster:
    """The clients of a run, with their nodes, the requests to them, and their replies.

    An error of Flower does not end the run: `TolerantGrid` logs it, and treats the message as lost.

    A node is accepted as a client if it agrees to the contract and claims an id of the population that no other node
    has. If `keys` are given (client -> public key, in the form of `der_of`), the node must also have registered with
    the key of this client. A node that is refused is greeted again after `terms.deadline` seconds, or as soon as a
    client has left, since the node may then be this client.
    """

    def __init__(
        self,
        grid: Grid,
        contract: Contract,
        run: str,
        population: int,
        terms: Terms,
        clock: ServerClock,
        own: Mapping[int, Contract] = MappingProxyType({}),
        keys: Mapping[int, bytes] = MappingProxyType({}),
        names: ClientNames = ClientNames(),  # noqa: B008  it is frozen
    ) -> None:
        self.grid = TolerantGrid(grid)
        self.contract, self.run, self.population = contract, run, population
        self.terms, self.clock, self.own, self.keys, self.names = terms, clock, own, keys, names
        self.nodes: dict[int, int] = {}  # client -> its node
        self.greeted: dict[int, float] = {}  # node -> the time of its last greeting
        self.greetings: dict[str, int] = {}  # message -> node, for greetings without a reply
        self.refusals: dict[int, Refusal] = {}  # node -> why it is not accepted as a client
        # client -> (id of the message, request, time after which the reply does not count)
        self.under_way: dict[int, tuple[str, RequestMessage, float]] = {}
        self.ready: list[ClientReply] = []  # replies that have arrived and that no exchange has taken

    def contract_of(self, client: int) -> Contract:
        """Return the contract with a client. A client that holds a submodel has a contract of its own."""
        return self.own.get(client, self.contract)

    def refresh(self) -> None:
        """Update which nodes are online, and greet new nodes."""
        self.grid.refresh()
        online = self.grid.online
        for client, node in list(self.nodes.items()):
            if node not in online:
                log.warning("%s has left (node %d)", self.names.one(client), node)
                del self.nodes[client]
                self.greeted.clear()
        self.greeted = {node: when for node, when in self.greeted.items() if node in online}
        self.refusals = {node: why for node, why in self.refusals.items() if node in online}
        self.listen()
        self.greet(online - set(self.nodes.values()))
        self.listen()

    def listen(self) -> None:
        """Admit or refuse the nodes whose responses to greetings have arrived."""
        for number, message in self.grid.pull(self.greetings).items():
            node = self.greetings.pop(number)
            try:
                with wire.reading():
                    self.admit(node, wire.decode(ResponseMessage, message))
            except Refusal as refusal:
                mine = der_of(self.grid.registered().get(node, b"")) if self.keys else None
                by_key = next((client for client, key in self.keys.items() if key == mine), None)
                refusal.client = refusal.client if by_key is None else by_key
                if refusal.code is Code.LATE and node in self.refusals:
                    continue  # its earlier refusal is still valid
                if node not in self.refusals or self.refusals[node].line != refusal.line:
                    log.warning("node %d%s does not take part: %s", node, self.whose(refusal, by_key), refusal.line)
                self.refusals[node] = refusal

    def whose(self, refusal: Refusal, by_key: int | None) -> str:
        """Say in words which site a refused node belongs to, by its key or by its claim; "" if sites have no names."""
        if refusal.client is None or self.names.site(refusal.client) is None:
            return ""
        verb = "claims to be" if by_key is None else "has the key of"
        return f", which {verb} {self.names.one(refusal.client)},"

    def greet(self, nodes: Collection[int]) -> None:
        """Greet these nodes, except any that was greeted within the last `terms.deadline` seconds."""
        now, deadline = self.clock.time(), self.terms.deadline
        due = sorted(node for node in nodes if now - self.greeted.get(node, -math.inf) >= deadline)
        request = RequestMessage(run=self.run, contract=self.contract.text)
        sent = self.grid.push([wire.request_message(node, request, GREETING * deadline) for node in due]) if due else []
        self.greetings = {message: node for message, node in self.greetings.items() if node not in due}
        self.greetings.update((message, node) for message, node in zip(sent, due, strict=True) if message)
        self.greeted.update((node, now) for message, node in zip(sent, due, strict=True) if message)

    def admit(self, node: int, response: ResponseMessage) -> None:
        """Register a node as the client whose id its response has.

        Raises:
            Refusal: the node cannot be this client.
        """
        client = response.client
        with wire.reading(client if 0 <= client < self.population else None):
            response.check()
            if not 0 <= client < self.population:
                raise Refusal(Code.PLACE, f"the node claims to be client {client}, not 0 to {self.population - 1}")
            if response.contract != (expected := self.contract_of(client).text):
                raise wire.disagreement(server=expected, site=response.contract)
            claim = f"the node claims to be {self.names.one(client)}"
            if self.keys and der_of(self.grid.registered().get(node, b"")) != self.keys.get(client):
                raise Refusal(Code.KEY, f"{claim}, which has another key")
            if (holder := self.nodes.get(client, node)) != node:
                raise Refusal(Code.PLACE, f"{claim}, but node {holder} is this client")
        log.info("%s has joined (node %d)", self.names.one(client), node)
        self.nodes[client] = node
        self.refusals.pop(node, None)

    def why_absent(self, clients: Iterable[int]) -> dict[int, Refusal]:
        """Return why clients have no node, as a dictionary: client -> reason.

        A node that claims the client's id was refused, or the client's node has not answered the greeting yet, or it is
        not online. The key of a silent node says which client it is. Without keys, a silent node may be any of the
        absent clients, or none of them. Then the clients are late only if there are as many silent nodes as absent
        clients; otherwise the same silent node would make several clients late.
        """
        refused = {why.client: why for why in self.refusals.values() if why.client is not None}
        silent = self.grid.online - set(self.nodes.values()) - self.refusals.keys()
        absent = self.population - len(self.nodes.keys() | refused.keys())
        registered = self.grid.registered() if self.keys and silent else {}
        holders = {der_of(registered.get(node, b"")) for node in silent}

        def why(client: int) -> Refusal:
            silence = "has not answered the server's greeting yet"
            if self.keys:
                if self.keys[client] in holders:
                    return Refusal(Code.LATE, f"its SuperNode is online, but {silence}", client)
            elif silent and len(silent) >= absent:
                return Refusal(Code.LATE, f"a SuperNode that is online, and may be this client, {silence}", client)
            elif silent:
                few = f"of {absent} absent clients, at most {len(silent)} can have an online SuperNode that {silence}"
                return Refusal(Code.ABSENT, f"it is probably not online: {few}", client)
            return Refusal(Code.ABSENT, "not online", client)

        return {client: refused.get(client) or why(client) for client in clients}

    def wait(self, clients: Collection[int], hoped: int, needed: int) -> None:
        """Wait until `hoped` of these clients are registered, for at most `terms.join` seconds.

        If fewer than `needed` are registered and some greetings have no reply yet, the wait may last up to
        `terms.deadline` seconds, if that is longer. A client may have to import modules before its first response.
        """
        began = self.clock.time()
        while True:
            self.refresh()
            here = sum(client in self.nodes for client in clients)
            waited = self.clock.time() - began
            patient = self.greetings and here < needed
            if here >= hoped or waited >= (max(self.terms.join, self.terms.deadline) if patient else self.terms.join):
                return
            self.clock.sleep(min(self.terms.poll, self.clock.tick + 0.05 * waited))

    def send(self, requests: dict[int, RequestMessage]) -> dict[int, Refusal]:
        """Send requests to clients that have no pending request. Return a dictionary: client -> why sending failed."""
        if not requests:
            return {}
        nodes = self.nodes
        failed = self.why_absent(client for client in requests if client not in nodes)
        going = [client for client in requests if client in nodes]
        end = self.clock.time() + self.terms.deadline
        messages = [wire.request_message(nodes[client], requests[client], self.terms.deadline) for client in going]
        for client, sent in zip(going, self.grid.push(messages), strict=True):
            if sent:
                self.under_way[client] = (sent, requests[client], end)
            else:
                failed[client] = self.why_unsent(client)
        return failed

    def why_unsent(self, client: int) -> Refusal:
        """Return why the last messages were not sent: the call of Flower failed, or Flower did not accept them."""
        if error := self.grid.unsent:
            return Refusal(Code.UNSENT, f"the request could not be handed to the SuperLink ({error})", client)
        return Refusal(Code.LARGE, "Flower did not accept the message; it may be too large", client)

    def requests(self) -> list[tuple[int, RequestMessage]]:
        """List (client, request) for each pending request."""
        return [(client, request) for client, (_, request, _) in self.under_way.items()]

    def unsettled(self) -> list[tuple[int, RequestMessage]]:
        """List (client, request) for each pending request, and for each reply that no exchange has taken."""
        return self.requests() + [(reply.client, reply.request) for reply in self.ready]

    def look(self, began: float) -> None:
        """Collect replies. If there are none, wait; the wait is longer if more time has passed since `began`."""
        if not self.collect():
            self.clock.sleep(min(self.terms.poll, self.clock.tick + 0.05 * (self.clock.time() - began)))

    def collect(self) -> bool:
        """Move new replies, and requests whose deadline has passed, to `ready`; return whether there were any."""
        senders = {sent: client for client, (sent, _, _) in self.under_way.items()}
        before = len(self.ready)
        now = self.clock.time()  # before the pull: the next pull finds replies that arrive during this one
        for number, message in self.grid.pull(senders).items():
            client = senders[number]
            try:
                with wire.reading(client):
                    outcome: Outcome = wire.decode(ResponseMessage, message)
            except Refusal as refusal:
                outcome = refusal
            self.ready.append(ClientReply(client, self.under_way.pop(client)[1], outcome))
        for client in [c for c, (_, _, end) in self.under_way.items() if now >= end]:
            request = self.under_way.pop(client)[1]
            late = Refusal(Code.LATE, f"no reply within {self.terms.deadline:g} s", client)
            self.ready.append(ClientReply(client, request, late))
        return len(self.ready) > before


def tell_stalled(failed: dict[int, Refusal], asked: int, circumstances: str = "") -> None:
    """If most online clients are late, change their refusals so that they say so: the cause is not a single client.

    Args:
        failed: client -> why it has failed in an attempt at an exchange.
        asked: the number of clients that the attempt concerns.
        circumstances: the end of the new texts.
    """
    late = [client for client, why in failed.items() if why.code is Code.LATE]
    online = asked - sum(why.code is Code.ABSENT for why in failed.values())
    if len(late) >= 2 and 2 * len(late) > online:
        for client in late:
            text = f"{failed[client].why}; {len(late)} of {online} online clients are late at the same time"
            failed[client] = Refusal(Code.STALLED, f"{text}{circumstances}", client)


def ask(roster: Roster, requests: dict[int, RequestMessage]) -> tuple[list[ClientReply], dict[int, Refusal]]:
    """Send requests that belong to no phase, such as questions, and wait for their outcomes.

    Replies to requests of phases remain in `Roster.ready`.

    Returns:
        The outcomes of the requests that were sent, and a dictionary: client -> why its request could not be sent.
    """
    began, kinds = roster.clock.time(), {request.phase for request in requests.values()}
    failed = roster.send(requests)
    while any(request.phase in kinds for _, request in roster.requests()):
        roster.look(began)
    found = [reply for reply in roster.ready if reply.request.phase in kinds]
    roster.ready = [reply for reply in roster.ready if reply.request.phase not in kinds]
    return found, failed
