"""Sweep over the fields of a spec.

Every point is a spec, and its runs have folders that are named by the point's values:

    server_lr.x-0.01-local_steps-5/seed-0

Finished runs are read, unfinished runs are continued, and all others are started. So the same command continues an
interrupted sweep, and a command with more values runs only the new points. Several processes with the same command
share the runs, since each process locks the run that it is running.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.table

from fedbilevel import __version__
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.metrics import mean_and_sd, text
from fedbilevel.core.writing import write_json, write_text
from fedbilevel.display import Display
from fedbilevel.engines.history import LOSSES, Callback, History, Result, Row
from fedbilevel.engines.progress import Guarded
from fedbilevel.engines.tracking import Tracker
from fedbilevel.experiments import toml
from fedbilevel.experiments.argument_errors import data_errors_in
from fedbilevel.experiments.export import csv_text
from fedbilevel.experiments.folder import Folder, path_word
from fedbilevel.experiments.loader import label
from fedbilevel.experiments.runner import first_metric, run_of
from fedbilevel.experiments.series import TaskCache, seeded
from fedbilevel.experiments.spec import Spec
from fedbilevel.experiments.tables import Cell, Column, Table, terminal, text_column
from fedbilevel.sweeps import (
    ENDS,
    PointValues,
    Sweep,
    made,
    measured_on_test,
    played,
    product,
    require_holdout,
    require_known,
    require_seeds,
)
from fedbilevel.tasks import Task

SHARE = "0.2"  # the share of the training data that a message suggests to hold out
LONGEST = 100  # the largest number of characters in a folder's name
PLAN, CHOSEN, TABLE = "sweep.json", "chosen.toml", "sweep.csv"
SpecOf = Callable[[PointValues], Spec]
"""A function (values of the swept fields) -> the spec with these values.

