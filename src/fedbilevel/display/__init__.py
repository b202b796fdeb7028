"""What people see of a run: displays of how far it is, and curves. A display is what `solve` takes as `progress`."""

from __future__ import annotations

import html
import importlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from fedbilevel.core.metrics import text

if TYPE_CHECKING:
    from rich.console import Console

LINE_INTERVAL = 5.0  # seconds between two lines that stay
WINDOW = 5.0  # seconds over which the speed is taken


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
    """The display for True, False or None; a display of one's own is taken as it is.

    In a notebook it is below the cell; on a terminal rich's bar. Nothing goes into pipes and files, not even by one
    stream, unless it is asked for.
    """
    if progress is not None and not isinstance(progress, bool):
        return progress
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if progress is not False and hasattr(shell, "kernel"):
        return Notebook(importlib.import_module("IPython.display").display)
    streams = (sys.stdout, sys.stderr)
    if progress is not False and all(one is not None and one.isatty() for one in streams) and _installed("rich"):
        from rich.console import Console

        return Bar(Console(file=sys.stderr, force_terminal=True))
    return Lines() if progress else Silent()


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


class Lines(Silent):
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


class Notebook(Silent):
    """A bar and a line below the cell of a notebook, in one place; how they stood last stays there.

    Args:
        display: IPython's function of that name.
    """

    heading = ""

    def __init__(self, display: Callable[..., Any]) -> None:
        self.display, self.shown = display, None
        self.speed, self.place, self.rounds = Speed(), (0, 1), ""

    def stage(self, name: str) -> None:
        self.speed.pause()
        self._show(name)

    def advance(self, round: int, rounds: int) -> None:
        self.speed.mark(round)
        self.place, self.rounds = (round, rounds), f"round {round:,}/{rounds:,}  {self.speed.text(rounds)}".rstrip()
        self._show(self.rounds)

    def close(self) -> None:
        if self.rounds:
            self._show(self.rounds)

    def _show(self, text: str) -> None:
        line, (done, whole) = self.heading + text, self.place
        told = f'<span style="white-space: pre">{html.escape(line)}</span>'
        drawn = {"text/plain": line, "text/html": f'<progress value="{done}" max="{whole}"></progress> {told}'}
        if self.shown is None:
            self.shown = self.display(drawn, raw=True, display_id=True)
        else:
            self.shown.update(drawn, raw=True)


class Bar:
    """rich's bar on a terminal: what is being done, how far it is, and below it numbers and speed.

    It vanishes when it is closed; what is printed meanwhile stands above it.
    """

    heading = ""

    def __init__(self, console: Console, unit: str = "rounds") -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
        from rich.table import Column
        from rich.text import Text

        def shown() -> Group:
            if since := self.since:
                name, began = since
                self.line.update(self.task, description=f"{name}, {self.speed.clock() - began:.0f} s")
            return Group(self.line.get_renderable(), Text(self.below, overflow="fold"))

        self.speed, self.below = Speed(unit), ""
        self.since: tuple[str, float] | None = None  # a stage, and when it began
        self.line = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", style="bold", table_column=Column(overflow="fold")),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[place]}", table_column=Column(overflow="fold")),
            expand=True,
        )
        self.task = self.line.add_task("", total=None, place="")
        self.live = Live(console=console, get_renderable=shown, transient=True, refresh_per_second=10)

    def stage(self, name: str) -> None:
        self.speed.pause()
        self.since = f"{self.heading}{name}", self.speed.clock()
        self.live.start()
        self.live.refresh()  # at once: what comes may leave no time to the thread that draws

    def advance(self, round: int, rounds: int) -> None:
        self.show(round, rounds)

    def show(self, done: float, whole: float, numbers: str = "") -> None:
        """So much is done of the whole, and what the run has found so far."""
        self.since = None
        self.speed.mark(done)
        self.live.start()
        self.below = f"  {numbers}  {self.speed.text(whole)}".rstrip()
        place = f"{done:,.0f}/{whole:,.0f} {self.speed.unit}"
        self.line.update(self.task, total=whole, completed=done, description=f"{self.heading}running", place=place)

    def close(self) -> None:
        self.live.stop()


