"""A spec played by a federation over Flower: what its server and its clients do.

The run configuration (`flwr run --run-config`) changes the spec and says what is expected of clients; the node
configuration (`--node-config` of a client's SuperNode) says which client it is, where its data and its state lie, what
it allows, and how private it wants to be.
"""

from __future__ import annotations

import inspect
import json
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedbilevel import __version__
from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.errors import ConfigurationError, require, unknown
from fedbilevel.display import Watch
from fedbilevel.display.curves import can_draw
from fedbilevel.engines.checkpoint import write_text
from fedbilevel.engines.history import Row
from fedbilevel.engines.result import Result
from fedbilevel.experiments.folder import Folder, LoadedRun, default_path, load_run, require_free
from fedbilevel.experiments.loader import own_file, task_maker
from fedbilevel.experiments.runner import Experiment, algorithm_of, complete, first_metric, task_of
from fedbilevel.experiments.spec import Component, Spec, configure, fields_of
from fedbilevel.flower.client.limits import Limits
from fedbilevel.tasks import Task

if TYPE_CHECKING:
    from fedbilevel.flower import Site


NORMS = {"norm-factor", "norm-bound"}
SERVER = {"quorum": float, "deadline": float, "attempts": int, "join": float, "poll": float}
SERVER |= dict.fromkeys(["message-factor", *sorted(NORMS)], float)
"""Run configuration, besides `settings`, `out`, `client-keys`: fields of `flower.Terms`. Of NORMS 0 sets no bound."""

LIMITS = {field.name.replace("_", "-"): type(field.default) for field in fields(Limits)}
PRIVACY = {"clip": float, "noise-multiplier": float, "delta": float, "epsilon": float}
NODE = {"partition-id": int, "num-partitions": int, "state-folder": str, "tell-metrics": bool, **PRIVACY, **LIMITS}
"""Node configuration, besides the task's own fields."""


def server_app(spec: Spec) -> Any:
    """Make a Flower ServerApp that plays the spec."""
    from fedbilevel import flower

    return flower.server_app(partial(serve, spec))


def client_app(spec: Spec) -> Any:
    """Make a Flower ClientApp that serves the phases of the spec's algorithm on its own samples."""
    from fedbilevel import flower

    return flower.client_app(partial(site, spec))


def serve(spec: Spec, grid: Any, config: Mapping[str, Any]) -> None:
    """Play the spec with the clients that Flower's Grid reaches; an unfinished run in the folder `out` is continued."""
    from fedbilevel.flower import Flower

    spec = configured(spec, config)
    task = seen_by(spec, "server")
    metric = first_metric(task)
    place = Folder(Path(config["out"])) if config.get("out") else Folder.new(spec)
    require_same(spec, place)
    name = run_name(place)
    keys = config.get("client-keys") or None
    engine = Flower(grid=grid, terms=terms(config), name=name, log=place.exchanges, keys=keys)

    def note_name(result: Result, row: Row | None) -> None:
        if not _name_file(place).exists():
            write_text(_name_file(place), name)

    watch = Watch(Console(width=160, force_terminal=False), metric, spec.run.budget, spec.timed)
    experiment = Experiment(task, algorithm_of(spec), engine)
    drawn = can_draw()
    complete(spec, place.path, callbacks=[note_name, watch], plot=drawn, experiment=experiment, progress=watch)
    print(f"run   {place.path.resolve()}", flush=True)


