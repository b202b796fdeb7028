"""What goes between server and clients: two messages, a request of the server and the response of a client, as Python
has them, as Flower's records, and their trees of arrays as plain bytes; and the contract that both sides compare: the
algorithm, its hyperparameters, and every call that a round may make. Nothing is ever unpickled.
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
"""Rounds at which schedules are compared."""
MISSING = ("missing",)  # equal to nothing that JSON can hold


def layout(tree: PyTree) -> list[str]:
    """Describe each leaf by path, dtype and shape, in a line each; the receiver of bytes must have the same."""
    return [f"{path or 'value'} {leaf.dtype}{list(leaf.shape)}" for path, leaf in by_path(tree).items()]


def by_path(tree: PyTree) -> dict[str, Any]:
    """Return the leaves of a tree by their paths, "" for a tree that is a leaf."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def shapes(tree: PyTree) -> PyTree:
    """Replace every array by its shape and dtype (and whether that is weak, as a Python number's)."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))

    return jax.tree.map(shape, tree)


def to_bytes(tree: PyTree) -> bytes:
    """Join all leaves, little-endian, in the order of `layout`: Flower moves each array by itself."""
    return b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def from_bytes(data: bytes, like: PyTree) -> PyTree:
    """Undo `to_bytes`; `like` has the shapes and dtypes. The arrays are read-only views of `data`.

    Raises:
        Refusal: another number of bytes, or flags that are neither 0 nor 1.
    """
    if len(data) != nbytes(like):
        raise Refusal(Code.MALFORMED, f"{len(data)} bytes came where {nbytes(like)} were expected")
    leaves, start = [], 0
    for leaf in jax.tree.leaves(like):
        part = memoryview(data)[start : start + nbytes(leaf)]
        if leaf.dtype == bool and np.any(np.frombuffer(part, np.uint8) > 1):
            raise Refusal(Code.MALFORMED, "a flag came that is neither true nor false")
        leaves.append(np.frombuffer(part, leaf.dtype).reshape(leaf.shape))
        start += len(part)
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def require_layout(what: str, got: list[str], expected: list[str]) -> None:
    """Refuse a layout that is not the expected one; the refusal names the first leaf that differs."""
    if got == expected:
        return
    for mine, theirs in zip(expected, got, strict=False):
        if mine != theirs:
            raise Refusal(Code.MALFORMED, f"{what}: {theirs} came where {mine} was expected")
    raise Refusal(Code.MALFORMED, f"{what}: {len(got)} leaves came where {len(expected)} were expected")


def digest(text: str) -> str:
    """Return a short name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "bytes": bytes, "list[str]": list}
"""Of a message's fields, by their annotations."""
METRICS = "per-client metrics"  # in place of a phase, of which none has such a name: x and y, to be measured
QUESTION = "a question"  # the same: a text, which the site answers with a text
AGREEMENT = "an agreement"  # the same: a text, which the site keeps for the rest of the run


def is_run(name: str) -> bool:
    """Tell whether this may be the name of a run; clients keep files under it."""
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
    own: str = "{}"  # JSON: the client's own numbers in this round, by the path of the method's field
    fresh: bool = False  # a fresh cohort: clients are asked without what they keep
    counted_round: int = -1  # of this client's last reply that counted and could change what it keeps; -1: none did
    counted_exchange: int = -1
    epsilon: float = 0.0  # the most that this client has said to have spent of its privacy, at `delta`; 0: nothing
    delta: float = 0.0
    payload: bytes = b""


@dataclass(frozen=True, kw_only=True)
class ResponseMessage:
    """A client's response: the reply of a phase, or, where `refused` is not empty, the reason why there is none."""

    run: str
    round: int
    exchange: int
    client: int
    contract: str = ""  # its whole text, in the reply to a greeting
    refused: str = ""
    code: str = ""  # of the refusal
    layout: list[str] = field(default_factory=list)
    gradients: int = 0
    hvps: int = 0
    metrics: str = "{}"  # JSON: name -> number
    epsilon: float = 0.0  # what the client has spent of its privacy so far
    delta: float = 0.0
    payload: bytes = b""

    def refusing(self, refusal: Refusal) -> ResponseMessage:
        """Make it the response that carries a refusal."""
        return replace(self, refused=refusal.why, code=refusal.code.word)

    def check(self) -> None:
        """Raise the refusal that it carries, if any."""
        if self.refused:
            raise Refusal(Code.of(self.code), self.refused)

    def numbers(self) -> dict[str, float]:
        return {name: float(value) for name, value in numbers_in("metrics", self.metrics).items()}


def numbers_in(what: str, text: str) -> dict[str, int | float]:
    """Read numbers by name from JSON, and refuse all else; `what` names them."""
    try:
        found = json.loads(text)
        floats = [float(value) for value in found.values() if type(value) in (int, float)]  # or too large for one
        if len(floats) == len(found):
            return dict(found)
    except (ValueError, AttributeError, OverflowError, RecursionError):
        pass
    raise Refusal(Code.MALFORMED, f"its {what} are not numbers by name")


