"""A client that fails counts as absent: the run equals one of the reference engine without this client's replies."""

import errno
import json
import math
from dataclasses import replace

import federations
import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

import fedbilevel as fb
from fedbilevel.core.errors import AbsenceWarning
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.flower.server import roster
from fedbilevel.flower.server.terms import Backoff, Terms
from fedbilevel.flower.wire import RequestMessage, ResponseMessage, decode, request_message
from fixed_steps import fixed
from refusals import codes, raises_with, refuses, warns_with

STEPS = federations.Steps()
CLIENTS = federations.app(STEPS)  # all tests share the compiled phases of these clients
COHORTS = federations.cohorts()
TERMS = Terms(norm_factor=1000.0, norm_bound=1e6, deadline=100.0, join=5.0)


def refuse(response, message):
    raise RuntimeError("the disk is full")


def flowers(code):
    return lambda response, message: Message(Error(code=code, reason="ClientApp stopped responding"), reply_to=message)


def garbage(response, message):
    return Message(RecordDict({"fields": ConfigRecord({"run": 3})}), reply_to=message)


def half_garbage(response, message):
    reply = federations.Message(federations.encode(response), reply_to=message)
    reply.content["fields"]["round"] = "first"
    return reply


def changed(**fields):
    return lambda response, message: replace(response, **fields)


def numbers(*values, dtype=float):
    return np.array(values, dtype).tobytes()


FAULTS = {  # faults of a reply in the first exchange, whose update is float64[3], and the codes of their refusals
    "raises": (refuse, "flower"),
    "its app crashes": (flowers(8), "flower"),
    "its reply expires": (flowers(4), "late"),
    "its SuperNode is killed": (flowers(5), "absent"),
    "garbage": (garbage, "malformed"),
    "a field of another type": (half_garbage, "malformed"),
    "NaN": (changed(payload=numbers(1, math.nan, 1)), "bound"),
    "infinite": (changed(payload=numbers(1, 1, math.inf)), "bound"),
    "huge": (changed(payload=numbers(1e7, 0, 0)), "bound"),
    "beyond squares": (changed(payload=numbers(1e200, 0, 0)), "bound"),
    "out of proportion": (changed(payload=numbers(9e5, 0, 0)), "bound"),
    "shape": (changed(payload=numbers(1, 1), layout=["value float64[2]"]), "malformed"),
    "shape, not said": (changed(payload=numbers(1, 1)), "malformed"),
    "dtype": (changed(payload=numbers(1, 1, 1, dtype="f4"), layout=["value float32[3]"]), "malformed"),
    "structure": (changed(layout=["['g'] float64[3]"]), "malformed"),
    "further leaves": (changed(layout=["value float64[3]", "b float64[]"]), "malformed"),
    "metrics: NaN": (changed(metrics='{"inner": NaN}'), "malformed"),
    "metrics: a name": (changed(metrics='{"inner": 1.0, "label": 7}'), "malformed"),
    "metrics: no JSON": (changed(metrics="{"), "malformed"),
    "another client": (changed(client=(COHORTS[1][0] + 1) % 6), "malformed"),
    "another round": (changed(round=0), "malformed"),
    "another exchange": (changed(exchange=1), "malformed"),
    "another run": (changed(run="ffffffffffffffff"), "malformed"),
    "negative gradients": (changed(gradients=-1), "malformed"),
    "absurd products": (changed(hvps=2**62), "malformed"),  # at most ⌊(2³¹ − 1)/6⌋ are allowed
    "an account of NaN": (changed(epsilon=math.nan), "malformed"),
    "an account of δ = 1": (changed(delta=1.0), "malformed"),
    "refuses": (changed(refused="I do not\nwant to"), "other"),
}  # fmt: skip


@pytest.fixture(scope="module")
def absent():
    """Return the result of a run in which one client misses all of round 1, and another one its second exchange."""
    first, second = COHORTS[1][:2]
    with pytest.MonkeyPatch.context() as patch:
        return federations.without(patch, STEPS, {(first, 1, 0), (first, 1, 1), (second, 1, 1)})


@pytest.fixture(scope="module")
def whole():
    with pytest.MonkeyPatch.context() as patch:
        return federations.without(patch, STEPS, set())


