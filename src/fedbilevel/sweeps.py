"""Run an algorithm with many values of its fields, and find the values that are best on held-out data.

A point is a combination of values. A `PointPlayer` runs a point with a seed: by `solve` for `fedbilevel.sweep`, or in a
folder for the command `fedbilevel sweep`. Both use the functions here for the points (`product`, `made`), the order of
the runs (`played`), the table (`row_of`, `Sweep`), and the rule that test data must not decide (`require_holdout`). A
search uses the player, the table and the rule.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import re
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.card import Card, Shown, counted
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import (
    CheckpointError,
    ConfigurationError,
    InUse,
    NumericalError,
    is_count,
    is_number,
    refuse_together,
    require,
    require_count,
    unknown,
)
from fedbilevel.core.metrics import mean_and_sd
from fedbilevel.core.problem import Problem
from fedbilevel.core.tables import with_values
from fedbilevel.core.tree import PyTree
from fedbilevel.display import Display
from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.history import LOSSES, History, Result, Row
from fedbilevel.engines.progress import Guarded, showing
from fedbilevel.engines.saver import advise_another_folder
from fedbilevel.engines.solve import solve
from fedbilevel.engines.tracking import TrackedRun, Tracking, tracked_group

T = TypeVar("T")
PointValues = Mapping[str, Any]
"""The values of the swept fields, by their dotted paths."""
PRUNED = "pruned after"  # the first words of the error of a run that was ended early because other runs were better
ENDS = ("mean", "worst", "best", "p10")  # the statistics of a per-client metric by which a point can be selected
POLL = 0.1  # seconds until a run that is in progress in another process is tried again


class PointPlayer(Protocol):
    """Run the points of a sweep."""

    def make(self, point: PointValues) -> Any:
        """Return the algorithm, or the spec, of a point; raise ConfigurationError if the point is refused."""

    def run(self, number: int, point: PointValues, seed: int, display: Guarded) -> History:
        """Run a point with a seed, and return the history; `number` is the point's number in its sweep."""


def sweep(
    algorithm: Algorithm | Callable[..., Algorithm],
    problem: Problem,
    clients: Clients,
    x0: PyTree,
    y0: PyTree = None,
    *,
    grid: Mapping[str, Sequence[Any]],
    select: str,
    seeds: Sequence[int] = (0,),
    select_on_test: bool = False,
    folder: str | Path | None = None,
    progress: bool | Display | None = None,
    **given: Any,
) -> Sweep:
    """Run an algorithm with all combinations of some values of its fields, and find the best combination.

    Args:
        algorithm: an algorithm, whose fields (or those of its parts) that `grid` names get the values of each point; or
            a function that returns the algorithm for a point. It gets the values of the point as keyword arguments, and
            is called for each run.
        problem, clients, x0, y0, progress: as in `fedbilevel.solve`.
        grid: the values of each field, e.g. {"server_lr.x": [0.01, 0.1], "local_steps": [1, 5]}. Each combination is a
            point.
        select: the metric that decides which point is best, by its last value, averaged over the seeds. It may be a
            loss, such as "outer_loss".
        seeds: the seeds with which each point is run; each is the `key` of `solve`.
        select_on_test: whether a metric with "test" in its name may decide.
        folder: the folder for a checkpoint of each run. A second call with the same arguments continues the runs, and
            several processes may share the folder.
        given: the other arguments of `fedbilevel.solve`: rounds, metrics, cohort, callbacks, … A callback, such as
            `stop_when("exchanges", above=300)`, may end a run before its last round.

    Returns:
        The sweep. A run that diverged or was refused has a row with the reason. If the best point lies on the edge of
        the grid, a warning says so.

    Raises:
        ConfigurationError: a field, metric or value does not exist, or every run is refused.
        CheckpointError: a checkpoint in the folder cannot be written, or belongs to another run.
    """
    points = product(grid)
    require_seeds(seeds)
    arguments = [name for name in inspect.signature(solve).parameters if name not in ("key", "checkpoint", "resume")]
    for name in given:
        if name not in arguments:
            raise unknown("argument of fedbilevel.sweep", name, arguments)
    require_count("rounds", given.get("rounds"))
    for name in ("metrics", "metrics_per_client"):
        fits = isinstance(given.get(name) or {}, Mapping)
        require(fits, name, given.get(name), "functions by name")
    each_client = [f"{name}.{end}" for name in given.get("metrics_per_client") or () for end in ENDS]
    require_holdout(select, select_on_test, "Select on a metric of held-out data, or set select_on_test=True")
    require_known(select, [*(given.get("metrics") or ()), *each_client, *LOSSES])
    player = Solving(
        make=_maker(algorithm, list(grid)),
        solve=partial(solve, problem=problem, clients=clients, x0=x0, y0=y0, **given),
        points=len(points),
        folder=folder,
    )
    made(points, player.make)
    parameters = {"sweep": {"grid": grid, "select": select, "seeds": list(seeds)}}
    group = tracked_group(f"sweep of {', '.join(grid)}", parameters, Path(folder) if folder else None)
    with Tracking(given.get("callbacks"), group) as tracking:
        found = played(player, points, seeds, select, progress)
        tracking.outcome = found.outcome
    return found