def site(spec: Spec, run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> Site:
    """Make the client of this node: its samples, its limits, its privacy, and the phases that it serves."""
    from fedbilevel.flower import Privacy, Site

    spec = configured(spec, run_config)
    known = fields_of(spec.task.name, spec.algorithm.name)["task"]
    for name in node_config:
        if name not in NODE and name not in known:
            raise unknown("name in the node configuration", name, [*NODE, *known])
    node = _fields(NODE, node_config)
    require("partition_id" in node, "node configuration: partition-id", None, "the number of this client, from 0")
    own = {name: value for name, value in node_config.items() if name in known and name not in NODE}
    client = node["partition_id"]
    task = seen_by(spec.replace(task=own) if own else spec, client)
    clients = task.population
    alone = len(clients) == 1
    require(alone or client < len(clients), "node configuration: partition-id", client, f"below {len(clients)}")
    row = 0 if alone else client
    shared = clients.inner is clients.outer
    return Site(
        id=client,
        algorithm=algorithm_of(spec),
        problem=task.problem,
        x0=task.x0,
        y0=task.y0,
        outer=clients.outer.row(row),
        inner=None if shared else clients.inner.row(row),
        works=clients.local_steps is not None,
        capacity=None if clients.capacity is None else float(clients.capacity[row]),
        limits=Limits(**_fields(LIMITS, node_config)),
        privacy=_privacy(Privacy, _fields(PRIVACY, node_config)),
        metrics_per_client=task.metrics_per_client if spec.run.metrics_per_client else {},
        tells_metrics=node.get("tell_metrics", False),
        folder=Path(node["state_folder"]).expanduser() if "state_folder" in node else None,
    )


def configured(spec: Spec, config: Mapping[str, Any]) -> Spec:
    """Change the spec by the settings of a run configuration: FIELD=VALUE, as for --set, divided as a shell would."""
    known = {"settings", "out", "client-keys", *SERVER}
    for name in config:
        if name not in known:
            raise unknown("name in the run configuration", name, known)
    before = spec.task.name, spec.algorithm.name
    spec = configure(spec.tables(), settings=shlex.split(str(config.get("settings", ""))))
    after = spec.task.name, spec.algorithm.name
    require(after == before, "settings", after, f"of the app's own task and algorithm, {before}: a name is code to run")
    require_real(spec)
    return spec


def require_real(spec: Spec) -> None:
    """Refuse what a spec can say of simulations alone."""
    require(not spec.run.pooled, "run.pooled", True, "false in a federation, whose clients keep their samples")
    if spec.timed:
        raise ConfigurationError(
            "[clock] is for simulations: leave it out of a federation, whose clients take real time"
        )


def terms(config: Mapping[str, Any]) -> Any:
    """Read the terms on which the server works with clients from the run configuration."""
    from fedbilevel.flower import Terms

    unbounded = {name.replace("-", "_"): None for name in NORMS if config.get(name) == 0}
    return Terms(**_fields(SERVER, config) | unbounded)


def seen_by(spec: Spec, party: str | int) -> Task:
    """Make the task as the server or a client sees it.

    A function with a parameter `party` makes just that: "server" gets a Task with `RemoteClients`, a client's number
    a Task with that client's samples alone. Of any other task everyone makes the whole, and uses its own part.
    """
    if "party" in inspect.signature(task_maker(spec.task.name)).parameters:
        task = task_of(spec, party=party)
        kind = RemoteClients if party == "server" else Clients
        fits = isinstance(task.clients, kind) and (party == "server" or len(task.clients) == 1)
        wanted = "RemoteClients" if party == "server" else "Clients with one client"
        require(fits, f"Task.clients for party = {party!r}", type(task.clients).__name__, wanted)
        return task
    task = task_of(spec)
    return replace(task, clients=RemoteClients.of(task.population)) if party == "server" else task


def require_same(spec: Spec, place: Folder) -> None:
    """Refuse to go on in a folder with a run of another spec."""
    if not place.begun and not place.finished:
        return
    if changed := place.difference(spec):
        raise ConfigurationError(f"the run in {place.path} differs in {changed}; give this run another folder as out")
    if place.finished:
        print(f"the run in {place.path} is finished already", flush=True)


def run_name(place: Folder) -> str:
    """Return the name of the run in a folder, under which clients keep their state; a new name for a run that
    begins."""
    if not _name_file(place).is_file():
        return secrets.token_hex(16)
    from fedbilevel.flower.wire import is_run

    name = _name_file(place).read_text(errors="replace").strip()
    require(is_run(name), f"the name in {_name_file(place)}", name[:200], "8 to 64 hexadecimal digits")
    return name


def status(place: Folder) -> list[str]:
    """Say, in lines, how far a run's server has come, and of each client that did not count when it was last asked why.

    Raises:
        ConfigurationError: the folder has no exchanges.
    """
    from fedbilevel.flower.refusal import Refusal

    absent: dict[int, tuple[int, Refusal]] = {}  # client -> round, why
    last: dict[str, Any] = {}
    if not place.exchanges.is_file():
        raise ConfigurationError(f"{place.exchanges} is not there: no exchange of a federated run is over")
    for text in place.exchanges.read_text(errors="replace").splitlines():
        with suppress(ValueError, TypeError, AttributeError, KeyError):  # a line that a kill has cut
            line = json.loads(text)
            last = line if "exchange" in line else last
            for client in line.get("answered", []):
                absent.pop(client, None)
            for client, told in line.get("refused", {}).items():
                absent[int(client)] = line["round"], Refusal.read(told, int(client))
    if not last:
        return ["no exchange is over"]
    state = "finished" if place.finished else "not finished"
    said = [f"{state}; last: round {last['round']}, exchange {last['exchange']}, {len(last['answered'])} replied"]
    for client, (round, why) in sorted(absent.items()):
        said += [f"client {client}, round {round}: {why.why}", f"    {why.code.who}: {why.code.how}"]
    return said


def _name_file(place: Folder) -> Path:
    return place.path / "federation"


WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _fields(kinds: Mapping[str, type], config: Mapping[str, Any]) -> dict[str, Any]:
    """Pick what a configuration gives of these names, each of its type, as fields of Python."""
    found = {}
    for name in [name for name in kinds if name in config]:
        value = float(config[name]) if kinds[name] is float and type(config[name]) is int else config[name]
        require(type(value) is kinds[name], name, value, WORDS[kinds[name]])
        found[name.replace("-", "_")] = value
    return found


def _privacy(made: Any, given: Mapping[str, float]) -> Any:
    """Make Privacy where anything of it is given; then all but the budget has to be."""
    if not given:
        return None
    missing = [name for name in ("clip", "noise_multiplier", "delta") if name not in given]
    require(not missing, "node configuration", f"{', '.join(given)} alone", f"given with {', '.join(missing)} too")
    return made(**given)


APP = '''\
"""The {party} of a federation: see spec.toml."""

from pathlib import Path

from fedbilevel.experiments import federation, read_spec

app = federation.{function}(read_spec(Path(__file__).with_name("spec.toml")))
'''

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "{title}"
license = "Apache-2.0"
# fedbilevel {version} is installed beforehand, from a clone of its repository: pip install ".[cli,flower]". It is on no
# package index; named here, it would be fetched from one, where anybody may register the name.
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedbilevel"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# flwr run . CONNECTION --run-config 'settings="run.rounds=50 algorithm.local_steps=3" quorum=0.8'
[tool.flwr.app.config]
settings = ""     # FIELD=VALUE, with spaces between: changes spec.toml for this run, as --set of fedbilevel run
out = ""          # the server's run folder; an unfinished run in it is continued. Empty: runs/… where the server runs
client-keys = ""  # a folder of the server's: client-0.pub, …: who registered with that key is client 0. Empty: anybody
quorum = 0.5      # share of a cohort that must reply
deadline = 120.0  # seconds that a client has for a reply
attempts = 3      # how often those who did not reply are asked, before the run stops
join = 60.0       # seconds to wait for clients that are not online
poll = 0.5        # seconds between two looks for replies, at most
norm-factor = 1e4  # how many times as long as usual an update may be; 0: any
message-factor = 10.0  # how many times as long as the message it may be, though norm-factor would refuse it
norm-bound = 0.0  # largest norm of an update that counts; 0: any
"""

README = """\
# {name}

{title}, as a Flower app. `{package}/spec.toml` says what is computed; both sides read it.

Simulated, on one machine, in two terminals:

    flower-superlink --insecure --simulation --host 127.0.0.1 --port 8000 --disable-runtime-dependency-installation
    flwr run . simulation --federation-config 'num-supernodes={clients} client-resources-num-cpus=1' --stream

with this in `~/.flwr/config.toml`:

    [superlink.simulation]
    address = "127.0.0.1:8000"
    insecure = true

For real, with TLS and a key for every client: docs/how-to/federation.md of fedbilevel.
"""


def write_app(spec: Spec, folder: Path) -> None:
    """Write the app to a new folder.

    Raises:
        ConfigurationError: there is something in the folder, or its name is none for a Python package; or the spec is
            that of a simulation.
    """
    require_real(spec)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"cannot write an app to {folder}: it exists and is not empty")
    package = re.sub(r"[^a-z0-9_]", "_", folder.resolve().name.lower())
    require(package.isidentifier(), "DIR", str(folder), "a name that begins with a letter, for a Python package")
    inside = folder / package
    inside.mkdir(parents=True)
    spec = _with_files(spec, inside)
    names = {"package": package, "name": package.replace("_", "-"), "title": spec.title, "version": __version__}
    write_text(inside / "__init__.py", "")
    write_text(inside / "spec.toml", spec.to_toml())
    write_text(inside / "server_app.py", APP.format(party="server", function="server_app"))
    write_text(inside / "client_app.py", APP.format(party="clients", function="client_app"))
    write_text(folder / "pyproject.toml", PROJECT.format(**names))
    write_text(folder / "README.md", README.format(**names, clients=spec.task.fields.get("clients", "N")))


def _with_files(spec: Spec, package: Path) -> Spec:
    """Make the files of a user's own task and algorithm modules of the app: problem.py and method.py, or problem.py
    alone where it holds both. Returns the spec that names them.

    Raises:
        ConfigurationError: a file cannot do without its neighbours; nothing stays of the app.
    """
    task, moved = own_file(spec.task.name), dict[str, Any]()
    for kind, component in (("task", spec.task), ("algorithm", spec.algorithm)):
        if file := own_file(component.name):
            copy = package / ("problem.py" if file == task else "method.py")
            moved[kind] = Component(_copied(kind, file, copy, component.name), component.value)
    return replace(spec, **moved)


def _copied(kind: str, file: Path, copy: Path, name: str) -> str:
    """Copy a file into the app, and see in another process that it can do without its neighbours; the name there of
    the task or algorithm `name` in it."""
    attribute = name.rpartition(":")[2]
    shutil.copy(file, copy)
    shown = [sys.executable, "-P", "-m", "fedbilevel.cli", f"{kind}s", f"{copy}:{attribute}"]
    done = subprocess.run(shown, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(copy.parent.parent)
        error = (done.stderr.strip().splitlines() or ["it cannot be loaded"])[-1].removeprefix("fedbilevel: ")
        what = "an algorithm" if kind == "algorithm" else "a task"
        advice = f"{what} of several files has to be an installed package: --{kind} package.module:NAME"
        raise ConfigurationError(f"{error}; {advice}")
    return f"{copy.parent.name}.{copy.stem}:{attribute}"


def play_demo(spec: Spec, clients: int, out: Path | None, persistent: bool) -> LoadedRun:
    """Start SuperLink and SuperNodes, play the spec with them, stop them; tell it as it goes on.

    Args:
        out: a new or empty folder for the app, the run, keys and logs; None chooses one in ./runs.
        persistent: whether clients' processes stay between messages.
    """
    from fedbilevel.flower.launch.processes import Federation

    folder = (out or default_path("flower-demo")).resolve()
    require_free(folder)
    app, run = folder / "demo", folder / "run"
    write_app(spec, app)
    print(
        f"starting a SuperLink and {clients} SuperNodes, with TLS and a key each; logs in {folder / 'logs'}", flush=True
    )
    with Federation(folder, clients, persistent=persistent) as federation:
        print(f"online at {federation.address}; {spec.title}", flush=True)
        for line in federation.run(app, f'out="{run}" client-keys="{federation.credentials.ca.parent}"'):
            print(line, end="", flush=True)
    done = load_run(run)
    print("all stopped", *([f"plot  {done.folder.plot}"] if done.folder.plot.is_file() else []), sep="\n")
    return done
