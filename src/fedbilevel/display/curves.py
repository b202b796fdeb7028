"""Draw metrics of one run or several against their costs, as PNG, PDF or SVG.

People with any kind of colour vision can tell the colours apart.
"""

from __future__ import annotations

import importlib.util
import io
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedbilevel.core.errors import ConfigurationError, is_number, require, unknown
from fedbilevel.core.metrics import in_percent
from fedbilevel.wording import missing

# The colours are from M. Okabe, K. Ito, "Color Universal Design", 2008, without the yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LEVEL = "#666666"
DASHES = ("-", "--", "-.", ":")
COSTS = {  # the costs against which a metric can be drawn, with the labels of the axes
    "rounds": "rounds",
    "exchanges": "exchanges",
    "megabytes": "traffic (MB, down + up, whole cohort)",
    "evaluations": "gradients + hvps (all clients)",
    "gflop": "GFLOP (all clients)",
    "seconds": "seconds in rounds",
    "time": "time (seconds; virtual in a simulation)",
    "epsilon": "ε of privacy, the most that a client spent",
}
FAR_APART = 10  # if the ratio of the runs' costs is larger, the axis is logarithmic
NARROW = 5.0  # a figure of fewer inches, as for a column of a paper, has small type
SHORT = {
    "megabytes": "traffic (MB)",
    "evaluations": "gradients + hvps",
    "gflop": "GFLOP",
    "time": "time (s)",
    "epsilon": "ε",
}
OF_CLIENTS = "of clients: mean, 10 % to 90 %, worst (dotted)"
ONCE = "measured once: eval_every gives more points"
UNNAMED = "_nolegend_"  # a label that Matplotlib leaves out when legend(["one", "other"]) names curves
SHOWN = ("p10", "p90", "worst")  # the statistics of a per-client metric that are drawn with its mean
UNLIKE = 20  # losses with a larger ratio get a panel each, since the smaller one would look flat
SUFFIXES = (".png", ".pdf", ".svg")
UNDATED = {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


class NumberTable(Protocol):
    """A table with one row per evaluation and a number for each column, such as `History`."""

    @property
    def rows(self) -> Sequence[Mapping[str, float]]: ...

    @property
    def columns(self) -> list[str]: ...

    @property
    def per_client(self) -> list[str]: ...


@dataclass(frozen=True)
class Curve:
    """A metric of a run, or its mean over several seeds, against the run's costs.

    Args:
        label: the name of the curve in a legend.
        costs: the total costs up to each row, by their names in COSTS; costs that were not counted are left out.
        value: the metric in each row.
        spread: the standard deviation of the metric over the seeds, for each row; None for a single seed.
        level: whether a horizontal line at the last value is drawn in place of the curve.
        clients: for a per-client metric, "p10", "p90" and "worst" over clients, with a number for each row.
    """

    label: str
    costs: dict[str, np.ndarray]
    value: np.ndarray
    spread: np.ndarray | None = None
    level: bool = False
    clients: dict[str, np.ndarray] | None = None


@dataclass(frozen=True)
class ClientPanel:
    """A panel of a per-client metric against a cost.

    Each curve shows the mean over clients, with a band from the first to the last decile, and a dotted line for the
    worst client.
    """

    metric: str
    cost: str
    curves: Sequence[Curve]
    places: Sequence[int]  # the indices of these curves among all curves, which determine the colours
    without: Sequence[str]  # the names of the runs that did not measure the metric


def time_of(row: Mapping[str, float]) -> float:
    """Return the seconds of the clock up to a row of a history.

    Rows that early versions wrote have no time; in these, each exchange is assumed to take one second, as in the
    default clock.
    """
    return row.get("time", row["exchanges"])


def costs_of(row: Mapping[str, float]) -> dict[str, float]:
    """Return the total costs up to a row, by the names of COSTS.

    "gflop" and "epsilon" are included only if they were counted.
    """
    costs = {
        "rounds": row["round"],
        "exchanges": row["exchanges"],
        "megabytes": (row["bytes_down"] + row["bytes_up"]) / 1e6,
        "evaluations": row["gradients"] + row["hvps"],
        "seconds": row["seconds"],
        "time": time_of(row),
    }
    costs |= {"gflop": row["flops"] / 1e9} if "flops" in row else {}
    return costs | ({"epsilon": row["epsilon"]} if "epsilon" in row else {})


def curve(label: str, histories: Sequence[NumberTable], metric: str, level: bool = False) -> Curve:
    """Return the curve of a metric: the mean over the histories of several seeds, at the rounds that all of them have.

    Args:
        label: the name of the curve in a legend.
        histories: a history for each seed.
        metric: a column, or the name of a per-client metric. The curve of a per-client metric also has the first and
            the last decile over clients, and the worst client.
        level: whether a horizontal line at the last value is drawn in place of the curve.
    """
    metric = column_of(metric, histories)
    whole = metric.removesuffix(".mean")
    tables = [{int(row["round"]): row for row in history.rows if metric in row} for history in histories]
    rounds = sorted(set.intersection(*(set(table) for table in tables)))
    values = np.array([[table[round][metric] for round in rounds] for table in tables], float)
    spent = [costs_of(table[round]) for table in tables for round in rounds]
    names = [name for name in COSTS if all(name in costs for costs in spent)]
    shape = (len(tables), len(rounds))
    costs = {name: np.reshape([each[name] for each in spent], shape).mean(axis=0) for name in names}
    spread = values.std(axis=0, ddof=1) if len(tables) > 1 else None
    clients = None
    if whole != metric and all(
        f"{whole}.{end}" in table[round] for table in tables for round in rounds for end in SHOWN
    ):
        columns = {end: [[table[round][f"{whole}.{end}"] for round in rounds] for table in tables] for end in SHOWN}
        clients = {end: np.mean(column, axis=0) for end, column in columns.items()}
    return Curve(label, costs, values.mean(axis=0), spread, level, clients)


def column_of(metric: str, histories: Sequence[NumberTable]) -> str:
    """Return the column that the curve of a metric shows: the column METRIC, or METRIC.mean for a per-client metric."""
    for name in (metric, f"{metric}.mean"):
        if all(name in history.columns for history in histories):
            return name
    return metric


def draw_history(
    history: NumberTable,
    metrics: str | Sequence[str],
    *,
    panel: str = "exchanges",
    size: tuple[float, float] | None = None,
    axes: Any = None,
) -> Any:
    """Draw columns of a history against a cost, in one panel.

    Args:
        history: the history of a run.
        metrics: one or more columns, or names of per-client metrics. A per-client metric is drawn as a line for the
            mean, a band from the first to the last decile over clients, and a dotted line for the worst client. If
            there are several metrics, there is a legend.
        panel: the cost: "rounds", "exchanges", "megabytes", "evaluations" (gradients and hvps), "gflop", "seconds" (of
            this machine), "time" (of the clock) or "epsilon" (of privacy).
        size: the width and the height of a new figure in inches, each from 1 to 100; None: 6 by 4. A figure that is
            narrower than 5 inches has small type, for a column of a paper.
        axes: the Matplotlib axes to draw into; None: axes of a new figure of pyplot, which notebooks show.

    Returns:
        The Matplotlib axes.

    Raises:
        ConfigurationError: the history does not have a column or the cost, both `size` and `axes` are given, or
            Matplotlib is missing.
    """
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    require(bool(names), "metrics", metrics, "one or more columns of the history")
    for name in names:
        if column_of(name, [history]) not in history.columns:
            raise unknown("column of the history", name, history.columns)
    require(axes is None or size is None, "size", size, "None, since axes are given, and their figure has a size")
    curves = [curve(words(name), [history], name) for name in names]
    require_panel(panel, curves)
    style, figure = typography(size), None
    if axes is None:
        from matplotlib import pyplot

        # The figure is made outside the style. The first figure of a notebook sets up how figures are shown there, and
        # the end of the style would undo this.
        figure = pyplot.figure(figsize=size or (6.0, 4.0), layout="constrained")
    with style:
        axes = figure.subplots() if figure else axes
        draw_panel(axes, curves, panel, percent=all(map(in_percent, names)))
        axes.set_ylabel(axis_label(names))
        notes = {OF_CLIENTS: any(line.clients for line in curves), ONCE: min(len(line.value) for line in curves) == 1}
        if any(notes.values()):
            axes.set_title("\n".join(note for note, holds in notes.items() if holds), fontsize="small")
        if len(names) > 1:
            axes.legend(frameon=False)
    return axes


def draw_panel(
    axes: Any, curves: Sequence[Curve], panel: str, *, percent: bool, places: Sequence[int] | None = None
) -> list[list[Any]]:
    """Draw curves against a cost, in one panel.

    The axis of the cost begins at 0. It is linear if the runs' costs differ by a factor of at most 10. Otherwise it is
    logarithmic, with a linear part near 0.

    Args:
        axes: Matplotlib axes.
        curves: the curves.
        panel: the cost, a name of COSTS.
        percent: whether the values are shares, which are drawn in percent.
        places: the index of each curve's colour in COLOURS; None: the next colours that are not used in the axes yet.

    Returns:
        The Matplotlib artists of each curve.
    """
    values = np.concatenate([line.value for line in curves])
    log, scale = not percent and _ratio(values) > 50, 100 if percent else 1
    there, before = len(axes.get_legend_handles_labels()[1]), axes.get_ylim()
    drawn = [
        _draw_curve(axes, line, panel, COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], scale, log)
        for i, line in zip(range(there, there + len(curves)) if places is None else places, curves, strict=True)
    ]
    axes.set_xlabel(SHORT.get(panel, COSTS[panel]) if axes.figure.get_figwidth() < NARROW else COSTS[panel])
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    spent = [line.costs[panel] for line in curves if not line.level]
    if _ratio(np.array([cost[-1] for cost in spent])) > FAR_APART:
        first = min(cost[cost > 0].min() for cost in spent)
        axes.set_xscale("symlog", linthresh=10.0 ** np.floor(np.log10(first)), linscale=0.5)
    else:
        axes.locator_params(axis="x", nbins=6)
    axes.set_xlim(left=0)
    if log:
        axes.set_yscale("log")
    if percent and (learnt := _range_after_start(curves, panel)):
        ends = 100 * max(0.0, learnt[0] - 0.03), 100 * min(1.005, learnt[1] + 0.01)
        axes.set_ylim((min(ends[0], before[0]), max(ends[1], before[1])) if there else ends)
    return drawn


