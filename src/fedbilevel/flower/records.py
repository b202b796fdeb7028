"""Questions and answers as Flower's messages."""

from __future__ import annotations

import dataclasses
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedbilevel.flower.wire import Answer, Ask, Refusal, read

ACTION = "fedbilevel"
MESSAGE_TYPE = f"query.{ACTION}"
FIELDS, LEAVES = "fields", "leaves"
RAW = "fedbilevel.leaves"  # how an Array's bytes are to be read: our layout, not NumPy's
INLINE = 2**23  # bytes


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


def push(grid: Grid, messages: list[Message]) -> list[str]:
    """Send messages; their ids, and "" for each that Flower did not take.

    Of such a one grids return another id, or none: the whole list is empty where one message is too large.
    """
    taken = set(grid.push_messages(messages))
    numbers = [message.metadata.message_id for message in messages]  # known as soon as they are pushed
    return [number if number in taken else "" for number in numbers]


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
