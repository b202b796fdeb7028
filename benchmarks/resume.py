"""Kill a run with -9 at random moments, resume it, and compare with the run that nobody disturbed, bit by bit.

    python benchmarks/resume.py [--times 10]

Each trial starts `fedbilevel run` on the embedded digits, kills the process after a random share of the time that the
undisturbed run took, resumes, kills once more with probability one half, and resumes to the end.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RUN = ["run", "--rounds", "2000", "--eval-every", "100", "--set", "run.checkpoint_every=7", "--quiet"]


def start(arguments: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "fedbilevel.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(arguments: list[str]) -> float:
    began = time.perf_counter()
    process = start(arguments)
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed: {errors.decode()}")
    return time.perf_counter() - began


def outcome(folder: Path) -> tuple[dict[str, bytes], list[dict]]:
    """The result's arrays as bytes, and the history without its clock."""
    with np.load(folder / "result.npz") as stored:
        arrays = {name: stored[name].tobytes() for name in stored.files if not name.startswith("__")}
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return arrays, [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def trial(folder: Path, whole_time: float, chance: random.Random) -> list[str]:
    """One run with one or two kills; what the disk held at each."""
    moments = []
    for attempt in range(1 + chance.randint(0, 1)):
        fresh = not (folder / "checkpoint.npz").exists()
        if fresh and attempt:
            break
        process = start([*RUN, "--out", str(folder)] if fresh else ["run", "--resume", str(folder), "--quiet"])
        time.sleep(chance.uniform(0.2, 1.0) * whole_time)
        moments.append("at its end" if process.poll() is not None else "killed")
        process.kill()
        process.wait()
    if (folder / "checkpoint.npz").exists():
        finish(["run", "--resume", str(folder), "--quiet"])
    else:  # killed before the first checkpoint: there is nothing to resume, so begin again beside it
        moments.append("before its first checkpoint, begun again")
        finish([*RUN, "--out", str(folder.with_name(folder.name + "-again"))])
    return moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        finish([*RUN, "--out", str(base / "warm")])
        whole_time = finish([*RUN, "--out", str(base / "whole")])
        expected = outcome(base / "whole")
        same = 0
        for i in range(options.times):
            folder = base / f"trial-{i}"
            moments = trial(folder, whole_time, chance)
            again = folder.with_name(folder.name + "-again")
            equal = outcome(again if again.exists() else folder) == expected
            same += equal
            print(f"trial {i}: {', '.join(moments)}; bit-identical: {equal}", flush=True)
    print(f"{same} of {options.times} bit-identical to the undisturbed run ({whole_time:.1f} s)")


if __name__ == "__main__":
    main()
