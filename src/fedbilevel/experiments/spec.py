"""The typed spec: everything that determines a run, read from and written to TOML.

[task] and [algorithm] have a name and the fields of what it names; [clients] has what is a client's own, as
`fedbilevel.Clients` takes it: local_steps, capacity, and fields of the algorithm, by their paths; [asynchronous],
[submodels], [privacy], [run] and [engine] are below; [clock] has the fields of `fedbilevel.Clock`. A spec is always
complete: `resolve` takes the fields that are not given from the presets, and else from the defaults. These layers are
merged as tables before anything is read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import read_capacity
from fedbilevel.core.config import config, positive_integer
from fedbilevel.core.errors import (
    ConfigurationError,
    is_number,
    nearest,
    refuse_together,
    require,
    unknown,
)
from fedbilevel.core.own import LOCAL_STEPS, Values, check_own, read
from fedbilevel.core.privacy import Privacy, positive_below
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tables import (
    Fields,
    Wrong,
    arguments,
    changed,
    hints_of,
    merged,
    names_of,
    nested,
    owners_of,
    parameters_of,
    parts_of,
    plain,
    shared_by,
    unknown_field,
)
from fedbilevel.engines.virtual_time import Clock
from fedbilevel.experiments import toml
from fedbilevel.experiments.loader import algorithm_class, code_of, full_name, label, task_maker
from fedbilevel.experiments.presets import METHODS, preset
from fedbilevel.wording import of_others


@dataclass(frozen=True)
class Component:
    """A task or an algorithm of a spec.

    Attributes:
        name: under which it is found.
        value: of a task the arguments of its function, of an algorithm the algorithm itself; of a finished run that is
            only read, a table as it was written.
    """

    name: str
    value: Any

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields as TOML can hold them."""
        value = self.value
        return plain(value if isinstance(value, Mapping) else {name: getattr(value, name) for name in names_of(value)})


@config
class AsynchronousPlan:
    """Whether to go on with the first replies: these fields of `fedbilevel.Asynchronous`.

    Args:
        wait_for: how many replies an exchange waits for; None waits for all.
        max_staleness, delay_penalty: see `fedbilevel.Asynchronous`.
    """

    wait_for: int | None = None
    max_staleness: int | None = None
    delay_penalty: float = 0.0

    def validate(self) -> None:
        if self.wait_for is None:
            allowed = "left out without asynchronous.wait_for, where everyone is waited for"
            for name in ("max_staleness", "delay_penalty"):
                got = getattr(self, name)
                require(not got, f"asynchronous.{name}", got, allowed)


@config
class PrivacyPlan:
    """Whether simulated clients reply under differential privacy: these fields of `fedbilevel.Privacy`.

    Args:
        clip, noise_multiplier, delta: see `fedbilevel.Privacy`; all of them, or none: replies are sent as they are.
        budget: the ε that a client spends at most; the run ends before the first round that would take one over it.
    """

    clip: float | None = positive_below(math.inf, default=None)
    noise_multiplier: float | None = positive_below(math.inf, default=None)
    delta: float | None = positive_below(1.0, default=None)
    budget: float | None = positive_below(math.inf, default=None)

    def validate(self) -> None:
        given = [name for name, value in plain(self).items() if value is not None]
        for name in ("clip", "noise_multiplier", "delta"):
            require(not given or name in given, f"privacy.{name}", None, f"given with privacy.{given and given[0]}")

    @property
    def terms(self) -> Privacy | None:
        """The terms of each client, if there are any."""
        return None if self.clip is None else Privacy(**plain(self))


BUDGETS = ("exchanges", "bytes", "time")


def _budget(unit: str) -> Any:
    """A field for a positive finite number of some unit, or None, which is its default."""

    def prepare(name: str, value: Any) -> Any:
        require(value is None or (is_number(value) and value > 0), name, value, f"a positive number of {unit}")
        return value

    return field(default=None, metadata={"prepare": prepare})


