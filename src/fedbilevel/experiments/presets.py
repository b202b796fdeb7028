"""Read presets from presets.toml: values that work for a task and a data set, for fields that a spec leaves out.

If an algorithm does not have the field of a preset, the preset is ignored. If neither the spec nor a preset has a
field, the default of the algorithm or the task is used.
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
"""The name of a group -> its methods, which have fields in common."""
METHODS: Mapping[str, str] = TABLES["methods"]
"""A task -> the method that is used if none is named, for tasks that the default method cannot solve."""


def _complete(content: Any) -> Any:
    """Merge a table with the table that its entry `like` names, and replace "none" by None."""
    if not isinstance(content, Mapping):
        return None if content == "none" else content
    own = {name: _complete(value) for name, value in content.items() if name != "like"}
    return merged(_complete(reduce(getitem, content["like"].split("."), TABLES)), own) if "like" in content else own


def _by_method(table: Fields) -> dict[str, Fields]:
    """Return method -> its fields: the fields of its groups, and the method's own fields.

    Smaller groups take precedence over larger ones, and the method's own fields over those of all groups.
    """
    out: dict[str, Fields] = {}
    for name in sorted(table, key=lambda name: -len(GROUPS.get(name, ()))):
        out |= {method: merged(out.get(method, {}), table[name]) for method in GROUPS.get(name, [name])}
    return out


RUNS = _by_method(_complete(TABLES["runs"]))
"""A method -> the fields of [run] that it needs."""


@dataclass(frozen=True)
class Preset:
    """The preset fields for one task on one data set."""

    task: Fields = field(default_factory=dict)
    shared: Fields = field(default_factory=dict)  # fields for every algorithm that has them
    algorithms: Mapping[str, Fields] = field(default_factory=dict)  # fields of algorithms, by the algorithm's name
    asynchronous: Mapping[str, Fields] = field(default_factory=dict)  # fields of [asynchronous], by algorithm
    run: Fields = field(default_factory=dict)
    networks: Mapping[str, Fields] = field(default_factory=dict)  # fields of the task, by the name of the network

    def of_task(self, network: Any) -> dict[str, Any]:
        """Return the preset fields of [task]."""
        return {**self.task, **next((fields for name, fields in self.networks.items() if name == network), {})}

    def of(self, algorithm: str) -> dict[str, Any]:
        """Return the fields of an algorithm."""
        return merged(self.shared, self.algorithms.get(algorithm, {}))

    def of_run(self, algorithm: str) -> dict[str, Any]:
        """Return the preset fields of [run]; {} for a task without a preset, such as a user's own."""
        return {**self.run, **RUNS.get(algorithm, {})} if self.run else {}


def _read(table: Fields) -> Preset:
    methods = {name: _by_method(table.get(name, {})) for name in ("algorithms", "asynchronous")}
    return Preset(**{**table, **methods})


PRESETS: dict[tuple[str, str | None], Preset] = {
    (task, None if data == "any" else data): _read(_complete(table))
    for task, tables in TABLES["task"].items()
    for data, table in tables.items()
}
"""(task, data set) -> preset. The data set None stands for all data sets of the task that are not listed."""


def preset(task: str, data: str | None) -> Preset:
    """Return the preset of a task and a data set; an empty preset if presets.toml has none."""
    data = "mnist" if data == "fashion-mnist" else data  # both sets have equally many images of the same size
    return PRESETS.get((task, data), PRESETS.get((task, None), Preset()))
