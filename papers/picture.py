"""Draw the picture of a figure.

The picture has a panel of curves for each setting. For a series, or if a cost is compared, it has one panel with the
readings of all settings. If costs are counted without a run, it has a panel for each cost. If the paper has a table,
the picture shows the values at the end of the runs beside the values of the table. Other numbers that the paper reports
are hollow markers or dashed lines in the same picture.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Drawing

from fedbilevel.experiments import COLOURS, COSTS, Curve, draw_panel, in_percent
from papers.claims import of_curve
from papers.figure import Claim, Figure, Reported
from papers.numbers import axis, text

MARKERS = "ox+v"  # markers that can be seen through each other
COLUMNS = 3  # the largest number of columns of panels
SPAN = 50.0  # if costs differ by a larger factor, the axis is logarithmic
CLOSE = 0.1  # labels are apart if their values are apart by this share of the axis
NOTE = 9  # the height of a line of a note, in points
PAPER: dict[str, Any] = {"color": "#333333", "fillstyle": "none", "linestyle": "none", "marker": "D"}
"""The style of markers in legends that stand for numbers of the paper."""
READ = {"end": "at the end", "late": "mean over the second half", "mean": "mean over the run"}  # of a curve


def draw(figure: Figure, outcome: Mapping[str, Any]) -> bytes:
    """Return the picture of an outcome, as the bytes of a PNG."""
    make = points if figure.series or figure.metric in COSTS else beside_table if figure.printed else curves
    make = costs if figure.counted else make
    drawing, file = make(figure, outcome), io.BytesIO()
    drawing.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def curves(figure: Figure, outcome: Mapping[str, Any]) -> Drawing:
    """Draw the metric against its cost, with a band of one standard deviation over the seeds."""
    panels = outcome["panels"]
    columns = 2 if len(panels) == 4 else min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    drawing = Drawing((3.6 * columns + 0.4, 3.2 * rows + 0.6), layout="constrained")
    cells = list(drawing.subplots(rows, columns, squeeze=False).flat)
    places = {name: place for place, name in enumerate(figure.methods)}  # a method has the same colour in all panels
    for axes, (panel, methods) in zip(cells, panels.items(), strict=False):
        known = {name: of["curve"] for name, of in methods.items() if of["curve"]}
        lines = [curve(name, figure.against, of) for name, of in known.items()]
        if lines:
            percent, colours = in_percent(figure.metric), [places[name] for name in known]
            draw_panel(axes, lines, figure.against, percent=percent, places=colours)
            axes.set_xlabel(axis(figure.against))
            beside_curves(axes, figure, panel, methods)
        lost = left_out(methods)
        axes.set_title(panel, fontsize=10, pad=6 + NOTE * (lost.count("\n") + 1) if lost else None)
        axes.annotate(lost, (0.5, 1), (0, 3), "axes fraction", "offset points", fontsize=7, ha="center", va="bottom")
    for axes in cells[len(panels) :]:
        axes.axis("off")
    for axes in cells[::columns]:
        axes.set_ylabel(axis(figure.metric))
    legend(drawing)
    return drawing


def beside_curves(axes: Any, figure: Figure, panel: str, methods: Mapping[str, Any]) -> None:
    """Draw the numbers that the paper reports for curves: hollow markers, and dashed lines for levels.

    They have the colours of the methods. The axis of the metric is made longer if some of them would be outside.
    """
    low, high = axes.get_ylim()
    for one, method, value in reported_values(figure, panel, methods, figure.metric):
        if one.at is None:
            axes.axhline(value, color=colour_of(figure, method), linewidth=1.2, linestyle=(0, (6, 3)))
            axes.plot([], [], color=PAPER["color"], linestyle=(0, (6, 3)), label=of_source(one))
        else:
            mark(axes, figure, (one, method), (one.at, value), clip_on=False, zorder=5)
        low, high = min(low, value - 1), max(high, value + 1)
    axes.set_ylim(low, high)


def reported_values(
    figure: Figure, panel: str, methods: Mapping[str, Any], metric: str
) -> Iterator[tuple[Reported, str, float]]:
    """Yield (entry of `reported`, method, value) for the numbers that the paper reports for a metric in a panel.

    Percentages of a cost of ours are turned into costs, and differences to a mean of ours into values.
    """
    for one in figure.reported:
        if one.panel not in ("", panel) or (one.metric or figure.metric) != metric:
            continue
        shown = [methods[name] for name in one.over]
        means = [of["costs"][metric] if metric in COSTS else 100 * of["mean"] for of in shown]
        base = float(np.mean(means)) if means else 0.0
        for method, value in one.values.items():
            yield one, method, value if not means else value * base / 100 if metric in COSTS else value + base


def mark(axes: Any, figure: Figure, entry: tuple[Reported, str], at: tuple[float, float], **style: Any) -> None:
    """Draw a reported number of a method as a hollow marker in the colour of the method.

    The legend has a grey marker, which stands for all methods.
    """
    one, method = entry
    axes.plot(*at, **{**PAPER, "color": colour_of(figure, method), **style})
    axes.plot([], [], **PAPER, label=of_source(one))


def colour_of(figure: Figure, method: str) -> str:
    """Return the colour of a method, which is the same in all panels."""
    return COLOURS[list(figure.methods).index(method) % len(COLOURS)]


def of_source(one: Reported) -> str:
    """Return the label of reported numbers in a legend."""
    return "published code" if one.source == "published code" else "paper"


def left_out(methods: Mapping[str, Any]) -> str:
    """Return a note on the methods of a panel whose curves leave out failed runs; "" if no run failed."""
    counts = {name: (len(of["values"]), of.get("failed_runs", 0)) for name, of in methods.items()}
    drawn = [f"{name}: {count} of {count + failed}" for name, (count, failed) in counts.items() if failed]
    whole = ", ".join(one.replace(" ", "\N{NO-BREAK SPACE}") for one in drawn)  # lines end after a method
    return textwrap.fill(f"runs that did not fail: {whole}", 52, break_on_hyphens=False) if drawn else ""


def curve(name: str, cost: str, of: Mapping[str, Any]) -> Curve:
    """Return a curve from the stored numbers of a method."""
    return Curve(name, {cost: np.array(of["cost"])}, np.array(of["mean"]), np.array(of["sd"]))


def beside_table(figure: Figure, outcome: Mapping[str, Any]) -> Drawing:
    """Draw, for each method, the value at the end with its standard deviation over the seeds, and the paper's value."""
    panels, percent = outcome["panels"], 100 if in_percent(figure.metric) else 1
    width, height = 3.2 * len(panels) + 1.2, 0.32 * len(figure.methods) + 1.4
    drawing = Drawing((max(width, 5.0), height), layout="constrained")
    for axes, (panel, methods) in zip(
        drawing.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True
    ):
        names = [name for name in methods if methods[name]["values"]]
        for row, name in enumerate(reversed(names)):
            mean, spread, table = methods[name]["mean"], methods[name]["sd"] or 0.0, figure.printed[panel].get(name)
            axes.errorbar(
                percent * mean, row, xerr=percent * spread, fmt="o", color=COLOURS[0], capsize=3, label="here"
            )
            if table is not None:
                axes.plot(table, row, "D", color=COLOURS[1], fillstyle="none", label="the paper's table")
        axes.set_yticks(range(len(names)), names[::-1])
        axes.set(title=panel, xlabel=axis(figure.metric))
        axes.grid(alpha=0.3, linewidth=0.6)
    legend(drawing)
    return drawing


