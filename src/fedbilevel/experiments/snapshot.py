"""Define what `fedbilevel watch` shows of a run, a federation or a sweep at a moment, on a terminal or a web page."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from fedbilevel.core.errors import FedbilevelError
from fedbilevel.core.metrics import text
from fedbilevel.experiments.tables import Table
from fedbilevel.wording import in_a_line

STATES = ("running", "failed", "idle", "waiting", "finished")
"""The states of a run.

"idle": it has begun and not ended, but no process is running it. "waiting": it has not begun.
"""
INTERVAL, SHARE = 1.0, 0.1  # least number of seconds between two readings, and largest share of time for reading
PAUSE = 10.0  # the largest number of seconds between two readings, even if a reading takes long
CURVE = 32  # the number of columns of a curve on a terminal
UNLIKE = 50  # a metric is drawn on a logarithmic scale if its largest value is more than this multiple of the smallest


class Extent(NamedTuple):
    """A metric's last value, its smallest and its largest finite value, and how many values are not finite.

    If no value is finite, the smallest is inf and the largest is -inf.
    """

    last: float
    low: float
    high: float
    others: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Extent:
        """Return the extent of some values."""
        finite = [float(value) for value in values if math.isfinite(value)]
        low, high = min(finite, default=math.inf), max(finite, default=-math.inf)
        return cls(float(values[-1]), low, high, len(values) - len(finite))


@dataclass(frozen=True)
class MetricTrace:
    """The values of a metric so far, in the order in which they were measured.

    Args:
        name: the name of the metric.
        values: the values; in a thinned trace, only those that the curve needs.
        thinned_from: in a thinned trace, the extent of the trace before it was thinned; None: the trace has all values.
    """

    name: str
    values: Sequence[float]
    thinned_from: Extent | None = None

    @cached_property
    def extent(self) -> Extent:
        """Return the extent of all measured values, including the values that a thinned trace no longer has."""
        return self.thinned_from or Extent.of(self.values)

    @property
    def last(self) -> str:
        """Return the last value as a text, even if it is NaN or infinite."""
        return self.in_words(self.extent.last)

    @property
    def logarithmic(self) -> bool:
        """Return whether the curve is drawn on a logarithmic scale, because the values differ by a large factor."""
        return 0 < self.extent.low < math.inf and self.extent.high > UNLIKE * self.extent.low

    @property
    def span(self) -> str:
        """Return a text with the range of the metric, the scale, and the number of values that are not finite."""
        _, low, high, others = self.extent
        parts = [f"{self.in_words(low)} to {self.in_words(high)}"] if low <= high else []
        parts += ["logarithmic"] if self.logarithmic else []
        return ", ".join([*parts, *([f"{others} not finite"] if others else [])])

    def in_words(self, value: float) -> str:
        """Return a value as a text. Values that are not finite become "NaN", "inf" or "-inf"."""
        return text(self.name, value) if math.isfinite(value) else str(value).replace("nan", "NaN")

    def thinned(self, most: int) -> MetricTrace:
        """Return the trace with at most `most` values.

        The values are divided into equal stretches. Of each stretch, the first value that is not finite is kept or, if
        all values are finite, the last value. `heights(most)`, the last value and the span do not change.
        """
        size = -(-len(self.values) // most)
        parts = [self.values[start : start + size] for start in range(0, len(self.values), size)]
        chosen = [next((value for value in part if not math.isfinite(value)), part[-1]) for part in parts]
        return MetricTrace(self.name, chosen, self.extent)

    def heights(self, most: int) -> list[float | None]:
        """Return at most `most` heights of a curve in [0, 1], each for one of equal stretches of the values.

        The height of a stretch is the height of its last value, or None if any of its values is not finite.
        """
        chosen = self.thinned(most).values
        scaled = [math.log(one) if self.logarithmic and math.isfinite(one) else one / 2 for one in chosen]
        finite = [
            value for value in scaled if math.isfinite(value)
        ]  # values are halved, since their difference may overflow
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        level = 0.5 if low == high else None
        return [(level or (one - low) / (high - low)) if math.isfinite(one) else None for one in scaled]


@dataclass(frozen=True)
class Snapshot:
    """The content of `fedbilevel watch` at a moment.

    Args:
        title: the title of the run, or the name of the folder.
        state: one of STATES.
        why: an explanation of the state.
        done, whole: the progress and the budget, in the unit of the budget; whole = 0 if the budget is not known.
        amount: progress and budget in words.
        facts: lines of text, by name.
        traces: the traces of the metrics, then those of the exchanges.
        tables: the table of absent clients, or the table of a sweep's runs.
        notes: messages about parts of the folder that cannot be read.
        directions: metric -> whether a larger value is better, once the run has ended.
        error: the error with which a run has ended.
        fields: the sections of the run's spec.
        is_private: whether the run is a simulation under privacy; its seed is then hidden on web pages.
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
    is_private: bool = False

    @property
    def over(self) -> bool:
        """Return whether the run has ended."""
        return self.state in ("finished", "failed")

    def value(self, metric: str) -> float | None:
        """Return the last value of a metric; None if the metric has no value."""
        return next((trace.extent.last for trace in self.traces if trace.name == metric), None)

    def last(self, metric: str) -> str:
        """Return the last value of a metric as a text; a dash if the metric has no value."""
        return next((trace.last for trace in self.traces if trace.name == metric), "–")


def snapshots(read: Callable[[], Snapshot], sleep: Callable[[float], None] = time.sleep) -> Iterator[Snapshot]:
    """Yield the snapshots that `read` returns, without end, at intervals of at most `PAUSE` seconds.

    After the first snapshot, an error becomes a note in the last snapshot.

    Raises:
        ConfigurationError: the first snapshot cannot be read.
    """
    shown, pause = (latest := read()), INTERVAL
    while True:
        yield shown
        sleep(pause)
        began = time.monotonic()
        try:
            shown = latest = read()
        except (FedbilevelError, OSError) as error:
            shown = replace(latest, notes=[f"not up to date: {in_a_line(error)}"])
        pause = min(max(INTERVAL, (time.monotonic() - began) / SHARE), PAUSE)
