"""Flower's Grid as the server uses it: errors are logged, and end no run."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

log = logging.getLogger("fedbilevel.server")


class Transport:
    """A Grid whose errors end no run: a message that cannot be sent or fetched is logged and treated as lost."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.nodes: set[int] = set()  # that were online when Flower last said
        self.singly = False  # since a pull has failed: one bad message must not take others with it again
        self.bad: set[str] = set()  # messages whose answers could not be fetched, as was logged

    def online(self) -> set[int]:
        """The nodes that are online."""
        try:
            self.nodes = set(self.grid.get_node_ids())
        except Exception:
            log.warning("Flower does not say who is online", exc_info=True)
        return self.nodes

    def keys(self) -> dict[int, bytes]:
        """The public key with which each online node has registered, as Flower has it; without a key, b""."""
        try:
            return {node.node_id: node.public_key for node in self.grid.get_nodes()}
        except Exception:
            log.warning("Flower does not say which keys nodes have", exc_info=True)
            return {}

    def push(self, messages: list[Message]) -> list[str]:
        """Send messages; their ids, and "" for each that Flower did not take.

        Of such a one grids return another id, or none: the whole list is empty where one message is too large.
        """
        try:
            taken = set(self.grid.push_messages(messages))
        except Exception:
            log.warning("Flower did not take %d messages", len(messages), exc_info=True)
            taken = set()
        numbers = [message.metadata.message_id for message in messages]  # known as soon as they are pushed
        return [number if number in taken else "" for number in numbers]

    def pull(self, ids: Iterable[str]) -> dict[str, Message]:
        """Message id -> its response, for those that have come; other messages are ignored."""
        wanted = list(ids)
        messages: list[Message] = []
        for some in [[number] for number in wanted] if self.singly else [wanted] if wanted else []:
            try:
                messages += self.grid.pull_messages(some)
            except httpx.TransportError as error:  # the connection's fault, no message's
                log.warning("Flower cannot be asked for answers: %s", type(error).__name__)
                break
            except Exception:
                if not self.singly:
                    log.warning("answers could not be fetched together; from now on one by one", exc_info=True)
                    self.singly = True
                    return self.pull(wanted)
                if not self.bad.issuperset(some):
                    log.warning("the answer to message %s could not be fetched", some[0], exc_info=True)
                    self.bad.update(some)
        found = {message.metadata.reply_to_message_id: message for message in reversed(messages)}
        return {number: found[number] for number in wanted if number in found}
