"""The processes that run one simulation, on one or more hosts: how a process joins them, what they say to each other,
and how it leaves, after an error or aborted by JAX's runtime since another process was lost.

Sums over clients go through XLA's collectives. Everything else (the spec, how many rounds come next, whether anybody
pressed Ctrl-C, the bytes of a checkpoint) goes through the key-value store of JAX's coordination service, which
process 0 hosts.
"""

from __future__ import annotations

import atexit
import ctypes
import ipaddress
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from fedbilevel.core import interrupts
from fedbilevel.core.errors import (
    CheckpointError,
    ConfigurationError,
    ExchangeError,
    FedbilevelError,
    NonFiniteError,
    NumericalError,
    require,
    require_count,
    warn,
)

LISTEN_MILLISECONDS = 2000  # between two looks at Ctrl-C while waiting for another process
PIECE = 2**20  # bytes of a message in an entry of the store; gRPC carries at most 4 MiB
PARTING_SECONDS = 5  # in which an error that all processes have comes up in all of them
LEFT = "fedbilevel/left"  # keys of the notes of processes that have ended
LONGEST = 10_000  # characters of a note
KINDS = {kind.__name__: kind for kind in (CheckpointError, NonFiniteError, NumericalError)}
"""Errors of process 0 that are of the same kind there; all other kinds become ConfigurationErrors."""


class LostProcess(ExchangeError):
    """Another process of the simulation has ended, or cannot be reached any more."""


