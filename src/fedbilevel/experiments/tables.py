"""Tables: each is described once, for a terminal, where nothing is cut, for a page, a paper and a README.

A cell keeps its numbers, so that each of these writes them in its own way. Where a terminal has no room for all columns
some go, and the caption names them; where it has none for the others, their texts are folded, and numbers last.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import rich.table
from rich import box
from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from fedbilevel.core.metrics import in_percent, mean_and_sd, text
from fedbilevel.display.curves import gflop, time_of
from fedbilevel.engines.history import Row
from fedbilevel.wording import printable

READABLE = 20  # characters of a text before it is folded
LEAST = 8  # where even so there is no room
DIGITS = 4  # of a mean in a paper
LATIN = 0x17F  # the last letter that pdfLaTeX sets as it is


AMOUNTS: Mapping[str, Callable[[float], str]] = {
    "count": "{:,.0f}".format,
    "tenths": "{:,.1f}".format,
    "seconds": "{:.1f}".format,
    "gflop": gflop,
}
"""How costs are written, which are said as means."""


@dataclass(frozen=True)
class Cell:
    """Numbers or words.

    Args:
        words: what stands there; after the numbers, where there are some.
        values: over the seeds.
        kind: of the numbers: a name in AMOUNTS, or else the metric that they are of.
        best: whether it is printed like the best of its column.
    """

    words: str = ""
    values: Sequence[float] = ()
    kind: str = ""
    best: bool = False

    @property
    def mean(self) -> float:
        """Return the mean of the values."""
        return sum(value / len(self.values) for value in self.values)

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation, of metrics alone; None of a single value."""
        if len(self.values) < 2 or self.kind in AMOUNTS:
            return None
        apart = math.hypot(*(value - self.mean for value in self.values))  # without squares, which may be too large
        return apart / math.sqrt(len(self.values) - 1)

    def __str__(self) -> str:
        if not self.values:
            return self.words
        if self.kind in AMOUNTS:
            return AMOUNTS[self.kind](self.mean) + self.words
        return mean_and_sd(self.kind, self.mean, self.deviation)


@dataclass(frozen=True)
class Column:
    """A column.

    Args:
        heading: of one line or more; "" of a column that papers alone have.
        cells: one for each row.
        goes: where there is no room the columns with the lowest numbers go first; None stays.
        paper: its heading in a paper, as LaTeX; "" leaves it out there.
        is_text: whether it holds no numbers, so that it may be folded.
    """

    heading: str
    cells: Sequence[Cell]
    goes: int | None = None
    paper: str = ""
    is_text: bool = False


def text_column(heading: str, texts: Iterable[object], goes: int | None = None, paper: str = "") -> Column:
    """A column of words."""
    return Column(heading, [Cell(str(text)) for text in texts], goes, paper, is_text=True)


@dataclass(frozen=True)
class Table:
    """A table: a row at the same place of every column.

    Args:
        notes: sentences for the caption.
        last_apart: whether the last row is set apart, as that of a sum.
        seeds: over how many seeds each cell's values are; 0 where that differs.
    """

    title: str
    columns: Sequence[Column]
    notes: Sequence[str] = ()
    last_apart: bool = False
    seeds: int = 0

    @property
    def shown(self) -> list[Column]:
        """The columns that everything but a paper has."""
        return [column for column in self.columns if column.heading]


def best_of(cells: Sequence[Cell], rivals: Sequence[bool], larger: bool) -> list[Cell]:
    """The cells, those of rivals marked that are printed in a paper like the best of them; none that has words, too."""
    known = [
        cell
        for cell, rival in zip(cells, rivals, strict=True)
        if rival and cell.values and not cell.words and math.isfinite(cell.mean)
    ]
    if not known:
        return list(cells)
    best = _said(max(known, key=lambda cell: cell.mean if larger else -cell.mean))
    return [replace(cell, best=rival and _said(cell) == best) for cell, rival in zip(cells, rivals, strict=True)]


def _said(cell: Cell) -> str:
    return number(cell.mean) if cell.values and cell.kind not in AMOUNTS else str(cell)


def folding(text: str, style: str = "") -> Text:
    """A text, taken literally, whose long words go on in the next line."""
    return Text(text, style=style, overflow="fold")


def titled(title: str, *, frame: Box = box.SIMPLE_HEAD, caption: str = "", header: bool = True) -> rich.table.Table:
    """An empty table of a terminal."""
    return rich.table.Table(
        title=folding(title, "bold"),
        title_justify="left",
        box=frame,
        show_header=header,
        caption=folding(caption) if caption else None,
        caption_justify="left",
    )


def terminal(table: Table, width: int | None = None) -> rich.table.Table:
    """The table for a terminal: not wider than `width`, None for any."""
    shown, hidden = table.shown, list[str]()

    def fits(least: int) -> bool:
        """Whether there is room if only texts are folded, and none to less than `least` or, unless that is the LEAST,
        within a word."""
        narrow = titled("")
        _add_columns(narrow, shown, least)
        return width is None or Console(width=10_000).measure(narrow).minimum <= width

    for column in sorted((one for one in shown if one.goes is not None), key=lambda one: one.goes or 0):
        if not fits(READABLE):
            shown.remove(column)
            hidden.append(column.heading)
    wider = ["on a wider terminal also: " + ", ".join(hidden).replace("\n", " ")] if hidden else []
    made = titled(table.title, caption="\n".join([*wider, *table.notes]))
    least = READABLE if fits(READABLE) else LEAST
    _add_columns(made, shown, least if fits(least) else None)
    rows = list(zip(*(map(str, column.cells) for column in shown), strict=True))
    for row in rows[: len(rows) - table.last_apart]:
        made.add_row(*map(folding, row))
    if table.last_apart:
        made.add_section()
        made.add_row(*map(folding, rows[-1]), style="bold")
    return made


