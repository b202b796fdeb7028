"""Define the class of all tasks, and functions that several tasks use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedbilevel.core.card import Card, Shown, described, listed
from fedbilevel.core.client import Clients, RemoteClients, with_own
from fedbilevel.core.errors import ConfigurationError, DataWarning, require, warn
from fedbilevel.core.metrics import MetricFunction
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree

Floats = np.ndarray[Any, np.dtype[Any]]
"""Floating-point arrays of NumPy. Docstrings give the shapes."""
SAME = 1e-6  # weights are proportional to numbers of samples if their quotients differ by at most this share
OBJECTS = 2000  # the bytes of the Python objects of a client's samples, without the numbers


@dataclass(frozen=True, repr=False)
class Task(Shown):
    """A problem with its clients, a starting point and metrics.

    Args:
        name: the name of the task.
        problem: the losses.
        clients: the clients with their samples; on the server of a federation `RemoteClients`, without samples.
        x0, y0: the starting values of x and y; y0 is None for a problem without y.
        metrics: functions (x, y) -> number, by their names. Use `Metric` if a larger value is better. Plots and
            progress bars show the first metric.
        metrics_per_client: functions (x, y, batch) -> number, by their names, which each client evaluates on its own
            samples; see `fedbilevel.solve`.
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
        """Return the clients with their samples.

        Raises:
            ConfigurationError: the samples are on other machines.
        """
        if not isinstance(self.clients, Clients):
            raise ConfigurationError(
                f"the clients of task {self.name} have their samples on other machines: they cannot be read here"
            )
        return self.clients

    def with_own(self, **numbers: Any) -> Task:
        """Return this task with changed `local_steps`, `own` or `capacity` of its clients; see `Clients`."""
        return replace(self, clients=with_own(self.clients, **numbers))

    def pooled(self) -> Task:
        """Return this task with a single client that has all samples; warn if that is another problem."""
        clients, why = self.population, ""
        for name, rows in (("outer", clients.outer), ("inner", clients.inner)):
            if np.ptp(clients.weights / rows.size) > SAME * np.max(clients.weights / rows.size):
                why = f"the clients' weights are not proportional to their numbers of {name} samples"
        if self.problem.whole:
            why = "a loss takes all samples of a client at once"
        if why and len(clients) > 1:
            warn(DataWarning(f"the pooled run solves another problem than the clients together: {why}"))
        return replace(self, clients=clients.pooled())


def require_memory(each: float, **count: int) -> None:
    """Refuse a number of clients, or of other objects, that does not fit into the memory of this machine.

    Args:
        each: the number of double-precision numbers in one object. All numbers are in memory twice while clients are
            packed.
        count: the number of objects, by the name of the argument that has it.

    Raises:
        ConfigurationError: the objects do not fit into memory.
    """
    ((name, got),) = count.items()
    if hasattr(os, "sysconf"):  # not on Windows
        memory, size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), 16 * each + OBJECTS
        why = f"each takes {size:,.0f} bytes, and this machine has {memory / 1e9:.3g} GB"
        if size > memory:
            raise ConfigurationError(f"{name} do not fit into memory, not even 1: {why}; lower samples or dimensions")
        require(got * size <= memory, name, got, f"at most {int(memory / size):,}: {why}")


def scattered(
    rng: np.random.Generator, coefficients: Mapping[str, Floats], vector: str, count: int, noise: float
) -> dict[str, Floats]:
    """Draw `count` samples of a client.

    A sample contains the client's coefficients. Normal noise is added to one of them, whose name is `vector`.
    """
    rows = {name: np.repeat(value[None], count, axis=0) for name, value in coefficients.items()}
    return {**rows, vector: rows[vector] + noise * rng.normal(size=rows[vector].shape)}


def client_means(clients: Clients) -> dict[str, Floats]:
    """Return, for each array by its name, the means over each client's samples, in double precision.

    The means have the shape (clients, …).
    """
    rows = [clients.outer.row(i) | clients.inner.row(i) for i in range(len(clients))]
    return {name: np.array([np.mean(row[name], axis=0, dtype=float) for row in rows]) for name in rows[0]}
