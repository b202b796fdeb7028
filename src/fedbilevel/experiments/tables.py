"""Describe a table once, and write it for a terminal, a web page, a paper or a README.

A cell contains numbers, so that each kind of output can format them in its own way. On a terminal, texts are never cut
off. If the terminal is too narrow for all columns, the least important columns are left out, and the caption names
them. If it is still too narrow, texts are folded, and finally numbers too.
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

READABLE = 20  # texts are folded to no fewer characters than this
LEAST = 8  # on a terminal that is too narrow for READABLE, texts are folded to no fewer characters than this
DIGITS = 4  # the number of significant digits of a mean in a paper
LATIN = 0x17F  # the last letter that pdfLaTeX can print without a special font


def megabytes(amount: float) -> str:
    """Write an amount in MB: with one decimal, or with two significant digits if it is below 1."""
    return f"{amount:,.1f}" if amount == 0 or amount >= 1 else f"{amount:.2g}"


AMOUNTS: Mapping[str, Callable[[float], str]] = {
    "count": "{:,.0f}".format,
    "tenths": "{:,.1f}".format,
    "seconds": "{:.1f}".format,
    "megabytes": megabytes,
    "gflop": gflop,
}
"""The kind of a cost -> the function that writes the mean of such costs."""


@dataclass(frozen=True)
class Cell:
    """The numbers or the words of a cell.

    Args:
        words: the text of the cell, which follows the numbers if there are any.
        values: the numbers, one for each seed.
        kind: the kind of the numbers: a name in AMOUNTS, or else the name of the metric.
        best: whether the printed numbers of the cell are those of the column's best cell.
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
        """Return the sample standard deviation of a metric; None for a cost or a single value."""
        if len(self.values) < 2 or self.kind in AMOUNTS:
            return None
        apart = math.hypot(*(value - self.mean for value in self.values))  # without squares, which may overflow
        return apart / math.sqrt(len(self.values) - 1)

    def __str__(self) -> str:
        if not self.values:
            return self.words
        if self.kind in AMOUNTS:
            return AMOUNTS[self.kind](self.mean) + self.words
        return mean_and_sd(self.kind, self.mean, self.deviation)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        heading: the heading, of one line or more; "" if the column is only for papers.
        cells: the cells, one for each row.
        goes: columns with the lowest number are left out first if there is no room; None: the column is never left out.
        paper: the heading in a paper, as LaTeX; "": the column is left out in papers.
        is_text: whether the column has only texts, which may be folded.
    """

    heading: str
    cells: Sequence[Cell]
    goes: int | None = None
    paper: str = ""
    is_text: bool = False


def text_column(heading: str, texts: Iterable[object], goes: int | None = None, paper: str = "") -> Column:
    """Return a column of texts."""
    return Column(heading, [Cell(str(text)) for text in texts], goes, paper, is_text=True)


@dataclass(frozen=True)
class Table:
    """A table; the n-th row consists of the n-th cells of all columns.

    Args:
        title: the title.
        columns: the columns.
        notes: sentences for the caption.
        last_apart: whether a line separates the last row from the others, for example because it is a sum.
        seeds: the number of seeds behind each cell; 0 if cells have different numbers.
    """

    title: str
    columns: Sequence[Column]
    notes: Sequence[str] = ()
    last_apart: bool = False
    seeds: int = 0

    @property
    def shown(self) -> list[Column]:
        """Return the columns that have a heading. A column without a heading is only for papers."""
        return [column for column in self.columns if column.heading]


def best_of(cells: Sequence[Cell], rivals: Sequence[bool], larger: bool) -> list[Cell]:
    """Mark the best of the cells whose entry in `rivals` is True, and cells that are printed with the same numbers.

    A cell with words is never best.
    """
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
    """Return a text for rich that is printed literally. Long words may continue on the next line."""
    return Text(text, style=style, overflow="fold")


def titled(title: str, *, frame: Box = box.SIMPLE_HEAD, caption: str = "", header: bool = True) -> rich.table.Table:
    """Return an empty table for a terminal."""
    return rich.table.Table(
        title=folding(title, "bold"),
        title_justify="left",
        box=frame,
        show_header=header,
        caption=folding(caption) if caption else None,
        caption_justify="left",
    )


def terminal(table: Table, width: int | None = None) -> rich.table.Table:
    """Return the table for a terminal. It is at most `width` wide; None: it may be of any width."""
    shown, hidden = table.shown, list[str]()

    def fits(least: int) -> bool:
        """Return whether the table fits if texts are folded to at least `least` characters.

        Words are broken only if `least` is LEAST.
        """
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
    """Add columns to a table of rich.

    Texts are folded to no fewer than `least` characters, and numbers are not folded. None: texts and numbers may be
    folded to any length.
    """
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
    """Return the table that a terminal shows at the end of a run, from the run's summary."""
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
    """Return the mean, the worst value, and the first and last decile over clients of each per-client metric."""
    lines: dict[str, str] = {}
    for name in [column.removesuffix(".worst") for column in row if column.endswith(".worst")]:
        mean, worst, low, high = (text(name, row[f"{name}.{end}"]) for end in ("mean", "worst", "p10", "p90"))
        lines |= {f"{name}, mean": mean, f"{name}, worst": worst, f"{name}, p10 to p90": f"{low} to {high}"}
    return lines


