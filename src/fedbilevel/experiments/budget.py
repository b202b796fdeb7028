"""Runs that end after a number of exchanges, or of seconds of the clock: how often they look, and where they stop.

Methods make different numbers of exchanges a round, some of them at random, and wait for their clients more or less
long. A run with a budget stops at the first row of its history at which the ledger has reached it; rows fall on fixed
rounds, so where that is depends on the numbers alone, not on speed or interruptions.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from fedbilevel.engines import checkpoint as files
from fedbilevel.engines.history import History, Row
from fedbilevel.engines.result import Callback, Result
from fedbilevel.engines.solve import solve
from fedbilevel.experiments.parts import Parts
from fedbilevel.experiments.spec import RunPlan

ROWS = 50  # in a history, where the spec does not say how often to evaluate
PROBE = 4  # rounds in which exchanges are counted, and their time
ENDLESS = 2**31 - 1  # rounds, for runs that end otherwise

Budget = tuple[str, float]
"""A column of the history, and how much of it: ("exchanges", 500) or ("time", 200.0)."""


def stop_after(budget: Budget) -> Callback:
    """A callback that ends a run at the first row with so much."""

    def check(result: Result, row: Row | None) -> str | None:
        return reason(budget) if row is not None and spent(row, budget) else None

    return check


def spent(row: Row, budget: Budget) -> bool:
    """Whether a row has reached the budget."""
    column, amount = budget
    return row[column] >= amount


def reason(budget: Budget) -> str:
    """Why a run with a budget ended."""
    column, amount = budget
    return f"{amount:g} seconds of the clock passed" if column == "time" else f"{amount} {column} done"


def rounds_at_most(budget: Budget) -> int:
    """After which the budget is spent for sure: a round makes at least one exchange, but may take no time at all."""
    column, amount = budget
    return int(amount) if column == "exchanges" else ENDLESS


def rounds_between_rows(plan: RunPlan, parts: Parts) -> int:
    """So many that about ROWS rows fit the budget, by looking at the first rounds of this very run."""
    if plan.eval_every is not None:
        return plan.eval_every
    assert plan.budget is not None
    task, (column, amount) = parts.task, plan.budget
    with warnings.catch_warnings(action="ignore"):  # the run itself says it again
        first = solve(
            parts.algorithm,
            task.problem,
            task.clients,
            task.x0,
            task.y0,
            rounds=PROBE,
            cohort=plan.cohort,
            key=plan.seed,
            engine=parts.engine,
        )
    cost = first.history.rows[-1][column]
    return max(1, int(amount * PROBE / (ROWS * cost))) if cost > 0 else 1


def rounds_done(checkpoint: Path, budget: Budget) -> int | None:
    """How many rounds a checkpoint has, if it has spent the budget already; else None.

    Raises:
        CheckpointError: it cannot be read.
    """
    with files.as_checkpoint_error(checkpoint):
        rows = History.of(files.load_meta(files.newest(checkpoint))["history"]).rows
        return int(rows[-1]["round"]) if rows and spent(rows[-1], budget) else None
