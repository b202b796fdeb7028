"""Limit what a server may ask of a client: work, messages, requests and time."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from fedbilevel.algorithms.parts.layers import Around, layers_at
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.errors import is_number, require, require_count, unknown
from fedbilevel.core.hyperparameters import field_values, hyperparameters, local_epochs
from fedbilevel.flower.refusal import Code, Refusal

LAYERS = (
    "AdaptiveSteps",
    "Asynchronous",
    "CentredClipping",
    "InSet",
    "Krum",
    "Median",
    "Memory",
    "OuterOptimizer",
    "OwnBlock",
    "OwnLeaves",
    "Private",
    "TopK",
    "TrimmedMean",
)
"""The names of the library's layers."""
OWN = re.compile(r"[^\s:,]+:[^\s:,]+")  # the form of the name of a user's own layer


@dataclass(frozen=True)
class RequestCounts:
    """The numbers of requests that a client has handled, in all runs together. Greetings are requests of round -1.

    Args:
        total: the number of requests since the client began to count.
        run: the run of the last request.
        contract: the digest of the client's contract at the last request; "" if the client had no contract. If a run
            has several contracts, one after the other, rounds begin at 0 with each.
        round: the largest round in a request of this run and contract.
        in_round: the number of requests since the first request for this round. Requests for earlier rounds are
            included. Otherwise a server could get more replies by going back and forth between rounds.
        refusals: the number of refusals since the last request that counted. Requests above a limit, for example, are
            refused without being counted as requests.
    """

    total: int = 0
    run: str = ""
    contract: str = ""
    round: int = -1
    in_round: int = 0
    refusals: int = 0

    def __post_init__(self) -> None:
        if [type(value) for value in astuple(self)] != [int, str, str, int, int, int]:
            raise TypeError(f"{self} has fields of wrong types")

    def next(self, run: str, contract: str, round: int) -> RequestCounts:
        """Return the counts after a request of this run, contract and round."""
        if (run, contract) != (self.run, self.contract) or round > self.round:
            return RequestCounts(self.total + 1, run, contract, round, 1)
        return replace(self, total=self.total + 1, in_round=self.in_round + 1, refusals=0)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits and floors that a site sets for its client.

    In the node configuration, their names have hyphens: `max-local-steps`.

    A request that exceeds a limit or falls below a floor is refused. A server cannot override this. Floors make it more
    costly to learn single samples from many replies, but do not prevent it: see docs/explanation/security.md.

    Args:
        max_local_steps: the largest number of local steps, from the algorithm or from the message. This limit also
            bounds other fields of the algorithm that determine the client's work, such as `inner.rounds` and
            `hypergradient.solver.terms`.
        max_batch_size: the largest number of samples of a mini-batch.
        max_seconds: the time limit for a phase, including compilation, and for making the site. If a phase takes
            longer, the request is refused, and so are further messages until the phase ends.
        max_bytes: the largest number of bytes of a message's arrays.
        max_memory: the largest number of bytes by which the process may grow while the site is made (Linux).
        min_batch_size: the smallest number of samples of a mini-batch, and of steps over single samples. Methods that
            use all samples of the client are always allowed.
        min_local_samples: the smallest number of samples of each loss that a client must have to take part.
        max_requests_per_round: the largest number of requests in a round. Greetings, requests for a phase and requests
            for metrics are counted, and repeated requests are counted again. The server itself sends the number of the
            round, so this limit stops only mistakes. `max_requests` also stops a server that sends false numbers of
            rounds.
        max_requests: the largest number of requests in all runs together. After them the client refuses all requests.
            The count is stored in `Site.folder`. Without a folder it is in Flower's memory of a run, and each run is
            counted separately.
        layers: the names of the layers that the client accepts around a method, such as ["TopK"]; None: all layers. In
            the node configuration the names are a text with commas. The name of a layer of your own is
            "package.module:Class". It is not compared with any list of names, so the first refusal shows if it is
            misspelt. Some layers are accepted even if they are not named, since nothing more leaves the client because
            of them: those that a problem requires (for own leaves of y, for own blocks of x, and for an x in a set) and
            `OuterOptimizer`. The privacy of the site itself (`Site.privacy`) is no layer, and is never refused. All
            other layers must be named. `AdaptiveSteps` is among them; a method has this layer if step sizes are None.
            So is every layer of your own, since the library does not check what such a layer sends. A robust rule, such
            as `Median`, acts only on the server. The client refuses a method that contains the rule, but it cannot
            notice a server that uses single replies without saying so.
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
    layers: Collection[str] | None = None

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name not in ("max_seconds", "layers")):
            require_count(f"Limits.{name}", getattr(self, name), largest=2**63 - 1)
        positive = is_number(self.max_seconds) and self.max_seconds > 0
        require(positive, "Limits.max_seconds", self.max_seconds, "a positive number")
        lower = self.min_batch_size <= self.max_batch_size
        require(lower, "Limits.min_batch_size", self.min_batch_size, f"at most max_batch_size = {self.max_batch_size}")
        if self.layers is not None:
            names = isinstance(self.layers, Collection) and not isinstance(self.layers, str | Mapping)
            names = names and all(isinstance(name, str) for name in self.layers)
            require(names, "Limits.layers", self.layers, "None, or a list of names of layers, such as ['TopK']")
            object.__setattr__(self, "layers", tuple(self.layers))
            for name in self.layers:
                if name not in LAYERS and (name.startswith("fedbilevel.") or not OWN.fullmatch(name)):
                    hint = "layers of the library are named without a module, a layer of your own package.module:Class"
                    raise unknown("layer of Limits.layers", name, LAYERS, hint)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Limits:
        """Return the limits that a node configuration sets; all others have their default values."""
        names = {field.name.replace("_", "-"): field.name for field in fields(cls)}
        given = {names[name]: value for name, value in config.items() if name in names}
        if isinstance(layers := given.get("layers"), str):
            given["layers"] = [name.strip() for name in layers.split(",") if name.strip()]
        return cls(**given)

    def check_algorithm(self, algorithm: Algorithm) -> None:
        """Refuse an algorithm with a layer that is not accepted, or with hyperparameters beyond a limit or a floor."""
        self.check_layers(algorithm)
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

    def check_layers(self, algorithm: Algorithm) -> None:
        """Refuse an algorithm with a layer that this client does not accept (`layers`)."""
        if self.layers is None:
            return
        refused = {name: sent for name, sent in disclosed_by_layers(algorithm).items() if name not in self.layers}
        if refused:
            several, listed = len(refused) > 1, ", ".join(self.layers)
            kinds = "layers" if several else "layer"
            why = "; ".join(f"{name}: {sent}" if several else sent for name, sent in refused.items())
            text = f"this client does not accept the {kinds} {', '.join(refused)} (layers = {listed!r}): {why}"
            raise Refusal(Code.LAYER, text)

    def check_epochs(self, algorithm: Algorithm, samples: int) -> None:
        """Refuse local epochs that have more steps than the limit allows.

        `samples` is the number of samples of the outer or the inner loss, whichever is larger.
        """
        for name, epochs in local_epochs(algorithm).items():
            if epochs * -(-samples // (algorithm.batch_size or samples)) > self.max_local_steps:
                why = f"{name} = {epochs} is above this client's limit of {self.max_local_steps} steps"
                raise Refusal(Code.LIMIT, why)

    def check_samples(self, count: int) -> None:
        """Refuse to take part if the client has too few samples. The refusal does not contain their number."""
        if count < self.min_local_samples:
            raise Refusal(Code.FLOOR, f"this client has fewer samples than its floor of {self.min_local_samples}")

    def check_bytes(self, size: int) -> None:
        """Refuse a message of more bytes than the limit."""
        if size > self.max_bytes:
            raise Refusal(Code.LIMIT, f"{size} bytes are above this client's limit of {self.max_bytes}")

    def check_request_counts(self, request_counts: RequestCounts) -> None:
        """Refuse a request above a limit; `request_counts` includes this request."""
        if request_counts.in_round > self.max_requests_per_round:
            text = f"this client replies to at most {self.max_requests_per_round} requests in a round"
            raise Refusal(Code.LIMIT, text)
        if request_counts.total > self.max_requests:
            raise Refusal(Code.LIMIT, f"this client replies to at most {self.max_requests} requests in all")

    def check_own(self, numbers: Mapping[str, int | float]) -> None:
        """Refuse a count above `max_local_steps` among the client's own numbers (`Clients.own`)."""
        for name, number in numbers.items():
            if isinstance(number, int) and number > self.max_local_steps:
                why = f"{name} = {number} is above this client's limit of {self.max_local_steps} steps"
                raise Refusal(Code.LIMIT, why)


def layer_name(layer: Around) -> str:
    """Return the name of a layer in `Limits.layers`: that of its class, for a user's own class with its module."""
    cls = type(layer)
    return cls.__qualname__ if is_of_library(cls) else f"{cls.__module__}:{cls.__qualname__}"


def disclosed_by_layers(algorithm: Algorithm) -> dict[str, str]:
    """Return in words what leaves a client because of each layer of an algorithm, by the names of the layers.

    Layers of the library because of which nothing more leaves the client are left out. A layer in a field of another
    layer counts, too.
    """
    found: dict[str, str] = {}
    for layer in layers_at(algorithm):
        inside = [part for part in field_values(layer).values() if isinstance(part, Around)]
        found |= {layer_name(one): sent for one in (layer, *inside) if (sent := _disclosed_by(one))}
    return found


def _disclosed_by(layer: Around) -> str:
    if is_of_library(type(layer)):
        return layer.tells
    return vars(type(layer)).get("tells") or "its class does not declare what leaves the client (`tells`)"


def is_of_library(cls: type) -> bool:
    """Return whether this library defines the class."""
    of_library = cls.__module__.partition(".")[0] == "fedbilevel"
    return of_library and getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls


def described_layers(algorithm: Algorithm) -> dict[str, str]:
    """Describe what leaves a client because of the layers of an algorithm, as an entry "layers"; {} if nothing does."""
    told = [f"{name}: {said}" for name, said in disclosed_by_layers(algorithm).items()]
    return {"layers": "; ".join(told)} if told else {}


T = TypeVar("T")
Tasks = SimpleQueue[Callable[[], None] | None]
"""The queue of a thread's tasks; None ends the thread."""


TICK = 0.05  # seconds between two measurements of a task's memory


class TimeLimit:
    """A worker thread for tasks, and a limit on the time and the memory of each task.

    One daemon thread runs all tasks. It starts with the first task and ends when this object is deleted. If a task
    takes too long, further tasks are refused until this task ends. Its thread then ends too, and the next task gets a
    new thread.

    Args:
        seconds: the time limit of a task.
        what: the name of the task in messages.
        memory: the bytes by which the process may grow during a task (Linux). With this limit, a task that exceeds the
            limit of time or of memory is stopped at its next line of Python. None: memory has no limit, and a task that
            takes too long continues in its thread.
    """

    def __init__(self, seconds: float, what: str = "the phase", memory: int | None = None) -> None:
        self.seconds, self.what, self.memory = seconds, what, memory
        self.thread: threading.Thread | None = None
        self.tasks: Tasks | None = None  # the queue of a thread that takes further tasks
        self.done = threading.Event()  # set when the latest task has ended
        self.done.set()

    def run(self, task: Callable[[], T]) -> T:
        """Run a task. Return its result, or raise its error.

        Raises:
            Refusal: the task exceeded a limit, or an earlier task that did so is still running.
        """
        if not self.done.is_set() and self.thread is not None and self.thread.is_alive():
            raise Refusal(Code.LIMIT, f"{self.what} has exceeded a limit, and is still running at this client")
        self.done = done = threading.Event()
        outcome: list[T | BaseException] = []

        def run() -> None:
            try:
                outcome.append(task())
            except BaseException as error:  # noqa: BLE001  raised again in the caller's thread
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
        """Wait until the task is done or exceeds a limit. Return which limit it exceeded, in words, or ""."""
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
        """Return the queue of the running thread.

        Start a thread if none is running: at the first task, or in a forked process.
        """
        if self.tasks is None or self.thread is None or not self.thread.is_alive():
            self.tasks = SimpleQueue()
            self.thread = threading.Thread(target=serve, args=(self.tasks,), name="fedbilevel-phase", daemon=True)
            self.thread.start()
            weakref.finalize(self, self.tasks.put, None).atexit = False
        return self.tasks


def serve(tasks: Tasks) -> None:
    """Run tasks from a queue until the queue contains None. While waiting, keep no reference to the last task."""
    while (task := tasks.get()) is not None:
        task()
        del task


def resident() -> int:
    """Return the bytes of memory that this process uses; 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
