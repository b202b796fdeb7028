"""How an entry is played: for every panel and method, steps by a sweep on a holdout, then runs with every seed.

Every trial and every run has a folder of its own below OUT/<id>/<scale>. What is there is not played again, so an
interrupted entry goes on where it was.

    tuning/<panel>/<method>/…     the sweep, with chosen.toml; of a panel that is `apart`, one for each seed
    runs/<panel>/<method>/seed-N  the runs
    spent/…                       the time that it took each process
    outcome.json                  what came of it (outcome.py)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import ConfigurationError, NumericalError
from fedbilevel.engines.checkpoint import write_json, write_text
from fedbilevel.engines.history import History
from fedbilevel.experiments import toml
from fedbilevel.experiments.folder import Folder, load_run, path_word
from fedbilevel.experiments.runner import algorithm_of, build, complete
from fedbilevel.experiments.series import TaskCache, seeded
from fedbilevel.experiments.spec import Spec, configure
from fedbilevel.experiments.sweep import PrintLine as Said
from fedbilevel.experiments.sweep import chosen_metric, sweep_specs
from fedbilevel.reproduce.claims import Runs, metric_in
from fedbilevel.reproduce.entry import Entry, Scale
from fedbilevel.reproduce.ranking import ends_after
from fedbilevel.sweeps import PointValues, Sweep, made
from fedbilevel.sweeps import product as points_of

SEEDS = (0, 1, 2)
SPENT = "spent"
FAILED = "failed.txt"
TUNING, RUNS = "tuning", "runs"


@dataclass(frozen=True)
class Chosen:
    """What the holdout chose for a method in a panel.

    Attributes:
        values: of the swept fields; None where every point failed, with the reason in `error`.
        trials: points times seeds, failed ones included.
        failed: how many of them failed.
    """

    values: dict[str, Any] | None
    trials: int = 0
    failed: int = 0
    error: str = ""


@dataclass
class Played:
    """The runs of an entry.

    Attributes:
        runs: the history of each seed, None of a run that failed.
        errors: why, by panel, method and seed.
        chosen: by panel and method, for the run of each seed.
        seconds, processor_seconds: of all trials and runs, those of earlier starts included; where several processes
            play side by side, their sum.
    """

    entry: Entry
    scale: Scale
    seeds: Sequence[int]
    runs: Runs
    errors: dict[str, str] = field(default_factory=dict)
    chosen: dict[str, dict[str, list[Chosen]]] = field(default_factory=dict)
    seconds: float = 0.0
    processor_seconds: float = 0.0


def place_of(entry: Entry, scale: Scale, out: Path) -> Path:
    """The folder of an entry's runs."""
    return out / entry.runs / scale


def play(
    entry: Entry, scale: Scale, out: Path, *, seeds: Sequence[int] = SEEDS, said: Said = lambda line: None
) -> Played:
    """Bring all trials and runs of an entry to their end.

    Args:
        out: the folder that holds all entries' folders.
        seeds: of the runs; none of those of the trials.
        said: called with a line about what has ended.

    Raises:
        ConfigurationError, DataError: the entry cannot be run here, e.g. for want of data.
    """
    place, tasks = place_of(entry, scale, out), TaskCache()
    runs: dict[str, dict[str, list[History | None]]] = {}
    played = Played(entry, scale, seeds, runs)
    require_playable(entry, scale, place, seeds, tasks)
    for panel in entry.panels_at(scale):
        methods = entry.methods_of(panel)
        chosen = played.chosen[panel] = {}
        for method in methods:
            chosen[method] = choose(entry, panel, method, scale, place, seeds, tasks, said)
        found = {}
        for (k, seed), method in product(enumerate(seeds), methods):  # methods of a seed in a row share its task
            history, error = run_of(entry, panel, method, scale, place, chosen[method][k], seed, tasks)
            found[method, seed] = history, error
            said(line_of(entry, panel, method, seed, history, error))
        runs[panel] = {method: [found[method, seed][0] for seed in seeds] for method in methods}
        for method, seed in product(methods, seeds):
            if error := found[method, seed][1]:
                played.errors[f"{panel} · {method} · seed {seed}"] = error
    played.seconds, played.processor_seconds = spent(place)
    return played


