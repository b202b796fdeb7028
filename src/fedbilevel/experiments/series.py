"""Make a series of runs in one folder: one spec with several seeds, or several algorithms on one task.

Finished runs are read, unfinished runs are continued, and all others are started. A series is a dictionary from the
path of each run to its spec. The paths are in the folder of the series, or one level below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.errors import ConfigurationError, errors_in, require, unknown
from fedbilevel.core.tables import Fields
from fedbilevel.core.writing import write_json
from fedbilevel.display.curves import require_matplotlib
from fedbilevel.engines.tracking import MEMORY
from fedbilevel.experiments.compare import (
    ORDER,
    PER_CLIENT,
    Look,
    RunGroup,
    draw,
    is_per_client,
    load_groups,
    recorded_order,
    unmeasured,
)
from fedbilevel.experiments.export import names
from fedbilevel.experiments.folder import Folder, default_path, path_word, require_free
from fedbilevel.experiments.loader import algorithm_class, full_name, label
from fedbilevel.experiments.names import RIVALS, known_rivals, spelled
from fedbilevel.experiments.outer_search import SHARED, box_of
from fedbilevel.experiments.runner import build, complete, task_of, use_cores
from fedbilevel.experiments.spec import DEFAULT_TASK, SECTIONS, Spec, configure, fields_of, unknown_setting
from fedbilevel.tasks import Task


def seeded(spec: Spec, seed: int) -> Spec:
    """Return a spec with another seed for the run, for the clock and, if the task has a seed, for the task."""
    task = {"seed": seed} if "seed" in spec.task.fields else {}
    return spec.replace(run={"seed": seed}, task=task, clock={"seed": seed})


def require_series(folder: Path, series: Mapping[Path, Spec], *, besides: Sequence[str] = ()) -> None:
    """Reject a folder that contains anything but runs of a series and the files named in `besides`."""
    if folder.exists() and not folder.is_dir():
        require_free(folder)
    above = {parent for place in series for parent in place.parents if folder in parent.parents}
    for parent in [folder, *sorted(above)]:
        for path in sorted(parent.iterdir()) if parent.is_dir() else []:
            if path not in series and path not in above and not (parent == folder and path.name in besides):
                raise ConfigurationError(
                    f"{folder} contains {path}, which is not one of these runs: choose another folder"
                )
    for place, spec in series.items():
        found = Folder(place)
        if not found.begun and not found.finished:
            found.require_free()
        elif changed := found.difference(spec):
            raise ConfigurationError(f"cannot continue the runs in {folder}: {found.spec} differs in {changed}")


CENTRALISED = "centralised"
PICTURE = "comparison.png"
WRITTEN_BESIDE = [PICTURE, ORDER, MEMORY, f".{MEMORY}.lock", *(file.name for file in names(Path(PICTURE)))]

Play = Callable[[Spec, Path, Task], Any]
"""A function (spec, folder, task) that brings the run of the spec to its end in the folder."""


def compare_algorithms(
    task: str | None,
    algorithms: Sequence[str],
    *,
    settings: Sequence[str] = (),
    data: str | None = None,
    seeds: Sequence[int] | None = None,
    centralised: bool = False,
    against: Sequence[str] = (),
    search_box: tuple[float, float] | None = None,
    out: str | Path | None = None,
) -> list[RunGroup]:
    """Run several algorithms on the same task and seeds, and draw their curves in one picture.

    Each run has its own folder, OUT/<algorithm> or, with seeds, OUT/<algorithm>/seed-N. Finished runs in these folders
    are read, and unfinished runs are continued.

    Args:
        task: a name that `fedbilevel tasks` lists, or a user's own (module:name, file.py:name); None takes the default.
        algorithms: names of algorithms, each once; also a user's own (module:NAME, file.py:NAME).
        settings: settings for all algorithms, as `configure` takes them. "algorithm.field=…" is for all algorithms that
            have the field, and "fednest.field=…" only for FedNest (a user's own algorithm is named by its class).
            run.exchanges=N, run.bytes=N or run.evaluations=N gives all algorithms the same budget.
        data: the task's data set.
        seeds: the seeds of run and task; None: each algorithm has one run, with the seed of its spec.
        centralised: whether to run the first algorithm also with a single client that has all samples.
        against: searches over x that run with the same budget of exchanges, bytes or evaluations; names in `RIVALS`.
            The budget is for all trials of a search together.
        search_box: the bounds (low, high) between which the searches draw every entry of x; None: the bounds of the
            task's x.
        out: a new folder, or the folder of the same comparison or of a part of it; None: a new folder in ./runs.

    Returns:
        A group of runs for each algorithm; the runs of a group differ in their seeds. `comparison_table` makes a table
        of groups.

    Raises:
        ConfigurationError: the input is wrong; nothing was written.
    """
    specs = comparison_specs(
        task, algorithms, settings=settings, data=data, centralised=centralised, against=against, search_box=search_box
    )
    return play_all(specs, comparison_folder(specs) if out is None else Path(out), seeds)


def comparison_folder(specs: Mapping[str, Spec]) -> Path:
    """Return the path of a new folder in ./runs for a comparison of these specs."""
    first = next(iter(specs.values()))
    return default_path("compare", label(first.task.name), first.data)


def play_all(
    specs: Mapping[str, Spec],
    folder: Path,
    seeds: Sequence[int] | None = None,
    play: Play | None = None,
    panels: Sequence[str] | None = None,
    size: tuple[float, float] | None = None,
    picture: bool = True,
    look: Look | None = None,
) -> list[RunGroup]:
    """Bring all runs of a comparison to their ends, and draw the curves of the finished runs.

    Args:
        specs: the spec of each algorithm, by the name of its folder.
        folder: the folder of the comparison.
        seeds: see `compare_algorithms`.
        play: a function that brings one run to its end; None: this is done without output. If it leaves a run
            unfinished, the run is left out.
        panels, size: see `draw`.
        picture: whether to draw curves.
        look: how the runs are shown.
    """
    if picture:
        require_matplotlib()
    if any(map(is_per_client, panels or ())) and not any(spec.run.metrics_per_client for spec in specs.values()):
        raise unmeasured(PER_CLIENT)
    series = _series(folder, specs, seeds)
    require_series(folder, series, besides=WRITTEN_BESIDE)
    tasks = TaskCache()
    missing = [place for place in series if not Folder(place).finished]
    for place in missing[: len(specs)]:
        build(series[place], tasks(series[place]))  # no run begins unless all specs fit the task
    for place in missing:
        spec, made = series[place], tasks(series[place])
        if play is None:
            complete(spec, place, experiment=build(spec, made), plot=False)
        else:
            play(spec, place, made)
    done = [place for place in series if Folder(place).finished]
    if not done:
        raise ConfigurationError(f"none of the runs in {folder} has finished: there is nothing to compare")
    order = list(dict.fromkeys([*recorded_order(folder), *specs]))
    write_json(folder / ORDER, order)
    done.sort(key=lambda place: order.index(place.relative_to(folder).parts[0]))
    groups = load_groups(done, look)
    if picture:
        draw(groups, folder / PICTURE, panels, size)
    return groups


def comparison_specs(
    task: str | None,
    algorithms: Sequence[str],
    *,
    settings: Sequence[str] = (),
    data: str | None = None,
    centralised: bool = False,
    against: Sequence[str] = (),
    search_box: tuple[float, float] | None = None,
    base: Fields | None = None,
) -> dict[str, Spec]:
    """Return the spec of each algorithm, each search of `against` and the centralised run, by the name of its folder.

    A folder has the name of its algorithm. For the arguments see `compare_algorithms`. `base` has the tables of a spec,
    to which the other arguments are applied.
    """
    require(len(algorithms) > 0, "algorithms", list(algorithms), "one or more names")
    algorithms = [name if name in ALGORITHMS else spelled("algorithm", name) for name in algorithms]
    rivals = [RIVALS[name] for name in known_rivals(against)]
    algorithms = [*algorithms, *rivals]
    for name in algorithms:
        algorithm_class(name)
    keys = [path_word(label(name)) for name in algorithms]
    require(len(set(keys)) == len(keys), "algorithms", ",".join(map(label, algorithms)), "names that are all different")
    each = _settings_of_each(task, algorithms, settings)
    specs = {}
    for key, name in zip(keys, algorithms, strict=True):
        with errors_in(label(name)):
            specs[key] = configure(base, task=task, algorithm=name, data=data, settings=each[name])
    allowed = "given with --against, whose searches draw x between these bounds"
    require(bool(rivals) or search_box is None, "--search-box", search_box, allowed)
    if rivals:
        specs |= bounded({key: specs[key] for key in keys[-len(rivals) :]}, search_box)
    if centralised:
        first = specs[keys[0]]
        single = {"wait_for": 1}
        # the single client is always available, never slower than usual, and as fast as clients on average
        pace = {name: float(np.mean(getattr(first.clock, name))) for name in ("compute", "network")}
        specs[CENTRALISED] = first.replace(
            run={"pooled": True},
            clock={**pace, "stragglers": 0, "availability": 1.0, "arrivals": None},
            algorithm=single if "wait_for" in first.algorithm.fields else {},
            asynchronous={} if first.asynchronous.wait_for is None else single,
            layers={"compression": "none", "rule": "none"},  # there is one reply, and it is not sent
        )
    return specs


def bounded(rivals: Mapping[str, Spec], search_box: tuple[float, float] | None) -> dict[str, Spec]:
    """Return the specs of searches with the bounds of x.

    The bounds are those of `search_box`, else of run.x_bounds, else of the task's set of x if this is a box.

    Raises:
        ConfigurationError: there is no budget that trials can share, or none of these three has bounds.
    """
    first = next(iter(rivals.values()))
    allowed = "given with --against, or --bytes or --evaluations: the budget of each method, and of all trials together"
    require(first.run.budget[0] in SHARED, "--exchanges", first.run.exchanges, allowed)
    box, given = search_box, first.run.x_bounds
    if box is None and given is not None and not isinstance(given, Mapping):
        box = given[0], given[1]
    if box is None:
        task = task_of(first)
        box = box_of(task.problem.project_x, task.x0)
    if box is None:
        why = f"task {label(first.task.name)} does not keep every entry of x between the same two numbers"
        raise ConfigurationError(f"--against draws x from a box, and {why}: give --search-box LOW:HIGH")
    low, high = map(float, box)
    return {key: spec.replace(algorithm={"low": low, "high": high}) for key, spec in rivals.items()}


OF_A_METHOD = "clients", "submodels", "asynchronous", "layers", "privacy"
"""The sections of a spec that can be set for one method of a comparison, as in NAME.clients.local_steps=3."""


def _section_of(field: str, method: str, known: Mapping[str, Sequence[str]]) -> str:
    """Return what comes before a field that is set for one method of a comparison: "algorithm.", "layers." or so.

    Args:
        field: the field, or the name of its section, for which the result is "".
        method: the name of the method.
        known: section -> its fields, for this method.

    Raises:
        ConfigurationError: neither the method nor a section that can be set for one method has this field.
    """
    if field in OF_A_METHOD or field == "algorithm":
        return ""
    if holder := next((section for section in ("algorithm", *OF_A_METHOD) if field in known[section]), None):
        return f"{holder}."
    others = {f"{method}.{section}": known[section] for section in OF_A_METHOD}
    raise unknown_setting(field, {method: known["algorithm"], **others})


def _settings_of_each(task: str | None, algorithms: Sequence[str], settings: Sequence[str]) -> dict[str, list[str]]:
    """Return the settings of each algorithm, in the form that `configure` takes."""
    known = {
        name: fields_of(full_name("task", task or DEFAULT_TASK), full_name("algorithm", name)) for name in algorithms
    }
    every = {field for sections in known.values() for fields in sections.values() for field in fields}
    each: dict[str, list[str]] = {name: [] for name in algorithms}
    named = {name.rpartition(":")[2]: name for name in algorithms}  # a user's own algorithm is named by its class
    for setting in settings:
        path, equals, text = setting.partition("=")
        head, _, rest = path.strip().partition(".")
        head = head if head in named or head in ALGORITHMS else spelled("algorithm", head)
        if head in ALGORITHMS or head in named:
            allowed = f"for one of the algorithms that are compared: {', '.join(algorithms)}"
            require(head in named and bool(rest), "--set", setting, allowed)
            section = _section_of(rest.partition(".")[0], head, known[named[head]])
            each[named[head]].append(f"{section}{rest}{equals}{text}")
            continue
        holders: Sequence[str] = algorithms
        if head == "algorithm" or head not in SECTIONS:
            field = rest.partition(".")[0] if head == "algorithm" else head
            holders = [name for name in algorithms if field in known[name]["algorithm"]]
            if head == "algorithm" and not holders:
                raise unknown("field of the algorithms", field, {f for one in known.values() for f in one["algorithm"]})
            if field not in every:
                methods = {label(name): sections["algorithm"] for name, sections in known.items()}
                others = {section: fields for section, fields in known[algorithms[0]].items() if section != "algorithm"}
                raise unknown_setting(field, {**methods, **others})
        for name in holders or algorithms:
            each[name].append(setting)
    return each


def _series(folder: Path, specs: Mapping[str, Spec], seeds: Sequence[int] | None) -> dict[Path, Spec]:
    """Return the spec of each run, by its folder.

    Runs with the same seed follow each other, since they share a task.
    """
    if seeds is None:
        return {folder / name: spec for name, spec in specs.items()}
    return {folder / name / f"seed-{seed}": seeded(spec, seed) for seed in seeds for name, spec in specs.items()}


class TaskCache:
    """A maker of tasks that keeps the last `keep` tasks, so that consecutive runs with the same seed share a task."""

    def __init__(self, keep: int = 1) -> None:
        self.keep = keep
        self.made: dict[str, dict[bool, Task]] = {}

    def __call__(self, spec: Spec) -> Task:
        use_cores(spec)
        made = self.made.setdefault(repr((spec.task, spec.clients, spec.run.x_bounds)), {})
        if len(self.made) > self.keep:
            del self.made[next(iter(self.made))]
        if spec.run.pooled not in made:
            made[spec.run.pooled] = task_of(spec)
        return made[spec.run.pooled]
