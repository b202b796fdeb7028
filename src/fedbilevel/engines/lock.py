"""One writer at a time: a file that the system has locked for a process as long as it lives, and that names it."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from fedbilevel.core.errors import CheckpointError, CheckpointWarning
from fedbilevel.engines import hosts

try:
    import fcntl
except ImportError:  # Windows: nothing is locked there
    fcntl = None  # type: ignore[assignment]


@contextmanager
def held(path: Path, what: Path) -> Iterator[None]:
    """Be alone in writing `what`, a file or folder, while the file `path` is locked by this process: by process 0 where
    there are several. Folders that are missing are made, and go at the end if nothing has come into them.

    The lock is the system's own (flock): that of a process that died holds nobody up.

    Raises:
        CheckpointError: somebody else writes there, and who; or the file cannot be made.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    mine: list[TextIO] = []
    hosts.decide(lambda: mine.extend(_taken(path, what)))
    try:
        yield
    finally:
        for file in mine:
            path.unlink(missing_ok=True)  # before it is unlocked: who waits then sees that it is gone
            file.close()
            with suppress(OSError):
                for folder in made:
                    folder.rmdir()


def _taken(path: Path, what: Path) -> list[TextIO]:
    """The open file that holds the lock; none where there are no locks."""
    if fcntl is None:
        return []
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(f"could not write {what}: {error.strerror or error}; nothing was changed") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                holder = file.read().strip() or "another process"
            raise CheckpointError(f"{what} is in use by {holder}; wait for it, or choose another place") from None
        except OSError as error:
            file.close()
            text = f"{what} cannot be locked ({error.strerror or error}): nothing keeps a second run from writing there"
            warnings.warn(CheckpointWarning(text), stacklevel=5)
            return []
        if _is_at(path, file):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            file.flush()
            return [file]
        file.close()  # its holder has removed it between the two


def _is_at(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
