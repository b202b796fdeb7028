"""Rows of a comparison that went wrong, in words: their numbers say little of the method."""

from __future__ import annotations

from collections.abc import Mapping

from fedbilevel.core.metrics import text

FAR = 1e3
"""An error that is more than so many times the least one is far from it."""


def doubts(metric: str, ends: Mapping[str, tuple[float, float]], larger_is_better: bool) -> list[str]:
    """A sentence for each row that ends worse than it began, or, where small is good, far above the best.

    Args:
        ends: the metric at the start and at the end, by the name of the row.
    """
    found, best = [], min((end for _, end in ends.values()), default=0.0)
    for name, (start, end) in ends.items():
        if (end < start) if larger_is_better else (end > start):
            worse = f"{text(metric, end)} after {text(metric, start)}"
            found.append(f"{name} ends worse than it began, {worse}: it diverges, or its steps are too large")
        elif not larger_is_better and end > FAR * best > 0:
            far = f"{text(metric, end)}, more than {FAR:,.0f} times the best"
            found.append(f"{name} ends at {far}: other steps may help, or the method is biased on this problem")
    return found
