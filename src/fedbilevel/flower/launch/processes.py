"""Run a whole federation as processes on this machine: a SuperLink, and a SuperNode for each client.

This is for trials, tests and demonstrations. Commands, TLS and keys are the same as in a federation on several
machines. All processes, including those of `flwr` commands, are stopped at the end.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from fedbilevel.errors import ExchangeError
from fedbilevel.extending import require, require_count
from fedbilevel.flower.launch import children, credentials
from fedbilevel.flower.launch.credentials import Credentials
from fedbilevel.flower.launch.supernode import environment, flower_command
from fedbilevel.flower.versions import require_flower


class CommandError(ExchangeError):
    """A `flwr` command failed; the message has the command's output."""


class Console:
    """A runner of `flwr` commands, one after the other."""

    def __init__(self, env: Mapping[str, str], directory: Path) -> None:
        self.env, self.directory = dict(env), directory
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, *words: str) -> str:
        """Return the output of `flwr WORDS…`.

        Raises:
            CommandError: the command failed.
        """
        return "".join(self.lines(*words, timeout=60.0))

    def read(self, *words: str) -> Any:
        """Return the output of a command as JSON; warnings before the JSON are ignored.

        Raises:
            CommandError: the command failed; the message has the error that the command reported.
        """
        text = self(*words, "--format", "json")
        said = json.JSONDecoder().raw_decode(text, text.index("{"))[0]
        if not said["success"]:
            raise CommandError(f"flwr {' '.join(words)}: {' '.join(said['error-message'].split())}")
        return said

    def lines(self, *words: str, timeout: float) -> Iterator[str]:
        """Yield the output of `flwr WORDS…`, each line as soon as it is printed.

        Raises:
            CommandError: the command failed, or took longer than `timeout` seconds.
        """
        flwr = str(Path(sys.executable).parent / "flwr")
        command = [sys.executable, "-m", "fedbilevel.flower.launch.children", str(os.getpid()), flwr, *words]
        kinds: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = process = subprocess.Popen(
            command, text=True, env=self.env, cwd=self.directory, start_new_session=True, **kinds
        )
        watchdog = threading.Timer(timeout, process.kill)
        watchdog.start()
        printed: list[str] = []
        try:
            for line in process.stdout or []:
                printed.append(line)
                yield line
            if process.wait():
                raise CommandError(f"flwr {' '.join(words)} failed, or took over {timeout:.0f} s:\n{''.join(printed)}")
        finally:
            watchdog.cancel()
            self.close()

    def close(self) -> None:
        """End the present command, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


SOON = 10.0  # the seconds within which a submitted run should begin: a SuperLink looks for new runs every second


def require_begun(flwr: Console, superlink: str) -> None:
    """Check that a SuperLink begins the runs that were submitted.

    The check is needed because `flwr run` reports that a run has started even if it has not.

    The waiting runs are listed twice, `SOON` seconds apart, so the SuperLink's clock need not agree with this
    machine's.

    Args:
        flwr: the runner of `flwr` commands.
        superlink: the name of the SuperLink in config.toml.

    Raises:
        CommandError: a run is waiting in both lists, or the SuperLink does not answer.
    """
    require_flower()

    def pending() -> set[str]:
        return {run["run-id"] for run in flwr.read("list", superlink)["runs"] if run["status"] == "pending"}

    if waiting := pending():
        time.sleep(SOON)
        waiting &= pending()
    if waiting:
        raise CommandError(
            f"the SuperLink does not begin waiting runs ({len(waiting)}, for {SOON:g} s or more): flower-superexec has "
            "ended, and the SuperLink starts it only once. To begin waiting runs, start it on the SuperLink's host: "
            "flower-superexec --runtime-api-address HOST:PORT --root-certificates FILE"
        )


CONNECTION = "federation"
TAIL = 20  # the number of lines of a log that an error shows


class StartError(ExchangeError):
    """A process of the federation did not start; the message has the end of the process's log."""


def free_ports(count: int, first: int | None = None) -> list[int]:
    """Return `count` unused ports of the loopback interface: any ports, or the first free ones from `first` upwards."""
    found: list[int] = []
    candidate = first or 0
    with ExitStack() as bound:  # all ports stay bound until the end, so that none is found twice
        while len(found) < count:
            listener = bound.enter_context(socket.socket())
            with suppress(OSError):
                listener.bind(("127.0.0.1", candidate))
                found.append(listener.getsockname()[1])
            candidate += bool(first)
    return found


def listens(port: int) -> bool:
    """Return whether a process accepts connections to this port of the loopback interface."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def tail(log: Path) -> str:
    """Return the last TAIL lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:]) if log.exists() else "(no log)"


