"""Runs as people see them in a terminal: how far they are, a moving bar or plain lines, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich.table
from rich import box
from rich.console import Console

from fedbilevel.core.metrics import text
from fedbilevel.display.bar import Bar
from fedbilevel.display.curves import time_of
from fedbilevel.display.speed import Speed
from fedbilevel.engines.history import Row
from fedbilevel.engines.result import Result, cost
from fedbilevel.experiments.spec import Spec
from fedbilevel.experiments.view import Cell, Column, Table, folding, gflop, terminal, titled

UNITS = {"rounds": "rounds", "exchanges": "exchanges", "bytes": "bytes", "time": "s of the clock"}


class Watch:
    """Shows how far a run is, in rounds or in what its budget counts.

    It is the run's display, which gets stages, and one of its callbacks, which get numbers.
    """

    def __init__(self, console: Console, metric: str, spec: Spec) -> None:
        self.console, self.metric, self.spec = console, metric, spec
        self.counted, self.whole = spec.run.budget or ("rounds", float(spec.run.rounds or 0))
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

    def __call__(self, result: Result, row: Row | None) -> None:
        if self.bar:
            self.bar.show(self.done(result), self.whole, self.numbers(result))
            return
        self.speed.mark(self.done(result))
        if row is not None and not self.console.quiet:
            parts = (self.place(result), self.numbers(result), self.speed.text(self.whole))
            self.console.print("  ".join(part for part in parts if part), highlight=False, soft_wrap=True)

    def done(self, result: Result) -> float:
        return cost({"round": result.round, **result.ledger.columns()}, self.counted)

    def place(self, result: Result) -> str:
        if self.counted == "exchanges":
            return f"round {result.round}  exchange {result.ledger.exchanges}/{self.whole:.0f}"
        if self.counted == "bytes":
            return f"round {result.round}  sent {self.done(result) / 1e6:,.1f}/{self.whole / 1e6:,.6g} MB"
        if self.counted == "time":
            return f"round {result.round}  clock {result.ledger.time:,.1f}/{self.whole:g} s"
        return f"round {result.round}/{self.whole:.0f}"

    def numbers(self, result: Result) -> str:
        """The objective and the first metric, as of the last row; the time, where it says more than the place does."""
        row = result.history.rows[-1] if result.history.rows else {}
        shown = {name: row[name] for name in ("outer_loss", self.metric) if name in row}
        texts = [f"{name} {text(name, value)}" for name, value in shown.items()]
        if self.spec.timed and self.counted != "time":
            texts.insert(0, f"clock {result.ledger.time:,.1f} s")
        return "  ".join(texts)


def summary_table(summary: dict[str, Any]) -> rich.table.Table:
    metric, row, compiling = summary["metric"], summary["last_row"], summary["seconds_compiling_this_time"]
    table = titled(_title(summary), frame=box.HEAVY_HEAD, header=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    best = f"{text(metric, summary['best'])} (round {summary['best_round']})"
    lines = {
        "rounds": f"{summary['rounds']:,}",
        metric: text(metric, summary["final"]),
        f"best {metric}": best,
        **{name: text(name, row[name]) for name in row if name.endswith("_loss")},
        **over_clients(row),
        "exchanges": f"{row['exchanges']:,}",
        **({"virtual time": f"{passed:,.1f} seconds"} if (passed := time_of(row)) != row["exchanges"] else {}),
        "down / up": f"{row['bytes_down'] / 1e6:,.2f} / {row['bytes_up'] / 1e6:,.2f} MB",
        "gradients / hvps": f"{row['gradients']:,} / {row['hvps']:,}",
        **({"GFLOP": gflop(row["flops"])} if "flops" in row else {}),
        **holders(row),
        "seconds in rounds": f"{summary['seconds_in_rounds']:.1f}",
        "this time": f"{compiling:.1f} s compiling, {summary['seconds_this_time']:.1f} s in all",
    }
    lines |= {"stopped": summary["stopped"]} if summary["stopped"] else {}
    for name, value in lines.items():
        table.add_row(folding(name), folding(value, "bold" if name == metric else ""))
    return table


def over_clients(row: Row) -> dict[str, str]:
    """Lines for each per-client metric: its mean, its worst value, and its first and last decile over clients."""
    lines: dict[str, str] = {}
    for name in [column.removesuffix(".worst") for column in row if column.endswith(".worst")]:
        mean, worst, low, high = (text(name, row[f"{name}.{end}"]) for end in ("mean", "worst", "p10", "p90"))
        lines |= {f"{name}, mean": mean, f"{name}, worst": worst, f"{name}, p10 to p90": f"{low} to {high}"}
    return lines


def holders(row: Row) -> dict[str, str]:
    """Lines about clients with submodels: the least number of clients that held an entry, and the number of entries
    that no client held, both as means over the rounds of the row."""
    lines = {}
    if parts := [part for part in "xy" if f"coverage_{part}" in row]:
        least = (f"{row[f'coverage_{part}']:.3g} ({part})" for part in parts)
        lines["clients per entry"] = f"at least {', '.join(least)}"
    if idle := [part for part in "xy" if row.get(f"uncovered_{part}", 0) > 0]:
        entries = " and ".join(f"{row[f'uncovered_{part}']:,.6g} entries of {part}" for part in idle)
        lines["held by nobody"] = entries
    return lines


def summary_line(name: Path, summary: dict[str, Any]) -> str:
    """The outcome of one of several runs, in a line."""
    metric, exchanges = summary["metric"], summary["last_row"]["exchanges"]
    value = text(metric, summary["final"])
    length = f"{summary['rounds']:,} rounds, {exchanges:,} exchanges, {summary['seconds_this_time']:.1f} s"
    return f"{name}  {metric} {value}  ({length})"


def seeds_table(summaries: Sequence[dict[str, Any]], width: int | None = None) -> rich.table.Table:
    """The outcome of runs that differ in their seed only, not wider than `width`."""
    metric = summaries[0]["metric"]
    columns = [Column("seed", [*(Cell(str(one["seed"])) for one in summaries), Cell("mean ± sd")])]
    for kind, goes in (("final", None), ("best", 1)):
        values = [one[kind] for one in summaries]
        cells = [Cell(values=of, kind=metric) for of in (*([value] for value in values), values)]
        columns.append(Column(f"{kind}\n{metric}", cells, goes))
    seconds = [Cell(values=[one["seconds_in_rounds"]], kind="seconds") for one in summaries]
    title = f"{_title(summaries[0])}, {len(summaries)} seeds"
    return terminal(Table(title, [*columns, Column("seconds", [*seconds, Cell()], 0)], last_apart=True), width)


def _title(summary: dict[str, Any]) -> str:
    return " · ".join(part for part in (summary["task"], summary["algorithm"], summary["data"]) if part)
