"""Limits on what a server may ask of a client: work, messages, requests and time."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.errors import is_number, require, require_count
from fedbilevel.core.hyperparameters import hyperparameters, local_epochs
from fedbilevel.flower.refusal import Code, Refusal


@dataclass(frozen=True)
class RequestCounts:
    """How many requests a client has replied to, of all runs together; greetings come before round 0.

    Args:
        total: requests since the client began to count.
        run: the run of the last request.
        round: the largest round of that run that was asked about.
        in_round: requests since that round began; a request about an earlier round counts here too, so that going
            back and forth between rounds gains nothing.
    """

    total: int = 0
    run: str = ""
    round: int = -1
    in_round: int = 0

    def __post_init__(self) -> None:
        if [type(value) for value in astuple(self)] != [int, str, int, int]:
            raise TypeError(f"{self} is no count of requests")

    def next(self, run: str, round: int) -> RequestCounts:
        if run != self.run or round > self.round:
            return RequestCounts(self.total + 1, run, round, 1)
        return replace(self, total=self.total + 1, in_round=self.in_round + 1)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A client's own limits and floors, named as in the node configuration. What is outside of them is refused, whoever
    asks: no server overrides them.

    Floors make it costlier to learn single samples from many replies; they do not prevent it: see
    docs/explanation/security.md.

    Args:
        max_local_steps: at most so many local steps, whether the algorithm or the message says how many; also of the
            algorithm's other counts and its parts' (`inner.rounds`, `hypergradient.solver.terms`, …), which are work
            for the client too.
        max_batch_size: samples of a mini-batch at most.
        max_seconds: for a phase, compilation included, and for making the site. The reply to a phase that takes longer
            is a refusal, and further messages are refused until it ends.
        max_bytes: of a message's arrays.
        max_memory: bytes by which the process may grow while the site is made (Linux).
        min_batch_size: samples of a mini-batch at least, and of a walk sample by sample; a method that takes all of the
            client's samples is served, too.
        min_local_samples: a client that holds fewer samples of either loss replies to nothing.
        max_requests_per_round: requests of one round at most, each a greeting, or to run a phase or to tell metrics;
            those that are asked again count again. Rounds are the server's word: this stops mistakes, `max_requests`
            all else.
        max_requests: requests in all, whatever the run; counted in `Site.folder`, and without it for as long as Flower
            keeps a run's memory, that is, for each run apart. A client that has reached it replies to nothing.
    """

    max_local_steps: int = 10_000
    max_batch_size: int = 100_000
    max_seconds: float = 600.0
    max_bytes: int = 2**30
    max_memory: int = 2**34
    min_batch_size: int = 8
    min_local_samples: int = 8
    max_requests_per_round: int = 1_000
    max_requests: int = 1_000_000

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name != "max_seconds"):
            require_count(f"Limits.{name}", getattr(self, name), largest=2**63 - 1)
        positive = is_number(self.max_seconds) and self.max_seconds > 0
        require(positive, "Limits.max_seconds", self.max_seconds, "a positive number")
        lower = self.min_batch_size <= self.max_batch_size
        require(lower, "Limits.min_batch_size", self.min_batch_size, f"at most max_batch_size = {self.max_batch_size}")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Limits:
        """Read the limits that a node configuration names."""
        names = {field.name.replace("_", "-"): field.name for field in fields(cls)}
        return cls(**{names[name]: value for name, value in config.items() if name in names})

    def check_algorithm(self, algorithm: Algorithm) -> None:
        """Refuse hyperparameters that ask for too much work."""
        for name, value in hyperparameters(algorithm).items():
            samples = name.rpartition(".")[2] == "batch_size"
            if samples and value is not None and value > self.max_batch_size:
                raise Refusal(Code.LIMIT, f"{name} = {value} is above this client's limit of {self.max_batch_size}")
            if samples and value is not None and value < self.min_batch_size:
                raise Refusal(Code.FLOOR, f"{name} = {value} is below this client's floor of {self.min_batch_size}")
            largest = max(value, default=0) if isinstance(value, list) else value
            if type(largest) is int and not samples and largest > self.max_local_steps:
                why = f"{name} = {value} is above this client's limit of {self.max_local_steps} steps"
                raise Refusal(Code.LIMIT, why)

    def check_epochs(self, algorithm: Algorithm, samples: int) -> None:
        """Refuse local epochs of more steps than the limit allows; `samples`: of the loss that has more of them."""
        for name, epochs in local_epochs(algorithm).items():
            if epochs * -(-samples // (algorithm.batch_size or samples)) > self.max_local_steps:
                why = f"{name} = {epochs} is above this client's limit of {self.max_local_steps} steps"
                raise Refusal(Code.LIMIT, why)

    def check_samples(self, count: int) -> None:
        """Refuse where the client has too few samples. The refusal does not contain their number."""
        if count < self.min_local_samples:
            raise Refusal(Code.FLOOR, f"this client has fewer samples than its floor of {self.min_local_samples}")

    def check_bytes(self, size: int) -> None:
        """Refuse a message of more bytes than the limit."""
        if size > self.max_bytes:
            raise Refusal(Code.LIMIT, f"{size} bytes are above this client's limit of {self.max_bytes}")

    def check_request_counts(self, request_counts: RequestCounts) -> None:
        """Refuse a request beyond what is allowed; `request_counts` counts it already."""
        if request_counts.in_round > self.max_requests_per_round:
            text = f"this client replies to {self.max_requests_per_round} requests in a round, and no more"
            raise Refusal(Code.LIMIT, text)
        if request_counts.total > self.max_requests:
            raise Refusal(Code.LIMIT, f"this client replies to {self.max_requests} requests in all, and no more")

    def check_own(self, numbers: Mapping[str, int | float]) -> None:
        """Refuse counts of the client's own that are too large."""
        for name, number in numbers.items():
            if isinstance(number, int) and number > self.max_local_steps:
                why = f"{name} = {number} is above this client's limit of {self.max_local_steps} steps"
                raise Refusal(Code.LIMIT, why)


T = TypeVar("T")
Tasks = SimpleQueue[Callable[[], None] | None]
"""Tasks of a thread, in order; None ends it."""


TICK = 0.05  # seconds between two looks at the memory of a task


class TimeLimit:
    """Runs a task in a worker thread, and waits for it at most `seconds`; the next task has to wait for it.

    One daemon thread serves all tasks: it starts with the first task and ends with this object. The thread of a task
    that overran ends with it, and the next task gets a new thread.

    Args:
        what: the task, in words.
        memory: bytes by which the process may grow meanwhile (Linux). A task that passes these limits is then stopped,
            at its next line of Python. None: there is no limit, and a task that overran is left to itself.
    """

    def __init__(self, seconds: float, what: str = "the phase", memory: int | None = None) -> None:
        self.seconds, self.what, self.memory = seconds, what, memory
        self.thread: threading.Thread | None = None
        self.tasks: Tasks | None = None  # of a thread that takes further tasks
        self.done = threading.Event()  # the latest task has ended
        self.done.set()

    def run(self, task: Callable[[], T]) -> T:
        """Return what `task` returns, or raise what it raises.

        Raises:
            Refusal: the task overran a limit, or an earlier task that did still runs.
        """
        if not self.done.is_set() and self.thread is not None and self.thread.is_alive():
            raise Refusal(Code.LIMIT, f"{self.what} was given up, and still runs at this client")
        self.done = done = threading.Event()
        outcome: list[T | BaseException] = []

        def run() -> None:
            try:
                outcome.append(task())
            except BaseException as error:  # noqa: BLE001  handed on to the caller's thread
                outcome.append(error)
            finally:
                done.set()

        tasks = self.started()
        tasks.put(run)
        if why := self.overrun(done):
            tasks.put(None)
            self.tasks = None
            if self.memory is not None and self.thread is not None:
                thread, stop = ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, stop)
            raise Refusal(Code.LIMIT, f"{self.what} takes {why}")
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def overrun(self, done: threading.Event) -> str:
        """Wait until the task is done or has passed a limit, which is returned in words."""
        late, end = f"longer than this client's limit of {self.seconds:g} s", time.monotonic() + self.seconds
        if self.memory is None:
            return "" if done.wait(self.seconds) else late
        before = resident()
        while not done.wait(TICK):
            if time.monotonic() >= end:
                return late
            if resident() - before > self.memory:
                return f"more memory than this client's limit of {self.memory} bytes"
        return ""

    def started(self) -> Tasks:
        """Return the tasks of a running thread, which is started if there is none (in a forked process there is
        none)."""
        if self.tasks is None or self.thread is None or not self.thread.is_alive():
            self.tasks = SimpleQueue()
            self.thread = threading.Thread(target=serve, args=(self.tasks,), name="fedbilevel-phase", daemon=True)
            self.thread.start()
            weakref.finalize(self, self.tasks.put, None).atexit = False
        return self.tasks


def serve(tasks: Tasks) -> None:
    """Run tasks until None comes; nothing of a task is kept while the next task is awaited."""
    while (task := tasks.get()) is not None:
        task()
        del task


def resident() -> int:
    """Return the bytes of memory that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
