"""Runs side by side: a table, and their curves in one picture."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.engines.curves import curve, require_matplotlib, time_of
from fedbilevel.experiments import measure, plots
from fedbilevel.experiments.folder import LoadedRun, load_run
from fedbilevel.experiments.own_task import label
from fedbilevel.experiments.tables import fitted

TARGETS = 3
TEXTS = ("run", "algorithm", "task")
# Where the terminal is narrow:
DROPPED_FIRST = ("products", "gradients", "seconds", "GFLOP", "exchanges", "time", "best")


@dataclass(frozen=True)
class Group:
    """Runs of one spec that differ in their seeds only."""

    label: str
    runs: Sequence[LoadedRun]

    @property
    def metric(self) -> str:
        return self.runs[0].metric

    @property
    def algorithm(self) -> str:
        return self.runs[0].spec.algorithm.name

    @property
    def timed(self) -> bool:
        """Whether their time is more than a count of exchanges: that of a clock, or of asynchronous runs."""
        return any(_time(run) != run.summary["last_row"]["exchanges"] for run in self.runs)

    @property
    def pooled(self) -> bool:
        """Whether a single client held every sample."""
        return self.runs[0].spec.run.pooled

    @property
    def counted(self) -> bool:
        """Whether the floating-point operations of all of them are known."""
        return all("flops" in run.summary["last_row"] for run in self.runs)

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


def compare(paths: Sequence[str | Path], picture: str | Path = "comparison.png", width: int | None = None) -> Table:
    """A table of some runs, not wider than `width` if that can be, and a PNG of their curves."""
    require_matplotlib()
    groups = load_groups(paths)
    draw(groups, picture)
    return comparison_table(groups, width)


def draw(groups: Sequence[Group], picture: str | Path) -> None:
    """Draw the groups' curves to a PNG, PDF or SVG; a run without a federation is a line at its final value."""
    metric = groups[0].metric
    curves = [
        curve(_legend(group), [run.history for run in group.runs], metric, level=group.pooled) for group in groups
    ]
    plots.save(plots.comparison_figure(curves, metric, _tasks(groups), default_panels(groups)), Path(picture))


def default_panels(groups: Sequence[Group]) -> list[str]:
    """The currencies of cost that a picture shows: operations in place of evaluations where all runs know them, and
    time where it is more than a count of exchanges."""
    work = "gflop" if all(group.counted for group in groups if not group.pooled) else "evaluations"
    return ["exchanges", "megabytes", work, "seconds", *(["time"] if any(group.timed for group in groups) else [])]


def comparison_table(groups: Sequence[Group], width: int | None = None) -> Table:
    """One row per group; costs are means over its seeds. Where it would be wider than `width` the least important
    columns go, and the caption names them."""
    metric = groups[0].metric
    columns = _columns(groups, metric)
    to_targets = [name for name in columns if "\n" in name]
    droppable = [*DROPPED_FIRST, *to_targets[:-1], "rounds", "MB", *to_targets[-1:], "task", "algorithm"]
    return fitted(f"{_tasks(groups)}: {metric}", columns, width, texts=TEXTS, droppable=droppable)


def _columns(groups: Sequence[Group], metric: str) -> dict[str, list[str]]:
    """Every column: its heading and a text for each group."""
    columns: dict[str, list[str]] = {"run": [group.label for group in groups]}
    if any(group.algorithm not in group.label for group in groups):
        columns["algorithm"] = [group.algorithm for group in groups]
    if len({_what(group.runs[0]) for group in groups}) > 1:
        columns["task"] = [_what(group.runs[0]) for group in groups]
    columns |= {
        "rounds": [f"{statistics.fmean(group.values('rounds')):,.0f}" for group in groups],
        "exchanges": [f"{group.costs('exchanges'):,.0f}" for group in groups],
        "MB": [f"{group.costs('bytes_down', 'bytes_up') / 1e6:,.1f}" for group in groups],
        "gradients": [f"{group.costs('gradients'):,.0f}" for group in groups],
        "products": [f"{group.costs('products'):,.0f}" for group in groups],
    }
    if all(group.counted for group in groups):  # a gap in the column would look like no cost
        columns["GFLOP"] = [measure.gflop(group.costs("flops")) for group in groups]
    columns |= {
        "final": [measure.mean_and_spread(metric, group.values("final")) for group in groups],
        "best": [measure.mean_and_spread(metric, group.values("best")) for group in groups],
        "seconds": [f"{statistics.fmean(group.values('seconds_in_rounds')):.1f}" for group in groups],
    }
    timed = any(group.timed for group in groups)
    if timed:
        columns["time"] = [f"{statistics.fmean(map(_time, group.runs)):,.1f}" for group in groups]
    for target in common_targets(groups, metric):
        for cost in ("exchanges", "time") if timed else ("exchanges",):
            heading = f"{cost}\nto {measure.text(metric, target)}"
            columns[heading] = [_cost_to(group, metric, target, cost) for group in groups]
    return columns


def _time(run: LoadedRun) -> float:
    return time_of(run.summary["last_row"])


def common_targets(groups: Sequence[Group], metric: str) -> list[float]:
    """The hardest milestones that some run reached, at most three."""

    def reached(level: float) -> bool:
        return any(measure.cost_to(run.history, metric, level) is not None for g in groups for run in g.runs)

    return [level for level in measure.levels(metric) if reached(level)][-TARGETS:]


def _cost_to(group: Group, metric: str, target: float, cost: str) -> str:
    """The mean over the seeds that reached it, and how many did where not all did."""
    costs = [measure.cost_to(run.history, metric, target, cost) for run in group.runs]
    reached = [one for one in costs if one is not None]
    if not reached:
        return "–"
    share = "" if len(reached) == len(costs) else f" ({len(reached)} of {len(costs)})"
    return f"{statistics.fmean(reached):,.{1 if cost == 'time' else 0}f}{share}"


def _runs_in(path: Path) -> list[Path]:
    inside = sorted(spec.parent for spec in path.glob("*/spec.toml"))
    return [path] if (path / "spec.toml").is_file() or not inside else inside


def _but_for_seeds(run: LoadedRun) -> str:
    tables = run.spec.tables()
    tables["run"].pop("seed")
    tables["clock"].pop("seed")
    tables["task"].pop("seed", None)
    return repr(tables)


def _label(runs: Sequence[LoadedRun]) -> str:
    """The folder's name; for several in one folder and for seed-N, that of the folder around."""
    paths = [run.folder.path.resolve() for run in runs]
    named_by_seed = all(re.fullmatch(r"seed-\d+", path.name) for path in paths)
    together = len(paths) > 1 and len({path.parent for path in paths}) == 1
    name = paths[0].parent.name if named_by_seed or together else paths[0].name
    return name if len(runs) == 1 else f"{name} ({len(runs)} seeds)"


def _legend(group: Group) -> str:
    return group.label if group.algorithm in group.label else f"{group.label}, {group.algorithm}"


def _tasks(groups: Sequence[Group]) -> str:
    return " / ".join(dict.fromkeys(_what(group.runs[0]) for group in groups))


def _what(run: LoadedRun) -> str:
    return " · ".join(part for part in (label(run.spec.task.name), run.spec.data) if part)
