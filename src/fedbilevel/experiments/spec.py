"""Define the spec: the typed description of everything that determines a run, which is read from and written to TOML.

[task] and [algorithm] have a name and the fields of the named task or algorithm. [clients] has values that differ
between clients, as `fedbilevel.Clients` takes them: local_steps, capacity, and fields of the algorithm by their paths.
plans.py has the other sections. A spec is always complete: `resolve` takes missing fields from the presets, or else
from the defaults. The given fields, the presets and the defaults are merged before any value is checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.core.algorithm import Algorithm
from fedbilevel.core.client import read_capacity
from fedbilevel.core.errors import ConfigurationError, errors_in, refuse_together, require, unknown
from fedbilevel.core.own import LOCAL_STEPS, Values, check_own, read
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
from fedbilevel.experiments.plans import (
    BUDGETS,
    PLANS,
    AsynchronousPlan,
    EnginePlan,
    LayersPlan,
    PrivacyPlan,
    RunPlan,
)
from fedbilevel.experiments.presets import METHODS, preset
from fedbilevel.wording import nearest, of_others


@dataclass(frozen=True)
class Component:
    """The task or the algorithm of a spec.

    Attributes:
        name: the name by which the task or the algorithm is found.
        value: for a task, the arguments of its function; for an algorithm, the algorithm itself. In the spec of a
            finished run, which is only read, it is the table as it was written.
    """

    name: str
    value: Any

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields in a form that can be written as TOML."""
        value = self.value
        return plain(value if isinstance(value, Mapping) else {name: getattr(value, name) for name in names_of(value)})


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
    layers: LayersPlan = field(default_factory=LayersPlan)

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the fields of each section in a form that can be written as TOML."""
        return {
            "task": {"name": self.task.name, **self.task.fields},
            "algorithm": {"name": self.algorithm.name, **self.algorithm.fields},
            "clients": reduce(merged, (nested(path.split("."), value) for path, value in self.clients.items()), {}),
            **{section: plain(getattr(self, section)) for section in PLANS},
        }

    def to_toml(self, comment: str = "Repeat this run with: fedbilevel run --spec THIS_FILE") -> str:
        """Return the spec as a TOML document that begins with the comment."""
        return toml.dumps({**toml.STAMP, **self.tables()}, comment)

    def replace(self, **tables: Fields) -> Spec:
        """Copy the spec with some fields changed, e.g. spec.replace(run={"rounds": 500})."""
        return resolve(overlaid(self.tables(), {name: _table(name, of) for name, of in tables.items()}))

    @property
    def title(self) -> str:
        """Return a line with the names of task, algorithm and data set."""
        return " · ".join(part for part in (label(self.task.name), label(self.algorithm.name), self.data) if part)

    @property
    def timed(self) -> bool:
        """Return whether virtual time differs from the number of exchanges."""
        return dataclasses.replace(self.clock, seed=0) != Clock()

    @property
    def data(self) -> str | None:
        """Return the name of the data set; None if the task has no data set."""
        found = self.task.value.get("data")
        return found if isinstance(found, str) else None


SECTIONS = [section.name for section in dataclasses.fields(Spec)]
DEFAULT_TASK, DEFAULT_ALGORITHM = "hyper_representation", "simfbo"
CAPACITY = "capacity"
NOTHING = (None, "none", False)


def resolve(tables: Fields, presets: bool = True) -> Spec:
    """Make a complete spec from some of its tables: {"task": {"name": …, …}, "algorithm": …, …}.

    Args:
        tables: the tables.
        presets: whether a field that is not given has the value of the task's preset. False: it has its default.

    Raises:
        ConfigurationError: sections, names or fields do not exist, or values do not fit. The error lists all mistakes.
    """
    wrong = Wrong()
    given = sections(tables, wrong)
    return _completed(given, _loaded_names(given, wrong), wrong, presets)


def _completed(given: Mapping[str, Fields], names: tuple[str, str], wrong: Wrong, presets: bool = True) -> Spec:
    """Complete a spec from its sections and its two names. All errors, also those in `wrong`, are raised together."""
    task, algorithm = names
    maker, cls = task_maker(task), algorithm_class(algorithm)
    layers = _presets(given, task, algorithm) if presets else {}
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
        allowed = "left out if clock.compute and clock.network are 0, since then no time passes"
        require(bool(passes), "run.time", spec.run.time, allowed)
    return spec


def _own_numbers(table: Fields, algorithm: Any, wrong: Wrong) -> dict[str, Any]:
    """Return the entries of [clients] by the paths of the algorithm's fields. Errors are added to `wrong`.

    The number of clients is not checked, since it is known only when the task has been made.
    """
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
    """Return all sections of a spec; a section that is not given is {}. Errors about unknown sections go to `wrong`."""
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
    """Return the names of task and algorithm; a name that is not given has a default."""
    task = given.get("task", {}).get("name", DEFAULT_TASK)
    require(isinstance(task, str), "task.name", task, "text")
    task = full_name("task", task)
    algorithm = given.get("algorithm", {}).get("name", METHODS.get(task, DEFAULT_ALGORITHM))
    require(isinstance(algorithm, str), "algorithm.name", algorithm, "text")
    return task, full_name("algorithm", algorithm)


def _loaded_names(given: Mapping[str, Fields], wrong: Wrong) -> tuple[str, str]:
    """Load task and algorithm, and return their names.

    Raises:
        ConfigurationError: the task or the algorithm cannot be loaded. The error includes the errors in `wrong`, since
            fields can then not be checked.
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
    """Return the presets by section. A task's presets for all methods apply only to the library's methods."""
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
    """Return the fields that an algorithm's class has for a task, in its attribute `presets`."""
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
    """Return a spec's tables after some changes.

    In [run], rounds and budgets replace each other, a budget also removes `eval_every`, and `pooled` removes `cohort`.
    """
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
    """Make a spec from the tables of `base`, with changes by names, settings and values.

    Names are applied first, including names among the settings, since they decide which presets are used. If a name
    differs from the name in `base`, it replaces the whole table of the task or the algorithm.

    Args:
        base: see `resolve`.
        task, algorithm, data: the names of task, algorithm and data set.
        settings: texts such as "algorithm.local_steps=10", "task.clients=50" or "server_lr.x=0.05". A name without a
            section means the algorithm's field of that name or, if there is none, the only field of that name.
        values: Python values by the path of the field; they are applied after `settings`.

    Raises:
        ConfigurationError: see `resolve`; or the field of a setting does not exist or is ambiguous.
    """
    wrong = Wrong()
    tables = sections(base or {}, wrong)
    named = {"task.name": task, "algorithm.name": algorithm, "task.data": data}
    pairs = [(path, name) for path, name in named.items() if name is not None]
    pairs += [*map(_parsed, settings), *(values or {}).items()]
    names = [(path.split("."), name) for path, name in pairs if path in named]
    for (section, of), name in names:
        two = [tables[section].get("name", name), name]
        if (
            of == "name" and len({full_name(section, str(one)) for one in two}) > 1
        ):  # fields of another task or algorithm are dropped
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
    if path[1:] and path[-1] == "name":  # another part, with defaults of its own
        path, value = path[:-1], {"name": value}
    return {**tables, section: merged(tables.get(section, {}), nested(path, value))}


