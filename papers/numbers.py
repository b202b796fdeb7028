"""Read values from a row of a history, and write numbers as texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedbilevel.experiments import COSTS, costs_of, in_percent

UNITS = {"megabytes": "MB", "evaluations": "gradients and hvps", "gflop": "GFLOP", "time": "virtual seconds"}
"""The units of costs whose names are not units themselves."""
LABELS = {"time": "virtual time (seconds)", "x_distance": "squared distance ‖x − x*‖²"}
"""The labels of axes that are clearer than the names of the metrics or costs."""
POINTS = "percentage points"
DIGITS = 5  # the number of significant digits that are stored


def value_in(row: Mapping[str, float], name: str) -> float | None:
    """Return a cost by its name in COSTS, or else a column of a row; None if the row lacks it."""
    return costs_of(row).get(name) if name in COSTS else row.get(name)


def text(name: str, value: float | None) -> str:
    """Return a value of a metric or a cost as a text, with three digits. Shares are in percent, with one decimal."""
    if value is None or not math.isfinite(value):
        return "–"
    digits = f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    digits = f"{100 * value:.1f}" if in_percent(name) else digits
    return digits.replace("-", "−")


def axis(name: str) -> str:
    """Return the label of an axis."""
    return LABELS.get(name) or COSTS.get(name) or name.replace("_", " ") + (" (%)" if in_percent(name) else "")


def rounded(found: Any) -> Any:
    """Return nested dicts and lists with fractions rounded to DIGITS digits.

    Numbers that are not finite become None.
    """
    if isinstance(found, dict):
        return {name: rounded(one) for name, one in found.items()}
    if isinstance(found, list | tuple):
        return [rounded(one) for one in found]
    if not isinstance(found, float):
        return found
    return float(f"{found:.{DIGITS}g}") if math.isfinite(found) else None
