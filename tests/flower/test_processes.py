"""No process of a federation is left behind, whatever happens.

The slow tests run federations of real processes over Flower, and some of these have faults.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedbilevel.cli import main
from fedbilevel.flower.launch import children, processes, supernode
from fedbilevel.flower.launch.processes import (
    CommandError,
    Commands,
    Console,
    Federation,
    StartError,
    free_ports,
    require_begun,
)
from refusals import raises_with

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
DETACHING = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def wait(holds, seconds=30.0):
    """Wait until `holds()`; fail after `seconds`."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


def gone(pid):
    return children.identity(pid) is None


def test_stop_ends_a_child_that_ignores_sigterm_and_a_grandchild_in_another_session(tmp_path):
    log = tmp_path / "log"
    child = children.spawn([sys.executable, "-c", DETACHING], log)
    wait(lambda: log.exists() and log.read_text().strip())
    grandchild = int(log.read_text())
    assert not gone(grandchild)
    children.stop([child], grace=0.2)
    assert child.returncode == -signal.SIGKILL
    assert gone(grandchild)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked, which only Linux can be")
def test_children_go_when_their_parent_is_killed():
    program = "from fedbilevel.flower.launch import children; import sys, time\n"
    program += f"print(children.spawn({SLEEP!r}).pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.communicate()
    wait(lambda: gone(child))


def unit(tmp_path, body):
    """Start a process that supervises another one, which adds an "x" to the file `starts` and then runs `body`."""
    program = f"""
import logging, sys
from functools import partial
from fedbilevel.flower.launch import children, supernode
logging.basicConfig(level=logging.INFO)
a = [sys.executable, "-c", "open({str(tmp_path / "starts")!r}, 'a').write('x'); {body}"]
sys.exit(supernode.supervise(partial(children.spawn, a, group=False), backoff=(0.1, 0.4)))
"""
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_the_supervisor_starts_again_what_ends_and_stops_it_on_a_signal(number, tmp_path):
    starts = tmp_path / "starts"
    lasts = f"import time; time.sleep(600 * (len(open({str(starts)!r}).read()) > 2)); raise SystemExit(1)"
    supervisor = unit(tmp_path, lasts)
    wait(lambda: starts.exists() and len(starts.read_text()) >= 3)
    family = children.family(supervisor.pid)
    assert len(family) >= 2
    supervisor.send_signal(number)
    _, said = supervisor.communicate(timeout=30)
    assert supervisor.returncode == 0
    assert said.splitlines()[-1].endswith(supernode.STOPPED)
    assert children.living(family) == []
    assert "the SuperNode ended with status 1" in said


def test_the_supervisor_ends_when_a_command_was_called_wrongly(tmp_path):
    supervisor = unit(tmp_path, "raise SystemExit(2)")
    supervisor.communicate(timeout=30)
    assert supervisor.returncode == 2
    assert (tmp_path / "starts").read_text() == "x"


class Listening(Commands):
    def superlink(self):
        return [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(self.port)]

    def node(self, client):
        port = self.node_ports[client]
        return [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]


class Trivial(Federation):
    """A federation of processes that only listen."""

    commands_of = Listening

    def register(self, client):
        pass

    def online(self, since=None):
        return len(self.nodes)


class BrokenSecond(Listening):
    def node(self, client):
        return super().node(client) if client == 0 else [sys.executable, "-c", "raise SystemExit('no disk')"]


class Broken(Trivial):
    """A federation whose second client prints why it cannot start, and ends."""

    commands_of = BrokenSecond


def members(federation):
    """Return all processes of a running federation: id → start time."""
    processes = [child for child in (federation.superlink, *federation.nodes.values()) if child]
    return {pid: start for child in processes for pid, start in children.family(child.pid).items()}


def fail():
    raise ZeroDivisionError


def end_by_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)


@pytest.mark.parametrize(("end", "error"), [(fail, ZeroDivisionError), (end_by_sigterm, SystemExit)])
def test_nothing_is_left_after_the_block_however_it_ends(end, error, tmp_path):
    before, seen = signal.getsignal(signal.SIGTERM), {}

    def use():
        with Trivial(tmp_path, 1) as federation:
            seen.update(members(federation))
            end()

    with pytest.raises(error):
        use()
    assert len(seen) == 2
    assert children.living(seen) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_node_is_killed_and_started_again(tmp_path):
    with Trivial(tmp_path, 2) as federation:
        first = federation.nodes[1].pid
        children.stop([federation.nodes.pop(1)], grace=0)
        assert gone(first)
        federation.start_node(1)
        federation.wait_online(1, 150, within=0.0)
        assert federation.nodes[1].pid != first


