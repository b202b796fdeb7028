"""Compare runs side by side: in a table, and by their curves in one picture."""

from __future__ import annotations

import itertools
import math
import os
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import rich.table

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.errors import ConfigurationError, unknown
from fedbilevel.core.metrics import in_percent, larger_is_better, text
from fedbilevel.core.writing import write_bytes
from fedbilevel.display import curves
from fedbilevel.display.curves import COSTS, SUFFIXES, ClientPanel, curve, time_of, words
from fedbilevel.engines.history import DIVERGED, History
from fedbilevel.experiments.folder import Folder, LoadedRun, as_damage, load_run, path_word
from fedbilevel.experiments.loader import label
from fedbilevel.experiments.names import RIVALS
from fedbilevel.experiments.spec import read_finished
from fedbilevel.experiments.tables import Cell, Column, Table, best_of, escaped, terminal, text_column
from fedbilevel.reading import read_json
from fedbilevel.wording import printable

ORDER = "methods.json"  # the file of a comparison that lists its methods, in the order of their colours
TARGETS = 3
PER_CLIENT = "per_client"  # the name of the panel of metrics per client
SEARCHES = {path_word(label(rival)): label(rival) for rival in RIVALS.values() if rival not in ALGORITHMS}
"""The name of a folder -> the label of the search over x whose run is in it."""
WRITTEN = (*SUFFIXES, ".csv", ".json", ".tex", ".md")  # suffixes of the files that a comparison writes among its runs


@dataclass(frozen=True)
class Look:
    """How a comparison shows its runs.

    Args:
        labels: name of a run -> the label that is shown in place of the name.
        columns: the headings of the columns to show, each in one line; None: columns are chosen automatically.
        levels: values of the metric; the table has the cost at which a run first reaches each of them. None: values are
            chosen automatically.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] | None = None
    levels: Sequence[float] | None = None


@dataclass(frozen=True)
class RunGroup:
    """Runs of one spec that differ only in their seeds."""

    name: str
    runs: Sequence[LoadedRun]
    look: Look = field(default_factory=Look)

    @property
    def text(self) -> str:
        """Return the name to show. The library's methods are written as in papers."""
        return self.look.labels.get(self.name) or "/".join(map(written, self.name.split("/")))

    @property
    def label(self) -> str:
        """Return the name to show, with the number of seeds if there are several."""
        return self.text if len(self.runs) == 1 else f"{self.text} ({len(self.runs)} seeds)"

    @property
    def metric(self) -> str:
        """Return the metric by which the runs are compared."""
        return self.runs[0].metric

    @property
    def larger_is_better(self) -> bool:
        """Return whether a larger value of the metric is better."""
        return self.runs[0].history.larger_is_better(self.metric)

    @property
    def algorithm(self) -> str:
        """Return the name of the runs' algorithm, as it is shown."""
        return label(self.runs[0].spec.algorithm.name)

    @property
    def says_algorithm(self) -> bool:
        """Return whether the algorithm need not be shown: the group's name contains it, or the user chose this name."""
        return path_word(self.algorithm) in self.name or self.name in self.look.labels

    @property
    def timed(self) -> bool:
        """Return whether time differs from the number of exchanges, as with a clock or an asynchronous method."""
        return any(_time(run) != run.summary["last_row"]["exchanges"] for run in self.runs)

    @property
    def pooled(self) -> bool:
        """Return whether one client has all samples."""
        return self.runs[0].spec.run.pooled

    @property
    def counted(self) -> bool:
        """Return whether the floating-point operations of all runs are known."""
        return all("flops" in run.summary["last_row"] for run in self.runs)

    def values(self, name: str) -> list[Any]:
        """Return an entry of the summaries, such as "final", for each run."""
        return [run.summary[name] for run in self.runs]

    def first(self, name: str) -> float:
        """Return a column's value in the first row of the history, as a mean over the runs."""
        return statistics.fmean(run.history.rows[0].get(name, math.nan) for run in self.runs)

    def costs(self, *names: str) -> float:
        """Return the sum of some costs at the end of a run, such as "gradients", as a mean over the runs."""
        return statistics.fmean(sum(run.summary["last_row"][name] for name in names) for run in self.runs)


