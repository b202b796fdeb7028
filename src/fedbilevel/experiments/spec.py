"""The typed spec: everything that determines a run, read from and written to TOML.

[task] and [algorithm] have a name and the fields of what it names; [asynchronous], [submodels], [run] and [engine] are
below; [clock] has the fields of `fedbilevel.Clock`. A spec is always complete: `resolve` takes the fields that are not
given from the presets, and else from the defaults.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel import __version__
from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.errors import ConfigurationError, require, unknown
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.engines.virtual_time import Clock
from fedbilevel.experiments import toml
from fedbilevel.experiments.fields import (
    Field,
    complete,
    of_class,
    of_function,
    shared_by,
    unknown_field,
    unknown_setting,
)
from fedbilevel.experiments.loader import algorithm_class, code_of, full_name, label, task_maker
from fedbilevel.experiments.presets import METHODS, Preset, preset
from fedbilevel.experiments.presets.table import merged


@dataclass(frozen=True)
class Component:
    """A task or an algorithm: its name, and all its fields as TOML can hold them."""

    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class AsynchronousPlan:
    """Whether to go on with the first replies: these fields of `fedbilevel.Asynchronous`.

    Args:
        wait_for: how many replies an exchange waits for; None waits for all.
        max_staleness, delay_penalty: see `fedbilevel.Asynchronous`.
    """

    wait_for: int | None = None
    max_staleness: int | None = None
    delay_penalty: float = 0.0

    def __post_init__(self) -> None:
        if self.wait_for is None:
            allowed = "left out without asynchronous.wait_for, where everyone is waited for"
            for field in ("max_staleness", "delay_penalty"):
                got = getattr(self, field)
                require(not got, f"asynchronous.{field}", got, allowed)


BUDGETS = ("exchanges", "bytes", "time")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """How long to run and what to write on the way.

    Args:
        rounds: in total; None with a budget.
        exchanges: a budget in place of rounds: the run ends at the first row of its history that has so many.
        bytes: a budget in place of rounds: the bytes of all messages, down and up together, of the whole cohort.
        time: a budget in place of rounds, in seconds of the clock.
        cohort: clients per round; None takes everyone.
        pooled: give every sample to a single client: the same problem without a federation.
        seed: of the cohorts and of all samples drawn (the task has a seed of its own).
        eval_every: rounds between two rows of the history; None, with a budget, makes about fifty rows of it.
        checkpoint_every: rounds between checkpoints; None writes one a second, less often where that takes long; in a
            federation one a round.
        metrics_per_client: measure the task's per-client metrics, too, for each row.
    """

    rounds: int | None = 300
    exchanges: int | None = None
    bytes: float | None = None
    time: float | None = None
    cohort: int | None = None
    pooled: bool = False
    seed: int = 0
    eval_every: int | None = 10
    checkpoint_every: int | None = None
    metrics_per_client: bool = False

    def __post_init__(self) -> None:
        for name in ("rounds", "exchanges", "cohort", "eval_every", "checkpoint_every"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"run.{name}", value, "a positive whole number")
        for name, unit in {"bytes": "bytes", "time": "seconds"}.items():
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, f"run.{name}", value, f"a positive number of {unit}")
        lengths = {name: getattr(self, name) for name in ("rounds", *BUDGETS)}
        given = [f"{name} = {value}" for name, value in lengths.items() if value is not None]
        if len(given) != 1:
            got = " and ".join(given) or "neither"
            raise ConfigurationError(
                f"a run ends after some rounds, exchanges, bytes or seconds of the clock: give one, not {got}"
            )
        alone = self.budget is not None or self.eval_every is not None
        require(
            alone,
            "run.eval_every",
            None,
            "a positive whole number, unless run.exchanges, run.bytes or run.time is given",
        )
        require(not self.pooled or self.cohort in (None, 1), "run.cohort", self.cohort, "none or 1 with run.pooled")

    @property
    def budget(self) -> tuple[str, float] | None:
        """The budget that ends the run: which cost is counted, and how much of it; None where rounds end it."""
        return next(((name, value) for name in BUDGETS if (value := getattr(self, name)) is not None), None)


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The engine of a simulation: these fields of `fedbilevel.Local`."""

    chunk: int | None = None
    devices: int = 1
    stream: bool | None = None


