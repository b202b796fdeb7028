"""Does a lock name its holder, keep others out, and become free when its holder is gone?"""

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import pytest

import fedbilevel as fb
from fedbilevel.engines import lock
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed
from refusals import raises_with, warns_with

HOLD = """
import sys
from pathlib import Path
from fedbilevel.engines import lock
with lock.exclusive(Path(sys.argv[1]), Path("runs/one")):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(program, path):
    """Start another process that holds the lock, with this program, until it is killed."""
    command = [sys.executable, "-c", program, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def other(tmp_path):
    """Return a lock file, and another process that holds the lock until it is killed."""
    path = tmp_path / "deep" / ".lock"
    with holder(HOLD, path) as process:
        yield path, process


def test_the_holder_is_named_and_a_killed_one_holds_nobody_up(other):
    path, process = other
    with raises_with(fb.errors.InUse, path=Path("runs/two")) as error:
        lock.exclusive(path, Path("runs/two")).__enter__()
    assert error.value.holder.startswith(f"process {process.pid} on {socket.gethostname()}, since 20")
    process.kill()
    process.wait()
    assert path.exists()  # the killed process could not remove it
    with lock.exclusive(path, path.parent):
        assert path.read_text().startswith(f"process {os.getpid()} on ")
    assert not path.exists()


def test_folders_that_were_made_and_stayed_empty_go(tmp_path):
    with lock.exclusive(tmp_path / "a" / "b" / ".lock", tmp_path):
        assert (tmp_path / "a" / "b").is_dir()
    assert list(tmp_path.iterdir()) == []
    with lock.exclusive(tmp_path / "a" / "b" / ".lock", tmp_path):
        (tmp_path / "a" / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "file"]


def test_a_lock_that_its_holder_removes_meanwhile_is_not_taken_for_one(tmp_path, monkeypatch):
    """A lock file that its holder removes at this moment does not count as a lock.

    A process that opens the file before it is removed, and locks it afterwards, would hold a lock that no other process
    sees.
    """
    path, flock = tmp_path / ".lock", fcntl.flock
    calls = []

    def late(file, how):
        calls.append(how)
        if len(calls) == 1:
            path.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock.exclusive(path, tmp_path):
        assert path.read_text().startswith("process ")
        assert len(calls) == 2


def test_on_a_full_disk_the_folder_is_named(tmp_path, monkeypatch):
    """A file system without room for the lock's line raises an error that names what was to be written."""

    def full(descriptor, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    place, file = tmp_path / "run", tmp_path / "run" / ".lock"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        said = f"could not write {place}: No space left on device"
        with raises_with(fb.errors.CheckpointError, said, path=place, errno=errno.ENOSPC):
            lock.exclusive(file, place).__enter__()
    assert not file.exists()
    with lock.exclusive(file, place):
        assert file.read_text().startswith("process")


def test_where_nothing_can_be_locked_that_is_said(tmp_path, monkeypatch):
    def none(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    warning = warns_with(fb.errors.CheckpointWarning, os.strerror(errno.ENOLCK), path=tmp_path)
    with warning, lock.exclusive(tmp_path / ".lock", tmp_path):
        pass
    with raises_with(fb.errors.CheckpointError, path=tmp_path / "lock", errno=errno.ENOLCK):
        lock.wait_for_lock(tmp_path / "lock").__enter__()


def test_two_runs_do_not_write_one_checkpoint(tmp_path):
    task, path, refused = quadratic(clients=3, samples=(4, 4)), tmp_path / "run.npz", []

    def play(**options):
        algorithm = fixed(fb.SimFBO(local_steps=1, batch_size=None))
        given = algorithm, task.problem, task.clients, jnp.zeros(5), jnp.zeros(8)
        return fb.solve(*given, rounds=2, engine=fb.Reference(), checkpoint=path, **options)

    def second(result, row):
        with raises_with(fb.errors.InUse, f"process {os.getpid()} on ", path=path):
            play(resume=True)
        refused.append(result.round)

    play(callbacks=[second])
    assert refused[0] == 0
    assert play(resume=True).round == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.npz", "run.previous.npz"]


FORK = """
import os
import sys
import time
from pathlib import Path
from fedbilevel.engines import lock
with lock.exclusive(Path(sys.argv[1]), Path("runs/one")):
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"!")  # by now Python has closed what the child had in common with its parent
    if not child and sys.argv[2] == "unwinds":
        raise SystemExit(0)  # through the `with`, as the parent does
    elif not child:
        time.sleep(600)
    os.read(reader, 1)
    if sys.argv[2] == "unwinds":
        os.waitpid(child, 0)
    print(child, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def forked(tmp_path, request):
    """Return the lock file, and a process that holds its lock and has forked a child."""
    path = tmp_path / ".lock"
    command = [sys.executable, "-c", FORK, str(path), request.param]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child = int(process.stdout.readline())
    yield path, process
    if request.param == "sleeps":
        os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate()


@pytest.mark.parametrize("forked", ["sleeps"], indirect=True)
def test_a_child_that_was_forked_does_not_hold_it(forked):
    """After the parent was killed, the lock is free, although its forked child lives on."""
    path, process = forked
    with raises_with(fb.errors.InUse, f"process {process.pid} on ", path=path.parent):
        lock.exclusive(path, path.parent).__enter__()
    process.kill()
    process.wait()
    with lock.exclusive(path, path.parent):
        pass


@pytest.mark.parametrize("forked", ["unwinds"], indirect=True)
def test_a_child_that_was_forked_does_not_give_it_up(forked):
    path, process = forked
    with raises_with(fb.errors.InUse, f"process {process.pid} on ", path=path.parent):
        lock.exclusive(path, path.parent).__enter__()


def test_turns_are_taken(tmp_path):
    """Two threads take turns: each finds what the other one left.

    If both had a turn at once, only one of the two counts would remain.
    """
    count = tmp_path / "count"
    count.write_text("0")
    inside, seen = threading.Barrier(2), []

    def add():
        inside.wait()
        for _ in range(50):
            with lock.wait_for_lock(tmp_path / "lock"):
                before = int(count.read_text())
                count.write_text(str(before + 1))
                seen.append(before)

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == list(range(100))


WITHOUT_FLOCK = HOLD.replace("with lock", "lock.fcntl = None\nwith lock", 1)


@pytest.fixture
def without_flock(monkeypatch, tmp_path):
    """Return a lock file and its holder on a system without flock, such as Windows, in both processes."""
    monkeypatch.setattr(lock, "fcntl", None)
    path = tmp_path / "deep" / ".lock"
    with holder(WITHOUT_FLOCK, path) as process:
        yield path, process


def test_without_flock_filelock_lets_nobody_else_in(without_flock):
    path, process = without_flock
    assert lock.is_held(path)
    assert not lock.is_held(path.with_name(".another"))
    with raises_with(fb.errors.InUse, path=Path("runs/two"), holder=""):
        lock.exclusive(path, Path("runs/two")).__enter__()
    entered = threading.Event()

    def enter():
        with lock.wait_for_lock(path):
            entered.set()

    waiting = threading.Thread(target=enter, daemon=True)
    waiting.start()
    assert not entered.wait(0.3)
    process.kill()
    process.wait()
    assert entered.wait(60)
    waiting.join(60)
    with lock.exclusive(path, Path("runs/two")):
        pass


def test_without_flock_and_filelock_that_is_said_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    monkeypatch.setitem(sys.modules, "filelock", None)
    warning = warns_with(fb.errors.CheckpointWarning, "filelock", path=tmp_path)
    with warning, lock.exclusive(tmp_path / ".lock", tmp_path):
        pass
    with raises_with(fb.errors.CheckpointError, "filelock", path=tmp_path / "lock"):
        lock.wait_for_lock(tmp_path / "lock").__enter__()
