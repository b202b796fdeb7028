"""Curves of histories: a metric against what it cost, in one of several currencies, in colours that everyone can tell
apart."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fedbilevel.core.errors import ConfigurationError, is_number, require, unknown
from fedbilevel.core.metrics import in_percent
from fedbilevel.wording import missing

# M. Okabe, K. Ito, "Color Universal Design", 2008; without the yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LEVEL = "#666666"
DASHES = ("-", "--", "-.", ":")
COSTS = {  # what a metric may be drawn against, and the label of that axis
    "rounds": "rounds",
    "exchanges": "exchanges",
    "megabytes": "traffic (MB, down + up, whole cohort)",
    "evaluations": "gradients + hvps (all clients)",
    "gflop": "GFLOP (all clients)",
    "seconds": "seconds in rounds",
    "time": "time (seconds, in simulations virtual)",
}
FAR_APART = 10  # of costs: on a linear axis the cheapest run would lie in its first tenth
NARROW = 5.0  # inches: a column of a paper, with small type
SHORT = {"megabytes": "traffic (MB)", "evaluations": "gradients + hvps", "gflop": "GFLOP", "time": "time (s)"}
OF_CLIENTS = "of clients: mean, 10 % to 90 %, worst (dotted)"
SHOWN = ("p10", "p90", "worst")  # of a per-client metric, beside its mean


class NumberTable(Protocol):
    """Rows of numbers by column, one row per evaluation: a `History`."""

    @property
    def rows(self) -> Sequence[Mapping[str, float]]: ...

    @property
    def columns(self) -> list[str]: ...


@dataclass(frozen=True)
class Curve:
    """A metric of a run against its costs, or the mean over several seeds.

    Args:
        label: its name in a legend.
        costs: what had been spent up to each row, by the names of COSTS that are known; shape (rows,) each.
        value: the metric in these rows, shape (rows,).
        spread: its standard deviation over the seeds, shape (rows,); None where there is a single seed.
        level: whether a line across the panel is drawn, at the last value.
        clients: of a per-client metric its "p10", "p90" and "worst" over clients, shape (rows,) each.
    """

    label: str
    costs: dict[str, np.ndarray]
    value: np.ndarray
    spread: np.ndarray | None = None
    level: bool = False
    clients: dict[str, np.ndarray] | None = None


def time_of(row: Mapping[str, float]) -> float:
    """Seconds of the clock; rows of before there was one count an exchange as one, as clocks still do by default."""
    return row.get("time", row["exchanges"])


def costs_of(row: Mapping[str, float]) -> dict[str, float]:
    """Return what had been spent up to a row of a history, by the names of COSTS; "gflop" where it was counted."""
    costs = {
        "rounds": row["round"],
        "exchanges": row["exchanges"],
        "megabytes": (row["bytes_down"] + row["bytes_up"]) / 1e6,
        "evaluations": row["gradients"] + row["hvps"],
        "seconds": row["seconds"],
        "time": time_of(row),
    }
    return costs | ({"gflop": row["flops"] / 1e9} if "flops" in row else {})


def curve(label: str, histories: Sequence[NumberTable], metric: str, level: bool = False) -> Curve:
    """Take the mean of a metric over the histories of several seeds, at the rounds that all of them have.

    Args:
        label: its name in a legend.
        metric: a column, or the name of a per-client metric, of which the first and the last decile over clients and
            the worst client's value are taken besides.
        level: whether a line across the panel is drawn, at the last value.
    """
    metric = column_of(metric, histories)
    whole = metric.removesuffix(".mean")
    tables = [{int(row["round"]): row for row in history.rows if metric in row} for history in histories]
    rounds = sorted(set.intersection(*(set(table) for table in tables)))
    values = np.array([[table[round][metric] for round in rounds] for table in tables], float)
    spent = [costs_of(table[round]) for table in tables for round in rounds]
    known = [name for name in COSTS if all(name in costs for costs in spent)]
    shape = (len(tables), len(rounds))
    costs = {name: np.reshape([one[name] for one in spent], shape).mean(axis=0) for name in known}
    spread = values.std(axis=0, ddof=1) if len(tables) > 1 else None
    clients = None
    if whole != metric and all(
        f"{whole}.{one}" in table[round] for table in tables for round in rounds for one in SHOWN
    ):
        columns = {one: [[table[round][f"{whole}.{one}"] for round in rounds] for table in tables] for one in SHOWN}
        clients = {one: np.mean(column, axis=0) for one, column in columns.items()}
    return Curve(label, costs, values.mean(axis=0), spread, level, clients)


def column_of(metric: str, histories: Sequence[NumberTable]) -> str:
    """The column that a curve of a metric runs along: of a metric that was measured per client, NAME.mean."""
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
    """Draw columns of a history against what they cost, in one panel.

    Args:
        metrics: one or more columns, or names of per-client metrics, drawn as a line for the mean in a band from the
            first to the last decile over clients, with a dotted line for the worst; with several there is a legend.
        panel: the currency of cost: rounds, exchanges, megabytes, evaluations (gradients and hvps), gflop,
            seconds (of this machine) or time (of the clock).
        size: width and height of a new figure in inches; below 5 inches of width the type is small, as in a column of a
            paper. None: 6 by 4.
        axes: Matplotlib axes to draw into; None makes a figure of pyplot's, which notebooks show.

    Returns:
        The Matplotlib axes.

    Raises:
        ConfigurationError: a column or a currency that the history does not have, or both a size and axes.
    """
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    require(bool(names), "metrics", metrics, "one or more columns of the history")
    for name in names:
        if column_of(name, [history]) not in history.columns:
            raise unknown("column of the history", name, history.columns)
    require(axes is None or size is None, "size", size, "None where there are axes: their figure has a size")
    curves = [curve(words(name), [history], name) for name in names]
    require_panel(panel, curves)
    with typography(size):
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.figure(figsize=size or (6.0, 4.0), layout="constrained").subplots()
        draw_panel(axes, curves, panel, percent=all(map(in_percent, names)))
        axes.set_ylabel(axis_label(names))
        if any(line.clients for line in curves):
            axes.set_title(OF_CLIENTS, fontsize="small")
        if len(names) > 1:
            axes.legend(frameon=False)
    return axes


def draw_panel(
    axes: Any, curves: Sequence[Curve], panel: str, *, percent: bool, places: Sequence[int] | None = None
) -> list[list[Any]]:
    """Draw curves against a cost.

    The axis of the cost begins at 0. Where the curves end far apart it is logarithmic, and linear below its first power
    of ten.

    Args:
        axes: Matplotlib axes.
        panel: the cost, by its name in COSTS.
        percent: whether values are shares, which are drawn in per cent.
        places: of each curve the place of its colour in COLOURS; None: 0, 1, … in turn.

    Returns:
        The Matplotlib artists of each curve.
    """
    values = np.concatenate([line.value for line in curves])
    log, scale = not percent and _ratio(values) > 50, 100 if percent else 1
    drawn = [
        _draw_curve(axes, line, panel, COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)], scale, log)
        for i, line in zip(range(len(curves)) if places is None else places, curves, strict=True)
    ]
    axes.set_xlabel(SHORT.get(panel, COSTS[panel]) if axes.figure.get_figwidth() < NARROW else COSTS[panel])
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    spent = [line.costs[panel] for line in curves if not line.level]
    if _ratio(np.array([one[-1] for one in spent])) > FAR_APART:
        first = min(one[one > 0].min() for one in spent)
        axes.set_xscale("symlog", linthresh=10.0 ** np.floor(np.log10(first)), linscale=0.5)
    else:
        axes.locator_params(axis="x", nbins=6)
    axes.set_xlim(left=0)
    if log:
        axes.set_yscale("log")
    if percent and (learnt := _range_after_start(curves, panel)):
        axes.set_ylim(100 * max(0.0, learnt[0] - 0.03), 100 * min(1.0, learnt[1] + 0.01))
    return drawn


def _draw_curve(axes: Any, line: Curve, panel: str, colour: str, dashes: str, scale: float, log: bool) -> list[Any]:
    """The mean, in a band of one standard deviation; on a log axis it ends below by the same factor as above, since
    mean - deviation may be below 0. Of a per-client metric the band goes from the first to the last decile of the
    clients, and a dotted line is that of the worst."""
    y = scale * line.value
    if line.level:
        return [axes.axhline(y[-1], color=LEVEL, linestyle=(0, (6, 4)), label=literal(line.label))]
    x = line.costs[panel]
    drawn = axes.plot(x, y, color=colour, linestyle=dashes, label=literal(line.label))
    if line.clients is not None:
        low, high = scale * line.clients["p10"], scale * line.clients["p90"]
        drawn += axes.plot(x, scale * line.clients["worst"], color=colour, linestyle=":", linewidth=1.0)
    elif line.spread is not None:
        high = y + scale * line.spread
        low = y * (y / high) if log else y - scale * line.spread
    if line.spread is not None or line.clients is not None:
        drawn.append(axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0))
    return drawn


def require_panel(panel: str, curves: Sequence[Curve]) -> None:
    """Refuse a name that is no currency of cost, and a cost that some of the runs did not count."""
    if panel not in COSTS:
        raise unknown("panel", panel, COSTS)
    if lacking := [line.label for line in curves if panel not in line.costs and not line.level]:
        raise ConfigurationError(f"no panel of {panel}: it was not counted in {', '.join(lacking)}")


def can_draw() -> bool:
    """Whether Matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Say what to install where Matplotlib is missing, before anything was computed."""
    if not can_draw():
        raise ConfigurationError(f"plots need {missing('matplotlib', 'cli')}")


def require_size(size: object) -> None:
    """Refuse what is not a pair of lengths in inches."""
    fits = isinstance(size, Sequence) and len(size) == 2 and all(is_number(one) and 1 <= one <= 100 for one in size)
    require(fits, "size", size, "a width and a height in inches, each from 1 to 100")


def new_figure(size: tuple[float, float]) -> Any:
    """An empty Matplotlib figure of that width and height in inches, outside pyplot."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0], size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def typography(size: tuple[float, float] | None) -> Any:
    """A context in which figures are drawn with type and lines that fit a size in inches."""
    require_matplotlib()
    if size is not None:
        require_size(size)
    from matplotlib import rc_context

    narrow = size is not None and size[0] < NARROW
    small = {"font.size": 8, "legend.fontsize": 7, "lines.linewidth": 1.2}
    style: Any = small if narrow else {"legend.fontsize": 9, "lines.linewidth": 1.8}
    return rc_context(style)


def axis_label(names: Sequence[str]) -> str:
    """The words that the names of some columns end with alike, whichever deciles and ends of a per-client metric."""
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
    """A text in which Matplotlib finds no formula."""
    return text.replace("$", r"\$")


def words(name: str) -> str:
    """A column's name for people: "client_accuracy.p10" is "client accuracy, p10"."""
    return name.replace("_", " ").replace(".", ", ")


def _ratio(values: np.ndarray) -> float:
    """Largest over smallest of some positive values; 1 where not all of them are."""
    return float(values.max() / values.min()) if values.size and values.min() > 0 else 1.0


def _range_after_start(curves: Sequence[Curve], panel: str) -> tuple[float, float] | None:
    """Lowest and highest value, leaving out the untrained model, beside which all else would look flat."""
    ends = [(line, value) for line in curves for value in (line.value, *(line.clients or {}).values())]
    values = np.concatenate([value[-1:] if line.level else value[line.costs[panel] > 0] for line, value in ends])
    return (float(values.min()), float(values.max())) if values.size else None
