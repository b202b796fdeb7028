"""What is read off a row of a history, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedbilevel.experiments import COSTS, costs_of, in_percent

UNITS = {"megabytes": "MB", "evaluations": "gradients and hvps", "gflop": "GFLOP", "time": "virtual seconds"}
"""Of costs whose names are no unit."""
POINTS = "percentage points"
DIGITS = 5  # of a number that is kept


def value_in(row: Mapping[str, float], name: str) -> float | None:
    """A cost by its name in COSTS, or else a column of the row; None where the row lacks it."""
    return costs_of(row).get(name, row.get(name))


def text(name: str, value: float | None) -> str:
    """A value of a metric or a cost for people, in three digits; of shares in per cent, with one decimal."""
    if value is None or not math.isfinite(value):
        return "–"
    digits = f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"
    digits = f"{100 * value:.1f}" if in_percent(name) else digits
    return digits.replace("-", "−")


def axis(name: str) -> str:
    """The words of an axis."""
    return COSTS.get(name) or name.replace("_", " ") + (" (%)" if in_percent(name) else "")


def rounded(found: Any) -> Any:
    """A record of dicts and lists with every fraction in it in DIGITS digits; None where it is not finite."""
    if isinstance(found, dict):
        return {name: rounded(one) for name, one in found.items()}
    if isinstance(found, list | tuple):
        return [rounded(one) for one in found]
    if not isinstance(found, float):
        return found
    return float(f"{found:.{DIGITS}g}") if math.isfinite(found) else None
