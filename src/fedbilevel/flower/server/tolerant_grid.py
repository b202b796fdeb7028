"""Send and fetch Flower's messages. An error of Flower is logged and does not end the run."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

log = logging.getLogger("fedbilevel.server")


class TolerantGrid:
    """A grid of Flower whose errors do not end a run.

    If a message cannot be sent or fetched, this is logged, and the message is treated as lost.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.online: set[int] = set()  # the nodes that Flower last reported as online
        self.singly = False  # whether replies are fetched one by one, because one bad message makes a common pull fail
        self.unsent = ""  # the class of the error with which the last call of `push` failed; "" if it did not fail
        self.bad: set[str] = set()  # messages whose replies could not be fetched; the log has reported them

    def refresh(self) -> None:
        """Update which nodes are online."""
        try:
            self.online = set(self.grid.get_node_ids())
        except Exception:
            log.warning("Flower did not report which nodes are online", exc_info=True)

    def registered(self) -> dict[int, bytes]:
        """Return a dictionary: node -> its registered public key, in Flower's format; b"" for a node without a key."""
        try:
            return {node.node_id: node.public_key for node in self.grid.get_nodes()}
        except Exception:
            log.warning("Flower did not report which keys nodes have", exc_info=True)
            return {}

    def push(self, messages: list[Message]) -> list[str]:
        """Send messages. Return their ids, and "" in place of an id if Flower did not accept the message.

        For a message that Flower does not accept, its grids return a different id or no id. If one message is too
        large, they return no ids at all.
        """
        self.unsent = ""
        try:
            taken = set(self.grid.push_messages(messages))
        except Exception as error:
            log.warning("Flower did not accept %d messages", len(messages), exc_info=True)
            taken, self.unsent = set(), type(error).__name__
        numbers = [message.metadata.message_id for message in messages]  # set by `push_messages`
        return [number if number in taken else "" for number in numbers]

    def pull(self, ids: Iterable[str]) -> dict[str, Message]:
        """Return a dictionary: message id -> response, for all responses that have arrived.

        Other messages are ignored.
        """
        wanted = list(ids)
        messages: list[Message] = []
        for some in [[number] for number in wanted] if self.singly else [wanted] if wanted else []:
            try:
                messages += self.grid.pull_messages(some)
            except httpx.TransportError as error:  # the connection failed; no message is the cause
                log.warning("replies cannot be fetched, since Flower is not reached: %s", type(error).__name__)
                break
            except Exception:
                if not self.singly:
                    log.warning("replies could not be fetched together: fetching each by itself", exc_info=True)
                    self.singly = True
                    return self.pull(wanted)
                if not self.bad.issuperset(some):
                    log.warning("the reply to message %s could not be fetched", some[0], exc_info=True)
                    self.bad.update(some)
        found = {message.metadata.reply_to_message_id: message for message in reversed(messages)}
        return {number: found[number] for number in wanted if number in found}
