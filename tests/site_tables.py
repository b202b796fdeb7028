"""Make tables of three sites with words, gaps, a rare category and repeated patients, and studies of these tables."""

from functools import cache

import numpy as np
import pandas as pd

from fedbilevel.estimators import Study, StudyModel

SITES = ("north", "south", "west")
TARGETS = {"logistic": {"target": "ill"}, "ridge": {"target": "days"}, "cox": {"target": "days", "event": "died"}}


def table(number):
    """Return the table of a site: `days` are fewer at a higher age, the `kind` z is rare, and site 0 has one `dose`.

    Sites 1 and 2 have equally many rows, so that phases are compiled for two kinds of sites.
    """
    rng, rows = np.random.default_rng(number), 40 + 34 * (number > 0)
    made = pd.DataFrame({"patient": np.arange(rows) // 2, "age": rng.normal(50 + 5 * number, 9, rows).round(1)})
    made["dose"] = rng.normal(size=rows)
    made["kind"] = rng.choice(["a", "b", "c"], rows)
    made["code"] = rng.integers(1, 3, rows).astype(float)
    risk = 0.08 * (made.age - 55) + (made.kind == "b") + number - 1 + made.dose / 2
    made["ill"] = np.where(rng.random(rows) < 1 / (1 + np.exp(-risk)), "yes", "no")
    made["days"] = (rng.exponential(30, rows) * np.exp(-risk / 2)).round() + 1
    made["died"] = rng.integers(0, 2, rows)
    made.loc[rng.random(rows) < 0.1, "age"] = np.nan
    made.loc[made.index[:3], "kind"] = "z"
    if number == 0:
        made["dose"] = np.where(made.index == 5, 2.5, np.nan)
    return made


def tables():
    return {site: table(number) for number, site in enumerate(SITES)}


def study(kind, **more):
    """Return a study of these tables with three folds."""
    given = {"estimator": kind, "sites": SITES, **TARGETS[kind], "categorical": ("code",), "cv": 3}
    drop = tuple(name for name in ("ill", "days", "died") if name not in TARGETS[kind].values())
    patient = {"drop": drop, "patient": "patient"}
    return Study(**{**given, **patient, **more})


@cache
def fitted(kind) -> StudyModel:
    """Return the model of the study, fitted to these tables once for all tests; no test may change it."""
    return study(kind).fit(tables())