@dataclass
class ProcessGroup:
    """The processes of one simulation, as one of them knows them. Without arguments: this process alone.

    All processes of a group call `gather`, `first`, `decide`, `require_same` and `copy_of` in the same order.
    """

    service: Any = None  # JAX's client of the key-value store, once `join` has been called
    processes: int = 1
    process: int = 0  # the number of this process, 0 … processes − 1
    coordinator: str = ""  # HOST:PORT
    saved: str = ""  # the path of this run's last checkpoint
    advice: str = ""  # how to continue from it
    trouble: str = ""  # the explanation that is printed if JAX's runtime aborts this process now
    reported: bool = False  # whether this process has already said that another process was lost
    ending: int | None = None  # exit code of a process that has said why it ends
    messages: int = 0  # so far; all processes count alike, since all make the same calls
    mine: list[str] = field(default_factory=list)  # keys of messages that others may not have read yet

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.process == 0

    @contextmanager
    def meanwhile(self, trouble: str) -> Iterator[None]:
        """Print `trouble` as the explanation if JAX's runtime aborts this process while the block runs."""
        self.trouble = trouble
        try:
            yield
        finally:
            self.trouble = ""

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Turn what XLA and JAX's service raise when another process is gone into `LostProcess`."""
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            gone = any(word in str(error) for word in ("Gloo", "NCCL", "UNAVAILABLE"))
            if self.processes == 1 or not gone:
                raise
            self.reported = True
            raise LostProcess(self.sentence(self.trouble or self.lost())) from error

    def lost(self) -> str:
        """Say that another process was lost, and which."""
        other = f"process {1 - self.process}" if self.processes == 2 else "another process"
        return f"{other} was lost (killed, crashed or cut off)"

    def sentence(self, what: str) -> str:
        """Say what has happened, what stays, and how to go on."""
        if not self.saved:
            return f"{what}; no checkpoint had been written"
        advice = f"; {self.advice}" if self.advice else ""
        return f"{what}; the last checkpoint is {self.saved}, of process 0{advice}"

    def part(self, code: int, why: str) -> NoReturn:
        """End this process after an error: with the others if they have it too, else alone, leaving them a note."""
        alone, self.reported = self.reported, True
        sys.stdout.flush()
        sys.stderr.flush()
        self.ending = code
        if not alone:
            self._take_leave(why)
            with suppress(jax.errors.JaxRuntimeError):  # jax.distributed.shutdown would wait for a minute
                self.service.wait_at_barrier("fedbilevel/part", 1000 * PARTING_SECONDS)
        os._exit(code)

    def gather(self, word: Any) -> list[Any]:
        """Get the values of `word`, which JSON can hold, on every process, in the order of their numbers."""
        if self.processes == 1:
            return [word]
        self._say(json.dumps(word).encode())
        words = [word if k == self.process else json.loads(self._hear(k)) for k in range(self.processes)]
        self.messages += 1
        earlier, self.mine = self.mine[:-1], self.mine[-1:]  # who speaks now has heard all that was said before
        for key in earlier:
            self.service.key_value_delete(key)
        return words

    def first(self, word: Any) -> Any:
        """Get the value of `word`, which JSON can hold, on process 0."""
        return json.loads(self._first(json.dumps(word).encode()))

    def decide(self, choose: Callable[[], Any]) -> Any:
        """Get the value (JSON) of a function that process 0 alone calls; its error is everybody's error."""
        if self.processes == 1:
            return choose()
        value, kind, said = None, "", ""
        if self.is_first:
            try:
                value = choose()
            except Exception as error:
                kind, said = type(error).__name__, str(error)
                own = isinstance(error, FedbilevelError | OSError)
                self.first([None, kind, said if own and said else f"{kind}: {said}"])
                raise
        value, kind, said = self.first([value, kind, said])
        if kind:
            raise KINDS.get(kind, ConfigurationError)(f"process 0: {said}")
        return value

    def require_same(self, fields: dict[str, Any]) -> None:
        """Refuse values (JSON, by name) that are not the same on every process."""
        words = self.gather(fields)
        for process, theirs in enumerate(words):
            for name in sorted(words[0].keys() | theirs.keys()):
                of_first, other = words[0].get(name), theirs.get(name)
                if of_first != other:
                    said = f"{name} differs between processes: {of_first} on process 0, {other} on process {process}"
                    raise ConfigurationError(f"{said}; it must be the same")

    @contextmanager
    def copy_of(self, path: Path) -> Iterator[Path]:
        """Get process 0's file `path`, as a file that this process can read."""
        if self.processes == 1:
            yield path
            return
        with tempfile.TemporaryDirectory() as folder:
            content = self._first(path.read_bytes() if self.is_first and path.is_file() else b"")
            copy = Path(folder) / path.name
            if content:
                copy.write_bytes(content)
            yield path if self.is_first else copy

    def _first(self, data: bytes) -> bytes:
        if self.processes == 1:
            return data
        if self.is_first:
            self._say(data)
        else:
            data = self._hear(0)
        self.messages += 1
        return data

    def _say(self, data: bytes) -> None:
        """Put a message into the store, its last piece first: who finds the first piece finds them all."""
        key = f"fedbilevel/{self.messages}/{self.process}"
        pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)] or [b""]
        with self.exchange():
            for number, piece in reversed(list(enumerate(pieces))):
                self.service.key_value_set_bytes(f"{key}/{number}", len(pieces).to_bytes(4) + piece)
        self.mine.append(key)

    def _hear(self, process: int) -> bytes:
        """Wait for that process's message."""
        key, content, total, number = f"fedbilevel/{self.messages}/{process}", b"", 1, 0
        while number < total:
            piece = self._wait_for(f"{key}/{number}", process)
            total, content, number = int.from_bytes(piece[:4]), content + piece[4:], number + 1
        return content

    def _wait_for(self, key: str, process: int) -> bytes:
        whom = "" if self.processes == 2 else f" while waiting for process {process}"
        gone = ""
        with self.meanwhile(f"{self.lost()}{whom}"):
            while True:
                try:
                    with self.exchange():
                        return bytes(self.service.blocking_key_value_get_bytes(key, LISTEN_MILLISECONDS))
                except jax.errors.JaxRuntimeError as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise
                if gone:  # and had said nothing before it left
                    raise LostProcess(self.sentence(gone))
                gone = self.who_left()

    def meet(self, mesh: Mesh) -> None:
        """Have all devices of a mesh connected, by a sum over them, once every process has come here.

        Gloo gives up after half a minute, and only the words of `gather` are waited for without end.

        Raises:
            ConfigurationError: the own name of some host is an address that the others cannot reach.
            LostProcess: they do not come together.
        """
        names = self.gather(own_name())
        if jax.default_backend() == "cpu":
            check_reachable(self.coordinator, names)
        add = lambda: lax.psum(jnp.ones(()), mesh.axis_names)  # noqa: E731
        total = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(), out_specs=PartitionSpec()))
        with (
            _silent(),
            self.meanwhile("the processes could not connect to each other, or a process was lost meanwhile"),
            self.exchange(),
        ):
            total().block_until_ready()

    def end(self) -> None:
        """Say that this process has come to its end, before JAX waits for the others."""
        self.trouble = "this process had come to its end, and the others had not"
        self._take_leave("")

    def _take_leave(self, why: str) -> None:
        """Leave a note for those who will wait for this process."""
        with suppress(jax.errors.JaxRuntimeError):
            self.service.key_value_set(f"{LEFT}/{self.process}", why[:LONGEST])

    def who_left(self) -> str:
        """Say who has left a note, and why; nothing if nobody has."""
        with self.exchange():
            notes = self.service.key_value_dir_get(LEFT)
        for key, why in notes:
            who = f"process {key.rpartition('/')[2]} has ended"
            return f"{who} with {why}" if why else f"{who} before the others"
        return ""


