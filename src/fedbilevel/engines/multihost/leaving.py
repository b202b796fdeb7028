"""How a process of a group ends: after an error, or aborted by JAX's runtime since another one was lost."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from fedbilevel.engines.multihost.group import PARTING_SECONDS, LostProcess, ProcessGroup

LOST = 5  # exit code
INTERRUPTED = 130  # exit code


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
        code = LOST if isinstance(error, LostProcess) else INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        group.part(code, f"{kind.__name__}: {error}")

    sys.excepthook = leave
    atexit.register(group.end)  # before JAX's own, which waits
