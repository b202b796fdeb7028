"""Handle the signals that end a run: SIGINT, which Ctrl-C sends, and SIGTERM, which Slurm and Kubernetes send."""

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
    """Hold back the first signal in the block, so that a run can be saved. Yield a list that gets the signal's number.

    A second signal acts at once. Signals that this process ignores stay ignored.
    """
    caught = list(received)  # a library may have caught the KeyboardInterrupt of an earlier signal

    def note(number: int, frame: Any) -> None:
        caught.append(number)
        restore()

    with handled_by(note) as restore:
        yield caught


def end(came: list[int], words: str) -> NoReturn:
    """End the run after signals that were held back, as the first of them would have ended it.

    SIGTERM is passed to its handler; without a handler, the exit status is 143.

    Args:
        came: the numbers of the signals that this process held back; empty if another process got the signal.
        words: the message about the end of the run.

    Raises:
        KeyboardInterrupt: the signal was SIGINT, or another process got it; the message is `words`.
        SystemExit: the signal was SIGTERM, for which there is no handler; `words` are issued as a warning.
    """
    if came[:1] == [signal.SIGTERM]:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            warn(CheckpointWarning(words))
            raise SystemExit(128 + signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    raise KeyboardInterrupt(words)


@contextmanager
def raised() -> Iterator[None]:
    """Raise KeyboardInterrupt for each signal in the block, for SIGINT and for SIGTERM."""
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

    A library in whose code a KeyboardInterrupt arises may turn it into another error: NumPy into an ImportError, XLA
    into a JaxRuntimeError with hundreds of lines.
    """
    try:
        yield
    except Exception:
        if not received:
            raise
        raise KeyboardInterrupt from None


def exit_code() -> int:
    """Return the exit code that a shell reports for a process ended by a signal: 128 plus the signal's number."""
    return 128 + (received or [signal.SIGINT])[0]


@contextmanager
def handled_by(handler: Callable[[int, Any], None] | signal.Handlers) -> Iterator[Callable[[], None]]:
    """Handle both signals by `handler` in this block, in the main thread, unless this process ignores them.

    Yields:
        A function that restores the previous handlers before the end of the block. The end of the block restores them
        anyway.
    """
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS if main}
    before = {number: previous for number, previous in handlers.items() if previous not in (None, signal.SIG_IGN)}

    def restore() -> None:
        for number, previous in before.items():
            signal.signal(number, previous)

    for number in before:
        signal.signal(number, handler)
    try:
        yield restore
    finally:
        restore()
