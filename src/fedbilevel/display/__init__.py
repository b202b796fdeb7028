"""Show the progress of a run as a bar, as lines or in a notebook.

`solve` takes a display as its argument `progress`.
"""

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

LINE_INTERVAL = 5.0  # the number of seconds between two printed lines
WINDOW = 5.0  # the number of last seconds over which the speed is measured


class Display(Protocol):
    """A display of a run's progress. The run calls the display's methods in its own thread.

    An exception in a method ends the display and not the run.
    """

    def stage(self, name: str) -> None:
        """Show a stage outside rounds: "tracing", "compiling" or "waiting for clients"."""
        ...

    def advance(self, round: int, rounds: int) -> None:
        """Show that `round` of `rounds` rounds are done."""
        ...

    def close(self) -> None:
        """Remove the display at the end of the run, even if the run failed."""
        ...


def chosen(progress: bool | Display | None) -> Display:
    """Return the display for the argument `progress` of `solve`.

    A `Display` is returned as it is. False: nothing is shown. Otherwise, a notebook shows a bar below the cell, and a
    terminal shows a bar by rich, if it is installed. If standard output or standard error is not a terminal, None shows
    nothing, and True prints lines.
    """
    if progress is not None and not isinstance(progress, bool):
        return progress
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if progress is not False and hasattr(shell, "kernel"):
        return Notebook(importlib.import_module("IPython.display").display)
    streams = (sys.stdout, sys.stderr)
    terminal = all(stream is not None and stream.isatty() for stream in streams)
    if progress is not False and terminal and _installed("rich"):
        from rich.console import Console

        return Bar(Console(file=sys.stderr, force_terminal=True))
    return Lines() if progress else Silent()


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class Silent:
    """A display that shows nothing."""

    def stage(self, name: str) -> None: ...

    def advance(self, round: int, rounds: int) -> None: ...

    def close(self) -> None: ...


class Lines(Silent):
    """A display for log files: it prints each stage, and the round every few seconds, on standard error."""

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
    """A display below the cell of a notebook: a bar and a line of text, which remain there after the run.

    Args:
        display: the function `display` of IPython.
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
        label = f'<span style="white-space: pre">{html.escape(line)}</span>'
        content = {"text/plain": line, "text/html": f'<progress value="{done}" max="{whole}"></progress> {label}'}
        if self.shown is None:
            self.shown = self.display(content, raw=True, display_id=True)
        else:
            self.shown.update(content, raw=True)


class Bar:
    """A display on a terminal, by rich: the stage, a bar, and below them numbers and the speed.

    The bar vanishes at the end. Text that is printed during the run appears above it.
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
        self.since: tuple[str, float] | None = None  # the present stage, and the time at which it began
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
        self.live.refresh()  # draw now, since the next stage may block the thread that draws

    def advance(self, round: int, rounds: int) -> None:
        self.show(round, rounds)

    def show(self, done: float, whole: float, numbers: str = "") -> None:
        """Show that `done` of `whole` is done. Show `numbers`, such as losses, below the bar."""
        self.since = None
        self.speed.mark(done)
        self.live.start()
        self.below = f"  {numbers}  {self.speed.text(whole)}".rstrip()
        place = f"{done:,.0f}/{whole:,.0f} {self.speed.unit}"
        self.line.update(self.task, total=whole, completed=done, description=f"{self.heading}running", place=place)

    def close(self) -> None:
        self.live.stop()


UNITS = {name: name for name in ("rounds", "exchanges", "bytes", "evaluations")} | {"time": "s of the clock"}


class Watch:
    """A display of a run's progress, in units of its budget, with losses and metrics: a bar, or lines.

    Pass an instance to `solve` twice: as its `progress`, to show stages, and as a callback, to show numbers.

    Args:
        console: the console to write to. A terminal gets a bar, and other consoles get lines.
        metric: the metric that is shown after the outer loss.
        budget: the kind of the run's budget, a key of UNITS, and its amount.
        timed: whether the time of the clock is also shown.
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
        """Do nothing: the callback, which is called after each round, shows the round together with the numbers."""

    def close(self) -> None:
        if self.bar:
            self.bar.close()

    def __call__(self, result: Any, row: Mapping[str, float] | None) -> None:
        ledger = result.ledger
        sent = ledger.bytes_down + ledger.bytes_up
        spent = {"rounds": result.round, "exchanges": ledger.exchanges, "bytes": sent, "time": ledger.time}
        spent["evaluations"] = ledger.gradients + ledger.hvps
        if self.bar:
            self.bar.show(spent[self.counted], self.whole, self.numbers(result))
            return
        self.speed.mark(spent[self.counted])
        if row is not None and not self.console.quiet:
            place = {
                "rounds": f"/{self.whole:.0f}",
                "exchanges": f"  exchange {ledger.exchanges}/{self.whole:.0f}",
                "bytes": f"  sent {sent / 1e6:,.1f}/{self.whole / 1e6:,.6g} MB",
                "evaluations": f"  evaluation {spent['evaluations']:,.0f}/{self.whole:,.0f}",
                "time": f"  clock {ledger.time:,.1f}/{self.whole:g} s",
            }
            parts = f"round {result.round}{place[self.counted]}", self.numbers(result), self.speed.text(self.whole)
            self.console.print("  ".join(filter(None, parts)), highlight=False, soft_wrap=True)

    def numbers(self, result: Any) -> str:
        """Return the outer loss and the metric of the last row, and the clock's time unless the budget is in time."""
        row = result.history.rows[-1] if result.history.rows else {}
        shown = [name for name in dict.fromkeys(("outer_loss", self.metric)) if name in row]
        clock = [f"clock {result.ledger.time:,.1f} s"] if self.timed and self.counted != "time" else []
        return "  ".join([*clock, *(f"{name} {text(name, row[name])}" for name in shown)])


class Speed:
    """The speed of a run over the last few seconds, without the time of stages outside rounds."""

    def __init__(self, unit: str = "rounds", clock: Callable[[], float] = time.monotonic) -> None:
        self.unit, self.clock = unit, clock
        self.marks: list[tuple[float, float]] = []
        self.paused = False

    def pause(self) -> None:
        """Exclude the time until the next call of `mark`."""
        self.paused = True

    def mark(self, done: float) -> None:
        """Record that at this moment `done` is done."""
        now = self.clock()
        self.marks = [] if self.paused else [mark for mark in self.marks if now - mark[0] < WINDOW] or self.marks[-1:]
        self.marks.append((now, done))
        self.paused = False

    def text(self, whole: float) -> str:
        """Return a text with the speed and the time until `whole` is done; "" if the speed is unknown."""
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
    """Return seconds as text, such as 1:23 or 4:05:06."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"
