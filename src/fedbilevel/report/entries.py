"""Pages of the papers' figures and tables: one for each entry that was played, and an index of all."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.metrics import text
from fedbilevel.engines.checkpoint import write_text
from fedbilevel.engines.curves import PANELS, SHORT, Curve, words
from fedbilevel.experiments import toml
from fedbilevel.experiments.folder import as_damage
from fedbilevel.report.chart import Chart, amount, bars, chart, series
from fedbilevel.report.page import FILE, PageTable, pairs, render, table
from fedbilevel.reproduce import outcome, picture
from fedbilevel.reproduce.entry import SCALES, Entry, Scale, load_all
from fedbilevel.reproduce.outcome import (
    STALE,
    Record,
    difference_in_words,
    holding_in_words,
    in_unit,
    kept_curve,
    methods_in_words,
    of_each_run,
    readings_in_words,
    state_of,
)
from fedbilevel.reproduce.protocol import Chosen, spec_of
from fedbilevel.reproduce.ranking import budget_in_words, overview, place_in_words

INDEX = "index.html"


def write_entry(entry: Entry, folder: Path, index: str = "") -> Path:
    """Write the page of an entry that was played into the folder with its outcome; the page's path.

    Args:
        index: a link to the page over all entries; "" for none.

    Raises:
        ConfigurationError: the outcome cannot be read, or is that of another version of the entry.
    """
    found = outcome.read(folder / outcome.FILE)
    with as_damage(folder / outcome.FILE):
        page = entry_page(entry, found, index)
    write_text(folder / FILE, page)
    return folder / FILE


def write_index(entries: Sequence[Entry], out: Path) -> list[Path]:
    """Write the pages of all entries that were played below `out`, and the one over all entries, which comes first.

    An outcome that cannot be shown has its reason there in place of a page, and a warning says it.
    """
    papers = dict[str, list[dict[str, Any]]]()
    for entry in entries:
        row = {"id": entry.id, "part": entry.part, "title": entry.title, "revised": entry.revised}
        papers.setdefault(entry.paper, []).append(row | {"states": [_state(entry, scale, out) for scale in SCALES]})
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / INDEX, index_page(papers))
    links = [state["link"] for rows in papers.values() for row in rows for state in row["states"]]
    return [out / INDEX, *(out / link for link in links if link)]


def _state(entry: Entry, scale: Scale, out: Path) -> dict[str, str]:
    """What the index says of an entry, whose page is written."""
    folder = outcome.file_of(entry, scale, out).parent
    if not (folder / outcome.FILE).is_file():
        return {"scale": scale, "verdict": "not run", "link": "", "note": f"takes {entry.size(scale).takes}"}
    try:
        found = outcome.read(folder / outcome.FILE)
        if state_of(entry, found) == STALE:
            return {"scale": scale, "verdict": STALE, "link": "", "note": f"played on {found['date']}"}
        page = write_entry(entry, folder, index=f"../../{INDEX}")
    except ConfigurationError as error:
        warnings.warn(f"no page of {entry.id}, {scale}: {error}", stacklevel=3)
        return {"scale": scale, "verdict": "not readable", "link": "", "note": str(error)}
    holding = f"{holding_in_words(found)} hold; " if not entry.ranked else ""
    note = f"{holding}{found['date']}, {found['minutes']:.1f} minutes"
    return {"scale": scale, "verdict": found["verdict"], "link": page.relative_to(out).as_posix(), "note": note}


def index_page(papers: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The page over all entries: by paper a row for each, with a state for each scale."""
    rows = [row for of in papers.values() for row in of]
    summary = f"{len(rows)} entries. " + " ".join(_in_all(rows, place) for place in range(len(SCALES)))
    return render("index.html", title="Figures and tables of the papers", papers=papers, summary=summary)


def _in_all(rows: Sequence[Mapping[str, Any]], place: int) -> str:
    """How many entries have each state, in one of the scales."""
    counts = Counter(row["states"][place]["verdict"] for row in rows)
    return f"{SCALES[place].capitalize()}: {', '.join(f'{count} {state}' for state, count in counts.most_common())}."


def found_below(folder: Path) -> list[Entry]:
    """The entries with an outcome below the folder that `fedbilevel reproduce --out` names."""
    return [one for one in load_all() if any(outcome.file_of(one, scale, folder).is_file() for scale in SCALES)]


