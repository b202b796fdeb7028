"""What whole commands cost, each in a process of its own: without programs on disk (cold), and with those of a process
before it (warm).

    python benchmarks/commands.py [--commands NAME …] [--passes 3]

Processor seconds (user and system) and seconds by the clock, from start to end of the process, and its peak memory:
medians of the passes. For the sweep also the sum of the seconds that its runs spent in rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

SEEDS = ["--seeds", "0,1,2"]
STEPS = "0.02,0.03,0.05,0.07,0.1,0.14,0.2,0.28,0.4"
HELD_OUT = ["--set", "task.holdout=0.2", "--select", "validation_accuracy"]
METHODS = ["--algorithms", "simfbo,fednest,fedbio"]
COMMANDS = {
    "algorithms": ["algorithms"],
    "run": ["run", "--quiet"],
    "compare": ["compare", "quadratic", *METHODS, *SEEDS, "--exchanges", "300", "--quiet"],
    "sweep": ["sweep", *HELD_OUT, "--grid", f"server_lr.x={STEPS}", *SEEDS, "--quiet"],
}
MEASURES = ("processor s", "clock s", "peak MB", "in rounds s")


def once(name: str, cache: Path, fonts: Path) -> list[float]:
    """The measures of one process whose programs are in the folder `cache`, or come there; 0 s in rounds of commands
    that are no sweep."""
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"XDG_CACHE_HOME": str(cache), "MPLCONFIGDIR": str(fonts)}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        place = [] if name == "algorithms" else ["--out", str(out)]
        command = [sys.executable, "-m", "fedbilevel.cli", *COMMANDS[name], *place]
        began = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, cwd=scratch)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"fedbilevel {name} failed")
        summaries = out.rglob("summary.json") if name == "sweep" else []
        in_rounds = sum(json.loads(path.read_text())["seconds_in_rounds"] for path in summaries)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return [used.ru_utime + used.ru_stime, seconds, used.ru_maxrss / unit, in_rounds]


def measured(name: str, passes: int, fonts: Path) -> Iterator[tuple[str, list[float]]]:
    """The medians of a command, cold and warm in turn."""
    cold, warm = [], []
    for _ in range(passes):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(once(name, Path(cache), fonts))
            warm.append(once(name, Path(cache), fonts))
    for state, found in {"cold": cold, "warm": warm}.items():
        yield state, [median(column) for column in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS), metavar="NAME")
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    print(f"{'command':12}{'programs':10}" + "".join(f"{measure:>13}" for measure in MEASURES))
    with tempfile.TemporaryDirectory() as fonts:  # matplotlib's list of them, made once and for all
        find = [sys.executable, "-c", "import matplotlib.font_manager"]
        subprocess.run(find, check=True, env={**os.environ, "MPLCONFIGDIR": fonts})
        for name in options.commands:
            for state, row in measured(name, options.passes, Path(fonts)):
                shown = row if name == "sweep" else row[:-1]
                print(f"{name:12}{state:10}" + "".join(f"{value:13.1f}" for value in shown), flush=True)


if __name__ == "__main__":
    main()