@config
class RunPlan:
    """How long to run and what to write on the way.

    Args:
        rounds: in total; None with a budget.
        exchanges: a budget in place of rounds: the run ends at the first row of its history that has so many.
        bytes: a budget in place of rounds: the bytes of all messages, down and up together, of the whole cohort.
        time: a budget in place of rounds, in seconds of the clock.
        cohort: clients per round; None takes everyone.
        replacement: draw them with replacement: a client may take part several times in a round.
        pooled: give every sample to a single client: the same problem without a federation.
        seed: of the cohorts and of all samples drawn (the task has a seed of its own).
        eval_every: rounds between two rows of the history; None, with a budget, makes about fifty rows of it.
        checkpoint_every: rounds between checkpoints; None writes one a second, less often where that takes long; in a
            federation one a round.
        metrics_per_client: measure the task's per-client metrics, too, for each row; the server of a federation that
            has no metrics of its own asks for them in any case.
        best_by, on_divergence: see `fedbilevel.solve`.
        x_bounds: [low, high], between which every entry of x stays; or such a pair for some parts of x, by their names;
            None leaves that to the task.
    """

    rounds: int | None = positive_integer(default=300, optional=True)
    exchanges: int | None = positive_integer(default=None, optional=True)
    bytes: float | None = _budget("bytes")
    time: float | None = _budget("seconds")
    cohort: int | None = positive_integer(default=None, optional=True)
    replacement: bool = False
    pooled: bool = False
    seed: int = 0
    eval_every: int | None = positive_integer(default=10, optional=True)
    checkpoint_every: int | None = positive_integer(default=None, optional=True)
    metrics_per_client: bool = False
    best_by: str | None = None
    on_divergence: Literal["stop", "shrink"] | None = None
    x_bounds: Sequence[float] | Mapping[str, Any] | None = None

    def validate(self) -> None:
        lengths = {name: getattr(self, name) for name in ("rounds", *BUDGETS)}
        given = [f"{name} = {value}" for name, value in lengths.items() if value is not None]
        if len(given) != 1:
            got = " and ".join(given) or "neither"
            raise ConfigurationError(
                f"a run ends after some rounds, exchanges, bytes or seconds of the clock: give one, not {got}"
            )
        allowed = "a positive integer, unless run.exchanges, run.bytes or run.time is given"
        require(self.rounds is None or self.eval_every is not None, "run.eval_every", None, allowed)
        drawn = not self.replacement or self.cohort is not None
        require(drawn, "run.replacement", True, "false where everyone takes part: give run.cohort")
        require(not self.pooled or self.cohort in (None, 1), "run.cohort", self.cohort, "none or 1 with run.pooled")
        bounds = {} if self.x_bounds is None else self.x_bounds
        for name, pair in (bounds if isinstance(bounds, Mapping) else {"": bounds}).items():
            listed = isinstance(pair, list | tuple) and len(pair) == 2 and all(map(is_number, pair))
            path = f"run.x_bounds.{name}".rstrip(".")
            require(listed and pair[0] < pair[1], path, pair, "[low, high], two numbers with low < high")

    @property
    def budget(self) -> tuple[str, float]:
        """What ends the run: which cost is counted, "rounds" or one of BUDGETS, and how much of it."""
        return next((name, value) for name in ("rounds", *BUDGETS) if (value := getattr(self, name)) is not None)


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The engine of a simulation: these fields of `fedbilevel.Local`."""

    chunk: int | None = None
    devices: int | None = None
    stream: bool | None = None


@dataclass(frozen=True)
class Spec:
    """A complete description of a run."""

    task: Component
    algorithm: Component
    clients: Mapping[str, Any]
    asynchronous: AsynchronousPlan
    submodels: UnitPolicy
    privacy: PrivacyPlan
    run: RunPlan
    engine: EnginePlan
    clock: Clock = field(default_factory=Clock)

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the fields of each section, in the form that TOML can hold."""
        return {
            "task": {"name": self.task.name, **self.task.fields},
            "algorithm": {"name": self.algorithm.name, **self.algorithm.fields},
            "clients": reduce(merged, (nested(path.split("."), value) for path, value in self.clients.items()), {}),
            **{section: plain(getattr(self, section)) for section in PLANS},
        }

    def to_toml(self, comment: str = "Repeat this run with: fedbilevel run --spec THIS_FILE") -> str:
        return toml.dumps({**toml.STAMP, **self.tables()}, comment)

    def replace(self, **tables: Fields) -> Spec:
        """Copy the spec with some fields changed, e.g. spec.replace(run={"rounds": 500})."""
        return resolve(overlaid(self.tables(), {name: _table(name, of) for name, of in tables.items()}))

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
        found = self.task.value.get("data")
        return found if isinstance(found, str) else None


