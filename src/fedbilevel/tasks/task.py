"""The type of all tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedbilevel.core.client import Clients, RemoteClients
from fedbilevel.core.errors import ConfigurationError, is_number, require
from fedbilevel.core.metrics import MetricFunction
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree

Floats = np.ndarray[Any, np.dtype[Any]]
"""Floating arrays of NumPy, whose shapes the docstrings say."""

LocalSteps = Mapping[str, int] | Sequence[int] | None
"""How many local steps clients make: one number for each, {"low": …, "high": …} to draw from; see `Clients`."""


@dataclass(frozen=True)
class Task:
    """A problem with its population, a start, and what is worth measuring.

    `metrics` are functions (x, y) -> scalar, which `Metric` says the better way of; the first is the one that plots and
    progress bars show.
    `metrics_per_client` are functions (x, y, batch) -> scalar, see `fedbilevel.solve`. As the server of a
    federation sees it, its clients are `RemoteClients`.
    """

    name: str
    problem: Problem
    clients: Clients | RemoteClients
    x0: PyTree
    y0: PyTree
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)
    metrics_per_client: Mapping[str, Any] = field(default_factory=dict)

    @property
    def population(self) -> Clients:
        """The clients with their samples; a ConfigurationError where these are elsewhere."""
        if not isinstance(self.clients, Clients):
            raise ConfigurationError(
                f"the samples of task {self.name}'s clients are elsewhere, and cannot be looked at"
            )
        return self.clients


def scattered(
    rng: np.random.Generator, coefficients: Mapping[str, Floats], vector: str, count: int, noise: float
) -> dict[str, Floats]:
    """`count` samples of a client that has these coefficients, the one called `vector` scattered about its own."""
    rows = {name: np.repeat(own[None], count, axis=0) for name, own in coefficients.items()}
    return {**rows, vector: rows[vector] + noise * rng.normal(size=rows[vector].shape)}


def client_means(clients: Clients) -> dict[str, Floats]:
    """Average each array of samples, by its name, over each client's samples, in double precision: (clients, …)."""
    rows = [clients.outer.row(i) | clients.inner.row(i) for i in range(len(clients))]
    return {name: np.array([np.mean(row[name], axis=0, dtype=float) for row in rows]) for name in rows[0]}


def in_turn(capacities: Sequence[float], clients: int) -> list[float] | None:
    """Each client's capacity for `Clients`: those given, dealt out in turn; None, all of the model, where none are."""
    several = isinstance(capacities, Sequence) and not isinstance(capacities, str)
    require(several, "capacities", capacities, "a list of numbers above 0 and at most 1")
    if not len(capacities):
        return None
    require(
        all(is_number(one) and 0 < one <= 1 for one in capacities),
        "capacities",
        capacities,
        "above 0 and at most 1, each",
    )
    require(len(capacities) <= clients, "capacities", capacities, f"at most {clients}, the number of clients")
    return [capacities[i % len(capacities)] for i in range(clients)]
