"""A model for each client that is pulled to a shared model by a learned pull, compared with other personal models.

The page docs/how-to/personalised.md describes the data sets and the methods. Each model is a softmax regression. The
rows of each client are divided into training, validation and test samples; for images, each part is a third. A client
with images of ten classes has two shards of them. Each split of Omniglot has one of the five largest alphabets.

"One model", "own models" and "pulled" are one run of SimFBO each, with steps that adapt, in which x is chosen by the
validation loss. The other methods have six trials each, of which the best by the mean validation loss is used ("alone":
each client uses its own best). Their losses are minimised completely, so that no step size has to be chosen. A step of
fine-tuning is 1/L times a client's gradient.

The columns are the mean over clients of the accuracy on a client's test samples, the accuracy of the worst client, and
the mean of the loss. After each split, a line has the three numbers of each method. Data are read from
$FEDBILEVEL_DATA.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

import fedbilevel as fb
from benchmarks import sites
from benchmarks.harness import compare, head
from fedbilevel.data import shards
from fedbilevel.data.characters import load_characters
from fedbilevel.tasks.images import load_rows
from fedbilevel.tasks.regularization import with_one

CLIENTS, IMAGES = 20, 120  # the numbers of clients, and of images of each client
CHARACTERS = 45  # the number of characters of an alphabet
EXCHANGES = 1000
PENALTIES, PULLS = 10.0 ** np.arange(-5, 1), 10.0 ** np.arange(-4, 2)  # of FedAvg and "alone"; of Ditto
STEPS = (0, 1, 3, 10, 30, 100)  # of fine-tuning
START, LEAST, MOST = -3.0, -6.0, 1.0  # of x, exponents of ten
QUICK = {"sets": ["digits"], "splits": [0, 1]}
Models = np.ndarray
"""The models of all clients, (clients, features, classes)."""


class Part(NamedTuple):
    """The training, validation or test samples of all clients, padded with rows of weight 0."""

    rows: np.ndarray  # (clients, samples, features)
    labels: np.ndarray  # (clients, samples)
    weights: np.ndarray  # (clients, samples), which add up to 1 for each client


class Split(NamedTuple):
    train: Part
    valid: Part
    test: Part
    classes: int


def filled(clients: Sequence[tuple[np.ndarray, np.ndarray]]) -> Part:
    most = max(len(labels) for _, labels in clients)

    def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack([np.pad(a, [(0, most - len(a)), *[(0, 0)] * (a.ndim - 1)]) for a in arrays])

    rows, labels = map(stacked, zip(*clients, strict=True))
    return Part(rows, labels, stacked([np.full(len(mine), 1 / len(mine)) for _, mine in clients]))


def pixels(images: np.ndarray) -> np.ndarray:
    """Return images as rows with a mean square norm of 1 and a last entry of 1.

    Images of 28×28 pixels are averaged down to 14×14.
    """
    whole = images.astype(float).reshape(len(images), *images.shape[1:3])
    if whole.shape[1] == 28:
        whole = whole.reshape(len(whole), 14, 2, 14, 2).mean((2, 4))
    rows = whole.reshape(len(whole), -1)
    return with_one(rows / np.sqrt(np.mean(np.sum(rows**2, axis=1))))


def thirds(rows: np.ndarray, labels: np.ndarray, whose: Sequence[np.ndarray], classes: int) -> Split:
    """Divide the samples of each client into three parts. The indices in `whose` are in random order."""
    dealt = [np.array_split(mine, 3) for mine in whose]
    parts = [filled([(rows[own[k]], labels[own[k]]) for own in dealt]) for k in range(3)]
    return Split(*parts, classes)


def images(name: str, split: int) -> Split:
    found, rng = load_rows(name, 0.0, 0), np.random.default_rng(split)
    drawn = rng.permutation(len(found.train_labels))[: CLIENTS * IMAGES]
    rows, labels = pixels(found.train_images[drawn]), found.train_labels[drawn]
    return thirds(rows, labels, [rng.permutation(mine) for mine in shards(labels, CLIENTS, seed=split)], 10)


def by_writer(split: int) -> Split:
    """Return the drawings of an alphabet, divided by writer.

    The n-th drawing of each character is by the n-th writer.
    """
    whole, rng = load_characters("omniglot").train, np.random.default_rng(split)
    largest = np.argsort(-np.bincount(whole.alphabet), kind="stable")[split]
    drawings = rng.permutation(whole.images[whole.alphabet == largest])[:CHARACTERS]  # (characters, writers, 28, 28)
    writers = drawings.shape[1]
    whose = [writers * rng.permutation(CHARACTERS) + writer for writer in range(writers)]
    labels = np.repeat(np.arange(CHARACTERS), writers)
    return thirds(pixels(drawings.reshape(-1, 28, 28)), labels, whose, CHARACTERS)


def table(name: str, split: int) -> Split:
    whole = sites.SETS[name]()
    rest, test = sites.dealt(whole, split)
    train, valid = sites.dealt(rest, split)
    features = [sites.prepared(train, part, False)[1].to_numpy() for part in (train, valid, test)]
    named, parts = np.unique(whole.site), []
    for rows, part in zip(features, (train, valid, test), strict=True):
        here = [part.site == site for site in named]
        parts.append(filled([(with_one(rows[one]), part.target[one].astype(int)) for one in here]))
    return Split(*parts, 2)


SETS: dict[str, Callable[[int], Split]] = {
    "digits": lambda split: images("digits", split),
    "MNIST": lambda split: images("mnist", split),
    "Fashion-MNIST": lambda split: images("fashion-mnist", split),
    "Omniglot": by_writer,
    "heart": lambda split: table("heart", split),
    "azpro": lambda split: table("azpro", split),
}


def loss(model: Any, rows: Any, labels: Any, weights: Any) -> Any:
    """Return the mean loss of a model on the samples of one client."""
    logs = jax.nn.log_softmax(rows @ model)
    return -jnp.vdot(jax.nn.one_hot(labels, model.shape[1]), weights[:, None] * logs)


losses = jax.jit(jax.vmap(loss))


def right(models: Models, part: Part) -> np.ndarray:
    """Return each client's accuracy."""
    found = np.einsum("cnf,cfk->cnk", part.rows, models).argmax(2)
    return np.sum(part.weights * (found == part.labels), axis=1)


