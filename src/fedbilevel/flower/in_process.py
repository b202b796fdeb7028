"""A federation within one process: Flower's Grid without SuperLink, network or processes, for tests and research."""

from __future__ import annotations

import copy
import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

Delay = Callable[[int, Message], float]


class VirtualClock:
    """Seconds that pass when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class InProcess(Grid):
    """Clients as function calls, one after the other, under a virtual clock.

    Messages are Flower's own, and the same ClientApp serves them. A client works on one message at a time; the message
    is handled when its answer is due, so that the order of all events depends on `delay` alone.

    Args:
        client_app: the ClientApp of all clients.
        clients: how many; they get the node configurations partition-id = 0, 1, ….
        run_config: what `flwr run` would pass on.
        node_config: more of each client's node configuration.
        delay: (client, message) -> seconds from the message to its answer, on the clock; infinite loses it. None: 0.
    """

    def __init__(
        self,
        client_app: ClientApp,
        clients: int,
        *,
        run_config: Mapping[str, Any] | None = None,
        node_config: Mapping[str, Any] | None = None,
        delay: Delay | None = None,
    ) -> None:
        self.client_app, self.delay, self.clock = client_app, delay, VirtualClock()
        self.contexts = {
            client + 1: Context(
                run_id=1,
                node_id=client + 1,
                node_config={**(node_config or {}), "partition-id": client, "num-partitions": clients},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for client in range(clients)
        }
        self.offline: set[int] = set()  # clients, for tests
        self.free = dict.fromkeys(self.contexts, 0.0)  # node -> when it can start on its next message
        self.due: list[tuple[float, int, Message]] = []  # a heap
        self.numbers = itertools.count(1)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 0

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if node - 1 not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = []
        for message in messages:
            number, node = next(self.numbers), message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = str(number)
            seconds = self.delay(node - 1, message) if self.delay else 0.0
            when = max(self.clock.time(), self.free[node]) + seconds
            if seconds != float("inf") and node - 1 not in self.offline:
                self.free[node] = when
                heapq.heappush(self.due, (when, number, message))
            sent.append(str(number))
        return sent

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted, now = set(message_ids), self.clock.time()
        answers, kept = [], []
        while self.due and self.due[0][0] <= now:
            entry = heapq.heappop(self.due)
            if entry[2].metadata.message_id in wanted:
                answers.append(self.handle(entry[2]))
            else:
                kept.append(entry)
        for entry in kept:
            heapq.heappush(self.due, entry)
        return answers

    def handle(self, message: Message) -> Message:
        """The client's answer; what a wire would keep apart is copied."""
        try:
            context = self.contexts[message.metadata.dst_node_id]
            return self.client_app(copy.deepcopy(message), context)
        except Exception as error:  # noqa: BLE001  as Flower does: an app's error is an answer
            return Message(Error(code=2, reason=f"{type(error).__name__}: {error}"), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        waiting, answers = set(self.push_messages(messages)), []
        end = self.clock.time() + (float("inf") if timeout is None else timeout)
        while waiting and self.due and self.clock.time() < end:
            answers += (new := self.pull_messages(waiting))
            waiting -= {message.metadata.reply_to_message_id for message in new}
            self.clock.sleep(max(0.0, self.due[0][0] - self.clock.time()) if self.due else 0.0)
        return answers

    def set_run(self, run: Run) -> None:
        raise NotImplementedError("there is no SuperLink that would know of runs")

    @property
    def run(self) -> Run:
        raise NotImplementedError("there is no SuperLink that would know of runs")
