"""From a spec to the objects that it describes."""

from typing import Any, NamedTuple

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.errors import ConfigurationError, FedbilevelError
from fedbilevel.data import DataError
from fedbilevel.engines.engine import check_cohort
from fedbilevel.engines.local import Local
from fedbilevel.experiments.spec import Named, Spec, fields_of
from fedbilevel.tasks import TASKS, Task


class Parts(NamedTuple):
    """What `solve` needs."""

    task: Task
    algorithm: Any
    engine: Local


def build(spec: Spec) -> Parts:
    """Load the data and make task, algorithm and engine.

    Raises:
        ConfigurationError, DataError: some value is not allowed; the message names it.
    """
    algorithm = algorithm_of(spec)
    engine = Local(chunk=spec.engine.chunk, devices=spec.engine.devices, stream=spec.engine.stream)
    task = _made("task", TASKS, spec.task, fields_of(spec.task.name, spec.algorithm.name)["task"])
    check_cohort(spec.run.cohort, len(task.clients))
    return Parts(task, algorithm, engine)


def algorithm_of(spec: Spec) -> Any:
    """The algorithm alone, which needs no data."""
    fields = fields_of(spec.task.name, spec.algorithm.name)["algorithm"]
    return _made("algorithm", ALGORITHMS, spec.algorithm, fields)


def _made(kind: str, registry: Any, named: Named, fields: Any) -> Any:
    values = {name: fields[name].build(value) for name, value in named.fields.items()}
    try:
        return registry[named.name](**values)
    except (FedbilevelError, DataError):
        raise
    except (ValueError, TypeError, IndexError, OverflowError) as error:  # NumPy's, about sizes that make no sense
        raise ConfigurationError(f"{kind} {named.name} cannot be made with these values: {error}") from error
