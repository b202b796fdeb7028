"""A weight for each site, compared with no weights: the task `tables` on data of real sites, with one penalty.

The tables and the splits are the same as in `sites`. SimFBO chooses the weights together with one penalty for all
features, by the cross-validated loss of the training rows, which is `validation`. `loss` is the mean loss of the test
rows: the logistic loss, or the negative log partial likelihood of Cox's model. `score` is the accuracy on the test rows
or, for survival, the concordance. A difference is the value with weights minus the value without, with the 95 %
interval of Nadeau and Bengio over splits.
"""

import tempfile
import warnings
from pathlib import Path

import jax
import numpy as np
import pandas as pd

import fedbilevel as fb
from benchmarks import sites
from benchmarks.harness import estimate, head, row
from benchmarks.sites import Table, dealt
from fedbilevel.tasks.tables import tables

QUICK = {"sets": ["lung"], "splits": [0, 1], "rounds": 20}


def frame_of(part: Table) -> pd.DataFrame:
    target = (
        {"outcome": part.target}
        if part.target.ndim == 1
        else dict(zip(["outcome", "event"], part.target.T, strict=True))
    )
    return part.features.assign(**target, patient_=part.patient, site=part.site)


def measured(whole: Table, split: int, weighted: bool, rounds: int) -> dict[str, float]:
    """Return the measurements at the end of a run on this split."""
    train, test = map(frame_of, dealt(whole, split))
    survival = whole.target.ndim == 2
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(True):
        for site, rows in train.groupby("site"):
            rows.drop(columns="site").to_csv(Path(folder) / f"{site}.csv", index=False)
        test.to_csv(Path(folder) / "test.csv", index=False)
        task = tables(
            folder=folder,
            outcome="survival" if survival else "binary",
            patient="patient_",
            categorical=whole.categorical,
            site_weights=weighted,
            test=0.0,
        )
        method, engine = fb.SimFBO(local_steps=1, batch_size=None), fb.Local(devices=1)
        last = fb.solve(
            method,
            task.problem,
            task.clients,
            task.x0,
            task.y0,
            rounds=rounds,
            metrics=task.metrics,
            eval_every=rounds,
            engine=engine,
            progress=False,
        ).history.rows[-1]
    score = "test_concordance" if survival else "test_accuracy"
    return {"validation": last["outer_loss"], "loss": last["test_loss"], "score": last[score]}


def main(
    sets: tuple[str, ...] = ("heart", "lung"), splits: tuple[int, ...] = tuple(range(10)), rounds: int = 1000
) -> None:
    warnings.simplefilter("ignore")
    print(f"splits {', '.join(map(str, splits))}, {rounds} rounds")
    head("data", "sites", "rows", "measure", "without weights", "with weights, minus without")
    for name in sets:
        whole = sites.SETS[name]()
        runs = [[measured(whole, split, weighted, rounds) for split in splits] for weighted in (False, True)]
        train, test = dealt(whole, splits[0])
        for measure in ("validation", "loss", "score"):
            without, change = (np.array([one[measure] for one in run]) for run in runs)
            change = change - without
            cell = estimate(change, len(test.site) / len(train.site))
            row(name, len(np.unique(whole.site)), len(whole.site), measure, f"{without.mean():.4f}", cell)
