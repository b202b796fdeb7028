"""Provide presets: values that work for a task and a data set, from presets.toml, for fields that a spec leaves out.

A preset for a field that an algorithm does not have is ignored. A field that neither the spec nor the presets set takes
the default of the algorithm or the task.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib import resources
from operator import getitem
from typing import Any

from fedbilevel.core.tables import Fields, merged

TABLES: Fields = tomllib.loads((resources.files("fedbilevel.experiments") / "presets.toml").read_text("utf-8"))
GROUPS: Mapping[str, Sequence[str]] = TABLES["groups"]
"""Name of a group -> its methods, which have the same fields."""
METHODS: Mapping[str, str] = TABLES["methods"]
"""Task -> its method if none is named, for tasks that the default method cannot solve."""


def _complete(content: Any) -> Any:
    """Merge a table with the table that its entry `like` names, and turn "none" into None."""
    if not isinstance(content, Mapping):
        return None if content == "none" else content
    own = {name: _complete(value) for name, value in content.items() if name != "like"}
    return merged(_complete(reduce(getitem, content["like"].split("."), TABLES)), own) if "like" in content else own


def _by_method(table: Fields) -> dict[str, Fields]:
    """Return method -> its fields, which are those of its groups and its own.

    Smaller groups take precedence over larger ones, and the method's own fields over those of all groups.
    """
    out: dict[str, Fields] = {}
    for name in sorted(table, key=lambda name: -len(GROUPS.get(name, ()))):
        out |= {method: merged(out.get(method, {}), table[name]) for method in GROUPS.get(name, [name])}
    return out


RUNS = _by_method(_complete(TABLES["runs"]))
"""Method -> the fields of [run] that it needs."""


@dataclass(frozen=True)
class Preset:
    """Hold the defaults for one task on one data set."""

    task: Fields = field(default_factory=dict)
    shared: Fields = field(default_factory=dict)  # for every algorithm that has such a field
    algorithms: Mapping[str, Fields] = field(default_factory=dict)  # by name
    asynchronous: Mapping[str, Fields] = field(default_factory=dict)  # fields of [asynchronous] by algorithm
    run: Fields = field(default_factory=dict)
    networks: Mapping[str, Fields] = field(default_factory=dict)  # fields of the task by network

    def of_task(self, network: Any) -> dict[str, Any]:
        """Return the preset fields of [task]."""
        return {**self.task, **next((fields for name, fields in self.networks.items() if name == network), {})}

    def of(self, algorithm: str) -> dict[str, Any]:
        """Return the fields of an algorithm."""
        return merged(self.shared, self.algorithms.get(algorithm, {}))

    def of_run(self, algorithm: str) -> dict[str, Any]:
        """Return the preset fields of [run]; {} without a preset for the task, as for a user's own."""
        return {**self.run, **RUNS.get(algorithm, {})} if self.run else {}


def _read(table: Fields) -> Preset:
    methods = {name: _by_method(table.get(name, {})) for name in ("algorithms", "asynchronous")}
    return Preset(**{**table, **methods})


PRESETS: dict[tuple[str, str | None], Preset] = {
    (task, None if data == "any" else data): _read(_complete(table))
    for task, tables in TABLES["task"].items()
    for data, table in tables.items()
}
"""(task, data set) -> preset; the data set None is for all others of the task."""


def preset(task: str, data: str | None) -> Preset:
    """Return the preset of a task and a data set; it is empty if presets.toml has none."""
    data = "mnist" if data == "fashion-mnist" else data  # both have the same number and size of images
    return PRESETS.get((task, data), PRESETS.get((task, None), Preset()))
