"""Metrics of (x, y), compiled."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from fedbilevel.core.errors import NonFiniteError, require
from fedbilevel.core.functions import explained, require_function
from fedbilevel.core.metrics import MetricFunction
from fedbilevel.core.tree import PyTree, all_finite, join
from fedbilevel.engines.history import Row


class Evaluation:
    """Functions of (x, y) by name; the arrays they close over become arguments, not constants of the program."""

    def __init__(self, metrics: Mapping[str, MetricFunction], x_fixed: PyTree, y_fixed: PyTree) -> None:
        for name, metric in metrics.items():
            require_function(f"metrics[{name!r}]", metric, "x, y", " -> one number")
        self.metrics, self.fixed = metrics, (x_fixed, y_fixed)
        self.compiled: dict[str, Callable[[PyTree, PyTree], Any]] = {}

    def __call__(self, round: int, x: PyTree, y: PyTree) -> Row:
        """The row of metrics; a value that is not finite stops the run."""
        row: Row = {}
        for name in self.metrics:
            if name not in self.compiled:
                self.compiled[name] = self.compile(name, x, y)
            value = self.compiled[name](x, y)
            if not all_finite(value):
                raise NonFiniteError(f"round {round}, evaluation: {name} is {float(value)}")
            row[name] = float(value)
        return row

    def compile(self, name: str, x: PyTree, y: PyTree) -> Callable[[PyTree, PyTree], Any]:
        metric, (x_fixed, y_fixed) = self.metrics[name], self.fixed
        with explained(f"metrics[{name!r}]", x=x, y=y):
            closed = jax.make_jaxpr(lambda x, y: metric(join(x, x_fixed), join(y, y_fixed)))(x, y)
        shapes = [aval.shape for aval in closed.out_avals]
        require(shapes == [()], f"the value of metrics[{name!r}]", shapes, "one number")

        @jax.jit
        def run(constants: list[Any], x: PyTree, y: PyTree) -> Any:
            return jax.core.eval_jaxpr(closed.jaxpr, constants, *jax.tree.leaves((x, y)))[0]

        constants = jax.device_put(closed.consts)
        return lambda x, y: run(constants, x, y)
