"""`fedbilevel flower demo` as a person starts it, and stops it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedbilevel.experiments import load_run
from fedbilevel.flower.launch import children

pytestmark = pytest.mark.slow

COMMAND = [str(Path(sys.executable).parent / "fedbilevel"), "flower", "demo", "--clients", "2", "--rounds", "4"]
ENV = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0"}


def started_in(folder):
    """Processes whose command or environment names the folder."""
    mine = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if str(folder).encode() in said and int(entry.name) != os.getpid() and children.identity(int(entry.name)):
                mine.append(int(entry.name))
    return mine


def test_the_demo_prints_its_curve_and_leaves_nothing(tmp_path):
    done = subprocess.run([*COMMAND, "--out", tmp_path / "a"], env=ENV, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 4/4  outer_loss" in done.stdout
    assert done.stdout.rstrip().splitlines()[-1].endswith("plot.png")
    assert load_run(tmp_path / "a" / "run").ledger["replies"] == 2 * 4
    assert started_in(tmp_path) == []


def test_ctrl_c_stops_all(tmp_path):
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