PLANS: dict[str, Any] = {
    "asynchronous": AsynchronousPlan,
    "submodels": UnitPolicy,
    "privacy": PrivacyPlan,
    "run": RunPlan,
    "engine": EnginePlan,
    "clock": Clock,
}
"""The sections that have no name, in the order of a spec."""
SECTIONS = [section.name for section in dataclasses.fields(Spec)]
DEFAULT_TASK, DEFAULT_ALGORITHM = "hyper_representation", "simfbo"
CAPACITY = "capacity"
NOTHING = (None, "none", False)


def resolve(tables: Fields) -> Spec:
    """Complete a spec from as much of it as is given: {"task": {"name": …, …}, "algorithm": …, …}.

    Raises:
        ConfigurationError: all that is wrong: sections, names and fields that do not exist, values that do not fit.
    """
    wrong = Wrong()
    given = sections(tables, wrong)
    return _completed(given, _loaded_names(given, wrong), wrong)


def _completed(given: Mapping[str, Fields], names: tuple[str, str], wrong: Wrong) -> Spec:
    """Complete a spec from its sections and the names of its task and algorithm; refuse what is in `wrong` with it."""
    task, algorithm = names
    maker, cls = task_maker(task), algorithm_class(algorithm)
    layers = _presets(given, task, algorithm)
    whole = {name: merged(layers.get(name, {}), _without_name(given[name])) for name in SECTIONS}
    made = {
        "task": Component(task, arguments(maker, whole["task"], "task", wrong)),
        "algorithm": Component(algorithm, changed(cls, whole["algorithm"], "algorithm", wrong)),
        **{name: changed(plan(), whole[name], name, wrong) for name, plan in PLANS.items()},
    }
    made["clients"] = _own_numbers(whole["clients"], made["algorithm"].value, wrong)
    refuse_together(wrong)
    spec = Spec(**made)
    if spec.run.time is not None:
        passes = np.min(spec.clock.network) > 0 or np.min(spec.clock.compute) > 0
        allowed = "none where the clock's compute and network are 0: no time passes"
        require(bool(passes), "run.time", spec.run.time, allowed)
    return spec


def _own_numbers(table: Fields, algorithm: Any, wrong: Wrong) -> dict[str, Any]:
    """Return the entries of [clients] by the path of the algorithm's field that they are for; `wrong` gets what it does
    not allow, where there is an algorithm. How many clients there are only the task knows."""
    found = {name: value for name, value in _by_path(table) if value not in (None, "none")}
    numbers, path_of = dict[str, Values](), "clients.{}".format
    for name, value in found.items():
        row = value
        while isinstance(row, list) and row and isinstance(row[0], list):
            row = row[0]
        clients = len(row) if isinstance(row, list) and row else 1
        try:
            if name == CAPACITY:
                read_capacity(path_of(name), clients, value)
            else:
                numbers[name] = read(path_of(name), value, clients)
        except ConfigurationError as error:
            wrong.append(error)
    if isinstance(algorithm, Algorithm):
        try:
            check_own(algorithm, numbers, path_of=path_of)
        except ConfigurationError as error:
            wrong += error.wrong
    return found


