"""Messages as bytes and as Flower's records: they are read back as they were sent, and other content is refused."""

import dataclasses
import json

import federations
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from federations import memory
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.flower import wire
from fedbilevel.flower.client.site import ClientRuntime
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.server.roster import ClientReply, Roster
from fedbilevel.flower.server.terms import Terms, check_response
from fedbilevel.flower.wire import (
    FIELDS,
    LEAVES,
    MESSAGE_TYPE,
    RAW,
    RequestMessage,
    ResponseMessage,
    decode,
    encode,
    from_bytes,
    layout,
    read,
    require_layout,
    shapes,
    to_bytes,
)
from refusals import raises_with

InProcess(None, 0)  # gives this process the identity without which Flower makes no messages
RNG = np.random.default_rng(0)
TREES = {
    "nothing": None,
    "an empty tuple": (),
    "None leaves": {"a": None, "b": np.ones(2)},
    "0-d": {"a": np.float64(2.5), "b": np.int32(3)},
    "empty": {"a": np.zeros((0, 3)), "b": np.ones(2), "c": np.zeros(0, np.int8)},
    "f16": RNG.normal(size=(2, 3)).astype(np.float16),
    "bf16": RNG.normal(size=(2, 3)).astype(ml_dtypes.bfloat16),
    "f32": RNG.normal(size=5).astype(np.float32),
    "integers": (np.arange(3, dtype=np.int64), np.arange(2, dtype=np.uint8)),
    "flags between others": (np.ones(1, np.int8), np.array([True, False]), np.arange(3.0)),
    "Fortran order": np.asfortranarray(RNG.normal(size=(3, 4))),
    "not contiguous": RNG.normal(size=(6, 4))[::2, ::-1],
    "of JAX": {"x": jnp.arange(3.0), "y": [jnp.ones((2, 2), jnp.bfloat16)]},
}


@pytest.mark.parametrize("name", TREES)
def test_there_and_back(name):
    """A tree of arrays is read back from its bytes as it was, and another number of bytes is refused."""
    tree = TREES[name]
    like = shapes(tree)
    data = to_bytes(tree)
    back = from_bytes(data, like)
    assert layout(back) == layout(tree) == layout(like)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert np.array_equal(np.asarray(a), b)
        assert not b.flags.writeable
    for wrong in {data + b"\0", data[:-1]} - {data}:
        with raises_with(Refusal, f"{len(wrong)} bytes, and {len(data)} were", code=Code.MALFORMED):
            from_bytes(wrong, like)


def test_a_flag_is_0_or_1():
    """Flags whose bytes are neither 0 nor 1 are refused, since compiled programs do not define what these mean."""
    with raises_with(Refusal, "neither 0 nor 1", code=Code.MALFORMED):
        from_bytes(b"\x01\x02", shapes(np.array([True, False])))


def test_a_layout_names_the_leaf():
    tree = {"w": np.zeros((2, 3)), "b": (np.zeros(2, np.float32),)}
    assert layout(tree) == ["['b'][0] float32[2]", "['w'] float64[2, 3]"]
    assert layout(np.zeros(())) == ["value float64[]"]
    other = {**tree, "w": np.zeros((3, 2))}
    with raises_with(Refusal, "['w'] float64[3, 2], and ['w'] float64[2, 3] was", code=Code.MALFORMED):
        require_layout("its update", layout(other), layout(tree))
    with raises_with(Refusal, "1 leaves, and 2 were", code=Code.MALFORMED):
        require_layout("its update", layout(tree)[:1], layout(tree))
    require_layout("its update", layout(tree), layout(tree))


ASK = RequestMessage(run="r", contract="c", round=3, phase="p", key=b"12", payload=b"345")
ANSWER = ResponseMessage(run="r", round=1, exchange=2, client=3, layout=["a", "b"], metrics='{"a": 1}', payload=b"")


@pytest.mark.parametrize("said", [ASK, ANSWER], ids=["Ask", "Answer"])
def test_a_message_comes_back_field_by_field(said):
    message = Message(encode(said), 1, MESSAGE_TYPE)
    assert decode(type(said), message) == said
    fields = {f.name: getattr(said, f.name) for f in dataclasses.fields(said) if f.name != "payload"}
    assert read(type(said), fields, said.payload) == said
    for name in fields:
        with raises_with(Refusal, f"in {name}: ", code=Code.CONTRACT):
            read(type(said), {key: value for key, value in fields.items() if key != name}, b"")
        for wrong in (None, [1], object(), 1 if isinstance(fields[name], str | bool | bytes | float) else "1", True):
            if type(wrong) is not type(fields[name]):
                with raises_with(Refusal, f"field {name} ", code=Code.MALFORMED):
                    read(type(said), {**fields, name: wrong}, b"")
    with raises_with(Refusal, "further", code=Code.CONTRACT):
        read(type(said), {**fields, "further": 1}, b"")


@pytest.mark.parametrize("others", [
    {},
    {FIELDS: ConfigRecord()},
    {FIELDS: MetricRecord(), LEAVES: ArrayRecord()},
    {FIELDS: ConfigRecord(), LEAVES: ArrayRecord()},
    {FIELDS: ConfigRecord(), LEAVES: ArrayRecord({RAW: Array(np.ones(2))})},
    {FIELDS: ConfigRecord(), LEAVES: ArrayRecord({RAW: Array(np.ones(2))}), "c": ConfigRecord()},
])  # fmt: skip
@pytest.mark.parametrize("kind", [RequestMessage, ResponseMessage])
def test_other_records_are_refused(kind, others):
    with pytest.raises(Refusal):
        decode(kind, Message(RecordDict(others), 1, MESSAGE_TYPE))