def run(tmp_path, client_app, **options):
    """Return the result of a run, the refusals in its log, (round, exchange, client) -> code, and the log's lines."""
    log = tmp_path / "exchanges.jsonl"
    grid = InProcess(client_app, 6, delay=options.pop("delay", None))
    result = federations.solve(STEPS, grid, log=log, **{"terms": TERMS, **options})
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    refused = [(line, int(c), why["code"]) for line in lines for c, why in line.get("refused", {}).items()]
    return result, {(line["round"], line["exchange"], client): code for line, client, code in refused}, lines


def test_a_run_without_faults(tmp_path, whole):
    result, said, _ = run(tmp_path, CLIENTS)
    federations.same(result, whole)
    federations.moved(result)
    assert said == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_answer_is_left_out(fault, tmp_path, absent):
    """A bad reply does not count, and the result is that of a run without it.

    A client that fails in the first exchange of round 1 is not asked in the second one, and is asked again in round 2.
    """
    (first, second), (wrong, expected) = COHORTS[1][:2], FAULTS[fault]
    faults = {(first, 1, 0): wrong, (second, 1, 1): refuse}
    result, said, lines = run(tmp_path, federations.misbehaving(CLIENTS, faults))
    assert said == {(1, 0, first): expected, (1, 1, second): "flower"}
    federations.same(result, absent)
    assert [line["asked"] for line in lines] == [4, 4, 4, 3, 4, 4]
    assert result.ledger.bytes_down == sum(line["bytes_down"] for line in lines)
    assert result.ledger.bytes_up == absent.ledger.bytes_up == sum(line["bytes_up"] for line in lines)


def test_metrics_are_means_over_those_who_sent_them(tmp_path):
    """A metric is the weighted mean over the clients that sent it; a client that sends none has no part in the mean.

    Under privacy clients send no metrics.
    """
    silent, sent = COHORTS[1][0], {}

    def note(response, message):
        sent[response.client] = response.numbers()["inner"]
        return replace(response, metrics="{}") if response.client == silent else response

    silenced = federations.misbehaving(CLIENTS, {(client, 1, 0): note for client in COHORTS[1]})
    result, said, _ = run(tmp_path, silenced, eval_every=1)
    whole = federations.solve(STEPS, InProcess(CLIENTS, 6), terms=TERMS, eval_every=1)
    assert said == {}
    assert silent in sent
    assert len(sent) == 4
    weights = federations.TASK.clients.weights
    means = [run.history.rows[2]["inner"] for run in (result, whole)]
    for who, got in zip((set(sent) - {silent}, set(sent)), means, strict=True):
        mean = sum(weights[client] * sent[client] for client in who) / sum(weights[client] for client in who)
        np.testing.assert_allclose(got, mean, rtol=1e-12)
    assert abs(means[0] - means[1]) > 1e-6 * means[1]
    np.testing.assert_allclose(result.y, whole.y, rtol=1e-12)


@pytest.mark.parametrize("seconds", [math.inf, 150.0], ids=["never", "too late"])
def test_no_answer_in_time_is_left_out(seconds, tmp_path, absent):
    """A reply that does not arrive before the deadline of 100 s does not count.

    A reply after 150 s, on the federation's clock, arrives while the next round waits for replies, and changes nothing.
    """
    first, second = COHORTS[1][:2]

    def delay(client, message):
        request: RequestMessage = decode(RequestMessage, message)
        slow = (client, request.round, request.exchange) in {(first, 1, 0), (second, 1, 1)} and request.phase
        return seconds if slow else 1.0

    result, said, lines = run(tmp_path, CLIENTS, delay=delay)
    assert set(said.values()) == {"late"}
    federations.same(result, absent)
    seconds_taken = np.array([line["seconds"] for line in lines[:4]])
    assert np.all(seconds_taken >= [1, 1, 100, 100])
    assert np.all(seconds_taken <= np.array([1, 1, 100, 100]) + TERMS.poll)


