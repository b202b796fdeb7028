"""Public numbers of replies, such as counts: they have no part in norms, and each has to be in its declared range.

A client's wrong public number is refused, and the run goes on as if the client had failed in this exchange.
"""

import ast
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import federations
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import Error, Message

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.algorithms.parts.adaptive_steps import adaptive
from fedbilevel.algorithms.parts.composed import composed
from fedbilevel.algorithms.parts.memory import LastReplies, Memory, Numbered, exchanges_so_far
from fedbilevel.algorithms.simfbo import WORK
from fedbilevel.authoring import Public, PublicRange, Request
from fedbilevel.core.privacy import comparable_norm
from fedbilevel.core.tree import XY
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.server.terms import Terms, check_public
from fedbilevel.flower.wire import RequestMessage, decode, draw_up
from fixed_steps import fixed
from refusals import raises_with, refuses
from representatives import slow_but

TASK = federations.TASK
BAD = 2  # the client with the faults
TERMS = Terms(join=1.0)
TOP_K, LATE = fb.parts.TopK(share=0.4), fb.Asynchronous(wait_for=5)


class Still(authoring.Algorithm):
    """Ask in each round for the gradient in y, with the same message and the same replies in every round.

    Clients therefore send differences of 0 after their first reply.
    """

    allows = authoring.Allows(late=("gradient",))

    def init(self, x, y):
        return XY(x, y + 0.1)

    @authoring.phase(takes="y", gives="y")
    def gradient(self, client, y, key):
        return authoring.Reply(jax.grad(client.problem.inner, 1)(TASK.x0, y, client.inner_batch(key, None)))

    def round(self, fed, state, key):
        fed.mean(self.gradient, state.y, key)
        return state


@cache
def app_of(method):
    """Return the clients' app. It keeps their programs, which several tests share."""
    return federations.app(method)


