"""A Flower app whose server or clients misbehave at given places (see misbehaviour.py), and the reference for its runs.

The reference is a run without the replies that do not count because of the misbehaviour.
"""

import contextlib
import json
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from two_phase import TwoPhase

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.engines import reference
from fedbilevel.engines.engine import first_carry
from fedbilevel.engines.history import Result
from fedbilevel.experiments import federation, read_spec
from fedbilevel.experiments.runner import build
from fedbilevel.experiments.spec import resolve
from fedbilevel.flower.launch.processes import CONNECTION, Console, Federation

CLIENTS, ROUNDS, EXCHANGES = 4, 2, 2  # EXCHANGES is the number of exchanges of a round
FORGETFUL = 3  # this client has no folder for its state, and begins anew if Flower forgets the state
TASK = {"clients": CLIENTS, "dim_x": 2, "dim_y": 3, "samples": [6, 6], "seed": 3}
KEPT = {"two-phase": TwoPhase}  # an algorithm whose clients keep a state, unlike those of the library's LFedNest
ALGORITHM = {
    "lfednest": {"inner": {"rounds": EXCHANGES - 1, "lr": 0.1}, "batch_size": 4},
    "two-phase": {"inner": EXCHANGES - 1},
}
LONGEST = 400  # seconds that a run may take, even on a busy machine
SAME = 1e-12  # for rounding in some 40 sums of about a dozen terms of size 1 or less, compiled or not

INIT = """\
from fedbilevel.algorithms import ALGORITHMS

from .two_phase import TwoPhase

ALGORITHMS["two-phase"] = TwoPhase
"""
CLIENT = """\
from pathlib import Path

from fedbilevel.experiments import federation, read_spec

from .misbehaviour import client

app = client(federation.client_app(read_spec(Path(__file__).with_name("spec.toml"))))
"""
SERVER = """\
from functools import partial
from pathlib import Path

from fedbilevel.experiments import federation, read_spec
from fedbilevel.flower.server.engine import server_app

from .misbehaviour import server

app = server_app(server(partial(federation.serve, read_spec(Path(__file__).with_name("spec.toml")))))
"""


def write_app(folder, algorithm):
    """Write the app for an algorithm of `ALGORITHM` into a new folder."""
    with mock.patch.dict(ALGORITHMS, KEPT):
        run = {"rounds": ROUNDS, "eval_every": 1, "checkpoint_every": 1}
        spec = {"task": {"name": "quadratic", **TASK}, "run": run}
        spec["algorithm"] = {"name": algorithm, **ALGORITHM[algorithm]}
        federation.write_app(resolve(spec), folder)
    inside = folder / folder.name
    for name, text in {"__init__": INIT, "client_app": CLIENT, "server_app": SERVER}.items():
        (inside / f"{name}.py").write_text(text)
    tests = Path(__file__).parent
    for file in (tests / "misbehaviour.py", tests.parent / "engines" / "two_phase.py"):
        shutil.copy(file, inside)


