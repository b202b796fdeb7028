"""From a spec to the objects that it describes."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from fedbilevel.algorithms.parts.asynchronous import Asynchronous
from fedbilevel.algorithms.parts.submodels import Submodels
from fedbilevel.core.algorithm import Algorithm, check_solves
from fedbilevel.core.errors import ConfigurationError, FedbilevelError, require
from fedbilevel.data import DataError
from fedbilevel.engines.engine import Engine, check_cohort
from fedbilevel.engines.local.engine import Local
from fedbilevel.experiments.loader import algorithm_class, task_maker
from fedbilevel.experiments.names import label
from fedbilevel.experiments.spec import Component, Spec, SubmodelsPlan, fields_of
from fedbilevel.tasks import Task


class Experiment(NamedTuple):
    """The objects that a spec describes, which are the arguments of `solve`."""

    task: Task
    algorithm: Algorithm
    engine: Engine


def build(spec: Spec, task: Task | None = None) -> Experiment:
    """Load the data and make task, algorithm and engine.

    Args:
        spec: see `resolve`.
        task: the spec's, where the caller has made it already.

    Raises:
        ConfigurationError, DataError: some value is not allowed, or the algorithm is not made for the task's problem.
    """
    algorithm = algorithm_of(spec)
    engine = Local(**asdict(spec.engine), clock=spec.clock)
    task = task_of(spec) if task is None else task
    require(bool(task.metrics), "Task.metrics", dict(task.metrics), "one function (x, y) -> number by name, or more")
    check_solves(algorithm, task.problem)
    _check_participants(spec, algorithm, len(task.clients))
    return Experiment(task, algorithm, engine)


def _check_participants(spec: Spec, algorithm: Algorithm, population: int) -> None:
    """Refuse a cohort, a clock or a number of awaited replies that does not fit the number of clients."""
    cohort = check_cohort(spec.run.cohort, population)
    available = population - spec.clock.never_available(population).size
    whole = not algorithm.needs_everyone or cohort == population
    require(whole, "run.cohort", cohort, f"none: {label(spec.algorithm.name)} needs all clients in every round")
    count = algorithm.waits_for
    few = f"at most {available}, the number of clients that are ever available"
    require(count is None or count <= available, "wait_for", count, few)


def algorithm_of(spec: Spec) -> Algorithm:
    """The algorithm alone, which needs no data."""
    fields = fields_of(spec.task.name, spec.algorithm.name)["algorithm"]
    algorithm: Algorithm = _made("algorithm", algorithm_class(spec.algorithm.name), spec.algorithm, fields)
    if spec.submodels != SubmodelsPlan():
        algorithm = Submodels(algorithm, **asdict(spec.submodels))
    waits = spec.asynchronous.wait_for is None
    return algorithm if waits else Asynchronous(algorithm, **asdict(spec.asynchronous))


def task_of(spec: Spec) -> Task:
    """The task alone, all its samples with one client if they are to be pooled."""
    fields = fields_of(spec.task.name, spec.algorithm.name)["task"]
    task: Task = _made("task", task_maker(spec.task.name), spec.task, fields)
    return replace(task, clients=task.population.pooled()) if spec.run.pooled else task


def _made(kind: str, make: Callable[..., Any], named: Component, fields: Any) -> Any:
    values = {name: fields[name].build(value) for name, value in named.fields.items()}
    try:
        return make(**values)
    except (FedbilevelError, DataError):
        raise
    except (ValueError, TypeError, IndexError, OverflowError) as error:  # NumPy's, about sizes that make no sense
        raise ConfigurationError(f"{kind} {label(named.name)} cannot be made with these values: {error}") from error
