"""How long a message takes to all clients and back, with nothing computed: `python benchmarks/flower_bare.py`.

Real processes on this machine's loopback. The first exchange (imports) is left out; the others' median and least are
printed with the machine's load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from fedbilevel.flower.processes import Federation

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "ping"
version = "1.0.0"
description = "Messages there and back"
license = "Apache-2.0"
dependencies = ["flwr"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "fedbilevel"
[tool.flwr.app.components]
serverapp = "ping.server:app"
clientapp = "ping.client:app"
[tool.flwr.app.config]
clients = 2
floats = 0
repetitions = 5
quick = true
fastest = 0.05
"""

CLIENT = """
import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query("ping")
def ping(message, context):
    content = RecordDict()
    if "a" in message.content:
        received = np.frombuffer(message.content["a"]["p"], np.float32)
        content["a"] = ConfigRecord({"p": (received + context.node_id % 1000).tobytes()})
    return Message(content, reply_to=message)
"""

SERVER = """
import json, time
import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

def exchange(grid, messages, config):
    if not config["quick"]:
        return list(grid.send_and_receive(messages))
    left, replies, start = set(grid.push_messages(messages)), [], time.monotonic()
    while left:
        time.sleep(min(max((time.monotonic() - start) / 10, config["fastest"]), 1.0))
        got = list(grid.pull_messages(left))
        replies += got
        left -= {reply.metadata.reply_to_message_id for reply in got}
    return replies

@app.main()
def main(grid, context):
    config = context.run_config
    if config["quick"]:
        from fedbilevel.flower.private import quick_pulls
        quick_pulls()
    while len(nodes := list(grid.get_node_ids())) < config["clients"]:
        time.sleep(0.2)
    seconds = []
    for repetition in range(config["repetitions"] + 1):
        content = RecordDict()
        if config["floats"]:
            content["a"] = ConfigRecord({"p": np.full(config["floats"], repetition, np.float32).tobytes()})
        start = time.perf_counter()
        replies = exchange(grid, [Message(content, node, "query.ping", ttl=120.0) for node in nodes], config)
        seconds.append(time.perf_counter() - start)
        assert len(replies) == len(nodes) and not any(reply.has_error() for reply in replies), replies
    print("SECONDS", json.dumps(seconds), flush=True)
"""


def write_app(directory: Path) -> Path:
    """A Flower app that sends messages there and back."""
    (directory / "ping").mkdir(parents=True)
    (directory / "pyproject.toml").write_text(PROJECT)
    for name, content in {"__init__": "", "client": CLIENT, "server": SERVER}.items():
        (directory / "ping" / f"{name}.py").write_text(content)
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 10])
    parser.add_argument("--floats", type=int, nargs="+", default=[0, 400_000], help="float32 each way")
    parser.add_argument("--modes", nargs="+", choices=["persistent", "stock"], default=["persistent", "stock"])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--insecure", action="store_true", help="no TLS, no keys")
    parser.add_argument("--fastest", default="0.02")
    parser.add_argument("--first-port", type=int)
    parser.add_argument("--keep", type=Path, help="directory for the logs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        app = write_app(Path(scratch) / "app")
        for mode in options.modes:
            for clients in options.clients:
                persistent = mode == "persistent"
                with Federation(
                    (options.keep or Path(scratch)) / f"{mode}-{clients}",
                    clients,
                    tls=not options.insecure,
                    persistent=persistent,
                    options=["--fastest", options.fastest] if persistent else [],
                    first_port=options.first_port,
                ) as federation:
                    for floats in options.floats:
                        config = f"clients={clients} floats={floats} repetitions={options.repetitions}"
                        config += f" quick={str(persistent).lower()}"
                        for line in federation.run(app, config, timeout=1200):
                            if "SECONDS" in line:
                                report(mode, clients, floats, json.loads(line[line.index("[") :]))
                            elif options.keep:
                                print(line, end="")


def report(mode: str, clients: int, floats: int, seconds: list[float]) -> None:
    """Print a line of the table."""
    first, *rest = seconds
    figures = f"median {statistics.median(rest):.3f} s least {min(rest):.3f} s, first {first:.1f} s"
    load = f"load {os.getloadavg()[0]:.1f}"
    print(f"{mode:10} {clients:3d} clients {4 * floats / 1e6:4.1f} MB each way: {figures}, {load}", flush=True)


if __name__ == "__main__":
    main()