def entry_page(entry: Entry, found: Record, index: str = "") -> str:
    """The page of an entry.

    Args:
        found: its outcome, as `outcome.read` gives it.
        index: a link to the page over all entries; "" for none.
    """
    _require_same(entry, found)
    seeds = ", ".join(map(str, found["seeds"]))
    panels = _panels(entry, found)
    shown = len(found["seeds"]) > 1 and any(one.spread for one in panels)
    band = ", ± one standard deviation over the seeds" if shown else ""
    return render(
        "entry.html",
        title=f"{entry.id}: {found['verdict']}",
        index=index,
        entry=entry,
        found=found,
        counts=_counts(entry, found),
        several=len(found["panels"]) > 1,
        claims=[_claim(entry, one) for one in found["findings"]],
        ranks=_ranks(entry, found) if entry.ranked else [],
        caption=f"Means over seeds {seeds}{band}." if len(found["seeds"]) > 1 else f"Of seed {seeds}.",
        legend=[(number, name) for number, name in enumerate(entry.methods) if _is_played(found, name)],
        panels=panels,
        methods=_methods(entry, found),
        reported=_reported(entry),
        costs=_costs(entry, found),
        tuning=_tuning(entry, found),
        chosen=_chosen(entry, found),
        command=_command(found),
        specs=_specs(entry, found),
        effort=_effort(found),
        versions=pairs("Versions and machine", found["environment"]),
        errors=pairs("What failed", found["errors"]),
    )


def _require_same(entry: Entry, found: Record) -> None:
    """Refuse an outcome that is not of the entry as it is now: what it says was chosen becomes a spec."""
    panels = {panel: set(methods) for panel, methods in found["panels"].items()}
    now = {panel: set(entry.methods_of(panel)) for panel in entry.panels_at(found["scale"])}
    same = found["id"] == entry.id and panels == now and state_of(entry, found) != STALE
    for panel, methods in found["panels"].items() if same else ():
        for name, of in methods.items():
            grid = entry.grid(panel, name, found["scale"])
            for field, value in (of["chosen"] or {}).items():
                same &= field in grid and all(one in grid[field] for one in of_each_run(value))
    if not same:
        raise ConfigurationError(f"it is not of entry {entry.id} as it is now: play the entry again")


def _is_played(found: Record, method: str) -> bool:
    """Whether a method was run in some panel."""
    return any(method in methods for methods in found["panels"].values())


def _counts(entry: Entry, found: Record) -> str:
    if entry.ranked:
        return f"{len(entry.methods)} methods, {len(found['ranks'])} tasks"
    states = [one["state"] for one in found["findings"]]
    others = [f"{state}: {states.count(state)}" for state in ("contradicted", "open") if state in states]
    return "; ".join([f"{holding_in_words(found)} comparisons hold", *others])


