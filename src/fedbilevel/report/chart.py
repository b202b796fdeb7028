"""Curves for a page: an SVG that Matplotlib draws, in the page's colours, and the numbers behind it with their places.

Plotly, Bokeh and Vega-Altair make a page of 1 to 5 MB where this makes 0.2, and follow neither keys nor a dark scheme.

The SVG holds no text but that of its ticks. The script of the page finds a point's place, cost and value in the table
of numbers, so that they are said once.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup

from fedbilevel.core.metrics import in_percent, text
from fedbilevel.display.curves import PANELS, Curve, axis_label, draw_panel, new_figure

SIZE = (4.8, 3.0)  # inches
DPI = 72  # of Matplotlib's SVG: its unit is the point
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
POINTS = 200  # of a curve, at most
COLOURS = 7  # of the style sheet: --curve-0, --curve-1, …
AXES = {"#000000": "currentColor", "#b0b0b0": "var(--rule)"}
LEGEND_DASHES = ("none", "7 3", "9 3 2 3", "2 3")  # of curves.DASHES
STYLE: Any = {"font.size": 10, "lines.linewidth": 1.8, "svg.fonttype": "none"}


@dataclass(frozen=True)
class ChartPoint:
    """A row of the numbers behind a curve: its place in the SVG, "x y", and its texts."""

    at: str
    cost: str
    value: str
    spread: str


@dataclass(frozen=True)
class ChartCurve:
    """A curve: its name, its number among all methods, by which it has its colour and its toggle, and its points."""

    name: str
    number: int
    points: Sequence[ChartPoint]


@dataclass(frozen=True)
class Chart:
    """A panel of curves.

    Attributes:
        title: what it shows.
        value, cost: the labels of the axes.
        svg: safe to be put into a page.
        curves: with the numbers.
        spread: whether there is a standard deviation.
        note: what a reader has to know besides.
    """

    title: str
    value: str
    cost: str
    svg: Markup
    curves: Sequence[ChartCurve]
    spread: bool
    note: str = ""


def chart(
    curves: Sequence[Curve], metric: str, cost: str, *, title: str, numbers: Sequence[int] | None = None
) -> Chart:
    """Curves of a metric against a cost.

    Args:
        cost: a name of `curves.PANELS`.
        numbers: of the curves among all methods; None: 0, 1, …
    """
    longest = max(len(line.value) for line in curves)
    curves = [_thinned(line) for line in curves]
    numbers = range(len(curves)) if numbers is None else numbers
    axes = _new_axes()
    drawn = draw_panel(axes, curves, cost, percent=in_percent(metric), places=numbers)
    notes = [f"{POINTS} of {longest:,} evaluations are shown."] if longest > POINTS else []
    if any(line.clients for line in curves):
        notes.append("The band goes from the first to the last decile of the clients; dotted: the worst client.")
    return _chart(axes, drawn, curves, metric, cost, title, numbers, " ".join(notes))


def _new_axes() -> Any:
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure = new_figure(SIZE)
        figure.set_dpi(DPI)
        axes = figure.subplots()
    figure.patch.set_visible(False)
    axes.patch.set_visible(False)
    return axes


def _thinned(line: Curve) -> Curve:
    """At most POINTS points of a curve, the first and the last among them."""
    if len(line.value) <= POINTS:
        return line
    at = np.linspace(0, len(line.value) - 1, POINTS).round().astype(int)
    costs = {name: column[at] for name, column in line.costs.items()}
    spread = None if line.spread is None else line.spread[at]
    clients = None if line.clients is None else {name: column[at] for name, column in line.clients.items()}
    return Curve(line.label, costs, line.value[at], spread, line.level, clients)


def _chart(
    axes: Any,
    drawn: Sequence[Sequence[Any]],
    curves: Sequence[Curve],
    metric: str,
    cost: str,
    title: str,
    numbers: Sequence[int],
    note: str = "",
) -> Chart:
    """The chart of what was drawn; its labels stand in the page."""
    axes.set_xlabel("")
    for number, artists in zip(numbers, drawn, strict=True):
        for artist in artists:
            artist.set_gid(f"curve-{number}")
            artist.set_color(_stand_in(number))
    svg = _svg(axes.figure, title)  # lays the figure out
    places = axes.transData.frozen(), axes.bbox.frozen()
    shown = [
        ChartCurve(line.label, number, _points(line, metric, cost, *places))
        for number, line in zip(numbers, curves, strict=True)
    ]
    spread = any(line.spread is not None for line in curves)
    return Chart(title, axis_label([metric]), PANELS.get(cost, cost), svg, shown, spread, note)


def _stand_in(number: int) -> str:
    """The colour that stands for one of the style sheet's while Matplotlib draws."""
    return f"#0a0b{number % COLOURS:02x}"


