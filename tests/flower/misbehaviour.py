"""The server and the clients of a federation in which given faults happen, each of them once.

This file is a part of the app under test (see federation_app.py). The folder that FEDBILEVEL_FAULTS names has the file
`faults.json`, a list of {"party": "server" or a client's number, "round", "exchange", "do", …}. Before a fault has
consequences, a line about it is written to the file `done` in this folder.
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

from fedbilevel.flower.wire import ACTION, RequestMessage, ResponseMessage, decode, encode

LONGEST = 200.0  # seconds that a server waits for permission to go on


def due(party, request):
    """Return the fault that this party has at this request, and write a line about it to `done`.

    A fault that is in `done` already is not returned again.
    """
    folder = Path(os.environ["FEDBILEVEL_FAULTS"])
    place = {"party": party, "round": request.round, "exchange": request.exchange}
    for fault in json.loads((folder / "faults.json").read_text()) if request.phase else []:
        if place.items() <= fault.items():
            line = f"{party} {request.round} {request.exchange} {fault['do']}\n"
            done = folder / "done"
            if not done.exists() or line not in done.read_text():
                with open(done, "a") as file:
                    file.write(line)
                return fault
    return {"do": "nothing"}


def client(good):
    """Return a ClientApp that replies as `good` does, except where a fault is due."""
    app = ClientApp()

    @app.query(ACTION)
    def respond(message, context):
        fault = due(context.node_config["partition-id"], decode(RequestMessage, message))
        do = fault["do"]
        if do == "raise":
            raise RuntimeError("as told")
        if do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if do == "kill all":  # also the SuperNode and its supervisor, which are in the same process group
            os.killpg(0, signal.SIGKILL)
        if do == "sleep":
            time.sleep(fault["seconds"])
        reply = good(message, context)
        if do in SPOILED:
            return Message(encode(SPOILED[do](decode(ResponseMessage, reply))), reply_to=message)
        return reply

    return app


def filled(value):
    """Return a fault that replaces all numbers of a reply, in float64, by `value`."""
    return lambda response: replace(response, payload=np.full(len(response.payload) // 8, value).tobytes())


SPOILED = {
    "nan": filled(np.nan),
    "huge": filled(1e150),
    "shape": lambda response: replace(response, payload=response.payload * 2, layout=response.layout * 2),
    "bytes": lambda response: replace(response, payload=response.payload[:-1]),
}


def let_wait(fault):
    """Wait for the file `go`, if the fault is "wait"."""
    until = time.monotonic() + LONGEST
    go = Path(os.environ["FEDBILEVEL_FAULTS"]) / "go"
    while fault["do"] == "wait" and not go.exists() and time.monotonic() < until:
        time.sleep(0.05)


def server(main):
    """Return the server's main function `main` with faults.

    The server waits for the file `go`, sends a request that no server should send, or is killed after its requests.
    """

    def run(grid, config):
        push, nodes = grid.push_messages, grid.get_node_ids
        last = RequestMessage(run="", contract="")

        def looked():
            """Return the nodes, after a wait if one is due.

            The server asks for the nodes before each round, and makes its messages later. Messages that were made
            before a long wait would be too old after it.
            """
            let_wait(due("server", replace(last, round=last.round + 1, exchange=0)))
            return nodes()

        def pushed(messages):
            nonlocal last
            messages = list(messages)
            requests = [decode(RequestMessage, message) for message in messages]
            last = requests[0] if requests else last
            fault = due("server", requests[0]) if requests else {"do": "nothing"}
            let_wait(fault)
            if fault["do"] == "ask":
                for message, request in zip(messages, requests, strict=True):
                    message.content = encode(replace(request, **fault["instead"]))
            sent = push(messages)
            if fault["do"] == "kill":
                time.sleep(3.0)  # until clients have replied
                os.kill(os.getpid(), signal.SIGKILL)
            return sent

        grid.push_messages, grid.get_node_ids = pushed, looked
        main(grid, config)

    return run
