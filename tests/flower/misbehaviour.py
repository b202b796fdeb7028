"""Part of the app under test, see federation_app.py: parties that do as told, once, and otherwise what they should.

The folder that FEDBILEVEL_FAULTS names has `faults.json`, a list of {"party": "server" or a client's number, "round",
"exchange", "do", …}; what was done is noted in `done`, a line each, before its consequences.
"""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedbilevel.flower.records import ACTION, content, said_in
from fedbilevel.flower.wire import Answer, Ask

LONGEST = 200.0  # seconds that a server waits for permission to go on


def due(party, ask):
    """What this party is to do wrong when it meets this question."""
    folder = Path(os.environ["FEDBILEVEL_FAULTS"])
    place = {"party": party, "round": ask.round, "exchange": ask.exchange}
    for fault in json.loads((folder / "faults.json").read_text()) if ask.phase else []:
        if place.items() <= fault.items():
            line = f"{party} {ask.round} {ask.exchange} {fault['do']}\n"
            done = folder / "done"
            if not done.exists() or line not in done.read_text():
                with open(done, "a") as file:
                    file.write(line)
                return fault
    return {"do": "nothing"}


def client(good):
    """The ClientApp `good`, misbehaving."""
    app = ClientApp()

    @app.query(ACTION)
    def answer(message, context):
        fault = due(context.node_config["partition-id"], said_in(Ask, message))
        do = fault["do"]
        if do == "raise":
            raise RuntimeError("as told")
        if do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if do == "kill all":  # SuperNode and supervisor too: they are one process group
            os.killpg(0, signal.SIGKILL)
        if do == "sleep":
            time.sleep(fault["seconds"])
        reply = good(message, context)
        if do == "dawdle":  # the answer exists, and comes too late
            time.sleep(fault["seconds"])
        return reply if do not in SPOILED else Message(content(SPOILED[do](said_in(Answer, reply))), reply_to=message)

    return app


def filled(value):
    """An answer all of whose numbers (float64) are `value`."""
    return lambda answer: replace(answer, payload=np.full(len(answer.payload) // 8, value).tobytes())


SPOILED = {
    "nan": filled(np.nan),
    "huge": filled(1e150),
    "shape": lambda answer: replace(answer, payload=answer.payload * 2, layout=answer.layout * 2),
    "bytes": lambda answer: replace(answer, payload=answer.payload[:-1]),
}


def let_wait(fault):
    """Wait for the file `go`, if that is what is to be done."""
    until = time.monotonic() + LONGEST
    while (
        fault["do"] == "wait"
        and not (Path(os.environ["FEDBILEVEL_FAULTS"]) / "go").exists()
        and time.monotonic() < until
    ):
        time.sleep(0.05)


def server(main):
    """The server's main, misbehaving: it waits for the file `go`, sends what no server should, or dies after asking."""

    def run(grid, config):
        push, nodes = grid.push_messages, grid.get_node_ids
        last = Ask(run="", contract="")

        def looked():
            """Who is there is asked before each round. Messages made before a long wait would be too old after it."""
            let_wait(due("server", replace(last, round=last.round + 1, exchange=0)))
            return nodes()

        def pushed(messages):
            nonlocal last
            messages = list(messages)
            asks = [said_in(Ask, message) for message in messages]
            last = asks[0] if asks else last
            fault = due("server", asks[0]) if asks else {"do": "nothing"}
            let_wait(fault)
            if fault["do"] == "ask":
                for message, ask in zip(messages, asks, strict=True):
                    message.content = content(replace(ask, **fault["instead"]))
            sent = push(messages)
            if fault["do"] == "kill":
                time.sleep(3.0)  # clients have answered
                os.kill(os.getpid(), signal.SIGKILL)
            return sent

        grid.push_messages, grid.get_node_ids = pushed, looked
        main(grid, config)

    return run
