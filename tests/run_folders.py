"""Write the folder of a finished run without running anything."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedbilevel.engines.costs import Ledger
from fedbilevel.engines.history import History, Result
from fedbilevel.experiments import Folder, Spec
from fedbilevel.experiments.runner import finish


def write_run(path: Path, spec: Spec, rounds: int = 20, larger: bool | None = None) -> Path:
    """Write and return the folder of a run with `rounds` rounds of one exchange each.

    Its metric is the relative error, which is 1 / (1 + round). `larger` is whether a larger value of this metric was
    declared as better, or None if its direction was not declared.
    """
    rows = []
    for round in range(0, rounds + 1, 10):
        costs = {"exchanges": round, "bytes_down": 80 * round, "bytes_up": 40 * round, "gradients": 3 * round}
        ledger = Ledger(rounds=round, flops=100 * round, ticks=round * 10_000, **costs)
        rows.append({"round": round, **ledger.columns(), "seconds": 0.1 * round, "relative_error": 1 / (1 + round)})
    history = History(rows, {} if larger is None else {"relative_error": larger})
    result = Result(np.ones(3), np.ones(2), round=rounds, rounds=rounds, history=history, ledger=ledger)
    path.mkdir(parents=True)
    finish(spec, Folder(path), result, "relative_error", seconds=1.0, plot=False)
    return path
