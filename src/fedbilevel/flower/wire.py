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
MISSING = ("missing",)  # differs from every value of JSON


def layout(tree: PyTree) -> list[str]:
    """Describe each leaf of a tree by a line with its path, dtype and shape.

    The sender and the receiver of a tree's bytes need equal layouts.
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
    """Return all leaves as one byte string, little-endian, in the order of `layout`.

    Flower would send each array separately.
    """
    return b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def from_bytes(data: bytes, like: PyTree) -> PyTree:
    """Return the tree from the bytes of `to_bytes`, as read-only views of `data`; `like` has the shapes and dtypes.

    Raises:
        Refusal: the number of bytes is wrong, or a flag is neither 0 nor 1.
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
    """Raise a Refusal if a layout is not the expected one; it names the first leaf that differs.

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
METRICS = "per-client metrics"  # in the field `phase`: a request to measure metrics at x and y; no phase has this name
QUESTION = "a question"  # in the field `phase`: a text, which the site answers by a text
AGREEMENT = "an agreement"  # in the field `phase`: a text, which the site keeps for the rest of the run


def is_run(name: str) -> bool:
    """Return whether a text has the form of a run's name, which is safe as a part of file names."""
    return re.fullmatch(r"[0-9a-f]{8,64}", name) is not None


@dataclass(frozen=True, kw_only=True)
class RequestMessage:
    """Hold a request to a client. An empty `phase` makes it a greeting, which asks for the client's id and contract."""

    run: str  # the name of the whole run, which a resumed run keeps
    contract: str  # the digest of the contract; in a greeting, its whole text
    round: int = 0
    exchange: int = 0  # the number of the exchange within the round
    phase: str = ""
    call: str = ""  # the name of the call in the contract
    key: bytes = b""  # the random key of the exchange
    key_kind: str = ""  # the implementation of the key in JAX
    weight: float = 1.0  # p_i
    own: str = "{}"  # JSON: the client's own numbers in this round (`Clients.own`), by the path of the field
    fresh: bool = False  # whether the request is for a fresh cohort, in which the client's state is not used
    counted_round: int = -1  # the round of the client's last reply that counted and could change its state; -1: none
    counted_exchange: int = -1  # the exchange of this reply
    epsilon: float = 0.0  # the largest ε that this client has reported, at `delta`; 0: none
    delta: float = 0.0
    payload: bytes = b""  # the arrays of the message


@dataclass(frozen=True, kw_only=True)
class ResponseMessage:
    """Hold a client's response: the reply of a phase or, if `refused` is not empty, the reason why there is none."""

    run: str
    round: int
    exchange: int
    client: int
    contract: str = ""  # the whole text of the contract, in the reply to a greeting
    refused: str = ""  # the text of the refusal; "": there is none
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
        """Raise the response's refusal, if it has one."""
        if self.refused:
            raise Refusal(Code.of(self.code), self.refused)

    def numbers(self) -> dict[str, float]:
        """Return the metrics by name."""
        return {name: float(value) for name, value in numbers_in("metrics", self.metrics).items()}


def numbers_in(what: str, text: str) -> dict[str, int | float]:
    """Return numbers by name from a JSON object, and refuse anything else; `what` names the numbers in the refusal."""
    try:
        found = json.loads(text)
        floats = [float(value) for value in found.values() if type(value) in (int, float)]  # raises for a huge integer
        if len(floats) == len(found):
            return dict(found)
    except (ValueError, AttributeError, OverflowError, RecursionError):
        pass
    raise Refusal(Code.MALFORMED, f"its {what} are not a JSON object of numbers")


def read(kind: type[Any], fields: Mapping[str, Any], payload: bytes) -> Any:
    """Return a request or a response from the fields of a record; refuse missing and unknown fields and wrong types."""
    wanted = {f.name: f for f in dataclasses.fields(kind) if f.name != "payload"}
    if odd := sorted(set(fields) ^ set(wanted)):
        text = f"the fields of the message differ in {', '.join(odd)[:200]}: the versions of fedbilevel may differ"
        raise Refusal(Code.CONTRACT, text)
    for name, f in wanted.items():
        value = fields[name]
        if type(value) is not TYPES[str(f.type)] or (
            isinstance(value, list) and any(type(i) is not str for i in value)
        ):
            raise Refusal(Code.MALFORMED, f"field {name} of the message is a {type(value).__name__}, not a {f.type}")
    return kind(**fields, payload=payload)


ACTION = "fedbilevel"
MESSAGE_TYPE = f"query.{ACTION}"
FIELDS, LEAVES = "fields", "leaves"
RAW = "fedbilevel.leaves"  # the `stype` of an Array: its bytes are those of `to_bytes`, and not of NumPy's format
INLINE = 2**23  # the largest number of bytes of arrays that travel among the fields
TEXTS = 2**23  # the largest number of characters of all texts of a message together: metrics, layout, contract
FLOWERS = {3: Code.LATE, 4: Code.LATE, 5: Code.ABSENT}
"""The codes for Flower's errors: message or reply expired, no heartbeat of the node. Others are errors of the node."""

log = logging.getLogger("fedbilevel.server")