def costs(figure: Figure, outcome: Mapping[str, Any]) -> Drawing:
    """Draw the costs of a round that were counted without running it: a panel for each cost that claims compare."""
    names = list(dict.fromkeys([figure.metric, *(claim.metric for claim in figure.claims if claim.metric)]))
    rows = [(panel, method, of) for panel, methods in outcome["panels"].items() for method, of in methods.items()]
    labels = [method if len(outcome["panels"]) == 1 else f"{method}, {panel}" for panel, method, _ in rows]
    drawing = Drawing((3.4 * len(names) + 1.2, 0.32 * len(rows) + 1.0), layout="constrained")
    for axes, name in zip(drawing.subplots(1, len(names), squeeze=False, sharey=True).flat, names, strict=True):
        axes.barh(labels, [of["costs"][name] for *_, of in rows], 0.6, color=COLOURS[0])
        places = {(panel, method): place for place, (panel, method, _) in enumerate(rows)}
        for panel, methods in outcome["panels"].items():
            for one, method, value in reported_values(figure, panel, methods, name):
                axes.plot(value, places[panel, method], **PAPER, label=of_source(one))
        axes.set(xlabel=axis(name))
        axes.grid(axis="x", alpha=0.3, linewidth=0.6)
        axes.set_axisbelow(True)
    drawing.axes[0].invert_yaxis()
    legend(drawing)
    return drawing