@pytest.mark.parametrize(("slow", "code"), [(3, "stalled"), (2, "late")])
def test_where_most_are_late_it_may_be_no_clients_fault(slow, code, tmp_path):
    """If more than half of the online clients are late, the error says that the SuperLink may be the cause.

    One client's huge message, for example, holds up the SuperLink. Three of four clients are late here, and in another
    case two, which is not more than half. One more client replies with an error.
    """
    *late, broken = COHORTS[0][-slow - 1 :]
    delay = lambda client, message: math.inf if client in late and decode(RequestMessage, message).phase else 0.0  # noqa: E731
    faults = {(broken, 0, 0): refuse}
    options = {"rounds": 1, "terms": replace(TERMS, quorum=0.25, attempts=1)}
    if slow == 3:
        with raises_with(fb.errors.ExchangeError, "3 of 4 online clients are late") as error:
            run(tmp_path, federations.misbehaving(CLIENTS, faults), delay=delay, **options)
        assert codes(error) == {**dict.fromkeys(late, Code.STALLED), broken: Code.FLOWER}
    else:
        run(tmp_path, federations.misbehaving(CLIENTS, faults), delay=delay, **options)
    line = json.loads((tmp_path / "exchanges.jsonl").read_text().splitlines()[0])
    assert {line["refused"][str(client)]["code"] for client in late} == {code}
    assert line["refused"][str(broken)]["code"] == "flower"


@pytest.mark.parametrize("round", [0, 1])
def test_sites_that_are_late_with_their_first_replies_may_be_compiling(round, tmp_path):
    """If most clients are late in the first exchange of a phase, the error says that sites compile then."""
    late = COHORTS[round][:3]

    def delay(client, message):
        request = decode(RequestMessage, message)
        return math.inf if client in late and request.phase and request.round == round else 0.0

    options = {"rounds": 2, "terms": replace(TERMS, quorum=1.0, attempts=1)}
    with raises_with(fb.errors.ExchangeError, "3 of 4 online clients are late at the same time", round=round) as error:
        run(tmp_path, CLIENTS, delay=delay, **options)
    assert codes(error) == dict.fromkeys(late, Code.STALLED)
    assert ("first exchange of this phase, for which each site compiles a program" in str(error.value)) == (round == 0)


def test_failing_again_and_again_means_resting_longer(tmp_path, monkeypatch):
    """A client that fails each time is asked less and less often: of five rounds, in rounds 0, 1 and 3.

    All clients are in each cohort.
    """
    asked = []

    def fail(response, message):
        asked.append(response.round)
        raise RuntimeError("again")

    faults = {(3, round, 0): fail for round in range(4)}
    options = {"rounds": 5, "cohort": 6}
    result, _, _ = run(tmp_path, federations.misbehaving(CLIENTS, faults), **options)
    missing = {(3, round, exchange) for round in range(5) for exchange in range(2)}
    assert asked == [0, 1, 3]
    federations.same(result, federations.without(monkeypatch, STEPS, missing, **options))


def test_rests():
    """The rounds from one failure to the next attempt double from 1 to 32, until a reply counts."""
    backoff, failed = Backoff(), []
    for round in range(200):
        if not backoff.resting(0, round):
            backoff.failed(0, round)
            backoff.failed(0, round)  # two failures in one round are one
            assert backoff.resting(0, round)
            failed.append(round)
    assert np.diff(failed).tolist() == [1, 2, 4, 8, 16, 32, 32, 32, 32, 32][: len(failed) - 1]
    backoff.replied(0)
    assert not backoff.resting(0, 199)


def test_too_few_are_asked_again(tmp_path, whole):
    """If there are fewer replies than the quorum, the clients that have not replied are asked again.

    Here the quorum is two, and three of four clients fail in the first attempt.
    """
    failing, failed = COHORTS[1][:3], []

    def once(response, message):
        if response.client in failed:
            return response
        failed.append(response.client)
        raise RuntimeError("once")

    faults = {(client, 1, 1): once for client in failing}
    result, _, lines = run(tmp_path, federations.misbehaving(CLIENTS, faults))
    (again,) = [line for line in lines if line["attempt"]]
    assert [again[name] for name in ("round", "exchange", "asked", "answered")] == [1, 1, 3, sorted(failing)]
    federations.same(result, whole)  # no client rests, because each replied in the end
    assert result.ledger.bytes_down == sum(line["bytes_down"] for line in lines) > whole.ledger.bytes_down


def test_below_the_quorum_the_run_stops_and_can_be_resumed(tmp_path, whole):
    """If there is no quorum after the last attempt, the run stops with an error, and can be resumed.

    The checkpoint has the rounds before, and the resumed run has the numbers of an uninterrupted run.
    """
    failing = sorted(COHORTS[1][:3])
    faults = {(client, 1, 1): refuse for client in failing}
    path = tmp_path / "checkpoint.npz"
    said = f"after 3 attempts (clients {', '.join(map(str, failing))}: Flower's error 2: RuntimeError: the disk is full"
    with raises_with(fb.errors.ExchangeError, said, round=1, phase="x_gradient", replies=1, needed=2) as error:
        run(tmp_path, federations.misbehaving(CLIENTS, faults), checkpoint=path)
    assert codes(error) == dict.fromkeys(failing, Code.FLOWER)
    resumed, _, lines = run(tmp_path, CLIENTS, checkpoint=path, resume=True)
    federations.same(resumed, whole)
    assert [line["round"] for line in lines[-4:]] == [1, 1, 2, 2]


