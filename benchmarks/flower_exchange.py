"""The cost of an exchange, compared with a bare Flower message of the same number of bytes.

Both go to all clients and back, in turn, in the same way: within one process, or over a SuperLink and SuperNodes with
TLS and keys. The phase returns its message, so that only the exchange is timed. The first exchange and the first
message, with imports and compilation, are left out.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.harness import head, row
from benchmarks.machine import load
from fedbilevel.flower.launch.processes import Federation

QUICK = {"engines": ["in-process"], "clients": [2], "repetitions": 2}
PROJECT = """
[project]
name = "cost"
version = "1.0.0"
description = "Exchanges and bare messages, in turn"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "fedbilevel"
components = { serverapp = "cost.server:app", clientapp = "cost.client:app" }
config = { clients = 2, floats = 400000, repetitions = 5 }
"""

ECHO = """
import jax.numpy as jnp
import numpy as np
import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.tree import XY

class Echo(authoring.Algorithm):
    solves = (fb.SingleLevel,)
    def init(self, x, y):
        return XY(x, y)
    @authoring.phase
    def back(self, client, message, key):
        return authoring.Reply(message)
    def round(self, fed, state, key):
        return XY(fed.mean(self.back, state.x, key), state.y)

problem = fb.SingleLevel(lambda x, batch: jnp.mean(batch) + 0 * x[0])
samples = np.ones(8, np.float32)
"""

CLIENT = """
import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from cost.echo import Echo, problem, samples
from fedbilevel.flower import Site, client_app

def site(run_config, node_config):
    x0 = np.zeros(run_config["floats"], np.float32)
    return Site(id=node_config["partition-id"], algorithm=Echo(), problem=problem, x0=x0, outer=samples)

app = client_app(site)

@app.query("ping")
def ping(message, context):
    received = np.frombuffer(message.content["a"]["p"], np.float32)
    return Message(RecordDict({"a": ConfigRecord({"p": (received + 1).tobytes()})}), reply_to=message)
"""

SERVER = """
import json, tempfile, time
from pathlib import Path
import numpy as np
import fedbilevel as fb
from flwr.app import ConfigRecord, Message, RecordDict
from cost.echo import Echo, problem, samples
from fedbilevel.flower import Flower, server_app

def bare(grid, nodes, config, number):
    tick = getattr(getattr(grid, "clock", None), "tick", 0.03)
    sleep = getattr(getattr(grid, "clock", None), "sleep", time.sleep)
    content = RecordDict({"a": ConfigRecord({"p": np.full(config["floats"], number, np.float32).tobytes()})})
    start = time.perf_counter()
    left = set(grid.push_messages([Message(content, node, "query.ping", ttl=120.0) for node in nodes]))
    while left:
        sleep(min(0.5, tick + 0.05 * (time.perf_counter() - start)))
        left -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(left)}
    return time.perf_counter() - start

def main(grid, config):
    while len(nodes := list(grid.get_node_ids())) < config["clients"]:
        time.sleep(0.2)
    log = Path(tempfile.mkdtemp()) / "exchanges.jsonl"
    times = {"bare": [], "exchange": []}

    def turn(result, row):
        times["exchange"].append(time.perf_counter() - turn.began)
        times["bare"].append(bare(grid, nodes, config, len(times["bare"])))
        turn.began = time.perf_counter()

    turn.began = time.perf_counter()
    known = fb.RemoteClients(config["clients"], samples)
    x0 = np.linspace(0, 1, config["floats"]).astype(np.float32)
    fb.solve(Echo(), problem, known, x0, rounds=config["repetitions"] + 1, engine=Flower(grid=grid, log=log),
             callbacks=[turn])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    ours = times["exchange"][1:] if hasattr(grid, "clock") else [line["seconds"] for line in lines]
    print("COST", json.dumps({"bare": times["bare"], "exchange": ours}), flush=True)

app = server_app(main)
"""


def write_app(directory: Path) -> Path:
    """Write the Flower app that makes the measurements."""
    (directory / "cost").mkdir(parents=True)
    (directory / "pyproject.toml").write_text(PROJECT)
    for name, content in {"__init__": "", "echo": ECHO, "client": CLIENT, "server": SERVER}.items():
        (directory / "cost" / f"{name}.py").write_text(content)
    return directory


def in_process(app: Path, config: dict[str, int], place: Path) -> list[str]:
    """Run server and clients in one process. Return the lines that the server prints."""
    program = "import sys, fedbilevel.flower as f; from cost.client import app; from cost.server import main; "
    program += f"c = {config}; main(f.InProcess(app, c['clients'], run_config=c), c)"
    done = subprocess.run([sys.executable, "-c", program], cwd=app, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def deployed(app: Path, config: dict[str, int], place: Path) -> list[str]:
    """Run a federation of processes. Return the lines that the server prints."""
    with Federation(place, config["clients"], deadline=240) as federation:
        return list(federation.run(app, as_text(config), timeout=1800))


def as_text(config: dict[str, int]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.items())


ENGINES = {"in-process": in_process, "deployment": deployed}


def measure(app: Path, engine: str, config: dict[str, int], place: Path) -> dict[str, list[float]]:
    """Return the seconds of bare messages and of exchanges, without the first of each kind."""
    lines = ENGINES[engine](app, config, place)
    found = [line for line in lines if "COST" in line]
    if not found:
        raise SystemExit("".join(lines[-40:]))
    return {kind: times[1:] for kind, times in json.loads(found[0][found[0].index("{") :]).items()}


def main(
    engines: tuple[str, ...] = tuple(ENGINES),
    clients: tuple[int, ...] = (2, 10),
    floats: int = 400_000,
    repetitions: int = 7,
) -> None:
    head("engine", "clients", "MB each way", "bare, s (least)", "exchange, s (least)", "ratio", "load")
    with tempfile.TemporaryDirectory() as scratch:
        app = write_app(Path(scratch) / "app")
        for engine in engines:
            for count in clients:
                config = {"clients": count, "floats": floats, "repetitions": repetitions}
                times = measure(app, engine, config, Path(scratch) / f"{engine}-{count}")
                cells = [f"{median(times[kind]):.3f} ({min(times[kind]):.3f})" for kind in ("bare", "exchange")]
                ratio = median(times["exchange"]) / median(times["bare"])
                row(engine, count, f"{4 * floats / 1e6:.1f}", *cells, f"{ratio:.2f}", load())
