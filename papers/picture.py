"""The picture of a figure: a panel of curves for each setting; or the readings of all settings in one panel, for a
series, and where what is compared is itself a cost."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Drawing

from papers.claims import of_curve
from papers.figure import Claim, Figure
from papers.numbers import COSTS, axis, in_percent

# M. Okabe, K. Ito, "Color Universal Design", 2008; without the yellow, which is faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = "ox+v"  # one shows through another
COLUMNS = 3  # of panels, at most
READ = {"end": "at the end", "late": "mean over the second half", "mean": "mean over the run"}  # off a curve
FAR_APART = 50  # largest over smallest value, from which on an axis is logarithmic


def draw(figure: Figure, outcome: Mapping[str, Any]) -> bytes:
    """The picture of an outcome, as PNG."""
    make = points if figure.series or figure.metric in COSTS else curves
    drawing, file = make(figure, outcome), io.BytesIO()
    drawing.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def curves(figure: Figure, outcome: Mapping[str, Any]) -> Drawing:
    """The metric against its cost, with a band of one standard deviation over the seeds."""
    panels = outcome["panels"]
    columns = 2 if len(panels) == 4 else min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    drawing = Drawing((3.6 * columns + 0.4, 3.2 * rows + 0.6), layout="constrained")
    cells = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for axes, (panel, methods) in zip(cells, panels.items(), strict=False):
        lines = {name: {k: np.array(v) for k, v in of["curve"].items()} for name, of in methods.items() if of["curve"]}
        percent = in_percent(figure.metric)
        values = np.concatenate([line["mean"] for line in lines.values()]) if lines else np.ones(1)
        log = not percent and values.min() > 0 and values.max() > FAR_APART * values.min()
        for name, line in lines.items():
            style, scale = style_of(figure, name), 100 if percent else 1
            mean, high = scale * line["mean"], scale * (line["mean"] + line["sd"])
            axes.plot(line["cost"], mean, label=name, **style)
            low = mean * (mean / high) if log else 2 * mean - high  # by the same factor below as above
            axes.fill_between(line["cost"], low, high, color=style["color"], alpha=0.18, linewidth=0)
        limit(axes, lines.values(), percent)
        axes.set_title(panel, fontsize=10)
        axes.set_xlabel(axis(figure.against))
        axes.set_yscale("log" if log else "linear")
        axes.grid(alpha=0.3, linewidth=0.6)
    for axes in cells[len(panels) :]:
        axes.axis("off")
    for axes in cells[::columns]:
        axes.set_ylabel(axis(figure.metric))
    legend(drawing, figure)
    return drawing


def limit(axes: Any, lines: Iterable[Mapping[str, np.ndarray]], percent: bool) -> None:
    """Set the limits of the axes: costs from 0 on, logarithmic where the ends lie far apart."""
    ends = [line["cost"][-1] for line in lines]
    if ends and min(ends) > 0 and max(ends) > 10 * min(ends):
        first = min(line["cost"][line["cost"] > 0].min() for line in lines)
        axes.set_xscale("symlog", linthresh=10.0 ** np.floor(np.log10(first)), linscale=0.5)
    axes.set_xlim(left=0)
    after = [line["mean"][1:] for line in lines if len(line["mean"]) > 1]
    if percent and after:
        shown = 100 * np.concatenate(after)
        axes.set_ylim(max(0.0, shown.min() - 3), min(100.0, shown.max() + 1))


def points(figure: Figure, outcome: Mapping[str, Any]) -> Drawing:
    """Readings in each panel: of a series against the panels' values on logarithmic axes, with a grey line of the
    predicted slope; else side by side."""
    drawing = Drawing((max(6.0, 1.2 * len(outcome["panels"])), 4.4), layout="constrained")
    axes = drawing.subplots()
    claims = {claim.better: claim for claim in figure.claims if claim.slope is not None and fits(figure, claim)}
    values = {name: panel.value or 0.0 for name, panel in figure.panels.items()}
    places = values if figure.series else {name: float(at) for at, name in enumerate(outcome["panels"])}
    for k, method in enumerate(figure.methods):
        claim, colour = claims.get(method), COLOURS[k % len(COLOURS)]
        found = {name: of[method] for name, of in outcome["panels"].items() if of.get(method, {}).get("values")}
        if not found:
            continue
        at = np.array([places[name] for name in found])
        mean, spread = np.array([point(claim, of) for of in found.values()]).T
        label = f"{method}, {in_words(claim, outcome)}" if claim else method
        style: Any = {"color": colour, "marker": MARKERS[k % len(MARKERS)], "capsize": 3}
        beside = 0.0 if figure.series else 0.6 * ((k + 0.5) / len(figure.methods) - 0.5)
        line = "-" if figure.series and not claim else ""
        axes.errorbar(at + beside, mean, spread, label=label, linestyle=line, **style)
        if claim and claim.slope is not None:
            u, v = np.log(at), np.log(mean)
            axes.plot(at, np.exp(v.mean() + claim.slope * (u - u.mean())), color="#666666", linewidth=0.8, zorder=0)
    words = {name: f"{value:,.0f}" if value >= 10 else f"{value:.2g}" for name, value in values.items()}
    axes.set_xscale("log" if figure.series else "linear")
    axes.set_yscale("log" if figure.series else "linear")
    axes.set_xticks(list(places.values()), [words[name] if figure.series else name for name in places])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_xlabel(figure.series)
    axes.set_ylabel(axis(figure.metric))
    if not figure.series:
        axes.set_ylim(bottom=0)
    if not figure.series:
        axes.tick_params(axis="x", rotation=30 if len(places) > 4 else 0)
    legend(drawing, figure)
    return drawing


def fits(figure: Figure, claim: Claim) -> bool:
    """Whether a claim of a slope is about what is drawn."""
    return claim.metric in (None, figure.metric) and claim.by in READ


def point(claim: Claim | None, of: Mapping[str, Any]) -> tuple[float, float]:
    """A method's place in a series, and its standard deviation over the seeds, which a mean curve does not know."""
    if claim is None or claim.by == "end":
        return of["mean"], of["sd"] or 0.0
    return of_curve(claim.by, of["curve"]["cost"], of["curve"]["mean"]), np.nan


def in_words(claim: Claim, outcome: Mapping[str, Any]) -> str:
    """What is read off, and the fitted slope beside the predicted one."""
    (found,) = [one for one in outcome["findings"] if one["says"] == claim.says]
    if found["difference"] is None:
        return f"{READ[claim.by]}: predicted slope {claim.slope:g} (grey), not fitted: {found['note']}"
    fitted = f"{round(found['better_mean'], 2) + 0.0:.2f} ± {found['half_width']:.2g}"
    return f"{READ[claim.by]}: slope {fitted}, predicted {claim.slope:g} (grey)".replace("-", "−")


def style_of(figure: Figure, method: str) -> dict[str, Any]:
    """The colour and dashes of a method, the same in all panels."""
    place = list(figure.methods).index(method)
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)]}


def legend(drawing: Drawing, figure: Figure) -> None:
    """One legend for all panels, in the order of the methods, with as many columns as there is room for."""
    pairs: Sequence[Any] = [axes.get_legend_handles_labels() for axes in drawing.axes]
    named = {name: handle for handles, names in pairs for handle, name in zip(handles, names, strict=True)}
    order = [name for name in figure.methods if name in named] or list(named)
    if order:
        columns = int(drawing.get_figwidth() / (0.7 + 0.09 * max(map(len, order))))  # inches of a line and of a letter
        drawing.legend(
            [named[name] for name in order], order, loc="outside lower center", ncols=max(1, columns), frameon=False
        )
