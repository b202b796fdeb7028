"""Run a spec in a federation over Flower: the server's part and the clients' part.

The run configuration (`flwr run --run-config`) changes the spec and sets the terms of the exchanges. The node
configuration (`--node-config` of a client's SuperNode) sets the client's number, the places of its data and its state,
its limits on a server's requests, and its privacy.
"""

from __future__ import annotations

import inspect
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedbilevel import __version__
from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.errors import (
    ConfigurationError,
    NumericalError,
    require,
    unknown,
)
from fedbilevel.core.privacy import Privacy
from fedbilevel.core.writing import write_text
from fedbilevel.display import Watch
from fedbilevel.display.curves import can_draw
from fedbilevel.engines.history import Callback, Result, Row
from fedbilevel.engines.recorder import exchanges_of
from fedbilevel.experiments.argument_errors import data_errors_in
from fedbilevel.experiments.experiment import Experiment, experiment_with
from fedbilevel.experiments.federation_status import Status, ending
from fedbilevel.experiments.folder import Folder, LoadedRun, default_path, load_run, require_free
from fedbilevel.experiments.loader import label, own_file, task_maker
from fedbilevel.experiments.runner import algorithm_of, complete, first_metric, task_of
from fedbilevel.experiments.spec import Component, Spec, configure, fields_of
from fedbilevel.flower.client.limits import Limits
from fedbilevel.flower.refusal import Code, Refusal
from fedbilevel.reading import read_bytes
from fedbilevel.tasks import Task
from fedbilevel.trackers import BY_NAME, Tracker, made
from fedbilevel.wording import in_a_line

if TYPE_CHECKING:
    from fedbilevel.flower import Site


NORMS = {"norm-factor", "norm-bound"}
SERVER = {"quorum": float, "deadline": float, "attempts": int, "join": float, "poll": float}
SERVER |= dict.fromkeys(["message-factor", *sorted(NORMS)], float)
"""The types of the entries of the run configuration.

The entries besides `settings`, `out`, `client-keys` and `log` are fields of `flower.Terms`. For the entries in NORMS, 0
means that there is no bound.
"""

LIMITS = {field.name.replace("_", "-"): type(field.default) for field in fields(Limits)} | {"layers": str}
PRIVACY = {"clip": float, "noise-multiplier": float, "delta": float, "budget": float}
NODE = {
    "partition-id": int,
    "num-partitions": int,
    "site": str,
    "state-folder": str,
    "settable": str,
    "tell-metrics": bool,
    "same-data": bool,
    "approve": str,
    **PRIVACY,
    **LIMITS,
}
"""The types of the entries of the node configuration, without entries that are fields of the task."""
SETTABLE = "algorithm.* run.*"
"""The fields of the spec that a server may set at a site, unless the site's `settable` names other fields."""


def server_app(spec: Spec) -> Any:
    """Make a Flower ServerApp that runs the spec."""
    from fedbilevel import flower

    return flower.server_app(partial(serve, spec))


def client_app(spec: Spec) -> Any:
    """Make a Flower ClientApp that serves the phases of the spec's algorithm on its own samples."""
    from fedbilevel import flower

    return flower.client_app(partial(site, spec))


def serve(spec: Spec, grid: Any, config: Mapping[str, Any]) -> None:
    """Run the spec with the clients that Flower's Grid reaches. An unfinished run in the folder `out` is continued."""
    from fedbilevel.flower import Flower

    spec = configured(spec, config)
    task = seen_by(spec, "server")
    metric = first_metric(task)
    place = Folder(Path(config["out"])) if config.get("out") else Folder.new(spec)
    changed = place.difference(spec) if place.begun or place.finished else ""
    if changed:
        raise ConfigurationError(f"the run in {place.path} differs in {changed}; give this run another folder as out")
    if place.finished:
        print(f"the run in {place.path} has already finished", flush=True)
    name = run_name(place)
    keys, trackers = config.get("client-keys") or None, trackers_of(config)
    sites = names_of_sites(spec)
    sites = sites if len(sites) == len(task.clients) else ()
    engine = Flower(grid=grid, terms=terms(config), name=name, log=place.exchanges, keys=keys, sites=sites)

    def note_name(result: Result, row: Row | None) -> None:
        if not place.name_in_federation.exists():
            write_text(place.name_in_federation, name)

    watch = Watch(Console(width=160, force_terminal=False), metric, spec.run.budget, spec.timed)
    algorithm = algorithm_of(spec)
    experiment = experiment_with(spec.algorithm.value)(task, algorithm, engine)
    with ending(place):
        callbacks: list[Callback] = [note_name, watch, *trackers]
        complete(spec, place.path, callbacks=callbacks, plot=can_draw(), experiment=experiment, progress=watch)
        if grown := load_run(place.path).grown:
            raise NumericalError(f"{grown}: the run has diverged; its result is in {place.path}")
    print(f"run   {place.path.resolve()}", flush=True)


