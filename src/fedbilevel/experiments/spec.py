"""The typed spec: everything that determines a run, read from and written to TOML.

[task] and [algorithm] have a name and the fields of what it names; [asynchronous], [submodels], [run] and [engine] are
below; [clock] has the fields of `fedbilevel.Clock`. A spec is always complete: `resolve` fills in what it is not told,
from the presets and then from the defaults.
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
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.errors import ConfigurationError, require, unknown
from fedbilevel.core.submodel import Pruned
from fedbilevel.core.unit_policy import Policy
from fedbilevel.engines.virtual_time.clock import Clock
from fedbilevel.experiments import schema, toml
from fedbilevel.experiments.own_task import code_of, full_name, label, task_maker
from fedbilevel.experiments.presets import METHODS, Preset, preset


@dataclass(frozen=True)
class Named:
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
            for field in ("max_staleness", "delay_penalty"):
                got, allowed = (
                    getattr(self, field),
                    "left out without asynchronous.wait_for, where everyone is waited for",
                )
                require(not got, f"asynchronous.{field}", got, allowed)


@dataclass(frozen=True, kw_only=True)
class SubmodelsPlan:
    """How clients of limited capacity get their units: the fields of `fedbilevel.Submodels`."""

    policy: Policy = "importance"
    pruned: Pruned = "both"
    fixed: bool = False
    min_coverage: int | None = None


BUDGETS = ("exchanges", "time")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """How long to run and what to write on the way.

    Args:
        rounds: in total; None with a budget.
        exchanges: a budget in place of rounds: the run ends at the first row of its history that has so many.
        time: a budget likewise, in seconds of the clock.
        cohort: clients per round; None takes everyone.
        pooled: give every sample to a single client: the same problem without a federation.
        seed: of the cohorts and of all samples drawn (the task has a seed of its own).
        eval_every: rounds between two rows of the history; None, with a budget, makes about fifty rows of it.
        checkpoint_every: rounds between checkpoints; None writes one with each row.
        metrics_per_client: measure the task's per-client metrics, too, for each row.
    """

    rounds: int | None = 300
    exchanges: int | None = None
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
        fits = self.time is None or 0 < self.time < math.inf
        require(fits, "run.time", self.time, "a positive number of seconds")
        lengths = {name: getattr(self, name) for name in ("rounds", *BUDGETS)}
        given = [f"{name} = {value}" for name, value in lengths.items() if value is not None]
        if len(given) != 1:
            got = " and ".join(given) or "neither"
            raise ConfigurationError(
                f"a run ends after some rounds, exchanges or seconds of the clock: give one, not {got}"
            )
        alone = self.budget is not None or self.eval_every is not None
        require(alone, "run.eval_every", None, "a positive whole number, unless run.exchanges or run.time is given")
        require(not self.pooled or self.cohort in (None, 1), "run.cohort", self.cohort, "none or 1 with run.pooled")

    @property
    def budget(self) -> tuple[str, float] | None:
        """What ends the run in place of rounds: a column of the history, and how much of it; None with rounds."""
        return next(((name, value) for name in BUDGETS if (value := getattr(self, name)) is not None), None)


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """Where clients run: these fields of `fedbilevel.Local`."""

    chunk: int | None = None
    devices: int = 1
    stream: bool | None = None


@dataclass(frozen=True)
class Spec:
    """A complete description of a run."""

    task: Named
    algorithm: Named
    asynchronous: AsynchronousPlan
    submodels: SubmodelsPlan
    run: RunPlan
    engine: EnginePlan
    clock: Clock = field(default_factory=Clock)

    def tables(self) -> dict[str, dict[str, Any]]:
        """As TOML has it, section by section."""
        return {
            "task": {"name": self.task.name, **self.task.fields},
            "algorithm": {"name": self.algorithm.name, **self.algorithm.fields},
            "asynchronous": dataclasses.asdict(self.asynchronous),
            "submodels": dataclasses.asdict(self.submodels),
            "run": dataclasses.asdict(self.run),
            "engine": dataclasses.asdict(self.engine),
            "clock": dataclasses.asdict(self.clock),
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
        return " · ".join(part for part in (label(self.task.name), self.algorithm.name, self.data) if part)

    @property
    def timed(self) -> bool:
        """Whether virtual time is more than a count of exchanges."""
        return dataclasses.replace(self.clock, seed=0) != Clock()

    @property
    def data(self) -> str | None:
        """The data set, for tasks that have one."""
        return self.task.fields.get("data")


SECTIONS = [section.name for section in dataclasses.fields(Spec)]
DEFAULT_TASK, DEFAULT_ALGORITHM = "hyper_representation", "simfbo"


def resolve(tables: Mapping[str, Any], *, run_code: bool = True) -> Spec:
    """A complete spec from as much of one as is given: {"task": {"name": …, …}, "algorithm": …, …}.

    Args:
        run_code: execute the file, or import the module, that holds a user's own task, and check the task's fields
            against it; False does neither, and leaves these fields as they stand.

    Raises:
        ConfigurationError: a section, a name or a field that does not exist, or a value that does not fit it.
    """
    given: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    given |= {_section(name): _table(name, fields) for name, fields in tables.items()}
    task, task_fields = _named("task", given["task"], DEFAULT_TASK)
    algorithm, algorithm_fields = _named("algorithm", given["algorithm"], METHODS.get(task, DEFAULT_ALGORITHM))
    task = full_name(task)
    known = _fields_besides_task(algorithm)
    task_fields, values = _completed(task, task_fields, run_code)
    plan = schema.complete("run", known["run"], given["run"], {**values.of_run(algorithm), **_implied(given["run"])})
    waiting = schema.complete(
        "asynchronous", known["asynchronous"], given["asynchronous"], values.of_asynchronous(algorithm)
    )
    units = schema.complete("submodels", known["submodels"], given["submodels"], {})
    engine = schema.complete("engine", known["engine"], given["engine"], {})
    clock = Clock(**schema.complete("clock", known["clock"], given["clock"], {}))
    _check_time_passes(plan, clock)
    return Spec(
        Named(task, task_fields),
        Named(algorithm, schema.complete("algorithm", known["algorithm"], algorithm_fields, values.of(algorithm))),
        AsynchronousPlan(**waiting),
        SubmodelsPlan(**units),
        RunPlan(**plan),
        EnginePlan(**engine),
        clock,
    )


def fields_of(task: str, algorithm: str) -> dict[str, dict[str, schema.Field]]:
    """The fields of each section, for this task and this algorithm."""
    return {"task": schema.of_function(task_maker(task)), **_fields_besides_task(algorithm)}


def _fields_besides_task(algorithm: str) -> dict[str, dict[str, schema.Field]]:
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, ALGORITHMS)
    return {
        "algorithm": schema.of_algorithm(ALGORITHMS[algorithm]),
        "asynchronous": schema.of_algorithm(AsynchronousPlan),
        "submodels": schema.of_algorithm(SubmodelsPlan),
        "run": schema.of_algorithm(RunPlan),
        "engine": schema.of_algorithm(EnginePlan),
        "clock": schema.of_algorithm(Clock),
    }


def _completed(task: str, given: Mapping[str, Any], run_code: bool) -> tuple[dict[str, Any], Preset]:
    """All fields of the task, and its presets."""
    if code_of(task) and not run_code:
        return {name: None if value == "none" else value for name, value in given.items()}, preset(task, None)
    known = schema.of_function(task_maker(task))
    data = given.get("data", known["data"].default) if "data" in known else None
    values = preset(task, data if isinstance(data, str) else None)
    return schema.complete("task", known, given, values.of_task(given.get("network"))), values


def read_spec(path: str | Path, *, run_code: bool = True) -> Spec:
    """A spec from a TOML file; what the file leaves out is filled in. For `run_code` see `resolve`."""
    tables = toml.read(Path(path))
    try:
        return resolve(tables, run_code=run_code)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def read_like(path: str | Path, spec: Spec) -> Spec:
    """The spec in a run's folder, to be compared with `spec`: no other code than that of its task is run."""
    found = read_spec(path, run_code=False)
    return read_spec(path) if found.task.name == spec.task.name else found


