"""Several algorithms on one task: their specs, their folders, and playing what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.errors import ConfigurationError, require, unknown
from fedbilevel.engines.curves import require_matplotlib
from fedbilevel.engines.virtual_time.clock import Clock
from fedbilevel.experiments.compare import PER_CLIENT, UNMEASURED, Group, draw, is_per_client, load_groups
from fedbilevel.experiments.export import names
from fedbilevel.experiments.own_task import full_name, label
from fedbilevel.experiments.parts import build, task_of
from fedbilevel.experiments.places import default_path, write_json
from fedbilevel.experiments.runner import complete
from fedbilevel.experiments.series import ORDER, finished, recorded_order, require_series, seeded
from fedbilevel.experiments.spec import DEFAULT_TASK, SECTIONS, Spec, configure, fields_of
from fedbilevel.tasks import Task

CENTRALISED = "centralised"
PICTURE = "comparison.png"
WRITTEN_BESIDE = [PICTURE, ORDER, *(file.name for files in names(Path(PICTURE)).values() for file in files)]

Play = Callable[[Spec, Path, Task], Any]
"""(spec, folder, task): bring that run to its end."""


def compare_algorithms(
    task: str | None,
    algorithms: Sequence[str],
    *,
    settings: Sequence[str] = (),
    data: str | None = None,
    seeds: Sequence[int] | None = None,
    centralised: bool = False,
    out: str | Path | None = None,
) -> list[Group]:
    """Run several algorithms on the same task and seeds, and draw their curves in one picture.

    Each run has a folder of its own, OUT/<algorithm> or, with seeds, OUT/<algorithm>/seed-N; finished runs found there
    are read, unfinished ones continued.

    Args:
        task: see `fedbilevel tasks`; None takes the default one; or a user's own (module:name, file.py:name).
        algorithms: their names, all different.
        settings: for all of them, as `assign` takes them. "algorithm.field=…" is for those that have such a field,
            "fednest.field=…" for that algorithm alone; run.exchanges=N gives all of them the same budget.
        data: the task's data set.
        seeds: of run and task; None makes one run of each algorithm.
        centralised: also run the first algorithm with a single client that holds every sample.
        out: a new folder, or that of the same comparison (or of a part of it); None chooses one in ./runs.

    Returns:
        What was run: one group of runs, which differ in their seeds, for each algorithm. `comparison_table` makes a
        table of them.

    Raises:
        ConfigurationError: wrong input; nothing was written.
    """
    specs = comparison_specs(task, algorithms, settings=settings, data=data, centralised=centralised)
    return play_all(specs, comparison_folder(specs) if out is None else Path(out), seeds)


def comparison_folder(specs: Mapping[str, Spec]) -> Path:
    """A place of its own for a comparison, in ./runs."""
    first = next(iter(specs.values()))
    return default_path("compare", label(first.task.name), first.data)


def play_all(
    specs: Mapping[str, Spec],
    folder: Path,
    seeds: Sequence[int] | None = None,
    play: Play | None = None,
    panels: Sequence[str] | None = None,
    size: tuple[float, float] | None = None,
) -> list[Group]:
    """Bring all runs of a comparison to their ends, and draw those that got there; panels and size as `draw` has them.

    `play` does so for one run, the default silently; a run that it leaves unfinished is left out.
    """
    require_matplotlib()
    if any(map(is_per_client, panels or ())) and not any(spec.run.metrics_per_client for spec in specs.values()):
        raise ConfigurationError(f"no panel {PER_CLIENT}: none of these runs {UNMEASURED}")
    series = _series(folder, specs, seeds)
    require_series(folder, series, besides=WRITTEN_BESIDE)
    tasks = _Tasks()
    missing = [place for place in series if not finished(place)]
    for place in missing[: len(specs)]:
        build(series[place], tasks(series[place]))  # all fit the task, or nothing begins
    for place in missing:
        (play or _silently)(series[place], place, tasks(series[place]))
    done = [place for place in series if finished(place)]
    if not done:
        raise ConfigurationError(f"none of the runs in {folder} reached its end: there is nothing to compare")
    order = list(dict.fromkeys([*recorded_order(folder), *specs]))
    write_json(folder / ORDER, order)
    done.sort(key=lambda place: order.index(place.relative_to(folder).parts[0]))
    groups = load_groups(done)
    draw(groups, folder / PICTURE, panels, size)
    return groups


def comparison_specs(
    task: str | None,
    algorithms: Sequence[str],
    *,
    settings: Sequence[str] = (),
    data: str | None = None,
    centralised: bool = False,
) -> dict[str, Spec]:
    """The spec of each algorithm, and of the run with a single client; see `compare_algorithms`."""
    require(len(algorithms) > 0, "algorithms", list(algorithms), "one or more names")
    for name in algorithms:
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS)
        require(algorithms.count(name) == 1, "algorithms", ",".join(algorithms), "names that are all different")
    each = _settings_of_each(task, algorithms, settings)
    specs = {}
    for name in algorithms:
        try:
            specs[name] = configure(task=task, algorithm=name, data=data, settings=each[name])
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: {error}") from error
    if centralised:
        first = specs[algorithms[0]]
        one = {"wait_for": 1}  # of all, who are one
        specs[CENTRALISED] = first.replace(
            run={"pooled": True},
            clock=_of_a_single_client(first.clock),
            algorithm=one if "wait_for" in first.algorithm.fields else {},
            asynchronous={} if first.asynchronous.wait_for is None else one,
        )
    return specs


def _of_a_single_client(clock: Clock) -> dict[str, Any]:
    """What changes of the clock: the client is no straggler and always there, and its pace is the clients' mean."""
    means = {name: float(np.mean(getattr(clock, name))) for name in ("compute", "network")}
    return {**means, "stragglers": 0, "availability": 1.0}


