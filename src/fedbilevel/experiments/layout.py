"""Tables for the terminal that cut nothing.

Where a table has no room for all columns some go, and the caption names them; where it has none for the others, their
texts are folded, and numbers last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

READABLE = 20  # characters of a text before it is folded
LEAST = 8  # where even so there is no room


def folding(text: str, style: str = "") -> Text:
    """A text, taken literally, whose long words go on in the next line."""
    return Text(text, style=style, overflow="fold")


def titled(title: str, *, frame: Box = box.SIMPLE_HEAD, caption: str = "", header: bool = True) -> Table:
    """An empty table."""
    return Table(
        title=folding(title, "bold"),
        title_justify="left",
        box=frame,
        show_header=header,
        caption=folding(caption) if caption else None,
        caption_justify="left",
    )


def fitted(
    title: str,
    columns: Mapping[str, Sequence[str]],
    width: int | None,
    *,
    texts: Iterable[str] = (),
    droppable: Iterable[str] = (),
    last_apart: bool = False,
    notes: Iterable[str] = (),
) -> Table:
    """A table that is not wider than `width`, None for any.

    Args:
        columns: heading (of one line or more) and cells, those of one row at the same place.
        texts: the columns that may be folded; the others hold numbers.
        droppable: the columns that may go, the first of them first.
        last_apart: set the last row apart, as that of a sum.
        notes: sentences for the caption.
    """
    shown, texts, hidden = dict(columns), set(texts), list[str]()
    waiting = [name for name in droppable if name in columns]
    while width is not None and waiting and _least_width(shown, texts, READABLE) > width:
        hidden.append(waiting.pop(0))
        del shown[hidden[-1]]
    least = READABLE if width is None or _least_width(shown, texts, READABLE) <= width else LEAST
    whole = width is None or _least_width(shown, texts, least) <= width
    wider = ["on a wider terminal also: " + ", ".join(hidden).replace("\n", " ")] if hidden else []
    table = titled(title, caption="\n".join([*wider, *notes]))
    _fill(table, shown, texts, least if whole else None)
    rows = list(zip(*shown.values(), strict=True))
    for row in rows[: len(rows) - last_apart]:
        table.add_row(*map(folding, row))
    if last_apart:
        table.add_section()
        table.add_row(*map(folding, rows[-1]), style="bold")
    return table


def _fill(table: Table, columns: Mapping[str, Sequence[str]], texts: set[str], least: int | None) -> None:
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
