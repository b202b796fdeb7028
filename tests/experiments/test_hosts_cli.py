"""Do several commands `fedbilevel run --coordinator`, which differ only in --process, carry out one run together?"""

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from command_line import wait_for

PORTS = iter(range(21900 - os.getpid() % 400, 22000))


def commands(folder, *options, other=None):
    """Start the command as processes 0 and 1, each in its own directory; `other` replaces the options of process 1."""
    with socket.socket() as probe:
        port = next(port for port in PORTS if probe.connect_ex(("127.0.0.1", port)))
    started = []
    for process in range(2):
        place = folder / f"host{process}"
        place.mkdir(exist_ok=True)
        together = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process", str(process), "--quiet"]
        command = [sys.executable, "-m", "fedbilevel.cli", "run", *(other if process and other else options), *together]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=place, start_new_session=True, **pipes))
    return started


def ends(started):
    """Return exit code, output and errors of each process."""
    try:
        said = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *words) for process, words in zip(started, said, strict=True)]


@pytest.mark.slow
def test_resume_is_given_to_all_or_to_none(tmp_path):
    """If only one of the processes gets --resume, both end with an error that names the difference."""
    for code, _, error in ends(commands(tmp_path, "quadratic", "--out", "there", other=["--resume", "there"])):
        assert code == 2
        assert "--resume differs between processes: left out on process 0, given on process 1" in error
        assert "Traceback" not in error


@pytest.mark.slow
def test_ctrl_c_in_one_process_stops_both_and_the_run_goes_on(tmp_path):
    """Ctrl-C in process 1 stops both processes, and --resume continues the run.

    Only process 0 has the folder of the run. It decides what is resumed, and refuses a folder that has a run already.
    """
    started = commands(tmp_path, "quadratic", "--rounds", "1000000", "--cohort", "3", "--out", "there")
    folder = tmp_path / "host0" / "there"
    wait_for(folder / "checkpoint.npz", started[0])
    first = (folder / "checkpoint.npz").stat().st_ino
    time.sleep(1)
    started[1].send_signal(signal.SIGINT)
    (code0, _, error0), (code1, _, error1) = ends(started)
    assert (code0, code1) == (130, 130)
    assert error0.endswith("interrupted; continue with: fedbilevel run --resume there\n")
    assert "with process 0" in error1
    assert (folder / "checkpoint.npz").stat().st_ino != first

    taken = ends(commands(tmp_path, "quadratic", "--out", "there"))
    assert [code for code, *_ in taken] == [2, 2]
    assert "process 0: there: " in taken[1][2]

    with np.load(folder / "checkpoint.npz") as stored:
        done = int(stored[".round"])
    spec = folder / "spec.toml"
    spec.write_text(spec.read_text().replace("rounds = 1000000", f"rounds = {done}"))
    short = ends(commands(tmp_path, "--resume", "there", "--rounds", str(done + 3)))
    assert [code for code, *_ in short] == [0, 0], short
    assert [said for _, said, _ in short] == ["there\n", ""]
    assert not (tmp_path / "host1" / "there").exists()