def _draw_curve(axes: Any, line: Curve, panel: str, colour: str, dashes: str, scale: float, log: bool) -> list[Any]:
    """Draw a curve, with a band of one standard deviation over seeds on both sides.

    On a logarithmic axis, the upper edge of the band is above the mean by the same factor as the lower edge is below,
    since mean − deviation may be negative. The band of a per-client metric goes from the first to the last decile over
    clients, and a dotted line shows the worst client.
    """
    y = scale * line.value
    if line.level:
        return [axes.axhline(y[-1], color=LEVEL, linestyle=(0, (6, 4)), label=literal(line.label))]
    x = line.costs[panel]
    dot = "o" if len(x) == 1 else None  # a line through one point would be invisible
    drawn = axes.plot(x, y, color=colour, linestyle=dashes, marker=dot, label=literal(line.label))
    if line.clients is not None:
        low, high = scale * line.clients["p10"], scale * line.clients["p90"]
        worst = scale * line.clients["worst"]
        drawn += axes.plot(x, worst, color=colour, linestyle=":", linewidth=1.0, label=UNNAMED)
    elif line.spread is not None:
        high = y + scale * line.spread
        low = y * (y / high) if log else y - scale * line.spread
    if line.spread is not None or line.clients is not None:
        drawn.append(axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0, label=UNNAMED))
    return drawn


