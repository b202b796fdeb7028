"""Allow one writer at a time, by a lock file. The operating system locks the file as long as the writing process lives.

The file names the process. A forked child inherits the locks of its parent. If Python forks it (os.fork,
multiprocessing), the child closes the lock files at once, so that it neither holds a lock nor releases one. A child
that is started as a program inherits no locks. Only a library that forks without Python would leave a lock with its
child.

Windows has no flock. There the package filelock is used, whose lock files do not name the process.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from fedbilevel.core.errors import CheckpointError, CheckpointWarning, InUse, warn
from fedbilevel.core.writing import not_written
from fedbilevel.engines.process_group import ProcessGroup, current_group
from fedbilevel.wording import missing

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ELSEWHERE = "wait for it, or choose another place"
TAKEN: set[TextIO] = set()
"""The open files that this process has locked."""


@contextmanager
def exclusive(path: Path, what: Path, group: ProcessGroup | None = None) -> Iterator[None]:
    """Lock the file `path`, so that only this process writes `what`, a file or folder.

    If several processes run one simulation, process 0 locks the file for all of them.

    Missing folders are made, and removed at the end if they are empty. If the process dies, the operating system frees
    the lock.

    Raises:
        InUse: another process writes there; the message names it.
        CheckpointError: the file cannot be made.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    mine: list[Any] = []
    (group or current_group()).decide(lambda: mine.extend(_taken(path, what)))
    try:
        yield
    finally:
        for file in [file for file in mine if fcntl is None or not file.closed]:  # in a forked child it is closed
            if fcntl is not None:
                path.unlink(missing_ok=True)  # before unlocking, so that a waiting process sees that the file is gone
            _release(file)
            with suppress(OSError):
                for folder in made:
                    folder.rmdir()


@contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Wait until no other process has locked the file `path`, then lock it. A missing file is made; it is not removed.

    Raises:
        CheckpointError: the file cannot be locked.
    """
    mine: list[Any] = []
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fcntl is None:
                mine.append(_by_filelock(path, -1))
            else:
                mine.append(open(path, "a+", encoding="utf-8"))  # noqa: SIM115
                TAKEN.update(mine)
                fcntl.flock(mine[0], fcntl.LOCK_EX)
        except OSError as error:
            text = f"{path} cannot be locked ({error.strerror or error}): nothing was changed"
            raise CheckpointError(text, path=path, errno=error.errno) from error
        yield
    finally:
        for file in mine:
            _release(file)


def require_unheld(path: Path, what: Path) -> None:
    """Check that no process has locked the file `path`, which protects `what`.

    Raises:
        InUse: a process has locked it; the message names the process.
    """
    if fcntl is None or not path.is_file():
        return
    with open(path, encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(what, _holder(file)) from None
        except OSError:  # the file cannot be locked, so no process has locked it
            return


def is_held(path: Path) -> bool:
    """Return whether a process has locked the file `path`.

    Without flock, as on Windows, the lock counts as held as long as the file exists. So a killed process counts, too.
    """
    if fcntl is None:
        return path.is_file()
    try:
        require_unheld(path, path)
    except InUse:
        return True
    return False


def _in_use(what: Path, holder: str = "") -> InUse:
    """Return the error for a file or folder that a process uses; `holder` describes the process, if it is known."""
    error = InUse(f"{what} is in use by {holder or 'another process'}", path=what, remedy=ELSEWHERE)
    error.holder = holder
    return error


def _holder(file: TextIO) -> str:
    """Return what the process that has locked an open file has written into it."""
    file.seek(0)
    return file.read().strip()


def _by_filelock(path: Path, seconds: float) -> Any:
    """Lock a file with the package filelock, and wait for it at most `seconds`; -1: without a limit.

    Raises:
        OSError: the package is missing; or, as TimeoutError, another process has locked the file.
    """
    try:
        from filelock import FileLock
    except ImportError:
        raise OSError(f"this system has no flock; it needs {missing('filelock', 'cli')}") from None
    taken = FileLock(path)
    taken.acquire(timeout=seconds)
    return taken


def _release(file: Any) -> None:
    """Unlock and close a file, unless this is a forked child, which has already closed it."""
    if fcntl is None:
        file.release()
        return
    if not file.closed:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()
    TAKEN.discard(file)


def _let_go() -> None:
    """Close the lock files that a forked child has inherited; the parent's locks stay."""
    for file in TAKEN:
        file.close()
    TAKEN.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=_let_go)


def _taken(path: Path, what: Path) -> list[Any]:
    """Lock the file, and return it, open, in a list; return [], with a warning, if the file system has no locks."""
    if fcntl is None:
        return _taken_by_filelock(path, what)
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise not_written(what, error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise _in_use(what, _holder(file)) from None
        except OSError as error:
            file.close()
            warn(_unlocked(what, error))
            return []
        if _is_at(path, file):
            holder = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
            try:
                file.truncate(0)
                os.write(file.fileno(), holder.encode())
            except OSError as error:  # such as a full disk
                path.unlink(missing_ok=True)
                file.close()
                raise not_written(what, error) from error
            TAKEN.add(file)
            return [file]
        file.close()  # the process that held the lock removed the file after it was opened here


def _taken_by_filelock(path: Path, what: Path) -> list[Any]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return [_by_filelock(path, 0)]
    except TimeoutError:
        raise _in_use(what) from None
    except OSError as error:
        warn(_unlocked(what, error))
        return []


def _unlocked(what: Path, error: OSError) -> CheckpointWarning:
    why = error.strerror or error
    text = f"{what} cannot be locked ({why}): nothing prevents a second run from writing there"
    return CheckpointWarning(text, path=what)


def _is_at(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
