"""Pages of a single run and of runs side by side."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fedbilevel.core.metrics import text
from fedbilevel.display.curves import curve, words
from fedbilevel.engines.checkpoint import write_text
from fedbilevel.engines.history import History, is_number
from fedbilevel.experiments.compare import (
    RunGroup,
    client_panels,
    common_seeds,
    comparison_table,
    default_panels,
    find_runs,
    legend,
    load_groups,
    tasks_of,
)
from fedbilevel.experiments.folder import LoadedRun, as_damage
from fedbilevel.experiments.tables import mean_and_spread, summary_table
from fedbilevel.report.chart import Chart, amount, chart
from fedbilevel.report.page import PageTable, pairs, printed, render, table
from fedbilevel.wording import require_object


def write_runs(paths: Sequence[Path], file: Path) -> Path:
    """Write the page of some runs: of a single one, or of several side by side.

    Args:
        paths: folders of runs, or folders with runs in them.

    Raises:
        ConfigurationError: no runs are there, or they cannot be compared.
    """
    found, unfinished = find_runs(paths)
    groups = load_groups(found)
    notes = [f"Left out, not finished: {', '.join(map(str, unfinished))}"] if unfinished else []
    single = len(groups) == 1 and len(groups[0].runs) == 1
    page = run_page(groups[0].runs[0], notes) if single else comparison_page(groups, paths, notes)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, page)
    return file


def run_page(run: LoadedRun, notes: Sequence[str] = ()) -> str:
    """The page of a run: its history as curves, its outcome, spec, environment and costs."""
    (group,) = [RunGroup(run.folder.path.name, [run])]
    numbers = printed(summary_table(run.summary), "Outcome")
    last = dict(zip(*zip(*numbers.rows, strict=True), strict=True)) if numbers.rows else {}
    best = last.get(f"best {run.metric}", "")
    return render(
        "runs.html",
        title=tasks_of([group]) + f" · {group.algorithm}",
        kicker="A run",
        verdict=f"{words(run.metric).capitalize()} {last.get(run.metric, '')} at the end; best {best}.",
        notes=notes,
        caption="Values of every evaluation, against what had been spent by then.",
        legend=[],
        panels=_of_history(run.history, run.metric, group.timed),
        numbers=numbers,
        command=f"fedbilevel run --spec {_quoted(run.folder.spec)}",
        specs=[(run.folder.path.name, run.spec.to_toml())],
        runs=_places([group]),
        records=[_environment(run), pairs("Ledger", _flat(run.ledger))],
    )


def comparison_page(groups: Sequence[RunGroup], paths: Sequence[Path], notes: Sequence[str] = ()) -> str:
    """The page of runs side by side: curves against each cost, and the table that `fedbilevel compare` prints."""
    numbers, metric, seeds = printed(comparison_table(groups)), groups[0].metric, common_seeds(groups)
    over = (
        f"Means over {seeds} seeds; the band is one standard deviation." if seeds > 1 else "One line for each method."
    )
    first = {json.dumps(_read(run)): run for group in groups for run in group.runs}
    same = len(first) == 1
    environments = [_environment(run, "" if same else f" of {run.folder.path.name}") for run in first.values()]
    return render(
        "runs.html",
        title=f"{tasks_of(groups)}: {words(metric)}",
        kicker="Runs side by side",
        verdict=_best(groups),
        notes=notes,
        caption=over,
        legend=list(enumerate(legend(groups))),
        panels=_side_by_side(groups),
        numbers=numbers,
        command=f"fedbilevel compare {' '.join(_quoted(path) for path in paths)}",
        specs=[(group.label, group.runs[0].spec.to_toml()) for group in groups],
        runs=_places(groups),
        records=environments,
    )


def _best(groups: Sequence[RunGroup]) -> str:
    """Which method ends best by its mean, or which ones where they are level in what is printed."""
    metric, choose = groups[0].metric, max if groups[0].larger_is_better else min
    ends = {group.name: group.values("final") for group in groups}
    best = choose(ends.values(), key=fmean)
    level = [name for name, values in ends.items() if text(metric, fmean(values)) == text(metric, fmean(best))]
    return f"Best {words(metric)} at the end: {mean_and_spread(metric, best)}, by {' and '.join(level)}."


def _of_history(history: History, metric: str, timed: bool) -> list[Chart]:
    """The metric against each cost that says something of its own, then losses and metrics per client."""
    averaged = f"average_{metric}"
    panels = [(metric, cost) for cost in (("exchanges", "time") if timed else ("exchanges",))]
    losses = [name for name in (averaged, "outer_loss", "inner_loss") if name in history.columns]
    panels += [(name, panels[-1][1]) for name in (*losses, *history.per_client)]
    return [
        chart([curve(words(name), [history], name)], name, cost, title=f"{words(name)} against {cost}")
        for name, cost in panels
    ]


def _side_by_side(groups: Sequence[RunGroup]) -> list[Chart]:
    metric = groups[0].metric
    curves = [
        curve(name, [run.history for run in group.runs], metric, level=group.pooled)
        for name, group in zip(legend(groups), groups, strict=True)
    ]
    charts = [chart(curves, metric, cost, title=f"{words(metric)} against {cost}") for cost in default_panels(groups)]
    if any(run.history.per_client for group in groups for run in group.runs):
        charts += [
            chart(one.curves, one.metric, one.cost, title=words(one.metric), numbers=one.places)
            for one in client_panels(groups, "per_client")
        ]
    return charts


def _places(groups: Sequence[RunGroup]) -> PageTable:
    runs = [(group, run) for group in groups for run in group.runs]
    columns = {
        "run": [group.name for group, _ in runs],
        "seed": [str(run.summary["seed"]) for _, run in runs],
        "folder": [str(run.folder.path) for _, run in runs],
    }
    return table("Folders", columns, texts=["run", "folder"])


def _environment(run: LoadedRun, of: str = "") -> PageTable:
    return pairs(f"Versions and machine{of}", _read(run))


def _read(run: LoadedRun) -> dict[str, Any]:
    """The environment that a run recorded; none where its folder has lost it."""
    file = run.folder.environment
    if not file.is_file():
        return {}
    with as_damage(file):
        found = json.loads(file.read_text(encoding="utf-8"))
        require_object(found, "the versions of packages")
        return dict(found)


def _flat(ledger: Mapping[str, Any]) -> dict[str, str]:
    """The costs of a run, those of single phases in one line."""
    phases = ", ".join(f"{amount(count)} {phase}" for phase, count in ledger["exchanges_by_phase"].items())
    plain = {name: amount(one) for name, one in ledger.items() if is_number(one)}
    return plain | {"virtual": str(ledger["virtual"]), "exchanges by phase": phases}


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
