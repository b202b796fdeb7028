"""How a process leaves a simulation by several, and what it says when another one has."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

import jax

from fedbilevel.core.errors import ExchangeError

PARTING_SECONDS = 5  # in which an error that all processes have comes up in all of them
LEFT = "fedbilevel/left"  # keys of the notes of those that have ended
LOST = 5  # exit code
INTERRUPTED = 130  # exit code
LONGEST = 10_000  # characters of a note


class LostProcess(ExchangeError):
    """Another process of the simulation has ended, or cannot be reached any more."""


@dataclass
class Here:
    """What this process knows about itself and the others."""

    service: Any = None  # JAX's client of the store, once `join` has been called
    processes: int = 1
    process: int = 0
    trouble: str = ""  # what it means, at this moment, if JAX's runtime ends this process
    coordinator: str = ""  # HOST:PORT
    saved: str = ""  # where this run's last checkpoint is
    advice: str = ""  # how to go on from it
    told: bool = False  # that a process was lost
    ending: int | None = None  # exit code of a process that has said why it ends
    messages: int = 0  # so far; all processes count alike, since all make the same calls
    mine: list[str] = field(default_factory=list)  # keys of messages that others may not have read yet


here = Here()


@contextmanager
def meanwhile(trouble: str) -> Iterator[None]:
    """What it means if JAX's runtime ends this process here."""
    here.trouble = trouble
    try:
        yield
    finally:
        here.trouble = ""


@contextmanager
def exchange() -> Iterator[None]:
    """Turn what XLA and JAX's service raise when another process is gone into `LostProcess`."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        gone = any(word in str(error) for word in ("Gloo", "NCCL", "UNAVAILABLE"))
        if here.processes == 1 or not gone:
            raise
        here.told = True
        raise LostProcess(sentence(here.trouble or lost())) from error


def lost() -> str:
    """That another process was lost, and which one."""
    other = f"process {1 - here.process}" if here.processes == 2 else "another process"
    return f"{other} was lost (killed, crashed or cut off)"


def sentence(what: str) -> str:
    """What has happened, what stays, and how to go on."""
    if not here.saved:
        return f"{what}; no checkpoint had been written"
    advice = f"; {here.advice}" if here.advice else ""
    return f"{what}; the last checkpoint is {here.saved}, of process 0{advice}"


def part(code: int, why: str) -> NoReturn:
    """End this process after an error: with the others if it is theirs too, else alone, and they will be told."""
    alone, here.told = here.told, True
    sys.stdout.flush()
    sys.stderr.flush()
    here.ending = code
    if not alone:
        _take_leave(why)
        with suppress(jax.errors.JaxRuntimeError):  # jax.distributed.shutdown would wait for a minute
            here.service.wait_at_barrier("fedbilevel/part", 1000 * PARTING_SECONDS)
    os._exit(code)


def explain_abort() -> Callable[[], None]:
    """Have the C library's abort() say `sentence` and end with its exit code; a function that undoes it.

    When a process is lost, JAX's runtime ends the others from a thread of its own, with abort(), wherever they are. It
    has a callback for that, which cannot be a Python function in jaxlib 0.10 (std::bad_cast); Python's own signal
    handlers would run in the main thread, later than abort() allows. Hence a handler of the C library.
    """
    if os.name != "posix":
        return lambda: None

    def end(number: int) -> None:
        if here.ending is not None:  # what it still waits for would come through this very thread
            os._exit(here.ending)
        if here.told:  # the main thread is saying it
            time.sleep(PARTING_SECONDS)
        else:
            here.told = True
            unknown = f"ended by JAX's runtime or crashed; most likely {lost()}"
            said = sentence(here.trouble or unknown) if here.service else here.trouble
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


def leave_when_failing() -> None:
    """Have an error that nobody catches end this process: JAX's own end would wait for the others first."""
    before = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        code = LOST if isinstance(error, LostProcess) else INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        part(code, f"{kind.__name__}: {error}")

    sys.excepthook = leave
    atexit.register(_end)  # before JAX's own, which waits


def _end() -> None:
    here.trouble = "this process had come to its end, and the others had not"
    _take_leave("")


def _take_leave(why: str) -> None:
    """Leave a note for those who will wait for this process."""
    with suppress(jax.errors.JaxRuntimeError):
        here.service.key_value_set(f"{LEFT}/{here.process}", why[:LONGEST])


def who_left() -> str:
    """Who has left a note, and why; nothing if nobody has."""
    with exchange():
        notes = here.service.key_value_dir_get(LEFT)
    for key, why in notes:
        who = f"process {key.rpartition('/')[2]} has ended"
        return f"{who} with {why}" if why else f"{who} before the others"
    return ""
