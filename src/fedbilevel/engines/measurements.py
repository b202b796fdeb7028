"""Collect the measurements of a run: its costs, the losses of its rounds, and the rows of the history.

It also keeps the best row: the one with the best value of the column that `best_by` of `solve` names, by default the
outer loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from fedbilevel.algorithms.parts.private import quantiles
from fedbilevel.core.errors import NumericalWarning, require
from fedbilevel.core.metrics import best, text
from fedbilevel.core.on_disk import lasting
from fedbilevel.core.tree import PyTree, join, split
from fedbilevel.engines.costs import ExchangeKind, Ledger, RoundCosts
from fedbilevel.engines.ends import Ends
from fedbilevel.engines.engine import Stretch
from fedbilevel.engines.evaluation import Evaluation, PerClientRow
from fedbilevel.engines.history import Best, History, Result, Row, has, require_new
from fedbilevel.engines.process_group import warn_on_first


@dataclass
class RunMeasurements:
    """Hold the measurements of a run so far."""

    evaluation: Evaluation
    history: History
    ledger: Ledger
    best_by: str | None = None  # a column of the history; None: "outer_loss"
    clip: float | None = None  # the clip of replies under privacy
    flops: Mapping[ExchangeKind, int] | None = None  # the operations for a client's reply; None: they are not known
    seconds: float = 0.0  # the time in rounds, without compilation and evaluation
    losses: dict[str, list[Any]] = field(default_factory=dict)  # the losses of each round since the last row
    began: dict[str, float] = field(default_factory=dict)  # the losses of the first round
    best: Best | None = None

    def count_flops(self, flops: Mapping[ExchangeKind, int] | None) -> None:
        """Count the clients' operations from now on; None: they are not known."""
        self.flops, self.ledger.flops = flops, None if flops is None else 0

    def note(self, stretch: Stretch, seconds: float) -> None:
        """Add the costs of some rounds, and note their losses."""
        self.seconds += seconds
        self.ledger.add(stretch.costs, stretch.rounds, self.flops)
        for (_, name), (total, weight) in stretch.costs.metrics.items():
            if (replied := np.asarray(weight) > 0).any():  # with a schedule of arrivals there may be no reply
                means = (np.asarray(total, float)[replied].T / np.asarray(weight, float)[replied]).T
                self.losses.setdefault(name, []).extend(means.tolist())
                if means.ndim == 1:
                    self.began.setdefault(name, float(means[0]))

    def total(self, more: RoundCosts | None) -> Ledger:
        """Return the costs so far plus those of some further rounds; the ledger itself does not change."""
        total = replace(self.ledger, exchanges_by_phase=dict(self.ledger.exchanges_by_phase))
        if more is not None:
            total.add(more, np.size(more.time) // 2, self.flops)  # the time of a round has two parts
        return total

    def add_row(self, result: Result, findings: Mapping[str, Any], per_client: PerClientRow | None) -> Row:
        """Evaluate the metrics, and append a row to the history.

        Means over rounds are computed from exactly rounded sums, so that they do not depend on how rounds were divided
        into stretches.

        Args:
            result: the point to measure.
            findings: columns that the method computes from the server's state.
            per_client: measures the metrics of each client.
        """
        row: Row = {"round": result.round, **self.ledger.columns(), "seconds": self.seconds, **self.mean_losses()}
        at = result.round, split(result.x)[0], split(result.y)[0]
        each = per_client(*at) if per_client else {}
        for name, value in [*self.evaluation(*at).items(), *each.items()]:
            require_new(name, {*row, *findings})
            row[name] = value
        for name, value in findings.items():
            require_one_number(f"the column {name!r} of findings", np.ravel(value))
            row[name] = float(np.ravel(value)[0])
        self.history.rows.append(row)
        return row

    def mean_losses(self) -> Row:
        """Average each loss over the rounds since the last row; for norms of noisy replies, compute quantiles."""
        row: Row = {}
        for name, values in self.losses.items():
            means = [math.fsum(one) / len(values) for one in np.reshape(values, (len(values), -1)).T.tolist()]
            if len(means) > 1 and self.clip is not None:
                row |= quantiles(name, means, self.clip)
            else:
                require_one_number(f"the metric {name!r} of a reply", means)
                row[name] = means[0]
        return row

    def close_row(self, result: Result, row: Row) -> None:
        """Compare a new row with the best row, and begin to collect the losses of the next row."""
        self.losses.clear()
        column = self.judged_by
        if column in row if self.best_by is None else has(row, column, "best_by"):
            larger = self.history.larger_is_better(column)
            if self.best is None or best((row[column], self.best.value), larger) != self.best.value:
                self.best = Best(lasting(result.x), lasting(result.y), result.round, column, row[column])
        result.best = self.best

    @property
    def judged_by(self) -> str:
        """Return the column by which the best row is chosen."""
        return self.best_by or "outer_loss"

    def forget_after(self, round: int) -> None:
        """Remove the measurements of rounds after `round`, to which the run returns; the costs remain counted."""
        self.history.rows[:] = [row for row in self.history.rows if row["round"] <= round]
        self.ledger.rounds = round
        self.losses.clear()

    def to_json(self) -> dict[str, Any]:
        """Return the measurements as a checkpoint stores them, without the variables of the best row."""
        return {
            "history": self.history.rows,
            "ledger": asdict(self.ledger),
            "seconds": self.seconds,
            "losses": self.losses,
            "began": self.began,
        }

    def continue_from(self, meta: Mapping[str, Any], best: tuple[PyTree, PyTree] | None) -> None:
        """Continue the measurements of a checkpoint; `best` has x and y of the best row that it contains, if any."""
        self.history = History.of(meta["history"], self.history.directions)
        self.ledger = Ledger.of(meta["ledger"])
        self.seconds = float(meta["seconds"])
        self.losses = {
            str(name): [np.asarray(one, float).tolist() for one in values] for name, values in meta["losses"].items()
        }
        self.began = {str(name): float(value) for name, value in meta.get("began", {}).items()}
        if best is not None:
            round, column, value = meta["best"]
            x, y = (join(part, fixed) for part, fixed in zip(best, self.evaluation.fixed, strict=True))
            self.best = Best(x, y, int(round), str(column), float(value))

    def remark(self, result: Result, advice: str, ends: Compare) -> str:
        """Return a remark if a run ended worse than it began, or if its best row lies in its first half; else "".

        The remark is also issued as a warning, except in three cases. In these cases the training of y may have raised
        the outer loss. First, the last row is the best row. Second, the outer loss of all clients at the end is not
        above the loss at the start with a trained y. Third, this loss at the end is not above the loss at the best row,
        with the y of that row or with a trained y.

        Args:
            result: the end of the run.
            advice: what may lead to a better end (`Rescue.advice`).
            ends: compares the outer loss of all clients at the end with the same loss at an earlier point, if possible.
                It is called in two cases: the outer loss in the last row is not below the loss of the first round by
                more than the noise of a round; or the best row lies in the first half.
        """
        best, rows = self.best, self.history.rows
        if best is None or best.column not in rows[-1]:
            return ""
        column, sign = best.column, -1 if self.history.larger_is_better(best.column) else 1
        values = [row[column] for row in rows if column in row]
        first, last = self.began.get(column, values[0]), values[-1]
        bends = np.abs(np.diff(values, 2))  # second differences of a steady rise or fall are 0, except for noise
        bend = 2 * float(np.median(bends)) if len(bends) else 0.1 * abs(first)
        noise = bend + 0.01 * max(abs(first), abs(last)) * (len(bends) > 0)
        # A row has the mean loss over several rounds, which has less noise than the loss of a single round.
        of_a_round = noise + bend * math.sqrt(result.round / max(1, len(rows) - 1))
        lost, gained, rose = sign * (last - best.value), sign * (first - best.value), sign * (last - first)
        by_loss, fell_back = column == "outer_loss", 2 * best.round < result.round and lost > noise + 0.1 * gained
        found = ends(None) if by_loss and rose > -of_a_round else None
        if found is not None and found.worse:
            said = found.text(column)
        elif found is None and rose > noise:
            said = f"{column} ended at {text(column, last)}, worse than {text(column, first)} at the start"
        elif fell_back and not (by_loss and only_seems_better(best, ends)):
            said = f"{column} ended at {text(column, last)}, after {text(column, best.value)}"
        else:
            return found.text(column) if found is not None and found.above else ""
        if best.round == result.round:
            return f"{said}, where y was not trained; it was falling, and more rounds may lower it"
        better = f"result.best has x and y of the best row of the history, which is of round {best.round}"
        remark = f"{said}. {better}. To end at a better point, {advice}"
        warn_on_first(NumericalWarning(remark))
        return remark


def require_one_number(field: str, values: Sequence[float] | np.ndarray) -> None:
    """Reject a metric whose value is several numbers, or none."""
    require(len(values) == 1, field, f"{len(values)} numbers", "one number, such as their mean")


Compare = Callable[[tuple[PyTree, PyTree] | None], Ends | None]
"""An earlier point (x, y), or None for the start -> the outer losses there and at the end, or None if not known."""


def only_seems_better(best: Best, ends: Compare) -> bool:
    """Return whether the end of a run is no worse than its best row, although the loss in this row was lower.

    A row has the mean loss of several rounds, in which y may not have been trained yet.
    """
    found = ends((best.x, best.y))
    return found is not None and not found.worse
