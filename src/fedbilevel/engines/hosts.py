"""Several processes, on one or more hosts, in one simulation: joining them, and what they say to each other.

Sums over clients go through XLA's collectives. All else (whose spec, how many rounds next, has anybody pressed Ctrl-C,
a checkpoint's bytes) goes through the key-value store of JAX's coordination service, which process 0 hosts.
"""

from __future__ import annotations

import ctypes
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
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import distributed  # the one way to the store; jax.distributed itself only starts and ends it
from jax.sharding import Mesh, PartitionSpec

from fedbilevel.core.errors import ConfigurationError, ExchangeError, require, require_count

HEARTBEAT_SECONDS = 10  # without a sign of life after which JAX takes a process for lost
LISTEN_MILLISECONDS = 2000  # between two looks at Ctrl-C while waiting for another process
PARTING_SECONDS = 5  # in which an error that all processes have comes up in all of them
PIECE = 2**20  # bytes of a message in one entry of the store; gRPC carries at most 4 MiB
LOST = 5  # exit code
AUTO = "auto"


class LostProcess(ExchangeError):
    """Another process of the simulation has ended, or cannot be reached any more."""


@dataclass
class Here:
    """What this process knows about itself and the others."""

    trouble: str = ""  # what it means, at this moment, if JAX's runtime ends this process
    saved: str = ""  # where the last checkpoint is
    advice: str = ""  # how to go on from it
    told: bool = False  # that a process was lost
    messages: int = 0  # so far; all processes count alike, since all make the same calls
    mine: list[str] = field(default_factory=list)  # keys of messages that others may not have read yet


here = Here()


def join(
    coordinator: str, processes: int | None = None, process: int | None = None, *, patience: float = 300.0
) -> None:
    """Make this process one of several that run one simulation together; before JAX computes anything.

    Args:
        coordinator: HOST:PORT where process 0 listens, the same on every process; or "auto": all three from the
            environment of a launcher that JAX knows (Slurm, Open MPI, Kubernetes, Cloud TPU).
        processes: how many there are.
        process: which one this is, 0 … processes − 1.
        patience: seconds to wait for the others.

    Raises:
        ConfigurationError: an argument is not allowed, JAX is already in use, or nobody answers.

    A process that is lost later ends the others with exit code 5 and a sentence that says so.
    """
    require(not distributed.global_state.client, "join", "a second call", "called once")
    require(patience >= 1, "patience", patience, "at least 1 second")
    if coordinator == AUTO:
        given = [name for name, value in (("processes", processes), ("process", process)) if value is not None]
        require(not given, " and ".join(given), "a number", f"left out with coordinator = {AUTO!r}")
    else:
        _check(coordinator, processes, process, patience)
    here.trouble = f"the {processes or 'other'} processes did not all come to {coordinator} within {patience:.0f} s"
    _explain_abort()
    with _interrupt_at_once():
        _initialize(coordinator, processes, process, int(patience))
    here.trouble = ""
    expected = first(count())
    require(expected == count(), "processes", count(), f"{expected}, as process 0 has it")


def _check(coordinator: str, processes: int | None, process: int | None, patience: float) -> None:
    host, _, port = coordinator.rpartition(":")
    good = bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16
    require(good, "coordinator", coordinator, f"HOST:PORT, where process 0 listens, or {AUTO}")
    require_count("processes", processes)
    assert processes is not None
    inside = isinstance(process, int) and 0 <= process < processes
    require(inside, "process", process, f"0 to {processes - 1}, a different number for each of the {processes}")
    address = (host.strip("[]"), int(port))
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
        except OSError as error:
            if time.monotonic() > end:
                said = f"coordinator = {coordinator!r} does not answer in {patience:.0f} s: {error}"
                raise ConfigurationError(f"{said}; is process 0 running?") from error
        time.sleep(0.2)


def _initialize(coordinator: str, processes: int | None, process: int | None, patience: int) -> None:
    auto = coordinator == AUTO
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    try:
        jax.distributed.initialize(
            None if auto else coordinator,
            processes,
            process,
            cluster_detection_method=None if auto else "deactivate",
            coordinator_bind_address=None if auto else os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator),
            initialization_timeout=patience,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        if auto and "be defined" in reason:
            reason = "no launcher that JAX knows was found; give HOST:PORT, processes and process"
        raise ConfigurationError(f"coordinator = {coordinator!r}: {reason}") from error


def _service() -> Any:
    return distributed.global_state.client


def count() -> int:
    """How many processes there are: 1 without `join`."""
    return int(distributed.global_state.num_processes) if distributed.global_state.client else 1


def index() -> int:
    """The number of this process."""
    return int(distributed.global_state.process_id) if distributed.global_state.client else 0


def is_first() -> bool:
    """Whether this process is the one that writes and prints."""
    return index() == 0


