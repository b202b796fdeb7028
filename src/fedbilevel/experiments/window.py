"""Show a `Snapshot`: on a terminal, and as the content of a web page."""

from __future__ import annotations

from collections.abc import Sequence

import rich.table
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar

from fedbilevel.experiments.snapshot import CURVE, MetricTrace, Snapshot
from fedbilevel.experiments.tables import folding, page_table, terminal, visible
from fedbilevel.wording import without_seed

BLOCKS, NOT_FINITE = "▁▂▃▄▅▆▇█", "×"
COLOURS = {"running": "bold green", "failed": "bold red", "idle": "bold yellow", "waiting": "bold", "finished": "bold"}
POINTS, HEIGHT = 240, 48  # the number of points of a curve on a page, and the height of its drawing


def sparkline(trace: MetricTrace, most: int = CURVE) -> str:
    """Draw a curve as text. A value that is not finite is shown as ×."""
    heights = trace.heights(most)
    return "".join(NOT_FINITE if one is None else BLOCKS[min(int(one * len(BLOCKS)), 7)] for one in heights)


def on_terminal(snapshot: Snapshot, width: int) -> RenderableType:
    """Return an object with which rich prints a snapshot on a terminal."""
    state = folding(snapshot.state, COLOURS[snapshot.state]).append(f"  {snapshot.why}", "default")
    bar = ProgressBar(snapshot.whole, min(snapshot.done, snapshot.whole), width=CURVE)
    lines = [(folding(name, "dim"), folding(fact)) for name, fact in snapshot.facts.items()]
    curves = [
        (folding(trace.name, "dim"), folding(trace.last, "bold"), sparkline(trace), folding(trace.span, "dim"))
        for trace in snapshot.traces
    ]
    grids = [_grid([(bar, folding(snapshot.amount))] if snapshot.whole else []), _grid(lines), _grid(curves)]
    tables = [Group("", terminal(table, width)) for table in snapshot.tables]
    notes = [folding(note, "yellow") for note in snapshot.notes]
    return Group(folding(snapshot.title, "bold"), state, *grids, *tables, *notes)


def _grid(rows: Sequence[Sequence[RenderableType]]) -> RenderableType:
    """Return rows as a grid, after an empty line. Without rows, nothing is printed."""
    grid = rich.table.Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    return Group("", grid) if rows else Group()


def on_page(snapshot: Snapshot) -> str:
    """Return a snapshot as HTML. Every text of a run is escaped.

    A page may have more readers than the folder. If a run is under privacy, its seed is hidden in the names of folders,
    since its noise can be subtracted with the seed.
    """
    facts = "".join(f"<dt>{visible(name)}</dt><dd>{visible(fact)}</dd>" for name, fact in snapshot.facts.items())
    meter = f'<progress value="{snapshot.done:.17g}" max="{snapshot.whole:.17g}"></progress>'
    parts = [
        f"<h1>{visible(snapshot.title)}</h1>",
        f'<p role="status"><b class="{snapshot.state}">{snapshot.state}</b> {visible(snapshot.why)}</p>',
        *([f"<p>{meter} {visible(snapshot.amount)}</p>"] if snapshot.whole else []),
        *(f'<p class="note">{visible(note)}</p>' for note in snapshot.notes),
        f"<dl>{facts}</dl>",
        f'<div class="curves">{"".join(map(_figure, snapshot.traces))}</div>',
        *map(page_table, snapshot.tables),
    ]
    page = "\n".join(parts)
    return without_seed(page) if snapshot.is_private else page


def _figure(trace: MetricTrace) -> str:
    """Draw a curve as SVG: a line through the finite values, and a red line for each value that is not finite."""
    heights = trace.heights(POINTS)
    step = POINTS / max(len(heights) - 1, 1)
    line, gaps, pen = "", "", "M"
    for number, height in enumerate(heights):
        x = f"{number * step:.1f}"
        if height is None:
            gaps, pen = gaps + f"M{x},0V{HEIGHT}", "M"
        else:
            line, pen = line + f"{pen}{x},{(1 - height) * HEIGHT:.1f}", "L"
    line += "h0.1" * (len(heights) == 1)  # so that a single point is seen as a dot
    name, last, span = (visible(one) for one in (trace.name, trace.last, trace.span))
    drawing = f'<path d="{line}"/><path class="gap" d="{gaps}"/>'
    box = f'viewBox="0 -2 {POINTS} {HEIGHT + 4}" preserveAspectRatio="none" role="img" aria-label="{name}: {last}"'
    caption = f"<figcaption>{name} <b>{last}</b></figcaption>"
    return f"<figure>{caption}<svg {box}>{drawing}</svg><small>{span}</small></figure>"