@dataclass(frozen=True)
class Spec:
    """A complete description of a run."""

    task: Component
    algorithm: Component
    asynchronous: AsynchronousPlan
    submodels: UnitPolicy
    run: RunPlan
    engine: EnginePlan
    clock: Clock = field(default_factory=Clock)

    def tables(self) -> dict[str, dict[str, Any]]:
        """The fields of each section, in the form that TOML can hold."""
        return {
            "task": {"name": self.task.name, **self.task.fields},
            "algorithm": {"name": self.algorithm.name, **self.algorithm.fields},
            **{section: dataclasses.asdict(getattr(self, section)) for section in PLANS},
        }

    def to_toml(self) -> str:
        comment = f"A run of fedbilevel {__version__}; repeat it with: fedbilevel run --spec THIS_FILE"
        return toml.dumps(self.tables(), comment)

    def replace(self, **tables: Mapping[str, Any]) -> Spec:
        """A copy with some fields changed, e.g. spec.replace(run={"rounds": 500})."""
        changed = self.tables()
        for section, fields in tables.items():
            changed[_section(section)] |= fields
        changed["run"] |= _implied(tables.get("run", {}))
        return resolve(changed)

    @property
    def title(self) -> str:
        """Task, algorithm and data set in a line."""
        return " · ".join(part for part in (label(self.task.name), label(self.algorithm.name), self.data) if part)

    @property
    def timed(self) -> bool:
        """Whether virtual time is more than a count of exchanges."""
        return dataclasses.replace(self.clock, seed=0) != Clock()

    @property
    def data(self) -> str | None:
        """The data set, for tasks that have one."""
        return self.task.fields.get("data")


PLANS: dict[str, Any] = {
    "asynchronous": AsynchronousPlan,
    "submodels": UnitPolicy,
    "run": RunPlan,
    "engine": EnginePlan,
    "clock": Clock,
}
"""The sections that have no name, in the order of a spec."""
SECTIONS = [section.name for section in dataclasses.fields(Spec)]
DEFAULT_TASK, DEFAULT_ALGORITHM = "hyper_representation", "simfbo"


def resolve(tables: Mapping[str, Any], *, run_code: bool = True) -> Spec:
    """A complete spec from as much of one as is given: {"task": {"name": …, …}, "algorithm": …, …}.

    Args:
        run_code: execute the file, or import the module, that holds a user's own task or algorithm, and check the
            fields against it; False does neither, and leaves these fields as they stand.

    Raises:
        ConfigurationError: a section, a name or a field that does not exist, or a value that does not fit it.
    """
    given: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    given |= {_section(name): _table(name, fields) for name, fields in tables.items()}
    task, task_fields = _named("task", given["task"], DEFAULT_TASK)
    algorithm, algorithm_fields = _named("algorithm", given["algorithm"], METHODS.get(task, DEFAULT_ALGORITHM))
    task, algorithm = full_name(task), full_name(algorithm)
    task_fields, values = _completed(task, task_fields, run_code)
    algorithm_fields = _completed_algorithm(algorithm, algorithm_fields, values, task, run_code)
    presets = {
        "run": {**values.of_run(algorithm), **_implied(given["run"])},
        "asynchronous": values.of_asynchronous(algorithm),
    }
    plans: dict[str, Any] = {
        section: plan(**complete(section, of_class(plan), given[section], presets.get(section, {})))
        for section, plan in PLANS.items()
    }
    _check_time_passes(plans["run"], plans["clock"])
    return Spec(Component(task, task_fields), Component(algorithm, algorithm_fields), **plans)


def fields_of(task: str, algorithm: str) -> dict[str, dict[str, Field]]:
    """The fields of each section, for this task and this algorithm."""
    own = {"task": of_function(task_maker(task)), "algorithm": of_class(algorithm_class(algorithm))}
    return {**own, **{section: of_class(plan) for section, plan in PLANS.items()}}


def _completed(task: str, given: Mapping[str, Any], run_code: bool) -> tuple[dict[str, Any], Preset]:
    """All fields of the task, and its presets."""
    if code_of(task) and not run_code:
        return _as_they_stand(given), preset(task, None)
    known = of_function(task_maker(task))
    data = given.get("data", known["data"].default) if "data" in known else None
    values = preset(task, data if isinstance(data, str) else None)
    return complete("task", known, given, values.of_task(given.get("network"))), values