def fault_in(path, value):
    """Return a fault that replaces one number of a reply, which is found by the path of its leaf."""

    def fault(response, message):
        payload, start = bytearray(response.payload), 0
        for line in response.layout:
            name, dtype, shape = re.fullmatch(r"(\S+) (\w+)\[(.*)\]", line).groups()
            size = int(np.prod([int(n) for n in shape.split(",") if n])) * np.dtype(dtype).itemsize
            if name == path:
                payload[start : start + size] = np.full(size // np.dtype(dtype).itemsize, value, dtype).tobytes()
                return replace(response, payload=bytes(payload))
            start += size
        raise AssertionError(f"{path} is not in {response.layout}")

    return fault


def failure(response, message):
    return Message(Error(code=8, reason="ClientApp stopped responding"), reply_to=message)


def play(method, faults, log=None, terms=TERMS, **more):
    """Return the result of a run of all clients in which `faults[client, round, exchange]` happen."""
    grid = InProcess(federations.misbehaving(app_of(method), faults), 6)
    return federations.solve(method, grid, terms=terms, log=log, **{"cohort": None, **more})


def refusals(log):
    """Return (client, round) -> the refusal, from a log of exchanges."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {(int(c), line["round"]): why for line in lines for c, why in line.get("refused", {}).items()}


# Norms

LAYERS = {"top-k": TOP_K, "late": LATE}


@pytest.mark.parametrize("round", [1, 8])
@pytest.mark.parametrize("layer", LAYERS)
def test_the_bound_on_norms_does_not_grow_with_the_number_of_exchanges(layer, round, tmp_path):
    """A false reply is refused in round 8 as in round 1, although the message contains the number of the exchange.

    The bound is norm_factor times the usual norm, which is that of round 0, or message_factor = 10 times ‖message‖. If
    the number 8 were a part of this norm, the bound in round 8 would be 80 or more.
    """
    method, log = fb.layered(Still(), LAYERS[layer]), tmp_path / "log.jsonl"

    def long(response, message):
        place = next(line.split()[0] for line in response.layout if ".update" in line and "float" in line)
        return fault_in(place, 60.0)(response, message)

    factor, start = 4.0, TASK.y0 + 0.1
    assert max(10 * np.linalg.norm(start), factor * max(np.linalg.norm(gradient(row)) for row in rows())) < 60
    play(method, {(BAD, round, 0): long}, log, Terms(join=1.0, norm_factor=factor), rounds=round + 2)
    ((place, why),) = refusals(log).items()
    assert (*place, why["code"]) == (BAD, round, "bound")


def gradient(row):
    """Return the reply of the client with these samples to the message of `Still`."""
    return jax.grad(TASK.problem.inner, 1)(TASK.x0, TASK.y0 + 0.1, row)


def rows():
    """Return the clients' samples of the inner loss."""
    return [TASK.clients.inner.row(client) for client in range(6)]


def test_norms_are_of_private_floating_point_numbers():
    """Public parts with a range, integers and booleans are left out, and parts that privacy withholds are not.

    A public part counts if its range has no end on one side, since nothing else would limit it there.
    """
    update = {
        "h": np.array([3.0, 4.0]),
        "n": Public((np.array(1000.0), np.arange(2)), PublicRange(0, 1e4)),
        "q": authoring.Withheld(np.array(12.0)),
        "i": np.array(10**6),
        "b": np.ones(5, bool),
    }
    assert comparable_norm(update) == 13.0
    assert comparable_norm(Numbered((np.array([3.0, 4.0]), np.int32(24)))) == 5.0
    assert comparable_norm({}) == 0.0
    assert comparable_norm(Public(np.array(7.0))) == comparable_norm(Public(np.array(7.0), PublicRange(0))) == 7.0


# Ranges

SIM, SHRO = fixed(fb.SimFBO(batch_size=4)), fixed(fb.ShroFBO(batch_size=4))
PLANES = {"iterations": 2, "estimate": fb.parts.LinearizedADMM(steps=1)}
CASES = {
    # name -> (method, the exchange of the fault in its round, the path of the number, false numbers, what is allowed)
    "top-k, joins": (fb.layered(SIM, TOP_K), 0, ".joins", [2, -1, 0.5], "a whole number from 0 to 1"),
    "top-k, exchanges": (fb.layered(SIM, TOP_K), 0, ".exchanges", [0, 3], "a whole number from 1 to 2"),
    "late, joins": (fb.layered(SIM, LATE), 0, ".joins", [1e6, 2, -1], "a whole number from 0 to 1"),
    "late, exchanges": (fb.layered(SIM, LATE), 0, ".exchanges", [0, 1e6], "a whole number from 1 to 2"),
    "ShroFBO, work": (SHRO, 0, "[1]", [-1, 1e9], "a number from 0 to 50000"),
    "ShroFBO, share": (SHRO, 0, "[2]", [0, -1, 1e9], "1"),
    "ShroFBO, top-k, work": (
        fb.layered(SHRO, TOP_K), 0, ".update[1][1]", [-1e9, 1e9], "a number from -50000 to 50000"
    ),
    "ADBO, plane": (fb.ADBO(wait_for=5, **PLANES), 1, "[4]", [-1, 2, 1e6], "a whole number from 0 to 1"),
    "ADBO, replied": (fb.ADBO(wait_for=5, **PLANES), 2, "[2]", [-1, 2], "a whole number from 0 to 1"),
    "SDBO, replied": (fb.SDBO(**PLANES), 2, "[2]", [0, 1e6], "1"),
    "SDBO, excluded": (fb.SDBO(**PLANES), 2, "[3]", [-1, 1e6], "a whole number from 0 to 1"),
}  # fmt: skip
QUICK = "top-k, joins", "top-k, exchanges", "ShroFBO, work", "ADBO, replied"


@cache
def failed(method, exchange):
    """Return the result of a run in which the client BAD fails in one exchange of round 1."""
    return play(method, {(BAD, 1, exchange): failure})


@pytest.mark.filterwarnings("ignore::fedbilevel.core.errors.NumericalWarning")
@pytest.mark.parametrize("case", slow_but(*QUICK, of=CASES))
def test_a_reply_with_a_public_number_out_of_range_does_not_count(case, tmp_path):
    """The run has the same numbers as if the client had failed, and the refusal names the number, and what is allowed.

    The fault happens in round 1, so that the client has replied before. With t = 1, `exchanges` may be 1 or 2.
    """
    method, exchange, path, values, allowed = CASES[case]
    expected = failed(method, exchange)
    for value in values:
        log = tmp_path / f"{value}.jsonl"
        result = play(method, {(BAD, 1, exchange): fault_in(f"{path}.public", value)}, log)
        federations.same(result, expected, tolerance=0)
        (why,) = refusals(log).values()
        told = f"update{path}, a public number, is {value:g}, and it must be {allowed}"
        assert (why["code"], why["why"]) == ("malformed", told)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_public_number_that_is_not_finite_is_refused(value, tmp_path):
    log = tmp_path / "log.jsonl"
    result = play(SHRO, {(BAD, 1, 0): fault_in("[1].public", value)}, log)
    federations.same(result, failed(SHRO, 0), tolerance=0)
    (why,) = refusals(log).values()
    assert (why["code"], why["why"]) == ("bound", "its update is not finite in [1].public")


def test_false_delays_do_not_lengthen_steps():
    """A client may report within its range that it was away for too long, so that the mean age is below 0.

    The server's steps are then as without delays. Divided by 1 + 2·(−3), they would have the wrong sign.
    """
    memory, one = Memory(late=fb.Asynchronous(wait_for=1)), jnp.ones(())
    assert [float(memory._slower(LastReplies(None, one, age * one, 9))) for age in (-3, 0, 2)] == [1, 1, 5]


class Mean:
    """Stand for the engine in a server's step: all clients have replied."""

    sampled = False


@pytest.mark.parametrize(("work", "moves"), [(5.0, True), (-5.0, False)])
def test_false_work_does_not_turn_steps_around(work, moves):
    """ρ is a mean of numbers ‖a_i‖₁ above 0. If false differences make it negative, the server makes no step."""
    state = SHRO.robust_start(TASK.x0, TASK.y0)
    h = jax.tree.map(jnp.ones_like, tuple(state.iterate))
    after = SHRO.robust_step(Mean(), state, (type(state.iterate)(*h), Public(jnp.array(work)), Public(jnp.ones(()))))
    moved = jax.tree.map(lambda new, old: np.asarray(new - old), tuple(after.iterate), tuple(state.iterate))
    for change in jax.tree.leaves(moved):
        assert np.all(change < 0) if moves else not change.any()


# What is declared


def ends(within, **request):
    return within.ends(Request(**{"method": fb.ShroFBO(local_steps=5), "message": None, "own": {}, **request}))


def test_the_ends_of_ranges_follow_from_the_request():
    """The largest ‖a_i‖₁ follows from the number of local steps, and `exchanges` from the number in the message."""
    assert ends(WORK) == (0, 5e4)
    assert ends(WORK, own={"local_steps": 2}) == (0, 2e4)
    exchanges = PublicRange(1, exchanges_so_far, whole=True)
    assert ends(exchanges, message=Numbered((TASK.y0, np.int32(7)))) == (1, 8)
    assert ends(exchanges, message=[{"inside": Numbered((TASK.y0, np.int32(7)))}, np.int32(3)]) == (1, 8)
    assert ends(exchanges, message=(TASK.y0, np.int32(7))) == (1, np.inf)


@pytest.mark.parametrize(("name", "ends"), [("lowest", (5, 1)), ("lowest", (None,)), ("highest", (0, np.nan))])
def test_a_range_without_numbers_in_it_is_refused(name, ends):
    with refuses(name):
        PublicRange(*ends)


def test_a_difference_is_that_of_two_numbers_in_the_range_or_of_one_number_and_zero():
    assert ends(PublicRange(2, 5).of_difference()) == (-3, 5)
    assert ends(PublicRange(-5, -2).of_difference()) == (-5, 3)
    assert ends(PublicRange(-1, 4).of_difference()) == (-5, 5)
    assert ends(WORK.of_difference()) == (-5e4, 5e4)
    assert ends(PublicRange(1, 1).of_difference()) == (0, 1)


@pytest.mark.parametrize(
    ("within", "inside", "outside", "words"),
    [
        (PublicRange(0, 1, whole=True), [0, 1], [-1, 2, 0.5, 1e6], "a whole number from 0 to 1"),
        (PublicRange(1, 1), [1, 1 + 1e-7], [0, 1.001], "1"),
        (PublicRange(lowest=0), [0, 1e30], [-1e-9], "a number at least 0"),
        (PublicRange(highest=-2), [-2, -1e30], [0], "a number at most -2"),
        (PublicRange(whole=True), [-3, 1e9], [0.5], "a whole number"),
        (PublicRange(), [-1e30, 0.5], [], "a number"),
    ],
)
def test_what_a_range_contains(within, inside, outside, words):
    request = Request(None, None, {})
    assert within.in_words(request) == words
    for number in inside:
        check_public({"n": Public(np.array([0 * number + inside[0], number]), within)}, lambda: request)
    for number in outside:
        with raises_with(Refusal, f"update['n'], a public number, is {number:g}, and it must be {words}") as error:
            check_public({"n": Public(np.array([inside[0], number]), within)}, lambda: request)
        assert error.value.code is Code.MALFORMED


def test_without_public_parts_the_message_is_not_read():
    check_public({"h": np.ones(2), "q": authoring.Withheld(np.ones(()))}, lambda: pytest.fail("it was read"))


def test_ranges_are_no_part_of_the_structure():
    """Marks with different ranges are in the same structure, so that a sum may begin with marks without a range."""
    mark, plain = Public(jnp.ones(()), PublicRange(0, 1)), Public(jnp.zeros(()))
    assert jax.tree.structure(mark) == jax.tree.structure(plain)
    assert float(jax.tree.map(jnp.add, plain, mark).public) == 1
    assert jax.tree.map(jnp.negative, mark).within.highest == 1


def test_every_public_number_of_the_library_has_a_range():
    calls = [
        (path.name, node)
        for path in Path(fb.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Public"
    ]
    assert len(calls) >= 9
    assert [name for name, call in calls if len(call.args) < 2] == []


@pytest.mark.parametrize(
    "method",
    [fb.ShroFBO(), fb.CorrectedFBO(), fb.layered(SHRO, TOP_K), fb.Asynchronous(SHRO, wait_for=2)],
    ids=["adaptive steps", "adaptive steps, corrected", "top-k", "late"],
)
def test_layers_keep_the_ranges(method):
    """In the calls of a contract, every public number has a range, whatever layers are around the method."""
    method = composed(adaptive(method, TASK.problem), TASK.problem)
    contract = draw_up(method, TASK.problem, TASK.x0, TASK.y0, TASK.clients.examples())
    is_public = lambda part: isinstance(part, Public)  # noqa: E731
    for call in contract.calls.values():
        marks = [part for part in jax.tree.leaves(call.update, is_leaf=is_public) if is_public(part)]
        assert len(marks) >= 2
        assert all(np.isfinite(float(mark.within.lowest)) for mark in marks)


# A client that returns


class Away(InProcess):
    """A grid from which the client BAD is away from round 1 until round `back`; clients keep states in a folder."""

    def __init__(self, method, back, folder):
        super().__init__(federations.app(method, folder=folder), 6)
        self.back, self.away = back, None

    def push_messages(self, messages):
        messages = list(messages)
        rounds = {request.round for request in (decode(RequestMessage, m) for m in messages) if request.phase}
        if 1 in rounds and self.away is None:
            self.away = True
            self.leave(BAD)
        if self.back in rounds and self.away:
            self.away = False
            self.join(BAD)
        return super().push_messages(messages)


def comes_back(layer, back, rounds, folder):
    """Run `Still` while BAD is away, and return the largest number of rounds between two replies of BAD.

    All terms but one have their defaults, and the only refusals say that BAD is away. In the end the server has the
    mean of all replies.
    """
    method, log = fb.layered(Still(), layer), folder / "log.jsonl"
    result = federations.solve(method, Away(method, back, folder), terms=TERMS, log=log, rounds=rounds, cohort=None)
    assert {why["code"] for why in refusals(log).values()} <= {"absent", "late"}
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    replied = [line["round"] for line in lines if BAD in line["answered"]]
    last = result.state.slots["memory"]["gradient"]
    np.testing.assert_allclose(last.weight, 1.0, rtol=1e-12)
    exact = np.average([gradient(row) for row in rows()], 0, TASK.clients.weights)
    np.testing.assert_allclose(last.mean, exact, rtol=1e-10, atol=1e-12)
    return int(np.max(np.diff(replied)))


@pytest.mark.parametrize("layer", [TOP_K, fb.Asynchronous(wait_for=1)], ids=["top-k", "late"])
def test_a_client_that_was_away_for_many_exchanges_comes_back(layer, tmp_path, monkeypatch):
    """A client that was away for more than 1,000 exchanges replies with their number, and this reply counts.

    The server's count grows by 500 in each round, so that few rounds suffice.
    """
    after = LastReplies.after
    jump = lambda last, delta: after(last, delta)._replace(exchanges=last.exchanges + 500)  # noqa: E731
    monkeypatch.setattr(LastReplies, "after", jump)
    assert 500 * comes_back(layer, 5, 16, tmp_path) > 1000


@pytest.mark.slow
def test_a_client_that_was_away_for_a_thousand_rounds_comes_back(tmp_path):
    """The same without a jump of the count. The client is asked again within LONGEST_REST = 32 rounds."""
    assert comes_back(TOP_K, 1020, 1060, tmp_path) > 1000
