"""The picture of an entry: a panel for each setting, with a curve for each method; of a series, one panel; bars where
what is compared is itself a cost; a field of ranks for a leaderboard."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedbilevel.core.metrics import in_percent, text
from fedbilevel.engines.curves import COLOURS, DASHES, LEVEL, PANELS, axis_label, draw_panel, new_figure, typography
from fedbilevel.reproduce.claims import mean_in_words, of_curve
from fedbilevel.reproduce.entry import Claim, Entry
from fedbilevel.reproduce.outcome import Record, kept_curve
from fedbilevel.reproduce.ranking import overview

CELL = (3.6, 3.2)  # inches
COLUMNS = 3  # of panels, at most
READ = {"end": "at the end", "late": "mean over the second half", "mean": "mean over the run"}  # off a curve
MARKERS = "ox+v"  # one shows through another


def draw(entry: Entry, outcome: Record) -> Any:
    """The Matplotlib figure of an outcome."""
    if entry.ranked:
        return _ranks(outcome)
    if entry.series:
        return _series(entry, outcome)
    return _bars(entry, outcome) if entry.metric in PANELS else _curves(entry, outcome)


def _curves(entry: Entry, outcome: Record) -> Any:
    """Curves with a band of one standard deviation over the seeds."""
    panels = list(outcome["panels"])
    columns = min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    size = (CELL[0] * columns + 0.4, CELL[1] * rows + 0.6)
    with typography(size):
        figure = new_figure(size)
        cells = list(figure.subplots(rows, columns, squeeze=False).flat)
        for panel, axes in zip(panels, cells, strict=False):
            found = {name: of["curve"] for name, of in outcome["panels"][panel].items() if of["curve"]}
            lines = [kept_curve(name, of, entry.against) for name, of in found.items()]
            places = [list(entry.methods).index(name) for name in found]
            if lines:
                draw_panel(axes, lines, entry.against, percent=in_percent(entry.metric), places=places)
            axes.set_title(panel, fontsize=10)
        for axes in cells[len(panels) :]:
            axes.axis("off")
        for axes in cells[::columns]:
            axes.set_ylabel(axis_label([entry.metric]))
        _legend(figure, cells, entry)
    return figure


def _ranks(outcome: Record) -> Any:
    """Ranks: methods down, panels and their budgets across; the darker, the nearer to the first; "–" for failures."""
    found = outcome["ranks"]
    methods = overview(found)["method"]
    columns = [(panel, cost) for panel, of in found.items() for cost in of]
    places = [[found[panel][cost].get(name, {}).get("rank") for panel, cost in columns] for name in methods]
    ranks = np.array([[np.nan if one is None else one for one in row] for row in places], float)
    size = (0.42 * len(columns) + 2.0, 0.28 * len(methods) + 1.6)
    with typography(size):
        figure = new_figure(size)
        axes = figure.subplots()
        axes.imshow(-ranks, cmap="Blues", aspect="auto", vmin=-len(methods) * 1.2, vmax=0)
        for (row, column), rank in np.ndenumerate(ranks):
            shade = "white" if rank < len(methods) / 2 else "black"
            panel, cost = columns[column]
            said = f"{rank:.0f}" if not np.isnan(rank) else "–" if methods[row] in found[panel][cost] else ""
            axes.text(column, row, said, ha="center", va="center", color=shade)
        axes.set_yticks(range(len(methods)), methods)
        axes.set_xticks(range(len(columns)), [cost for _, cost in columns], rotation=60, ha="right")
        start = -0.5
        for panel, of in found.items():
            axes.axvline(start, color="white", linewidth=3)
            axes.text(start + 0.1, -0.7, panel, va="bottom")
            start += len(of)
    return figure


def _series(entry: Entry, outcome: Record) -> Any:
    """The metric against the panels' values, on logarithmic axes: at the end with a standard deviation over the seeds,
    or as a claim of a slope reads it off the mean curve, with a line of the predicted slope beside the points."""
    size = (6.0, 4.4)
    slopes = slopes_of(entry, outcome)
    with typography(size):
        figure = new_figure(size)
        axes = figure.subplots()
        for place, method in enumerate(entry.methods):
            claim, fit = slopes.get(method, (None, {}))
            found = [
                (panel.value, *point(claim, of))
                for name, panel in entry.panels.items()
                if (of := outcome["panels"].get(name, {}).get(method)) and of["mean"] is not None
            ]
            if not found:
                continue
            at, mean, spread = (np.array(column) for column in zip(*found, strict=True))
            label = method if claim is None else f"{method}, {slope_in_words(claim, fit, 'grey')}"
            marked = {"marker": MARKERS[place % len(MARKERS)], "linestyle": "", "capsize": 3}
            axes.errorbar(at, mean, spread, label=label, color=_colour(place), **marked)
            if claim is None:
                axes.plot(at, mean, color=_colour(place), linestyle=DASHES[place % len(DASHES)])
            else:
                axes.plot(at, predicted(claim, at, mean), color=LEVEL, linewidth=0.8, zorder=0)
        axes.set_xscale("log")
        axes.set_yscale("log")
        places = [panel.value or 0.0 for panel in entry.panels.values()]
        axes.set_xticks(places, list(map(value_in_words, places)))
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.set_ylabel(PANELS.get(entry.metric) or axis_label([entry.metric]))
        axes.set_xlabel(entry.series)
        figure.legend(loc="outside lower center", ncols=1, frameon=False)
    return figure


def value_in_words(value: float) -> str:
    """A panel's value beside an axis, in two digits or more."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def numbers_of(entry: Entry, outcome: Record) -> tuple[dict[str, list[str]], str]:
    """Columns of a table: methods, and what each came to in each panel; and what its caption has to add.

    That is the metric at the end; of a method with a claim of a slope what the slope is fitted to, which is named.
    """
    panels, slopes = outcome["panels"], slopes_of(entry, outcome)
    columns: dict[str, list[str]] = {"method": [], **{panel: [] for panel in panels}}
    for method in entry.methods:
        if not any(method in of for of in panels.values()):
            continue
        claim, _ = slopes.get(method, (None, {}))
        claim = None if claim is None or claim.by == "end" else claim
        columns["method"].append(f"{method}, {READ[claim.by]}" if claim else method)
        for panel, of in panels.items():
            columns[panel].append(_cell(entry.measured_in(panel), claim, of[method]) if method in of else "–")
    named = any(claim.by != "end" for claim, _ in slopes.values())
    return columns, "; of the mean curve where another reading is named" if named else ""


