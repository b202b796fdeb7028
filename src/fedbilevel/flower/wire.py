"""Define the messages between server and clients, their form on the network, and the contract that both sides compare.

There are two kinds of messages: the request of a server and the response of a client. They are dataclasses in Python,
and travel as Flower's records, with trees of arrays as plain bytes. The contract lists the algorithm, its
hyperparameters, and every call that a round may make. Nothing is unpickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedbilevel import __version__
from fedbilevel.core.algorithm import Algorithm, takes_and_gives
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.hyperparameters import hyperparameters, schedules
from fedbilevel.core.problem import Problem, SimpleBilevel
from fedbilevel.core.submodel import UnitLayout
from fedbilevel.core.tree import PyTree, nbytes
from fedbilevel.engines.costs import ExchangeKind
from fedbilevel.engines.recorder import check_plain, exchanges_of
from fedbilevel.flower.refusal import Code, Refusal

PROTOCOL = 7
PROBES = (0, 1, 10, 100, 1000)
"""The rounds at which schedules are compared."""
MISSING = ("missing",)  # a value that differs from every value of JSON


def layout(tree: PyTree) -> list[str]:
    """Describe each leaf of a tree by a line with its path, dtype and shape.

    A tree can be read from bytes only if sender and receiver have equal layouts.
    """
    return [f"{path or 'value'} {leaf.dtype}{list(leaf.shape)}" for path, leaf in by_path(tree).items()]


def by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths; the path of a tree that is a single leaf is ""."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def shapes(tree: PyTree) -> PyTree:
    """Return the tree with each array replaced by its shape, its dtype, and whether this dtype is weak.

    A weak dtype is the dtype that JAX gives to a Python number.
    """

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))

    return jax.tree.map(shape, tree)


def to_bytes(tree: PyTree) -> bytes:
    """Return all leaves of a tree as one byte string, little-endian, in the order of `layout`.

    One string is used because Flower would send each array separately.
    """
    return b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def from_bytes(data: bytes, like: PyTree) -> PyTree:
    """Return the tree whose leaves `to_bytes` has written, as read-only views of `data`.

    `like` is a tree with the same structure, shapes and dtypes.

    Raises:
        Refusal: the number of bytes is wrong, or a boolean is neither 0 nor 1.
    """
    if len(data) != nbytes(like):
        raise Refusal(Code.MALFORMED, f"its arrays have {len(data)} bytes, and {nbytes(like)} were expected")
    leaves, start = [], 0
    for leaf in jax.tree.leaves(like):
        part = memoryview(data)[start : start + nbytes(leaf)]
        if leaf.dtype == bool and np.any(np.frombuffer(part, np.uint8) > 1):
            raise Refusal(Code.MALFORMED, "a boolean array has a byte that is neither 0 nor 1")
        leaves.append(np.frombuffer(part, leaf.dtype).reshape(leaf.shape))
        start += len(part)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def require_layout(what: str, got: list[str], expected: list[str]) -> None:
    """Raise a Refusal if a layout differs from the expected one. The refusal names the first leaf that differs.

    `what` names the arrays in the text of the refusal.
    """
    if got == expected:
        return
    for mine, theirs in zip(expected, got, strict=False):
        if mine != theirs:
            raise Refusal(Code.MALFORMED, f"{what} has {theirs}, and {mine} was expected")
    raise Refusal(Code.MALFORMED, f"{what} has {len(got)} leaves, and {len(expected)} were expected")


def digest(text: str) -> str:
    """Return a short hash of a text, 32 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "bytes": bytes, "list[str]": list}
"""The types of a message's fields, by their annotations."""
METRICS = "per-client metrics"  # as `phase` of a request: measure metrics at x and y; no phase has this name
QUESTION = "a question"  # as `phase` of a request: a text, which the site answers by a text
AGREEMENT = "an agreement"  # as `phase` of a request: a text, which the site keeps for the rest of the run


