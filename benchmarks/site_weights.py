"""A weight for each site, compared with no weights: the task `tables` on data of real sites, with one penalty.

The tables and the splits are the same as in `sites`. SimFBO chooses the weights together with one penalty for all
features, by the cross-validated loss of the training rows, which is `validation`. `loss` is the mean loss of the test
rows: the logistic loss, or the negative log partial likelihood of Cox's model.
"""

import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np
import pandas as pd

import fedbilevel as fb
from benchmarks import sites
from benchmarks.harness import compare, head
from benchmarks.sites import Table, dealt
from fedbilevel.tasks.tables import tables

QUICK = {"sets": ["lung"], "splits": [0, 1], "rounds": 20}


def frame_of(part: Table) -> pd.DataFrame:
    columns = part.target.T if part.survival else [part.target]
    target = dict(zip(("outcome", "event"), columns, strict=False))
    return part.features.assign(**target, patient_=part.patient, site=part.site)


def measured(whole: Table, split: int, weighted: bool, rounds: int) -> tuple[float, float]:
    """Return the validation loss and the test loss at the end of a run on this split."""
    train, test = map(frame_of, dealt(whole, split))
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(True):
        for site, rows in train.groupby("site"):
            rows.drop(columns="site").to_csv(Path(folder) / f"{site}.csv", index=False)
        test.to_csv(Path(folder) / "test.csv", index=False)
        columns = {"patient": "patient_", "categorical": whole.categorical}
        outcome = "survival" if whole.survival else "binary"
        task = tables(folder=folder, outcome=outcome, site_weights=weighted, test=0.0, **columns)
        given = task.problem, task.clients, task.x0, task.y0
        options = {"metrics": task.metrics, "eval_every": rounds, "engine": fb.Local(devices=1), "progress": False}
        run = fb.solve(fb.SimFBO(local_steps=1, batch_size=None), *given, rounds=rounds, **options)
        last = run.history.rows[-1]
    return last["outer_loss"], last["test_loss"]


def main(
    sets: tuple[str, ...] = ("heart", "lung"), splits: tuple[int, ...] = tuple(range(10)), rounds: int = 1000
) -> None:
    warnings.simplefilter("ignore")
    print(f"splits {', '.join(map(str, splits))}, {rounds} rounds")
    head("data", "sites", "rows", "weights", "validation", "difference", "loss", "difference")
    for name in sets:
        whole = sites.SETS[name]()
        found = {
            weights: np.array([measured(whole, split, weights == "chosen", rounds) for split in splits])
            for weights in ("none", "chosen")
        }
        train, test = dealt(whole, splits[0])
        label = name, len(np.unique(whole.site)), len(whole.site)
        compare(label, found, "none", 2 * [".4f"], len(test.site) / len(train.site))
