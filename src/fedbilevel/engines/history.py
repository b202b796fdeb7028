"""The history of a run: its measurements, row by row."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedbilevel.core.card import Card, Shown, counted, listed, span
from fedbilevel.core.errors import ConfigurationError, require, unknown
from fedbilevel.core.metrics import best, larger_is_better, metric_of, text
from fedbilevel.display.curves import draw_history
from fedbilevel.engines import checkpoint
from fedbilevel.engines.costs import Ledger
from fedbilevel.wording import require_object

Row = dict[str, float | int]


@dataclass(repr=False)
class History(Shown):
    """Rows of numbers, a row per evaluation; the columns of a row are its keys.

    Every row has: round, exchanges, bytes_down, bytes_up, gradients, hvps, time (totals so far, see Ledger), seconds
    (that this machine spent in rounds: no compilation, no evaluation). Where they were counted: flops; where clients
    hold submodels: coverage_x, uncovered_x, mask_noise_x and the same of y. From the algorithm's phases: e.g.
    outer_loss and inner_loss. These are means over the rounds since the row before. From the user's metrics: each by
    its name.

    Args:
        rows: the numbers by the names of their columns, one dict for each evaluation.
        directions: of metrics by name, whether a larger value is better.
    """

    rows: list[Row] = field(default_factory=list)
    directions: dict[str, bool] = field(default_factory=dict)

    def __getitem__(self, column: str) -> np.ndarray:
        """Get a column, NaN where a row lacks it (there are no losses yet in row 0)."""
        if column not in self.columns:
            raise unknown("column of the history", column, self.columns)
        return np.array([row.get(column, np.nan) for row in self.rows])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> list[str]:
        """The names of all columns, in the order in which rows first had them."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def measured(self) -> list[str]:
        """The columns that are no costs: losses, coverage and metrics."""
        return [name for name in self.columns if name not in ("round", "seconds", *Ledger.COLUMNS)]

    @property
    def per_client(self) -> list[str]:
        """The names of the metrics that were measured per client, each of which has columns NAME.mean, NAME.worst, …"""
        return [name.removesuffix(".worst") for name in self.columns if name.endswith(".worst")]

    def larger_is_better(self, column: str) -> bool:
        """Tell whether a larger value is better, in that column or of that metric: see `fedbilevel.Metric`."""
        metric = metric_of(column)
        return larger_is_better(metric, self.directions.get(metric))

    def card(self) -> Card:
        rounds = f", of rounds {span(self['round'])}" if self.rows else ""
        costs = [name for name in self.columns if name not in self.measured]
        lines = {"costs": listed(costs), "measured": listed(self.measured), "last": self.last_in_words()}
        return Card(
            f"History: {counted(len(self), 'row')}{rounds}", {name: text for name, text in lines.items() if text}
        )

    def last_in_words(self) -> str:
        """Say the metrics and losses of the last row in a text; of a metric per client the mean and the worst value."""
        last = self.rows[-1] if self.rows else {}
        names = [name for name in self.measured if name in last and not re.search(r"\.(best|p\d0)$", name)]
        return listed([f"{name} {text(name, last[name])}" for name in names])

    def in_words(self) -> dict[str, str]:
        """Say the first, the best and the last value of each loss and metric."""
        lines = {}
        for name in self.measured:
            rows = [row for row in self.rows if name in row]
            values = [row[name] for row in rows]
            top = best(values, self.larger_is_better(name))
            words = (text(name, value) for value in (values[0], values[-1], top))
            lines[name] = "{} → {}, best {} at round {:,}".format(*words, rows[values.index(top)]["round"])
        return lines

    def plot(
        self,
        metrics: str | Sequence[str] | None = None,
        *,
        panel: str = "exchanges",
        size: tuple[float, float] | None = None,
        axes: Any = None,
    ) -> Any:
        """Draw columns against what they cost; the Matplotlib axes, of a new figure where none are given.

        Args:
            metrics: a column or several, or names of per-client metrics; None: the first metric, or else loss.
            panel: the cost: "rounds", "exchanges", "megabytes", "evaluations", "gflop", "seconds" or "time".
            size: of a new figure, in inches: (3.3, 2.5) suits a column of a paper, and gets small type; None: (6, 4).
            axes: where to draw.

        Raises:
            ConfigurationError: there is no such column or cost, or Matplotlib is not installed.
        """
        if metrics is None:
            require(bool(self.measured), "metrics", metrics, "a column of the history, which has measured nothing yet")
            metrics = self.measured[0].removesuffix(".mean")
        return draw_history(self, metrics, panel=panel, size=size, axes=axes)

    def to_pandas(self) -> Any:
        """Make a pandas.DataFrame, a row for each evaluation; NaN where a row lacks a column.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ConfigurationError("to_pandas needs pandas, which is not installed: pip install pandas") from error
        return pandas.DataFrame(self.rows, columns=self.columns)

    def to_jsonl(self, path: str | Path | None = None) -> str:
        """Write a JSON object per line, as text; given a path, also to that file, atomically."""
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        if path is not None:
            checkpoint.write_text(Path(path), text)
        return text

    @classmethod
    def from_jsonl(cls, source: str | Path) -> "History":
        """Read the history that `to_jsonl` wrote: from its text, or from the file at a `Path`.

        Raises:
            ValueError: it is something else.
        """
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        return cls.of([json.loads(line) for line in text.splitlines() if line.strip()])

    @classmethod
    def of(cls, rows: Any, directions: Any = None) -> "History":
        """Make the history whose rows and directions JSON holds.

        Raises:
            ValueError: a row is not numbers by name, or its round is not a whole number; or the directions are not true
                or false by name.
        """
        for number, row in enumerate(rows, 1):
            require_object(row, f"numbers by name, row {number} of the history,")
            if not all(map(is_number, row.values())):
                raise ValueError(f"row {number} of the history is no table of numbers")
            if type(row.get("round")) is not int or row["round"] < 0:
                raise ValueError(f"row {number} of the history does not say its round")
        directions = {} if directions is None else directions
        if not isinstance(directions, dict) or not all(type(larger) is bool for larger in directions.values()):
            raise ValueError("whether larger values are better is not true or false by the names of metrics")
        return cls(rows, directions)


def is_number(value: Any) -> bool:
    """Tell whether a value that JSON held is a number; an integer must be no larger than a float can be."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)