def is_run(name: str) -> bool:
    """Return whether a text has the form of a run's name, which is safe as a part of file names."""
    return re.fullmatch(r"[0-9a-f]{8,64}", name) is not None


@dataclass(frozen=True, kw_only=True)
class RequestMessage:
    """A request to a client. An empty `phase` makes it a greeting, which asks for the client's id and contract."""

    run: str  # the name of the whole run, which a resumed run keeps
    contract: str  # the digest of the contract; in a greeting, its whole text
    round: int = 0
    exchange: int = 0  # the number of the exchange within the round
    phase: str = ""
    call: str = ""  # the name of the call in the contract
    key: bytes = b""  # the random key of the exchange
    key_kind: str = ""  # the implementation of the key in JAX
    weight: float = 1.0  # p_i, the client's weight
    own: str = "{}"  # JSON: the client's own numbers in this round (`Clients.own`), by the path of the field
    fresh: bool = False  # whether a fresh cohort is asked, whose clients do not use their states
    counted_round: int = -1  # the round of the last reply that counted and may have changed the state; -1: no reply
    counted_exchange: int = -1  # the exchange of the reply of `counted_round`
    epsilon: float = 0.0  # the largest ε that this client has reported, at `delta`; 0: it has reported none
    delta: float = 0.0
    payload: bytes = b""  # the arrays of the message


@dataclass(frozen=True, kw_only=True)
class ResponseMessage:
    """A client's response: the reply of a phase or, if `refused` is not empty, the reason why there is none."""

    run: str
    round: int
    exchange: int
    client: int
    contract: str = ""  # the whole text of the contract, in the reply to a greeting
    refused: str = ""  # the text of the refusal; "": the request was not refused
    code: str = ""  # the code of the refusal
    layout: list[str] = field(default_factory=list)  # the layout of the update
    gradients: int = 0
    hvps: int = 0
    metrics: str = "{}"  # JSON: name -> number
    epsilon: float = 0.0  # the client's ε so far, at `delta`; 0 without privacy
    delta: float = 0.0
    payload: bytes = b""  # the arrays of the update

    def refusing(self, refusal: Refusal) -> ResponseMessage:
        """Return this response with a refusal."""
        return replace(self, refused=refusal.why, code=refusal.code.word)

    def check(self) -> None:
        """Raise the refusal that this response contains, if any."""
        if self.refused:
            raise Refusal(Code.of(self.code), self.refused)

    def numbers(self) -> dict[str, float]:
        """Return the client's metrics by name."""
        return {name: float(value) for name, value in numbers_in("metrics", self.metrics).items()}


def numbers_in(what: str, text: str) -> dict[str, int | float]:
    """Return the numbers of a JSON object, by name.

    Any other text is refused; `what` names the numbers in the refusal.
    """
    try:
        found = json.loads(text)
        floats = [float(value) for value in found.values() if type(value) in (int, float)]  # OverflowError: too large
        if len(floats) == len(found):
            return dict(found)
    except (ValueError, AttributeError, OverflowError, RecursionError):
        pass
    raise Refusal(Code.MALFORMED, f"its {what} are not a JSON object of numbers")


def read(kind: type[Any], fields: Mapping[str, Any], payload: bytes) -> Any:
    """Return a request or a response from the fields of a record.

    Missing and unknown fields and wrong types are refused.
    """
    wanted = {f.name: f for f in dataclasses.fields(kind) if f.name != "payload"}
    if odd := sorted(set(fields) ^ set(wanted)):
        text = f"the fields of the message differ in {', '.join(odd)[:200]}: the versions of fedbilevel may differ"
        raise Refusal(Code.CONTRACT, text)
    for name, f in wanted.items():
        value = fields[name]
        if type(value) is not TYPES[str(f.type)] or (
            isinstance(value, list) and any(type(i) is not str for i in value)
        ):
            raise Refusal(
                Code.MALFORMED, f"field {name} of the message has the type {type(value).__name__}, not {f.type}"
            )
    return kind(**fields, payload=payload)