@dataclasses.dataclass(frozen=True)
class Solving:
    """Run points by `solve`, with a checkpoint for each run if there is a folder.

    Args:
        make: returns the algorithm of a point.
        solve: `fedbilevel.solve` with all other arguments.
        points: the number of points.
        folder: the folder for checkpoints, or None.
    """

    make: Callable[[PointValues], Algorithm]
    solve: partial[Result]
    points: int
    folder: str | Path | None

    def run(self, number: int, point: PointValues, seed: int, display: Guarded) -> History:
        display.begin(f"point {number + 1} of {self.points}, seed {seed}")
        file = self.folder and Path(self.folder) / f"point-{number:03d}-seed-{seed}.npz"
        saving: dict[str, Any] = {"checkpoint": file, "resume": "auto"} if file else {}
        values = ", ".join(f"{name}={value}" for name, value in point.items())
        run = TrackedRun(f"{values}, seed {seed}", {"point": point})
        try:
            with Tracking(self.solve.keywords.get("callbacks"), run) as tracking:
                return tracking.ended(self.solve(self.make(point), key=seed, progress=display, **saving)).history
        except CheckpointError as error:  # its remedy, resume="force", would mix the points of two sweeps
            advise_another_folder(error)
            raise


def _maker(
    algorithm: Algorithm | Callable[..., Algorithm], fields: Sequence[str]
) -> Callable[[PointValues], Algorithm]:
    """Return a function that makes the algorithm of a point; `fields` are the names of the swept fields."""
    if isinstance(algorithm, Algorithm):
        return partial(with_values, algorithm)
    build: Callable[..., Algorithm] = algorithm
    require(callable(build), "algorithm", build, "an algorithm, or a function that makes it from a point")
    parameters = inspect.signature(build).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in fields:
            if name not in parameters:
                raise unknown("argument of the function that makes the algorithm", name, parameters)

    def make(point: PointValues) -> Algorithm:
        result = build(**point)
        require(isinstance(result, Algorithm), "algorithm", result, "a function that returns an algorithm")
        return result

    return make