def _by_path(table: Fields, within: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping) and set(value) != {"low", "high"}:
            yield from _by_path(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def sections(tables: Fields, wrong: Wrong) -> dict[str, dict[str, Any]]:
    """Return every section of a spec, empty where nothing of it is given; `wrong` gets what is no section."""
    given = {name: dict[str, Any]() for name in SECTIONS}
    for name, content in tables.items():
        try:
            given |= {} if name in toml.STAMP else {name: _table(name, content)}
        except ConfigurationError as error:
            wrong.append(error)
    return given


def _table(name: str, content: Any) -> dict[str, Any]:
    if name not in SECTIONS:
        raise unknown("section of a spec", name, SECTIONS)
    if isinstance(content, str) and name in ("task", "algorithm"):
        return {"name": content}
    require(isinstance(content, Mapping), name, content, f"a table: [{name}]")
    return dict(content)


def _names(given: Mapping[str, Fields]) -> tuple[str, str]:
    """Return the names of task and algorithm, or their defaults."""
    task = given.get("task", {}).get("name", DEFAULT_TASK)
    require(isinstance(task, str), "task.name", task, "text")
    task = full_name("task", task)
    algorithm = given.get("algorithm", {}).get("name", METHODS.get(task, DEFAULT_ALGORITHM))
    require(isinstance(algorithm, str), "algorithm.name", algorithm, "text")
    return task, full_name("algorithm", algorithm)


def _loaded_names(given: Mapping[str, Fields], wrong: Wrong) -> tuple[str, str]:
    """Return the names of task and algorithm after both were found.

    Raises:
        ConfigurationError: one was not found. The error has what is in `wrong` too, since no field can be checked then.
    """
    try:
        task, algorithm = _names(given)
        refuse_together([*_not_found(task_maker, task), *_not_found(algorithm_class, algorithm)])
    except ConfigurationError as error:
        wrong.append(error)
        refuse_together(wrong)
    return task, algorithm


def _not_found(load: Callable[[str], Any], name: str) -> Wrong:
    try:
        load(name)
    except ConfigurationError as error:
        return [error]
    return []


def _without_name(table: Fields) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != "name"}


def _presets(given: Mapping[str, Fields], task: str, algorithm: str) -> dict[str, Fields]:
    """Return what a spec takes where nothing is given, by section. What a task has for all methods is for those of the
    library alone."""
    known, run = parameters_of(task_maker(task)), given["run"]
    data = given["task"].get("data", known.get("data"))
    values = preset(task, data if isinstance(data, str) else None)
    cls = algorithm_class(algorithm)
    shared = {} if code_of(algorithm) else shared_by(cls, values.of(algorithm))
    rounds = {} if all(run.get(name) in NOTHING for name in BUDGETS) else dict.fromkeys(("rounds", "eval_every"))
    everyone = {"cohort": None} if run.get("pooled") is True else {}
    return {
        "task": values.of_task(given["task"].get("network")),
        "algorithm": merged(shared, _own_presets(cls, label(algorithm), label(task))),
        "run": {**values.of_run(algorithm), **rounds, **everyone},
        "asynchronous": dict(values.asynchronous.get(algorithm, {})),
    }


def _own_presets(cls: type[Algorithm], name: str, task: str) -> Fields:
    """Return the fields that the class of an algorithm has for a task, in its attribute `presets`."""
    presets: Any = cls.presets
    fits = isinstance(presets, Mapping) and all(isinstance(fields, Mapping) for fields in presets.values())
    require(fits, f"{name}.presets", presets, "a table of fields for each task, {task: {field: value}}")
    fields: Fields = presets.get(task, {})
    known = names_of(cls)
    refuse_together(
        unknown_field(f"{name} in its presets for {task}", one, known) for one in fields if one not in known
    )
    return fields


