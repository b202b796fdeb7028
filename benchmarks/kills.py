"""Kill processes with -9 at random moments: the run continues, and ends with the same numbers as without the kills.

run         Each trial starts `fedbilevel run` on scikit-learn's digits, kills the process after a random share of the
            time of the undisturbed run, and resumes the run. With probability one half, it is killed once more and
            resumed. Then it runs to the end, and is compared with the undisturbed run bit by bit.
federation  Four clients form a federation on this machine, with TLS and keys, while another process keeps all cores
            busy. Each run has six kills, and must end with the result of the undisturbed run. A round needs the
            replies of all clients, so a killed client is asked again. If the server is killed, the run is submitted
            again with the same folder. If the SuperLink is killed, it is restarted with its database, and the run is
            submitted to it again. Flower regards this as another run and forgets the state of the clients, so each
            client has a folder for its state. SuperNodes and workers are restarted by their supervisor.
            The table has for each run the killed processes, with the numbers of the exchanges that had begun, and the
            largest difference of x and y from the undisturbed run, at the end of the run.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import ROOT, head, row, seconds
from benchmarks.machine import load

os.environ |= {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
sys.path[:0] = [str(ROOT / "tests" / "flower"), str(ROOT / "tests" / "engines")]

from federation_app import CLIENTS, EXCHANGES, LONGEST, SAME, Hang, Trial, command_of, exchanges_of  # noqa: E402

from fedbilevel.flower.launch import children  # noqa: E402

QUICK = {"trials": 1, "kills": 2}
SETTINGS = ["--rounds", "2000", "--eval-every", "100", "--set", "run.checkpoint_every=7"]
BUSY = "import os\nfor _ in range(os.cpu_count() - 1):\n    if os.fork() == 0:\n        break\nwhile True:\n    pass"
ROUNDS = 12
EACH = 6  # the number of kills in one run
ALGORITHM = "two-phase"  # a method whose clients keep a state
CONFIG = {"settings": f"run.rounds={ROUNDS}", "quorum": 1.0, "attempts": 50, "deadline": 30.0, "join": 120.0}
COMMANDS = {
    "server": "flwr-serverapp",
    "SuperLink": "flower-superlink",
    "SuperNode": "fedbilevel.flower.launch.supernode serve",
    "worker": "fedbilevel.flower.launch.private",
}
KINDS = tuple(COMMANDS)


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


def killed_runs(times: int) -> None:
    """Print for each trial when the run was killed, and whether the results have the same bits."""
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


class Moment(NamedTuple):
    """A moment at which a process is killed: which process, after how many exchanges, and how many seconds later."""

    victim: str
    client: int  # the client whose SuperNode or worker is killed
    exchange: int  # the number of the exchange in the run: 0, 1, …
    after: float


def plan(times, seed, longest):
    """Return the moments of each run.

    Over all runs, each kind of process is killed equally often, at most `longest` seconds after an exchange begins.
    """
    rng = random.Random(seed)
    drawn = [KINDS[k % len(KINDS)] for k in range(times)]
    rng.shuffle(drawn)
    for first in range(0, times, EACH):
        some = drawn[first : first + EACH]
        places = sorted(rng.sample(range(ROUNDS * EXCHANGES - 2), len(some)))
        yield [Moment(v, rng.randrange(CLIENTS), e, rng.uniform(0, longest)) for v, e in zip(some, places, strict=True)]


def arrays(run):
    result = run.result()
    return [np.asarray(result.x), np.asarray(result.y)]


def is_begun(out, exchange):
    """Return whether the run has a checkpoint, and all clients have answered `exchange` of its exchanges."""
    log, done, answered = out / "exchanges.jsonl", {-1}, set()
    for line in exchanges_of(log) if log.exists() else []:
        answered = set(line["answered"]) | (answered if line["attempt"] else set())
        if answered == set(range(CLIENTS)):
            done.add(line["round"] * EXCHANGES + line["exchange"])
    return (out / "checkpoint.npz").exists() and exchange - 1 in done


def play(trial, moments, expected):
    """Make a run with all these kills. Return the largest difference of x and y from `expected`."""
    out = trial.out()
    run = trial.submit(ALGORITHM, [], out, **CONFIG)
    for moment in moments:
        run.wait(partial(is_begun, out, moment.exchange), f"{moment} is not reached", LONGEST)
        time.sleep(moment.after)
        run.wait(partial(victims, trial, moment), f"{moment} finds no process", LONGEST)  # it may be starting
        (pid,) = victims(trial, moment)
        os.kill(pid, signal.SIGKILL)
        if moment.victim in ("server", "SuperLink"):
            run.give_up()
            if moment.victim == "SuperLink":
                trial.federation.superlink.wait(30)
                trial.federation.restart_superlink(120)
                await_end(trial, COMMANDS["server"])
            run = trial.submit(ALGORITHM, [], out, **CONFIG)
    run.finish()
    return max(float(np.max(np.abs(a - b))) for a, b in zip(arrays(run), expected, strict=True))


def victims(trial, moment):
    """Return the process to kill, or nothing if it does not run."""
    if moment.victim == "SuperLink":
        return [trial.federation.superlink.pid]
    among = children.family(trial.federation.nodes[moment.client].pid) if moment.victim != "server" else trial.pids()
    return running(among, COMMANDS[moment.victim])


def running(pids, command):
    """Return the processes among `pids` that run a command."""
    words = {pid: command_of(pid) for pid in pids}
    return [pid for pid in pids if command in words[pid] and "fedbilevel.flower.launch.children" not in words[pid]]


def await_end(trial, command, seconds=120):
    """Wait until no process of the trial runs a command.

    This is needed since a server takes a while to notice that its SuperLink has ended.
    """
    until = time.monotonic() + seconds
    while running(trial.pids(), command):
        if time.monotonic() > until:
            raise Hang(f"{command} goes on without its SuperLink for {seconds} s")
        time.sleep(0.1)


def killed_federations(times: int, seed: int) -> None:
    """Print the differences of all runs with kills."""
    good = 0
    with tempfile.TemporaryDirectory() as folder, Trial(Path(folder), None, forgetful=None) as trial:
        busy = children.spawn([sys.executable, "-c", BUSY])
        try:
            run = trial.play(ALGORITHM, [], **CONFIG)
            expected, lines = arrays(run), exchanges_of(run.out / "exchanges.jsonl")
            typical = float(np.median([line["seconds"] for line in lines]))
            print(f"undisturbed: {typical:.2f} s an exchange")
            head("killed after exchanges", "difference", "load")
            for moments in plan(times, seed, typical):
                try:
                    difference: object = play(trial, moments, expected)
                    good += len(moments) * (difference <= SAME)
                except Exception as error:  # noqa: BLE001  the error is reported, and the next run is made
                    difference = f"{type(error).__name__}: {error}"
                    trial.renew()
                row(", ".join(f"{moment.victim} {moment.exchange}" for moment in moments), difference, load())
        finally:
            children.stop([busy], grace=0)
    print(f"{good} of {times} kills changed nothing; processes left: {trial.left() or 'none'}")


def main(parts: tuple[str, ...] = ("run", "federation"), trials: int = 10, kills: int = 30, seed: int = 0) -> None:
    if "run" in parts:
        killed_runs(trials)
    if "federation" in parts:
        killed_federations(kills, seed)