def find_runs(paths: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """Return the folders of the runs at some paths, and lines of text on runs that are left out.

    A path is the folder of a run, or a folder with runs at any depth, such as the folder of `--seeds` or `compare
    --out`. In such a folder, a run is left out if it has not finished, or if it has the same spec and seed as another
    run (a search may draw a point twice). If a path is the folder of a run itself, the run is never left out. Pictures
    and tables that a comparison has written beside its runs are ignored. A path that contains no run is returned as it
    is; `load_run` then reports what is wrong with it.

    Raises:
        ConfigurationError: no run is left, or a run's spec or a comparison's record cannot be read.
    """
    found: dict[Path, Path] = {}
    unfinished: dict[Path, Path] = {}
    repeated: dict[Path, Path] = {}
    for path in map(Path, paths):
        if path.is_file() and path.suffix.lower() in WRITTEN:
            continue
        if Folder(path).spec.is_file() or not (below := list(_runs_below(path))):
            found[path.resolve()] = path  # `load_run` reports what is wrong
            continue
        specs: set[str] = set()
        for one in below:
            spec = repr(read_finished(Folder(one).spec).tables()) if Folder(one).finished else ""
            (unfinished if not spec else repeated if spec in specs else found)[one.resolve()] = one
            specs.add(spec)
    reasons = {"not finished": unfinished, "the same run as another there": repeated}
    left_out = {why: [str(path) for place, path in of.items() if place not in found] for why, of in reasons.items()}
    if not found:
        where = ", ".join(left_out["not finished"] or map(str, paths))
        reason = "have not finished" if left_out["not finished"] else "are not folders of runs"
        raise ConfigurationError(f"there is nothing to compare: {where} {reason}")
    return list(found.values()), [f"{why}: {', '.join(of)}" for why, of in left_out.items() if of]


def _runs_below(path: Path) -> Iterator[Path]:
    """Yield the folders below a path that have a spec.toml and are not inside another such folder.

    The folders are sorted by name or, in the folder of a comparison, in the order of its methods.
    """
    for folder, names, files in os.walk(path):
        first = recorded_order(Path(folder))
        names.sort(key=lambda name: (first.index(name) if name in first else len(first), name))
        if Folder(Path(folder)).spec.name in files:
            names.clear()
            yield Path(folder)


def recorded_order(folder: Path) -> list[str]:
    """Return the names of a comparison's methods in the order of their colours; [] if the folder has no record.

    Raises:
        ConfigurationError: the record is damaged.
    """
    file = folder / ORDER
    if not file.is_file():
        return []
    with as_damage(file):
        names = read_json(file)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("it must be a JSON list of the methods' names")
    return names


def load_groups(paths: Sequence[str | Path], look: Look | None = None) -> list[RunGroup]:
    """Read the runs that `find_runs` finds, and group runs that differ only in their seeds.

    Raises:
        ConfigurationError: a run cannot be read, the runs have different metrics, two folders have runs of the same
            spec and seed, or `look` has a label for a run that is not there.
    """
    runs = [load_run(path) for path in find_runs(paths)[0]]
    metrics = {_measured(run): run for run in runs}
    if len(metrics) > 1:
        each = ", ".join(f"{name} ({run.folder.path})" for name, run in metrics.items())
        message = f"these runs cannot be compared, since their metrics differ: {each}"
        raise ConfigurationError(path="metrics of the runs", got=[*metrics], allowed="the same", message=message)
    groups: dict[str, list[LoadedRun]] = {}
    same: dict[str, LoadedRun] = {}
    for run in runs:
        first = same.setdefault(repr(run.spec.tables()), run)
        if first is not run:
            both = f"{first.folder.path} and {run.folder.path}"
            message = f"{both} have the same spec and seed: leave out one of them"
            paths = [str(first.folder.path), str(run.folder.path)]
            raise ConfigurationError(path="runs", got=paths, allowed="of another spec or seed", message=message)
        groups.setdefault(_but_for_seeds(run), []).append(run)
    names, look = _names(list(groups.values())), look or Look()
    require_labelled(look, names)
    return [RunGroup(name, members, look) for name, members in zip(names, groups.values(), strict=True)]


def require_labelled(look: Look, names: Collection[str]) -> None:
    """Raise a ConfigurationError if a label is for a run that is not among `names`."""
    for name in look.labels:
        if name not in names:
            raise unknown("run in labels", name, names)


def written(name: str) -> str:
    """Return the name to show: SimFBO for simfbo (as papers write it), a search's label, or else the name itself."""
    if name in SEARCHES:
        return SEARCHES[name]
    return ALGORITHMS[name].__name__ if name in ALGORITHMS else name


def draw(
    groups: Sequence[RunGroup],
    picture: str | Path,
    panels: Sequence[str] | None = None,
    size: tuple[float, float] | None = None,
) -> None:
    """Draw the groups' curves to a PNG, PDF or SVG; see `comparison_figure`."""
    write_bytes(Path(picture), curves.encoded(comparison_figure(groups, panels, size), Path(picture)))


def comparison_figure(
    groups: Sequence[RunGroup], panels: Sequence[str] | None = None, size: tuple[float, float] | None = None
) -> Any:
    """Return a Matplotlib figure of the groups' curves. A pooled run is a horizontal line at its final value.

    Args:
        panels: what the panels show. A name of `curves.COSTS` is a panel whose horizontal axis is this cost.
            "per_client" is a panel over exchanges for each metric that was measured per client, and "per_client:NAME"
            is the same over the cost NAME. None: see `default_panels`.
        size: the width and the height, in inches, of a figure for a paper. Such a figure has no title, and small type
            if it is narrow. None: a figure of the usual size, with a title.
    """
    metric = groups[0].metric
    chosen = default_panels(groups) if panels is None else panels
    costs = [panel for panel in chosen if not is_per_client(panel)]
    each_client = [one for panel in chosen if is_per_client(panel) for one in client_panels(groups, panel)]
    lines = [
        curve(name, [run.history for run in group.runs], metric, level=group.pooled)
        for name, group in zip(legend(groups), groups, strict=True)
    ]
    seeds = common_seeds(groups)
    title = f"{tasks_of(groups)}, mean ± sd of {seeds} seeds" if seeds > 1 else tasks_of(groups)
    return curves.comparison_figure(lines, metric, title, costs, size, each_client)


def is_per_client(panel: str) -> bool:
    """Return whether a panel shows metrics per client; raise a ConfigurationError if no panel has that name."""
    kind, colon, cost = panel.partition(":")
    per_client = kind == PER_CLIENT
    if (cost if per_client and colon else "exchanges" if per_client else panel) not in COSTS:
        raise unknown("panel", panel, [*COSTS, PER_CLIENT, *(f"{PER_CLIENT}:{cost}" for cost in COSTS)])
    return per_client


def unmeasured(panel: str) -> ConfigurationError:
    """Return the error for a panel of metrics per client if no run has them."""
    remedy = "run.metrics_per_client=true"
    message = f"no panel {panel}: none of these runs has metrics per client; --set {remedy} measures them"
    return ConfigurationError(path="panel", got=panel, allowed=f"of runs with {remedy}", message=message)


def client_panels(groups: Sequence[RunGroup], panel: str) -> list[ClientPanel]:
    """Return a panel for each metric that some groups measured per client."""
    cost, names = panel.partition(":")[2] or "exchanges", legend(groups)
    has = [set.intersection(*(set(run.history.per_client) for run in group.runs)) for group in groups]
    metrics = sorted(set.union(*has))
    if not metrics:
        raise unmeasured(panel)
    made = []
    for metric in metrics:
        places = [i for i, own in enumerate(has) if metric in own]
        lines = [curve(names[i], [r.history for r in groups[i].runs], metric, level=groups[i].pooled) for i in places]
        without = [name for name, own in zip(names, has, strict=True) if metric not in own]
        made.append(ClientPanel(metric, cost, lines, places, without))
    return made


def common_seeds(groups: Sequence[RunGroup]) -> int:
    """Return the number of seeds that every group has; 0 if the groups have different numbers."""
    counts = {len(group.runs) for group in groups}
    return counts.pop() if len(counts) == 1 else 0


def legend(groups: Sequence[RunGroup]) -> list[str]:
    """Return each group's name in a legend, with its algorithm.

    If groups have different numbers of seeds, the number is included.
    """
    names = [group.text if common_seeds(groups) else group.label for group in groups]
    return [
        name if group.says_algorithm else f"{name}, {written(group.algorithm)}"
        for name, group in zip(names, groups, strict=True)
    ]


def default_panels(groups: Sequence[RunGroup]) -> list[str]:
    """Return the costs that a picture shows by default.

    Floating-point operations are shown in place of evaluations if all runs counted them. Time is shown if it differs
    from the number of exchanges.
    """
    work = "gflop" if all(group.counted for group in groups if not group.pooled) else "evaluations"
    return ["exchanges", "megabytes", work, "seconds", *(["time"] if any(group.timed for group in groups) else [])]


def comparison_table(groups: Sequence[RunGroup], width: int | None = None) -> rich.table.Table:
    """Return a table with one row per group, in which costs are means over the group's seeds.

    If the table would be wider than `width`, the least important columns are left out, and the caption names them. The
    caption also names rows that look wrong: rows whose metric ends worse than it began and, if the metric is minimised,
    rows that end above 1,000 times the least value of all rows.
    """
    return terminal(comparison(groups), width)


def comparison(groups: Sequence[RunGroup]) -> Table:
    """Return the table of runs side by side, for a terminal, a web page, a paper or a README.

    A pooled run is in the table for reference, and is never marked as the best.
    """
    metric, larger = groups[0].metric, groups[0].larger_is_better
    ends = {group.label: (group.first(metric), statistics.fmean(group.values("final"))) for group in groups}
    tasks = [_what(group.runs[0]) for group in groups]
    names = [text_column("", legend(groups), paper="method"), text_column("run", [group.label for group in groups])]
    if not all(group.says_algorithm for group in groups):
        names.append(text_column("algorithm", [written(group.algorithm) for group in groups], 15))
    if len(set(tasks)) > 1:
        names.append(text_column("task", tasks, 14))
    rivals, paper = [not group.pooled for group in groups], escaped(words(metric)) + r" (\%)" * in_percent(metric)

    def outcome(kind: str, goes: int | None) -> Column:
        cells = [Cell(values=group.values(kind), kind=metric) for group in groups]
        return Column(kind, best_of(cells, rivals, larger), goes, f"{kind} {paper}")

    columns = [
        *names,
        Column("rounds", [Cell(values=group.values("rounds"), kind="count") for group in groups], 10),
        *_costs(groups),
        outcome("final", None),
        outcome("best", 6),
        *_over_clients(groups),
        Column("seconds", [Cell(values=group.values("seconds_in_rounds"), kind="seconds") for group in groups], 2),
        *_to_targets(groups, metric, rivals),
    ]
    if (chosen := groups[0].look.columns) is not None:
        known = {" ".join(column.heading.split()): column for column in columns[len(names) :]}
        if wrong := [name for name in chosen if name not in known]:
            raise unknown("column", wrong[0], known)
        papers = {name: column.paper or escaped(name) for name, column in known.items()}
        columns = [*names, *(replace(known[name], goes=None, paper=papers[name]) for name in chosen)]
    return Table(f"{tasks_of(groups)}: {metric}", columns, doubts(metric, ends, larger), seeds=common_seeds(groups))


def _costs(groups: Sequence[RunGroup]) -> list[Column]:
    """Return the columns of costs.

    They are means over the seeds, the largest ε, and floating-point operations if all runs counted them. If trials of
    searches have diverged, their number is also a column.
    """

    def cells(kind: str, *names: str, of: float = 1.0) -> list[Cell]:
        return [Cell(values=[group.costs(*names) / of], kind=kind) for group in groups]

    spent = [[run.summary["last_row"].get("epsilon", math.inf) for run in group.runs] for group in groups]
    private = [Cell("–") if math.inf in each else Cell(values=[max(each)], kind="epsilon") for each in spent]
    trials = [[run.summary["last_row"].get(DIVERGED, 0) for run in group.runs] for group in groups]
    diverged = [Cell(values=[statistics.fmean(each)], kind="tenths") for each in trials]
    counted = all(group.counted for group in groups)  # if only some counted, an empty cell would look like no cost
    return [
        Column("exchanges", cells("count", "exchanges"), 4, "exchanges"),
        Column("MB", cells("megabytes", "bytes_down", "bytes_up", of=1e6), 11, "MB"),
        Column("gradients", cells("count", "gradients"), 1, "" if counted else "gradients"),
        Column("hvps", cells("count", "hvps"), 0, "" if counted else "hvps"),
        *([Column("GFLOP", cells("gflop", "flops"), 3, "GFLOP")] if counted else []),
        *([Column(DIVERGED, diverged, 9, "diverged trials")] if any(map(sum, trials)) else []),
        *([Column("ε", private, 8, r"$\varepsilon$")] if any(cell.values for cell in private) else []),
    ]


def _over_clients(groups: Sequence[RunGroup]) -> list[Column]:
    """Return final mean, first decile and worst value over clients, for each metric that all runs have per client."""
    rows = [[run.summary["last_row"] for run in group.runs] for group in groups]
    names = [column.removesuffix(".worst") for column in rows[0][0] if column.endswith(".worst")]
    return [
        Column(column, [Cell(values=[row[column] for row in group], kind=column) for group in rows], 12)
        for column in (f"{name}.{end}" for name in names for end in ("mean", "p10", "worst"))
        if all(column in row for group in rows for row in group)
    ]


def _to_targets(groups: Sequence[RunGroup], metric: str, rivals: Sequence[bool]) -> list[Column]:
    """Return a column for each cost at which runs first reach a common target, after the column of time.

    Time is left out if it does not differ from the number of exchanges.
    """
    timed = any(group.timed for group in groups)
    times = [Cell(values=[statistics.fmean(map(_time, group.runs))], kind="tenths") for group in groups]
    columns = [Column("time", times, 5)] if timed else []
    wanted = list(itertools.product(common_targets(groups, metric), ("exchanges", "time") if timed else ("exchanges",)))
    for target, cost in wanted:
        found = [costs_to(group, metric, target, cost) for group in groups]
        kind = "tenths" if cost == "time" else "count"
        cells = [Cell(said if reached else "–", reached, kind) for reached, said in found]
        tens = f"$10^{{{round(math.log10(target))}}}$" if target in TINY else f"{target:g}"
        level = rf"{100 * target:g}\,\%" if in_percent(metric) else tens
        paper = f"exchanges to {level}" if cost == "exchanges" else ""
        goes = 13 if (target, cost) == wanted[-1] else 7
        columns.append(Column(f"{cost}\nto {text(metric, target)}", best_of(cells, rivals, larger=False), goes, paper))
    return columns


def _time(run: LoadedRun) -> float:
    return time_of(run.summary["last_row"])


def common_targets(groups: Sequence[RunGroup], metric: str) -> list[float]:
    """Return the requested levels or, without any, at most three of the hardest milestones that some run reached."""
    if (asked := groups[0].look.levels) is not None:
        return list(asked)

    def reached(level: float) -> bool:
        return any(cost_to(run.history, metric, level) is not None for g in groups for run in g.runs)

    levels = TINY if not groups[0].larger_is_better else LEVELS if in_percent(metric) else ()
    return [level for level in levels if reached(level)][-TARGETS:]


def costs_to(group: RunGroup, metric: str, target: float, cost: str = "exchanges") -> tuple[list[float], str]:
    """Return the costs of the runs that reached a target, and a text with their number; "" if all runs reached it."""
    costs = [cost_to(run.history, metric, target, cost) for run in group.runs]
    reached = [one for one in costs if one is not None]
    return reached, "" if len(reached) == len(costs) else f" ({len(reached)} of {len(costs)})"


def _measured(run: LoadedRun) -> str:
    """Return the metric's name, and whether it is better when larger or smaller if the name does not say so."""
    larger = run.history.larger_is_better(run.metric)
    as_named = larger == larger_is_better(run.metric)
    return run.metric if as_named else f"{run.metric}, better when {'larger' if larger else 'smaller'}"


def _but_for_seeds(run: LoadedRun) -> str:
    tables = run.spec.tables()
    tables["run"].pop("seed")
    tables["clock"].pop("seed")
    tables["task"].pop("seed", None)
    return repr(tables)


def _names(groups: Sequence[Sequence[LoadedRun]]) -> list[str]:
    """Return a name for each group: the shortest end of its path that no other group's path has."""
    places = [_place(runs) for runs in groups]
    places = [
        place if places.count(place) == 1 else runs[0].folder.path.resolve()
        for place, runs in zip(places, groups, strict=True)
    ]
    lengths = [1] * len(places)
    while True:
        names = ["/".join(place.parts[-length:]) for place, length in zip(places, lengths, strict=True)]
        if len(set(names)) == len(names):
            return [printable(name, None) for name in names]
        lengths = [length + (names.count(name) > 1) for name, length in zip(names, lengths, strict=True)]


def _place(runs: Sequence[LoadedRun]) -> Path:
    """Return the folder of a run.

    For several runs, or for folders named seed-N, return the folder that contains them.
    """
    paths = [run.folder.path.resolve() for run in runs]
    named_by_seed = all(re.fullmatch(r"seed-\d+", path.name) for path in paths)
    together = len(paths) > 1 and len({path.parent for path in paths}) == 1
    return paths[0].parent if named_by_seed or together else paths[0]


def tasks_of(groups: Sequence[RunGroup]) -> str:
    """Return the tasks and data sets of the groups as a text, without repetitions."""
    return " / ".join(dict.fromkeys(_what(group.runs[0]) for group in groups))


def _what(run: LoadedRun) -> str:
    return " · ".join(part for part in (label(run.spec.task.name), run.spec.data) if part)


# Milestones, each harder than the previous one: LEVELS for accuracies, and TINY for metrics that are minimised. Other
# metrics have no milestones, since their scale is unknown.
LEVELS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.99)
TINY = tuple(10.0**-power for power in range(1, 13))


