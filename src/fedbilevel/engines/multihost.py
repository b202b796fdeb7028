"""How the processes of one simulation, on one or more hosts, come together (`join`) and connect their devices, and how
a process ends with a sentence where it fails, or where JAX's runtime aborts it because another one was lost.
"""

from __future__ import annotations

import atexit
import ctypes
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from fedbilevel.core import interrupts
from fedbilevel.core.errors import ConfigurationError, require, require_count
from fedbilevel.engines.process_group import PARTING_SECONDS, KeyValueStore, LostProcess, ProcessGroup, current_group

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
    require(group.store is None, "join", "a second call", "called once")
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
    group.store, group.coordinator = KeyValueStore(state.client), str(state.coordinator_address)
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


def meet(group: ProcessGroup, mesh: Mesh) -> None:
    """Have all devices of a mesh connected, by a sum over them, once every process has come here.

    Gloo gives up after half a minute, and only the words of `gather` are waited for without end.

    Raises:
        ConfigurationError: the own name of some host is an address that the others cannot reach.
        LostProcess: they do not come together.
    """
    names = group.gather(own_name())
    if jax.default_backend() == "cpu":
        check_reachable(group.coordinator, names)
    add = lambda: lax.psum(jnp.ones(()), mesh.axis_names)  # noqa: E731
    total = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(), out_specs=PartitionSpec()))
    with (
        _silent(),
        group.meanwhile("the processes could not connect to each other, or a process was lost meanwhile"),
        group.exchange(),
    ):
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
            said = group.sentence(group.trouble or unknown) if group.store else group.trouble
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