def assign(spec: Spec, settings: Sequence[str]) -> Spec:
    """A spec with settings like "algorithm.local_steps=10", "task.clients=50" or "server_lr.x=0.05" made in it.

    Without a section, a field of the algorithm is meant if it has one of that name, else the only one of that name, the
    clock's counting only where there is no other.
    """
    tables = spec.tables()
    known = fields_of(spec.task.name, spec.algorithm.name)
    said: dict[str, Any] = {}  # of [run]
    for setting in settings:
        name, equals, text = setting.partition("=")
        require(bool(equals and name.strip()), "--set", setting, "of the form field=value")
        path = _full_path(name.strip().split("."), known)
        *parents, last = path
        table: Any = tables
        for depth, parent in enumerate(parents):
            table = table[parent] if depth < 2 else table.get(parent)
            if not isinstance(table, dict):
                raise ConfigurationError(
                    f"{'.'.join(path[: depth + 1])} has no parts, so {name.strip()} is not a field"
                )
        table[last] = toml.parse_value(text.strip())
        if parents == ["run"]:
            said[last] = table[last]
    tables["run"] |= _implied(said)
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


def _full_path(path: list[str], known: Mapping[str, Mapping[str, schema.Field]]) -> list[str]:
    """The path with its section in front."""
    if path[0] in known and len(path) > 1:
        section, field = path[:2]
        if field not in known[section] and field != "name":
            raise schema.unknown_field(f"field of {section}", field, known[section])
        return path
    holders = [section for section in known if path[0] in known[section]]
    if len(holders) > 1 and "clock" in holders:
        holders.remove("clock")
    if not holders:
        raise schema.unknown_field("field", path[0], {name for fields in known.values() for name in fields})
    if "algorithm" in holders:
        return ["algorithm", *path]
    if len(holders) > 1:
        choices = " or ".join(f"{section}.{path[0]}" for section in holders)
        raise ConfigurationError(f"{path[0]!r} is a field of {' and of '.join(holders)}: write {choices}")
    return [holders[0], *path]


def _check_time_passes(plan: Mapping[str, Any], clock: Clock) -> None:
    """Refuse a budget of time that would never be spent."""
    if plan["time"] is not None:
        passes = np.min(clock.network) > 0 or np.min(clock.compute) > 0
        require(passes, "run.time", plan["time"], "none where the clock's compute and network are 0: no time passes")


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


def _implied(said: Mapping[str, Any]) -> dict[str, Any]:
    """What else of [run] changes when this much of it is said: rounds and budgets take each other's place; rows are
    spread over a budget; a single client is the whole cohort."""

    def given(name: str) -> bool:
        return said.get(name) not in (None, "none", False)

    changes: dict[str, Any] = {}
    if any(map(given, BUDGETS)):
        changes |= {"rounds": None, "eval_every": None, **dict.fromkeys(BUDGETS)}
    elif given("rounds"):
        changes |= dict.fromkeys(BUDGETS)
    if given("pooled"):
        changes["cohort"] = None
    return {name: value for name, value in changes.items() if name not in said}
