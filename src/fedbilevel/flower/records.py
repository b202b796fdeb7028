"""Questions and answers as Flower's messages."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbilevel.flower.wire import Answer, Ask, Refusal, read

ACTION = "fedbilevel"
MESSAGE_TYPE = f"query.{ACTION}"
FIELDS, LEAVES = "fields", "leaves"
RAW = "fedbilevel.leaves"  # how an Array's bytes are to be read: our layout, not NumPy's
INLINE = 2**23  # bytes

log = logging.getLogger("fedbilevel.server")


def content(said: Ask | Answer) -> RecordDict:
    """All arrays travel as one, up to INLINE bytes among the fields, beyond as an Array, which Flower cuts into chunks.

    Flower uploads and downloads every object of a message by itself, and an Array is three: with two clients and
    1.6 MB each way that is half of the SuperLink's work.
    """
    fields = {f.name: getattr(said, f.name) for f in dataclasses.fields(said)}
    if len(said.payload) <= INLINE:
        return RecordDict({FIELDS: ConfigRecord(fields)})
    del fields["payload"]
    leaves = Array(dtype="uint8", shape=(len(said.payload),), stype=RAW, data=said.payload)
    return RecordDict({FIELDS: ConfigRecord(fields), LEAVES: ArrayRecord({RAW: leaves})})


def question(node: int, ask: Ask, seconds: float) -> Message:
    """A message that is worth nothing after some seconds: Flower's own default is half a day."""
    return Message(content(ask), node, MESSAGE_TYPE, group_id=f"{ask.run[:8]}/{ask.round}", ttl=seconds)


class Post:
    """A Grid whose errors end no run: what cannot be sent or fetched is logged, and counts as not there."""

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
        """The answers that have come, by the message that they answer; what answers none of these is ignored."""
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


@contextmanager
def reading() -> Iterator[None]:
    """While one node's message is read: whatever goes wrong, that message is refused, and no more."""
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        log.warning("a message could not be read", exc_info=True)
        raise Refusal(f"reading it fails with {type(error).__name__}") from error


def said_in(kind: type[Any], message: Message) -> Any:
    """The Ask or Answer in a message.

    Raises:
        Refusal: Flower reports an error, or it is no message of ours.
    """
    if message.has_error():
        raise Refusal(f"Flower's error {message.error.code}: {(message.error.reason or '')[:300]}")
    records = dict(message.content)
    fields, leaves = records.pop(FIELDS, None), records.pop(LEAVES, None)
    if records or not isinstance(fields, ConfigRecord):
        raise Refusal("it is no message of fedbilevel's")
    named = dict(fields)
    payload = named.pop("payload", None)
    if payload is None and isinstance(leaves, ArrayRecord) and list(leaves) == [RAW]:
        payload, leaves = leaves[RAW].data, None
    if leaves is not None or type(payload) is not bytes:
        raise Refusal("it is no message of fedbilevel's")
    return read(kind, named, payload)
