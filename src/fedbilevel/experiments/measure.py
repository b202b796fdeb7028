"""What is read off the metrics of runs: milestones and what it cost to reach them, means and spreads."""

import math
from collections.abc import Sequence

from fedbilevel.core.metrics import in_percent, text
from fedbilevel.engines.curves import time_of
from fedbilevel.engines.history import History

LEVELS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.99)
TINY = [10.0**-power for power in range(1, 13)]


def levels(metric: str, larger: bool) -> Sequence[float]:
    """Milestones, each harder than the one before; none of what is to grow and is no accuracy: its scale is unknown."""
    if larger:
        return LEVELS if in_percent(metric) else ()
    return TINY


def cost_to(history: History, metric: str, level: float, cost: str = "exchanges") -> float | None:
    """A column of the history where a metric was first seen at least as good as a level, or None."""
    larger = history.larger_is_better(metric)
    for row in history.rows:
        if metric in row and (row[metric] >= level if larger else row[metric] <= level):
            return time_of(row) if cost == "time" else row[cost]
    return None


def gflop(flops: float) -> str:
    """Floating-point operations in thousand millions, for people, in three digits or more."""
    return f"{flops / 1e9:,.0f}" if flops >= 1e11 else f"{flops / 1e9:.3g}"


def mean_and_spread(metric: str, values: Sequence[float]) -> str:
    """Mean ± sample standard deviation, for people."""
    mean = sum(value / len(values) for value in values)
    if len(values) == 1:
        return text(metric, mean)
    deviation = math.hypot(*(value - mean for value in values))  # without squares, which may be too large for a float
    spread = deviation / math.sqrt(len(values) - 1)
    return f"{text(metric, mean).removesuffix(' %')} ± {text(metric, spread)}"
