"""Telling people who wait how far a run is: what is being done, rounds, their speed, the time that is left.

`solve` opens a display with `showing`; wherever something takes long, engines say what it is with `report_stage`. What
a display does, or fails to do, never costs the run more than a tenth of its time.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fedbilevel.core.errors import require
from fedbilevel.display import Display, Silent, chosen
from fedbilevel.engines.process_group import current_group

INTERVAL = 0.1  # seconds between two numbers of rounds that are shown
SHARE = 0.1  # of the run's time that a slow display may take

TRACING, COMPILING, AWAITING = "tracing", "compiling", "waiting for clients"
MEASURING, WRITING = "measuring a round", "writing"


_shown: ContextVar[Display | None] = ContextVar("shown", default=None)


def report_stage(name: str) -> None:
    """Show what is being done now, between rounds, on the display of the run, if there is one."""
    if (display := _shown.get()) is not None:
        display.stage(name)


@contextmanager
def showing(progress: bool | Display | None) -> Iterator[Guarded]:
    """Open the display of a run, as `solve` takes it, while the block runs.

    A display that such a block has opened may be handed to a block inside, which leaves it open. A run inside another
    run, if it was not handed a display, shows nothing by itself; nor does any but the first of several processes.
    """
    handed = isinstance(progress, Guarded)
    require_progress(progress)
    inside = progress is None and _shown.get() is not None
    quiet = inside or not current_group().is_first
    display = progress if isinstance(progress, Guarded) else Guarded(Silent() if quiet else chosen(progress))
    token = _shown.set(display)
    try:
        yield display
    finally:
        _shown.reset(token)
        if not handed:
            display.close()


def require_progress(progress: object) -> None:
    """Refuse what `showing` cannot take."""
    able = all(callable(getattr(progress, name, None)) for name in ("stage", "advance", "close"))
    allowed = "True, False, None, or an object with methods stage, advance and close"
    require(progress is None or isinstance(progress, bool) or able, "progress", progress, allowed)


class Guarded:
    """Passes on to a display what it can bear: rounds ten times a second at most, and more rarely where it is slow.

    A display that raises an error is left alone from then on, with a warning.
    """

    def __init__(self, display: Display, clock: Callable[[], float] = time.monotonic) -> None:
        self.display, self.clock = display, clock
        self.works, self.due = True, -float("inf")

    def begin(self, run: str) -> None:
        """Begin one of several runs. The displays of this library go on to show its name; to others it is a stage."""
        if isinstance(getattr(self.display, "heading", None), str):
            self._tell(setattr, self.display, "heading", f"{run}: ")
        else:
            self.stage(run)

    def stage(self, name: str) -> None:
        self._tell(self.display.stage, name)

    def advance(self, round: int, rounds: int) -> None:
        if self.clock() >= self.due or round >= rounds:
            took = self._tell(self.display.advance, round, rounds)
            self.due = self.clock() + max(INTERVAL, took / SHARE)

    def close(self) -> None:
        self.works = True  # it may have a terminal to put in order
        self._tell(self.display.close)
        self.works = False

    def _tell(self, method: Callable[..., None], *arguments: Any) -> float:
        """Call a method of the display, and return the seconds that it took."""
        if not self.works:
            return 0.0
        began = self.clock()
        try:
            method(*arguments)
        except Exception as error:  # noqa: BLE001 - a display may be anybody's
            self.works = False
            text = f"progress is not shown any more: {type(error).__name__}: {error}"
            warnings.warn(text, stacklevel=4)
        return self.clock() - began