ACTION = "fedbilevel"
MESSAGE_TYPE = f"query.{ACTION}"
FIELDS, LEAVES = "fields", "leaves"
RAW = "fedbilevel.leaves"  # the `stype` of an Array whose bytes `to_bytes` has written, which are not in NumPy's format
INLINE = 2**23  # the largest number of bytes of arrays that travel among the fields
TEXTS = 2**23  # the largest number of characters of all texts of a message together: metrics, layout, contract
FLOWERS = {3: Code.LATE, 4: Code.LATE, 5: Code.ABSENT}
"""The codes for errors that Flower reports: message or reply expired, no heartbeat of the node.

Any other error is an error of the node.
"""
IN_WORDS = {
    Code.LATE: "no reply within the deadline",
    Code.ABSENT: "its SuperNode no longer reports to the SuperLink: it was stopped, or is cut off",
}

log = logging.getLogger("fedbilevel.server")


def encode(said: RequestMessage | ResponseMessage) -> RecordDict:
    """Return a message as Flower's records.

    All arrays of the message travel together: up to INLINE bytes among the fields, and more bytes as an Array, which
    Flower cuts into chunks. An Array is slower for small messages: Flower transfers it as three objects, each
    separately. With two clients and 1.6 MB in each direction, the transfer of these objects is half of the SuperLink's
    work.
    """
    fields = {f.name: getattr(said, f.name) for f in dataclasses.fields(said)}
    require_short(fields)
    if len(said.payload) <= INLINE:
        return RecordDict({FIELDS: ConfigRecord(fields)})
    del fields["payload"]
    leaves = Array(dtype="uint8", shape=(len(said.payload),), stype=RAW, data=said.payload)
    return RecordDict({FIELDS: ConfigRecord(fields), LEAVES: ArrayRecord({RAW: leaves})})


def require_short(fields: Mapping[str, Any]) -> None:
    """Refuse fields whose texts are too long.

    Texts travel in one piece. While a SuperLink with a database stores a piece of some hundred megabytes, it handles no
    other message.
    """
    lists = [text for value in fields.values() if isinstance(value, list) for text in value]
    length = sum(len(text) for text in [*lists, *fields.values()] if isinstance(text, str))
    if length > TEXTS:
        raise Refusal(Code.LARGE, f"its texts have {length} characters together, and at most {TEXTS} are allowed")


def request_message(node: int, request: RequestMessage, seconds: float) -> Message:
    """Return a message of Flower that takes a request to a node.

    The message expires after `seconds`; Flower's default is 12 h.
    """
    return Message(encode(request), node, MESSAGE_TYPE, group_id=f"{request.run[:8]}/{request.round}", ttl=seconds)


@contextmanager
def reading(client: int | None = None) -> Iterator[None]:
    """Turn every error within the block into a Refusal. Use this context manager while a message is read.

    Args:
        client: the client that sent the message, if known; a refusal then names it.
    """
    try:
        yield
    except Refusal as refusal:
        refusal.client = refusal.client if client is None else client
        raise
    except Exception as error:
        log.warning("a message could not be read", exc_info=True)
        raise Refusal(Code.MALFORMED, f"reading its message fails with {type(error).__name__}", client) from error


def decode(kind: type[Any], message: Message) -> Any:
    """Return the request or the response that a message of Flower contains.

    Raises:
        Refusal: Flower reports an error, or the message was not written by this library.
    """
    if message.has_error():
        code, name = FLOWERS.get(message.error.code, Code.FLOWER), f"Flower's error {message.error.code}"
        said = IN_WORDS.get(code)
        raise Refusal(code, f"{said} ({name})" if said else f"{name}: {(message.error.reason or '')[:300]}")
    records = dict(message.content)
    fields, leaves = records.pop(FIELDS, None), records.pop(LEAVES, None)
    if records or not isinstance(fields, ConfigRecord):
        raise Refusal(Code.MALFORMED, "it is not a message of fedbilevel")
    named = dict(fields)
    payload = named.pop("payload", None)
    if payload is None and isinstance(leaves, ArrayRecord) and list(leaves) == [RAW]:
        payload, leaves = leaves[RAW].data, None
    if leaves is not None or type(payload) is not bytes:
        raise Refusal(Code.MALFORMED, "it is not a message of fedbilevel")
    require_short(named)
    return read(kind, named, payload)