def points(figure: Figure, outcome: Mapping[str, Any]) -> Drawing:
    """Draw the readings of all panels.

    The readings of a series are drawn against the panels' values on logarithmic axes, with a grey line of the predicted
    slope. Other readings are drawn side by side, on an axis from 0, or on a logarithmic axis if the largest is more
    than SPAN times the least.
    """
    drawing = Drawing((max(6.0, 1.2 * len(outcome["panels"])), 4.4), layout="constrained")
    axes = drawing.subplots()
    slopes = [claim for claim in figure.claims if claim.slope is not None and claim.by in READ]
    slopes = [claim for claim in slopes if claim.metric in (None, figure.metric)]
    values = {name: panel.value or 0.0 for name, panel in figure.panels.items()}
    places = values if figure.series else {name: float(at) for at, name in enumerate(outcome["panels"])}
    for k, method in enumerate(figure.methods):
        claims, colour = [claim for claim in slopes if claim.better == method], colour_of(figure, method)
        found = {name: of[method] for name, of in outcome["panels"].items() if of.get(method, {}).get("values")}
        if not found:
            continue
        at = np.array([places[name] for name in found])
        mean, spread = np.array([point(claims[0] if claims else None, of) for of in found.values()]).T
        label = f"{method}, {in_words(claims, outcome)}" if claims else method
        style: Any = {"color": colour, "marker": MARKERS[k % len(MARKERS)], "capsize": 3}
        beside = shift(figure, method)
        line = "-" if figure.series and not claims else ""
        axes.errorbar(at + beside, mean, spread, label=label, linestyle=line, **style)
        for claim in claims:
            of_claim = np.isin(list(found), list(figure.panels_of(claim)))
            u, v = np.log(at[of_claim]), np.log(mean[of_claim])
            predicted = np.exp(v.mean() + (claim.slope or 0.0) * (u - u.mean()))
            axes.plot(at[of_claim], predicted, color="#666666", linewidth=0.8, zorder=0)
    for panel, methods in outcome["panels"].items():
        for one, method, value in reported_values(figure, panel, methods, figure.metric):
            mark(axes, figure, (one, method), (places[panel] + shift(figure, method), value), markersize=5)
    means = [of["mean"] for methods in outcome["panels"].values() for of in methods.values() if of["values"]]
    apart = bool(means) and max(means) > SPAN * min(means) > 0
    axes.set(xlabel=figure.series, ylabel=axis(figure.metric))
    axes.set(xscale="log" if figure.series else "linear", yscale="log" if figure.series or apart else "linear")
    axes.set_xticks(list(places.values()), apart_from_each_other(places.values()) if figure.series else list(places))
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3, linewidth=0.6)
    if not figure.series:
        axes.set_ylim(bottom=None if apart else 0)
        axes.tick_params(axis="x", rotation=30 if len(places) > 4 else 0)
    legend(drawing)
    return drawing


def shift(figure: Figure, method: str) -> float:
    """Return by how much the readings of a method are beside the place of a panel."""
    k = list(figure.methods).index(method)
    return 0.0 if figure.series else 0.6 * ((k + 0.5) / len(figure.methods) - 0.5)


def apart_from_each_other(values: Collection[float]) -> list[str]:
    """Return the labels of the values of a series. A label that would touch the one before it is a line lower."""
    first, labels, last = math.log(min(values)), dict[float, str](), -math.inf
    span = math.log(max(values)) - first or 1.0
    for value in sorted(set(values)):
        at = (math.log(value) - first) / span
        lower = at - last < CLOSE
        labels[value] = "\n" * lower + text("", value)
        last = last if lower else at
    return [labels[value] for value in values]


def point(claim: Claim | None, of: Mapping[str, Any]) -> tuple[float, float]:
    """Return a method's reading in a panel, and its standard deviation over the seeds if it is known."""
    if claim is None or claim.by == "end":
        return of["mean"], of["sd"] or 0.0
    return of_curve(claim.by, of["curve"]["cost"], of["curve"]["mean"]), np.nan


def in_words(claims: Sequence[Claim], outcome: Mapping[str, Any]) -> str:
    """Say in words what a method's readings are, and give the fitted and the predicted slope of each claim."""
    lines = []
    for claim in claims:
        (found,) = [one for one in outcome["findings"] if one["says"] == claim.says]
        over = f" from {claim.panels[0]} to {claim.panels[-1]}" if claim.panels and len(claims) > 1 else ""
        if found["difference"] is None:
            lines += [f"predicted slope {claim.slope:g}{over} (grey), not fitted: {found['note']}"]
            continue
        fitted = f"{round(found['better_mean'], 2) + 0.0:.2f} ± {found['half_width']:.2g}"
        lines += [f"slope {fitted}{over}, predicted {claim.slope:g} (grey)".replace("-", "−")]
    readings = dict.fromkeys(READ[claim.by] for claim in claims)
    return f"{' and '.join(readings)}: " + ";\n".join(lines)


def legend(drawing: Drawing) -> None:
    """Draw one legend for all panels, with as many columns as fit."""
    pairs: Sequence[Any] = [axes.get_legend_handles_labels() for axes in drawing.axes]
    named = {name: handle for handles, names in pairs for handle, name in zip(handles, names, strict=True)}
    named |= {name: named.pop(name) for name in ("published code", "paper") if name in named}  # they come last
    if named:
        longest = max(len(line) for name in named for line in name.split("\n"))
        drawing.set_figwidth(max(drawing.get_figwidth(), 0.9 + 0.068 * longest))  # inches: a line, a letter
        columns = int(drawing.get_figwidth() / (0.7 + 0.09 * longest))  # inches: a line, a letter
        below: Any = {"loc": "outside lower center", "ncols": max(1, columns), "frameon": False}
        drawing.legend(list(named.values()), list(named), **below)
