"""Join several processes, on one or more hosts, to one simulation, and connect their devices.

If a process fails, or JAX's runtime aborts it because another process was lost, it prints an explanation at its end.
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

HEARTBEAT_SECONDS = 10  # JAX considers a process lost after this time without a heartbeat
END_SECONDS = 60  # how long a process at its end waits for the others to end
WORD_SECONDS = 2  # how long a process waits for the others before it prints that it waits
TOPOLOGY_MINUTES = 24 * 60  # JAX's deadline for the first use of a device, which may follow a long download
AUTO = "auto"
LOST = 5  # the exit code of a process that ends because another process was lost


def join(
    coordinator: str, processes: int | None = None, process: int | None = None, *, patience: float = 300.0
) -> ProcessGroup:
    """Make this process a member of a group that runs one simulation together. Call it before JAX computes anything.

    After this call, an uncaught exception ends this process at once (`sys.excepthook` is extended; functions
    registered with `atexit` are not called), and the other processes are notified. If a process is lost, the others
    end with exit code 5 and a message that says so.

    Args:
        coordinator: HOST:PORT at which process 0 listens, the same on every process; or "auto": all three arguments
            come from the environment of a launcher that JAX knows (Slurm, Open MPI, Kubernetes, Cloud TPU).
        processes: the number of processes.
        process: the number of this process, 0 … processes − 1.
        patience: the number of seconds to wait for the other processes.

    Returns:
        The group of these processes, which `current_group` also returns from now on.

    Raises:
        ConfigurationError: an argument is not allowed, JAX is already in use, no process answers at the coordinator's
            address, or the processes have different versions.
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
                interrupts.handled_by(signal.SIG_DFL),  # while JAX waits, Python's handlers are not called
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
    from jax._src import distributed  # the public jax.distributed only starts and ends the store, and cannot access it

    auto = coordinator == AUTO
    jax.config.update("jax_enable_preemption_service", False)  # this service would catch SIGTERM
    try:
        for which in ("local", "global"):
            jax.config.update(f"jax_cpu_get_{which}_topology_timeout_minutes", TOPOLOGY_MINUTES)
    except RuntimeError as error:
        message = "join must be called before JAX computes anything or looks at its devices"
        raise ConfigurationError(path="join", got="after JAX", allowed="before JAX", message=message) from error
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
    except Exception as error:  # a launcher's package, such as that of Kubernetes, has exceptions of its own
        if not auto and not isinstance(error, RuntimeError | ValueError):
            raise
        reason = without_launcher() if auto and "be defined" in str(error) else f"{error}".partition("\n")[0]
        raise ConfigurationError(f"coordinator = {coordinator!r}: {reason}") from error
    state = distributed.global_state
    group.store, group.coordinator = KeyValueStore(state.client), str(state.coordinator_address)
    group.processes, group.process = int(state.num_processes), int(state.process_id)


SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""The variables of Slurm that JAX reads. Only `srun` sets all of them."""


def without_launcher() -> str:
    """Return why JAX found no launcher: there is none, or `srun` did not start this process of a Slurm job.

    A process that `ssh` or a batch script starts on a node of a job has only some of Slurm's variables.
    """
    missing = ", ".join(name for name in SLURM if name not in os.environ)
    remedy = "give HOST:PORT, processes and process"
    if SLURM[0] not in os.environ:
        return f"no launcher that JAX knows was found; {remedy}"
    return f"srun did not start this process of the Slurm job ({missing} not set): start it with srun, or {remedy}"


def check_place(coordinator: str, processes: int | None, process: int | None, patience: float) -> None:
    """Check the arguments of `join`: process 0 checks that the port is free, and the others that process 0 answers.

    Raises:
        ConfigurationError: `coordinator` is not HOST:PORT, there is no process of that number, the port is in use, the
            host's name is unknown, or there is no answer within `patience` seconds.
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
        allowed = f"an address at which process 0 can listen: {error}"
        raise ConfigurationError(path="coordinator", got=coordinator, allowed=allowed) from error