It raises ConfigurationError if a value is rejected.
"""
PrintLine = Callable[[str], None]


def sweep_specs(
    spec_of: SpecOf,
    grid: Mapping[str, Sequence[Any]],
    folder: Path,
    *,
    seeds: Sequence[int] | None = None,
    select: str | None = None,
    select_on_test: bool = False,
    say: PrintLine = lambda line: None,
    progress: bool | Display | None = False,
    trackers: Sequence[Tracker] = (),
) -> Sweep:
    """Run every combination of the values of some fields.

    Each combination has a folder of its own. Runs that have finished are not run again.

    Args:
        spec_of: a function that makes the spec of a point.
        grid: the values of each field, by its dotted path.
        folder: a new folder, or a folder with runs of this sweep or of a part of it.
        seeds: the seeds with which every point is run; None: the spec's seed.
        select: the metric that decides which point is best; None: the task's first metric.
        select_on_test: whether the metric may be measured on test data.
        say: a function that is called with a line about each run that has ended.
        progress: see `fedbilevel.solve`.
        trackers: trackers that record each run.

    Returns:
        The sweep; its `algorithm` is the spec of the best point.

    Raises:
        ConfigurationError: the input is wrong, or the folder has other runs; nothing was run.
        CheckpointError: a file cannot be written.
    """
    require_sweepable(grid)
    points = product(grid)
    specs = made(points, spec_of)
    allowed = [(spec, point) for spec, point in zip(specs, points, strict=True) if isinstance(spec, Spec)]
    first = allowed[0][0]
    player = InFolders(spec_of, folder, seeds, first, trackers=trackers)
    select = chosen_metric(player.seeded(first, player.seeds[0]), select, select_on_test, player.tasks)
    for spec, point in allowed:
        for seed in player.seeds:
            there = Folder(folder / point_name(point) / f"seed-{seed}")
            if changed := there.difference(player.seeded(spec, seed)):
                raise ConfigurationError(f"{there.path} has another run ({changed}): choose another folder with --out")

    def said(row: Mapping[str, Any]) -> None:
        say(in_a_line(f"{point_name({name: row[name] for name in grid})}/seed-{row['seed']}", row, select))

    player.plan = {"select": select, "runs": len(points) * len(player.seeds)}
    found = played(player, points, player.seeds, select, progress, said)
    found.others = other_runs(folder, map(point_name, points), player.seeds)
    return found


def other_runs(folder: Path, points: Iterable[str], seeds: Sequence[int]) -> int:
    """Return the number of runs in a sweep's folder that do not belong to these points and seeds.

    `points` are the names of the folders of the sweep's own points.
    """
    own = {folder / point / f"seed-{seed}" for point in points for seed in seeds}
    return sum(file.parent not in own for file in folder.glob(f"*/seed-*/{Folder(folder).spec.name}"))


class InFolders:
    """A runner of a sweep's points in folders, each point with each seed.

    Args:
        make: a function that makes the spec of a point.
        folder: the folder of the sweep.
        seeds: the seeds; None: each point is run once, with the spec's seed.
        first: the spec of any point. If `seeds` is None, the seed of this spec is used.
        name: a function (number of a point, its values) -> the name of the point's folder.
        keep: the number of tasks that stay in memory.
        trackers: trackers that record each run.

    Attributes:
        plan: what `fedbilevel watch` needs: the metric that decides, the number of runs and, unless folders are named
            by their values, the swept fields. The plan is written to the file PLAN when the first run has begun, so
            that a sweep without valid runs leaves no file.
    """

    def __init__(
        self,
        make: SpecOf,
        folder: Path,
        seeds: Sequence[int] | None,
        first: Spec,
        *,
        name: Callable[[int, PointValues], str] = lambda number, point: point_name(point),
        keep: int = 1,
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.make, self.folder, self.name, self.tasks = make, folder, name, TaskCache(keep)
        self.seeds = [first.run.seed] if seeds is None else seeds
        self.own_seed = seeds is None
        self.trackers = trackers
        self.plan: dict[str, Any] = {}
        require_seeds(self.seeds)

    def seeded(self, spec: Spec, seed: int) -> Spec:
        """Return the spec with a seed. If the sweep has no seeds, the spec keeps its own seed."""
        return spec if self.own_seed else seeded(spec, seed)

    def run(
        self, number: int, point: PointValues, seed: int, display: Guarded, callbacks: Sequence[Callback] = ()
    ) -> History:
        """Run a point with a seed, and return the history: see `run_of`."""
        name = self.name(number, point)
        display.begin(f"{name}, seed {seed}")
        spec, place = self.seeded(self.make(point), seed), self.folder / name / f"seed-{seed}"
        noted: list[Callback] = [*self.trackers, self.note_plan, *callbacks]
        with data_errors_in():
            return run_of(spec, place, self.tasks, callbacks=noted, progress=display)

    def note_plan(self, result: Result, row: Row | None) -> None:
        """Write the plan at the first call."""
        if self.plan:
            write_json(self.folder / PLAN, self.plan)
            self.plan = {}


def require_sweepable(fields: Mapping[str, Any]) -> None:
    """Raise a ConfigurationError if a swept field is a seed."""
    for name in fields:
        if name.rpartition(".")[2] == "seed":
            raise ConfigurationError(f"{name} cannot be swept: no seed is better than another; --seeds runs several")


def point_name(point: PointValues) -> str:
    """Return the name of a point's folder: its values, with a hash if they are too long or have special characters."""
    exact = "-".join(f"{name}-{in_words(value)}" for name, value in point.items())
    if re.fullmatch(r"[\w.-]+", exact) and len(exact) <= LONGEST:
        return exact
    return f"{path_word(exact)[:LONGEST]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"


def in_words(value: Any) -> str:
    """Return a swept value as a text: a text as it is, and any other value in TOML's notation."""
    return value if isinstance(value, str) else toml.value(value)


def in_a_line(name: str, row: Mapping[str, Any], select: str) -> str:
    """Return a line with the outcome of a run."""
    if row["error"]:
        return f"{name}  failed: {row['error']}"
    return f"{name}  {select} {text(select, row[select])}  ({row['round']:,.0f} rounds)"


