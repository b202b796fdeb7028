"""kill -9 for one process of a federation at a moment of a run; what was killed is started again, and the run goes on.

The result is to be that of the run that nothing happened to: the quorum is everybody, so that whoever was killed is
asked again. A server that was killed is submitted again with the same folder, a SuperLink is started again with its
database and the run submitted to it; the other two are started again by their supervisor.
"""

import os
import random
import signal
import time
from functools import partial
from typing import NamedTuple

import numpy as np
from federation_app import CLIENTS, EXCHANGES, LONGEST, Hang, command_of, exchanges_of

from fedbilevel.flower.launch import children

VICTIMS = ("server", "SuperLink", "SuperNode", "worker")
ROUNDS = 12
EACH = 6  # kills in one run
ALGORITHM = "two-phase"  # its clients keep something
CONFIG = {"settings": f"run.rounds={ROUNDS}", "quorum": 1.0, "attempts": 50, "deadline": 30.0, "join": 120.0}
COMMANDS = {
    "server": "flwr-serverapp",
    "SuperLink": "flower-superlink",
    "SuperNode": "fedbilevel.flower.launch.supernode serve",
    "worker": "fedbilevel.flower.launch.private",
}


class Moment(NamedTuple):
    """When and whom a kill meets: so many exchanges are over, and so many seconds have gone by since."""

    victim: str
    client: int  # whose SuperNode or worker
    exchange: int  # 0, 1, … of the run
    after: float

    def __str__(self):
        whose = f" of client {self.client}" if self.victim in ("SuperNode", "worker") else ""
        return (
            f"{self.victim + whose:22} {self.exchange // EXCHANGES:5} {self.exchange % EXCHANGES:8} {self.after:7.2f}"
        )


def plan(times, seed, longest):
    """The moments of each run: each victim equally often in all, within an exchange up to `longest` seconds."""
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
    """The result's x and y, and the median seconds of an exchange."""
    run = trial.play(ALGORITHM, [], **CONFIG)
    seconds = [line["seconds"] for line in exchanges_of(run.out / "exchanges.jsonl")]
    return arrays(run), float(np.median(seconds))


def arrays(run):
    result = run.result()
    return [np.asarray(result.x), np.asarray(result.y)]


def complete(log):
    """The places (number of the exchange in the run) that everybody answered, in the order of time."""
    found, answered = [], set()
    for line in exchanges_of(log) if log.exists() else []:
        answered = set(line["answered"]) | (answered if line["attempt"] else set())
        if answered == set(range(CLIENTS)):
            found.append(line["round"] * EXCHANGES + line["exchange"])
    return found


def play(trial, moments, expected):
    """Play a run in which all this happens.

    Returns:
        for each kill the seconds to the end of the first exchange begun afterwards, answered by everybody; how far x
        and y are from `expected`, at most.
    """
    out, seconds = trial.out(), []
    run = trial.submit(ALGORITHM, [], out, **CONFIG)
    log = out / "exchanges.jsonl"
    for moment in moments:
        begun = partial(is_begun, out, moment.exchange)
        run.wait(begun, f"{moment} is not reached", LONGEST)
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
        run.wait(lambda after=after: len(complete(log)) >= after, f"it does not go on after {moment}", LONGEST)
        seconds.append(time.monotonic() - killed)
    run.finish()
    pairs = zip(arrays(run), expected, strict=True)
    return seconds, max(float(np.max(np.abs(a - b))) for a, b in pairs)


def is_begun(out, exchange):
    """Whether the run has a checkpoint, and so many of its exchanges are over."""
    return (out / "checkpoint.npz").exists() and (exchange == 0 or exchange - 1 in complete(out / "exchanges.jsonl"))


def process(trial, moment):
    """The process that is killed."""
    if moment.victim == "SuperLink":
        return trial.federation.superlink.pid
    among = children.family(trial.federation.nodes[moment.client].pid) if moment.victim != "server" else trial.pids()
    (found,) = running(among, COMMANDS[moment.victim])
    return found


def running(pids, command):
    """Those of the processes that run a command."""
    words = {pid: command_of(pid) for pid in pids}
    return [pid for pid in pids if command in words[pid] and "fedbilevel.flower.launch.children" not in words[pid]]


def gone(trial, command, seconds=120):
    """Wait until no process of the trial runs a command: a server notices after a while that its SuperLink died."""
    until = time.monotonic() + seconds
    while running(trial.pids(), command):
        if time.monotonic() > until:
            raise Hang(f"{command} goes on without its SuperLink for {seconds} s")
        time.sleep(0.1)
