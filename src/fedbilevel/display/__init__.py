"""What people see of a run: displays of how far it is, bars, curves. A display is what `solve` takes as `progress`."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from fedbilevel.display.speed import Speed

LINE_INTERVAL = 5.0  # seconds between two lines that stay


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
    from fedbilevel.display.bar import Bar, terminal

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