def product(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all combinations of the fields' values; the last field changes first.

    Raises:
        ConfigurationError: there are no fields, a field has no values or a value twice, or a field of a part, such as
            "solver.terms", comes before the part itself, "solver". The values of the part would then replace those of
            the field.
    """
    require(isinstance(grid, Mapping) and bool(grid), "grid", grid, "lists of values by the dotted paths of fields")
    for name, values in grid.items():
        some = isinstance(values, Collection) and not isinstance(values, str | Mapping) and len(values) > 0
        require(some, f"grid of {name}", values, "a list of one or more values")
        plain = [value.tolist() if hasattr(value, "tolist") else value for value in values]  # arrays of NumPy or JAX
        for i, value in enumerate(plain):
            if any(value is other or (value == other) is True for other in plain[:i]):
                message = f"grid of {name} has {value!r} twice"
                raise ConfigurationError(path=f"grid of {name}", got=value, allowed="there once", message=message)
    for part, whole in itertools.combinations(grid, 2):
        if part.startswith(f"{whole}."):
            message = f"{part} is a field of {whole}, whose values would replace those of {part}: "
            message += f"name {whole} first, or leave one of them out"
            raise ConfigurationError(path="grid", got=part, allowed=f"after {whole}", message=message)
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def made(points: Sequence[PointValues], make: Callable[[PointValues], T]) -> list[T | ConfigurationError]:
    """Return the result of `make` for each point, or the error if `make` refuses the point.

    Raises:
        ConfigurationError: every point with some value is refused, so that the value itself is wrong, and not a
            combination of values.
    """
    results: list[T | ConfigurationError] = []
    for point in points:
        try:
            results.append(make(point))
        except ConfigurationError as error:
            results.append(error)
    slips: dict[str, ConfigurationError] = {}
    for name, value in dict.fromkeys((name, repr(value)) for point in points for name, value in point.items()):
        of_value = [result for result, point in zip(results, points, strict=True) if repr(point.get(name)) == value]
        errors = [result for result in of_value if isinstance(result, ConfigurationError)]
        if len(errors) == len(of_value):
            slips |= {str(mistake): mistake for mistake in errors[0].wrong}
    refuse_together(slips.values())
    return results


def require_seeds(seeds: Sequence[int]) -> None:
    """Refuse seeds unless they are a list of one or more different seeds, whole numbers from 0 to 2³² − 1."""
    fits = isinstance(seeds, Collection) and not isinstance(seeds, str) and len(seeds) > 0
    fits = fits and all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds) and len(set(seeds)) == len(seeds)
    require(fits, "seeds", seeds, "one or more whole numbers, all different")


def require_known(select: str, metrics: Collection[str]) -> None:
    """Refuse a metric that is not measured."""
    if select not in metrics:
        raise unknown("metric to select on", select, metrics)


def measured_on_test(metric: str) -> bool:
    """Return whether a metric is measured on test data, according to its name.

    This is so if a word of the name begins with "test", as in test_accuracy, acc_on_tests or accuracyTest, but not in
    "fastest".
    """
    return re.search(r"(?<![a-z])test|Test|TEST", metric) is not None


def require_holdout(select: str, on_test: bool, advice: str) -> None:
    """Refuse to select on test data unless `on_test` allows it; `advice` is the remedy in the message."""
    if measured_on_test(select) and not on_test:
        looks = "a setting that is selected on it looks better than it is"
        message = f"{select} is measured on test data: {looks}. {advice}"
        raise ConfigurationError(path="metric to select on", got=select, allowed=advice, message=message)


def played(
    player: PointPlayer,
    points: Sequence[PointValues],
    seeds: Sequence[int],
    select: str,
    progress: bool | Display | None = False,
    said: Callable[[Mapping[str, Any]], None] = lambda row: None,
) -> Sweep:
    """Run every point with every seed, and return the sweep. All points of a seed are run before the next seed.

    In this order, the points of a seed share a task. A run that another process has in progress is tried again after
    the other runs.

    Args:
        player: runs a point with a seed.
        points: the points.
        seeds: the seeds.
        select: the metric that decides which point is best.
        progress: as in `fedbilevel.solve`.
        said: a function that is called with a row of `Sweep.trials` after each run.

    Raises:
        ConfigurationError: every run is refused, for example because of its number of rounds.
    """
    larger, wrong = False, []
    run_rows: dict[tuple[int, int], dict[str, Any]] = {}
    waiting = deque(itertools.product(seeds, range(len(points))))
    with showing(progress) as display:
        while waiting:
            seed, number = waiting.popleft()
            try:
                history = player.run(number, points[number], seed, display)
                row = row_of(history, seed, select)
                larger = history.larger_is_better(select)
            except InUse:
                waiting.append((seed, number))
                time.sleep(POLL)
                continue
            except (ConfigurationError, NumericalError) as error:
                row = row_of_failed(error, seed)
                wrong += [error] if isinstance(error, ConfigurationError) else []
            run_rows[number, seed] = row
            said({**points[number], **row})
    if len(wrong) == len(run_rows):
        raise wrong[0]
    runs = [[run_rows[number, seed] for seed in seeds] for number in range(len(points))]
    ended = Sweep.of(player, points, runs, select, larger)
    for text in on_edge(points, ended.best or {}):
        warnings.warn(text, stacklevel=3)
    return ended


def on_edge(points: Sequence[PointValues], best: PointValues) -> Iterator[str]:
    """Yield a warning for each field whose best value is the least or the largest number of its grid."""
    for name, value in best.items():
        values = [point[name] for point in points if is_number(point[name])]
        smallest = value == 1 and is_count(value)  # 1 is the smallest count, so that no better value lies beyond it
        if is_number(value) and min(values) < max(values) and value in (min(values), max(values)) and not smallest:
            yield f"the best {name}, {value}, lies on the edge of the grid: better values may lie beyond it"


def row_of(history: History, seed: int, select: str) -> dict[str, Any]:
    """Return the row of a run for the table of a sweep: its seed, its error, and the last row of its history.

    The error is empty, or says that the metric `select` is not finite.

    Raises:
        ConfigurationError: the metric is not measured.
    """
    last = in_table(history.rows[-1])
    require_known(select, last)
    return {"seed": seed, "error": "" if math.isfinite(last[select]) else f"{select} is {last[select]}", **last}


def row_of_failed(error: Exception, seed: int) -> dict[str, Any]:
    """Return the row of a run that failed, for the table of a sweep: its seed, its error, and its costs if known."""
    ledger: Ledger | None = getattr(error, "ledger", None)
    costs = {} if ledger is None else {"round": ledger.rounds, **ledger.columns()}
    return {"seed": seed, "error": str(error), **costs}


def in_table(row: Row) -> dict[str, Any]:
    """Return a row of a history without the seconds of this machine, for the table of a sweep."""
    return {name: value for name, value in row.items() if name != "seconds"}


@dataclasses.dataclass(repr=False)
class Sweep(Shown):
    """Hold the results of a sweep.

    Attributes:
        fields: the names of the swept fields.
        select: the metric that decides, as a mean over the seeds.
        larger_is_better: whether a larger value of this metric is better.
        trials: a row for each run, by point and seed: the values of the fields, "seed", "error", and the last row of
            its history without the seconds of this machine.
        rows: a row for each point, the best first and failed points last: the values of the fields, the mean of the
            metric, its sample standard deviation "sd", the means "rounds" and "exchanges", and "error", which is empty
            unless a run failed.
        spent: the total "rounds" and "exchanges" of all runs, including runs that diverged or were pruned.
        algorithm: the algorithm, or on the command line the spec, with the values of the best point; None if every
            point failed.
        others: the number of other runs in the folder, of earlier points or seeds; only on the command line.
    """

    fields: list[str]
    select: str
    larger_is_better: bool
    trials: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    spent: dict[str, float]
    algorithm: Any
    others: int = 0

    @classmethod
    def of(
        cls,
        player: PointPlayer,
        points: Sequence[PointValues],
        runs: Sequence[Sequence[Mapping[str, Any]]],
        select: str,
        larger: bool,
    ) -> Sweep:
        """Make the sweep from its points and from the rows of each point's runs."""
        rows = [standing(point, of, select) for point, of in zip(points, runs, strict=True)]
        sign = -1 if larger else 1
        order = sorted(range(len(rows)), key=lambda i: (rows[i][select] is None, sign * (rows[i][select] or 0.0)))
        best = player.make(points[order[0]]) if order and rows[order[0]][select] is not None else None
        fields = list(dict.fromkeys(name for point in points for name in point))
        trials = [{**point, **row, **point} for point, of in zip(points, runs, strict=True) for row in of]
        spent = {name: sum(row.get(column, 0) for of in runs for row in of) for name, column in COSTS.items()}
        return cls(fields, select, larger, trials, [rows[i] for i in order], spent, best)

    @property
    def best(self) -> dict[str, Any] | None:
        """Return the values of the fields of the best point; None if every point failed."""
        return None if self.algorithm is None else {name: self.rows[0][name] for name in self.fields}

    @property
    def outcome(self) -> dict[str, Any]:
        """Return the best point and its metric, for trackers."""
        best = {f"best.{name}": value for name, value in (self.best or {}).items()}
        return {self.select: self.rows[0][self.select], **best} if best else {}

    @property
    def chosen_on(self) -> str:
        """Return the metric that decided, its better direction, and a warning if it was measured on test data."""
        way = "larger" if self.larger_is_better else "smaller"
        return f"{self.select}, {way} is better{', SELECTED ON TEST DATA' * measured_on_test(self.select)}"

    @property
    def effort(self) -> str:
        """Return the number and the costs of all runs, as a text that papers can quote."""
        seeds, errors = len({row["seed"] for row in self.trials}), [row["error"] for row in self.trials if row["error"]]
        early = sum(error.startswith(PRUNED) for error in errors)
        ends = {"pruned": early, "failed": len(errors) - early}
        early_ends = "".join(f", {count:,} {end}" for end, count in ends.items() if count)
        of = f"{counted(len(self.rows), 'point')} × {counted(seeds, 'seed')}"
        cost = f"in all {self.spent['rounds']:,.0f} rounds, {self.spent['exchanges']:,.0f} exchanges"
        others = f"; {counted(self.others, 'other run')} in this folder" if self.others else ""
        return f"{counted(len(self.trials), 'run')} ({of}){early_ends}; {cost}{others}"

    def card(self) -> Card:
        values = ", ".join(f"{name} = {value}" for name, value in (self.best or {}).items())
        lines = {
            "best": values or "none: every point failed",
            self.select: "–"
            if self.best is None
            else mean_and_sd(self.select, self.rows[0][self.select], self.rows[0]["sd"]),
            "chosen on": self.chosen_on,
            "runs": self.effort,
            "more": "rows, best, algorithm, trials",
        }
        return Card(f"Sweep over {', '.join(self.fields)}", lines)


COSTS = {"rounds": "round", "exchanges": "exchanges"}
"""The names of costs in the row of a point, and the columns of histories that have them."""


def standing(point: PointValues, runs: Sequence[Mapping[str, Any]], select: str) -> dict[str, Any]:
    """Return the row of a point from the rows of its runs: means over the seeds, or the error and its seeds."""
    errors = {run["seed"]: run["error"] for run in runs if run["error"]}
    if errors:
        several = f"seed{'s' * (len(errors) > 1)} {', '.join(map(str, errors))}: " if len(runs) > 1 else ""
        error = f"{several}{next(iter(errors.values()))}"
        return {**point, select: None, "sd": None, **dict.fromkeys(COSTS), "error": error, **point}
    metric = [run[select] for run in runs]
    spread = statistics.stdev(metric) if len(metric) > 1 else None
    costs = {name: statistics.fmean(run[column] for run in runs) for name, column in COSTS.items()}
    costs |= {"epsilon": max(run["epsilon"] for run in runs)} if all("epsilon" in run for run in runs) else {}
    return {**point, select: statistics.fmean(metric), "sd": spread, **costs, "error": "", **point}