def command_of(pid):
    """Return the command line of a process, or "" if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


class Hang(Exception):
    """A run, or an event that a test waits for, took longer than its limit."""


@dataclass
class Trial:
    """A federation of real processes, and its runs, which follow one another."""

    folder: Path
    ports: int | None  # the first port; None: any free ports
    forgetful: int | None = FORGETFUL
    federation: Federation = field(init=False)
    console: Console = field(init=False)  # submits the runs, so that the federation's own console stays free
    runs: int = 0

    def __post_init__(self):
        self.faults = self.folder / "faults"
        self.faults.mkdir(parents=True)
        (self.faults / "faults.json").write_text("[]")
        for algorithm in ALGORITHM:
            write_app(self.folder / algorithm.replace("-", "_"), algorithm)
        self.federation = Federation(
            self.folder / "federation",
            CLIENTS,
            node_configs=[self.node_config(client) for client in range(CLIENTS)],
            database=self.folder / "superlink.db",
            first_port=self.ports,
            env={"FEDBILEVEL_FAULTS": str(self.faults), "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"},
            deadline=300,
        )
        self.console = Console(self.federation.environment("operator"), self.federation.directory)

    def __enter__(self):
        self.federation.__enter__()
        return self

    def __exit__(self, *error):
        self.console.close()
        self.federation.__exit__(*error)

    def node_config(self, client):
        """Return the configuration of a client's SuperNode; all clients except `forgetful` have a folder for states."""
        kept = "" if client == self.forgetful else f" state-folder='{self.folder / 'states' / str(client)}'"
        return f"partition-id={client} num-partitions={CLIENTS} min-batch-size=4 min-local-samples=6{kept}"

    def renew(self):
        """Stop all processes and start new ones, after a test that failed."""
        self.console.close()
        self.federation.stop()
        shutil.rmtree(self.federation.directory / "credentials", ignore_errors=True)
        self.federation.start()

    def pids(self):
        """Return the ids of this trial's running processes, found by their environment; orphans are included."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(self.faults).encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
        return found

    def left(self):
        """Return the commands of this trial's processes that still run."""
        return [command for pid in self.pids() if (command := command_of(pid))]

    def out(self):
        """Return the path of a folder for a new run."""
        self.runs += 1
        return self.folder / f"run-{self.runs}"

    def submit(self, algorithm, faults, out, **config):
        """Start a run with faults, each of which is (party, round, exchange, what it does, and perhaps how)."""
        for name in ("done", "go"):
            (self.faults / name).unlink(missing_ok=True)
        keys = ("party", "round", "exchange", "do")
        told = [dict(zip(keys, fault[:4], strict=True)) | (fault[4] if fault[4:] else {}) for fault in faults]
        (self.faults / "faults.json").write_text(json.dumps(told))
        config = {"out": str(out), "deadline": 60.0, "join": 90.0, "attempts": 1, "poll": 0.05, **config}
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        return Submitted(self, algorithm, faults, out, words)

    def play(self, algorithm, faults, out=None, **config):
        """Start a run, wait for its end, and return it."""
        run = self.submit(algorithm, faults, out or self.out(), **config)
        run.finish()
        return run

    def go(self):
        """Let a waiting server continue."""
        (self.faults / "go").touch()