def holders(row: Row) -> dict[str, str]:
    """Return lines about clients with submodels. The numbers are means over the rounds of the row.

    The lines have the least number of clients that held an entry, and the number of entries that no client held.
    """
    lines = {}
    if parts := [part for part in "xy" if f"coverage_{part}" in row]:
        least = (f"{row[f'coverage_{part}']:.3g} ({part})" for part in parts)
        lines["clients per entry"] = f"at least {', '.join(least)}"
    if idle := [part for part in "xy" if row.get(f"uncovered_{part}", 0) > 0]:
        entries = " and ".join(f"{row[f'uncovered_{part}']:,.6g} entries of {part}" for part in idle)
        lines["held by no client"] = entries
    return lines


def summary_line(name: Path, summary: dict[str, Any]) -> str:
    """Return a line with the outcome of one of several runs."""
    metric, exchanges = summary["metric"], summary["last_row"]["exchanges"]
    value = text(metric, summary["final"])
    length = f"{summary['rounds']:,} rounds, {exchanges:,} exchanges, {summary['seconds_this_time']:.1f} s"
    return f"{name}  {metric} {value}  ({length})"


def seeds_table(summaries: Sequence[dict[str, Any]], width: int | None = None) -> rich.table.Table:
    """Return a table of runs that differ only in their seeds. It is at most `width` wide."""
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
    """Return a text escaped for a web page.

    Invisible characters are removed, such as characters that reverse the direction of text.
    """
    return html.escape(printable(str(text), None, kept="\n\t"))


def page_table(table: Table) -> str:
    """Return a table as HTML.

    The first cell of each row is its heading, and the best cells of a column are bold.
    """
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
    """Return a table as Markdown, for a README or an issue. The best cells of a column are bold."""
    rule = ["---" if column.is_text else "---:" for column in table.shown]
    cells = [[f"**{_plain(cell)}**" if cell.best else _plain(cell) for cell in column.cells] for column in table.shown]
    rows = [[_plain(column.heading) for column in table.shown], rule, *zip(*cells, strict=True)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _plain(text: object) -> str:
    """Return a text as one line of Markdown, in which no character ends a cell or begins a tag."""
    return re.sub(r"[|<&]", lambda found: f"&#{ord(found[0])};", " ".join(str(text).split()))


def latex(table: Table) -> str:
    """Return the columns for a paper as a LaTeX `tabular`, which needs booktabs.

    The best cells of a column are bold.
    """
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
    """Escape a text so that LaTeX prints it literally."""
    plain = "".join(ESCAPES.get(char, char) for char in re.sub(r"\s+", " ", text))
    return re.sub(
        r"^[\[*]", r"{\g<0>}", plain
    )  # after the \\ of the previous row, LaTeX would read [ or * as an argument


def number(mean: float, spread: float | None = None, bold: bool = False) -> str:
    """Return a mean as LaTeX, with four digits.

    If there is a standard deviation, it follows after ±, with as many decimals.
    """
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
