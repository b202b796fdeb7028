"""What people see in a terminal: a moving bar (plain lines where there is no terminal) and a closing table."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from fedbilevel.engines.history import History, Row
from fedbilevel.engines.result import Result
from fedbilevel.experiments import catalogue, measure, toml

WINDOW_SECONDS = 5.0  # over which the speed is taken


class TwoLines(Progress):
    """A bar, and below it the numbers of its tasks."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(f"  {task.fields['numbers']}")


class Watch:
    """A callback that shows how far a run is."""

    def __init__(self, console: Console, metric: str) -> None:
        self.console, self.metric = console, metric
        self.marks: list[tuple[float, int]] = []
        self.progress: Progress | None = None
        self.bar: Any = None

    @contextmanager
    def shown(self) -> Iterator[Watch]:
        """Show the bar, if the console is a terminal, while the block runs."""
        if not self.console.is_terminal:
            yield self
            return
        self.progress = TwoLines(
            SpinnerColumn(),
            TextColumn("{task.fields[what]}", style="bold"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} rounds"),
            TextColumn("{task.fields[speed]}"),
            console=self.console,
            transient=True,
            expand=True,
        )
        with self.progress:
            yield self

    def start(self, rounds: int) -> None:
        """Say that the program is being compiled."""
        if self.progress is not None:
            self.bar = self.progress.add_task("", total=rounds, what="compiling", numbers="", speed="")

    def __call__(self, result: Result, row: Row | None) -> None:
        now = time.monotonic() - result.compile_seconds  # the speed is that of rounds
        self.marks = [mark for mark in self.marks if now - mark[0] < WINDOW_SECONDS] or self.marks[-1:]
        self.marks.append((now, result.round))
        if self.progress is not None:
            what = "compiling" if len(self.marks) == 1 else "running"
            self.progress.update(
                self.bar,
                completed=result.round,
                what=what,
                numbers=self.numbers(result.history),
                speed=self.speed(result),
            )
        elif row is not None:
            parts = (f"round {result.round}/{result.rounds}", self.numbers(result.history), self.speed(result))
            self.console.print("  ".join(part for part in parts if part), highlight=False, soft_wrap=True)

    def numbers(self, history: History) -> str:
        """The objective and the first metric, as of the last row."""
        row = history.rows[-1] if history.rows else {}
        shown = {name: row[name] for name in ("outer_loss", self.metric) if name in row}
        return "  ".join(f"{name} {measure.text(name, value)}" for name, value in shown.items())

    def speed(self, result: Result) -> str:
        """Rounds per second and the time that remains."""
        (then, before), (now, done) = self.marks[0], self.marks[-1]
        if done == before or now <= then:
            return ""
        rate = (done - before) / (now - then)
        return f"{rate:.3g} rounds/s  ETA {_clock((result.rounds - done) / rate)}"


def _clock(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def summary_table(summary: dict[str, Any]) -> Table:
    """The outcome of a run."""
    metric, row = summary["metric"], summary["last_row"]
    table = Table(title=_title(summary), show_header=False, title_style="bold", title_justify="left")
    table.add_column(style="dim")
    table.add_column(justify="right")
    best = f"{measure.text(metric, summary['best'])} (round {summary['best_round']})"
    lines = {
        "rounds": f"{summary['rounds']:,}",
        metric: f"[bold]{measure.text(metric, summary['final'])}[/bold]",
        f"best {metric}": best,
        **{name: measure.text(name, row[name]) for name in row if name.endswith("_loss")},
        "exchanges": f"{row['exchanges']:,}",
        "down / up": f"{row['bytes_down'] / 1e6:,.2f} / {row['bytes_up'] / 1e6:,.2f} MB",
        "gradients / products": f"{row['gradients']:,} / {row['products']:,}",
        "seconds in rounds": f"{summary['seconds_in_rounds']:.1f}",
        "this time": f"{summary['seconds_compiling']:.1f} s compiling, {summary['seconds_in_all']:.1f} s in all",
    }
    for name, value in lines.items():
        table.add_row(name, value)
    if summary["stopped"]:
        table.add_row("stopped", summary["stopped"])
    return table


def seeds_table(summaries: Sequence[dict[str, Any]]) -> Table:
    """The outcome of runs that differ in their seed only."""
    metric = summaries[0]["metric"]
    table = Table(title=_title(summaries[0]) + f", {len(summaries)} seeds", title_style="bold", title_justify="left")
    for name in ("seed", f"final {metric}", f"best {metric}", "seconds"):
        table.add_column(name, justify="right")
    for one in summaries:
        values = (measure.text(metric, one["final"]), measure.text(metric, one["best"]))
        table.add_row(str(one["seed"]), *values, f"{one['seconds_in_rounds']:.1f}")
    table.add_section()
    spread = (measure.mean_and_spread(metric, [one[kind] for one in summaries]) for kind in ("final", "best"))
    table.add_row("mean ± sd", *spread, "", style="bold")
    return table


def algorithms_table() -> Table:
    """Every algorithm and what its docstring says of it."""
    table = Table(title="algorithms", title_style="bold", title_justify="left", show_lines=True)
    for name in ("name", "title", "paper", "exchanges per round", "client state", "cost per local step"):
        table.add_column(name, overflow="fold", no_wrap=name == "name")
    for one in catalogue.algorithms():
        table.add_row(one.name, one.title, one.paper, one.exchanges, one.client_state, one.cost)
    return table


def algorithm_fields_table() -> Table:
    """The fields of the algorithms and their defaults, in TOML's notation; one that several share stands once."""
    table = Table(title="fields and defaults", title_style="bold", title_justify="left", box=None, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for (name, default), algorithms in catalogue.algorithm_fields().items():
        everyone = len(algorithms) == len(catalogue.algorithms())
        table.add_row(escape(f"{name}={default}"), "all" if everyone else ", ".join(algorithms))
    return table


def tasks_table() -> Table:
    """Every task with its fields and their defaults, in TOML's notation."""
    table = Table(title="tasks", title_style="bold", title_justify="left", show_lines=True)
    for name in ("name", "title", "fields and defaults"):
        table.add_column(name, overflow="fold", no_wrap=name == "name")
    for one in catalogue.tasks():
        fields = (f"{name}={toml.value(default).strip(chr(34))}" for name, default in one.fields.items())
        table.add_row(one.name, one.title, escape("  ".join(fields)))
    return table


def paths(folder: Path, *names: str) -> str:
    """Where the run lies, and its plot if there is one."""
    lines = [f"run   {folder}", *(f"{name:<5} {folder / f'{name}.png'}" for name in names)]
    return "\n".join(lines)


def _title(summary: dict[str, Any]) -> str:
    return " · ".join(part for part in (summary["task"], summary["algorithm"], summary["data"]) if part)
