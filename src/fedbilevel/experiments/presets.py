"""Values that work, for each task and data set: what a spec does not say is taken from presets.toml.

A field that an algorithm does not have is left out; what is in neither is the algorithm's or the task's own default.
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
"""Methods with the same fields, by the name of their group."""
METHODS: Mapping[str, str] = TABLES["methods"]
"""The method where none is named, for tasks that the default method is not for."""


def _complete(content: Any) -> Any:
    """Return a table over the table that it is `like`, and None for "none"."""
    if not isinstance(content, Mapping):
        return None if content == "none" else content
    own = {name: _complete(value) for name, value in content.items() if name != "like"}
    return merged(_complete(reduce(getitem, content["like"].split("."), TABLES)), own) if "like" in content else own


def _by_method(table: Fields) -> dict[str, Fields]:
    """Give each method the fields of its groups, of the smallest group last, and then its own."""
    out: dict[str, Fields] = {}
    for name in sorted(table, key=lambda name: -len(GROUPS.get(name, ()))):
        out |= {method: merged(out.get(method, {}), table[name]) for method in GROUPS.get(name, [name])}
    return out


RUNS = _by_method(_complete(TABLES["runs"]))
"""What methods need of [run]."""


@dataclass(frozen=True)
class Preset:
    """Defaults for one task on one data set."""

    task: Fields = field(default_factory=dict)
    shared: Fields = field(default_factory=dict)  # for every algorithm that has such a field
    algorithms: Mapping[str, Fields] = field(default_factory=dict)  # by name
    asynchronous: Mapping[str, Fields] = field(default_factory=dict)  # of [asynchronous], for an algorithm by name
    run: Fields = field(default_factory=dict)
    networks: Mapping[str, Fields] = field(default_factory=dict)  # of the task, for a network that is asked for

    def of_task(self, network: Any) -> dict[str, Any]:
        """Return what is set of [task]."""
        return {**self.task, **next((fields for name, fields in self.networks.items() if name == network), {})}

    def of(self, algorithm: str) -> dict[str, Any]:
        """Return the fields of an algorithm."""
        return merged(self.shared, self.algorithms.get(algorithm, {}))

    def of_run(self, algorithm: str) -> dict[str, Any]:
        """Return what is set of [run]; a user's own task says by itself who is asked."""
        return {**self.run, **RUNS.get(algorithm, {})} if self.run else {}


def _read(table: Fields) -> Preset:
    methods = {name: _by_method(table.get(name, {})) for name in ("algorithms", "asynchronous")}
    return Preset(**{**table, **methods})


PRESETS: dict[tuple[str, str | None], Preset] = {
    (task, None if data == "any" else data): _read(_complete(table))
    for task, tables in TABLES["task"].items()
    for data, table in tables.items()
}
"""Every preset by (task, data set); None is for all data sets without one of their own."""


def preset(task: str, data: str | None) -> Preset:
    """Return the values for a task and a data set; those without an entry have none."""
    data = "mnist" if data == "fashion-mnist" else data  # which has images of the same number and size
    return PRESETS.get((task, data), PRESETS.get((task, None), Preset()))