def overlaid(tables: Fields, changes: Fields) -> dict[str, Any]:
    """Lay tables over those of a spec. In [run] rounds and budgets take each other's place, rows are spread over a
    budget, and a single client is the whole cohort."""
    run = changes.get("run", {})
    gone: set[str] = set()
    if any(run.get(name) not in NOTHING for name in BUDGETS):
        gone |= {"rounds", "eval_every", *BUDGETS}
    elif run.get("rounds") not in NOTHING:
        gone |= set(BUDGETS)
    if run.get("pooled") not in NOTHING:
        gone.add("cohort")
    kept = {**tables, "run": {name: value for name, value in tables.get("run", {}).items() if name not in gone}}
    return {name: merged(kept.get(name, {}), changes.get(name, {})) for name in {**kept, **changes}}


def configure(
    base: Fields | None = None,
    *,
    task: str | None = None,
    algorithm: str | None = None,
    data: str | None = None,
    settings: Sequence[str] = (),
    values: Fields | None = None,
) -> Spec:
    """Make a spec from the tables of `base`, then the names, then settings.

    Names come first, wherever they are given: they decide which presets fill in the rest. The name of another task or
    algorithm than that of `base` takes the place of its whole table.

    Args:
        base: see `resolve`.
        task, algorithm, data: names.
        settings: such as "algorithm.local_steps=10", "task.clients=50" or "server_lr.x=0.05". Without a section, the
            algorithm's field of that name is meant, if there is any, else the only field of that name.
        values: likewise, by their paths, as Python has them; they come after `settings`.

    Raises:
        ConfigurationError: see `resolve`; or a setting is of no field, or may be of several.
    """
    wrong = Wrong()
    tables = sections(base or {}, wrong)
    named = {"task.name": task, "algorithm.name": algorithm, "task.data": data}
    pairs = [(path, name) for path, name in named.items() if name is not None]
    pairs += [*map(_parsed, settings), *(values or {}).items()]
    names = [(path.split("."), name) for path, name in pairs if path in named]
    for (section, of), name in names:
        two = [tables[section].get("name", name), name]
        if of == "name" and len({full_name(section, str(one)) for one in two}) > 1:  # the fields are of another one
            tables[section] = {}
    tables = overlaid(tables, reduce(put, names, {}))
    found, chosen = [], _loaded_names(tables, wrong)
    for path, value in pairs:
        try:
            found += [] if path in named else [(located(path, *chosen), value)]
        except ConfigurationError as error:
            wrong.append(error)
    return _completed(overlaid(tables, reduce(put, found, {})), chosen, wrong)


def put(tables: Fields, setting: tuple[Sequence[str], Any]) -> dict[str, Any]:
    """Put a value into tables, at a path that begins with the section."""
    (section, *path), value = setting
    if path[1:] and path[-1] == "name":  # another part, with its own defaults
        path, value = path[:-1], {"name": value}
    return {**tables, section: merged(tables.get(section, {}), nested(path, value))}


def _parsed(setting: str) -> tuple[str, Any]:
    path, equals, text = setting.partition("=")
    require(bool(equals and path.strip()), "--set", setting, "of the form field=value")
    return path.strip(), toml.parse_value(text.strip())


def fields_of(task: str, algorithm: str) -> dict[str, list[str]]:
    """Return the names of the fields of each section, for this task and this algorithm."""
    own = {"task": [*parameters_of(task_maker(task))], "algorithm": names_of(algorithm_class(algorithm))}
    return {**own, "clients": [LOCAL_STEPS, CAPACITY], **{section: names_of(plan) for section, plan in PLANS.items()}}