UNITS = {"rounds": "rounds", "exchanges": "exchanges", "bytes": "bytes", "time": "s of the clock"}


class Watch:
    """Shows how far a run is, in what its budget counts, and what it has found: a bar, or lines where there is none.

    It is the run's display, which gets stages, and one of its callbacks, which get numbers.

    Args:
        console: where to; a bar if that is a terminal.
        metric: which is shown beside the objective.
        budget: what ends the run: the name of a cost, of those in UNITS, and how much of it.
        timed: whether the clock's time is shown, too.
    """

    def __init__(self, console: Console, metric: str, budget: tuple[str, float], timed: bool) -> None:
        self.console, self.metric, self.timed = console, metric, timed
        self.counted, self.whole = budget
        self.bar = Bar(console, UNITS[self.counted]) if console.is_terminal else None
        self.speed = self.bar.speed if self.bar else Speed(UNITS[self.counted])

    def stage(self, name: str) -> None:
        if self.bar:
            self.bar.stage(name)
        else:
            self.speed.pause()

    def advance(self, round: int, rounds: int) -> None:
        """The callback knows more."""

    def close(self) -> None:
        if self.bar:
            self.bar.close()

    def __call__(self, result: Any, row: Mapping[str, float] | None) -> None:
        ledger = result.ledger
        sent = ledger.bytes_down + ledger.bytes_up
        spent = {"rounds": result.round, "exchanges": ledger.exchanges, "bytes": sent, "time": ledger.time}
        if self.bar:
            self.bar.show(spent[self.counted], self.whole, self.numbers(result))
            return
        self.speed.mark(spent[self.counted])
        if row is not None and not self.console.quiet:
            place = {
                "rounds": f"/{self.whole:.0f}",
                "exchanges": f"  exchange {ledger.exchanges}/{self.whole:.0f}",
                "bytes": f"  sent {sent / 1e6:,.1f}/{self.whole / 1e6:,.6g} MB",
                "time": f"  clock {ledger.time:,.1f}/{self.whole:g} s",
            }
            parts = f"round {result.round}{place[self.counted]}", self.numbers(result), self.speed.text(self.whole)
            self.console.print("  ".join(filter(None, parts)), highlight=False, soft_wrap=True)

    def numbers(self, result: Any) -> str:
        """The objective and the first metric, as of the last row; the time, where it says more than the place does."""
        row = result.history.rows[-1] if result.history.rows else {}
        shown = [name for name in dict.fromkeys(("outer_loss", self.metric)) if name in row]
        clock = [f"clock {result.ledger.time:,.1f} s"] if self.timed and self.counted != "time" else []
        return "  ".join([*clock, *(f"{name} {text(name, row[name])}" for name in shown)])


class Speed:
    """How fast something grows, over the last few seconds, with what is no round left out."""

    def __init__(self, unit: str = "rounds", clock: Callable[[], float] = time.monotonic) -> None:
        self.unit, self.clock = unit, clock
        self.marks: list[tuple[float, float]] = []
        self.paused = False

    def pause(self) -> None:
        """What comes up to the next mark is not counted."""
        self.paused = True

    def mark(self, done: float) -> None:
        """So much is done now."""
        now = self.clock()
        self.marks = [] if self.paused else [mark for mark in self.marks if now - mark[0] < WINDOW] or self.marks[-1:]
        self.marks.append((now, done))
        self.paused = False

    def text(self, whole: float) -> str:
        """The speed, and how long it takes until `whole` is done, if it is not; "" as long as that is not known."""
        if not self.marks:
            return ""
        (then, before), (now, done) = self.marks[0], self.marks[-1]
        if done == before or now <= then:
            return ""
        rate = (done - before) / (now - then)
        shown = format(rate, ",.0f" if rate >= 100 else ".3g")
        left = f"  ETA {_clock_text((whole - done) / rate)}" if done < whole else ""
        return f"{shown} {self.unit}/s{left}"


def _clock_text(seconds: float) -> str:
    """Seconds as 1:23 or 4:05:06."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
