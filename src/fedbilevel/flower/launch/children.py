"""Start child processes that end when their parent ends, even if the parent is killed.

`python -m fedbilevel.flower.launch.children PARENT COMMAND …` becomes the process COMMAND. Before this, it asks the
kernel to send it a SIGTERM when the parent ends, even by kill -9. It uses PR_SET_PDEATHSIG of prctl(2), which only
Linux has. On other systems, a child continues after its parent was killed with -9. For Linux, the parent is a thread:
start a child from a thread that lives at least as long as the child should.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
GRACE = 10.0  # the seconds between SIGTERM and SIGKILL


def spawn(command: Sequence[str], log: Path | None = None, env: Mapping[str, str] | None = None, group: bool = True):  # type: ignore[no-untyped-def]
    """Start a command as a child process that ends with this process.

    Args:
        command: the command and its arguments.
        log: the file to which the child's output is appended; None: the child prints to the output of this process.
        env: the environment of the child; None: the environment of this process.
        group: whether the child leads a process group of its own. Ctrl-C does not reach this group, and `stop` ends it
            as a whole.
    """
    launcher = [sys.executable, "-m", __spec__.name]
    with open(log, "ab") if log else contextlib.nullcontext() as output:
        return subprocess.Popen(
            [*launcher, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if log else None,
            env=None if env is None else dict(env),
            start_new_session=group,
        )


def signal_group(child: subprocess.Popen, number: int) -> None:
    """Send a signal to the child's process group, unless all its processes have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def identity(pid: int) -> tuple[int, int] | None:
    """Return a running process's parent id and start time in clock ticks; None if it has ended, or without /proc.

    The start time distinguishes the process from a later process with the same id.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def family(pid: int) -> dict[int, int]:
    """Return id -> start time, for a process and all its descendants; empty without /proc."""
    known = {int(entry.name): identity(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    found = {pid: known[pid][1]} if known.get(pid) else {}  # type: ignore[index]
    before = -1
    while len(found) > before:
        before = len(found)
        found |= {p: it[1] for p, it in known.items() if it and it[0] in found}
    return found


def living(members: Mapping[int, int]) -> list[int]:
    """Return the ids of those `members` (id -> start time) that have not ended."""
    return [pid for pid, start in members.items() if (now := identity(pid)) and now[1] == start]


def stop(children: Iterable[subprocess.Popen], grace: float = GRACE) -> None:
    """End children that lead process groups, and all their descendants, and wait until all have ended.

    The groups get SIGTERM, and after `grace` seconds SIGKILL. Flower starts some processes in sessions of their own,
    which a signal to the group does not reach; these get SIGKILL directly.
    """
    children = list(children)
    members = {pid: start for child in children for pid, start in family(child.pid).items()}
    if grace > 0:
        for child in children:
            signal_group(child, signal.SIGTERM)
    await_end(children, members, grace)
    for child in children:
        signal_group(child, signal.SIGKILL)
    for pid in living(members):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for child in children:
        child.wait()
    await_end(children, members, grace=GRACE)


def await_end(children: Iterable[subprocess.Popen], members: Mapping[int, int], grace: float) -> None:
    """Wait until `children` and the processes `members` (id -> start time) have ended, at most `grace` seconds."""
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and (living(members) or any(child.poll() is None for child in children)):
        time.sleep(0.02)


def become(parent: int, command: list[str]) -> None:
    """Replace this process by `command`, and make it end when the process `parent` ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the call of prctl
            sys.exit("the process that started this process has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