def located(name: str, task: str, algorithm: str) -> list[str]:
    """Return the path of a setting with its section in front.

    Raises:
        ConfigurationError: no field has that name, or several have, none of which is the algorithm's own.
    """
    path, known = name.split("."), fields_of(task, algorithm)
    if path[0] in ("data", "network"):
        return ["task", *path]
    if path[0] in known and len(path) > 1:
        return path
    if path[0] == label(algorithm) and len(path) > 1:  # as the list of fields calls it
        return ["algorithm", *path[1:]]
    holders = [section for section in known if path[0] in known[section]]
    if not holders:
        of_sections = {section: names for section, names in known.items() if section != "algorithm"}
        raise unknown_setting(path[0], {label(algorithm): known["algorithm"], **of_sections})
    if "algorithm" in holders:
        return ["algorithm", *path]
    hints = hints_of(algorithm_class(algorithm)).items()
    inside = [one for one, hint in hints if any(path[0] in names_of(part) for part in parts_of(hint).values())]
    if holders != ["run"] and len(several := [*inside, *holders]) > 1:
        choices = " or ".join(f"{holder}.{path[0]}" for holder in several)
        raise ConfigurationError(f"{path[0]!r} is a field of {' and of '.join(several)}: write {choices}")
    return [holders[0], *path]


def unknown_setting(name: str, sections: Mapping[str, Iterable[str]]) -> ConfigurationError:
    """Return the error for a setting that is a field of no section. It lists their fields in the order of `sections`,
    the algorithm's first."""
    owners = owners_of(name)
    near = "" if owners else nearest(name, sorted({field for fields in sections.values() for field in fields}))
    said = [f"{section}: {', '.join(sorted(fields))}" for section, fields in sections.items() if fields]
    return ConfigurationError(owners, path="field", got=name, allowed=["; ".join(said)], near=near)


def read_spec(path: str | Path) -> Spec:
    """Read a spec from a TOML file; what the file leaves out is filled in."""
    tables = toml.read(Path(path))
    try:
        return resolve(tables)
    except ConfigurationError as error:
        raise _of_file(path, tables, error.wrong) from error


def _of_file(path: str | Path, tables: Fields, wrong: Iterable[ConfigurationError]) -> ConfigurationError:
    """Say in one line what is wrong in a file, and which version wrote it, where that was another one."""
    return ConfigurationError(f"{path}: {'; '.join(filter(None, [*map(str, wrong), toml.other_version(tables)]))}")


def read_finished(path: Path) -> Spec:
    """Read the spec of a finished run, which anyone may have written: nothing that it names is loaded or run.

    The fields of its task and algorithm are tables as they were written.
    """
    wrong, tables = Wrong(), toml.read(path)
    try:
        given = sections(tables, wrong)
        (task, algorithm), given = of_others(list(_names(given))), of_others(given)
    except ConfigurationError as error:
        raise _of_file(path, tables, [*wrong, *error.wrong]) from error
    plans = {name: changed(plan(), given[name], name, wrong) for name, plan in PLANS.items()}
    if wrong:
        raise _of_file(path, tables, wrong)
    named = Component(task, _as_it_stands(given["task"])), Component(algorithm, _as_it_stands(given["algorithm"]))
    return Spec(*named, clients=dict(_by_path(given["clients"])), **plans)


def _as_it_stands(table: Fields) -> dict[str, Any]:
    return {name: None if value == "none" else value for name, value in _without_name(table).items()}


def said_of_several(specs: Sequence[Spec]) -> str:
    """Say which rows of a comparison have presets for their task, and which run at their defaults."""
    tuned = list(dict.fromkeys(label(spec.algorithm.name) for spec in specs if _has_preset(spec)))
    others = list(dict.fromkeys(label(spec.algorithm.name) for spec in specs if not _has_preset(spec)))
    found = [f"presets for {label(specs[0].task.name)}: {', '.join(tuned)}"] if tuned else []
    found += [f"at the defaults of their classes: {', '.join(others)}"] if others else []
    return "; ".join(found)


def _has_preset(spec: Spec) -> bool:
    """Tell whether the task has presets for this very method, or its class has some for the task."""
    name, task = spec.algorithm.name, spec.task.name
    return name in preset(task, spec.data).algorithms or label(task) in algorithm_class(name).presets
