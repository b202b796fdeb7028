"""The papers' problems, ready to run."""

from collections.abc import Callable

from fedbilevel.tasks.hyper_representation import hyper_representation
from fedbilevel.tasks.quadratic import quadratic
from fedbilevel.tasks.task import Task

TASKS: dict[str, Callable[..., Task]] = {"hyper_representation": hyper_representation, "quadratic": quadratic}
"""Every task by its command-line name."""

__all__ = ["TASKS", "Task", "hyper_representation", "quadratic"]
