"""What is measured, and how a metric is read: which way is better, and how its values are written."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbilevel.core.errors import ConfigurationError, explain_misspelt, require
from fedbilevel.core.tree import PyTree

MetricFunction = Callable[[PyTree, PyTree], Any]
"""(x, y) -> one number: a plain function, or a Metric."""


@explain_misspelt
@dataclass(frozen=True)
class Metric:
    """A metric that says which way is better; called, it is its function.

    Args:
        function: (x, y) -> one number; of each client (x, y, batch) -> one number.
        larger_is_better: whether a larger value is a better one; None: neither is, as of a norm or a count that is only
            looked at, and of a preference H that has to rise while x leaves a start that fits no data. A metric of
            single clients says True or False, since the worst and the best client are measured.

    A plain function needs no Metric where a smaller value is better, as of losses and errors. By a metric that says
    None no run is judged: it chooses no best row, and that it has grown is no sign that a run diverges.
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
    """Of each metric whether a larger value is better, as it says; of a plain function a smaller one is.

    A metric that says None is left out.

    Raises:
        ConfigurationError: the name of a plain function has "accuracy" in it, and so may mean the contrary.
    """
    found = {}
    for name, metric in metrics.items():
        require(isinstance(name, str), "the name of a metric", name, "a text")
        larger = getattr(metric, "larger_is_better", None)
        if isinstance(metric, Metric) and larger is None:
            continue
        if "accuracy" in name and larger is None:
            said = "does not say whether a larger value is better: write fb.Metric(function, larger_is_better=True)"
            raise ConfigurationError(f"the metric {name} {said}, or False")
        found[name] = bool(larger)
    return found


def larger_is_better(name: str, declared: bool | None = None) -> bool:
    """Whether a larger value of a metric is better: as declared; in a history that does not say, an accuracy's."""
    return in_percent(name) if declared is None else declared


def in_percent(metric: str) -> bool:
    """Whether values are written in per cent: of metrics called accuracy, something_accuracy, or a part of these."""
    return re.search(r"(^|_)accuracy($|\.)", metric) is not None


def metric_of(column: str) -> str:
    """The metric that a column is of: of the "fit.worst" of a per-client metric "fit"."""
    return re.sub(r"\.(mean|worst|best|p\d0)$", "", column)


def best(values: Sequence[float], larger: bool) -> float:
    """The best of some values."""
    return max(values) if larger else min(values)


def text(metric: str, value: float | None) -> str:
    """A value for people: accuracies in per cent, the rest in four digits."""
    if value is None or math.isnan(value):
        return "–"
    return f"{100 * value:.2f} %" if in_percent(metric) else f"{value:.4g}"


def mean_and_sd(metric: str, mean: float | None, sd: float | None) -> str:
    """A mean with its standard deviation, where there is one, for people."""
    return text(metric, mean) if sd is None else f"{text(metric, mean).removesuffix(' %')} ± {text(metric, sd)}"
