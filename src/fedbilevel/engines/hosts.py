"""Several processes, on one or more hosts, in one simulation: joining them, and what they say to each other.

Sums over clients go through XLA's collectives. All else (whose spec, how many rounds next, has anybody pressed Ctrl-C,
a checkpoint's bytes) goes through the key-value store of JAX's coordination service, which process 0 hosts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from fedbilevel.core.errors import (
    CheckpointError,
    ConfigurationError,
    FedbilevelError,
    NonFiniteError,
    NumericalError,
    require,
)
from fedbilevel.engines.addresses import AUTO, check_place, check_reachable, own_name
from fedbilevel.engines.leaving import (
    LostProcess,
    exchange,
    explain_abort,
    leave_when_failing,
    lost,
    meanwhile,
    sentence,
    who_left,
)
from fedbilevel.engines.leaving import here as here

HEARTBEAT_SECONDS = 10  # without a sign of life after which JAX takes a process for lost
LISTEN_MILLISECONDS = 2000  # between two looks at Ctrl-C while waiting for another process
END_SECONDS = 60  # that a process at its end waits for the others to come to theirs
WORD_SECONDS = 2  # of waiting for the others to come, before it says so
TOPOLOGY_MINUTES = 24 * 60  # JAX's deadlines for the first use of a device, which one may come to after a long download
PIECE = 2**20  # bytes of a message in one entry of the store; gRPC carries at most 4 MiB
KINDS = {kind.__name__: kind for kind in (CheckpointError, NonFiniteError, NumericalError)}
"""Errors of process 0 that are of the same kind on the others; the rest are ConfigurationErrors there."""


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
        ConfigurationError: an argument is not allowed, JAX is already in use, nobody answers, or the processes have
            different versions.

    From then on an error that nobody catches ends this process at once (`sys.excepthook` is extended; functions
    registered with `atexit` are not called), and the others are told. A process that is lost ends the others with exit
    code 5 and a sentence that says so.
    """
    require(here.service is None, "join", "a second call", "called once")
    require(patience >= 1, "patience", patience, "at least 1 second")
    auto = coordinator == AUTO
    if auto:
        given = [name for name, value in (("processes", processes), ("process", process)) if value is not None]
        require(not given, " and ".join(given), "a number", f"left out with coordinator = {AUTO!r}")
    others = f"the {processes or 'other'} processes"
    with _patiently(f"waiting up to {patience:.0f} s for {others} to come to {coordinator}"):
        if not auto:
            check_place(coordinator, processes, process, patience)
        undo = explain_abort()
        try:
            with meanwhile(f"{others} did not all come to {coordinator} within {patience:.0f} s"), _interrupt_at_once():
                _initialize(coordinator, processes, process, int(patience))
        except ConfigurationError:
            undo()
            raise
    leave_when_failing()
    require_same({"processes": count()} | {name: version(name) for name in ("fedbilevel", "jax", "jaxlib")})


def _initialize(coordinator: str, processes: int | None, process: int | None, patience: int) -> None:
    from jax._src import distributed  # the one way to the store; jax.distributed itself only starts and ends it

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
    here.service, here.coordinator = state.client, str(state.coordinator_address)
    here.processes, here.process = int(state.num_processes), int(state.process_id)


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


def count() -> int:
    """How many processes there are: 1 without `join`."""
    return here.processes


def index() -> int:
    """The number of this process."""
    return here.process


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
        here.service.key_value_delete(key)
    return words


def first(word: Any) -> Any:
    """What process 0 says, in JSON; the others' words do not count."""
    return json.loads(_first(json.dumps(word).encode()))


def decide(choose: Callable[[], Any]) -> Any:
    """The value (JSON) of a function that process 0 alone calls; its error is everybody's error."""
    if count() == 1:
        return choose()
    value, kind, said = None, "", ""
    if is_first():
        try:
            value = choose()
        except Exception as error:
            kind, said = type(error).__name__, str(error)
            own = isinstance(error, FedbilevelError | OSError)
            first([None, kind, said if own and said else f"{kind}: {said}"])
            raise
    value, kind, said = first([value, kind, said])
    if kind:
        raise KINDS.get(kind, ConfigurationError)(f"process 0: {said}")
    return value


def require_same(fields: dict[str, Any]) -> None:
    """Refuse values (JSON, by name) that are not the same on every process."""
    words = gather(fields)
    for process, theirs in enumerate(words):
        for name in sorted(words[0].keys() | theirs.keys()):
            of_first, other = words[0].get(name), theirs.get(name)
            if of_first != other:
                said = f"{name} differs between processes: {of_first} on process 0, {other} on process {process}"
                raise ConfigurationError(f"{said}; it must be the same")


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
            here.service.key_value_set_bytes(f"{key}/{number}", len(pieces).to_bytes(4) + piece)
    here.mine.append(key)


def _hear(process: int) -> bytes:
    """Wait for that process's message."""
    key, content, total, number = f"fedbilevel/{here.messages}/{process}", b"", 1, 0
    while number < total:
        piece = _wait_for(f"{key}/{number}", process)
        total, content, number = int.from_bytes(piece[:4]), content + piece[4:], number + 1
    return content


def _wait_for(key: str, process: int) -> bytes:
    whom = "" if count() == 2 else f" while waiting for process {process}"
    gone = ""
    with meanwhile(f"{lost()}{whom}"):
        while True:
            try:
                with exchange():
                    return bytes(here.service.blocking_key_value_get_bytes(key, LISTEN_MILLISECONDS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if gone:  # and had said nothing before it left
                raise LostProcess(sentence(gone))
            gone = who_left()


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
    """Have all devices of a mesh connected, by a sum over them, once every process has come here.

    Gloo gives up after half a minute, and only the words of `gather` are waited for without end.

    Raises:
        ConfigurationError: the own name of some host is an address that the others cannot reach.
        LostProcess: they do not come together.
    """
    names = gather(own_name())
    if jax.default_backend() == "cpu":
        check_reachable(here.coordinator, names)
    add = lambda: lax.psum(jnp.ones(()), mesh.axis_names)  # noqa: E731
    total = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(), out_specs=PartitionSpec()))
    with _silent(), meanwhile("the processes could not connect to each other, or one was lost meanwhile"), exchange():
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
