"""What a preset is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Fields = Mapping[str, Any]
HESSIAN_INVERTING = ("fednest", "fednest-sgd", "lfednest", "fedmbo", "rabo", "rafbo")
OWN_HYPERGRADIENTS = ("lfednest", "rabo", "rafbo")
SINGLE_LOOP = ("simfbo", "shrofbo")
FEDBIO = ("fedbio", "fedbioacc")
"""Methods with the same fields."""
RANDOM_LENGTHS = {**dict.fromkeys(("fednest", "fednest-sgd", "lfednest", "aggitd"), "random"), "fedmbo": "parallel"}
"""The inverses of the papers, by products of random length. Their variance is small where N·s·ℓ is."""
TERMS: Mapping[str, int] = {"neumann_terms": 5}
"""Fewer than the methods' default: a short series, with which these presets' steps were chosen."""
ALONE: Mapping[str, Fields] = {"irig": {"pooled": True}}
"""What methods for a single client need of [run]."""
EVERYONE: Mapping[str, Fields] = {"adbo": {"cohort": None}, "sdbo": {"cohort": None}}
"""What methods that need all clients in every round need of [run]."""


@dataclass(frozen=True)
class Preset:
    """Defaults for one task on one data set."""

    task: Fields = field(default_factory=dict)
    shared: Fields = field(default_factory=dict)  # for every algorithm that has such a field
    algorithms: Mapping[str, Fields] = field(default_factory=dict)  # by name
    asynchronous: Mapping[str, Fields] = field(default_factory=dict)  # of [asynchronous], for an algorithm by name
    run: Fields = field(default_factory=dict)
    runs: Mapping[str, Fields] = field(default_factory=lambda: EVERYONE)  # of [run], for an algorithm by name
    networks: Mapping[str, Fields] = field(default_factory=dict)  # of the task, for a network that is asked for

    def of_task(self, network: Any) -> dict[str, Any]:
        return {**self.task, **next((fields for name, fields in self.networks.items() if name == network), {})}

    def of(self, algorithm: str) -> dict[str, Any]:
        return merged(self.shared, self.algorithms.get(algorithm, {}))

    def of_asynchronous(self, algorithm: str) -> dict[str, Any]:
        return dict(self.asynchronous.get(algorithm, {}))

    def of_run(self, algorithm: str) -> dict[str, Any]:
        return {**self.run, **self.runs.get(algorithm, {})}


def merged(first: Fields, second: Fields) -> dict[str, Any]:
    """Both tables' fields, the second's before the first's. Where both have a table, one in `second` that has no name
    changes the first's and leaves the rest of it as it is."""
    out = dict(first)
    for name, value in second.items():
        changes = isinstance(value, Mapping) and not {"name", "schedule"} & value.keys()
        out[name] = merged(out[name], value) if changes and isinstance(out.get(name), Mapping) else value
    return out


def each(algorithms: Iterable[str], fields: Fields) -> dict[str, Fields]:
    """A table with these fields for each of the algorithms."""
    return dict.fromkeys(algorithms, fields)


def randomly(table: Mapping[str, Fields]) -> dict[str, Fields]:
    """The table with products of random length for each method whose paper has them, if its fields name no inverse."""
    lengths = {name: {"inverse": RANDOM_LENGTHS[name]} if name in RANDOM_LENGTHS else {} for name in table}
    return {name: {**lengths[name], **fields} for name, fields in table.items()}


def xyv(x: float, y: float, v: float) -> dict[str, float]:
    """Three step sizes in the spec's form."""
    return {"x": x, "y": y, "v": v}