def _add_columns(table: rich.table.Table, columns: Sequence[Column], least: int | None) -> None:
    """Add the columns; `least`: texts stay that wide, numbers whole. None: all may be folded."""
    for column in columns:
        said = [str(one) for one in (column.heading, *column.cells)]
        widest = max(cell_len(line) for one in said for line in one.split("\n"))
        word = max((cell_len(word) for one in said for word in one.split()), default=0) if least == READABLE else 0
        kept = None if least is None else min(widest, max(least, word)) if column.is_text else widest
        table.add_column(
            escape(column.heading),
            justify="left" if column.is_text else "right",
            no_wrap=not column.is_text and least is not None,
            min_width=kept,
            overflow="fold",
        )


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
        **({"privacy": f"ε = {row['epsilon']:.4g} at δ = {summary['delta']:g}"} if "epsilon" in row else {}),
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


def visible(text: object) -> str:
    """A text for a page: escaped, and without characters that cannot be seen, such as those that turn its direction."""
    return html.escape(printable(str(text), None, kept="\n\t"))


def page_table(table: Table) -> str:
    """The table for a page; the first cell of each row is its heading, the best of a column in bold."""
    kinds = ["" if column.is_text else " class=number" for column in table.shown]
    headings = [column.heading for column in table.shown]
    heads = "".join(
        f"<th scope=col{kind}>{visible(heading)}</th>" for kind, heading in zip(kinds, headings, strict=True)
    )
    rows = []
    for first, *others in zip(*(column.cells for column in table.shown), strict=True):
        texts = [f"<b>{visible(cell)}</b>" if cell.best else visible(cell) for cell in others]
        cells = [f"<td{kind}>{text}</td>" for kind, text in zip(kinds[1:], texts, strict=True)]
        rows.append(f"<tr><th scope=row>{visible(first)}</th>{''.join(cells)}</tr>")
    notes = "".join(f"<p>{visible(note)}</p>" for note in table.notes)
    head = f"<thead><tr>{heads}</tr></thead>" if any(heading.strip() for heading in headings) else ""
    caption = f"<caption>{visible(table.title)}</caption>"
    return f"<div class=scroll><table>{caption}{head}<tbody>{''.join(rows)}</tbody></table></div>{notes}"


def markdown(table: Table) -> str:
    """The table for a README or an issue, the best of a column in bold."""
    rule = ["---" if column.is_text else "---:" for column in table.shown]
    cells = [[f"**{_plain(cell)}**" if cell.best else _plain(cell) for cell in column.cells] for column in table.shown]
    rows = [[_plain(column.heading) for column in table.shown], rule, *zip(*cells, strict=True)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _plain(text: object) -> str:
    """A text in one line, in which nothing ends a cell or begins a tag."""
    return re.sub(r"[|<&]", lambda found: f"&#{ord(found[0])};", " ".join(str(text).split()))


def latex(table: Table) -> str:
    """The columns that a paper has, as a `tabular` with the best of a column in bold; it needs the package booktabs."""
    columns = [column for column in table.columns if column.paper]
    over = f"mean and standard deviation over {table.seeds} seeds; " if table.seeds > 1 else ""
    words = [escaped(str(cell)) for cell in columns[0].cells]
    beyond = sorted({char for one in words for char in one if ord(char) > LATIN})
    font = f"; for {' '.join(beyond)} LuaLaTeX or XeLaTeX, and a font that has them" if beyond else ""
    rows = [[column.paper for column in columns], *zip(*(map(_latex, column.cells) for column in columns), strict=True)]
    head, *body = (" & ".join(row) + r" \\" for row in rows)
    lines = [
        f"% {over}best in bold; needs \\usepackage{{booktabs}}{font}",
        rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        r"\toprule",
        head,
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _latex(cell: Cell) -> str:
    if cell.values and cell.kind not in AMOUNTS:
        scale = 100 if in_percent(cell.kind) else 1
        return number(scale * cell.mean, None if cell.deviation is None else scale * cell.deviation, cell.best)
    return rf"\textbf{{{cell}}}" if cell.best else escaped(str(cell))


ESCAPES = {char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "–": "--",
    "·": r"\textperiodcentered{}",
}


def escaped(text: str) -> str:
    """A text that LaTeX sets as it is."""
    plain = "".join(ESCAPES.get(char, char) for char in re.sub(r"\s+", " ", text))
    return re.sub(r"^[\[*]", r"{\g<0>}", plain)  # after \\ of the row before these would be its arguments


def number(mean: float, spread: float | None = None, bold: bool = False) -> str:
    """A mean, with ± its standard deviation where there is one, in as many decimals as give the mean four digits."""
    if not math.isfinite(mean):
        return "--"
    power = math.floor(math.log10(abs(mean))) if mean else 0
    outside = 0 if -3 <= power <= DIGITS else power
    decimals = max(0, DIGITS - 1 - (power - outside))
    parts = [mean] if spread is None else [mean, spread]
    inside = r" \pm ".join(f"{part / 10.0**outside:.{decimals}f}" for part in parts)
    if outside:
        inside = rf"{f'({inside})' if len(parts) > 1 else inside} \times 10^{{{outside}}}"
    return rf"$\mathbf{{{inside}}}$" if bold else f"${inside}$"