def _await_answer(coordinator: str, address: tuple[str, int], patience: float) -> None:
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection(address, timeout=2).close()
            return
        except socket.gaierror as error:
            allowed = f"the address of a known machine: {address[0]}: {error.strerror}"
            raise ConfigurationError(path="coordinator", got=coordinator, allowed=allowed) from error
        except OSError as error:
            if time.monotonic() > end:
                allowed = f"an address that answers in {patience:.0f} s: {error}; is process 0 running?"
                raise ConfigurationError(path="coordinator", got=coordinator, allowed=allowed) from error
        time.sleep(0.2)


@contextmanager
def _patiently(sentence: str) -> Iterator[None]:
    """Print what the process is waiting for, if the block takes more than WORD_SECONDS."""
    timer = threading.Timer(WORD_SECONDS, print, [f"fedbilevel: {sentence}"], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def meet(group: ProcessGroup, mesh: Mesh) -> None:
    """Connect all devices of a mesh by computing a sum over them; every process has to call this function.

    The processes first wait for each other with `gather`, which has no time limit, because Gloo gives up after half a
    minute.

    Raises:
        ConfigurationError: the name of some host resolves to an address that the others cannot reach.
        LostProcess: the devices cannot be connected.
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
    """Suppress what C++ code writes to standard output in the block, such as Gloo's messages when it connects."""
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
    """Split HOST:PORT into (host, port)."""
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), port


def own_name() -> tuple[str, str]:
    """Return this host's name and the address that it resolves to; the address is "" if it does not resolve."""
    name = socket.gethostname()
    return name, _resolved(name)


def check_reachable(coordinator: str, names: list[list[str]]) -> None:
    """Reject hosts whose name resolves to a loopback address: Gloo listens there, where no other host can connect.

    Args:
        coordinator: HOST:PORT.
        names: the value of `own_name` on each process.

    Raises:
        ConfigurationError: the name of a host resolves to a loopback address, and there are several hosts.
    """
    apart = len({name for name, _ in names}) > 1 and not _is_loopback(_resolved(host_and_port(coordinator)[0]))
    for process, (name, address) in enumerate(names):
        if apart and _is_loopback(address):
            message = (
                f"the host of process {process} takes its own name, {name!r}, for {address}, where no other host can "
                f"reach it; see `getent hosts $(hostname)` there, and give the name its real address in /etc/hosts"
            )
            path, allowed = f"address of {name!r} on the host of process {process}", "the real address of this host"
            raise ConfigurationError(path=path, got=address, allowed=allowed, message=message)


def _resolved(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback


def explain_abort(group: ProcessGroup) -> Callable[[], None]:
    """Make abort() of the C library print why this process ends. Return a function that undoes this.

    abort() then prints the explanation that `group` has, and ends the process with the code LOST. If the process has
    already noted its own exit code (`group.ending`), abort() ends it with this code and prints nothing.

    When a process is lost, JAX's runtime calls abort() in one of the threads of every other process. JAX has a callback
    for this case, but in jaxlib 0.10 the callback cannot be a Python function (std::bad_cast). Python's signal handlers
    would run in the main thread, which is too late. Therefore a signal handler of the C library is set.
    """
    if os.name != "posix":
        return lambda: None

    def end(number: int) -> None:
        if group.ending is not None:  # do not wait here: anything to wait for would have to come through this thread
            os._exit(group.ending)
        if group.reported:  # the main thread prints the message
            time.sleep(PARTING_SECONDS)
        else:
            group.reported = True
            unknown = f"ended by JAX's runtime or crashed; most likely {group.lost()}"
            said = group.saved.after(group.trouble or unknown) if group.store else group.trouble
            os.write(2, f"fedbilevel: {said}\n".encode())
        os._exit(LOST)

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    handlers.append(handler)
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = library.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
    return lambda: library.signal(signal.SIGABRT, before) and None


handlers: list[Any] = []
"""Handlers that were passed to the C library; the list keeps them from being garbage-collected."""


def leave_when_failing(group: ProcessGroup) -> None:
    """Make an uncaught exception end this process at once: JAX's shutdown would wait for the other processes."""
    before = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        codes = {LostProcess: LOST, KeyboardInterrupt: interrupts.exit_code()}
        code = next((code for of, code in codes.items() if isinstance(error, of)), 1)
        group.part(code, f"{kind.__name__}: {error}")

    sys.excepthook = leave
    atexit.register(group.end)  # runs before JAX's function, which waits
