"""What every task provides."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedbilevel.core.client import Clients
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree


@dataclass(frozen=True)
class Task:
    """A problem with its population, a start, and what is worth measuring.

    `metrics` are functions (x, y) -> scalar; the first is the one that plots and progress bars show.
    """

    name: str
    problem: Problem
    clients: Clients
    x0: PyTree
    y0: PyTree
    metrics: Mapping[str, Callable[[PyTree, PyTree], Any]] = field(default_factory=dict)
