"""A sweep as a picture: the metric against the swept fields.

One field gives a line with the spread over the seeds, two fields of a grid a map of colours with its numbers, and
anything else a panel for each field with a dot for each point. Failed points are crosses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedbilevel.core.errors import is_number
from fedbilevel.core.metrics import in_percent, text
from fedbilevel.engines.curves import COLOURS, axis_label, new_figure, typography
from fedbilevel.sweeps.plan import Plan, Standing

APART = 10  # largest over smallest value from which an axis is logarithmic
DECADES = 100  # largest over smallest value below which powers of ten are too few ticks: 1, 3, 10, …
TICKS = 7  # at most, where each value of a field has one
PANEL = (4.2, 3.6)  # inches
FAILED = "#B00020"


def sweep_figure(
    plan: Plan, standings: Sequence[Standing], title: str, size: tuple[float, float] | None = None, *, larger: bool
) -> Any:
    """The Matplotlib figure of a sweep.

    Args:
        standings: best first.
        size: width and height in inches; with a size, as for a paper, the figure has no title.
        larger: whether a larger value of the metric is better.
    """
    fields = plan.fields
    pair = len(fields) == 2 and _is_grid(plan)
    panels = 1 if pair else len(fields)
    columns = min(panels, 3)
    rows = -(-panels // columns)
    whole = size or ((6.4, 4.4) if panels == 1 else (PANEL[0] * columns, PANEL[1] * rows + 0.4))
    with typography(whole):
        figure = new_figure(whole)
        cells = list(figure.subplots(rows, columns, squeeze=False, sharey=not pair).flat)
        if pair:
            _draw_map(figure, cells[0], plan, standings, larger)
        else:
            for axes, field in zip(cells, fields, strict=False):
                _draw_field(axes, plan, standings, field)
            for axes in cells[::columns]:
                axes.set_ylabel(axis_label([plan.select]))
            for axes in cells[panels:]:
                axes.axis("off")
            if cells[0].get_legend_handles_labels()[0]:
                figure.legend(*cells[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
        if size is None:
            figure.suptitle(title, fontsize=10)
    return figure


def _draw_field(axes: Any, plan: Plan, standings: Sequence[Standing], field: str) -> None:
    found = sorted((one for one in standings if field in one.values), key=lambda one: one.number)
    at = _places(axes, [one.values[field] for one in found])
    scale = 100 if in_percent(plan.select) else 1
    good = [(place, one) for place, one in zip(at, found, strict=True) if one.mean is not None]
    good.sort(key=lambda pair: pair[0])
    if len(plan.fields) == 1 and plan.halving is None:
        x, mean = np.array([place for place, _ in good]), scale * np.array([one.mean for _, one in good])
        axes.plot(x, mean, color=COLOURS[0])
        if good and all(one.sd is not None for _, one in good):
            spread = scale * np.array([one.sd for _, one in good])
            each = [[outcome.row[plan.select] for outcome in one.outcomes.values()] for _, one in good]
            least = scale * np.array(list(map(min, each)))
            low, name = np.maximum(mean - spread, least), f"± sd of {len(plan.seeds)} seeds"
            axes.fill_between(x, low, mean + spread, color=COLOURS[0], alpha=0.18, lw=0, label=name)
    for rung in sorted({one.rung for _, one in good}):
        these = [(place, one) for place, one in good if one.rung == rung]
        label = f"after {these[0][1].cost('rounds'):,.0f} rounds" if plan.halving else None
        y = [scale * (one.mean or 0.0) for _, one in these]
        colour = COLOURS[len(plan.rungs) - 1 - rung]
        axes.plot([place for place, _ in these], y, "o", color=colour, markersize=5, label=label)
    for place, one in good:
        if one is standings[0] and one.mean is not None:
            axes.plot([place], [scale * (one.mean or 0.0)], "o", mfc="none", mec="black", ms=11, mew=1.3, label="best")
    if bad := [place for place, one in zip(at, found, strict=True) if one.mean is None]:
        where = axes.get_xaxis_transform()
        axes.plot(bad, [0.03] * len(bad), "x", color=FAILED, transform=where, clip_on=False, label="failed", ls="none")
    if _apart([one.mean for _, one in good if one.mean is not None]) and not in_percent(plan.select):
        axes.set_yscale("log")
    axes.margins(x=0.1)
    axes.set_xlabel(field)
    axes.grid(alpha=0.3)


def _draw_map(figure: Any, axes: Any, plan: Plan, standings: Sequence[Standing], larger: bool) -> None:
    """The metric of every pair of values of two fields, in colours and numbers."""
    from matplotlib.colors import LogNorm, Normalize

    first, second = sorted(plan.fields, key=lambda name: -len(_levels(plan, name)))
    columns, rows = _levels(plan, first), _levels(plan, second)
    scale = 100 if in_percent(plan.select) else 1
    table = np.full((len(rows), len(columns)), np.nan)
    cells = {(rows.index(one.values[second]), columns.index(one.values[first])): one for one in standings}
    for place, one in cells.items():
        table[place] = np.nan if one.mean is None else scale * one.mean
    known = table[np.isfinite(table)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    norm = LogNorm(low, high) if _apart(list(known)) and scale == 1 else Normalize(low, high if high > low else low + 1)
    colours = "cividis" if larger else "cividis_r"
    image = axes.imshow(table, cmap=colours, norm=norm, aspect="auto", origin="lower")
    for (row, column), one in cells.items():
        shade = image.cmap(norm(table[row, column])) if one.mean is not None else (1, 1, 1, 1)
        dark = sum(shade[:3]) < 1.5
        shown = text(plan.select, one.mean) if one.mean is not None else "failed"
        shown += f"\n{one.cost('rounds'):,.0f} rounds" if plan.halving and one.mean is not None else ""
        axes.text(column, row, shown, ha="center", va="center", fontsize="small", color="white" if dark else "black")
        if one is standings[0] and one.mean is not None:
            frame = [column - 0.48, column + 0.48, column + 0.48, column - 0.48, column - 0.48]
            axes.plot(frame, [row - 0.48, row - 0.48, row + 0.48, row + 0.48, row - 0.48], color="#D55E00", lw=2.5)
    axes.set_xticks(range(len(columns)), [_label(value) for value in columns])
    axes.set_yticks(range(len(rows)), [_label(value) for value in rows])
    axes.set_xlabel(first)
    axes.set_ylabel(second)
    figure.colorbar(image, label=axis_label([plan.select]))


def _places(axes: Any, values: Sequence[Any]) -> list[float]:
    """Where the values stand on the horizontal axis, which is prepared for them: numbers on a scale, else in order."""
    from matplotlib.ticker import LogLocator

    if all(map(is_number, values)):
        if _apart(values):
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter("")
            if max(values) < DECADES * min(values):
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
                axes.xaxis.set_major_formatter(lambda value, _: _label(value))
        if len(levels := sorted(set(values))) <= TICKS:
            axes.set_xticks(levels, list(map(_label, levels)))
            axes.minorticks_off()
        return [float(value) for value in values]
    labels = list(dict.fromkeys(map(_label, values)))
    axes.set_xticks(range(len(labels)), labels, rotation=30 if sum(map(len, labels)) > 40 else 0)
    return [float(labels.index(_label(value))) for value in values]


def _levels(plan: Plan, field: str) -> list[Any]:
    """The values of a field: numbers by their size, others as they were given."""
    found: list[Any] = []
    for point in plan.points:
        if field in point and point[field] not in found:
            found.append(point[field])
    return sorted(found) if all(map(is_number, found)) else found


def _is_grid(plan: Plan) -> bool:
    first, second = (_levels(plan, field) for field in plan.fields)
    return len(first) * len(second) == len(plan.points)


def _apart(values: Sequence[float]) -> bool:
    """Whether positive values are so far apart that they need a logarithmic axis."""
    return len(values) > 0 and min(values) > 0 and max(values) > APART * min(values)


def _label(value: Any) -> str:
    return f"{value:g}" if is_number(value) else str(value)