def size(model: Any) -> Any:
    return jnp.sum(model**2)


def bilevel(own: bool, pulled: bool, at: Split) -> Models:
    """Return the model of each client from a run of SimFBO."""

    def of(y: Any) -> Any:
        return y["own"] if pulled else y

    def of_batch(model: Any, batch: Any) -> Any:
        return loss(model, *(batch[name][0] for name in Part._fields))

    def outer(x: Any, y: Any, batch: Any) -> Any:
        return of_batch(of(y), batch)

    def inner(x: Any, y: Any, batch: Any) -> Any:
        if not pulled:
            return of_batch(y, batch) + 10 ** x[0] * size(y)
        both = of_batch(y["own"], batch) + of_batch(y["shared"], batch)
        return both + 10 ** x[0] * size(y["own"] - y["shared"]) + 10 ** x[1] * size(y["shared"])

    is_own = (lambda path: path == "own") if pulled else (lambda path: True) if own else None
    problem = fb.Bilevel(outer, inner, own=is_own, project_x=fb.projections.box(LEAST, MOST))
    samples = [{name: field[:, None] for name, field in part._asdict().items()} for part in (at.valid, at.train)]
    start = np.zeros((at.train.rows.shape[2], at.classes))
    y0 = {"shared": start, "own": start} if pulled else start
    method, x0 = fb.SimFBO(local_steps=1, batch_size=None), np.full(2 if pulled else 1, START)
    found = fb.solve(method, problem, fb.Clients(*samples), x0, y0, rounds=EXCHANGES, progress=False)
    return np.broadcast_to(of(found.y), (len(at.train.rows), *start.shape))