def _completed_algorithm(
    algorithm: str, given: Mapping[str, Any], values: Preset, task: str, run_code: bool
) -> dict[str, Any]:
    """All fields of the algorithm. The presets of its class for the task come before the task's presets `values`."""
    if code_of(algorithm) and not run_code:
        return _as_they_stand(given)
    cls = algorithm_class(algorithm)
    known = of_class(cls)
    own = _own_presets(cls, label(algorithm)).get(label(task), {})
    for name in own:
        if name not in known:
            raise unknown_field(f"field of {label(algorithm)} in its presets for {label(task)}", name, known)
    return complete("algorithm", known, given, merged(shared_by(known, values.of(algorithm)), own))


def _own_presets(cls: type[Algorithm], name: str) -> Mapping[str, Mapping[str, Any]]:
    """The attribute `presets` of an algorithm's class: fields by the name of a task; nothing where it has none."""
    presets: Any = cls.presets
    fits = isinstance(presets, Mapping) and all(isinstance(fields, Mapping) for fields in presets.values())
    require(fits, f"{name}.presets", presets, "a table of fields for each task, {task: {field: value}}")
    return dict(presets)


def _as_they_stand(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if value == "none" else value for name, value in given.items()}


def read_spec(path: str | Path, *, run_code: bool = True) -> Spec:
    """A spec from a TOML file; what the file leaves out is filled in. For `run_code` see `resolve`."""
    tables = toml.read(Path(path))
    try:
        return resolve(tables, run_code=run_code)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def read_like(path: str | Path, spec: Spec) -> Spec:
    """The spec in a run's folder, to be compared with `spec`: only code that `spec` names is run."""
    found = read_spec(path, run_code=False)
    same = (found.task.name, found.algorithm.name) == (spec.task.name, spec.algorithm.name)
    return read_spec(path) if same else found


def assign(spec: Spec, settings: Sequence[str]) -> Spec:
    """A spec with settings like "algorithm.local_steps=10", "task.clients=50" or "server_lr.x=0.05" made in it.

    Without a section, a field of the algorithm is meant if it has one of that name, else the only one of that name, the
    clock's counting only where there is no other.
    """
    tables = spec.tables()
    known = fields_of(spec.task.name, spec.algorithm.name)
    run_settings: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        require(bool(equals and name.strip()), "--set", setting, "of the form field=value")
        section, field, *inside = _full_path(name.strip().split("."), known, label(spec.algorithm.name))
        value, table = toml.parse_value(text.strip()), tables[section]
        if field in known[section]:
            table[field] = known[section][field].changed(section, table[field], inside, value)
        else:
            require(not inside, "--set", setting, f"a name for {section}.name")
            table[field] = value
        if section == "run":
            run_settings[field] = value
    tables["run"] |= _implied(run_settings)
    return resolve(tables)


def configure(
    base: Mapping[str, Any] | None = None,
    *,
    task: str | None = None,
    algorithm: str | None = None,
    data: str | None = None,
    settings: Sequence[str] = (),
) -> Spec:
    """A spec from the tables of `base`, then the names, then settings as `assign` takes them.

    Names come first, wherever they are given: they decide which presets fill in the rest.
    """
    tables = {name: _table(name, fields) for name, fields in (base or {}).items()}
    names: dict[str, Any] = {"task.name": task, "algorithm.name": algorithm, "task.data": data, "task.network": None}
    others = []
    for setting in settings:
        path, _, text = setting.partition("=")
        path = path.strip()
        path = f"task.{path}" if path in ("data", "network") else path
        if path in names:
            names[path] = toml.parse_value(text.strip())
        else:
            others.append(setting)
    for path, name in names.items():
        section, _, field = path.partition(".")
        if name is not None:
            tables.setdefault(section, {})[field] = name
    return assign(resolve(tables), others)


def full_path(spec: Spec, name: str) -> str:
    """The one path of a field, whichever of its names is given: "algorithm.server_lr.x" of "server_lr.x".

    The name of a part is the part itself.
    """
    path = f"task.{name}" if name in ("data", "network") else name
    known = fields_of(spec.task.name, spec.algorithm.name)
    section, field, *inside = _full_path(path.split("."), known, label(spec.algorithm.name))
    return ".".join((section, field, *inside)).removesuffix(".name" if inside else "")


