"""A table, described once: for a terminal, where nothing is cut, for a page, a paper and a README.

A cell keeps its numbers, so that each of these writes them in its own way. Where a terminal has no room for all columns
some go, and the caption names them; where it has none for the others, their texts are folded, and numbers last.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import rich.table
from rich import box
from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from fedbilevel.core.metrics import in_percent, mean_and_sd

READABLE = 20  # characters of a text before it is folded
LEAST = 8  # where even so there is no room
DIGITS = 4  # of a mean in a paper
LATIN = 0x17F  # the last letter that pdfLaTeX sets as it is


def gflop(flops: float) -> str:
    """Floating-point operations in thousand millions, for people, in three digits or more."""
    return f"{flops / 1e9:,.0f}" if flops >= 1e11 else f"{flops / 1e9:.3g}"


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
    shown = {column.heading: [str(cell) for cell in column.cells] for column in table.shown}
    texts = {column.heading for column in table.shown if column.is_text}
    order = sorted(
        (column.goes, place, column.heading) for place, column in enumerate(table.shown) if column.goes is not None
    )
    waiting, hidden = [heading for *_, heading in order], list[str]()
    while width is not None and waiting and _least_width(shown, texts, READABLE) > width:
        hidden.append(waiting.pop(0))
        del shown[hidden[-1]]
    least = READABLE if width is None or _least_width(shown, texts, READABLE) <= width else LEAST
    whole = width is None or _least_width(shown, texts, least) <= width
    wider = ["on a wider terminal also: " + ", ".join(hidden).replace("\n", " ")] if hidden else []
    made = titled(table.title, caption="\n".join([*wider, *table.notes]))
    _fill(made, shown, texts, least if whole else None)
    rows = list(zip(*shown.values(), strict=True))
    for row in rows[: len(rows) - table.last_apart]:
        made.add_row(*map(folding, row))
    if table.last_apart:
        made.add_section()
        made.add_row(*map(folding, rows[-1]), style="bold")
    return made


def _fill(table: rich.table.Table, columns: Mapping[str, Sequence[str]], texts: set[str], least: int | None) -> None:
    """Add the columns; `least`: texts stay that wide, numbers whole. None: all may be folded."""
    for name, cells in columns.items():
        number = name not in texts
        widest = max(cell_len(line) for text in (name, *cells) for line in text.split("\n"))
        kept = None if least is None else widest if number else min(widest, least)
        table.add_column(
            escape(name),
            justify="right" if number else "left",
            no_wrap=number and least is not None,
            min_width=kept,
            overflow="fold",
        )


def _least_width(columns: Mapping[str, Sequence[str]], texts: set[str], least: int) -> int:
    """The width of a table with these columns in which only texts are folded, and none to less than `least`."""
    table = titled("")
    _fill(table, columns, texts, least)
    return Console(width=10_000).measure(table).minimum


def visible(text: object) -> str:
    """A text for a page: escaped, and without characters that cannot be seen, such as those that turn its direction."""
    return html.escape("".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in str(text)))


def page_table(table: Table) -> str:
    """The table for a page; the first cell of each row is its heading, the best of a column in bold."""
    heads = "".join(f"<th scope=col{_number(column)}>{visible(column.heading)}</th>" for column in table.shown)
    rows = []
    for row in zip(
        *(zip(column.cells, [column] * len(column.cells), strict=True) for column in table.shown), strict=True
    ):
        (first, _), *others = row
        cells = [f"<td{_number(column)}>{_bold(cell, '<b>', '</b>')}</td>" for cell, column in others]
        rows.append(f"<tr><th scope=row>{visible(first)}</th>{''.join(cells)}</tr>")
    notes = "".join(f"<p>{visible(note)}</p>" for note in table.notes)
    head = f"<thead><tr>{heads}</tr></thead>" if any(column.heading.strip() for column in table.shown) else ""
    caption = f"<caption>{visible(table.title)}</caption>"
    return f"<div class=scroll><table>{caption}{head}<tbody>{''.join(rows)}</tbody></table></div>{notes}"


def _number(column: Column) -> str:
    return "" if column.is_text else " class=number"


def _bold(cell: Cell, begin: str, end: str) -> str:
    return f"{begin}{visible(cell)}{end}" if cell.best else visible(cell)


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