def gather(word: Any) -> list[Any]:
    """What every process says, in order; `word` is JSON. All processes make the same calls in the same order."""
    if count() == 1:
        return [word]
    _say(json.dumps(word).encode())
    words = [word if k == index() else json.loads(_hear(k)) for k in range(count())]
    here.messages += 1
    earlier, here.mine = here.mine[:-1], here.mine[-1:]  # who speaks now has heard all that was said before
    for key in earlier:
        _service().key_value_delete(key)
    return words


def first(word: Any) -> Any:
    """What process 0 says, in JSON; the others' words do not count."""
    return json.loads(_first(json.dumps(word).encode()))


def decide(choose: Callable[[], Any]) -> Any:
    """The value (JSON) of a function that process 0 alone calls; its error is everybody's error."""
    if count() == 1:
        return choose()
    try:
        value, error = (choose() if is_first() else None), ""
    except Exception as wrong:
        first([None, str(wrong)])
        raise
    value, error = first([value, error])
    if error:
        raise ConfigurationError(f"process 0: {error}")
    return value


@contextmanager
def copy_of(path: Path) -> Iterator[Path]:
    """Process 0's file `path`, as a file that this process can read."""
    if count() == 1:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        content = _first(path.read_bytes() if is_first() and path.is_file() else b"")
        copy = Path(folder) / path.name
        if content:
            copy.write_bytes(content)
        yield path if is_first() else copy


def _first(data: bytes) -> bytes:
    if count() == 1:
        return data
    if is_first():
        _say(data)
    else:
        data = _hear(0)
    here.messages += 1
    return data


def _say(data: bytes) -> None:
    """Put a message into the store, its last piece first: who finds the first one finds them all."""
    key = f"fedbilevel/{here.messages}/{index()}"
    pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)] or [b""]
    with exchange():
        for number, piece in reversed(list(enumerate(pieces))):
            _service().key_value_set_bytes(f"{key}/{number}", len(pieces).to_bytes(4) + piece)
    here.mine.append(key)


def _hear(process: int) -> bytes:
    """Wait for that process's message."""
    key, content, total, number = f"fedbilevel/{here.messages}/{process}", b"", 1, 0
    while number < total:
        piece = _wait_for(f"{key}/{number}", process)
        total, content, number = int.from_bytes(piece[:4]), content + piece[4:], number + 1
    return content


def _wait_for(key: str, process: int) -> bytes:
    here.trouble = f"process {process} was lost"
    while True:
        try:
            with exchange():
                return bytes(_service().blocking_key_value_get_bytes(key, LISTEN_MILLISECONDS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        finally:
            here.trouble = ""


@contextmanager
def exchange() -> Iterator[None]:
    """Turn what XLA and JAX's service raise when another process is gone into `LostProcess`."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        gone = any(word in str(error) for word in ("Gloo", "NCCL", "UNAVAILABLE"))
        if count() == 1 or not gone:
            raise
        here.told = True
        raise LostProcess(loss()) from error


def loss() -> str:
    """The sentence about a process that was lost."""
    other = f"process {1 - index()} was lost" if count() == 2 else "another process was lost"
    stays = f"the last checkpoint is {here.saved}, of process 0" if here.saved else "no checkpoint had been written"
    advice = f"; {here.advice}" if here.saved and here.advice else ""
    return f"{here.trouble or other} (killed, crashed or cut off); {stays}{advice}"


def part(code: int) -> NoReturn:
    """End this process after an error: with the others if it is theirs too, else alone, and they will be told."""
    alone, here.told = here.told, True
    sys.stdout.flush()
    sys.stderr.flush()
    if not alone:
        with suppress(jax.errors.JaxRuntimeError):  # jax.distributed.shutdown would wait for minutes
            _service().wait_at_barrier("fedbilevel/part", 1000 * PARTING_SECONDS)
    os._exit(code)


def _explain_abort() -> None:
    """Have the C library's abort() say `loss` and end with its exit code.

    When a process is lost, JAX's runtime ends the others from a thread of its own, with abort(), wherever they are. It
    has a callback for that, which cannot be a Python function in jaxlib 0.10 (std::bad_cast); Python's own signal
    handlers would run in the main thread, later than abort() allows. Hence a handler of the C library.
    """
    if os.name != "posix":
        return

    def end(number: int) -> None:
        if here.told:  # the main thread is saying it
            time.sleep(PARTING_SECONDS)
        else:
            here.told = True
            sentence = f"fedbilevel: {loss() if distributed.global_state.client else here.trouble}\n"
            os.write(2, sentence.encode())
        os._exit(LOST)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    handlers.append(handler)
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


handlers: list[Any] = []
"""The C library's handlers, kept from being collected."""


@contextmanager
def _interrupt_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process while JAX waits for others, which it does without looking at Python's signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def meet(mesh: Mesh) -> None:
    """Have all devices of a mesh connected, by a sum over them."""
    add = lambda: lax.psum(jnp.ones(()), mesh.axis_names)  # noqa: E731
    total = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(), out_specs=PartitionSpec()))
    with _silent(), exchange():
        total().block_until_ready()


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
