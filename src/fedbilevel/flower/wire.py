"""What travels: trees as plain bytes, and the two messages, a question and its answer. Nothing is ever unpickled."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from fedbilevel.core.errors import FedbilevelError
from fedbilevel.core.tree import PyTree, nbytes

TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "bytes": bytes, "list[str]": list}
"""Of a message's fields, by their annotations."""
LONGEST_REFUSAL = 1000  # characters
METRICS = "per-client metrics"  # in place of a phase, of which none has such a name: x and y, to be measured


class Refusal(FedbilevelError):
    """A message that must not count; the text says why, without any value of the data.

    Parts of it may be the other side's words: it is one line, not a long one, and commands no terminal.
    """

    def __init__(self, text: str) -> None:
        line = " ".join(text[:LONGEST_REFUSAL].split())
        super().__init__("".join(character if character.isprintable() else "�" for character in line))


NOT_FINITE = "not finite in"
FAILED = "the phase failed; the client's log says more"
"""All that a client under privacy says of an error."""


def tells_of_numbers(why: str) -> bool:
    """Whether a refusal, a client's or ours, may be for numbers that are not finite."""
    return NOT_FINITE in why or FAILED in why


def is_run(name: str) -> bool:
    """Whether this may be the name of a run; clients keep files under it."""
    return re.fullmatch(r"[0-9a-f]{8,64}", name) is not None


def layout(tree: PyTree) -> list[str]:
    """One line for each leaf: its path, dtype and shape. What two sides have to agree on to understand bytes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [f"{jax.tree_util.keystr(path) or 'value'} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves]


def shapes(tree: PyTree) -> PyTree:
    """The tree with every array replaced by its shape and dtype (and whether that is weak, as a Python number's)."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))

    return jax.tree.map(one, tree)


def to_bytes(tree: PyTree) -> bytes:
    """All leaves one after the other, little-endian, in the order of `layout`."""
    return b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def from_bytes(data: bytes, like: PyTree) -> PyTree:
    """Undo `to_bytes`; `like` has the shapes and dtypes. The arrays are read-only views of `data`.

    Raises:
        Refusal: another number of bytes, or flags that are neither 0 nor 1.
    """
    if len(data) != nbytes(like):
        raise Refusal(f"{len(data)} bytes came where {nbytes(like)} were expected")
    leaves, start = [], 0
    for leaf in jax.tree.leaves(like):
        part = memoryview(data)[start : start + nbytes(leaf)]
        if leaf.dtype == bool and np.any(np.frombuffer(part, np.uint8) > 1):
            raise Refusal("a flag came that is neither true nor false")
        leaves.append(np.frombuffer(part, leaf.dtype).reshape(leaf.shape))
        start += len(part)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def require_layout(what: str, got: list[str], expected: list[str]) -> None:
    """Refuse what differs from the expected layout, naming the first leaf that does."""
    if got == expected:
        return
    for mine, theirs in zip(expected, got, strict=False):
        if mine != theirs:
            raise Refusal(f"{what}: {theirs} came where {mine} was expected")
    raise Refusal(f"{what}: {len(got)} leaves came where {len(expected)} were expected")


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A question to one client. With an empty `phase` it is a greeting: who are you, and do we agree?"""

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
class Answer:
    """A client's answer: a reply that may count, or, with `refused` not empty, none."""

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


def digest(text: str) -> str:
    """A short name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]
