"""The type of presets."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbilevel.core.tables import Fields, merged

HESSIAN_INVERTING = ("fednest", "fednest-sgd", "lfednest", "fedmbo", "rabo", "rafbo")
OWN_HYPERGRADIENTS = ("lfednest", "rabo", "rafbo")
SINGLE_LOOP = ("simfbo", "shrofbo")
FEDBIO = ("fedbio", "fedbioacc")
"""Methods with the same fields."""
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


def each(algorithms: Iterable[str], fields: Fields) -> dict[str, Fields]:
    """A table with these fields for each of the algorithms."""
    return dict.fromkeys(algorithms, fields)


def local_steps(count: int) -> Fields:
    """τ of every method: a field of its own, or one of its inner rounds."""
    return {"local_steps": count, **inner(local_steps=count)}


def inner(**fields: float) -> Fields:
    """Fields of the inner rounds."""
    return {"inner": fields}


def neumann(**fields: float | str) -> Fields:
    """Fields of the Neumann series."""
    return {"hypergradient": {"solver": fields}}


def system_steps(lr: float) -> Fields:
    """AFBO's hypergradient by steps on a v kept by the server, of that size."""
    return {"hypergradient": {"name": "steps", "lr": lr}}


RANDOM_LENGTHS: Mapping[str, Fields] = {
    **dict.fromkeys(("fednest", "fednest-sgd", "lfednest"), neumann(sampling="random")),
    "fedmbo": neumann(sampling="random_per_client"),
    "aggitd": {"sampling": "random"},
}
"""The products of random length of the papers. Their variance is small where N·s·ℓ is."""
TERMS = neumann(terms=5)
"""Fewer than the methods' default: a short series, with which these presets' steps were chosen."""


def randomly(table: Mapping[str, Fields]) -> dict[str, Fields]:
    """The table with products of random length for each method whose paper has them, if its fields say no other."""
    return {name: merged(RANDOM_LENGTHS.get(name, {}), fields) for name, fields in table.items()}


def xyv(x: float, y: float, v: float) -> dict[str, float]:
    """Three step sizes in the spec's form."""
    return {"x": x, "y": y, "v": v}
