"""Errors of Flower's own calls and messages that cannot be read end no run, and cost at most one client's replies."""

from dataclasses import replace

import federations
import httpx
import pytest
from flwr.app import Error, Message
from google.protobuf.message import DecodeError

from fedbilevel.core.errors import ExchangeError
from fedbilevel.flower import wire
from fedbilevel.flower.launch.in_process import InProcess
from fedbilevel.flower.refusal import Code
from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire import RequestMessage, ResponseMessage, decode
from refusals import codes, raises_with

STEPS = federations.Steps()
CLIENTS = federations.app(STEPS)
COHORTS = federations.cohorts()
TERMS = Terms(deadline=100.0, join=5.0)
ERROR = httpx.HTTPStatusError("503", request=None, response=httpx.Response(503))


@pytest.fixture(scope="module")
def whole():
    with pytest.MonkeyPatch.context() as patch:
        return federations.without(patch, STEPS, set())


class Failing(InProcess):
    """A grid whose calls fail where a test says so.

    If a message cannot be unpacked, the pull fails and all its messages are lost, as with Flower's own grid.
    """

    alone = 0  # the number of pulls for a single message

    def __init__(self, junk=(), **broken):
        super().__init__(CLIENTS, 6)
        self.junk = set(junk)  # (client, round, exchange) whose answer cannot be unpacked
        self.broken = broken  # call -> how often it still fails

    def fail(self, call, error=ERROR):
        if self.broken.get(call, 0):
            self.broken[call] -= 1
            raise error

    def get_node_ids(self):
        self.fail("nodes")
        return super().get_node_ids()

    def push_messages(self, messages):
        messages = list(messages)
        if any(decode(RequestMessage, message).phase for message in messages):
            self.fail("push")
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        message_ids = list(message_ids)
        self.alone += len(message_ids) == 1
        self.fail("pull")
        self.fail("connection", httpx.ConnectError("refused"))
        found = super().pull_messages(message_ids)
        for message in found:
            if not message.has_error() and "fields" in message.content:
                fields = message.content["fields"]
                if not fields["contract"] and (fields["client"], fields["round"], fields["exchange"]) in self.junk:
                    raise DecodeError("Error parsing message")
        return found


@pytest.mark.parametrize("broken", [{"push": 1}, {"pull": 9}, {"connection": 20}, {"nodes": 2}, {"push": 2, "pull": 3}],
                         ids=lambda broken: "+".join(broken))  # fmt: skip
def test_errors_of_flower_that_pass_change_nothing(broken, whole):
    """Errors that pass change no number: a request that was not taken is sent again, and a reply is fetched later."""
    grid = Failing()
    note = lambda result, row: grid.broken.update(broken) if result.round == 1 else None  # noqa: E731
    result = federations.solve(STEPS, grid, terms=TERMS, callbacks=[note])
    federations.same(result, whole)
    assert not any(grid.broken.values())
    assert (grid.alone > 0) == ("pull" in broken)


def test_a_superlink_that_takes_no_message_is_the_reason_and_not_the_size_of_the_message():
    """A SuperLink that was stopped, or has ended the run, raises an error for every request."""
    grid = Failing()
    note = lambda result, row: grid.broken.update(push=99) if result.round == 1 else None  # noqa: E731
    with raises_with(ExchangeError, f"could not be handed to the SuperLink ({type(ERROR).__name__})", round=1) as error:
        federations.solve(STEPS, grid, terms=TERMS, callbacks=[note])
    assert {*codes(error).values()} == {Code.UNSENT}


def test_an_answer_that_cannot_be_unpacked_is_left_out(monkeypatch):
    """A reply that cannot be unpacked does not count.

    The first one also loses the replies of the same pull, which are requested again. After it each reply is pulled by
    itself, so that no other reply is lost.
    """
    first, second = COHORTS[1][:2], COHORTS[2][0]
    faults = {(first[0], 1, 0), (second, 2, 0)}
    result = federations.solve(STEPS, Failing(faults), terms=replace(TERMS, attempts=5))
    missing = {(first[0], 1, 0), (first[0], 1, 1), (second, 2, 0), (second, 2, 1)}
    federations.same(result, federations.without(monkeypatch, STEPS, missing))


def test_answers_to_nothing_that_was_asked_are_ignored(whole):
    class Strange(InProcess):
        def pull_messages(self, message_ids):
            request = Message(federations.encode(RequestMessage(run="r", contract="c")), 1, "query.fedbilevel")
            strange = [Message(Error(code=2, reason="strange"), reply_to=request) for _ in range(2)]
            strange[1].metadata.__dict__["_reply_to_message_id"] = "12345678"
            return [*strange, *super().pull_messages(message_ids), *strange]

    federations.same(federations.solve(STEPS, Strange(CLIENTS, 6), terms=TERMS), whole)


def test_a_greeting_that_cannot_be_read_refuses_one_node_only(monkeypatch, caplog):
    """If reading a greeting fails, with whatever error, only the node that sent it is refused.

    Here the comparison of the contracts raises a ZeroDivisionError.
    """
    broken = 5

    def respond(message, context):
        reply = CLIENTS(message, context)
        if context.node_config["partition-id"] != broken or decode(RequestMessage, message).phase:
            return reply
        said = replace(decode(ResponseMessage, reply), contract="unreadable")
        return Message(federations.encode(said), reply_to=message)

    def unlucky(server, site):
        raise ZeroDivisionError

    monkeypatch.setattr(wire, "disagreement", unlucky)
    result = federations.solve(STEPS, InProcess(respond, 6), terms=TERMS, cohort=6)
    missing = {(broken, round, exchange) for round in range(3) for exchange in range(2)}
    federations.same(result, federations.without(monkeypatch, STEPS, missing, cohort=6))
    assert "node 6 does not take part: reading its message fails with ZeroDivisionError" in caplog.text