def minimised(objective: Callable[[Any, Any], Any], factors: Sequence[float], start: np.ndarray) -> list[np.ndarray]:
    """Return the models that minimise an objective of models and a factor, for each factor."""
    options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-9, "gtol": 1e-6}
    with jax.enable_x64(True):
        both = jax.jit(jax.value_and_grad(lambda flat, factor: objective(flat.reshape(start.shape), factor)))
        ends = [
            minimize(both, start.ravel().astype(float), (factor,), jac=True, method="L-BFGS-B", options=options)
            for factor in factors
        ]
    return [end.x.reshape(start.shape) for end in ends]


def best(trials: Sequence[Models], at: Split, each: bool = False) -> Models:
    """Return the models of the clients from the trial with the least mean validation loss.

    With `each`, the trial is chosen for each client separately, by the loss on the validation samples of this client.
    """
    found = np.array([losses(models, *at.valid) for models in trials])
    if each:
        return np.stack([trials[k][i] for i, k in enumerate(found.argmin(0))])
    return trials[found.mean(1).argmin()]


def fedavg(at: Split) -> Models:
    def whole(model: Any, penalty: float) -> Any:
        return jnp.mean(jax.vmap(loss, (None, 0, 0, 0))(model, *at.train)) + penalty * size(model)

    trials = minimised(whole, PENALTIES, np.zeros((at.train.rows.shape[2], at.classes)))
    return best([np.broadcast_to(model, (len(at.train.rows), *model.shape)) for model in trials], at)


def fine_tuned(models: Models, at: Split) -> Models:
    scaled = np.sqrt(at.train.weights)[..., None] * at.train.rows
    curvature = np.linalg.norm(scaled, 2, axis=(1, 2)) ** 2 / 2  # L, which bounds each client's Hessian
    gradient = jax.jit(jax.vmap(jax.grad(loss)))
    trials, current = [], models
    for steps in range(max(STEPS) + 1):
        trials += [current] if steps in STEPS else []
        current = current - np.asarray(gradient(current, *at.train)) / curvature[:, None, None]
    return best(trials, at)


def own_models(at: Split, pulls: Sequence[float], center: Models) -> list[Models]:
    def whole(models: Any, pull: float) -> Any:
        return jnp.sum(losses(models, *at.train)) + pull * size(models - center)

    return minimised(whole, pulls, center)


def arms(at: Split) -> dict[str, Models]:
    averaged = fedavg(at)
    return {
        "pulled": bilevel(True, True, at),
        "own models": bilevel(True, False, at),
        "one model": bilevel(False, False, at),
        "FedAvg": averaged,
        "FedAvg, fine-tuned": fine_tuned(averaged, at),
        "Ditto": best(own_models(at, PULLS, averaged), at),
        "alone": best(own_models(at, PENALTIES, np.zeros_like(averaged)), at, each=True),
    }


def main(sets: tuple[str, ...] = tuple(SETS), splits: tuple[int, ...] = (0, 1, 2, 3, 4)) -> None:
    warnings.simplefilter("ignore", fb.errors.NumericalWarning)
    fb.Local.keep_on_disk()  # all splits use the same programs
    print(f"splits {', '.join(map(str, splits))}")
    head("data", "clients", "arm", "accuracy, %", "difference", "worst client, %", "difference", "loss", "difference")
    for name in sets:
        found: dict[str, list[tuple[float, float, float]]] = {}
        for split in splits:
            at = SETS[name](split)
            for arm, models in arms(at).items():
                accuracy, test = 100 * right(models, at.test), np.mean(losses(models, *at.test))
                found.setdefault(arm, []).append((accuracy.mean(), accuracy.min(), float(test)))
            ends = [f"{arm} {rows[-1][0]:.2f}, {rows[-1][1]:.2f}, {rows[-1][2]:.4f}" for arm, rows in found.items()]
            print(f"{name}, split {split}: {'; '.join(ends)}", flush=True)
        table = {arm: np.array(rows) for arm, rows in found.items()}
        compare((name, len(at.test.rows)), table, "pulled", (".1f", ".1f", ".4f"))