def require_playable(entry: Entry, scale: Scale, place: Path, seeds: Sequence[int], tasks: TaskCache) -> None:
    """Refuse what is wrong in an entry or its seeds before anything is played.

    All specs of trials and runs are looked at. Methods of which nothing has been played are also made for the samples
    of their first trial, or of their first run where nothing is chosen.

    Raises:
        ConfigurationError: something is wrong; the message names the panel and the method.
        DataError: the samples are not there.
    """
    if entry.tuning and (both := set(seeds) & set(entry.tuning.seeds)):
        raise ConfigurationError(f"seeds {sorted(both)} chose the steps of {entry.id}: its runs take others")
    firsts = {}
    for pair in pairs_of(entry, scale):
        with _named(*pair):
            firsts[pair] = _first_specs(entry, *pair, scale, seeds)
    new = [pair for pair in firsts if not any(_folder(place, kind, *pair).exists() for kind in (TUNING, RUNS))]
    watch = Stopwatch(place)
    for pair in new:
        with _named(*pair):
            for spec in firsts[pair]:
                build(spec, tasks(spec))
                if trials := _trials(entry, *pair, scale, seeds):
                    chosen_metric(spec, trials.select, False, tasks)
    if new:
        watch.note()


def _first_specs(entry: Entry, panel: str, method: str, scale: Scale, seeds: Sequence[int]) -> list[Spec]:
    """The specs of the first trials, one at each point, or of the first run where nothing is chosen; those of all
    trials and runs are made on the way."""
    trials = _trials(entry, panel, method, scale, seeds)
    if trials is None:
        firsts = runs = [spec_of(entry, panel, method, scale, Chosen({}), seeds[0])]
    else:
        first, points = trials.seeds[0], points_of(trials.grid)
        found = zip(made(points, trials.spec_of), points, strict=True)
        allowed = [(one, values) for one, values in found if isinstance(one, Spec)]  # others count as failed trials
        firsts = [seeded(one, first) for one, _ in allowed]
        runs = [spec_of(entry, panel, method, scale, Chosen(values), seeds[0]) for _, values in allowed]
    for spec in [*runs, *(seeded(runs[0], seed) for seed in seeds[1:])]:
        algorithm_of(spec)
    return firsts


def pairs_of(entry: Entry, scale: Scale) -> list[tuple[str, str]]:
    """The panels that are played at a scale, each with its methods."""
    return [(panel, method) for panel in entry.panels_at(scale) for method in entry.methods_of(panel)]


