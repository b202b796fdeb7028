"""Kill a run with -9 at random moments, resume it, and compare it with the undisturbed run, bit by bit.

Each trial starts `fedbilevel run` on scikit-learn's digits, kills the process after a random share of the time of the
undisturbed run, and resumes the run. With probability one half, it is killed once more and resumed. Then it runs to the
end.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import seconds

SETTINGS = ["--rounds", "2000", "--eval-every", "100", "--set", "run.checkpoint_every=7"]
QUICK = {"times": 1}


def continued(folder: Path, limit: float | None = None) -> str:
    """Start a run, or resume it if it has a checkpoint, and kill it after `limit` seconds. Return how it ended."""
    new = not (folder / "checkpoint.npz").exists()
    arguments = [*SETTINGS, "--out", str(folder)] if new else ["--resume", str(folder)]
    command = [sys.executable, "-m", "fedbilevel.cli", "run", *arguments, "--quiet"]
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=limit)
    except subprocess.TimeoutExpired:  # the process was killed by SIGKILL
        return "killed"
    return "at its end"


def outcome(folder: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """Return the arrays of the result as bytes, and the history without columns of time."""
    with np.load(folder / "result.npz") as stored:
        arrays = {name: stored[name].tobytes() for name in stored.files if not name.startswith("__")}
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return arrays, [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def main(times: int = 10) -> None:
    chance, same = random.Random(0), 0
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        continued(base / "warm")
        whole_time = seconds(lambda: continued(base / "whole"))
        for i in range(times):
            folder, moments = base / f"trial-{i}", []
            for _ in range(1 + chance.randint(0, 1)):
                moments.append(continued(folder, chance.uniform(0.2, 1.0) * whole_time))
                if not (folder / "checkpoint.npz").exists():
                    folder = base / f"trial-{i}-again"
                    moments.append("before its first checkpoint, started again")
                    break
            continued(folder)
            equal = outcome(folder) == outcome(base / "whole")
            same += equal
            print(f"trial {i}: {', '.join(moments)}; bit-identical: {equal}", flush=True)
    print(f"{same} of {times} bit-identical to the undisturbed run ({whole_time:.1f} s)")
