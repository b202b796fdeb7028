"""The type of all tasks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedbilevel.core.card import Card, Shown, described, listed
from fedbilevel.core.client import Clients, RemoteClients, with_own
from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.metrics import MetricFunction
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree

Floats = np.ndarray[Any, np.dtype[Any]]
"""Floating-point arrays of NumPy. Docstrings give the shapes."""
OBJECTS = 2000  # bytes of a client's dictionaries and arrays, beside its numbers


@dataclass(frozen=True, repr=False)
class Task(Shown):
    """Hold a problem with its clients, a starting point and metrics.

    `metrics` are functions (x, y) -> scalar; where larger is better, `Metric` says so. Plots and progress bars show the
    first. `metrics_per_client` are functions (x, y, batch) -> scalar, see `fedbilevel.solve`. On the server of a
    federation `clients` are `RemoteClients`.
    """

    name: str
    problem: Problem
    clients: Clients | RemoteClients
    x0: PyTree
    y0: PyTree
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)
    metrics_per_client: Mapping[str, Any] = field(default_factory=dict)

    def card(self) -> Card:
        lines = {
            "problem": self.problem.card().title,
            "clients": self.clients.card().title,
            "x0": described(self.x0),
            "y0": described(self.y0),
            "metrics": listed([*self.metrics, *self.metrics_per_client]),
        }
        return Card(f"Task {self.name}", lines)

    @property
    def population(self) -> Clients:
        """Return the clients with their samples. ConfigurationError where the samples are on other machines."""
        if not isinstance(self.clients, Clients):
            raise ConfigurationError(
                f"the samples of task {self.name}'s clients are on other machines and cannot be read here"
            )
        return self.clients

    def with_own(self, **numbers: Any) -> Task:
        """Return the same task whose clients have these `local_steps`, `own` and `capacity`: see `Clients`."""
        return replace(self, clients=with_own(self.clients, **numbers))


def require_memory(each: float, **count: int) -> None:
    """Refuse a number of clients, or of other things, that do not fit into this machine's memory.

    Args:
        each: how many numbers in double precision one of them has; they are in memory twice when clients are packed.
        count: how many there are, by the name of the argument.
    """
    ((name, got),) = count.items()
    if hasattr(os, "sysconf"):  # not on Windows
        memory, size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 16 * each + OBJECTS
        why = f"each takes {size:,.0f} bytes, and this machine has {memory / 1e9:.3g} GB"
        if size > memory:
            raise ConfigurationError(f"not one of {name} fits into memory: {why}; lower samples or dimensions")
        require(got * size <= memory, name, got, f"at most {int(memory / size):,}: {why}")


def scattered(
    rng: np.random.Generator, coefficients: Mapping[str, Floats], vector: str, count: int, noise: float
) -> dict[str, Floats]:
    """Draw `count` samples of a client: its coefficients, with normal noise added to those called `vector`."""
    rows = {name: np.repeat(own[None], count, axis=0) for name, own in coefficients.items()}
    return {**rows, vector: rows[vector] + noise * rng.normal(size=rows[vector].shape)}


def client_means(clients: Clients) -> dict[str, Floats]:
    """Average each array of samples, by its name, over each client's samples, in double precision: (clients, …)."""
    rows = [clients.outer.row(i) | clients.inner.row(i) for i in range(len(clients))]
    return {name: np.array([np.mean(row[name], axis=0, dtype=float) for row in rows]) for name in rows[0]}