@pytest.mark.parametrize("text", ["", "[1]", "1", '{"a": "b"}', '{"a": null}', '{"a": [1]}', '{"a": 1e', "[" * 10**5,
                                  '{"a": 1' + "0" * 400 + "}", '{"a": ' + "9" * 10**4 + "}"])  # fmt: skip
def test_metrics_that_are_none(text):
    """Metrics whose text is not a JSON object of numbers are refused."""
    with raises_with(Refusal, "metrics", code=Code.MALFORMED):
        dataclasses.replace(ANSWER, metrics=text).numbers()


def test_a_refusal_is_one_line_and_not_long():
    """A refusal is one line of at most 1000 printable characters, since it is logged and may be from the other side."""
    assert str(Refusal(Code.OTHER, "a\nERROR everything is lost\r\n\tb")) == "a ERROR everything is lost b"
    assert len(str(Refusal(Code.OTHER, "x" * 10**6))) == 1000
    assert str(Refusal(Code.OTHER, "\x1b[2Ja\x00b\u202ec é ε")) == "�[2Ja�b�c é ε"


SIZES = st.integers(-(2**63), 2**63 - 1)
VALUES = st.one_of(st.text(), SIZES, st.floats(), st.booleans(), st.binary(), st.lists(st.text(), max_size=3))
JSONS = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(
    inner, max_size=3) | st.dictionaries(st.text() | st.just("inner"), inner, max_size=3), max_leaves=5)  # fmt: skip
KINDS = {"str": st.text() | JSONS.map(json.dumps), "int": SIZES, "float": st.floats(), "bool": st.booleans(),
         "bytes": st.binary(), "list[str]": st.lists(st.text(), max_size=3)}  # fmt: skip


def of(kind, good):
    """Return a strategy for messages of a kind; each field is good, any value of its type, or any value at all."""
    fields = {}
    for f in dataclasses.fields(kind):
        value = getattr(good, f.name)
        fields[f.name] = st.just(value) | KINDS[f.type] | (VALUES if f.name != "payload" else st.just(value))
    return st.fixed_dictionaries(fields)


@pytest.fixture(scope="module")
def runtime():
    return ClientRuntime(federations.site(federations.Steps(), 0))


GOOD = RequestMessage(run=federations.NAME, contract="", phase="y_gradient", key=bytes(8), key_kind="threefry2x32",
                      payload=np.zeros(5).tobytes())  # fmt: skip
"""A request as the client expects it, except for the names of contract and call, which the test adds."""


@settings(max_examples=100, deadline=None)
@given(fields=of(RequestMessage, GOOD), right=st.booleans())
def test_a_desk_answers_whatever_it_is_asked(runtime, fields, right):
    """A client refuses a wrong request or replies with 24 bytes, which are three numbers, and never raises an error."""
    payload = fields.pop("payload")
    if right:
        fields["contract"] = runtime.contract.digest
        fields["call"] = next(call for call in runtime.contract.calls if call[0] == "y")
    try:
        request = read(RequestMessage, fields, payload)
    except Refusal:
        return
    response = runtime.respond(request, memory())
    assert response.client == 0
    assert bool(response.refused) != (len(response.payload) == 24)
    Message(encode(response), 1, MESSAGE_TYPE)  # it can be sent


@settings(max_examples=100, deadline=None)
@given(fields=of(ResponseMessage, ResponseMessage(run="r", round=1, exchange=0, client=2, layout=["value float64[3]"],
                                metrics='{"inner": 1.0}', payload=np.ones(3).tobytes())))  # fmt: skip
def test_a_server_counts_or_refuses_whatever_is_answered(runtime, fields):
    """A server refuses a response, or counts it with finite numbers, and raises no other error."""
    call = next(call for call in runtime.contract.calls.values() if call.phase == "y_gradient")
    try:
        response = read(ResponseMessage, fields, fields.pop("payload"))
        replied = ClientReply(2, RequestMessage(run="r", contract="", round=1), response).response()
        counted = check_response(replied, call, Terms(norm_bound=10.0), 6)
    except Refusal:
        return
    assert np.all(np.isfinite(counted.update))
    assert all(np.isfinite(value) for value in counted.metrics.values())


@pytest.mark.parametrize("wrong", [
    {"client": -1}, {"client": 6}, {"client": 3}, {"contract": ""}, {"contract": "[]"}, {"contract": "{}"},
    {"contract": '{"calls": [], "state": {}}'}, {"contract": "[" * 10**5}, {"refused": "no"},
], ids=str)  # fmt: skip
def test_a_server_admits_or_refuses_whoever_answers(runtime, wrong):
    registry = Roster(None, runtime.contract, "r", 6, Terms(), None)
    good = ResponseMessage(run="r", round=0, exchange=0, client=3, contract=runtime.contract.text)
    registry.admit(7, good)
    with pytest.raises(Refusal):
        registry.admit(8, dataclasses.replace(good, **{"client": 2, **wrong}))
    assert registry.nodes == {3: 7}


def test_large_payloads_travel_as_an_array_and_small_ones_among_the_fields(monkeypatch):
    response = ResponseMessage(run="r", round=0, exchange=0, client=1, payload=b"0123456789")
    assert set(encode(response)) == {FIELDS}
    monkeypatch.setattr(wire, "INLINE", 9)
    assert set(encode(response)) == {FIELDS, LEAVES}
    assert encode(response)[LEAVES][RAW].data == b"0123456789"
    request = Message(encode(RequestMessage(run="r", contract="c", payload=b"0123456789")), 1, MESSAGE_TYPE)
    assert decode(RequestMessage, request).payload == b"0123456789"
