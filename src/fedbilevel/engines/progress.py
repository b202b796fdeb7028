"""Report the progress of a run to a display: the current stage, rounds, their speed, and the time left.

`solve` opens a display with `showing`. Engines name stages that take long with `report_stage`. A slow display takes at
most a tenth of the run's time, and an error in a display does not end the run.
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

INTERVAL = 0.1  # seconds between two updates of the number of rounds
SHARE = 0.1  # the share of the run's time that a slow display may take

TRACING, COMPILING, AWAITING = "tracing", "compiling", "waiting for clients"
MEASURING, WRITING = "measuring a round", "writing"


_shown: ContextVar[Display | None] = ContextVar("shown", default=None)


def report_stage(name: str) -> None:
    """Show the name of the current stage, such as compiling, on the run's display, if there is one."""
    if (display := _shown.get()) is not None:
        display.stage(name)


@contextmanager
def showing(progress: bool | Display | None) -> Iterator[Guarded]:
    """Open a display for a run while the block runs; `progress` is the argument of `solve`.

    A display that an outer block has opened may be passed to an inner block, which leaves it open. A run inside another
    run shows nothing unless a display is passed to it. Of several processes, only the first shows anything.
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
    """Raise a ConfigurationError unless `showing` accepts the argument."""
    able = all(callable(getattr(progress, name, None)) for name in ("stage", "advance", "close"))
    allowed = "True, False, None, or an object with methods stage, advance and close"
    require(progress is None or isinstance(progress, bool) or able, "progress", progress, allowed)


class Guarded:
    """Pass progress on to a display: rounds at most ten times a second, and less often if the display is slow.

    A display that raises an error is not used any more, and a warning says so.
    """

    def __init__(self, display: Display, clock: Callable[[], float] = time.monotonic) -> None:
        self.display, self.clock = display, clock
        self.works, self.due = True, -float("inf")

    def begin(self, run: str) -> None:
        """Begin one of several runs. This library's displays always show the run's name; others show it as a stage."""
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
        self.works = True  # closing may have to restore a terminal
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