def read(kind: type[Any], fields: Mapping[str, Any], payload: bytes) -> Any:
    """Read a request or a response from the fields of a record, each of its own type, none missing, none too many."""
    wanted = {f.name: f for f in dataclasses.fields(kind) if f.name != "payload"}
    if odd := sorted(set(fields) ^ set(wanted)):
        text = f"the fields of the message differ in {', '.join(odd)[:200]}: another version of fedbilevel?"
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
RAW = "fedbilevel.leaves"  # how an Array's bytes are to be read: our layout, not NumPy's
INLINE = 2**23  # bytes
TEXTS = 2**23  # characters of all texts of a message together: metrics, layout, contract
FLOWERS = {3: Code.LATE, 4: Code.LATE, 5: Code.ABSENT}
"""What Flower's errors mean: message or reply expired, no sign of life of the node; others are the node's."""

log = logging.getLogger("fedbilevel.server")


def encode(said: RequestMessage | ResponseMessage) -> RecordDict:
    """Write a message as Flower's records. All its arrays travel together, up to INLINE bytes among the fields, beyond
    as an Array, which Flower cuts into chunks.

    Flower uploads and downloads every object of a message by itself, and an Array is three: with two clients and
    1.6 MB each way that is half of the SuperLink's work.
    """
    fields = {f.name: getattr(said, f.name) for f in dataclasses.fields(said)}
    require_short(fields)
    if len(said.payload) <= INLINE:
        return RecordDict({FIELDS: ConfigRecord(fields)})
    del fields["payload"]
    leaves = Array(dtype="uint8", shape=(len(said.payload),), stype=RAW, data=said.payload)
    return RecordDict({FIELDS: ConfigRecord(fields), LEAVES: ArrayRecord({RAW: leaves})})


def require_short(fields: Mapping[str, Any]) -> None:
    """Refuse fields whose texts are long. They travel in one piece, and a SuperLink with a database stands still while
    it stores a piece of some hundred megabytes."""
    lists = [text for value in fields.values() if isinstance(value, list) for text in value]
    length = sum(len(text) for text in [*lists, *fields.values()] if isinstance(text, str))
    if length > TEXTS:
        raise Refusal(Code.LARGE, f"its texts have {length} characters together, where {TEXTS} may travel")


def request_message(node: int, request: RequestMessage, seconds: float) -> Message:
    """Make a message that is worth nothing after some seconds: Flower's own default is half a day."""
    return Message(encode(request), node, MESSAGE_TYPE, group_id=f"{request.run[:8]}/{request.round}", ttl=seconds)


@contextmanager
def reading(client: int | None = None) -> Iterator[None]:
    """Hold this while a node's message is read: whatever goes wrong, that message is refused, and no more.

    Args:
        client: whose message it is, where that is known; a refusal then names it.
    """
    try:
        yield
    except Refusal as refusal:
        refusal.client = refusal.client if client is None else client
        raise
    except Exception as error:
        log.warning("a message could not be read", exc_info=True)
        raise Refusal(Code.MALFORMED, f"reading it fails with {type(error).__name__}", client) from error


def decode(kind: type[Any], message: Message) -> Any:
    """Read the request or the response in a message.

    Raises:
        Refusal: Flower reports an error, or it is no message of ours.
    """
    if message.has_error():
        code, text = FLOWERS.get(message.error.code, Code.FLOWER), f"Flower's error {message.error.code}"
        said = "no reply within the deadline" if code is Code.LATE else (message.error.reason or "")[:300]
        raise Refusal(code, f"{said} ({text})" if code is Code.LATE else f"{text}: {said}")
    records = dict(message.content)
    fields, leaves = records.pop(FIELDS, None), records.pop(LEAVES, None)
    if records or not isinstance(fields, ConfigRecord):
        raise Refusal(Code.MALFORMED, "it is no message of fedbilevel's")
    named = dict(fields)
    payload = named.pop("payload", None)
    if payload is None and isinstance(leaves, ArrayRecord) and list(leaves) == [RAW]:
        payload, leaves = leaves[RAW].data, None
    if leaves is not None or type(payload) is not bytes:
        raise Refusal(Code.MALFORMED, "it is no message of fedbilevel's")
    require_short(named)
    return read(kind, named, payload)


class CallSignature(NamedTuple):
    """A phase with the shapes of its message and update: one of the calls that a server may make."""

    phase: str
    message: PyTree
    update: PyTree  # the shapes of the reply's update
    metrics: tuple[str, ...]

    @property
    def name(self) -> str:
        """The phase and a digest of the message's layout."""
        return f"{self.phase}:{digest('|'.join(layout(self.message)))[:12]}"

    @property
    def size(self) -> ExchangeKind:
        """As the ledger knows it."""
        return self.phase, nbytes(self.message), nbytes(self.update)


