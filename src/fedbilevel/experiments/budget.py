"""Runs that end after a number of exchanges: how often they look, and where they stop.

Methods make different numbers of exchanges a round, some of them at random. A run with a budget stops at the first row
of its history at which the ledger has reached it; rows fall on fixed rounds, so where that is depends on the numbers
alone, not on speed or interruptions.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fedbilevel.core.errors import CheckpointError
from fedbilevel.engines import checkpoint as files
from fedbilevel.engines.history import Row
from fedbilevel.engines.result import Callback, Result
from fedbilevel.engines.solve import solve
from fedbilevel.experiments.parts import Parts
from fedbilevel.experiments.spec import RunPlan

ROWS = 50  # in a history, where the spec does not say how often to evaluate
PROBE = 4  # rounds in which exchanges are counted


def stop_after(exchanges: int) -> Callback:
    """A callback that ends a run at the first row with so many exchanges."""

    def check(result: Result, row: Row | None) -> str | None:
        return reason(exchanges) if row is not None and row["exchanges"] >= exchanges else None

    return check


def reason(exchanges: int) -> str:
    """Why a run with a budget ended."""
    return f"{exchanges} exchanges done"


def rounds_between_rows(plan: RunPlan, parts: Parts) -> int:
    """So many that about ROWS rows fit the budget, by counting the exchanges of the first rounds of this very run."""
    if plan.eval_every is not None:
        return plan.eval_every
    assert plan.exchanges is not None
    task = parts.task
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
    return max(1, plan.exchanges * PROBE // (ROWS * first.ledger.exchanges))


def rounds_done(checkpoint: Path, exchanges: int) -> int | None:
    """How many rounds a checkpoint has, if it has reached the budget already; else None.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with np.load(checkpoint, allow_pickle=False) as stored:
            rows: list[Row] = json.loads(stored[files.META].tobytes())["meta"]["history"]
    except files.UNREADABLE as error:
        raise CheckpointError(f"{checkpoint} is not a readable checkpoint: {error}") from error
    return int(rows[-1]["round"]) if rows and rows[-1]["exchanges"] >= exchanges else None