def _cell(metric: str, claim: Claim | None, of: Record) -> str:
    return text(metric, point(claim, of)[0]) if claim and of["curve"] else mean_in_words(metric, of)


def slopes_of(entry: Entry, outcome: Record) -> dict[str, tuple[Claim, Record]]:
    """By method: the claim of a slope that is about the entry's metric, and what came of it."""
    fitted = (found for found in outcome["findings"] if not found["than"])  # in the order of their claims
    claimed = zip((claim for claim in entry.claims if claim.slope is not None), fitted, strict=True)
    return {
        claim.better: (claim, found)
        for claim, found in claimed
        if claim.metric in (None, entry.metric) and claim.by in READ
    }


def point(claim: Claim | None, of: Record) -> tuple[float, float]:
    """A method's place in a series, and its standard deviation over the seeds, which a mean curve does not know."""
    if claim is None or claim.by == "end":
        return of["mean"], of["sd"] or 0.0
    return of_curve(claim, of["curve"]["cost"], of["curve"]["mean"]), np.nan


def predicted(claim: Claim, at: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """The line of the predicted slope through the middle of the points, on logarithmic axes."""
    u, v = np.log(at), np.log(mean)
    return np.array(np.exp(v.mean() + claim.slope * (u - u.mean())))


def slope_in_words(claim: Claim, found: Record, line: str) -> str:
    """What is read off, and the fitted slope of a finding beside the predicted one, which `line` has."""
    if found["difference"] is None:
        return f"{READ[claim.by]}: predicted slope {claim.slope:g} ({line}), not fitted: {found['note']}"
    fitted = f"{round(found['better_mean'], 2) + 0.0:.2f} ± {found['half_width']:.2g}"
    return f"{READ[claim.by]}: slope {fitted}, predicted {claim.slope:g} ({line})".replace("-", "−")


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]


def _bars(entry: Entry, outcome: Record) -> Any:
    """What the runs cost, with a standard deviation over the seeds: a group of bars for each panel, on one axis."""
    panels, width = list(outcome["panels"]), 0.8 / len(entry.methods)
    size = (max(6.0, 1.4 * len(panels)), 4.0)
    with typography(size):
        figure = new_figure(size)
        axes = figure.subplots()
        for place, method in enumerate(entry.methods):
            found = [
                (at + (place - (len(entry.methods) - 1) / 2) * width, of["mean"], of["sd"] or 0.0)
                for at, panel in enumerate(panels)
                if (of := outcome["panels"][panel].get(method)) and of["mean"] is not None
            ]
            if found:
                at, mean, spread = zip(*found, strict=True)
                axes.bar(at, mean, width, yerr=spread, capsize=2, label=method, color=_colour(place))
        axes.set_xticks(range(len(panels)), panels)
        axes.grid(axis="y", alpha=0.3, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_ylabel(PANELS[entry.metric])
        _legend(figure, [axes], entry)
    return figure


def _legend(figure: Any, cells: Any, entry: Entry) -> None:
    """One legend for all panels, in the order of the methods."""
    named: dict[str, Any] = {}
    for axes in cells:
        named |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    order = [name for name in entry.methods if name in named]
    if order:
        figure.legend([named[name] for name in order], order, loc="outside lower center", ncols=4, frameon=False)