def chosen_metric(spec: Spec, select: str | None, on_test: bool, tasks: Callable[[Spec], Task]) -> str:
    """Return the metric that decides which point is best: `select`, or else the task's first metric.

    Raises:
        ConfigurationError: the metric is not measured, or is measured on test data.
    """
    task = tasks(spec)
    own = task.metrics_per_client if spec.run.metrics_per_client else {}
    known = [*task.metrics, *(f"{name}.{end}" for name in own for end in ENDS), *LOSSES]
    select = select or first_metric(task)
    on_holdout = next((one.replace("test", "validation") for one in known if measured_on_test(one)), "")
    if spec.task.fields.get("holdout") == 0 and on_holdout:
        advice = f"--set task.holdout={SHARE} holds training data out and measures {on_holdout} in its place"
    else:
        others = " or ".join(one for one in known if not measured_on_test(one))
        advice = f"Task {label(spec.task.name)} holds no data out; choose by {others}"
    if select not in known and "validation" in select and on_holdout:
        message = f"task {label(spec.task.name)} does not measure {select}: {advice}"
        raise ConfigurationError(path="metric to select on", got=select, allowed=advice, message=message)
    require_known(select, known)
    require_holdout(select, on_test, f"{advice}; --select-on-test chooses by test data nevertheless")
    return select


def parse_values(text: str) -> list[Any]:
    """Read TOML values that are separated by commas; a comma within a list, a table or quotes does not end a value.

    Raises:
        ConfigurationError: the text has an invalid value.
    """
    found: list[Any] = []
    rest = ""
    for part in text.split(","):
        rest = f"{rest},{part}" if rest else part
        try:
            found.append(toml.parse_value(rest.strip()))
        except ConfigurationError:
            if rest.strip()[:1] not in ("[", "{", '"', "'"):
                raise
            continue
        rest = ""
    if rest:
        toml.parse_value(rest.strip())
    return found


def sweep_table(found: Sweep, width: int | None = None) -> rich.table.Table:
    """Return a table with a line for each point, the best first. Costs are means over the seeds."""
    columns = [
        Column(
            name,
            [Cell(in_words(row[name])) for row in found.rows],
            is_text=any(isinstance(row[name], str) for row in found.rows),
        )
        for name in found.fields
    ]
    columns.append(
        Column(found.select, [Cell(mean_and_sd(found.select, row[found.select], row["sd"])) for row in found.rows])
    )
    for name, goes in (("rounds", 1), ("exchanges", 0)):
        if name not in found.fields:
            cells = [Cell("–") if row[name] is None else Cell(values=[row[name]], kind="count") for row in found.rows]
            columns.append(Column(name, cells, goes))
    if any("epsilon" in row for row in found.rows):
        columns.append(Column("ε", [Cell(f"{row['epsilon']:.4g}" if "epsilon" in row else "–") for row in found.rows]))
    if any(row["error"] for row in found.rows):
        columns.append(text_column("failed", [row["error"] for row in found.rows]))
    return terminal(Table(f"Chosen by {found.chosen_on}", columns, [f"{found.effort}."]), width)


def write_files(found: Sweep, folder: Path) -> dict[str, Path]:
    """Write a table with a line for each run and, if there is a best point, its spec. Return the paths by name.

    Numbers that depend on the machine's speed are left out, so that an interrupted sweep writes the same files in the
    end.
    """
    written = {"table": folder / TABLE, "chosen": folder / CHOSEN}
    rows = [row | {name: in_words(row[name]) for name in found.fields} for row in found.trials]
    write_text(folder / TABLE, csv_text(rows))
    if found.algorithm is None:
        written.pop("chosen").unlink(missing_ok=True)
    else:
        write_text(folder / CHOSEN, chosen_toml(found))
    return written


def chosen_toml(found: Sweep) -> str:
    """Return the spec of the best point as TOML, with a comment that says how it was chosen."""
    row, seeds = found.rows[0], list(dict.fromkeys(str(row["seed"]) for row in found.trials))
    values = ", ".join(f"{name} = {in_words(row[name])}" for name in found.fields)
    spread = f" ± {row['sd']!r} (sample standard deviation over {len(seeds)} seeds)" if len(seeds) > 1 else ""
    several = f" --seeds {','.join(seeds)}" if len(seeds) > 1 else ""
    lines = [
        f"The best of a sweep of fedbilevel {__version__}: {values}.",
        f"Chosen by {found.chosen_on}: {row[found.select]!r}{spread}.",
        f"{found.effort}.",
        f"Run it with: fedbilevel run --spec {CHOSEN}{several}",
    ]
    return str(found.algorithm.to_toml("\n".join(lines)))