def _points(line: Curve, metric: str, cost: str, transform: Any, box: Any) -> list[ChartPoint]:
    """The numbers of a curve; those outside the axes have their place at the edge."""
    height, scale = SIZE[1] * DPI, 100 if in_percent(metric) else 1
    if line.level:
        y = float(transform.transform((0.0, scale * line.value[-1]))[1])
        return [ChartPoint(f"{box.x1:.0f} {height - y:.0f}", "–", text(metric, float(line.value[-1])), "")]
    places = transform.transform(np.column_stack([line.costs[cost], scale * line.value]))
    places = np.clip(places, (box.x0, box.y0), (box.x1, box.y1))
    spread = [None] * len(places) if line.spread is None else [float(one) for one in line.spread]
    rows = zip(places, line.costs[cost], line.value, spread, strict=True)
    return [
        ChartPoint(
            f"{x:.0f} {height - y:.0f}",
            amount(of),
            text(metric, float(value)),
            text(metric, one) if one is not None else "",
        )
        for (x, y), of, value, one in rows
    ]


def amount(cost: float) -> str:
    """A cost for people: whole numbers whole, others in four digits."""
    whole = float(cost).is_integer() or abs(cost) >= 1e4
    return f"{cost:,.0f}" if whole and abs(cost) < 1e15 else f"{cost:.4g}"


def _svg(figure: Any, title: str) -> Markup:
    """The figure as an SVG for a page: ids only where something refers to them, colours as variables of its style."""
    from matplotlib import rc_context

    out = io.BytesIO()
    with rc_context({**STYLE, "svg.hashsalt": title}):
        figure.canvas.draw()
        figure.set_layout_engine("none")
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    root = ElementTree.fromstring(out.getvalue())
    _tidy(root)
    ElementTree.register_namespace("", SVG)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _tidy(root: ElementTree.Element) -> None:
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("aria-hidden", "true")  # the numbers are in a table, and read by the keys
    text_of_all = ElementTree.tostring(root, encoding="unicode")
    needed = set(re.findall(r"#([\w-]+)", text_of_all))
    for element in root.iter():
        id = element.get("id", "")
        if id.startswith("curve-"):
            element.attrib |= {"class": "curve", "data-curve": id.removeprefix("curve-")}
        if id not in needed:
            element.attrib.pop("id", None)
        if link := element.attrib.pop(f"{{{XLINK}}}href", ""):
            element.set("href", link)
        if "d" in element.attrib:
            element.set("d", _rounded(element.attrib["d"]))
        if "style" in element.attrib:
            element.set("style", _coloured(element.attrib["style"]))


def _rounded(path: str) -> str:
    return re.sub(r"-?\d+\.\d{2,}", lambda found: f"{float(found[0]):.1f}", path).replace("\n", "")


def _coloured(style: str) -> str:
    stand_ins = {_stand_in(number): f"var(--curve-{number})" for number in range(COLOURS)}
    for colour, variable in {**AXES, **stand_ins}.items():
        style = style.replace(colour, variable)
    return style