def test_what_does_not_start_is_reported_with_its_log_and_the_rest_is_stopped(tmp_path):
    federation = Broken(tmp_path, 2)
    with raises_with(StartError, "client-1.log\nno disk"), federation:
        pass
    assert federation.nodes == {}
    assert free_ports(1, federation.port) == [federation.port]  # the port is free again


class Saying(Console):
    """Takes the place of `flwr`, and returns one given answer after the other."""

    def __init__(self, *said):
        self.said = list(said)

    def __call__(self, *words):
        assert words == ("list", "there", "--format", "json")
        return f"WARNING: old\n{json.dumps(self.said.pop(0))}\n"


def runs(**states):
    """Return what `flwr list` prints of runs with these states, at a SuperLink whose clock is many years off."""
    each = [{"run-id": one, "status": state, "pending-at": "2001-01-01 00:00:00Z"} for one, state in states.items()]
    return {"success": True, "runs": each}


def test_a_run_that_nothing_takes_is_told_from_one_that_has_just_come_and_from_those_that_have_begun(monkeypatch):
    """Runs that are still waiting after 10 s are reported, and neither new runs nor those that have begun by then."""
    slept = []
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    require_begun(Saying(runs(a="running", b="finished:failed")), "there")
    require_begun(Saying(runs()), "there")
    assert slept == []
    require_begun(Saying(runs(a="running", b="pending"), runs(b="starting", c="pending")), "there")
    assert slept == [10.0]
    stays = runs(a="running", b="pending", c="pending", d="pending")
    with raises_with(CommandError, "(2, for 10 s"):
        require_begun(Saying(stays, runs(b="pending", c="pending", d="running", e="pending")), "there")
    with raises_with(CommandError, "flwr list there: no such name"):
        require_begun(Saying({"success": False, "error-message": "no such\nname"}), "there")


def test_a_superlink_that_does_not_answer_is_said_in_a_line(tmp_path, monkeypatch, capsys):
    """If a SuperLink does not answer, `flower status` says so in one line and ends with status 5.

    Flower's own command then ends with status 0.
    """
    (port,) = free_ports(1)
    (tmp_path / "config.toml").write_text(f'[superlink.there]\naddress = "127.0.0.1:{port}"\ninsecure = true\n')
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    assert main(["flower", "status", "--connection", "there"]) == 5
    said = capsys.readouterr().err
    assert said.startswith("fedbilevel: flwr list there: ")
    assert "Connection to the SuperLink is unavailable" in said


# With Flower

PROJECT = """
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
rounds = 1
kind = "ping"
"""
CLIENT = """
import os
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.query("ping")
def ping(message, context):
    calls = context.state["c"]["calls"] + 1 if "c" in context.state else 1
    context.state["c"] = ConfigRecord({"calls": calls})
    answer = {"calls": calls, "pid": os.getpid(), "partition": context.node_config["partition-id"]}
    return Message(RecordDict({"c": ConfigRecord(answer)}), reply_to=message)
@app.query("none")
def none(message, context):
    return None
@app.query("die")
def die(message, context):
    os.kill(os.getpid(), 9)
"""
SERVER = """
import json, time
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    kinds = [context.run_config["kind"]] + ["ping"] * context.run_config["rounds"]
    for kind in kinds:
        asked = [Message(RecordDict(), node, "query." + kind, ttl=100.0) for node in grid.get_node_ids()]
        left = set(grid.push_messages(asked))
        while left:
            for reply in grid.pull_messages(left):
                left.discard(reply.metadata.reply_to_message_id)
                said = {"error": reply.error.code} if reply.has_error() else dict(reply.content["c"])
                print("ANSWER", json.dumps(said), flush=True)
            time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def ping(tmp_path_factory):
    """Write a Flower app of a few lines into a folder."""
    directory = tmp_path_factory.mktemp("app")
    (directory / "ping").mkdir()
    (directory / "pyproject.toml").write_text(PROJECT)
    for name, content in {"__init__": "", "client": CLIENT, "server": SERVER}.items():
        (directory / "ping" / f"{name}.py").write_text(content)
    return directory


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A federation of two clients that runs, with TLS and keys."""
    with Federation(tmp_path_factory.mktemp("federation"), 2, first_port=22700) as running:
        yield running


