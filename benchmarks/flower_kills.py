"""Kill a process of a federation with -9 at random moments, under load: it is restarted, and the run continues.

Four clients form a federation on this machine, with TLS and keys, while another process keeps all cores busy. Each run
has six kills, and its result must equal that of the undisturbed run. The quorum is all clients, so that a killed client
is asked again. If the server is killed, the run is submitted again with the same folder. If the SuperLink is killed, it
is restarted with its database, and the run is submitted to it again. Flower regards this as another run and forgets the
state of the clients, so each client has a folder for its state. SuperNodes and workers are restarted by their
supervisor.

The table has the process that was killed, in which exchange, and how many seconds after its start; the seconds to the
end of the first exchange that began after the kill; and the largest difference of x and y from the undisturbed run, at
the end of the run.
"""

import os
import random
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import ROOT, head, row
from benchmarks.machine import load

os.environ |= {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
sys.path[:0] = [str(ROOT / "tests" / "flower"), str(ROOT / "tests" / "engines")]

from federation_app import CLIENTS, EXCHANGES, LONGEST, SAME, Hang, Trial, command_of, exchanges_of  # noqa: E402

from fedbilevel.flower.launch import children  # noqa: E402

QUICK = {"times": 2}
BUSY = "import os\nfor _ in range(os.cpu_count() - 1):\n    if os.fork() == 0:\n        break\nwhile True:\n    pass"
VICTIMS = ("server", "SuperLink", "SuperNode", "worker")
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


class Moment(NamedTuple):
    """A moment at which a process is killed: which process, after how many exchanges, and how many seconds later."""

    victim: str
    client: int  # the client whose SuperNode or worker is killed
    exchange: int  # the number of the exchange in the run: 0, 1, …
    after: float

    def cells(self):
        """Return the cells of a row that describe this moment."""
        whose = f" of client {self.client}" if self.victim in ("SuperNode", "worker") else ""
        return f"{self.victim}{whose}", *divmod(self.exchange, EXCHANGES), f"{self.after:.2f}"


def plan(times, seed, longest):
    """Return the moments of each run.

    Over all runs, each kind of process is killed equally often, at most `longest` seconds after an exchange begins.
    """
    rng = random.Random(seed)
    victims = [VICTIMS[k % len(VICTIMS)] for k in range(times)]
    rng.shuffle(victims)
    runs = []
    for first in range(0, times, EACH):
        some = victims[first : first + EACH]
        places = sorted(rng.sample(range(ROUNDS * EXCHANGES - 2), len(some)))
        runs.append(
            [Moment(v, rng.randrange(CLIENTS), e, rng.uniform(0, longest)) for v, e in zip(some, places, strict=True)]
        )
    return runs


def undisturbed(trial):
    """Make a run without kills. Return its x and y, and the median seconds of an exchange."""
    run = trial.play(ALGORITHM, [], **CONFIG)
    seconds = [line["seconds"] for line in exchanges_of(run.out / "exchanges.jsonl")]
    return arrays(run), float(np.median(seconds))


def arrays(run):
    result = run.result()
    return [np.asarray(result.x), np.asarray(result.y)]


def complete(log):
    """Return the numbers of the exchanges that all clients answered, in the order of time."""
    found, answered = [], set()
    for line in exchanges_of(log) if log.exists() else []:
        answered = set(line["answered"]) | (answered if line["attempt"] else set())
        if answered == set(range(CLIENTS)):
            found.append(line["round"] * EXCHANGES + line["exchange"])
    return found


def play(trial, moments, expected):
    """Make a run with all these kills.

    Returns:
        for each kill, the seconds to the end of the first exchange that began after it and that all clients answered;
        and the largest difference of x and y from `expected`.
    """
    out, seconds = trial.out(), []
    run = trial.submit(ALGORITHM, [], out, **CONFIG)
    log = out / "exchanges.jsonl"
    for moment in moments:
        begun = partial(is_begun, out, moment.exchange)
        run.wait(begun, f"{moment.cells()} is not reached", LONGEST)
        time.sleep(moment.after)
        after, killed = len(complete(log)) + 2, time.monotonic()  # an exchange that begins after the kill
        os.kill(process(trial, moment), signal.SIGKILL)
        if moment.victim in ("server", "SuperLink"):
            run.give_up()
            if moment.victim == "SuperLink":
                trial.federation.superlink.wait(30)
                trial.federation.restart_superlink(120)
                gone(trial, COMMANDS["server"])
            run, after = trial.submit(ALGORITHM, [], out, **CONFIG), len(complete(log)) + 1
        run.wait(
            lambda after=after: len(complete(log)) >= after, f"it does not continue after {moment.cells()}", LONGEST
        )
        seconds.append(time.monotonic() - killed)
    run.finish()
    pairs = zip(arrays(run), expected, strict=True)
    return seconds, max(float(np.max(np.abs(a - b))) for a, b in pairs)


def is_begun(out, exchange):
    """Return whether the run has a checkpoint, and `exchange` of its exchanges have ended."""
    return (out / "checkpoint.npz").exists() and (exchange == 0 or exchange - 1 in complete(out / "exchanges.jsonl"))


def process(trial, moment):
    """Return the process to kill."""
    if moment.victim == "SuperLink":
        return trial.federation.superlink.pid
    among = children.family(trial.federation.nodes[moment.client].pid) if moment.victim != "server" else trial.pids()
    (found,) = running(among, COMMANDS[moment.victim])
    return found


def running(pids, command):
    """Return the processes among `pids` that run a command."""
    words = {pid: command_of(pid) for pid in pids}
    return [pid for pid in pids if command in words[pid] and "fedbilevel.flower.launch.children" not in words[pid]]


def gone(trial, command, seconds=120):
    """Wait until no process of the trial runs a command.

    This is needed since a server takes a while to notice that its SuperLink has ended.
    """
    until = time.monotonic() + seconds
    while running(trial.pids(), command):
        if time.monotonic() > until:
            raise Hang(f"{command} goes on without its SuperLink for {seconds} s")
        time.sleep(0.1)


def outcomes(trial, moments, expected):
    """Return after how many of its kills a run continued to the expected result, and a row for each kill."""
    try:
        seconds, difference = play(trial, moments, expected)
    except Exception as error:  # noqa: BLE001  the error is reported, and the next run is made
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        trial.renew()
        return 0, [(*moment.cells(), type(error).__name__, "", load()) for moment in moments]
    pairs = zip(moments, seconds, strict=True)
    rows = [(*moment.cells(), f"{took:.1f}", f"{difference:.1e}", load()) for moment, took in pairs]
    return len(moments) * (difference <= SAME), rows


def main(times: int = 30, seed: int = 0) -> None:
    good = 0
    with tempfile.TemporaryDirectory() as folder, Trial(Path(folder), None, forgetful=None) as trial:
        busy = children.spawn([sys.executable, "-c", BUSY])
        try:
            expected, typical = undisturbed(trial)
            print(f"undisturbed: {typical:.2f} s an exchange")
            head("killed", "round", "exchange", "after, s", "to continue, s", "difference", "load")
            for moments in plan(times, seed, typical):
                same, rows = outcomes(trial, moments, expected)
                good += same
                for cells in rows:
                    row(*cells)
        finally:
            children.stop([busy], grace=0)
    print(f"{good} of {times} kills changed nothing; processes left: {trial.left() or 'none'}")
