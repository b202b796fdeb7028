"""Run a federation within one process, without a SuperLink or a network, for tests and research."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedbilevel.flower.versions import be_server

Delay = Callable[[int, Message], float]
"""(client, message) -> the seconds from the message to its reply."""


class VirtualClock:
    """A clock whose time passes only in `sleep`. A `sleep` ends early when the reply to a message is due."""

    tick = 0.001

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, int, Message]] = []  # a heap of (time of the reply, number of the message, message)

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now = min([self.now + seconds, *(when for when, *_ in self.due if when > self.now)])


class InProcess(Grid):
    """Flower's Grid within one process: clients are called as functions, one after the other, under a virtual clock.

    Messages are Flower's own, and the ClientApp is the same as in a real federation. A client works on one message at a
    time. The client is called when its reply is due, so that the order of all events depends only on `delay`.

    Args:
        client_app: the ClientApp of all clients.
        clients: the number of clients. They have the node configurations partition-id = 0, 1, … and the nodes 1, 2, ….
        run_config: the run configuration, which `flwr run` would pass on.
        delay: a function (client, message) -> seconds of the virtual clock from the message to its reply; a message
            with an infinite delay is lost. None: 0 seconds.
    """

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        *,
        run_config: Mapping[str, Any] | None = None,
        delay: Delay | None = None,
    ) -> None:
        self.client_app, self.clients, self.delay, self.clock = client_app, clients, delay, VirtualClock()
        self.run_config = dict(run_config or {})
        self.contexts: dict[int, Context] = {}  # node -> its context, which Flower would keep
        self.free: dict[int, float] = {}  # node -> the time at which it can start with its next message
        self.replies: dict[str, Message] = {}  # message -> its reply, until it is pulled
        self.nodes, self.numbers = itertools.count(1), itertools.count(1)
        for client in range(clients):
            self.join(client)
        be_server()

    def join(self, client: int) -> None:
        """Add a client as a new node with an empty context."""
        node = next(self.nodes)
        config: dict[str, Any] = {"partition-id": client, "num-partitions": self.clients}
        self.contexts[node] = Context(1, node, config, RecordDict(), self.run_config)
        self.free[node] = self.clock.time()

    def leave(self, client: int) -> None:
        """Remove the oldest node of a client. The messages that this node works on are lost."""
        del self.contexts[next(node for node in self.contexts if self.client(node) == client)]

    def client(self, node: int) -> int:
        """Return the id of a node's client."""
        return int(self.contexts[node].node_config["partition-id"])

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = []
        for message in messages:
            number, node = next(self.numbers), message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = str(number)
            sent.append(str(number))
            if node not in self.contexts:
                continue
            seconds = self.delay(self.client(node), message) if self.delay else 0.0
            if seconds < math.inf:
                due = max(self.clock.time(), self.free[node]) + seconds
                self.free[node] = round(due, 9)  # equal times remain equal in spite of rounding errors
                heapq.heappush(self.clock.due, (self.free[node], number, message))
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to these messages that are due by now, the earliest first."""
        due = self.clock.due
        while due and due[0][0] <= self.clock.time():
            message = heapq.heappop(due)[2]
            if message.metadata.dst_node_id in self.contexts:
                self.replies[message.metadata.message_id] = self.handle(message)
        wanted = set(message_ids)
        return [self.replies.pop(number) for number in list(self.replies) if number in wanted]

    def handle(self, message: Message) -> Message:
        """Return the client's reply to a copy of the message, so that server and client share no objects."""
        try:
            return self.client_app(copy.deepcopy(message), self.contexts[message.metadata.dst_node_id])
        except Exception as error:  # noqa: BLE001  as in Flower, where the error of an app becomes a reply
            return Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        waiting, replies = set(self.push_messages(messages)), []
        end = self.clock.time() + (math.inf if timeout is None else timeout)
        while True:
            replies += (new := self.pull_messages(waiting))
            waiting -= {message.metadata.reply_to_message_id for message in new}
            if not waiting or not self.clock.due or self.clock.time() >= end:
                return replies
            self.clock.sleep(end - self.clock.time())

    def set_run(self, run: object) -> None:
        raise NotImplementedError("InProcess has no SuperLink, and therefore no runs")

    @property
    def run(self) -> NoReturn:
        raise NotImplementedError("InProcess has no SuperLink, and therefore no runs")