@dataclass(frozen=True)
class Contract:
    """Drawn up by each side from its own code and compared at the first message.

    Its calls are found by tracing one round abstractly, with a `fed` that notes what is asked: a server cannot ask
    anything that its algorithm does not ask, in any other shape.
    """

    algorithm: Algorithm
    shapes: Mapping[str, Mapping[str, str]]  # term of SHAPES -> path of a leaf -> its shape, in words
    calls: dict[str, CallSignature]
    state: PyTree  # shapes of what a client keeps between rounds, or None
    units: Mapping[str, int] | None = None  # of a client who holds a submodel: how many of each group

    @cached_property
    def text(self) -> str:
        """As JSON, to be compared."""
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
        return digest(self.text)

    def cut(self, unit_layout: UnitLayout, kept: Mapping[str, int]) -> Contract:
        """Make the contract, with smaller calls, for a client that holds a submodel; `kept`: group -> how many
        units."""
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
        """Return each schedule's values at the rounds PROBES and, where it takes them, the inner rounds PROBES, to five
        digits, since two machines may round differently."""
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
    """Draw up the contract of a run; for the arguments see `engines.recorder.exchanges_of`.

    Raises:
        ConfigurationError: a message, an update or what clients keep holds a PRNG key.
    """
    state = algorithm.client_state(problem, x, y)
    check_plain("what clients keep", state)
    first: dict[str, PyTree] = {}  # what is asked by fed.sum_first, and the updates' shapes
    calls: dict[str, CallSignature] = {}

    for phase, message, reply, early, *_ in exchanges_of(algorithm, problem, x, y, examples):
        check_plain(f"the message of phase {phase}", message)
        if early and not algorithm.asks.asynchronous:
            name = algorithm.label
            raise ConfigurationError(f"phase {phase} is asked by fed.sum_first: {name} has to say asks = Asks(first=…)")
        if early and first.setdefault(phase, shapes(reply.update)) != shapes(reply.update):
            raise ConfigurationError(f"phase {phase} is asked by fed.sum_first with replies of different shapes")
        call = CallSignature(phase, shapes(message), shapes(reply.update), tuple(sorted(reply.metrics or {})))
        calls[call.name] = call
    kept = None if state is None else shapes(jax.tree.map(jnp.asarray, state))
    return Contract(algorithm, shapes_of_terms(problem, x, y, examples), calls, kept)


def shapes_of_terms(problem: Problem, x: PyTree, y: PyTree, examples: tuple[PyTree, PyTree]) -> dict[str, Any]:
    """Describe samples, x and y for a contract. Dtypes of samples may differ, as those of labels do, where that changes
    no call."""
    samples = [{path: f"of shape {list(leaf.shape[1:])}" for path, leaf in by_path(each).items()} for each in examples]
    y = None if isinstance(problem, SimpleBilevel) else y  # there it is an average of x, which sites do not have
    trees = jax.eval_shape(lambda *trees: trees, x, y)  # in the precision of this process
    variables = [{path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in by_path(tree).items()} for tree in trees]
    return dict(zip(SHAPES, [*samples, *variables], strict=True))


SHAPES = "outer samples", "inner samples", "x", "y"
"""Terms of a contract that follow from the data and the task, and from which all calls follow."""
FIRST = ["protocol", "fedbilevel", *SHAPES]
"""Terms that are compared before the others, which may differ for no other reason."""


def disagreement(server: str, site: str) -> Refusal:
    """Make the refusal that names the first difference between the contracts of a server and a site, as either says it
    to the other."""
    try:
        a, b = json.loads(server), json.loads(site)
        for term in [*FIRST, *sorted({**a, **b}.keys() - {*FIRST, "calls"}), "calls"]:
            if a.get(term, MISSING) != b.get(term, MISSING):
                said = _first(term, a.get(term, MISSING), b.get(term, MISSING))
                return Refusal(Code.SHAPES if term in SHAPES else Code.CONTRACT, said)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return Refusal(Code.CONTRACT, "a contract cannot be read")
    return Refusal(Code.CONTRACT, "the two contracts are written differently")


def _first(term: str, server: Any, site: Any) -> str:
    if isinstance(server, dict) and isinstance(site, dict):
        both = sorted({**server, **site})
        name = next(name for name in both if server.get(name, MISSING) != site.get(name, MISSING))
        path = name if name[:1] in ("", "[", ".") else f".{name}"
        return _first(f"{term}{path}", server.get(name, MISSING), site.get(name, MISSING))
    said = ["missing" if value is MISSING else str(value)[:200] for value in (server, site)]
    return f"{term} is {said[0]} at the server and {said[1]} at the site"
