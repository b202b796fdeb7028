"""`fedbilevel flower demo` runs to its end, or until a person stops it, and leaves no process behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import hospital_files
from fedbilevel.cli import main
from fedbilevel.core.errors import FedbilevelError
from fedbilevel.experiments import configure, federation, load_run, read_spec
from fedbilevel.flower.launch import children, processes
from fedbilevel.tasks import TASKS
from refusals import refuses
from representatives import slow_but

COMMAND = [str(Path(sys.executable).parent / "fedbilevel"), "flower", "demo", "--clients", "2"]
ENV = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0"}


class LookedAtError(FedbilevelError):
    """Ends a demo after a look at one of its clients."""


class Looking:
    """Takes the place of a demo's processes, and checks the client with the fewest samples as `flower check` does."""

    address, credentials = "nowhere", SimpleNamespace(ca=Path("ca.crt"))

    def __init__(self, folder, clients, *, persistent, node_configs):
        self.clients, self.node_configs = clients, node_configs

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def run(self, app, run_config):
        spec = read_spec(app / "demo" / "spec.toml")
        held = federation.task_of(spec).population
        assert len(held) == self.clients == len(self.node_configs)
        fewest = int(np.argmin(np.minimum(held.outer.size, held.inner.size)))
        said = dict(federation.check(spec, self.node_configs[fewest]))
        raise LookedAtError(said["client"])


def test_a_site_of_tables_is_known_by_its_name():
    spec = configure(task="tables", algorithm="simfbo").replace(task={"sites": ["north", "south", "west"]})
    for given, said in (("", ", south, of tables"), ("site='south' ", ", south, of tables")):
        found = dict(federation.check(spec, f"{given}partition-id=1 min-local-samples=1"))
        assert said in found["client"]
    with refuses("node configuration: site", "west", "south, the site with partition-id = 1"):
        dict(federation.check(spec, "site='west' partition-id=1"))
    spec = configure(task="quadratic", algorithm="simfbo")
    with refuses("node configuration: site", "west", "left out"):
        dict(federation.check(spec, "site='west' partition-id=1"))


@pytest.mark.parametrize("task", slow_but("classification", "quadratic", of=TASKS))
def test_every_client_of_a_demo_of_every_task_would_take_part(task, tmp_path, monkeypatch, capsys):
    """In a demo of any task, even the client with the fewest samples would take part.

    The data belong to no person, so that no floor of the demo refuses few samples or small batches.
    """
    hospital_files.write(tmp_path, monkeypatch)
    monkeypatch.setattr(processes, "Federation", Looking)
    assert main(["flower", "demo", "--task", task, "--out", str(tmp_path / "a")]) == 2
    assert f"of {task}" in capsys.readouterr().err


def test_options_of_a_demo_win_against_its_defaults(tmp_path, monkeypatch):
    """A demo has 4 clients and 50 rounds with a row after every fifth, unless the command line has other numbers."""
    seen = []
    monkeypatch.setattr(
        federation, "play_demo", lambda spec, clients, *given, **named: seen.append((spec.run, clients))
    )
    for more in ([], ["--rounds", "4", "--clients", "3", "--set", "run.eval_every=2"]):
        assert main(["flower", "demo", "--task", "quadratic", *more, "--out", str(tmp_path / "a")]) == 0
    assert [(run.rounds, run.eval_every, clients) for run, clients in seen] == [(50, 5, 4), (4, 2, 3)]


def started_in(folder):
    """Return the ids of the processes whose command or environment names the folder."""
    mine = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if str(folder).encode() in said and int(entry.name) != os.getpid() and children.identity(int(entry.name)):
                mine.append(int(entry.name))
    return mine


@pytest.mark.slow
def test_the_demo_prints_its_curve_and_leaves_nothing(tmp_path):
    done = subprocess.run(
        [*COMMAND, "--rounds", "4", "--out", tmp_path / "a"], env=ENV, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 4/4  outer_loss" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].endswith("plot.png")
    assert load_run(tmp_path / "a" / "run").ledger["replies"] == 2 * 4
    assert started_in(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_stops_all(tmp_path):
    """Ctrl-C ends the demo with the status 130, which is 128 + SIGINT, and all its processes; a checkpoint is left."""
    demo = subprocess.Popen([*COMMAND, "--rounds", "1000", "--out", tmp_path / "a"], env=ENV, text=True,
                            stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
    try:
        assert demo.stdout
        for line in demo.stdout:
            if line.startswith("round 5/"):
                break
        assert len(started_in(tmp_path)) > 4
        os.kill(demo.pid, signal.SIGINT)
        assert demo.wait(60) == 130
    finally:
        demo.kill()
    until = time.monotonic() + 30
    while left := started_in(tmp_path):
        assert time.monotonic() < until, left
        time.sleep(0.5)
    assert (tmp_path / "a" / "run" / "checkpoint.npz").exists()