def site(spec: Spec, run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> Site:
    """Make the `Site` of this node: its samples, its limits, its privacy, and its algorithm."""
    from fedbilevel.flower import Site

    of_app, spec = spec, configured(spec, run_config)
    subject = spec.to_toml()
    known = fields_of(spec.task.name, spec.algorithm.name)["task"]
    for name in node_config:
        if name not in NODE and name not in known:
            raise unknown("name in the node configuration", name, [*NODE, *known])
    node = fields_of_kinds(NODE, node_config)
    client = node.get("partition_id", -1)
    require(
        client >= 0,
        "node configuration: partition-id",
        node_config.get("partition-id"),
        "the client's number, 0 or more",
    )
    own = {name: value for name, value in node_config.items() if name in known and name not in NODE}
    check_settable(of_app, spec, own, node.get("settable", SETTABLE))
    try:
        with data_errors_in():
            task = seen_by(spec.replace(task=own) if own else spec, client)
    except OSError as error:
        raise ConfigurationError(str(error)) from error
    clients = task.population
    alone = len(clients) == 1
    require(alone or client < len(clients), "node configuration: partition-id", client, f"below {len(clients)}")
    name = site_name(names_of_sites(spec), node_config)
    row = 0 if alone else client
    private = fields_of_kinds(PRIVACY, node_config)
    lacking = [term for term in ("clip", "noise-multiplier", "delta") if private and term not in node_config]
    given = f"{', '.join(term for term in PRIVACY if term in node_config)} alone"
    require(not lacking, "node configuration", given, f"given with {', '.join(lacking)}")
    kept = not private or bool(node.get("state_folder"))
    require(kept, "node configuration: state-folder", "none", "a folder if clip is given: it has the account of ε")
    return Site(
        id=client,
        name=name,
        algorithm=algorithm_of(spec),
        problem=task.problem,
        x0=task.x0,
        y0=task.y0,
        outer=clients.outer.row(row),
        inner=None if clients.inner is clients.outer else clients.inner.row(row),
        capacity=None if clients.capacity is None else float(clients.capacity[row]),
        limits=Limits.of(node_config),
        privacy=Privacy(**private) if private else None,
        metrics_per_client=task.metrics_per_client,
        tells_metrics=node.get("tell_metrics", False),
        same_data=node.get("same_data", False),
        subject=subject,
        approve=rule_of(node),
        folder=Path(node["state_folder"]).expanduser() if "state_folder" in node else None,
    )


def site_name(names: Sequence[str], node: Mapping[str, Any]) -> str:
    """Return the name of a node's site; "" if sites have no names.

    Args:
        names: the names of all sites, in the order of their numbers.
        node: the node configuration, whose `partition-id` is one of these numbers.

    Raises:
        ConfigurationError: `site` in the configuration is the name of another site.
    """
    client, given = node["partition-id"], node.get("site", "")
    require(bool(names) or not given, "node configuration: site", given, "left out: the spec names no sites")
    name = names[client] if names else ""
    require(given in ("", name), "node configuration: site", given, f"{name}, the site with partition-id = {client}")
    return name


def names_of_sites(spec: Spec) -> Sequence[str]:
    """Return the names that the task of a spec gives to its sites; () if it gives none."""
    found = (spec.tables()["task"].get(field) for field in ("sites", "only"))
    lists = (
        names for names in found if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    )
    return next((names for names in lists if names), ())


def rule_of(node: Mapping[str, Any]) -> str:
    """Return how runs are approved at a site: "ask" (by a person), "all" (always), or the file of a rule.

    With the file of a rule, runs that fit the rule are approved, and all other runs need the approval of a person.
    """
    from fedbilevel.flower.client.approval import ALL, check_approve

    rule = node.get("approve", ALL)
    check_approve("node configuration: approve", rule)
    known = rule == ALL or bool(node.get("state_folder"))
    require(known, "node configuration: state-folder", "none", f"a folder with approve = {rule!r}")
    return str(rule)


def check_settable(of_app: Spec, spec: Spec, own: Collection[str], settable: str) -> None:
    """Reject a spec if the server has changed fields that this site does not allow a server to set.

    Args:
        of_app: the spec of the app.
        spec: the spec with the server's changes.
        own: fields of the task that the site sets itself. They may differ.
        settable: patterns of the fields that a server may set, with spaces between them.

    Raises:
        ConfigurationError: a pattern of `settable` matches no field.
        Refusal: the server has set a field that no pattern matches.
    """
    before, after = (
        {f"{section}.{name}": value for section, table in each.tables().items() for name, value in table.items()}
        for each in (of_app, spec)
    )
    for pattern in settable.split():
        if not any(fnmatchcase(path, pattern) for path in (*after, "clients.*")):
            raise unknown("field in settable", pattern, after)
    allowed = [*settable.split(), *(f"task.{name}" for name in own)]
    others = [path for path in {**before, **after} if not any(fnmatchcase(path, pattern) for pattern in allowed)]
    changed = [path for path in others if before.get(path) != after.get(path)]
    if changed:
        raise Refusal(
            Code.SETTABLE, f"a server may not set {', '.join(changed)} at this client: settable = {settable!r}"
        )


def check(
    spec: Spec,
    node_config: str,
    superlink: str | None = None,
    root_certificates: Path | None = None,
    key: Path | None = None,
) -> Iterator[tuple[str, str]]:
    """Inspect a site before its SuperNode is started: yield (topic, text) about its data, privacy and limits.

    Args:
        node_config: as for `flower-supernode --node-config`.
        superlink, root_certificates, key: the values of these options of the SuperNode; None: the option is not given.

    Raises:
        ConfigurationError: the configuration or the data are wrong, the site would not take part, or the SuperLink
            cannot be reached.
        BudgetSpentError: the site has spent its privacy budget, and would send no reply.
    """
    from fedbilevel.flower.versions import TESTED, require_flower, tested

    version = require_flower()
    require(tested(version), "the version of Flower", version, f"one of the tested versions: {', '.join(TESTED)}")
    from fedbilevel.flower.client.site import ClientRuntime
    from fedbilevel.flower.launch.connection import read_node_config

    node = read_node_config(node_config)
    runtime = ClientRuntime(site(spec, {}, node), serving=False)
    name = site_name(names_of_sites(spec), node)
    yield "client", f"{runtime.site.id}, {name + ', ' * bool(name)}of {spec.title}"
    yield from runtime.described().items()
    yield "settable", node.get("settable", SETTABLE) or "nothing"
    try:
        runtime.check_limits()
    except Refusal as refusal:
        raise ConfigurationError(f"{refusal.why} ({refusal.code.how})") from None
    if runtime.guard is not None:
        traced = exchanges_of(runtime.site.algorithm, runtime.problem, runtime.x, runtime.y, runtime.examples)
        yield "run", runtime.guard.forecast(sum(each.times for each in traced), spec.run.rounds or 1)
        runtime.guard.privacy.charge(runtime.guard.read())
    yield from reached(superlink, root_certificates, key)


def reached(
    superlink: str | None = None, root_certificates: Path | None = None, key: Path | None = None
) -> Iterator[tuple[str, str]]:
    """Check that a SuperLink answers a site with this key. Yield the check's name and result, as `check` does."""
    from fedbilevel.flower.launch.connection import private_key, why_unreached

    if superlink is not None:
        place = re.fullmatch(r"[^/]+:\d+", superlink)
        require(place is not None, "--superlink", superlink, "HOST:PORT, without https://")
        found = root_certificates is None or root_certificates.is_file()
        require(found, "--root-certificates", str(root_certificates), "a file")
        authority = None if root_certificates is None else read_bytes(root_certificates)
        if why := why_unreached(superlink, authority, None if key is None else private_key(key)):
            raise ConfigurationError(f"--superlink: {why}")
        untried = "; with --auth-supernode-private-key, this also checks whether it knows the site's key"
        yield "superlink", f"{superlink} answers" + (untried if key is None else ", and knows the key")


def configured(spec: Spec, config: Mapping[str, Any]) -> Spec:
    """Return the spec with the changes in the `settings` of a run configuration.

    They have the form FIELD=VALUE, as for --set, and are split as a shell splits words.
    """
    known = {"settings", "out", "client-keys", "log", *SERVER}
    for name in config:
        if name not in known:
            raise unknown("name in the run configuration", name, known)
    before = spec.task.name, spec.algorithm.name
    try:
        settings = shlex.split(str(config.get("settings", "")))
    except ValueError as error:
        text = f"settings = {config['settings']!r} must be FIELD=VALUE …, quoted as in a shell: {in_a_line(error)}"
        raise ConfigurationError(text) from error
    spec = configure(spec.tables(), settings=settings)
    after = spec.task.name, spec.algorithm.name
    require(
        after == before, "settings", after, f"for the app's task and algorithm, {before}: other names run other code"
    )
    require_real(spec)
    return spec


def require_real(spec: Spec) -> None:
    """Reject a spec that has settings for simulations, such as a clock."""
    require(
        not spec.run.pooled,
        "run.pooled",
        True,
        "false, because clients of a federation keep their samples and pooling needs all samples in one place",
    )
    one_run = experiment_with(spec.algorithm.value) is Experiment
    allowed = "a method: in a federation there are no searches, which train a model for each of many trials"
    require(one_run, "algorithm", label(spec.algorithm.name), allowed)
    if spec.privacy.terms is not None:
        text = "it is for simulations: in a federation, each client sets its privacy in its node configuration"
        raise ConfigurationError(text, where="[privacy]")
    if spec.timed:
        text = "it is for simulations: leave it out, since the clients of a federation take real time"
        raise ConfigurationError(text, where="[clock]")


def terms(config: Mapping[str, Any]) -> Any:
    """Read the terms of the exchanges from the run configuration."""
    from fedbilevel.flower import Terms

    unbounded = {name.replace("-", "_"): None for name in NORMS if config.get(name) == 0}
    return Terms(**fields_of_kinds(SERVER, config) | unbounded)


def trackers_of(config: Mapping[str, Any]) -> list[Tracker]:
    """Make the trackers that the run configuration names. They record what the server knows of the run."""
    names = [name.strip() for name in str(config.get("log", "")).split(",") if name.strip()]
    for name in names:
        if name not in BY_NAME:
            raise unknown("tracker of log", name, BY_NAME)
    return made(names)


def seen_by(spec: Spec, party: str | int) -> Task:
    """Make the task for one party: "server", or a client's number.

    If the task's function has a parameter `party`, it is called with this argument. For "server" it must return a Task
    with `RemoteClients`, and for a client's number a Task with only this client's samples. Any other function makes the
    whole task at every party, and the party uses its own part.
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


def run_name(place: Folder) -> str:
    """Return the name of the run in a folder, by which clients store their states. A new run gets a random name."""
    if not place.name_in_federation.is_file():
        return secrets.token_hex(16)
    from fedbilevel.flower.wire import is_run

    name = place.name_in_federation.read_text(errors="replace").strip()
    require(is_run(name), f"the name in {place.name_in_federation}", name[:200], "8 to 64 hexadecimal digits")
    return name


WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def fields_of_kinds(kinds: Mapping[str, type], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration that have these names and types.

    Hyphens in names become underscores.
    """
    found = {}
    for name in [name for name in kinds if name in config]:
        value = float(config[name]) if kinds[name] is float and type(config[name]) is int else config[name]
        require(type(value) is kinds[name], name, value, WORDS[kinds[name]])
        found[name.replace("-", "_")] = value
    return found


def write_app(spec: Spec, folder: Path) -> None:
    """Write the app of a spec to a new folder.

    Raises:
        ConfigurationError: the folder is not empty, its name cannot become the name of a Python package, a file of the
            user cannot be loaded alone, or the spec has settings for simulations.
    """
    require_real(spec)
    package, inside = begin_app(folder)
    spec = _with_files(spec, inside)
    names = {"package": package, "name": package.replace("_", "-"), "title": spec.title, "version": __version__}
    write_text(inside / "spec.toml", spec.to_toml())
    out = "the server's run folder; an unfinished run in it is continued"
    write_parties(folder, inside, "federation", "spec.toml", {**names, "out": out})
    readme = (resources.files("fedbilevel.experiments") / "app_readme.txt").read_text(encoding="utf-8")
    write_text(folder / "README.md", readme.format(**names, clients=spec.task.fields.get("clients", "N")))


def begin_app(folder: Path) -> tuple[str, Path]:
    """Make the folder of an app, with its package. Return the package's name and folder.

    Raises:
        ConfigurationError: the folder is not empty or cannot be made, or its name cannot become that of a package.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"cannot write an app to {folder}: it exists and is not empty")
    package = re.sub(r"[^a-z0-9_]", "_", folder.resolve().name.lower())
    require(package.isidentifier(), "DIR", str(folder), "a name that begins with a letter, for a Python package")
    inside = folder / package
    try:
        inside.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    write_text(inside / "__init__.py", "")
    return package, inside


def write_parties(
    folder: Path, inside: Path, module: str, file: str, names: Mapping[str, str], without: Collection[str] = ()
) -> None:
    """Write server_app.py, client_app.py and pyproject.toml of an app.

    Args:
        module: the module of `experiments` with the functions `server_app` and `client_app`.
        file: the file in the package that both sides read.
        names: the values of the placeholders in pyproject.toml.
        without: entries of the run configuration that are left out of this app.
    """
    project, party = (
        (resources.files("fedbilevel.experiments") / f"app_{one}.txt").read_text(encoding="utf-8")
        for one in ("project", "party")
    )
    reader = f"read_{file.removesuffix('.toml')}"
    given = {"module": module, "reader": reader, "imports": ", ".join(sorted((module, reader))), "file": file}
    write_text(inside / "server_app.py", party.format(party="server", function="server_app", **given))
    write_text(inside / "client_app.py", party.format(party="clients", function="client_app", **given))
    lines = project.format(**names).splitlines(keepends=True)
    kept = [line for line in lines if not any(re.match(rf"{name} |# flwr run .*{name}", line) for name in without)]
    write_text(folder / "pyproject.toml", "".join(kept))


def _with_files(spec: Spec, package: Path) -> Spec:
    """Copy the files of a user's own task and algorithm into the app. Return the spec with the names of the copies.

    The copies are problem.py and method.py, or only problem.py if one file contains both.

    Raises:
        ConfigurationError: a copy cannot be loaded without the other files of its folder. The app's folder is then
            removed.
    """
    task, moved = own_file(spec.task.name), dict[str, Any]()
    for kind, component in (("task", spec.task), ("algorithm", spec.algorithm)):
        if file := own_file(component.name):
            copy = package / ("problem.py" if file == task else "method.py")
            moved[kind] = Component(_copied(kind, file, copy, component.name), component.value)
    return replace(spec, **moved)


def _copied(kind: str, file: Path, copy: Path, name: str) -> str:
    """Copy a file into the app, and return the name of its task or algorithm there.

    It is checked, in another process, that the copy loads without the other files of the original's folder.
    """
    attribute = name.rpartition(":")[2]
    shutil.copy(file, copy)
    shown = [sys.executable, "-P", "-m", "fedbilevel.cli", f"{kind}s", f"{copy}:{attribute}"]
    done = subprocess.run(shown, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(copy.parent.parent)
        error = (done.stderr.strip().splitlines() or ["it cannot be loaded"])[-1].removeprefix("fedbilevel: ")
        what = "an algorithm" if kind == "algorithm" else "a task"
        advice = f"{what} of several files must be in an installed package: --{kind} package.module:NAME"
        raise ConfigurationError(f"{error}; {advice}")
    return f"{copy.parent.name}.{copy.stem}:{attribute}"


def play_demo(spec: Spec, clients: int, out: Path | None, persistent: bool, log: Sequence[str] = ()) -> LoadedRun:
    """Start a SuperLink and SuperNodes on this machine, run the spec with them, print its progress, and stop them.

    Args:
        out: a new or empty folder for the app, the run, keys and logs; None chooses one in ./runs.
        persistent: whether clients' processes stay in memory between messages.
        log: the names of trackers with which the server records the run.
    """
    from fedbilevel.flower.launch.processes import CommandError, Federation
    from fedbilevel.flower.versions import require_flower

    require_flower()  # fails before anything is written
    folder = (out or default_path("flower-demo")).resolve()
    require_free(folder)
    app, run = folder / "demo", folder / "run"
    write_app(spec, app)
    print(f"starting a SuperLink and {clients} SuperNodes, with TLS and keys; logs in {folder / 'logs'}", flush=True)
    floors = "min-local-samples=1 min-batch-size=1"  # the data are public
    configs = [f"partition-id={k} num-partitions={clients} {floors}" for k in range(clients)]
    with (
        _stopping_said(folder),
        Federation(folder, clients, persistent=persistent, node_configs=configs) as federation,
        _stopping_said(),
    ):
        print(f"online at {federation.address}; {spec.title}", flush=True)
        try:
            config = f'out="{run}" client-keys="{federation.credentials.ca.parent}" log="{",".join(log)}"'
            for line in federation.run(app, config):
                print(line, end="", flush=True)
        except CommandError:
            place = Folder(run)
            if place.exchanges.is_file() and (ended := Status.of(place).ended):
                raise ended from None
            raise
    done = load_run(run)
    print("all stopped", *([f"plot  {done.folder.plot}"] if done.folder.plot.is_file() else []), sep="\n")
    return done


@contextmanager
def _stopping_said(folder: Path | None = None) -> Iterator[None]:
    """Print a line if Ctrl-C ends the block: that the processes are being stopped, or where their files are.

    Args:
        folder: the folder of the files, if all processes have ended when the block ends; None: they are still running.
    """
    try:
        yield
    except KeyboardInterrupt:
        ended = f"all stopped; the app, the logs and the unfinished run are in {folder}"
        print("stopping all processes" if folder is None else ended, flush=True)
        raise
