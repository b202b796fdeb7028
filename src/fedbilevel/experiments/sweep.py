"""A sweep over the fields of a spec: every point is a spec, and every trial a run with a folder of its own.

What a sweep is made of, and how the best is chosen, is in the room sweeps; here points become specs and trials runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from fedbilevel import __version__
from fedbilevel.core.errors import ConfigurationError, FedbilevelError, NumericalError, require
from fedbilevel.core.metrics import directions, text
from fedbilevel.data import DataError
from fedbilevel.engines.checkpoint import write_json, write_text
from fedbilevel.engines.history import History
from fedbilevel.engines.progress import Display
from fedbilevel.engines.result import Budget, Callback, in_words, rounds_done, stop_after
from fedbilevel.experiments import plots, runner, toml
from fedbilevel.experiments.export import csv_text, finite
from fedbilevel.experiments.folder import Folder, as_damage
from fedbilevel.experiments.layout import fitted
from fedbilevel.experiments.loader import full_name, label, own_file
from fedbilevel.experiments.runner import algorithm_of, build
from fedbilevel.experiments.series import TaskCache, seeded
from fedbilevel.experiments.spec import Spec, configure, full_path
from fedbilevel.sweeps.journal import DEFINITION, definition_in, opened, play
from fedbilevel.sweeps.outcome import Sweep
from fedbilevel.sweeps.plan import (
    COSTS,
    Job,
    LastRow,
    Plan,
    Standing,
    TrialOutcome,
    made,
    measured_on_test,
    product,
    require_apart,
    require_holdout,
    require_known,
    require_seeds,
)
from fedbilevel.sweeps.sweep import LOSSES, place_of
from fedbilevel.tasks import Task

SHARE = "0.2"  # of the training data, as a message suggests to hold out
HASHES = ("points", "code")  # in a definition on disk, beside its fields
Watching = tuple[Sequence[Callback], bool | Display]
"""What is called back, and what shows progress."""
Show = Callable[[Spec, Path, Task], AbstractContextManager[Watching]]
"""(spec, folder, task): what shows a run while it is played."""
Said = Callable[[str], None]


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


KINDS: dict[str, Callable[[Any], bool]] = {  # of what a definition on disk says
    **dict.fromkeys(("task", "algorithm", "data", "select"), lambda value: isinstance(value, str | None)),
    "spec": lambda value: isinstance(value, dict | None),
    "settings": _are_texts,
    "grid": lambda value: isinstance(value, dict) and all(map(_are_texts, value.values())),
    "search": lambda value: isinstance(value, dict) and _are_texts(list(value.values())),
    "seeds": lambda value: isinstance(value, list | None),
    "select_on_test": lambda value: isinstance(value, bool),
    "halving": lambda value: isinstance(value, int | None),
}


@dataclass(frozen=True, kw_only=True)
class Definition:
    """What a sweep is, as its command says it.

    Args:
        spec: the tables of a spec file, which the other arguments change.
        task, algorithm, data, settings: as `configure` takes them.
        grid: the values of each field, as the texts that `--set` takes.
        search: the range of each field, as a text "0.001:1:log", or "1:8", of whole numbers; or the values to choose
            from, with commas between.
        seeds: of every point; None takes the spec's own.
        select: the metric that decides; None takes the task's first.
        select_on_test: it may be measured on test data.
        halving: see `Plan`.
    """

    spec: Mapping[str, Any] | None = None
    task: str | None = None
    algorithm: str | None = None
    data: str | None = None
    settings: Sequence[str] = ()
    grid: Mapping[str, Sequence[str]] = field(default_factory=dict)
    search: Mapping[str, str] = field(default_factory=dict)
    seeds: Sequence[int] | None = None
    select: str | None = None
    select_on_test: bool = False
    halving: int | None = None

    def __post_init__(self) -> None:
        if self.seeds is not None:
            require_seeds(self.seeds)
        for name in [*self.grid, *self.search]:
            if name.rpartition(".")[2] == "seed":
                raise ConfigurationError(
                    f"{name} cannot be swept: no seed is better than another; --seeds gives several"
                )

    @classmethod
    def of(cls, **given: Any) -> Definition:
        """A definition in which files are named by their absolute paths, so that it can be read anywhere."""
        names = {name: full_name(given[name]) for name in ("task", "algorithm") if given.get(name)}
        return cls(**{**given, **names})

    @classmethod
    def read(cls, folder: Path) -> Definition:
        """The definition of the sweep in a folder.

        Raises:
            ConfigurationError: there is no sweep, or its definition is damaged.
        """
        require((folder / DEFINITION).is_file(), "--resume", str(folder), "given for the folder of a sweep")
        found = definition_in(folder)
        for name in HASHES:
            found.pop(name, None)
        with as_damage(folder / DEFINITION):
            for name, value in found.items():
                if name not in KINDS or not KINDS[name](value):
                    raise ValueError(f"{name} is {value!r}")
            return cls(**found)

    @property
    def named(self) -> dict[str, Any]:
        """The task and the algorithm, by their names or tables, as far as the definition says them."""
        spec = self.spec or {}
        return {"task": self.task or spec.get("task"), "algorithm": self.algorithm or spec.get("algorithm")}

    def spec_of(self, values: Mapping[str, str]) -> Spec:
        """The spec of a point, given by texts for its fields; its algorithm is known to be allowed."""
        settings = [*self.settings, *(f"{name}={text}" for name, text in values.items())]
        spec = configure(self.spec, task=self.task, algorithm=self.algorithm, data=self.data, settings=settings)
        paths = {name: full_path(spec, name) for name in values}
        require_apart(paths)
        for option, path in self._set_by_hand(spec).items():
            self._require_kept(option, path, paths)
        algorithm_of(spec)
        return spec

    def _set_by_hand(self, spec: Spec) -> dict[str, str]:
        """The full paths of what is given for every point, by how it was given."""
        names = {"task": (self.task, "task.name"), "algorithm": (self.algorithm, "algorithm.name")}
        names["data"] = self.data, "task.data"
        found = {f"{name}={value}": path for name, (value, path) in names.items() if value is not None}
        return found | {text: full_path(spec, text.partition("=")[0].strip()) for text in self.settings}

    def _require_kept(self, setting: str, path: str, swept: Mapping[str, str]) -> None:
        """Refuse swept fields, with their full paths, whose values take the place of a setting at `path`."""
        for name, over in swept.items():
            option = f"{'--grid' if name in self.grid else '--search'} {name}"
            if path == over:
                raise ConfigurationError(
                    f"{setting} is set for all points, and {option} would replace it: leave one of them out"
                )
            if path.startswith(f"{over}."):
                field, _, text = setting.partition("=")
                raise ConfigurationError(
                    f"{setting} is set for all points, and {option} would replace it, which sets all of {over}: leave "
                    f"one of them out, or give --grid {field.strip()}={text.strip()} after {option}"
                )

    def points(self) -> list[dict[str, Any]]:
        """Every combination of the values of the grid."""
        return product({name: [toml.parse_value(text) for text in texts] for name, texts in self.grid.items()})

    def specs(self) -> list[Spec | FedbilevelError]:
        """The spec of every point, or the error with which it is refused."""
        self.points()  # no value twice
        return made(self.texts(), self.spec_of)

    def texts(self) -> list[dict[str, str]]:
        """The points as texts for `--set`."""
        return product(self.grid)

    def recorded(self, points: Sequence[Spec | FedbilevelError] = ()) -> dict[str, Any]:
        """The definition as JSON can hold it, with hashes of the points' specs and of the files of a user's own task
        and algorithms; not of what these import."""
        tables = [str(one) if isinstance(one, FedbilevelError) else one.tables() for one in points]
        content = json.dumps(tables, sort_keys=True, default=str)
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        named = [name for one in points if isinstance(one, Spec) for name in (one.task.name, one.algorithm.name)]
        files = sorted({file for name in named if (file := own_file(name))})
        code = {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
        return {**found, "points": hashlib.sha256(content.encode()).hexdigest(), **({"code": code} if code else {})}


def parse_field(option: str, text: str) -> tuple[str, str]:
    """The field and the rest of a text FIELD=REST, as `--grid` takes it."""
    name, equals, rest = text.partition("=")
    require(bool(equals and name.strip() and rest.strip()), option, text, "of the form FIELD=VALUE,VALUE,…")
    return name.strip(), rest.strip()


def parse_values(text: str) -> list[str]:
    """The texts between commas, but for commas within lists, tables and quotes, each of which is a value in TOML.

    Raises:
        ConfigurationError: one of them is none.
    """
    found: list[str] = []
    rest = ""
    for part in text.split(","):
        rest = f"{rest},{part}" if rest else part.strip()
        try:
            toml.parse_value(rest.strip())
        except ConfigurationError:
            if rest[:1] not in ("[", "{", '"', "'"):
                raise
            continue
        found.append(rest.strip())
        rest = ""
    if rest:
        toml.parse_value(rest.strip())
    return found


@dataclass
class Swept:
    """A sweep over specs that is about to be played, or has been.

    Attributes:
        specs: of the points, or the errors with which they are refused.
        select: the metric that decides.
        seeds: of every point.
    """

    definition: Definition
    specs: Sequence[Spec | FedbilevelError] | Mapping[int, Spec | FedbilevelError]
    folder: Path
    show: Show
    tasks: TaskCache
    select: str
    seeds: Sequence[int]
    first: Spec

    @classmethod
    def of(
        cls,
        definition: Definition,
        specs: Sequence[Spec | FedbilevelError],
        folder: Path,
        show: Show | None = None,
        tasks: TaskCache | None = None,
        checked: bool = False,
    ) -> Swept:
        """A sweep whose metric and seeds are known: the first point's task is made for it, unless the definition says
        the metric and this is `checked`."""
        spec = next(one for one in specs if isinstance(one, Spec))
        seeds = [spec.run.seed] if definition.seeds is None else definition.seeds
        first = spec if definition.seeds is None else seeded(spec, seeds[0])
        select = definition.select or ""
        swept = cls(definition, specs, folder, show or silently, tasks or TaskCache(), select, seeds, first)
        return swept if checked and select else dataclasses.replace(swept, select=swept.metric())

    def metric(self) -> str:
        """The metric that decides; see `chosen_metric`."""
        return chosen_metric(self.definition, self.first, self.tasks(self.first))

    def larger_is_better(self) -> bool:
        """Whether a larger value of that metric is better."""
        return History(directions=_directions(self.tasks(self.first))).larger_is_better(self.select)

    def plan(self, points: Sequence[Mapping[str, Any]]) -> Plan:
        """What is tried, with these values of the points."""
        given = self.definition
        return Plan(
            points=points,
            seeds=self.seeds,
            select=self.select,
            on_test=given.select_on_test,
            halving=given.halving,
        )

    def spec(self, job: Job) -> Spec:
        """The spec of a trial.

        Raises:
            FedbilevelError: the point is refused.
        """
        spec = self.specs[job.point]
        if isinstance(spec, FedbilevelError):
            raise spec
        return spec if self.definition.seeds is None else seeded(spec, job.seed)

    def trial(self, job: Job, share: float, *, last: bool) -> TrialOutcome:
        """Bring a trial to the rung with that share of the budget, the last of all or not."""
        place = Folder(self.folder / place_of(job))
        seen = LastRow(place.checkpoint)
        try:
            spec = self.spec(job)
            task = self.tasks(spec)
            history = self._history(spec, task, place, share, last, seen)
        except (ConfigurationError, NumericalError, DataError) as error:
            return TrialOutcome.failed(error, seen.row)
        return TrialOutcome.of(history, self.select)

    def _history(self, spec: Spec, task: Task, place: Folder, share: float, last: bool, seen: LastRow) -> History:
        """What the trial has measured at that rung, as far as it is of interest: the last row."""
        name, whole = budget_of(spec)
        rung = name, share * whole
        reached = place.begun and rounds_done(place.checkpoint, rung) is not None
        if reached and (not last or place.finished):
            return History([seen.row], _directions(task))
        experiment = build(spec, task)
        with self.show(spec, place.path, task) as (callbacks, progress):
            callbacks = [seen, *callbacks, *([] if last else [stop_after(rung)])]
            shown: dict[str, Any] = {"callbacks": callbacks, "progress": progress, "plot": False}
            if place.begun:
                return runner.resume(place.path, experiment=experiment, **shown).history
            return runner.run(spec, place.path, experiment=experiment, **shown).history


def sweep_specs(
    definition: Definition,
    specs: Sequence[Spec | FedbilevelError],
    folder: str | Path,
    *,
    resume: bool = False,
    show: Show | None = None,
    said: Said | None = None,
    tasks: TaskCache | None = None,
) -> Sweep:
    """Play a sweep over a grid of a spec's fields, each trial in a folder of its own.

    Args:
        specs: those of the definition.
        folder: new or empty; with `resume` that of the same sweep, whose finished trials are not played again.
        show: see `Show`.
        said: called with a line about each trial that has ended.
        tasks: where other sweeps and runs of the same tasks take them from.

    Raises:
        ConfigurationError: wrong input, or the folder holds something else; nothing was run.
        CheckpointError: something could not be written, or another process is at it.
    """
    points, folder = definition.points(), Path(folder)
    begun = resume and (folder / DEFINITION).is_file()  # what has been played is read without samples
    swept = Swept.of(definition, specs, folder, show, tasks, checked=begun)
    plan = swept.plan(points)
    require_rungs(plan, specs)
    checked = not begun

    def run(jobs: Sequence[Job]) -> Iterable[tuple[Job, TrialOutcome]]:
        nonlocal checked
        if jobs and not checked:
            swept.metric()  # is still there
            checked = True
        for job in jobs:
            outcome = swept.trial(job, plan.rungs[job.rung], last=job.rung == len(plan.rungs) - 1)
            if said is not None:
                said(in_a_line(job, outcome, swept.select))
            yield job, outcome

    with opened(folder, definition.recorded(specs), resume=resume) as journal:
        return dataclasses.replace(play(plan, run, journal), made=specs)


def budget_of(spec: Spec) -> Budget:
    return spec.run.budget or ("rounds", float(spec.run.rounds or 0))


def require_rungs(plan: Plan, specs: Sequence[Spec | FedbilevelError]) -> None:
    """Refuse to halve where points have different budgets, or no row where the first rung ends."""
    if plan.halving is None:
        return
    runs = [one.run for one in specs if isinstance(one, Spec)]
    budgets = dict.fromkeys(budget_of(one) for one in specs if isinstance(one, Spec))
    if len(budgets) > 1:
        raise ConfigurationError(
            f"--halving needs one budget for all points, not {' and '.join(map(in_words, budgets))}"
        )
    (name, whole), first = next(iter(budgets)), plan.rungs[0]
    largest = max(run.eval_every or 0 for run in runs)
    if name == "rounds" and largest > first * whole:
        most = max(1, int(first * whole))
        raise ConfigurationError(
            f"--halving: the first rung has {in_words((name, first * whole))}, and run.eval_every = {largest} gives it "
            f"no row to compare points by; --set run.eval_every={most} does"
        )


def chosen_metric(definition: Definition, spec: Spec, task: Task) -> str:
    """The metric that decides.

    Raises:
        ConfigurationError: it is not measured, or measured on test data.
    """
    own = task.metrics_per_client if spec.run.metrics_per_client else {}
    known = [*task.metrics, *(f"{name}.{end}" for name in own for end in ("mean", "worst", "best", "p10")), *LOSSES]
    select = definition.select or next(iter(task.metrics))
    name, holdout = label(spec.task.name), spec.task.fields.get("holdout")
    on_holdout = next((one.replace("test", "validation") for one in known if measured_on_test(one)), "")
    if holdout == 0 and on_holdout:
        advice = f"--set task.holdout={SHARE} holds training data out and measures {on_holdout} in its place"
    else:
        others = " or ".join(one for one in known if not measured_on_test(one))
        advice = f"Task {name} holds no data out; it can be chosen by {others}"
    if select not in known and "validation" in select and on_holdout:
        raise ConfigurationError(f"task {name} does not measure {select}: {advice}")
    require_known(select, known)
    require_holdout(select, definition.select_on_test, f"{advice}; --select-on-test chooses by test data all the same")
    return select


def _directions(task: Task) -> dict[str, bool]:
    return directions({**task.metrics_per_client, **task.metrics})


def silently(spec: Spec, folder: Path, task: Task) -> AbstractContextManager[Watching]:
    return nullcontext(((), False))


def in_a_line(job: Job, outcome: TrialOutcome, select: str) -> str:
    rounds = f"{outcome.row.get('round', 0):,.0f} rounds"
    found = f"failed: {outcome.error}" if outcome.error else f"{select} {text(select, outcome.row[select])}"
    return f"{place_of(job)}  {found}  ({rounds})"


SCHEMA = 1  # of the JSON file; docs/how-to/sweep.md says what is in it
CHOSEN, CSV, JSON, PICTURE = "chosen.toml", "sweep.csv", "sweep.json", "sweep.png"
DROPPED_FIRST = ("MB", "exchanges", "rounds")


def write_files(sweep: Sweep, folder: Path, *, picture: bool = True) -> dict[str, Path]:
    """Write all files, each whole or not at all, the picture if it is asked for; their paths. Where every point failed
    there is no chosen spec.

    Numbers that depend on this machine's speed are left out: a sweep that was interrupted leaves the same files.
    """
    write_text(folder / CSV, csv_text([_run(sweep, job) for job in sweep.last_jobs]))
    write_json(folder / JSON, as_json(sweep))
    written = {"table": folder / CSV, "also": folder / JSON}
    if picture:
        plots.save(sweep.plot(), folder / PICTURE)
        written["plot"] = folder / PICTURE
    if sweep.winner is None:
        (folder / CHOSEN).unlink(missing_ok=True)
        return written
    write_text(folder / CHOSEN, chosen_toml(sweep, folder / CHOSEN))
    return {**written, "chosen": folder / CHOSEN}


def sweep_table(sweep: Sweep, width: int | None = None) -> Table:
    """One row for each point, best first; costs are means over the seeds."""
    found, select = sweep.standings, sweep.plan.select
    columns = {"rank": [str(rank) if one.mean is not None else "–" for rank, one in enumerate(found, 1)]}
    columns |= {name: [_value(one, name) for one in found] for name in sweep.plan.fields}
    columns[select] = [_mean(select, one) for one in found]
    columns |= {
        "rounds": [f"{one.cost('rounds'):,.0f}" for one in found],
        "exchanges": [f"{one.cost('exchanges'):,.0f}" for one in found],
        "MB": [f"{one.cost('bytes') / 1e6:,.1f}" for one in found],
    }
    texts = [name for name in sweep.plan.fields if any(isinstance(one.values.get(name), str) for one in found)]
    if any(one.error for one in found):
        columns["failed"] = [one.error for one in found]
    title = f"{title_of(sweep)}: {sweep.chosen_on}"
    return fitted(title, columns, width, texts=[*texts, "failed"], droppable=DROPPED_FIRST, notes=[f"{sweep.effort}."])


def title_of(sweep: Sweep) -> str:
    """The task, algorithm and data of the sweep, where its points have them in common."""
    specs = [spec for spec in sweep.made if isinstance(spec, Spec)]
    parts = [{label(spec.task.name) for spec in specs}, {label(spec.algorithm.name) for spec in specs}]
    parts.append({spec.data or "" for spec in specs})
    return " · ".join(name for names in parts for name in names if len(names) == 1 and name)


def _value(one: Standing, name: str) -> str:
    return toml.value(one.values[name]).strip('"') if name in one.values else "–"


def _mean(select: str, one: Standing) -> str:
    if one.mean is None:
        return "–"
    spread = "" if one.sd is None else f" ± {text(select, one.sd)}"
    return (text(select, one.mean).removesuffix(" %") if spread else text(select, one.mean)) + spread


def chosen_toml(sweep: Sweep, path: Path) -> str:
    """The spec of the best point, with the number of trials it was chosen among."""
    winner, seeds = sweep.winner, sweep.plan.seeds
    assert winner is not None
    several = f" --seeds {','.join(map(str, seeds))}" if len(seeds) > 1 else ""
    spec: Spec = sweep.made[winner.number]
    spread = "" if winner.sd is None else f" ± {winner.sd!r} (sample standard deviation over {len(seeds)} seeds)"
    lines = [
        f"The best of a sweep of fedbilevel {__version__}: {winner.in_words}.",
        f"Chosen by {sweep.chosen_on}: {winner.mean!r}{spread}.",
        f"{sweep.effort}.",
        f"Run it with: fedbilevel run --spec {path.name}{several}",
    ]
    return toml.dumps(spec.tables(), "\n".join(lines))


def as_json(sweep: Sweep) -> dict[str, Any]:
    """The sweep as plain objects, whose numbers are finite; null stands for what is not known."""
    winner = sweep.winner
    return {
        "schema": SCHEMA,
        "fields": sweep.plan.fields,
        "select": sweep.plan.select,
        "larger_is_better": sweep.larger_is_better,
        "selected_on_test": measured_on_test(sweep.plan.select),
        "seeds": list(sweep.plan.seeds),
        "halving": sweep.plan.halving,
        "trials": sweep.trials,
        "failed": sweep.failed,
        "effort": sweep.effort,
        "spent": {name: sweep.spent(name) for name in COSTS},
        "chosen": None if winner is None else {"point": winner.number, "values": dict(winner.values), "spec": CHOSEN},
        "points": [_point(sweep, one) for one in sweep.standings],
    }


def _point(sweep: Sweep, one: Standing) -> dict[str, Any]:
    runs = [Job(one.number, seed, one.rung) for seed in sweep.plan.seeds]
    return {
        "point": one.number,
        "values": dict(one.values),
        "mean": one.mean,
        "sd": one.sd,
        "rung": one.rung,
        "error": one.error,
        "runs": [
            {
                "seed": job.seed,
                "error": sweep.outcomes[job].error,
                "folder": str(place_of(job)),
                "last_row": {name: finite(value) for name, value in sweep.outcomes[job].row.items()},
            }
            for job in runs
        ],
    }


def _run(sweep: Sweep, job: Job) -> dict[str, Any]:
    outcome = sweep.outcomes[job]
    values = {name: value if isinstance(value, int | float | str) else toml.value(value)
              for name, value in sweep.plan.points[job.point].items()}  # fmt: skip
    row = {"point": job.point, **values, "seed": job.seed, "rung": job.rung, "error": outcome.error}
    return row | dict(outcome.row) | {"folder": str(place_of(job))}