def _parsed(setting: str) -> tuple[str, Any]:
    path, equals, text = setting.partition("=")
    require(bool(equals and path.strip()), "--set", setting, "of the form field=value")
    return path.strip(), toml.parse_value(text.strip())


def fields_of(task: str, algorithm: str) -> dict[str, list[str]]:
    """Return the names of the fields of each section, for a task and an algorithm."""
    own = {"task": [*parameters_of(task_maker(task))], "algorithm": names_of(algorithm_class(algorithm))}
    return {**own, "clients": [LOCAL_STEPS, CAPACITY], **{section: names_of(plan) for section, plan in PLANS.items()}}


def located(name: str, task: str, algorithm: str) -> list[str]:
    """Return the path of a setting, which begins with the section.

    Raises:
        ConfigurationError: no field has this name; or several fields have it, and the algorithm has none of them.
    """
    path, known = name.split("."), fields_of(task, algorithm)
    if path[0] in ("data", "network"):
        return ["task", *path]
    if path[0] in known and len(path) > 1:
        return path
    if path[0] == label(algorithm) and len(path) > 1:  # the name that stands for the algorithm in the list of fields
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
        message = f"{path[0]!r} is a field of {' and of '.join(several)}: write {choices}"
        raise ConfigurationError(path="setting", got=path[0], allowed=choices, message=message)
    return [holders[0], *path]


def unknown_setting(name: str, sections: Mapping[str, Iterable[str]]) -> ConfigurationError:
    """Return the error for a setting whose field does not exist, with the fields of `sections` in their order."""
    owners = owners_of(name)
    near = "" if owners else nearest(name, sorted({field for fields in sections.values() for field in fields}))
    said = [f"{section}: {', '.join(sorted(fields))}" for section, fields in sections.items() if fields]
    return ConfigurationError(owners, path="field", got=name, allowed=["; ".join(said)], near=near)


def read_spec(path: str | Path) -> Spec:
    """Read a spec from a TOML file. Fields that the file leaves out are filled in as by `resolve`."""
    tables = toml.read(Path(path))
    with _errors_in_file(path, tables):
        return resolve(tables)


def _errors_in_file(path: str | Path, tables: Fields) -> AbstractContextManager[None]:
    """Let the messages of errors in the block name the file, and the version that wrote it if it is another one."""
    version = toml.other_version(tables)
    return errors_in(f"{path} ({version})" if version else str(path))


def read_finished(path: Path) -> Spec:
    """Read the spec of a finished run. Nothing that it names is loaded or run, since it is not trusted.

    The fields of its task and algorithm are the tables as they were written.
    """
    wrong, tables = Wrong(), toml.read(path)
    with _errors_in_file(path, tables):
        try:
            given = sections(tables, wrong)
            (task, algorithm), given = of_others(list(_names(given))), of_others(given)
        except ConfigurationError as error:
            wrong.append(error)
            refuse_together(wrong)
        plans = {name: changed(plan(), given[name], name, wrong) for name, plan in PLANS.items()}
        refuse_together(wrong)
    named = Component(task, _as_it_stands(given["task"])), Component(algorithm, _as_it_stands(given["algorithm"]))
    return Spec(*named, clients=dict(_by_path(given["clients"])), **plans)


def _as_it_stands(table: Fields) -> dict[str, Any]:
    return {name: None if value == "none" else value for name, value in _without_name(table).items()}


def said_of_several(specs: Sequence[Spec]) -> str:
    """Say in words which algorithms of a comparison have presets for the task, and which run with their defaults."""
    tuned = list(dict.fromkeys(label(spec.algorithm.name) for spec in specs if _has_preset(spec)))
    others = list(dict.fromkeys(label(spec.algorithm.name) for spec in specs if not _has_preset(spec)))
    found = [f"presets for {label(specs[0].task.name)}: {', '.join(tuned)}"] if tuned else []
    found += [f"with the defaults of their classes: {', '.join(others)}"] if others else []
    return "; ".join(found)


def _has_preset(spec: Spec) -> bool:
    """Return whether the task has presets for this method, or the method's class has presets for the task."""
    name, task = spec.algorithm.name, spec.task.name
    return name in preset(task, spec.data).algorithms or label(task) in algorithm_class(name).presets
