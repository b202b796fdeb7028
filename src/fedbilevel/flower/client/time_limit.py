"""A client's phases in a worker thread, given up when they overrun a time limit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from fedbilevel.flower.wire.layout import Refusal

T = TypeVar("T")
Tasks = SimpleQueue[Callable[[], None] | None]
"""Tasks of a thread, in order; None ends it."""


class TimeLimit:
    """Runs one task at a time in a worker thread, and waits for it at most `seconds`.

    One daemon thread serves all tasks: it starts with the first one and ends with this object. A task that overran
    cannot be stopped. Its thread ends with it, and the next task gets a new one.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.thread: threading.Thread | None = None
        self.tasks: Tasks | None = None  # of a thread that takes further tasks
        self.done = threading.Event()  # the latest task has ended
        self.done.set()

    def run(self, task: Callable[[], T]) -> T:
        """What `task` returns or raises.

        Raises:
            Refusal: the task overran the limit, or an earlier one that did still runs.
        """
        if not self.done.is_set() and self.thread is not None and self.thread.is_alive():
            raise Refusal(f"a phase that was given up after {self.seconds:g} s still runs here")
        self.done = done = threading.Event()
        outcome: list[T | BaseException] = []

        def run() -> None:
            try:
                outcome.append(task())
            except BaseException as error:  # noqa: BLE001  handed on to the caller's thread
                outcome.append(error)
            finally:
                done.set()

        tasks = self.started()
        tasks.put(run)
        if not done.wait(self.seconds):
            tasks.put(None)
            self.tasks = None
            raise Refusal(f"the phase takes longer than this client's limit of {self.seconds:g} s")
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        return outcome[0]

    def started(self) -> Tasks:
        """The tasks of a running thread, which is started if there is none (in a forked process there is none)."""
        if self.tasks is None or self.thread is None or not self.thread.is_alive():
            self.tasks = SimpleQueue()
            self.thread = threading.Thread(target=serve, args=(self.tasks,), name="fedbilevel-phase", daemon=True)
            self.thread.start()
            weakref.finalize(self, self.tasks.put, None).atexit = False
        return self.tasks


def serve(tasks: Tasks) -> None:
    """Run tasks until None comes; nothing of a task is kept while the next one is awaited."""
    while (task := tasks.get()) is not None:
        task()
        del task
