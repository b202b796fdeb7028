"""Requests and responses as Flower's messages."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedbilevel.flower.wire.layout import Refusal
from fedbilevel.flower.wire.messages import RequestMessage, ResponseMessage, read

ACTION = "fedbilevel"
MESSAGE_TYPE = f"query.{ACTION}"
FIELDS, LEAVES = "fields", "leaves"
RAW = "fedbilevel.leaves"  # how an Array's bytes are to be read: our layout, not NumPy's
INLINE = 2**23  # bytes

log = logging.getLogger("fedbilevel.server")


def encode(said: RequestMessage | ResponseMessage) -> RecordDict:
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


def request_message(node: int, request: RequestMessage, seconds: float) -> Message:
    """A message that is worth nothing after some seconds: Flower's own default is half a day."""
    return Message(encode(request), node, MESSAGE_TYPE, group_id=f"{request.run[:8]}/{request.round}", ttl=seconds)


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


def decode(kind: type[Any], message: Message) -> Any:
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