def cost_to(history: History, metric: str, level: float, cost: str = "exchanges") -> float | None:
    """Return the cost in the first row of a history whose metric is at least as good as a level; None if no row is."""
    larger = history.larger_is_better(metric)
    for row in history.rows:
        if metric in row and (row[metric] >= level if larger else row[metric] <= level):
            return time_of(row) if cost == "time" else row[cost]
    return None


FAR = 1e3
"""A row is reported by `doubts` if its metric is above this multiple of the least metric of all rows."""


def doubts(metric: str, ends: Mapping[str, tuple[float, float]], larger_is_better: bool) -> list[str]:
    """Return a sentence for each row of a comparison that looks wrong.

    A row looks wrong if its metric is worse at the end than at the start or, if the metric is minimised, far above the
    metric of the best row.

    Args:
        ends: name of the row -> (the metric at the start, the metric at the end).
    """
    found, best = [], min((end for _, end in ends.values()), default=0.0)
    for name, (start, end) in ends.items():
        if (end < start) if larger_is_better else (end > start):
            worse = f"{text(metric, end)} after {text(metric, start)}"
            found.append(f"{name} ends worse than it began, {worse}: it diverges, or its steps are too large")
        elif not larger_is_better and end > FAR * best > 0:
            far = f"{text(metric, end)}, more than {FAR:,.0f} times the best"
            found.append(f"{name} ends at {far}: other steps may help, or the method is biased on this problem")
    return found