def run_figure(history: NumberTable, metric: str, title: str, timed: bool = False) -> Any:
    """Draw a figure of one run, with panels in a row: the metric, the losses, and each per-client metric.

    If the metric was also measured at the average iterate, this is drawn in the metric's panel. Losses of very
    different sizes get a panel each. All costs of one run grow together, so curves are drawn only against exchanges. If
    `timed` is True, they are drawn against time, and the metric against both. The totals of all costs are printed below
    the panels.
    """
    measured: list[str] = [name for name in (metric, f"average_{metric}") if name in history.columns]
    losses: list[str] = [name for name in ("outer_loss", "inner_loss") if name in history.columns and name != metric]
    sizes = [abs(history.rows[-1].get(name, math.nan)) for name in losses]
    alike = max(sizes, default=0.0) <= UNLIKE * min(sizes, default=math.inf)
    together = [losses] if alike else [[name] for name in losses]
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
    """Draw a figure that compares runs: for each cost a panel with all curves, then panels of per-client metrics.

    The legend is in a free cell or below the panels. With a `size` in inches the figure has no title, since papers have
    a caption instead.
    """
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
        for axes, client_panel in zip(cells[len(panels) :], each_client, strict=False):
            _draw_clients(axes, client_panel)
        _place_legend(figure, cells, number)
        if size is None:
            figure.suptitle(literal(title), fontsize=12)
    return figure


