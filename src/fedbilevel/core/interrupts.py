"""The signals that end a run: SIGINT, which Ctrl-C sends, and SIGTERM, which Slurm and Kubernetes send."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from fedbilevel.core.errors import CheckpointWarning, warn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
received: list[int] = []
"""The signals for which `raised` has raised KeyboardInterrupt in this process."""


@contextmanager
def held() -> Iterator[list[int]]:
    """Hold back the first signal, for a run to be saved first; the list that is returned then has its number.

    A second signal acts at once. Signals that this process ignores stay ignored.
    """
    came = list(received)  # a library may have caught the KeyboardInterrupt of an earlier signal

    def note(number: int, frame: Any) -> None:
        came.append(number)
        restore()

    with handled_by(note) as restore:
        yield came


def end(came: list[int], words: str) -> NoReturn:
    """End the run as the first held signal would have ended it: SIGTERM by its handler, or with exit status 143.

    Raises:
        KeyboardInterrupt: the signal was SIGINT, or came to another process; its message is `words`.
        SystemExit: the signal was SIGTERM, and has no handler; `words` are a warning.
    """
    if came[:1] == [signal.SIGTERM]:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            warn(CheckpointWarning(words))
            raise SystemExit(128 + signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    raise KeyboardInterrupt(words)


@contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt for each signal, SIGTERM too, while the block runs."""
    received.clear()

    def note(number: int, frame: Any) -> None:
        received.append(number)
        raise KeyboardInterrupt

    printed, sys.unraisablehook = sys.unraisablehook, lambda lost: None if received else printed(lost)
    try:
        with handled_by(note):
            yield
    finally:
        sys.unraisablehook = printed
        received.clear()


@contextmanager
def unmixed() -> Iterator[None]:
    """Raise KeyboardInterrupt in place of an error that follows a signal.

    Libraries in whose code a KeyboardInterrupt arises may make an error of their own of it: NumPy an ImportError, XLA a
    JaxRuntimeError with hundreds of lines.
    """
    try:
        yield
    except Exception:
        if not received:
            raise
        raise KeyboardInterrupt from None


def exit_code() -> int:
    """Return the exit code of a process that a signal has ended, as shells have it: 128 and the signal's number."""
    return 128 + (received or [signal.SIGINT])[0]


@contextmanager
def handled_by(handler: Callable[[int, Any], None] | signal.Handlers) -> Iterator[Callable[[], None]]:
    """Have both signals handled so in this block, where they reach this thread and are not ignored.

    Yields:
        A function that restores the handlers of before, as the end of the block does.
    """
    main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in SIGNALS if main}
    before = {number: own for number, own in found.items() if own not in (None, signal.SIG_IGN)}

    def restore() -> None:
        for number, own in before.items():
            signal.signal(number, own)

    for number in before:
        signal.signal(number, handler)
    try:
        yield restore
    finally:
        restore()