def _full_path(path: list[str], known: Mapping[str, Mapping[str, Field]], algorithm: str) -> list[str]:
    """The path with its section in front; `algorithm` names the method in messages."""
    if path[0] in known and len(path) > 1:
        section, field = path[:2]
        if field not in known[section] and field != "name":
            raise unknown_field(f"field of {section}", field, known[section])
        return path
    holders = [section for section in known if path[0] in known[section]]
    if len(holders) > 1 and "clock" in holders:
        holders.remove("clock")
    if not holders:
        others = {section: fields for section, fields in known.items() if section != "algorithm"}
        raise unknown_setting(path[0], {algorithm: known["algorithm"], **others})
    if "algorithm" in holders:
        return ["algorithm", *path]
    inside = [
        name for name, field in known["algorithm"].items() if any(path[0] in of_class(c) for c in field.parts.values())
    ]
    if inside or len(holders) > 1:
        holders = [*inside, *holders]
        choices = " or ".join(f"{holder}.{path[0]}" for holder in holders)
        raise ConfigurationError(f"{path[0]!r} is a field of {' and of '.join(holders)}: write {choices}")
    return [holders[0], *path]


def _check_time_passes(plan: RunPlan, clock: Clock) -> None:
    """Refuse a budget of time that would never be spent."""
    if plan.time is not None:
        passes = np.min(clock.network) > 0 or np.min(clock.compute) > 0
        require(passes, "run.time", plan.time, "none where the clock's compute and network are 0: no time passes")


def _section(name: str) -> str:
    if name not in SECTIONS:
        raise unknown("section of a spec", name, SECTIONS)
    return name


def _table(name: str, fields: Any) -> dict[str, Any]:
    if isinstance(fields, str) and name in ("task", "algorithm"):
        return {"name": fields}
    require(isinstance(fields, Mapping), name, fields, f"a table: [{name}]")
    return dict(fields)


def _named(section: str, table: dict[str, Any], default: str) -> tuple[str, dict[str, Any]]:
    name = table.pop("name", default)
    require(isinstance(name, str), f"{section}.name", name, "text")
    return name, table


def _implied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of [run] that change with the given ones: rounds and budgets take each other's place, rows are spread
    over a budget, and a single client is the whole cohort."""

    def given(name: str) -> bool:
        return settings.get(name) not in (None, "none", False)

    changes: dict[str, Any] = {}
    if any(map(given, BUDGETS)):
        changes |= {"rounds": None, "eval_every": None, **dict.fromkeys(BUDGETS)}
    elif given("rounds"):
        changes |= dict.fromkeys(BUDGETS)
    if given("pooled"):
        changes["cohort"] = None
    return {name: value for name, value in changes.items() if name not in settings}


def has_preset(spec: Spec) -> bool:
    """Whether the task has presets for this very method, or its class has some for the task."""
    name, task = spec.algorithm.name, spec.task.name
    return name in preset(task, spec.data).algorithms or label(task) in algorithm_class(name).presets


def replaced(spec: Spec) -> dict[str, Any]:
    """The fields of a method of one's own that hold what the task has for all methods, and not their default."""
    name, task = spec.algorithm.name, spec.task.name
    if not code_of(name):
        return {}
    cls = algorithm_class(name)
    fields, own = of_class(cls), cls.presets.get(label(task), {})
    shared = {
        field: value for field, value in shared_by(fields, preset(task, spec.data).of(name)).items() if field not in own
    }
    given = {field: fields[field] for field in shared}
    of_task, of_class_ = complete("algorithm", given, {}, shared), complete("algorithm", given, {}, {})
    now = spec.algorithm.fields
    return {field: value for field, value in of_task.items() if now[field] == value != of_class_[field]}


def said_of_one(spec: Spec) -> str:
    """A sentence on the defaults of a method of one's own that the task replaces; empty where it replaces none."""
    changed = ", ".join(f"{field} = {toml.value(value)}" for field, value in sorted(replaced(spec).items()))
    method, task = label(spec.algorithm.name), label(spec.task.name)
    return f"{task} sets for every method, in place of the defaults of {method}: {changed}" if changed else ""


def said_of_several(specs: Sequence[Spec]) -> list[str]:
    """Sentences on the rows of a comparison: which have presets for their task, and which run at their defaults."""
    task = label(specs[0].task.name)
    tuned = list(dict.fromkeys(label(spec.algorithm.name) for spec in specs if has_preset(spec)))
    plain = list(dict.fromkeys(label(spec.algorithm.name) for spec in specs if not has_preset(spec)))
    found = [
        *([f"presets for {task}: {', '.join(tuned)}"] if tuned else []),
        *([f"at the defaults of their classes: {', '.join(plain)}"] if plain else []),
    ]
    return ["; ".join(found), *dict.fromkeys(filter(None, map(said_of_one, specs)))]