def _draw_clients(axes: Any, panel: ClientPanel) -> None:
    """Draw a panel of a per-client metric.

    Its title names the statistics that are drawn, and the runs that have no such metric.
    """
    require_panel(panel.cost, panel.curves)
    draw_panel(axes, panel.curves, panel.cost, percent=in_percent(panel.metric), places=panel.places)
    axes.set_ylabel(axis_label([panel.metric]))
    without = f"\nnot measured: {', '.join(panel.without)}" if panel.without else ""
    axes.set_title(OF_CLIENTS + literal(without), fontsize="small")


def _place_legend(figure: Any, cells: Sequence[Any], used: int) -> None:
    """Place the legend in the first free cell, or below the panels, in as many columns as fit."""
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


def _costs(history: NumberTable, timed: bool) -> str:
    row = history.rows[-1]
    texts = [f"{row['exchanges']:,} exchanges", f"{(row['bytes_down'] + row['bytes_up']) / 1e6:,.4g} MB"]
    texts += [f"{gflop(row['flops'])} GFLOP"] if "flops" in row else []
    texts += [f"{time_of(row):,.1f} seconds of the clock"] if timed else []
    texts += [f"ε = {row['epsilon']:.4g}"] if "epsilon" in row else []
    return " · ".join([*texts, f"{row['seconds']:,.1f} s in rounds"])


def gflop(flops: float) -> str:
    """Return a number of floating-point operations in units of 10⁹, as a text with three digits or more."""
    return f"{flops / 1e9:,.0f}" if flops >= 1e11 else f"{flops / 1e9:.3g}"


def require_picture(file: Path) -> None:
    """Refuse a file name if its suffix does not belong to a supported format."""
    if file.suffix.lower() not in SUFFIXES:
        allowed = ", ".join(SUFFIXES)
        message = f"cannot draw {file}: the name of a picture must end in {allowed}"
        raise ConfigurationError(path="name of a picture", got=str(file), allowed=allowed, message=message)


def encoded(figure: Any, file: Path) -> bytes:
    """Return a figure as the bytes of a file, in the format of the file's suffix.

    The same figure gives the same bytes.
    """
    require_picture(file)
    from matplotlib import rc_context

    buffer, suffix = io.BytesIO(), file.suffix.lower()
    with rc_context({"pdf.fonttype": 42, "svg.hashsalt": "fedbilevel"}):  # fonts that journals accept; fixed ids
        figure.savefig(buffer, format=suffix[1:], dpi=130, metadata=UNDATED[suffix])
    return buffer.getvalue()


