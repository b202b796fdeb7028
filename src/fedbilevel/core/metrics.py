"""Define metrics: the direction in which a metric is better, and the form in which its values are written."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbilevel.core.errors import ConfigurationError, explain_misspelt, require
from fedbilevel.core.tree import PyTree

MetricFunction = Callable[[PyTree, PyTree], Any]
"""A function from (x, y) to one number: a plain function or a `Metric`."""


@explain_misspelt
@dataclass(frozen=True)
class Metric:
    """Hold the function of a metric, and whether a larger value is better. A call evaluates the function.

    A plain function needs no `Metric` if a smaller value is better, as for losses and errors. A metric with
    larger_is_better=None does not judge a run: it selects no best row, and its growth is no sign of divergence.

    Args:
        function: a function from (x, y) to one number; for a per-client metric, from (x, y, batch) to one number.
        larger_is_better: whether a larger value is better; None: neither direction is, for example for a norm or a
            count. A per-client metric must say True or False, since the worst and the best client are measured.
    """

    function: Callable[..., Any]
    larger_is_better: bool | None

    def __post_init__(self) -> None:
        require(callable(self.function), "Metric.function", self.function, "a function (x, y) or (x, y, batch)")
        fits = isinstance(self.larger_is_better, bool | None)
        require(fits, "Metric.larger_is_better", self.larger_is_better, "True, False or None (neither is better)")

    def __call__(self, *given: PyTree) -> Any:
        return self.function(*given)


def require_direction(field: str, got: object, optional: bool = False) -> None:
    """Raise ConfigurationError unless `got` is a boolean, or None where that is allowed."""
    fits = isinstance(got, bool) or (optional and got is None)
    require(fits, field, got, "True, False or None (as the metric says)" if optional else "True or False")


def directions(metrics: Mapping[str, Any]) -> dict[str, bool]:
    """Return, for each metric, whether a larger value is better. For a plain function, a smaller value is better.

    Metrics with larger_is_better=None are left out.

    Raises:
        ConfigurationError: the name of a plain function contains "accuracy", so that a larger value may be better.
    """
    larger_by_name = {}
    for name, metric in metrics.items():
        require(isinstance(name, str), "the name of a metric", name, "a text")
        larger = getattr(metric, "larger_is_better", None)
        if isinstance(metric, Metric) and larger is None:
            continue
        if "accuracy" in name and larger is None:
            remedy = "write fb.Metric(function, larger_is_better=True), or False"
            message = f"the metric {name} does not say whether a larger value is better: {remedy}"
            raise ConfigurationError(path=f"metric {name}", got="a plain function", allowed="a Metric", message=message)
        larger_by_name[name] = bool(larger)
    return larger_by_name


def larger_is_better(name: str, declared: bool | None = None) -> bool:
    """Return whether a larger value of a metric is better. If `declared` is None, this is true only for accuracies."""
    return in_percent(name) if declared is None else declared


def in_percent(metric: str) -> bool:
    """Return whether a metric is written in percent: the part of its name before a dot is or ends in "accuracy"."""
    return re.search(r"(^|_)accuracy($|\.)", metric) is not None


def metric_of(column: str) -> str:
    """Return the metric of a column: "fit" for the column "fit.worst" of a per-client metric."""
    return re.sub(r"\.(mean|worst|best|p\d0)$", "", column)


def best(values: Sequence[float], larger: bool) -> float:
    """Return the best of some values: the largest or the smallest."""
    return max(values) if larger else min(values)


def text(metric: str, value: float | None) -> str:
    """Return a value as text: accuracies in percent, other values with four digits."""
    if value is None or math.isnan(value):
        return "–"
    return f"{100 * value:.2f} %" if in_percent(metric) else f"{value:.4g}"


def mean_and_sd(metric: str, mean: float | None, sd: float | None) -> str:
    """Return a mean as text, with its standard deviation if there is one."""
    return text(metric, mean) if sd is None else f"{text(metric, mean).removesuffix(' %')} ± {text(metric, sd)}"