class CallSignature(NamedTuple):
    """A call that a server may make: a phase, with the shapes of its message and of its update."""

    phase: str
    message: PyTree  # the shapes of the message
    update: PyTree  # the shapes of the reply's update
    metrics: tuple[str, ...]  # the names of the reply's metrics

    @property
    def name(self) -> str:
        """Return the name of the call: the phase and a digest of the message's layout."""
        return f"{self.phase}:{digest('|'.join(layout(self.message)))[:12]}"

    @property
    def size(self) -> ExchangeKind:
        """Return the kind of the call in the ledger: its phase, and the numbers of bytes of message and update."""
        return self.phase, nbytes(self.message), nbytes(self.update)


@dataclass(frozen=True)
class Contract:
    """The contract of a run: the algorithm and every call that its rounds may make.

    Each side makes the contract from its own code, and the two contracts are compared at the first message. The calls
    are found by tracing one round without numbers, with a `fed` that records all requests. A server can therefore only
    make requests of its algorithm, and only in the shapes that were recorded.
    """

    algorithm: Algorithm
    shapes: Mapping[str, Mapping[str, str]]  # term of SHAPES -> path of a leaf -> its shape, in words
    calls: dict[str, CallSignature]
    state: PyTree  # the shapes of a client's state between rounds; None: clients have no state
    units: Mapping[str, int] | None = None  # for a client with a submodel: group -> its number of units

    @cached_property
    def text(self) -> str:
        """Return the contract as JSON. Server and site compare this text."""
        calls = {name: [layout(call.message), layout(call.update), call.metrics] for name, call in self.calls.items()}
        terms = {
            "protocol": PROTOCOL,
            "fedbilevel": __version__,
            "algorithm": self.algorithm.label,
            "hyperparameters": hyperparameters(self.algorithm),
            "schedules": self.schedules(),
            **self.shapes,
            "calls": calls,
            "state": layout(self.state),
        }
        if self.units is not None:
            terms["units"] = dict(self.units)
        return json.dumps(terms, sort_keys=True)

    @cached_property
    def digest(self) -> str:
        """Return the hash of the contract's text, by which messages name the contract."""
        return digest(self.text)

    def cut(self, unit_layout: UnitLayout, kept: Mapping[str, int]) -> Contract:
        """Return the contract for a client that holds a submodel: its calls have smaller shapes.

        `kept` maps each group to the number of units that the client holds.
        """
        if kept == unit_layout.sizes:
            return self
        units = unit_layout.shapes_of(kept)

        calls: dict[str, CallSignature] = {}
        for call in self.calls.values():
            takes, gives = takes_and_gives(self.algorithm.phases[call.phase])
            message = shapes(jax.eval_shape(partial(unit_layout.sent, takes), call.message, units))
            update = shapes(jax.eval_shape(partial(unit_layout.cut, gives), call.update, units))
            call = call._replace(message=message, update=update)
            calls[call.name] = call
        return replace(self, calls=calls, units=kept)

    def schedules(self) -> dict[str, list[str]]:
        """Return the values of each schedule at the rounds PROBES.

        If a schedule also depends on the inner round, its values at the inner rounds PROBES are included.

        Values are rounded to five digits, since two machines may round differently.
        """
        indices = [jnp.asarray(index, jnp.int32) for index in PROBES]
        return {
            path: [f"{float(schedule.function(*at)):.5g}" for at in product(indices, repeat=1 + schedule.by_k)]
            for path, schedule in schedules(self.algorithm)
        }