_OF_THIS_PROCESS = ProcessGroup()


def current_group() -> ProcessGroup:
    """Get the group that this process belongs to: the group that it joined (see `join`), or itself alone."""
    return _OF_THIS_PROCESS


def warn_on_first(warning: Warning) -> None:
    """Warn; where several processes run together, process 0 alone does."""
    if current_group().is_first:
        warn(warning)


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what C++ prints (Gloo, that it is connected) off standard output, which is for the run's own words."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def host_and_port(coordinator: str) -> tuple[str, str]:
    """Split HOST:PORT."""
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), port


def own_name() -> tuple[str, str]:
    """Look up this host's name and the address that it resolves to; "" where it has none."""
    name = socket.gethostname()
    return name, _resolved(name)


def check_reachable(coordinator: str, names: list[list[str]]) -> None:
    """Refuse hosts whose own name is their loopback: there Gloo listens, and no other host can connect to it.

    Args:
        coordinator: HOST:PORT.
        names: what `own_name` says on each process.
    """
    apart = len({name for name, _ in names}) > 1 and not _is_loopback(_resolved(host_and_port(coordinator)[0]))
    for process, (name, address) in enumerate(names):
        if apart and _is_loopback(address):
            raise ConfigurationError(
                f"the host of process {process} takes its own name, {name!r}, for {address}, where no other host can "
                f"reach it; see `getent hosts $(hostname)` there, and give the name its real address in /etc/hosts"
            )


def _resolved(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback


HEARTBEAT_SECONDS = 10  # without a sign of life after which JAX takes a process for lost
END_SECONDS = 60  # that a process at its end waits for the others to come to theirs
WORD_SECONDS = 2  # of waiting for the others to come, before it says so
TOPOLOGY_MINUTES = 24 * 60  # JAX's deadlines for the first use of a device, which may come after a long download
AUTO = "auto"
LOST = 5  # exit code


def join(
    coordinator: str, processes: int | None = None, process: int | None = None, *, patience: float = 300.0
) -> ProcessGroup:
    """Make this process a member of a group that runs one simulation together; before JAX computes anything.

    Args:
        coordinator: HOST:PORT where process 0 listens, the same on every process; or "auto": all three from the
            environment of a launcher that JAX knows (Slurm, Open MPI, Kubernetes, Cloud TPU).
        processes: how many there are.
        process: the number of this process, 0 … processes − 1.
        patience: seconds to wait for the others.

    Returns:
        The group of these processes, which `current_group` also returns from now on.

    Raises:
        ConfigurationError: an argument is not allowed, JAX is already in use, nobody answers, or the processes have
            different versions.

    From then on an error that nobody catches ends this process at once (`sys.excepthook` is extended; functions
    registered with `atexit` are not called), and the others learn of it. A process that is lost ends the others with
    exit code 5 and a sentence that says so.
    """
    group = current_group()
    require(group.service is None, "join", "a second call", "called once")
    require(patience >= 1, "patience", patience, "at least 1 second")
    auto = coordinator == AUTO
    if auto:
        given = [name for name, value in (("processes", processes), ("process", process)) if value is not None]
        require(not given, " and ".join(given), "a number", f"left out with coordinator = {AUTO!r}")
    others = f"the {processes or 'other'} processes"
    with _patiently(f"waiting up to {patience:.0f} s for {others} to come to {coordinator}"):
        if not auto:
            check_place(coordinator, processes, process, patience)
        undo = explain_abort(group)
        try:
            with (
                group.meanwhile(f"{others} did not all come to {coordinator} within {patience:.0f} s"),
                interrupts.handled_by(signal.SIG_DFL),  # JAX waits without looking at Python's handlers
            ):
                _initialize(group, coordinator, processes, process, int(patience))
        except ConfigurationError:
            undo()
            raise
    leave_when_failing(group)
    versions = {name: version(name) for name in ("fedbilevel", "jax", "jaxlib")}
    group.require_same({"processes": group.processes} | versions)
    return group


def _initialize(
    group: ProcessGroup, coordinator: str, processes: int | None, process: int | None, patience: int
) -> None:
    from jax._src import distributed  # the only way to the store; jax.distributed itself only starts and ends it

    auto = coordinator == AUTO
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    try:
        for which in ("local", "global"):
            jax.config.update(f"jax_cpu_get_{which}_topology_timeout_minutes", TOPOLOGY_MINUTES)
    except RuntimeError as error:
        raise ConfigurationError("join must be called before JAX computes anything or looks at its devices") from error
    try:
        jax.distributed.initialize(
            None if auto else coordinator,
            processes,
            process,
            cluster_detection_method=None if auto else "deactivate",
            coordinator_bind_address=None if auto else os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator),
            initialization_timeout=patience,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=END_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if auto and "be defined" in reason:
            reason = "no launcher that JAX knows was found; give HOST:PORT, processes and process"
        raise ConfigurationError(f"coordinator = {coordinator!r}: {reason}") from error
    state = distributed.global_state
    group.service, group.coordinator = state.client, str(state.coordinator_address)
    group.processes, group.process = int(state.num_processes), int(state.process_id)


def check_place(coordinator: str, processes: int | None, process: int | None, patience: float) -> None:
    """Refuse what cannot work; process 0 makes sure that the port is free, the others that somebody answers there.

    Raises:
        ConfigurationError: no HOST:PORT, no such process, a port in use, a name that nobody knows, or nobody answers
            within `patience` seconds.
    """
    host, port = host_and_port(coordinator)
    good = bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    require(good, "coordinator", coordinator, f"HOST:PORT, where process 0 listens, or {AUTO}")
    require_count("processes", processes)
    assert processes is not None
    inside = isinstance(process, int) and 0 <= process < processes
    require(inside, "process", process, f"0 to {processes - 1}, a different number for each of the {processes}")
    address = (host, int(port))
    if process == 0 and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        _check_free(coordinator, address)
    elif process != 0:
        _await_answer(coordinator, address, patience)


def _check_free(coordinator: str, address: tuple[str, int]) -> None:
    try:
        with socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET):
            pass
    except OSError as error:
        raise ConfigurationError(f"process 0 cannot listen at coordinator = {coordinator!r}: {error}") from error