def test_the_error_names_only_clients_that_failed_in_the_end(tmp_path):
    """A client that fails in one attempt and replies in a later one is not a reason why the run stops."""
    *failing, late = sorted(COHORTS[1][:3])
    failed = []

    def once(response, message):
        if failed:
            return response
        failed.append(response.client)
        raise RuntimeError("once")

    faults = {(client, 1, 1): refuse for client in failing} | {(late, 1, 1): once}
    terms = replace(TERMS, quorum=1.0)
    with raises_with(fb.errors.ExchangeError, round=1, replies=2, needed=4) as error:
        run(tmp_path, federations.misbehaving(CLIENTS, faults), terms=terms)
    assert failed == [late]
    assert codes(error) == dict.fromkeys(failing, Code.FLOWER)


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (3, Code.LATE, "no reply within the deadline"),
        (5, Code.ABSENT, "its SuperNode no longer reports to the SuperLink"),
        (2, Code.FLOWER, "Flower's error 2: Node Unavailable"),
    ],
)
def test_errors_of_flower_are_words_of_this_library_if_their_cause_is_known(number, code, words):
    reply = Message(
        Error(number, "Node Unavailable"), reply_to=request_message(1, RequestMessage(run="r", contract="c"), 1.0)
    )
    with pytest.raises(Refusal) as refusal:
        decode(ResponseMessage, reply)
    assert refusal.value.code is code
    assert refusal.value.why.startswith(words)
    assert f"Flower's error {number}" in refusal.value.why


def test_an_exchange_waits_for_as_many_replies_as_a_robust_rule_needs(tmp_path):
    """Krum needs five of six clients here, more than the quorum of three; two clients fail in all attempts."""
    method = fb.layered(STEPS, fb.parts.Krum(bad=1))
    clients = federations.misbehaving(federations.app(method), {(client, 1, 0): refuse for client in (2, 4)})
    options = {"terms": TERMS, "cohort": 6, "checkpoint": tmp_path / "run.npz"}
    with raises_with(fb.errors.ExchangeError, round=1, replies=4, needed=5) as error:
        federations.solve(method, InProcess(clients, 6), **options)
    assert codes(error) == dict.fromkeys((2, 4), Code.FLOWER)
    with refuses("cohort", 4, "5 replies"):
        federations.solve(method, InProcess(clients, 6), cohort=4)


def test_quorum():
    """A quorum q of a cohort of n clients is ⌈q·n⌉ replies, and wrong fields of `Terms` are refused."""
    assert [Terms(quorum=0.5).needed(cohort) for cohort in (1, 2, 3, 4)] == [1, 1, 2, 2]
    assert [Terms(quorum=0.7).needed(10), Terms(quorum=1.0).needed(7), Terms(quorum=1e-3).needed(5)] == [7, 7, 1]
    for field, value in (("quorum", 0), ("quorum", 1.1), ("deadline", math.inf), ("poll", 0), ("norm_bound", -1.0)):
        with refuses(f"Terms.{field}", value):
            Terms(**{field: value})
    with refuses("Terms.attempts", 0):
        Terms(attempts=0)


class Changing(InProcess):
    """A grid that calls `events[round, exchange]` before the first message of this exchange is sent."""

    def __init__(self, clients=CLIENTS):
        super().__init__(clients, 6)
        self.events = {}

    def push_messages(self, messages):
        messages = list(messages)
        requests = [decode(RequestMessage, message) for message in messages]
        for place in {(request.round, request.exchange) for request in requests if request.phase}:
            if event := self.events.pop(place, None):
                event(self)
        return super().push_messages(messages)