def draw_up(
    algorithm: Algorithm,
    problem: Problem,
    x: PyTree,
    y: PyTree,
    examples: tuple[PyTree, PyTree],
) -> Contract:
    """Return the contract of a run. The arguments are the same as for `engines.recorder.exchanges_of`.

    Raises:
        ConfigurationError: a message, an update or the state of clients contains a PRNG key; or a phase that
            `fed.sum_first` asks is not declared in `asks`.
    """
    state = algorithm.client_state(problem, x, y)
    check_plain("the state of clients", state)
    first: dict[str, PyTree] = {}  # phase that fed.sum_first asks -> the shapes of its update
    calls: dict[str, CallSignature] = {}

    for phase, message, reply, early, *_ in exchanges_of(algorithm, problem, x, y, examples):
        check_plain(f"the message of phase {phase}", message)
        if early and not algorithm.asks.asynchronous:
            message = f"phase {phase} is asked by fed.sum_first: {algorithm.label} must declare asks = Asks(first=…)"
            raise ConfigurationError(path="asks", got="without first", allowed="Asks(first=…)", message=message)
        if early and first.setdefault(phase, shapes(reply.update)) != shapes(reply.update):
            raise ConfigurationError(f"phase {phase} is asked by fed.sum_first with replies of different shapes")
        call = CallSignature(phase, shapes(message), shapes(reply.update), tuple(sorted(reply.metrics or {})))
        calls[call.name] = call
    kept = None if state is None else shapes(jax.tree.map(jnp.asarray, state))
    return Contract(algorithm, shapes_of_terms(problem, x, y, examples), calls, kept)


def shapes_of_terms(problem: Problem, x: PyTree, y: PyTree, examples: tuple[PyTree, PyTree]) -> dict[str, Any]:
    """Describe the shapes of samples, x and y for a contract.

    The dtypes of samples are left out. Clients may have labels of different dtypes, for example, and still have equal
    calls.
    """
    samples = [{path: f"of shape {list(leaf.shape[1:])}" for path, leaf in by_path(each).items()} for each in examples]
    y = None if isinstance(problem, SimpleBilevel) else y  # sites have no y: it is an average of x
    trees = jax.eval_shape(lambda *trees: trees, x, y)  # in the precision of this process
    variables = [{path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in by_path(tree).items()} for tree in trees]
    return dict(zip(SHAPES, [*samples, *variables], strict=True))


SHAPES = "outer samples", "inner samples", "x", "y"
"""The terms of a contract that follow from the data and the task, and that determine the shapes of all calls."""
FIRST = ["protocol", "fedbilevel", *SHAPES]
"""The terms that are compared first, since the others may differ only because of them."""


def disagreement(server: str, site: str) -> Refusal:
    """Return the refusal that names the first difference between the server's contract and the site's."""
    try:
        a, b = json.loads(server), json.loads(site)
        for term in [*FIRST, *sorted({**a, **b}.keys() - {*FIRST, "calls"}), "calls"]:
            if a.get(term, MISSING) != b.get(term, MISSING):
                said = _first(term, a.get(term, MISSING), b.get(term, MISSING))
                return Refusal(Code.SHAPES if term in SHAPES else Code.CONTRACT, said)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return Refusal(Code.CONTRACT, "a contract cannot be read")
    return Refusal(Code.CONTRACT, "the two contracts have equal terms, but their texts differ")


def _first(term: str, server: Any, site: Any) -> str:
    if isinstance(server, dict) and isinstance(site, dict):
        both = sorted({**server, **site})
        name = next(name for name in both if server.get(name, MISSING) != site.get(name, MISSING))
        path = name if name[:1] in ("", "[", ".") else f".{name}"
        return _first(f"{term}{path}", server.get(name, MISSING), site.get(name, MISSING))
    said = ["missing" if value is MISSING else str(value)[:200] for value in (server, site)]
    return f"{term} is {said[0]} at the server and {said[1]} at the site"
