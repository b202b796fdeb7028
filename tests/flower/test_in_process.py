"""`InProcess` is a grid without a network: it has Flower's messages and apps, a virtual clock, and changing nodes."""

import math

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedbilevel.flower.launch.in_process import InProcess

QUERY = "query.echo"


def echo():
    app = ClientApp()

    @app.query("echo")
    def respond(message, context):
        count = context.state.setdefault("count", ConfigRecord({"n": 0}))
        count["n"] += 1
        message.content["a"]["seen"] = count["n"]  # the message is the client's own copy
        message.content["a"]["client"] = context.node_config["partition-id"]
        if message.content["a"]["text"] == "fail":
            raise ValueError("no")
        return Message(message.content, reply_to=message)

    return app


def message(node, text="hello"):
    return Message(RecordDict({"a": ConfigRecord({"text": text})}), node, QUERY, ttl=10.0)


def received(grid, sent):
    """Return (client, the number of messages that it has seen) for each reply that can be pulled now."""
    return [(m.content["a"]["client"], m.content["a"]["seen"]) for m in grid.pull_messages(sent)]


def test_it_is_a_grid_and_clients_keep_their_state():
    grid = InProcess(echo(), 3, run_config={"rounds": 3})
    assert isinstance(grid, Grid)
    assert grid.get_node_ids() == [1, 2, 3]
    assert grid.contexts[3].node_config == {"partition-id": 2, "num-partitions": 3}
    assert grid.contexts[3].run_config == {"rounds": 3}
    asked = [message(2), message(2), message(1)]
    answers = grid.send_and_receive(asked)
    assert [(m.content["a"]["client"], m.content["a"]["seen"]) for m in answers] == [(1, 1), (1, 2), (0, 1)]
    assert "seen" not in asked[0].content["a"]
    assert grid.pull_messages([]) == []
    (failed,) = grid.send_and_receive([message(1, "fail")])
    assert (failed.error.code, failed.error.reason) == (2, "ValueError: no")


def test_answers_come_in_the_order_of_the_clock():
    """Replies come in the order of the virtual clock, and a client works on one message at a time.

    So the second reply of client 1, which takes 1 s for each, comes after 2 s.
    """
    grid = InProcess(echo(), 3, delay=lambda client, message: [3.0, 1.0, 2.0][client])
    sent = grid.push_messages([message(1), message(2), message(2), message(3)])
    seen = []
    while len(seen) < 4:
        grid.clock.sleep(100.0)  # until the next reply at most
        seen += [(grid.clock.time(), *one) for one in received(grid, sent)]
    assert seen == [(1.0, 1, 1), (2.0, 1, 2), (2.0, 2, 1), (3.0, 0, 1)]


def test_an_answer_that_nobody_pulls_does_not_stop_the_clock():
    grid = InProcess(echo(), 2, delay=lambda client, message: 1.0)
    late, wanted = grid.push_messages([message(1), message(2)])
    grid.clock.sleep(5.0)
    assert received(grid, [wanted]) == [(1, 1)]
    grid.clock.sleep(5.0)
    assert grid.clock.time() == 6.0
    assert received(grid, [late, wanted]) == [(0, 1)]


def test_lost_messages():
    """A message with an infinite delay is lost, and `send_and_receive` returns the other replies at its timeout."""
    grid = InProcess(echo(), 2, delay=lambda client, message: math.inf if client else 1.0)
    answers = grid.send_and_receive([message(1), message(2)], timeout=7.0)
    assert len(answers) == 1
    assert grid.send_and_receive([message(2)], timeout=3.0) == []


def test_clients_come_and_go():
    grid = InProcess(echo(), 2, delay=lambda client, message: 1.0)
    sent = grid.push_messages([message(1), message(2)])
    grid.leave(1)
    grid.clock.sleep(1.0)
    assert received(grid, sent) == [(0, 1)]  # the message to client 1, which has left, is lost
    assert grid.get_node_ids() == [1]
    assert received(grid, grid.push_messages([message(2)])) == []
    grid.join(1)
    grid.join(1)
    assert grid.get_node_ids() == [1, 3, 4]
    assert [grid.client(node) for node in (1, 3, 4)] == [0, 1, 1]
    (response,) = grid.send_and_receive([message(3)])
    assert response.content["a"]["seen"] == 1  # its state before it left is gone