def _settings_of_each(task: str | None, algorithms: Sequence[str], settings: Sequence[str]) -> dict[str, list[str]]:
    """The settings for each algorithm, in the form of `assign`."""
    known = {name: fields_of(full_name(task or DEFAULT_TASK), name) for name in algorithms}
    every = {field for sections in known.values() for fields in sections.values() for field in fields}
    each: dict[str, list[str]] = {name: [] for name in algorithms}
    for setting in settings:
        path, equals, text = setting.partition("=")
        head, _, rest = path.strip().partition(".")
        if head in ALGORITHMS:
            allowed = f"for one of the algorithms that are compared: {', '.join(algorithms)}"
            require(head in algorithms and bool(rest), "--set", setting, allowed)
            each[head].append(f"algorithm.{rest}{equals}{text}")
            continue
        if head == "algorithm":
            field, mine = rest.partition(".")[0], f"{rest}{equals}{text}"
        else:
            field, mine = head, f"{path.strip()}{equals}{text}"
        holders = [name for name in algorithms if field in known[name]["algorithm"]]
        if head == "algorithm" and not holders:
            raise unknown("field of the algorithms", field, {f for one in known.values() for f in one["algorithm"]})
        if head not in SECTIONS and field not in every:
            raise unknown("field", field, every)
        own = bool(holders) and (head == "algorithm" or head not in SECTIONS)
        for name in holders if own else algorithms:
            each[name].append(f"algorithm.{mine}" if own else setting)
    return each


def _series(folder: Path, specs: Mapping[str, Spec], seeds: Sequence[int] | None) -> dict[Path, Spec]:
    """All runs, those of one seed together: they share a task."""
    if seeds is None:
        return {folder / name: spec for name, spec in specs.items()}
    return {folder / name / f"seed-{seed}": seeded(spec, seed) for seed in seeds for name, spec in specs.items()}


class _Tasks:
    """Makes tasks, and keeps those of the last seed."""

    def __init__(self) -> None:
        self.fields: Mapping[str, Any] = {}
        self.made: dict[bool, Task] = {}

    def __call__(self, spec: Spec) -> Task:
        if spec.task.fields != self.fields:
            self.fields, self.made = spec.task.fields, {}
        if spec.run.pooled not in self.made:
            self.made[spec.run.pooled] = task_of(spec)
        return self.made[spec.run.pooled]


def _silently(spec: Spec, place: Path, task: Task) -> None:
    complete(spec, place, parts=build(spec, task))