def require_panel(panel: str, curves: Sequence[Curve]) -> None:
    """Refuse an unknown cost, and a cost that some of the runs did not count."""
    if panel not in COSTS:
        raise unknown("panel", panel, COSTS)
    if lacking := [line.label for line in curves if panel not in line.costs and not line.level]:
        message = f"cannot draw a panel of {panel}: it was not counted in {', '.join(lacking)}"
        raise ConfigurationError(path="panel", got=panel, allowed="a cost that all runs counted", message=message)


def installed() -> bool:
    """Return whether Matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def can_draw() -> bool:
    """Return whether pictures can be drawn. If not, print on standard error what to install."""
    if not installed():
        print(f"fedbilevel: no picture is drawn: pictures need {missing('matplotlib', 'cli')}", file=sys.stderr)
    return installed()


def require_matplotlib() -> None:
    """Raise a ConfigurationError that says what to install if Matplotlib is missing."""
    if not installed():
        raise ConfigurationError(f"plots need {missing('matplotlib', 'cli')}")


def require_size(size: object) -> None:
    """Refuse a size that is not a pair of lengths in inches."""
    fits = isinstance(size, Sequence) and len(size) == 2 and all(is_number(side) and 1 <= side <= 100 for side in size)
    require(fits, "size", size, "a width and a height in inches, each from 1 to 100")


def new_figure(size: tuple[float, float]) -> Any:
    """Return an empty Matplotlib figure of this width and height in inches. It is not a figure of pyplot."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(size[0], size[1]), layout="constrained")


def typography(size: tuple[float, float] | None) -> Any:
    """Return a context manager in which figures get type and lines that fit a size in inches."""
    require_matplotlib()
    if size is not None:
        require_size(size)
    from matplotlib import rc_context

    narrow = size is not None and size[0] < NARROW
    small = {"font.size": 8, "legend.fontsize": 7, "lines.linewidth": 1.2}
    style: Any = small if narrow else {"legend.fontsize": 9, "lines.linewidth": 1.8}
    return rc_context(style)


def axis_label(names: Sequence[str]) -> str:
    """Return an axis label for some columns: the last words that all names share, without ends such as .p10."""
    if len(names) == 1:
        return literal(words(names[0])) + (" (%)" if in_percent(names[0]) else "")
    last = [name.partition(".")[0].split("_")[::-1] for name in names]
    common: list[str] = []
    for parts in zip(*last, strict=False):
        if len(set(parts)) > 1:
            break
        common.insert(0, parts[0])
    return literal(" ".join(common)) + (" (%)" if all(map(in_percent, names)) else "")


def literal(text: str) -> str:
    """Escape a text, so that Matplotlib does not read parts of it as formulas."""
    return text.replace("$", r"\$")


def words(name: str) -> str:
    """Return a column's name as words: "client_accuracy.p10" becomes "client accuracy, p10"."""
    return name.replace("_", " ").replace(".", ", ")


def _ratio(values: np.ndarray) -> float:
    """Return the ratio of the largest to the smallest of some values; 1 if a value is not positive."""
    return float(values.max() / values.min()) if values.size and values.min() > 0 else 1.0


def _range_after_start(curves: Sequence[Curve], panel: str) -> tuple[float, float] | None:
    """Return the lowest and the highest value of curves after the start.

    The values of the untrained model are left out, since all others would look flat beside them.
    """
    ends = [(line, value) for line in curves for value in (line.value, *(line.clients or {}).values())]
    values = np.concatenate([value[-1:] if line.level else value[line.costs[panel] > 0] for line, value in ends])
    return (float(values.min()), float(values.max())) if values.size else None
