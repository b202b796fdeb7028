"""How much a run may spend, and when it has: rounds, exchanges, bytes or time.

Costs are looked at where the history has a row. Rows fall on fixed rounds, so where a run ends depends on the numbers
alone, not on speed or interruptions.
"""

from __future__ import annotations

from pathlib import Path

from fedbilevel.engines import checkpoint
from fedbilevel.engines.history import History, Row
from fedbilevel.engines.result import Callback, Result

ENDLESS = 2**31 - 1  # rounds, for runs that end otherwise
Budget = tuple[str, float]
"""What is counted, and how much of it: ("rounds", 300), ("exchanges", 500), ("bytes", 1e9) or ("time", 200.0)."""


def cost(row: Row, name: str) -> float:
    """What had been spent up to a row: "rounds", "bytes", down and up together, or a column of the history."""
    if name == "rounds":
        return row["round"]
    return row["bytes_down"] + row["bytes_up"] if name == "bytes" else row[name]


def stop_after(budget: Budget) -> Callback:
    """A callback that ends a run at the first row with so much."""

    def check(result: Result, row: Row | None) -> str | None:
        return reason(budget) if row is not None and spent(row, budget) else None

    return check


def spent(row: Row, budget: Budget) -> bool:
    """Whether a row has reached the budget."""
    name, amount = budget
    return cost(row, name) >= amount


def in_words(budget: Budget) -> str:
    """An amount for people: "500 exchanges", "12.5 MB", "200 seconds of the clock"."""
    name, amount = budget
    if name == "bytes":
        return f"{amount / 1e6:,.6g} MB"
    return f"{amount:g} seconds of the clock" if name == "time" else f"{amount:.10g} {name}"


def reason(budget: Budget) -> str:
    """Why a run with a budget ended."""
    ended = {"bytes": "sent", "time": "passed"}.get(budget[0], "done")
    return f"{in_words(budget)} {ended}"


def rounds_at_most(budget: Budget) -> int:
    """After which the budget is spent for sure: a round makes at least one exchange, but may take no time at all."""
    name, amount = budget
    return int(amount) if name == "exchanges" else ENDLESS


def last_row(path: Path) -> Row:
    """The last row of the history in the checkpoint at `path`; empty where it has none.

    Raises:
        CheckpointError: it cannot be read.
    """
    with checkpoint.as_checkpoint_error(path):
        rows = History.of(checkpoint.load_meta(checkpoint.newest(path))["history"]).rows
        return rows[-1] if rows else {}


def rounds_done(path: Path, budget: Budget) -> int | None:
    """The number of rounds of the checkpoint at `path`, if it has spent the budget already; else None.

    Raises:
        CheckpointError: it cannot be read.
    """
    with checkpoint.as_checkpoint_error(path):
        row = last_row(path)
        return int(row["round"]) if row and spent(row, budget) else None