def _await_answer(coordinator: str, address: tuple[str, int], patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection(address, timeout=2).close()
            return
        except socket.gaierror as error:
            said = f"coordinator = {coordinator!r}: the name {address[0]!r} is not known"
            raise ConfigurationError(f"{said}: {error.strerror}") from error
        except OSError as error:
            if time.monotonic() > end:
                said = f"coordinator = {coordinator!r} does not answer in {patience:.0f} s: {error}"
                raise ConfigurationError(f"{said}; is process 0 running?") from error
        time.sleep(0.2)


@contextmanager
def _patiently(sentence: str) -> Iterator[None]:
    """Say what is waited for, if it takes long."""
    timer = threading.Timer(WORD_SECONDS, print, [f"fedbilevel: {sentence}"], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def explain_abort(group: ProcessGroup) -> Callable[[], None]:
    """Have the C library's abort() say `sentence` and end with its exit code; a function that undoes it.

    When a process is lost, JAX's runtime ends the others from a thread of its own, with abort(), wherever they are. It
    has a callback for that, which cannot be a Python function in jaxlib 0.10 (std::bad_cast); Python's own signal
    handlers would run in the main thread, later than abort() allows. Hence a handler of the C library.
    """
    if os.name != "posix":
        return lambda: None

    def end(number: int) -> None:
        if group.ending is not None:  # what it still waits for would come through this very thread
            os._exit(group.ending)
        if group.reported:  # the main thread is saying it
            time.sleep(PARTING_SECONDS)
        else:
            group.reported = True
            unknown = f"ended by JAX's runtime or crashed; most likely {group.lost()}"
            said = group.sentence(group.trouble or unknown) if group.service else group.trouble
            os.write(2, f"fedbilevel: {said}\n".encode())
        os._exit(LOST)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    handlers.append(handler)
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = library.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    return lambda: library.signal(signal.SIGABRT, before) and None


handlers: list[Any] = []
"""The C library's handlers, kept from being collected."""


def leave_when_failing(group: ProcessGroup) -> None:
    """Have an error that nobody catches end this process: JAX's own end would wait for the others first."""
    before = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        codes = {LostProcess: LOST, KeyboardInterrupt: interrupts.exit_code()}
        code = next((code for of, code in codes.items() if isinstance(error, of)), 1)
        group.part(code, f"{kind.__name__}: {error}")

    sys.excepthook = leave
    atexit.register(group.end)  # before JAX's own, which waits