def test_a_client_that_goes_and_comes_back_as_another_node(tmp_path, monkeypatch):
    """A client whose node leaves is absent, and takes part again when it comes back as another node.

    It leaves before the messages of round 1 are sent, and comes back in this round as node 7, in time for round 2.
    """
    client = next(iter(set(COHORTS[1]) & set(COHORTS[2])))
    grid = Changing()
    grid.events = {(1, 0): lambda grid: grid.leave(client), (1, 1): lambda grid: grid.join(client)}
    result = federations.solve(STEPS, grid, terms=TERMS)
    expected = federations.without(monkeypatch, STEPS, {(client, 1, 0), (client, 1, 1)})
    federations.same(result, expected)
    assert {grid.client(node): node for node in grid.contexts}[client] == 7


def test_a_client_that_has_lost_what_it_kept_does_not_begin_anew(tmp_path, monkeypatch):
    """A client whose replies are changes of its state is refused without this state, and the run goes on without it.

    The server's sum contains the earlier changes. If the client began anew, it would count twice in this sum.
    """
    client, log = 2, tmp_path / "log.jsonl"
    method = fb.layered(fixed(fb.SimFBO(client_lr=0.01, server_lr=0.02, batch_size=None)), fb.parts.TopK(share=0.5))

    def restart(grid):
        grid.leave(client)
        grid.join(client)

    grid = Changing(federations.app(method))
    grid.events = {(1, 0): restart}
    result = federations.solve(method, grid, rounds=6, cohort=None, log=log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert "state" in {line["refused"][str(client)]["code"] for line in lines if line.get("refused")}
    absent = {(client, round, 0) for round in range(1, 6)}
    federations.same(result, federations.without(monkeypatch, method, absent, rounds=6, cohort=None))


def test_two_nodes_for_one_client(tmp_path, whole, caplog):
    """Of two nodes that claim to be one client, the first takes part; if it leaves, the second does in this round."""
    client = next(iter(set(COHORTS[0]) & set(COHORTS[1])))
    grid = Changing()
    grid.join(client)
    grid.events = {(0, 1): lambda grid: grid.leave(client)}  # its reply in this exchange is lost
    result = federations.solve(STEPS, grid, terms=replace(TERMS, quorum=1.0))  # so it has to be asked again
    federations.same(result, whole)
    assert f"node 7 does not take part: the node claims to be client {client}, but node {client + 1}" in caplog.text


@pytest.mark.parametrize("response", ["", None, "left out"])
def test_a_message_that_flower_does_not_take(response, tmp_path, absent):
    """A client is absent if Flower does not take the message to it, which grids report in three different ways."""
    first, second = COHORTS[1][:2]

    class Refusing(InProcess):
        def push_messages(self, messages):
            sent = []
            for message in messages:
                request = decode(RequestMessage, message)
                place = self.client(message.metadata.dst_node_id), request.round, request.exchange
                lost = request.phase and place in {(first, 1, 0), (first, 1, 1), (second, 1, 1)}
                sent += [response] if lost else super().push_messages([message])
            return [number for number in sent if number != "left out"]

    result = federations.solve(STEPS, Refusing(CLIENTS, 6), terms=TERMS)
    federations.same(result, absent)


def test_messages_that_are_too_large():
    """If messages are too large, the error says so.

    Flower's grid then returns an empty list, and no error about the length of this list is raised.
    """

    class Small(InProcess):
        def push_messages(self, messages):
            return super().push_messages(messages) if all(not decode(RequestMessage, m).phase for m in messages) else []

    with raises_with(fb.errors.ExchangeError, round=0, replies=0) as error:
        federations.solve(STEPS, Small(CLIENTS, 6), terms=TERMS)
    assert {*codes(error).values()} == {Code.LARGE}


def test_a_population_that_is_not_complete(tmp_path, monkeypatch):
    """A run begins with four of six clients; the fifth joins in round 1, and the sixth never does."""
    early, late = 5, 4
    grid = Changing()
    grid.leave(early)
    grid.leave(late)
    grid.events = {(1, 0): lambda grid: grid.join(early)}  # too late for round 1, which has begun
    missing = {(late, r, e) for r in range(3) for e in range(2)} | {(early, r, e) for r in range(2) for e in range(2)}
    result = federations.solve(STEPS, grid, terms=TERMS, cohort=6)
    federations.same(result, federations.without(monkeypatch, STEPS, missing, cohort=6))
    assert grid.clock.time() > TERMS.join  # the server has waited for both


def test_names_and_logs_are_checked_before_anything_is_sent(tmp_path):
    grid = InProcess(CLIENTS, 6, delay=lambda *_: pytest.fail("something was sent"))
    for name in ("experiment 1", "ABCDEF0123456789", ""):
        with refuses("Flower.name", name, "8 to 64"):
            federations.solve(STEPS, grid, name=name)
    with raises_with(fb.errors.CheckpointError, path=tmp_path, errno=errno.EISDIR):
        federations.solve(STEPS, grid, log=tmp_path)
    log = tmp_path / "new" / "exchanges.jsonl"

    def replace(result, row):  # after round 1 the log cannot be written
        if result.round == 1:
            log.unlink()
            log.mkdir()

    with raises_with(fb.errors.CheckpointError, path=log, errno=errno.EISDIR):
        federations.solve(STEPS, InProcess(CLIENTS, 6), terms=TERMS, log=log, callbacks=[replace])


def test_a_population_that_is_too_small():
    grid = InProcess(CLIENTS, 6)
    for client in range(4):
        grid.leave(client)
    with raises_with(fb.errors.ExchangeError, round=None, replies=2, needed=3) as error:
        federations.solve(STEPS, grid, terms=TERMS)
    assert codes(error) == dict.fromkeys(range(4), Code.ABSENT)


def test_strangers_do_not_take_part(caplog):
    """Clients with another algorithm than the server's do not take part, and the error and the log say what differs."""
    grid = InProcess(federations.app(federations.Steps(lr=0.2)), 6)
    said = "hyperparameters.lr is 0.1 at the server and 0.2 at the site"
    with raises_with(fb.errors.ExchangeError, said, replies=0) as error:
        federations.solve(STEPS, grid, terms=TERMS)
    assert {*codes(error).values()} == {Code.CONTRACT}
    assert "node 1 does not take part: hyperparameters.lr is 0.1 at the server" in caplog.text


def test_a_reply_to_a_greeting_waits_while_a_round_lasts(monkeypatch):
    """A client that replies to its greeting while a round lasts takes part from the next round on.

    Client 5 replies after 15 s. By then round 0 has begun, whose two exchanges of 9 s last 18 s. The SuperLink keeps a
    reply for as long as its request is valid, which is GREETING = 20 deadlines of 10 s for a greeting. If it were one
    deadline, client 5 would never take part.
    """
    valid = {}

    class Forgetting(InProcess):
        def push_messages(self, messages):
            messages = list(messages)
            sent = super().push_messages(messages)
            valid.update({one: (self.clock.time(), message) for one, message in zip(sent, messages, strict=True)})
            return sent

        def pull_messages(self, message_ids):
            wanted = [one for one in message_ids if self.clock.time() <= valid[one][0] + valid[one][1].metadata.ttl]
            return super().pull_messages(wanted)

    def delay(client, message):
        request = decode(RequestMessage, message)
        return 9.0 if request.phase else 15.0 if client == 5 else 0.0

    def joined():
        result = federations.solve(STEPS, Forgetting(CLIENTS, 6, delay=delay), terms=terms, cohort=6)
        lasts = {message.metadata.ttl for _, message in valid.values() if not decode(RequestMessage, message).phase}
        return result, lasts

    terms = Terms(deadline=10.0, join=1.0)
    result, lasts = joined()
    assert lasts == {roster.GREETING * terms.deadline} == {200.0}
    missing = {(5, 0, exchange) for exchange in range(2)}
    federations.same(result, federations.without(monkeypatch, STEPS, missing, cohort=6))
    monkeypatch.setattr(roster, "GREETING", 1)
    with warns_with(AbsenceWarning, "1 of 6 "):
        joined()


def test_one_who_does_not_take_part_is_greeted_again(tmp_path, monkeypatch):
    """A client that could not start when it was first greeted is greeted again after a deadline, and then takes part.

    Its data were missing at first. A reply takes 60 s, so that the deadline of 100 s is over in round 1, and the client
    takes part in round 2.
    """
    tries = []

    def late_data(message, context):
        request: RequestMessage = decode(RequestMessage, message)
        if context.node_config["partition-id"] == 5 and not request.phase:
            tries.append(request)
            if len(tries) == 1:
                raise FileNotFoundError("data")
        return CLIENTS(message, context)

    grid = InProcess(late_data, 6, delay=lambda client, message: 60.0)  # a deadline of 100 s is over in round 1
    result = federations.solve(STEPS, grid, terms=replace(TERMS, join=70.0), cohort=6)
    assert len(tries) == 2
    missing = {(5, round, exchange) for round in range(2) for exchange in range(2)}
    federations.same(result, federations.without(monkeypatch, STEPS, missing, cohort=6))
