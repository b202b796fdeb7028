"""Where processes of one simulation meet: looking at an address before anything is spent on it."""

from __future__ import annotations

import ipaddress
import os
import socket
import time

from fedbilevel.core.errors import ConfigurationError, require, require_count

AUTO = "auto"


def check_place(coordinator: str, processes: int | None, process: int | None, patience: float) -> None:
    """Refuse what cannot work; process 0 makes sure that the port is free, the others that somebody answers there.

    Raises:
        ConfigurationError: no HOST:PORT, no such process, a port in use, a name that nobody knows, or nobody answers
            within `patience` seconds.
    """
    host, port = split(coordinator)
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


def split(coordinator: str) -> tuple[str, str]:
    """HOST and PORT."""
    host, _, port = coordinator.rpartition(":")
    return host.strip("[]"), port


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


def own_name() -> tuple[str, str]:
    """This host's name and the address that it resolves to; "" where it has none."""
    name = socket.gethostname()
    return name, _resolved(name)


def check_reachable(coordinator: str, names: list[list[str]]) -> None:
    """Refuse hosts whose own name is their loopback: there Gloo listens, and no other host can connect to it.

    Args:
        coordinator: HOST:PORT.
        names: what `own_name` says on each process.
    """
    apart = len({name for name, _ in names}) > 1 and not _is_loopback(_resolved(split(coordinator)[0]))
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
