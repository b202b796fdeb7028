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
import time
from pathlib import Path

import numpy as np

from benchmarks.harness import seconds

RUN = ["run", "--rounds", "2000", "--eval-every", "100", "--set", "run.checkpoint_every=7", "--quiet"]
QUICK = {"times": 1}


def start(arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "fedbilevel.cli", *arguments], stdout=subprocess.DEVNULL)


def finish(arguments: list[str]) -> None:
    """Run a command to its end."""
    if code := start(arguments).wait():
        raise SystemExit(f"{' '.join(arguments)} ended with {code}")


def outcome(folder: Path) -> tuple[dict[str, bytes], list[dict]]:
    """Return the arrays of the result as bytes, and the history without columns of time."""
    with np.load(folder / "result.npz") as stored:
        arrays = {name: stored[name].tobytes() for name in stored.files if not name.startswith("__")}
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return arrays, [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def trial(folder: Path, whole_time: float, chance: random.Random) -> tuple[list[str], Path]:
    """Kill a run once or twice, and finish it. Return its states when it was killed, and its folder."""
    moments = []
    resume = ["run", "--resume", str(folder), "--quiet"]
    for attempt in range(1 + chance.randint(0, 1)):
        fresh = not (folder / "checkpoint.npz").exists()
        if fresh and attempt:
            break
        process = start([*RUN, "--out", str(folder)] if fresh else resume)
        time.sleep(chance.uniform(0.2, 1.0) * whole_time)
        moments.append("at its end" if process.poll() is not None else "killed")
        process.kill()
        process.wait()
    if (folder / "checkpoint.npz").exists():
        finish(resume)
        return moments, folder
    again = folder.with_name(f"{folder.name}-again")
    finish([*RUN, "--out", str(again)])
    return [*moments, "before its first checkpoint, started again"], again


def main(times: int = 10) -> None:
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        finish([*RUN, "--out", str(base / "warm")])
        whole_time = seconds(lambda: finish([*RUN, "--out", str(base / "whole")]))
        expected = outcome(base / "whole")
        same = 0
        for i in range(times):
            moments, folder = trial(base / f"trial-{i}", whole_time, chance)
            equal = outcome(folder) == expected
            same += equal
            print(f"trial {i}: {', '.join(moments)}; bit-identical: {equal}", flush=True)
    print(f"{same} of {times} bit-identical to the undisturbed run ({whole_time:.1f} s)")