def answers(lines):
    """Return the clients' replies that the lines of a log have."""
    return [json.loads(line.partition("ANSWER ")[2]) for line in lines if "ANSWER" in line]


@pytest.mark.slow
def test_a_client_answers_all_messages_in_one_process(federation, ping):
    got = answers(federation.run(ping, "rounds=2"))
    for partition in (0, 1):
        mine = [response for response in got if response["partition"] == partition]
        assert [response["calls"] for response in mine] == [1, 2, 3]
        assert len({response["pid"] for response in mine}) == 1


@pytest.mark.slow
def test_no_reply_and_a_worker_that_dies_are_told_at_once_and_the_next_message_is_answered(federation, ping):
    for kind, code in [("none", 2), ("die", 8)]:
        began = time.monotonic()
        got = answers(federation.run(ping, f"rounds=1 kind='{kind}'"))
        assert got[:2] == [{"error": code}] * 2
        assert sorted(response["partition"] for response in got[2:]) == [0, 1]
        assert time.monotonic() - began < 60  # Flower alone reports this after 60 s, or never


@pytest.mark.slow
def test_who_is_killed_comes_back_under_its_key_and_answers(federation, ping):
    """A client that was killed comes back under its key and replies, as does a SuperNode that was killed alone.

    The test starts the client's processes again. The SuperNode is started again by its supervisor.
    """
    children.stop([federation.nodes.pop(1)], grace=0)
    federation.start_node(1)
    federation.wait_online(1, 150, within=0.0)  # refused while the old node seems to be connected
    members = children.family(federation.nodes[0].pid)
    (serving,) = [pid for pid in members if b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(serving, signal.SIGKILL)
    federation.wait_online(1, 150, within=0.0)
    got = answers(federation.run(ping))
    assert sorted(response["partition"] for response in got) == [0, 0, 1, 1]


def test_isolation_is_not_for_the_command_line(capsys):
    with pytest.raises(SystemExit):
        supernode.parse(["--isolation", "process"])
    assert "--isolation is not allowed" in capsys.readouterr().err


@pytest.mark.slow
def test_clients_come_back_to_a_superlink_that_was_killed_and_kept_its_database(tmp_path, ping):
    with Federation(tmp_path, 1, first_port=22600, database=tmp_path / "state.db") as federation:
        unit = federation.nodes[0]
        children.stop([federation.superlink], grace=0)
        federation.restart_superlink()
        assert [response["calls"] for response in answers(federation.run(ping))] == [1, 2]
        assert unit.poll() is None


@pytest.mark.slow
def test_a_superlink_whose_superexec_has_ended_begins_no_run_until_another_is_started_by_the_words_of_the_error(
    federation, ping, monkeypatch, capsys
):
    """Without its SuperExec a SuperLink begins no run, and `flower status` prints the command that starts one.

    This is the last test of this federation, because it leaves the federation without a SuperExec.
    """
    members = children.family(federation.superlink.pid)
    (superexec,) = [p for p in members if b"superexec" in Path(f"/proc/{p}/cmdline").read_bytes()]
    os.kill(superexec, signal.SIGKILL)
    number = re.findall(r"\d{9,}", federation.console("run", str(ping), "federation"))[0]
    monkeypatch.setattr(processes, "SOON", 1.0)
    monkeypatch.setenv("FLWR_HOME", str(federation.directory / "operator"))
    assert main(["flower", "status", "--connection", "federation"]) == 5
    said = capsys.readouterr().err
    assert "the SuperLink does not begin waiting runs (1, for 1 s or more): flower-superexec has ended" in said
    given = {"HOST:PORT": federation.address, "FILE": str(federation.credentials.ca)}
    words = [given.get(word, word) for word in said.rpartition(": ")[2].split()]
    child = children.spawn(words, federation.log("superexec"), federation.environment("superlink"))
    try:
        wait(lambda: federation.status(number) == "finished:completed", 60.0)
        assert main(["flower", "status", "--connection", "federation"]) == 0
    finally:
        children.stop([child])
