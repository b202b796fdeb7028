"""Runs side by side: a table, and their curves in one picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.engines.checkpoint import write_atomically
from fedbilevel.experiments import measure, plots
from fedbilevel.experiments.folder import LoadedRun, load_run

TARGETS = 3


@dataclass(frozen=True)
class Group:
    """Runs of one spec that differ in their seeds only."""

    label: str
    runs: Sequence[LoadedRun]

    def values(self, name: str) -> list[Any]:
        return [run.summary[name] for run in self.runs]

    def costs(self, *names: str) -> float:
        return statistics.fmean(sum(run.summary["last_row"][name] for name in names) for run in self.runs)


def load_groups(paths: Sequence[str | Path]) -> list[Group]:
    """Read runs and put together those that differ in their seeds only.

    A folder without spec.toml stands for the runs in it, one level down (the folder of `--seeds`).

    Raises:
        ConfigurationError: a run cannot be read, or the runs measure different things.
    """
    places = {path.resolve(): path for given in paths for path in _runs_in(Path(given))}  # each run counts once
    runs = [load_run(path) for path in places.values()]
    metrics = {run.metric: run for run in runs}
    if len(metrics) > 1:
        each = ", ".join(f"{name} ({run.folder.path})" for name, run in metrics.items())
        raise ConfigurationError(f"these runs cannot be compared, since they measure different things: {each}")
    groups: dict[str, list[LoadedRun]] = {}
    for run in runs:
        groups.setdefault(_but_for_seeds(run), []).append(run)
    return [Group(_label(members), members) for members in groups.values()]


def compare(paths: Sequence[str | Path], picture: str | Path = "comparison.png") -> Table:
    """A table of some runs, and a PNG of their curves."""
    plots.require_matplotlib()
    groups = load_groups(paths)
    metric = groups[0].runs[0].metric
    curves = [plots.curve(_legend(group), [run.history for run in group.runs], metric) for group in groups]
    write_atomically(Path(picture), lambda file: plots.draw_comparison(file, curves, metric, _tasks(groups)))
    return comparison_table(groups, metric)


def comparison_table(groups: Sequence[Group], metric: str) -> Table:
    """One row per group; costs are means over its seeds."""
    targets = common_targets(groups, metric)
    title = f"{_tasks(groups)}: {metric}"
    table = Table(title=title, title_style="bold", title_justify="left", box=box.SIMPLE_HEAD)
    several = len({_what(group.runs[0]) for group in groups}) > 1
    for name in ("run", "algorithm", *(["task"] if several else [])):
        table.add_column(name, overflow="fold")
    numbers = ("rounds", "exchanges", "MB", "gradients", "products", "final", "best", "seconds")
    for name in (*numbers, *(f"rounds\nto {measure.text(metric, target)}" for target in targets)):
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups:
        first = group.runs[0].summary
        table.add_row(
            group.label,
            first["algorithm"],
            *([_what(group.runs[0])] if several else []),
            f"{statistics.fmean(group.values('rounds')):,.0f}",
            f"{group.costs('exchanges'):,.0f}",
            f"{group.costs('bytes_down', 'bytes_up') / 1e6:,.1f}",
            f"{group.costs('gradients'):,.0f}",
            f"{group.costs('products'):,.0f}",
            measure.mean_and_spread(metric, group.values("final")),
            measure.mean_and_spread(metric, group.values("best")),
            f"{statistics.fmean(group.values('seconds_in_rounds')):.1f}",
            *(_rounds_to(group, metric, target) for target in targets),
        )
    return table


def common_targets(groups: Sequence[Group], metric: str) -> list[float]:
    """The hardest milestones that some run reached, at most three."""

    def reached(level: float) -> bool:
        return any(measure.rounds_to(run.history, metric, level) is not None for g in groups for run in g.runs)

    return [level for level in measure.levels(metric) if reached(level)][-TARGETS:]


def _rounds_to(group: Group, metric: str, target: float) -> str:
    """The mean over the seeds that reached it, and how many did where not all did."""
    counts = [measure.rounds_to(run.history, metric, target) for run in group.runs]
    reached = [count for count in counts if count is not None]
    if not reached:
        return "–"
    share = "" if len(reached) == len(counts) else f" ({len(reached)} of {len(counts)})"
    return f"{statistics.fmean(reached):,.0f}{share}"


def _runs_in(path: Path) -> list[Path]:
    inside = sorted(spec.parent for spec in path.glob("*/spec.toml"))
    return [path] if (path / "spec.toml").is_file() or not inside else inside


def _but_for_seeds(run: LoadedRun) -> str:
    tables = run.spec.tables()
    tables["run"].pop("seed")
    tables["task"].pop("seed", None)
    return repr(tables)


def _label(runs: Sequence[LoadedRun]) -> str:
    first = runs[0].folder.path.resolve()
    if len(runs) == 1:
        return first.name
    parents = {run.folder.path.resolve().parent for run in runs}
    return f"{first.parent.name if len(parents) == 1 else first.name} ({len(runs)} seeds)"


def _legend(group: Group) -> str:
    algorithm = group.runs[0].spec.algorithm.name
    return group.label if algorithm in group.label else f"{group.label}, {algorithm}"


def _tasks(groups: Sequence[Group]) -> str:
    return " / ".join(dict.fromkeys(_what(group.runs[0]) for group in groups))


def _what(run: LoadedRun) -> str:
    return " · ".join(part for part in (run.spec.task.name, run.spec.data) if part)