class Submitted(threading.Thread):
    """A run that has been submitted, as a thread that reads the run's log.

    Processes of the federation are started by the main thread, because they end with the thread that starts them.
    """

    def __init__(self, trial, algorithm, faults, out, words):
        super().__init__(daemon=True)
        self.trial, self.algorithm, self.faults, self.out, self.words = trial, algorithm, faults, out, words
        self.lines, self.error = [], None
        self.began = time.monotonic()
        self.start()

    def run(self):
        app = self.trial.folder / self.algorithm.replace("-", "_")
        try:
            words = ("run", str(app), CONNECTION, "--run-config", self.words, "--stream")
            for line in self.trial.console.lines(*words, timeout=2 * LONGEST):
                self.lines.append(line)
        except Exception as error:  # noqa: BLE001  raised again in the thread that waits
            self.error = error

    @property
    def text(self):
        """Return the run's log so far."""
        return "".join(self.lines)

    def until(self, *fault):
        """Wait until this fault has happened."""
        self.wait(lambda: " ".join(map(str, fault)) in self.done(), f"{fault} does not happen", 120)

    def wait(self, reached, complaint, seconds):
        """Wait until `reached()` is true; fail if the run ends before, or if this takes longer than `seconds`."""
        end = time.monotonic() + seconds
        while not reached():
            assert self.is_alive(), f"{complaint}, and the run has ended: {self.error}\n{self.text}"
            if time.monotonic() > end:
                raise Hang(f"{complaint} within {seconds} s\n{self.text}")
            time.sleep(0.05)

    def done(self):
        """Return a line for each fault that has happened so far."""
        file = self.trial.faults / "done"
        return file.read_text().splitlines() if file.exists() else []

    def finish(self):
        """Wait for the end of the run; fail if the run failed, or if one of its faults did not happen."""
        self.join(LONGEST)
        if self.is_alive():
            raise Hang(f"the run has not ended after {LONGEST} s\n{self.text}")
        if self.error:
            raise self.error
        self.seconds = time.monotonic() - self.began
        assert (self.out / "summary.json").exists(), f"the run failed\n{self.text}"
        assert sorted(self.done()) == sorted(" ".join(map(str, fault[:4])) for fault in self.faults)

    def give_up(self):
        """Stop reading the log of a run whose server is dead."""
        if reader := self.trial.console.process:
            reader.kill()
        self.join(30)
        if self.is_alive():
            raise Hang("the log of a run whose reader was killed goes on")

    def exchanges(self):
        """Return a dictionary: (round, exchange) → (phase, clients that replied in any attempt).

        If a round was repeated, only its last repetition is in the dictionary.
        """
        found = {}
        for line in exchanges_of(self.out / "exchanges.jsonl"):
            place = line["round"], line["exchange"]
            if line["exchange"] == 0 and line["attempt"] == 0:  # a round begins, perhaps for the second time
                found = {key: value for key, value in found.items() if key < place}
            phase, before = found.get(place, (line["phase"], set()))
            found[place] = phase, before | set(line["answered"])
        return found

    def absent(self):
        """Return (client, round, exchange) for all replies that did not count."""
        found = self.exchanges().items()
        return {(client, *place) for place, (_, answered) in found for client in set(range(CLIENTS)) - answered}

    def refusals(self):
        """Return the codes of all refusals of replies."""
        lines = exchanges_of(self.out / "exchanges.jsonl")
        return [why["code"] for line in lines for why in line.get("refused", {}).values()]

    def result(self):
        """Return the result in the run's folder."""
        with mock.patch.dict(ALGORITHMS, KEPT):
            task = build(read_spec(self.out / "spec.toml")).task
        return Result.load(self.out / "result.npz", task.x0, task.y0)

    def difference(self, **told):
        """Return the largest difference of x and y from a run of `Reference` with the same replies (see `replayed`)."""
        with mock.patch.dict(ALGORITHMS, KEPT):
            spec = read_spec(self.out / "spec.toml")
            parts = build(spec)
        found = self.result()
        expected = replayed(parts, spec.run.rounds, self.exchanges(), **told).state
        moved = [np.linalg.norm(value) for value in (expected.x, expected.y)]
        assert min(moved) > 1e-4  # agreement on a state that stood still would prove nothing
        pairs = [(found.x, expected.x), (found.y, expected.y)]
        return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)


def exchanges_of(log):
    """Return the lines of a run's log of exchanges, read as JSON."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def replayed(parts, rounds, log, forgets=()):
    """Return the carry after a run of `Reference` in which only those clients reply that replied according to `log`.

    Args:
        parts: the algorithm and the task of the run.
        rounds: the number of rounds.
        log: (round, exchange) → (phase, clients that replied), as `Submitted.exchanges` returns it.
        forgets: pairs (client, round); the client begins this round without the state that it has kept.
    """
    algorithm, task = parts.algorithm, parts.task
    first = carry = first_carry(algorithm, task.problem, task.clients, task.x0, task.y0)

    class Answered(reference.ReferenceFed):
        exchanges = 0

        def mean(self, phase, *arguments, **options):
            asked, answered = log[self.round, self.exchanges]
            assert asked == self.algorithm.phase_name(phase)
            self.exchanges += 1
            whole = self.members
            self.members = [(client, own) for client, own in whole if client in answered]
            try:
                return super().mean(phase, *arguments, **options)
            finally:
                self.members = whole

    with mock.patch.object(reference, "ReferenceFed", Answered):
        run = fb.Reference().start(algorithm, task.problem, task.clients, CLIENTS, jax.random.key(0), carry)
        for round in range(rounds):
            for client in (client for client, when in forgets if when == round):
                clients = jax.tree.map(
                    lambda now, new, client=client: now.at[client].set(new[client]), carry.clients, first.clients
                )
                carry = carry._replace(clients=clients)
            carry = run.advance(carry, 1).carry
    return carry


def rest_of(client, round, since=0):
    """Return (client, round, exchange) for the exchanges of a round from number `since` to the last one."""
    return {(client, round, exchange) for exchange in range(since, EXCHANGES)}
