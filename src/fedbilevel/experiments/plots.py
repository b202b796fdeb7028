"""Pictures of a run and of a comparison, as PNG, PDF or SVG."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.metrics import in_percent
from fedbilevel.display.curves import (
    NARROW,
    OF_CLIENTS,
    Curve,
    axis_label,
    can_draw,
    draw_history,
    draw_panel,
    literal,
    new_figure,
    require_panel,
    time_of,
    typography,
)
from fedbilevel.engines.checkpoint import write_bytes
from fedbilevel.engines.history import History
from fedbilevel.experiments.tables import gflop
from fedbilevel.wording import missing

SUFFIXES = (".png", ".pdf", ".svg")
FAR_APART = 20  # of losses: on one linear axis the smaller would look flat
_UNDATED = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


@dataclass(frozen=True)
class ClientPanel:
    """A metric per client against a cost: of each curve the mean, in a band from the first to the last decile over
    clients, and the worst client."""

    metric: str
    cost: str
    curves: Sequence[Curve]
    places: Sequence[int]  # of the curves among all, as they have their colours
    without: Sequence[str]  # the names of those that did not measure it


def run_figure(history: History, metric: str, title: str, timed: bool = False) -> Any:
    """A row of panels: the metric, with that of the average iterate where there is one, the losses, together or one
    each where their sizes differ, and each per-client metric in a band over clients. Costs of one run grow together:
    each curve is drawn against exchanges or, where `timed`, against time; the metric of a timed run against both. The
    other costs stand below in numbers."""
    measured: list[str] = [name for name in (metric, f"average_{metric}") if name in history.columns]
    losses: list[str] = [name for name in ("outer_loss", "inner_loss") if name in history.columns]
    together = [losses] if _alike([history[name][-1] for name in losses]) else [[name] for name in losses]
    cost = "time" if timed else "exchanges"
    panels = [(measured, "exchanges")] if timed else []
    each_client = [[name] for name in history.per_client]
    panels += [(names, cost) for names in (measured, *together, *each_client) if names]
    size = (1.0 + 4.0 * len(panels), 3.6)
    with typography(size):
        figure = new_figure(size)
        (row,) = figure.subplots(1, len(panels), squeeze=False)
        for axes, (names, panel) in zip(row, panels, strict=True):
            draw_history(history, names, panel=panel, axes=axes)
        figure.suptitle(literal(title), fontsize=12)
        figure.supxlabel(f"in all: {_costs(history, timed)}", fontsize=9)
    return figure


def comparison_figure(
    curves: Sequence[Curve],
    metric: str,
    title: str,
    panels: Sequence[str],
    size: tuple[float, float] | None = None,
    each_client: Sequence[ClientPanel] = (),
) -> Any:
    """A panel per currency of cost with a line per curve, then those of metrics per client, and the legend in a free
    corner or below; where there is a size, in inches, without the title, which a paper has in its caption."""
    for panel in panels:
        require_panel(panel, curves)
    number = len(panels) + len(each_client)
    columns = number if number < 4 else 2 if number == 4 else 3
    rows = -(-number // columns)
    whole = size or (min(5.5 * columns, 13.0), 4.2 * rows)
    with typography(size):
        figure = new_figure(whole)
        cells = list(figure.subplots(rows, columns, squeeze=False).flat)
        for i, (axes, panel) in enumerate(zip(cells, panels, strict=False)):
            if i:
                axes.sharey(cells[0])
            draw_panel(axes, curves, panel, percent=in_percent(metric))
            if i % columns:
                axes.tick_params(labelleft=False)
            else:
                axes.set_ylabel(axis_label([metric]))
        for axes, one in zip(cells[len(panels) :], each_client, strict=False):
            _draw_clients(axes, one)
        _place_legend(figure, cells, number)
        if size is None:
            figure.suptitle(literal(title), fontsize=12)
    return figure


def _draw_clients(axes: Any, panel: ClientPanel) -> None:
    """A panel of a metric per client, whose title says what is drawn, and what has nothing to draw."""
    require_panel(panel.cost, panel.curves)
    draw_panel(axes, panel.curves, panel.cost, percent=in_percent(panel.metric), places=panel.places)
    axes.set_ylabel(axis_label([panel.metric]))
    without = f"\nnot measured: {', '.join(panel.without)}" if panel.without else ""
    axes.set_title(OF_CLIENTS + literal(without), fontsize="small")


def possible() -> bool:
    """Whether pictures can be drawn; where not, a line on standard error says what to install."""
    if can_draw():
        return True
    print(f"fedbilevel: nothing is drawn: pictures need {missing('matplotlib', 'cli')}", file=sys.stderr)
    return False


def require_picture(path: Path) -> None:
    """Refuse a file name whose suffix is of no format that pictures are written in."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigurationError(f"cannot draw {path}: the name of a picture ends in {', '.join(SUFFIXES)}")


def save(figure: Any, path: Path) -> None:
    """Write a figure, whole or not at all, in the format of the file's suffix."""
    require_picture(path)
    write_bytes(path, encoded(figure, path.suffix.lower()))


def encoded(figure: Any, suffix: str) -> bytes:
    """A figure in the format of one of SUFFIXES; the same figure gives the same bytes."""
    from matplotlib import rc_context

    drawn = io.BytesIO()
    with rc_context({"pdf.fonttype": 42, "svg.hashsalt": "fedbilevel"}):  # type that journals take, ids that stay
        figure.savefig(drawn, format=suffix[1:], dpi=130, metadata=_UNDATED[suffix])
    return drawn.getvalue()


def _place_legend(figure: Any, cells: Sequence[Any], used: int) -> None:
    """In the first free cell, or below with as many columns as the figure is wide enough for."""
    lines, labels = cells[0].get_legend_handles_labels()
    for axes in cells[used:]:
        axes.axis("off")
    if len(cells) > used:
        cells[used].legend(lines, labels, loc="center", frameon=False, handlelength=3.5)
        return
    length = 2.5 if figure.get_figwidth() < NARROW else 3.5
    for columns in range(min(4, len(lines)), 0, -1):
        legend = figure.legend(
            lines, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=length
        )
        if columns == 1 or legend.get_window_extent().width <= 0.98 * figure.bbox.width:
            return
        legend.remove()


def _costs(history: History, timed: bool) -> str:
    row = history.rows[-1]
    texts = [f"{row['exchanges']:,} exchanges", f"{(row['bytes_down'] + row['bytes_up']) / 1e6:,.4g} MB"]
    texts += [f"{gflop(row['flops'])} GFLOP"] if "flops" in row else []
    texts += [f"{time_of(row):,.1f} seconds of the clock"] if timed else []
    return " · ".join([*texts, f"{row['seconds']:,.1f} s in rounds"])


def _alike(values: Sequence[float]) -> bool:
    """Whether one scale shows all of them."""
    sizes = [abs(value) for value in values]
    return max(sizes, default=0.0) <= FAR_APART * min(sizes, default=float("inf"))