class Commands(NamedTuple):
    """The commands that start the processes of a federation on this machine."""

    credentials: Credentials
    port: int  # the SuperLink's port
    node_ports: Sequence[int]
    node_configs: Sequence[str]
    persistent: bool
    database: Path | None

    def superlink(self) -> list[str]:
        """Return the command of the SuperLink, with its arguments."""
        command = [*flower_command("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation"]
        if self.database:
            command += ["--database", str(self.database.absolute())]
        secrets = self.credentials
        files = {"ca-certfile": secrets.ca, "certfile": secrets.certificate, "keyfile": secrets.key}
        return [*command, "--enable-supernode-auth", *(w for k, v in files.items() for w in (f"--ssl-{k}", str(v)))]

    def node(self, client: int) -> list[str]:
        """Return the command of a client's SuperNode, with its arguments."""
        command = flower_command("flower-supernode")
        if self.persistent:
            command = [sys.executable, "-m", "fedbilevel.flower.launch.supernode"]
        command += ["--superlink", f"127.0.0.1:{self.port}"]
        command += ["--host", "127.0.0.1", "--port", str(self.node_ports[client])]
        command += ["--node-config", self.node_configs[client]]
        key = self.credentials.clients[client]
        return [*command, "--root-certificates", str(self.credentials.ca), "--auth-supernode-private-key", str(key)]


class Federation:
    """A SuperLink and its SuperNodes on this machine, with TLS and a key for each client.

        with Federation(Path("trial"), clients=4) as federation:
            for line in federation.run(Path("my-app"), "rounds=3"):
                print(line, end="")

    Within the `with` block, all clients are online. All processes are stopped at the end of the block, and also after
    an exception, Ctrl-C or SIGTERM. On Linux, they also end if this process is killed with -9; only a ServerApp in the
    middle of a run ends some minutes later. Use this class from the main thread.

    Args:
        directory: the folder for logs/, credentials/, and a Flower home for each process. If credentials already exist
            there, an error is raised: existing credentials are not replaced.
        clients: the number of SuperNodes.
        persistent: whether SuperNodes keep a worker process between messages (`fedbilevel.flower.launch.supernode`).
            Otherwise they are Flower's own, which start a process for each message.
        node_configs: for each client, the value of `--node-config`; None: "partition-id=k num-partitions=clients".
        database: the file in which the SuperLink keeps its state, so that it can be restarted; None: it is in memory.
        first_port: the federation uses the first free ports from this number upwards; None: any free ports.
        env: additional environment variables for all processes.
        deadline: the seconds within which all processes have to start.

    Raises:
        StartError: on entering the block, if a process did not start.
    """

    commands_of: type[Commands] = Commands

    def __init__(
        self,
        directory: Path,
        clients: int,
        *,
        persistent: bool = True,
        node_configs: Sequence[str] | None = None,
        database: Path | None = None,
        first_port: int | None = None,
        env: Mapping[str, str] | None = None,
        deadline: float = 120.0,
    ) -> None:
        require_flower()
        require_count("clients", clients)
        self.node_configs = node_configs or [f"partition-id={k} num-partitions={clients}" for k in range(clients)]
        require(len(self.node_configs) == clients, "node_configs", len(self.node_configs), f"{clients} entries")
        self.directory, self.clients, self.persistent = directory.absolute(), clients, persistent
        self.database, self.deadline = database, deadline
        self.port, *self.node_ports = free_ports(clients + 1, first_port)
        self.address = f"127.0.0.1:{self.port}"
        self.env = {**os.environ, **(env or {})}
        self.superlink: subprocess.Popen | None = None
        self.nodes: dict[int, subprocess.Popen] = {}
        self.console = Console(self.environment("operator"), self.directory)

    # Where things are

    def log(self, name: str) -> Path:
        """Return the path of the log of a process.

        Its name is "superlink" or, for a client's SuperNode, "client-0", "client-1" and so on.
        """
        return self.directory / "logs" / f"{name}.log"

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a process, which has its own Flower home."""
        return environment({**self.env, "FLWR_HOME": str(self.directory / name)})

    # Start and stop

    def __enter__(self) -> Federation:
        for name in ("logs", "operator"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        if threading.current_thread() is threading.main_thread():
            self.previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start all processes and wait until all clients are online."""
        until = time.monotonic() + self.deadline
        self.credentials = credentials.make(self.directory / "credentials", self.clients)
        ports, kind = (self.port, self.node_ports), (self.persistent, self.database)
        self.commands = self.commands_of(self.credentials, *ports, self.node_configs, *kind)
        trust = json.dumps(str(self.credentials.ca))
        where = f'[superlink.{CONNECTION}]\naddress = "{self.address}"\nroot-certificates = {trust}\n'
        config = f'[superlink]\ndefault = "{CONNECTION}"\n\n{where}'  # for `flwr`: where the SuperLink is
        (self.directory / "operator" / "config.toml").write_text(config)
        self.restart_superlink(until - time.monotonic())
        for client in range(self.clients):
            self.register(client)
        for client in range(self.clients):
            self.start_node(client)
        self.wait_online(self.clients, until - time.monotonic())

    def stop(self) -> None:
        """Stop all processes that were started."""
        try:
            children.stop([*self.nodes.values(), *([self.superlink] if self.superlink else [])])
            self.nodes, self.superlink = {}, None
            self.console.close()
        finally:
            if hasattr(self, "previous"):
                signal.signal(signal.SIGTERM, self.previous)
                del self.previous

    def register(self, client: int) -> None:
        """Register a client's public key at the SuperLink."""
        self.console("supernode", "register", str(self.credentials.public(client)), CONNECTION)

    def start_node(self, client: int) -> None:
        """Start a client's SuperNode, without waiting for it."""
        name = f"client-{client}"
        self.nodes[client] = children.spawn(self.commands.node(client), self.log(name), self.environment(name))

    def restart_superlink(self, seconds: float = 60.0) -> None:
        """Start the SuperLink, for the first time or after it was killed, and wait until it listens."""
        until = time.monotonic() + seconds
        self.superlink = children.spawn(self.commands.superlink(), self.log("superlink"), self.environment("superlink"))
        while not listens(self.port):
            self.check_alive(until, "the SuperLink did not start")
            time.sleep(0.1)

    # Waiting

    def wait_online(self, count: int, seconds: float, within: float | None = None) -> None:
        """Wait until at least `count` nodes are online, for at most `seconds`.

        If `within` is given, a node is included only if it came online after all SuperNodes listened, or at most
        `within` seconds before that.
        """
        until = time.monotonic() + seconds
        while not all(map(listens, (self.node_ports[client] for client in self.nodes))):
            self.check_alive(until, "a SuperNode did not start")
            time.sleep(0.1)
        began = time.monotonic()
        while self.online(None if within is None else began - within) < count:
            self.check_alive(until, f"fewer than {count} clients have come online")
            time.sleep(0.2)

    def online(self, since: float | None = None) -> int:
        """Return the number of nodes that are online according to the SuperLink.

        If `since` is given, a time of `time.monotonic()`, only nodes that came online after this moment are included. A
        node that was killed is still reported as online until its heartbeat is overdue, which takes up to a minute.
        """
        listed = self.console.read("supernode", "list", CONNECTION)
        now = time.monotonic()  # after the command, which may take seconds
        ages = [node["online-elapsed"] for node in listed["nodes"] if node["status"] == "online"]
        return sum(since is None or age <= now - since for age in ages)

    def check_alive(self, until: float, complaint: str) -> None:
        """Raise StartError if the time is over or a process has ended; the message has the ends of the logs."""
        processes = {"superlink": self.superlink, **{f"client-{k}": child for k, child in self.nodes.items()}}
        ended = [name for name, child in processes.items() if child is not None and child.poll() is not None]
        if not ended and time.monotonic() < until:
            return
        reason = f"{', '.join(ended)} ended" if ended else f"{complaint} before the deadline"
        logs = "\n".join(f"--- {self.log(name)}\n{tail(self.log(name))}" for name in ended or processes)
        raise StartError(f"{reason}\n{logs}")

    # Runs

    def run(self, app: Path, run_config: str = "", timeout: float = 3600.0) -> Iterator[str]:
        """Submit the app in the directory `app` and yield its log, line by line, until the run ends.

        Args:
            app: the directory of the app.
            run_config: the value of `flwr run --run-config`: "rounds=3 name='a'".
            timeout: the seconds that the run may take.

        Raises:
            CommandError: the run could not be submitted, took too long, or did not end as completed.
        """
        config = ["--run-config", run_config] if run_config else []
        number = ""
        for line in self.console.lines("run", str(app.absolute()), CONNECTION, *config, "--stream", timeout=timeout):
            number = number or "".join(re.findall(r"started run (\d+)", line))
            yield line
        if (status := self.status(number)) != "finished:completed":
            raise CommandError(f"the run ended as {status}; its log says why")

    def status(self, run: str) -> str:
        """Return the status that the SuperLink reports for a run after its end, such as "finished:completed"."""
        until = time.monotonic() + 30.0  # a run may end some seconds after its log does
        while True:
            shown = self.console.read("list", "--run-id", run, CONNECTION)
            status = str(shown["runs"][0]["status"])
            if status.startswith("finished") or time.monotonic() > until:
                return status
            time.sleep(0.5)
