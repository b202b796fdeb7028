"""How a metric is read, by its name: which way is better, and how its values are written."""

import math
from collections.abc import Sequence


def larger_is_better(metric: str) -> bool:
    """Accuracies are to grow; errors and losses to fall."""
    return "accuracy" in metric


def best(metric: str, values: Sequence[float]) -> float:
    """The best of some values of a metric."""
    return max(values) if larger_is_better(metric) else min(values)


def text(metric: str, value: float | None) -> str:
    """A value for people: accuracies in per cent, the rest in four digits."""
    if value is None or math.isnan(value):
        return "–"
    return f"{100 * value:.2f} %" if larger_is_better(metric) else f"{value:.4g}"
