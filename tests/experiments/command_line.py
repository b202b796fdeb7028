"""Functions that tests of the command line share: they wait for processes, and read the files of runs."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import numpy as np

QUADRATIC = ["run", "quadratic", "--quiet"]


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 120) -> None:
    """Wait until a file exists."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


def survived(first: subprocess.Popen, second: subprocess.Popen, sign: Path) -> None:
    """Kill the first of two processes as soon as the file `sign` exists, and check that the second one ends well."""
    wait_for(sign, first)
    first.kill()
    first.communicate()
    _, said = second.communicate(timeout=300)
    assert second.returncode == 0, said


def outcome(folder: Path) -> tuple[dict, list, dict]:
    """Return the results of a run without wall-clock times: arrays as bytes, the rows of the history, the ledger."""
    with np.load(folder / "result.npz") as stored:
        arrays = {name: (stored[name].dtype, stored[name].tobytes()) for name in stored.files if name != "__meta__"}
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    for row in rows:
        del row["seconds"]
    return arrays, rows, json.loads((folder / "ledger.json").read_text())


def without_remarks(error: str) -> str:
    """Return printed errors without the remark that a run ended above its start, which is common after few rounds."""
    return "".join(line for line in error.splitlines(True) if "result.best has x and y" not in line)


def leftovers(folder: Path) -> list[str]:
    """Return the names of temporary files that atomic writing has left behind."""
    return [path.name for path in folder.rglob("*.tmp")]
