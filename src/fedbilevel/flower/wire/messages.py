"""The two messages of a federation: a request of the server and the response of a client."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbilevel.flower.wire.layout import Refusal

TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "bytes": bytes, "list[str]": list}
"""Of a message's fields, by their annotations."""
METRICS = "per-client metrics"  # in place of a phase, of which none has such a name: x and y, to be measured


NOT_FINITE = "not finite in"
FAILED = "the phase failed; the client's log says more"
"""The text of every error of a client under privacy."""


def tells_of_numbers(why: str) -> bool:
    """Whether a refusal, a client's or ours, may be for numbers that are not finite."""
    return NOT_FINITE in why or FAILED in why


def is_run(name: str) -> bool:
    """Whether this may be the name of a run; clients keep files under it."""
    return re.fullmatch(r"[0-9a-f]{8,64}", name) is not None


@dataclass(frozen=True, kw_only=True)
class RequestMessage:
    """A request to one client. With an empty `phase` it is a greeting, which asks for the client's id and contract."""

    run: str  # of the whole run, resumptions included
    contract: str  # the digest of what was agreed, or, greeting, its whole text
    round: int = 0
    exchange: int = 0  # its number within the round
    phase: str = ""
    call: str = ""  # which of the contract's calls
    key: bytes = b""  # the exchange's
    key_kind: str = ""
    weight: float = 1.0
    work: int = -1  # local steps, where the population has a word in it; else -1
    fresh: bool = False  # a fresh cohort: clients are asked without what they keep
    counted_round: int = -1  # of this client's last answer that counted and could change what it keeps; -1: none did
    counted_exchange: int = -1
    settled_round: int = -1  # the same as it was when this round began: from there a run that was stopped goes on
    settled_exchange: int = -1
    payload: bytes = b""


@dataclass(frozen=True, kw_only=True)
class ResponseMessage:
    """A client's response: the reply of a phase, or, where `refused` is not empty, the reason why there is none."""

    run: str
    round: int
    exchange: int
    client: int
    contract: str = ""  # its whole text, in the answer to a greeting
    refused: str = ""
    layout: list[str] = field(default_factory=list)
    gradients: int = 0
    hvps: int = 0
    metrics: str = "{}"  # JSON: name -> number
    epsilon: float = 0.0  # what the client has spent of its privacy so far
    delta: float = 0.0
    payload: bytes = b""

    def numbers(self) -> dict[str, float]:
        """The metrics."""
        try:
            found = json.loads(self.metrics)
            return {name: float(value) for name, value in found.items()}
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise Refusal("its metrics are not numbers by name") from None


def read(kind: type[Any], fields: Mapping[str, Any], payload: bytes) -> Any:
    """An Ask or an Answer from the fields of a record, each of its own type, none missing, none too many."""
    wanted = {f.name: f for f in dataclasses.fields(kind) if f.name != "payload"}
    if odd := sorted(set(fields) ^ set(wanted)):
        raise Refusal(f"the fields of the message differ in {', '.join(odd)[:200]}: another version of fedbilevel?")
    for name, f in wanted.items():
        value = fields[name]
        if type(value) is not TYPES[str(f.type)] or (
            isinstance(value, list) and any(type(i) is not str for i in value)
        ):
            raise Refusal(f"field {name} of the message is a {type(value).__name__}, not a {f.type}")
    return kind(**fields, payload=payload)
