"""Telling people who wait how far a run is: what is being done, rounds, their speed, the time that is left.

`solve` opens a display with `showing`; wherever something takes long, engines say what it is with `report_stage`. What
a display does, or fails to do, never costs the run more than a tenth of its time.
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from fedbilevel.core.errors import require
from fedbilevel.engines.multihost import current_group
from fedbilevel.engines.speed import Speed

INTERVAL = 0.1  # seconds between two numbers of rounds that are shown
LINE_INTERVAL = 5.0  # the same where each is a line that stays
SHARE = 0.1  # of the run's time that a slow display may take

TRACING, COMPILING, AWAITING = "tracing", "compiling", "waiting for clients"
MEASURING, WRITING = "measuring a round", "writing"


class Display(Protocol):
    """Whom a run tells how far it is, from the thread of the run; what is raised here ends the display, not the run."""

    def stage(self, name: str) -> None:
        """The run is at a stage that is no round: "tracing", "compiling", "waiting for clients"."""
        ...

    def advance(self, round: int, rounds: int) -> None:
        """So many rounds are done, of so many in all."""
        ...

    def close(self) -> None:
        """The run is over, or has failed."""
        ...


_shown: ContextVar[Display | None] = ContextVar("shown", default=None)


def report_stage(name: str) -> None:
    """Say what is being done now, which is no round, to whom it may concern."""
    if (display := _shown.get()) is not None:
        display.stage(name)


@contextmanager
def showing(progress: bool | Display | None) -> Iterator[Guarded]:
    """The display of a run, as `solve` takes it, while the block runs.

    What such a block has opened may be handed to another one inside, which leaves it open. A run inside another, that
    was not handed its display, shows nothing by itself; nor does any but the first of several processes.
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


def chosen(progress: bool | Display | None) -> Display:
    """The display for True, False or None; a display of one's own is taken as it is."""
    if progress is False:
        return Silent()
    if progress is None or progress is True:
        return _notebook() or _terminal() or (Lines() if progress else Silent())
    return progress


def _notebook() -> Display | None:
    """tqdm's bar, in a notebook where tqdm is installed."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    tqdm = _installed("tqdm.auto") if hasattr(shell, "kernel") else None
    return None if tqdm is None else Notebook(tqdm.tqdm)


def _terminal() -> Display | None:
    """rich's bar, on a terminal where rich is installed; nothing goes into pipes and files, not even by one stream."""
    if not all(stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr)):
        return None
    if _installed("rich") is None:
        return None
    from fedbilevel.engines.bar import Bar, terminal

    return Bar(terminal(sys.stderr))


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class Silent:
    """Shows nothing."""

    def stage(self, name: str) -> None: ...

    def advance(self, round: int, rounds: int) -> None: ...

    def close(self) -> None: ...


class Guarded:
    """Passes on to a display what it can bear: rounds ten times a second at most, and more rarely where it is slow.

    A display that raises an error is left alone from then on, with a warning.
    """

    def __init__(self, display: Display, clock: Callable[[], float] = time.monotonic) -> None:
        self.display, self.clock = display, clock
        self.works, self.due = True, -float("inf")

    def begin(self, run: str) -> None:
        """One of several runs begins. The displays of this library go on to show its name; to others it is a stage."""
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
        """Call a method of the display; the seconds that it took."""
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


class Lines:
    """Plain lines on standard error, for log files: each stage, and the rounds every few seconds."""

    def __init__(self) -> None:
        self.speed, self.due = Speed(), 0.0

    def stage(self, name: str) -> None:
        self.speed.pause()
        print(f"fedbilevel: {name}", file=sys.stderr, flush=True)

    def advance(self, round: int, rounds: int) -> None:
        self.speed.mark(round)
        if time.monotonic() >= self.due or round >= rounds:
            parts = (f"fedbilevel: round {round}/{rounds}", self.speed.text(rounds))
            print("  ".join(filter(None, parts)), file=sys.stderr, flush=True)
            self.due = time.monotonic() + LINE_INTERVAL

    def close(self) -> None: ...


class Notebook:
    """tqdm's bar below the cell of a notebook."""

    heading = ""

    def __init__(self, tqdm: Callable[..., Any]) -> None:
        self.tqdm, self.bar, self.runs = tqdm, None, True

    def stage(self, name: str) -> None:
        self.runs = False
        self._bar().set_description(f"{self.heading}{name}")

    def advance(self, round: int, rounds: int) -> None:
        bar = self._bar()
        if not self.runs:
            self.runs = True
            bar.set_description(self.heading.removesuffix(": "), refresh=False)
            bar.unpause()  # what was no round is not part of the speed
        bar.total = rounds
        bar.update(round - bar.n)
        bar.refresh()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def _bar(self) -> Any:
        if self.bar is None:
            self.bar = self.tqdm(unit="round")
        return self.bar
