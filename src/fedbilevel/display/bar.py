"""A bar on the terminal, by rich: what is being done, how far it is, and below it numbers and speed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column
from rich.text import Text

from fedbilevel.display.speed import Speed

RUNNING = "running"


def terminal(stream: TextIO) -> Console:
    """The terminal that a stream goes to."""
    return Console(file=stream, force_terminal=True)


class Bar:
    """A display of a run that vanishes when it is closed; what is printed meanwhile stands above it."""

    heading = ""

    def __init__(self, console: Console, unit: str = "rounds") -> None:
        self.speed = Speed(unit)
        self.lines = TwoLines(
            SpinnerColumn(),
            TextColumn("{task.fields[what]}", style="bold", table_column=Column(overflow="fold")),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[place]}", table_column=Column(overflow="fold")),
            console=console,
            transient=True,
            expand=True,
        )
        self.bar: Any = None

    def stage(self, name: str) -> None:
        self.speed.pause()
        # At once: what comes may leave no time to the thread that draws.
        self._show(what=f"{self.heading}{name}", refresh=True)

    def advance(self, round: int, rounds: int) -> None:
        self.show(round, rounds)

    def show(self, done: float, whole: float, numbers: str = "") -> None:
        """So much is done of the whole, and what the run has found so far."""
        self.speed.mark(done)
        place = f"{done:,.0f}/{whole:,.0f} {self.speed.unit}"
        below = {"numbers": numbers, "speed": self.speed.text(whole)}
        self._show(total=whole, completed=done, what=f"{self.heading}{RUNNING}", place=place, **below)

    def close(self) -> None:
        self.lines.stop()

    def _show(self, **shown: Any) -> None:
        if self.bar is None:
            self.bar = self.lines.add_task("", total=None, what="", place="", numbers="", speed="")
            self.lines.start()
        self.lines.update(self.bar, **shown)


class TwoLines(Progress):
    """A bar, and below it the numbers of its tasks and their speed."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(f"  {task.fields['numbers']}  {task.fields['speed']}".rstrip(), overflow="fold")
