"""Describe what a window onto a run, a federation or a sweep shows, in the terminal as on a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbilevel.core.errors import FedbilevelError
from fedbilevel.core.metrics import text
from fedbilevel.experiments.tables import Table

STATES = ("running", "failed", "idle", "waiting", "finished")
"""Idle: nothing plays the run, which has begun and not ended. Waiting: it has not begun."""
UNLIKE = 50  # above this ratio of its values a metric is drawn by its logarithm


@dataclass(frozen=True)
class MetricTrace:
    """Hold the values of a metric so far, in the order in which they were measured."""

    name: str
    values: Sequence[float]

    @property
    def last(self) -> str:
        """Return the last value as a text, which is NaN or inf if that is the value."""
        return self.in_words(self.values[-1])

    @property
    def finite(self) -> list[float]:
        """Return the values but for NaN and infinities."""
        return [value for value in self.values if math.isfinite(value)]

    @property
    def logarithmic(self) -> bool:
        """Tell whether the curve is that of the logarithm, since the values are far apart."""
        return bool(self.finite) and min(self.finite) > 0 and max(self.finite) > UNLIKE * min(self.finite)

    @property
    def span(self) -> str:
        """Say between which values the metric lies, on which scale, and how many values are not finite."""
        parts = [f"{self.in_words(min(self.finite))} to {self.in_words(max(self.finite))}"] if self.finite else []
        parts += ["logarithmic"] if self.logarithmic else []
        others = len(self.values) - len(self.finite)
        return ", ".join([*parts, *([f"{others} not finite"] if others else [])])

    def in_words(self, value: float) -> str:
        """Return a value as a text; core.metrics would write a dash for NaN."""
        return text(self.name, value) if math.isfinite(value) else str(value).replace("nan", "NaN")

    def heights(self, most: int) -> list[float | None]:
        """Return at most so many heights in [0, 1], each the last value of a stretch; None: one that is not finite.

        A value that is not finite represents its stretch wherever it lies in it, so that none is hidden.
        """
        size = -(-len(self.values) // most)
        parts = [self.values[start : start + size] for start in range(0, len(self.values), size)]
        chosen = [next((value for value in part if not math.isfinite(value)), part[-1]) for part in parts]
        scaled = [math.log(one) if self.logarithmic and math.isfinite(one) else one / 2 for one in chosen]
        finite = [value for value in scaled if math.isfinite(value)]  # halves: a difference may overflow
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        level = 0.5 if low == high else None
        return [(level or (one - low) / (high - low)) if math.isfinite(one) else None for one in scaled]


@dataclass(frozen=True)
class Snapshot:
    """Hold what a window shows.

    Args:
        title: what is computed.
        state: one of STATES.
        why: more about the state.
        done, whole: how far the run is, in its budget's cost; whole = 0 if that is not known.
        amount: both in words.
        facts: lines by name.
        traces: of the metrics, then of the exchanges.
        tables: clients that are absent, or the runs of a sweep.
        notes: what cannot be read.
        directions: metric -> whether a larger value is better, once the run has ended.
        error: with which a run has ended.
        fields: the sections of a run's spec.
    """

    title: str
    state: str
    why: str = ""
    done: float = 0.0
    whole: float = 0.0
    amount: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    traces: Sequence[MetricTrace] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    directions: Mapping[str, bool] = field(default_factory=dict)
    error: FedbilevelError | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Tell whether nothing more will come."""
        return self.state in ("finished", "failed")

    def value(self, metric: str) -> float | None:
        """Return the last value of a metric; None if there is none."""
        return next((trace.values[-1] for trace in self.traces if trace.name == metric), None)

    def last(self, metric: str) -> str:
        """Return the last value of a metric as a text; a dash if there is none."""
        return next((trace.last for trace in self.traces if trace.name == metric), "–")