def _claim(entry: Entry, one: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the claims: its numbers in the unit of what was read off the runs."""
    difference = difference_in_words(one)
    if one["half_width"] is not None:
        low, high = (in_unit(one, one["difference"] + sign * one["half_width"]) for sign in (-1, 1))
        difference = f"{in_unit(one, one['difference'])} [{low}, {high}] {one['unit']}"
    return {
        **one,
        "methods": methods_in_words(one),
        "readings": readings_in_words(entry, one),
        "difference": difference,
    }


def _ranks(entry: Entry, found: Record) -> list[PageTable]:
    """The ranks of a leaderboard: over all panels, and of each panel with its metric."""
    ranks = found["ranks"]
    tables = [
        table(
            "Ranks in each panel at its budgets, in the order of the tables below. What cannot be told apart from the"
            " best has rank 1, too; the mean place is that by the mean alone",
            overview(ranks),
            texts=list(overview(ranks)),
        )
    ]
    for panel, of in ranks.items():
        budgets, metric = entry.panels[panel].budgets, entry.measured_in(panel)
        columns = {"method": list(next(iter(of.values())))}
        for cost, at in of.items():
            columns[budget_in_words(cost, budgets[cost])] = [place_in_words(metric, place) for place in at.values()]
        caption = f"{panel}: rank, and mean {words(metric)} ± standard deviation over the seeds"
        tables.append(table(caption, columns, texts=["method"]))
    return tables


def _panels(entry: Entry, found: Record) -> list[Chart]:
    if entry.series:
        return _series(entry, found)
    if entry.metric in PANELS:
        return _bars(entry, found)
    made = []
    for panel, methods in found["panels"].items():
        curves = {name: of["curve"] for name, of in methods.items() if of["curve"]}
        numbers = [list(entry.methods).index(name) for name in curves]
        lines = [kept_curve(name, of, entry.against) for name, of in curves.items()]
        if lines:
            made.append(chart(lines, entry.measured_in(panel), entry.against, title=panel, numbers=numbers))
    return made


def _series(entry: Entry, found: Record) -> list[Chart]:
    """A single panel: the metric against the panels' values, at the end or as a claim of a slope reads it off."""
    lines, numbers, thin, notes, slopes = [], [], [], [], picture.slopes_of(entry, found)
    for number, method in enumerate(entry.methods):
        of = {entry.panels[name].value: methods.get(method) for name, methods in found["panels"].items()}
        of = {value: one for value, one in of.items() if one and one["mean"] is not None}
        if of:
            claim, fit = slopes.get(method, (None, {}))
            at = np.array(list(of), float)
            mean, spread = np.array([picture.point(claim, one) for one in of.values()]).T
            lines.append(Curve(method, {entry.series: at}, mean, None if np.isnan(spread).any() else spread))
            numbers.append(number)
            if claim is not None:
                thin.append((at, picture.predicted(claim, at, mean)))
                notes.append(f"{method}, {picture.slope_in_words(claim, fit, 'thin line')}.")
    more: Any = {"title": entry.title, "numbers": numbers, "predicted": thin, "note": " ".join(notes)}
    return [series(lines, entry.metric, entry.series, **more)] if lines else []


def _bars(entry: Entry, found: Record) -> list[Chart]:
    """A single panel, where what is compared is itself a cost and no curve."""
    lines, numbers = [], []
    for number, method in enumerate(entry.methods):
        of = [(at, one) for at, methods in enumerate(found["panels"].values()) if (one := methods.get(method))]
        of = [(at, one) for at, one in of if one["mean"] is not None]
        if of:
            at, mean, spread = np.array([(at, one["mean"], one["sd"] or 0.0) for at, one in of], float).T
            lines.append(Curve(method, {"group": at}, mean, spread))
            numbers.append(number)
    return [bars(lines, entry.metric, list(found["panels"]), title=entry.title, numbers=numbers)] if lines else []


def _methods(entry: Entry, found: Record) -> PageTable:
    columns, besides = picture.numbers_of(entry, found)
    what = "the metric" if entry.ranked else words(entry.metric)
    caption = f"Ours: {what} at the end, mean ± standard deviation over {len(found['seeds'])} seeds"
    return table(caption + besides, columns, texts=["method"])


def _reported(entry: Entry) -> PageTable:
    columns = {name: [getattr(one, name) for one in entry.reported] for name in ("what", "value", "source")}
    return table("The paper reports", columns, texts=list(columns))


def _costs(entry: Entry, found: Record) -> PageTable:
    rows = [(panel, name, of["costs"]) for panel, methods in found["panels"].items() for name, of in methods.items()]
    known = [name for name in PANELS if any(name in costs for *_, costs in rows)]
    columns = {"panel": [panel for panel, *_ in rows], "method": [name for _, name, _ in rows]}
    for cost in known:
        columns[SHORT.get(cost, cost)] = [amount(costs[cost]) if cost in costs else "–" for *_, costs in rows]
    return table("What the runs cost, as means over the seeds", columns, texts=["panel", "method"])


def _tuning(entry: Entry, found: Record) -> str:
    if not found["trials"]:
        return entry.untuned or "Nothing was chosen."
    metric = words(found["selected_on"])
    tried = f"In every panel each method was tried at {found['trials']} points"
    return f"{tried}; the best {metric} decided, which is not measured on test data."


def _chosen(entry: Entry, found: Record) -> PageTable:
    rows = [(panel, name, of) for panel, methods in found["panels"].items() for name, of in methods.items()]
    columns = {
        "panel": [panel for panel, *_ in rows],
        "method": [name for _, name, _ in rows],
        "chosen": [_values(of["chosen"]) for *_, of in rows],
        "failed trials": [f"{of['failed_trials']}" for *_, of in rows],
        "failed runs": [f"{of['failed_runs']}" for *_, of in rows],
        "metric" if entry.ranked else entry.metric: [
            ", ".join(text(entry.measured_in(panel), value) for value in of["values"]) or "–" for panel, _, of in rows
        ],
    }
    caption = f"Chosen values, and the {'metric' if entry.ranked else words(entry.metric)} of each seed at the end"
    return table(caption, columns, texts=["panel", "method", "chosen"])


def _values(chosen: Mapping[str, Any] | None) -> str:
    if chosen is None:
        return "every trial failed"
    return ", ".join(f"{name} = {toml.value(value)}" for name, value in chosen.items()) or "–"


def _command(found: Record) -> str:
    seeds = ",".join(map(str, found["seeds"]))
    return f"fedbilevel reproduce {found['id']} --{found['scale']} --seeds {seeds}"


def _specs(entry: Entry, found: Record) -> list[tuple[str, str]]:
    specs = []
    for panel, methods in found["panels"].items():
        for name, of in methods.items():
            first = {field: of_each_run(value)[0] for field, value in (of["chosen"] or {}).items()}
            spec = spec_of(entry, panel, name, found["scale"], Chosen(first), found["seeds"][0])
            specs.append((f"{panel}: {name}", spec.to_toml()))
    return specs


def _effort(found: Record) -> PageTable:
    return pairs(
        "Effort",
        {
            "date": found["date"],
            "scale": found["scale"],
            "seeds": ", ".join(map(str, found["seeds"])),
            "trials of each method in each panel": found["trials"],
            "minutes, trials included": f"{found['minutes']:.1f}",
            "processor seconds": f"{found['processor_seconds']:,.0f}",
        },
    )