@contextmanager
def _named(panel: str, method: str) -> Iterator[None]:
    """Say of which method in which panel something is refused."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{panel} · {method}: {error}") from error


def _folder(place: Path, kind: str, panel: str, method: str) -> Path:
    """Where the trials or the runs of a method in a panel are."""
    return place / kind / path_word(panel) / path_word(method)


def choose(
    entry: Entry,
    panel: str,
    method: str,
    scale: Scale,
    place: Path,
    seeds: Sequence[int],
    tasks: TaskCache,
    said: Said,
) -> list[Chosen]:
    """The values of the swept fields with the best metric on the holdout, for the run of each seed: the same for all,
    unless the panel is `apart`."""
    folder = _folder(place, TUNING, panel, method)

    def best(seeds: Sequence[int], folder: Path) -> Chosen:
        trials = _trials(entry, panel, method, scale, seeds)
        if trials is None:
            return Chosen({})
        return _best(trials, folder, Stopwatch(place), tasks, lambda line: said(f"{panel} · {method} · {line}"))

    if entry.panels[panel].apart:
        return [best([seed], folder / f"seed-{seed}") for seed in seeds]
    return [best(seeds, folder)] * len(seeds)


@dataclass(frozen=True)
class Trials:
    """The sweep over the grid of a method."""

    tables: Any
    grid: dict[str, list[Any]]
    seeds: list[int]
    select: str

    def spec_of(self, point: PointValues) -> Spec:
        spec = configure(self.tables, settings=[f"{name}={toml.value(value)}" for name, value in point.items()])
        algorithm_of(spec)
        return spec


def _trials(entry: Entry, panel: str, method: str, scale: Scale, seeds: Sequence[int]) -> Trials | None:
    """The sweep over the grid of a method, for runs with these seeds; None where nothing is chosen."""
    grid = entry.grid(panel, method, scale)
    if entry.tuning is None or not grid:
        return None
    apart = list(seeds) if entry.panels[panel].apart else list(entry.tuning.seeds)
    tables = entry.tables(panel, method, scale, tuning=True)
    return Trials(tables, {name: list(values) for name, values in grid.items()}, apart, entry.selected_in(panel))


def _best(trials: Trials, folder: Path, watch: Stopwatch, tasks: TaskCache, said: Said) -> Chosen:
    """The values with the best metric in a sweep, which goes on where it was."""

    def told(line: str) -> None:
        said(f"trial {line}")
        watch.note()

    try:
        given: dict[str, Any] = {"seeds": trials.seeds, "select": trials.select, "tasks": tasks}
        return _chosen(sweep_specs(trials.spec_of, trials.grid, folder, say=told, **given))
    except BaseException:
        watch.note()
        raise


def _chosen(sweep: Sweep) -> Chosen:
    trials, failed = len(sweep.trials), sum(bool(row["error"]) for row in sweep.trials)
    if sweep.best is None:
        return Chosen(None, trials, failed, f"every trial failed: {sweep.rows[0]['error']}")
    return Chosen(sweep.best, trials, failed)


def devices_of(entry: Entry, scale: Scale) -> int:
    """The most devices that a run of the entry plays on."""
    tables = [entry.tables(*pair, scale) for pair in pairs_of(entry, scale)]
    return max(int(one.get("engine", {}).get("devices", 1)) for one in tables)


def spec_of(entry: Entry, panel: str, method: str, scale: Scale, chosen: Chosen, seed: int) -> Spec:
    """The spec of a run."""
    settings = [f"{name}={toml.value(value)}" for name, value in (chosen.values or {}).items()]
    return seeded(configure(entry.tables(panel, method, scale), settings=settings), seed)


def run_of(
    entry: Entry, panel: str, method: str, scale: Scale, place: Path, chosen: Chosen, seed: int, tasks: TaskCache
) -> tuple[History | None, str]:
    """The history of a run, or why it has none."""
    if chosen.values is None:
        return None, chosen.error
    folder = _folder(place, RUNS, panel, method) / f"seed-{seed}"
    spec = spec_of(entry, panel, method, scale, chosen, seed)
    there = Folder(folder).spec
    if changed := Folder(folder).difference(spec):
        raise ConfigurationError(
            f"{folder} holds a run of another setting ({changed}): remove it to play the entry anew"
        )
    if (folder / FAILED).is_file():
        return None, (folder / FAILED).read_text(encoding="utf-8")
    if Folder(folder).finished:  # no need to load its samples
        return load_run(folder).history, ""
    if not Folder(folder).begun:
        Folder(folder).require_free()
    watch = Stopwatch(place)
    try:
        ends = [ends_after(entry.panels[panel].budgets)] if entry.ranked else []
        complete(spec, folder, callbacks=ends, experiment=build(spec, tasks(spec)), plot=False, progress=False)
    except (ConfigurationError, NumericalError) as error:  # refused: such as a step too large for this seed's samples
        write_text(there, spec.to_toml())
        write_text(folder / FAILED, str(error))
        return None, str(error)
    finally:
        watch.note()
    return load_run(folder).history, ""


def line_of(entry: Entry, panel: str, method: str, seed: int, history: History | None, error: str) -> str:
    """What came of a run, in a line."""
    if history is None:
        return f"{panel} · {method} · seed {seed}: {error}"
    row, metric = history.rows[-1], entry.measured_in(panel)
    found = metric_in(row, metric)
    value = "–" if found is None else f"{found:.4g}"
    return f"{panel} · {method} · seed {seed}: {metric} {value} ({row['exchanges']:,.0f} exchanges)"


def rehearse(entry: Entry, scale: Scale, out: Path, *, said: Said = lambda line: None) -> None:
    """Play one round of every method in every panel, to see that the entry can be run.

    Raises:
        FedbilevelError: it cannot.
    """
    for panel, method in pairs_of(entry, scale):
        chosen = Chosen({name: values[0] for name, values in entry.grid(panel, method, scale).items()})
        once = {"rounds": 1, "exchanges": None, "bytes": None, "time": None, "eval_every": 1}
        folder, began = _folder(place_of(entry, scale, out), "rehearsal", panel, method), time.perf_counter()
        with _named(panel, method):
            spec = spec_of(entry, panel, method, scale, chosen, seed=0)
            complete(spec.replace(run=once), folder, plot=False, progress=False)
        said(f"{panel} · {method}: one round, {time.perf_counter() - began:.1f} s")


class Stopwatch:
    """Adds up, in a file of an entry's folder, the time that trials and runs take in this process. What is only read
    again is not counted."""

    def __init__(self, place: Path) -> None:
        self.file = place / SPENT / f"{os.getpid()}.json"
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def note(self) -> None:
        """Add what has passed since the last note, or the start."""
        wall, processor = time.perf_counter(), time.process_time()
        before = _seconds_in(self.file) if self.file.is_file() else (0.0, 0.0)
        write_json(self.file, [before[0] + wall - self.wall, before[1] + processor - self.processor])
        self.wall, self.processor = wall, processor


def spent(place: Path) -> tuple[float, float]:
    """Seconds and processor seconds of all processes so far."""
    found = [_seconds_in(file) for file in sorted((place / SPENT).glob("*.json"))]
    return sum(wall for wall, _ in found), sum(processor for _, processor in found)


def _seconds_in(file: Path) -> tuple[float, float]:
    wall, processor = json.loads(file.read_text(encoding="utf-8"))
    return wall, processor