def encode(said: RequestMessage | ResponseMessage) -> RecordDict:
    """Return a message as Flower's records.

    All arrays of the message travel together: up to INLINE bytes among the fields, and more bytes as an Array, which
    Flower cuts into chunks. Flower transfers every object of a message separately, and an Array has three objects. With
    two clients and 1.6 MB in each direction, these objects are half of the SuperLink's work.
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

    Texts travel in one piece, and a SuperLink with a database handles no other message while it stores a piece of some
    hundred megabytes.
    """
    lists = [text for value in fields.values() if isinstance(value, list) for text in value]
    length = sum(len(text) for text in [*lists, *fields.values()] if isinstance(text, str))
    if length > TEXTS:
        raise Refusal(Code.LARGE, f"its texts have {length} characters together, and the largest number is {TEXTS}")


def request_message(node: int, request: RequestMessage, seconds: float) -> Message:
    """Return Flower's message with a request to a node. It expires after `seconds` in place of Flower's 12 h."""
    return Message(encode(request), node, MESSAGE_TYPE, group_id=f"{request.run[:8]}/{request.round}", ttl=seconds)


@contextmanager
def reading(client: int | None = None) -> Iterator[None]:
    """Return a context manager that turns every error into a Refusal of the message that is read in its block.

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
    """Return the request or the response in a message of Flower.

    Raises:
        Refusal: Flower reports an error, or the message is not one of this library.
    """
    if message.has_error():
        code, text = FLOWERS.get(message.error.code, Code.FLOWER), f"Flower's error {message.error.code}"
        said = "no reply within the deadline" if code is Code.LATE else (message.error.reason or "")[:300]
        raise Refusal(code, f"{said} ({text})" if code is Code.LATE else f"{text}: {said}")
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
    """Describe a call that a server may make: a phase with the shapes of its message and update."""

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
        """Return the phase and the bytes of message and update, by which the ledger counts exchanges."""
        return self.phase, nbytes(self.message), nbytes(self.update)


@dataclass(frozen=True)
class Contract:
    """Hold the contract of a run: the algorithm and every call that its rounds may make.

    Each side makes the contract from its own code, and the two are compared at the first message. The calls are found
    by tracing one round abstractly, with a `fed` that records all requests. A server can therefore only make the
    requests of its algorithm, and only in these shapes.
    """

    algorithm: Algorithm
    shapes: Mapping[str, Mapping[str, str]]  # term of SHAPES -> path of a leaf -> its shape, in words
    calls: dict[str, CallSignature]
    state: PyTree  # the shapes of a client's state between rounds; None: clients have no state
    units: Mapping[str, int] | None = None  # for a client with a submodel: group -> its number of units

    @cached_property
    def text(self) -> str:
        """Return the contract as JSON, which is compared."""
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
        """Return the contract, with smaller calls, for a client that holds a submodel.

        `kept` has the client's number of units of each group.
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
        """Return the values of each schedule at the rounds PROBES and, if it depends on them, the inner rounds PROBES.

        Values have five digits, since two machines may round differently.
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
    """Return the contract of a run; the arguments are those of `engines.recorder.exchanges_of`.

    Raises:
        ConfigurationError: a message, an update or the state of clients contains a PRNG key; or a phase is not declared
            as `fed.sum_first` requires it.
    """
    state = algorithm.client_state(problem, x, y)
    check_plain("the state of clients", state)
    first: dict[str, PyTree] = {}  # phase that fed.sum_first asks -> the shapes of its update
    calls: dict[str, CallSignature] = {}

    for phase, message, reply, early, *_ in exchanges_of(algorithm, problem, x, y, examples):
        check_plain(f"the message of phase {phase}", message)
        if early and not algorithm.asks.asynchronous:
            must = f"{algorithm.label} must declare asks = Asks(first=…)"
            raise ConfigurationError(f"phase {phase} is asked by fed.sum_first: {must}")
        if early and first.setdefault(phase, shapes(reply.update)) != shapes(reply.update):
            raise ConfigurationError(f"phase {phase} is asked by fed.sum_first with replies of different shapes")
        call = CallSignature(phase, shapes(message), shapes(reply.update), tuple(sorted(reply.metrics or {})))
        calls[call.name] = call
    kept = None if state is None else shapes(jax.tree.map(jnp.asarray, state))
    return Contract(algorithm, shapes_of_terms(problem, x, y, examples), calls, kept)


def shapes_of_terms(problem: Problem, x: PyTree, y: PyTree, examples: tuple[PyTree, PyTree]) -> dict[str, Any]:
    """Describe samples, x and y for a contract.

    The dtypes of samples are left out: they may differ between clients, as those of labels do, if the calls are equal.
    """
    samples = [{path: f"of shape {list(leaf.shape[1:])}" for path, leaf in by_path(each).items()} for each in examples]
    y = None if isinstance(problem, SimpleBilevel) else y  # y of a SimpleBilevel is an average of x, not at sites
    trees = jax.eval_shape(lambda *trees: trees, x, y)  # in the precision of this process
    variables = [{path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in by_path(tree).items()} for tree in trees]
    return dict(zip(SHAPES, [*samples, *variables], strict=True))


SHAPES = "outer samples", "inner samples", "x", "y"
"""The terms of a contract that follow from the data and the task, and that determine the shapes of all calls."""
FIRST = ["protocol", "fedbilevel", *SHAPES]
"""The terms that are compared first, since the others may differ only because of them."""


def disagreement(server: str, site: str) -> Refusal:
    """Return the refusal that names the first difference between the texts of a server's and a site's contract."""
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
