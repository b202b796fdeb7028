"""Local differential privacy: the accuracy at several ε, and a bilevel run compared with a search of the same ε.

ε is at δ = 1e-5; the noise multiplier z follows from ε and the number of replies. Steps cannot adapt under privacy.

accuracy  Test accuracy after ten rounds (docs/explanation/privacy.md). The clip is below the norms of replies or, in
          rows "long", above their median. Steps are inversely proportional to the clip. Runs differ only in their
          noise; ± is twice the standard error. The metric is the first metric of each task.
search    The problem and the methods are those of docs/how-to/bilevel-or-search.md. Each client has 5 training and 5
          validation samples of Covertype, with ten features, and belongs to one of 8 sources. x gives each source a
          weight: g_i = w(x) CE + 0.001 ‖y‖² with w = 8 softmax(x); f is the CE of validation samples, which are right.
          Every method has 40 exchanges, so all methods have the same noise for an ε. A search with k trials makes k
          runs of FedAvg with 40/k rounds each, from y = 0. The first trial has equal weights ("equal weights" is this
          trial alone); TPE chooses the others. The validation loss of a trial is computed without noise and costs no
          ε, which favours the search. Each method has the best of 12 settings, by the validation loss on samples that
          no result uses; this costs no ε either. A setting has a clip C for directions; a direction is the sum of the
          gradients in a reply, and most directions have norms between 0.3 and 1. Intervals are Student's over splits.
          Splits of 12,000 clients have about half of their samples in common, and each split has new noise.

The patients' files and Covertype are read from $FEDBILEVEL_DATA.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optuna

import fedbilevel as fb
from benchmarks.harness import compare, head, row
from fedbilevel import experiments
from fedbilevel.experiments.runner import task_of
from fedbilevel.tasks import Task
from fedbilevel.tasks.images import load_rows
from fedbilevel.tasks.networks import cross_entropy
from fedbilevel.tasks.regularization import logits

ROUNDS, DELTA = 10, 1e-5
MULTIPLIERS = {1: 8.091, 3: 2.986, 8: 1.275}  # z/√n for each ε, where n is the number of replies
SOURCES, SWAPPED, SAMPLES, FEATURES = 8, 3, 5, 10
EXCHANGES, BOUND = 40, 3.0
TUNING = -1  # the split on which settings are chosen
CLIPS = (0.5, 1.0)
SETTINGS = list(itertools.product((1.0, 3.0, 10.0), (0.3, 1.0), CLIPS))  # SimFBO's steps on x, on y and v, and its clip
STEPS = list(itertools.product((0.1, 0.3, 1.0, 3.0, 10.0, 30.0), CLIPS))  # FedAvg's step and its clip
TRIALS = {"equal weights": 1, "TPE, 4 trials": 4, "TPE, 8 trials": 8}
QUICK = {"runs": 2, "clients": (4000,), "splits": (0, 1), "epsilons": (8,)}
optuna.logging.set_verbosity(optuna.logging.WARNING)


def terms(epsilon: int, clip: float, replies: int) -> fb.Privacy | None:
    """Return the terms for an ε and a number of replies; 0 means that there is no noise."""
    return fb.Privacy(clip, MULTIPLIERS[epsilon] * replies**0.5, DELTA) if epsilon else None


def fedavg(lr: float) -> Any:
    return fb.FedAvg(lr=lr, local_steps=1, batch_size=None)


def simfbo(x: float, y: float) -> Any:
    steps = fb.XYV(x=x, y=y, v=y)
    return fb.SimFBO(local_steps=1, batch_size=None, client_lr=steps, server_lr=steps)


def made(name: str, *settings: str) -> Task:
    return task_of(experiments.configure(task=name, settings=["run.cohort=none", *settings]))


def accuracy(runs: int) -> None:
    """Print for each setting the metric without privacy, and for each ε."""
    alone, tuned, digits = (
        made("hospitals", "task.tuned=false"), made("hospitals"), made("hyper_representation", "task.clients=300"),
    )  # fmt: skip
    whole = (alone.clients.outer.row(i) for i in range(len(alone.clients)))
    patients = fb.Clients([jax.tree.map(lambda leaf, j=j: leaf[j : j + 1], own)
                           for own in whole for j in range(len(own["label"]))])  # fmt: skip
    settings = {
        "FedAvg, patients": (alone, patients, fedavg(2.0), 0.5, runs),
        "FedAvg, patients, long": (alone, patients, fedavg(0.5), 2.0, runs),
        "FedAvg, hospitals": (alone, alone.clients, fedavg(2.5), 0.4, runs),
        "SimFBO, hospitals": (tuned, tuned.clients, simfbo(0.001, 0.3), 0.4, runs),
        "SimFBO, digits": (digits, digits.clients, simfbo(0.1, 0.1), 3.0, max(2, runs // 4)),
    }
    head(f"{ROUNDS} rounds", "clients", "clip", "without", *(f"ε = {epsilon}" for epsilon in MULTIPLIERS))
    for name, (task, clients, algorithm, clip, times) in settings.items():
        metric, cells = next(iter(task.metrics)), []
        given = algorithm, task.problem, clients, task.x0, task.y0
        options: dict[str, Any] = {"rounds": ROUNDS, "eval_every": ROUNDS, "metrics": task.metrics}
        for epsilon in (0, *MULTIPLIERS):
            options["privacy"] = terms(epsilon, clip, ROUNDS)
            keys = range(times if epsilon else 1)
            ends = [fb.solve(*given, **options, key=key).history[metric][-1] for key in keys]
            error = f" ± {2 * np.std(ends, ddof=1) / len(ends) ** 0.5:.3f}" if epsilon else ""
            cells.append(f"{np.mean(ends):.3f}{error}")
        row(name, len(clients), f"{clip:g}", *cells)


def source_weights(x: Any) -> Any:
    return SOURCES * jax.nn.softmax(x)


def outer(x: Any, y: Any, batch: Any) -> Any:
    return cross_entropy(logits(y, batch["row"]), batch["label"])


def trained(y: Any, batch: Any) -> Any:
    return batch["weight"][0] * outer(None, y, batch) + 1e-3 * jnp.vdot(y, y)


def inner(x: Any, y: Any, batch: Any) -> Any:
    return trained(y, batch | {"weight": source_weights(x)[batch["source"]]})


class Split(NamedTuple):
    """The samples of each client, arrays (clients, samples, …), and the test samples."""

    train: dict[str, np.ndarray]
    valid: dict[str, np.ndarray]
    test: dict[str, np.ndarray]


class End(NamedTuple):
    """The losses at the end of a run."""

    validation: float
    test: float


def split_of(number: int, clients: int) -> Split:
    found, rng = load_rows("covtype", 0.0, 0).standardised(), np.random.default_rng(number + 1)

    def samples(rows: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        return {"row": np.insert(rows[..., :FEATURES], 0, 1, axis=-1), "label": (labels == 0).astype(int)}

    aside = 120_000  # the number of rows for tuning
    first, last = np.split(np.random.default_rng(0).permutation(len(found.train_labels)), [aside])
    rows = rng.permutation(first if number == TUNING else last)
    drawn = rows[: 2 * clients * SAMPLES].reshape(2, clients, SAMPLES)
    train, valid = (samples(found.train_images[part], found.train_labels[part]) for part in drawn)
    source = np.broadcast_to(np.arange(clients)[:, None] % SOURCES, (clients, SAMPLES))
    train["label"] = np.where(source < SWAPPED, 1 - train["label"], train["label"])
    tested = rng.permutation(len(found.test_labels))[:20_000]
    return Split(train | {"source": source}, valid, samples(found.test_images[tested], found.test_labels[tested]))


def end(split: Split, x: Any, y: Any) -> End:
    valid = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), split.valid)
    return End(float(outer(x, y, valid)), float(outer(x, y, split.test)))


BILEVEL, SINGLE = fb.Bilevel(outer, inner), fb.SingleLevel(trained)
START = np.zeros(SOURCES), np.zeros((FEATURES + 1, 1))


def by_simfbo(split: Split, number: int, epsilon: int, setting: tuple[float, ...]) -> End:
    x, y, clip = setting
    clients, privacy = fb.Clients(split.valid, split.train), terms(epsilon, clip, EXCHANGES)
    run = fb.solve(
        simfbo(x, y), BILEVEL, clients, *START, rounds=EXCHANGES, eval_every=EXCHANGES, privacy=privacy, key=number + 1
    )
    return end(split, run.x, run.y)


def by_search(trials: int, split: Split, number: int, epsilon: int, setting: tuple[float, ...]) -> End:
    """Return the result of the trial with the least validation loss. A reply of FedAvg is a direction times lr."""
    lr, clip = setting
    method, rounds, privacy = fedavg(lr), EXCHANGES // trials, terms(epsilon, clip * lr, EXCHANGES)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=number + 1))
    study.enqueue_trial({f"x{i}": 0.0 for i in range(SOURCES)})
    ends = []
    for each in range(trials):
        trial = study.ask()
        x = np.array([trial.suggest_float(f"x{i}", -BOUND, BOUND) for i in range(SOURCES)])
        weight = np.asarray(source_weights(x))[split.train["source"]]
        clients, key = fb.Clients(split.train | {"weight": weight}), 100 * (number + 1) + each
        run = fb.solve(method, SINGLE, clients, START[1], rounds=rounds, eval_every=rounds, privacy=privacy, key=key)
        ends.append(end(split, x, run.x))
        study.tell(trial, ends[-1].validation)
    return min(ends)


def ends_of(method: Callable[..., End], values: Sequence[Any], epsilon: int, splits: dict[int, Split]) -> np.ndarray:
    """Return the results with the chosen setting, an array (splits, 2)."""
    chosen = min(values, key=lambda setting: method(splits[TUNING], TUNING, epsilon, setting).validation)
    return np.array([method(at, number, epsilon, chosen) for number, at in splits.items() if number != TUNING])


def search(clients: Sequence[int], splits: Sequence[int], epsilons: Sequence[int]) -> None:
    """Print the comparison for each number of clients and each ε; 0 means that there is no noise."""
    head("clients", "ε", "method", "validation loss", "difference", "test loss", "difference")
    for count in clients:
        drawn = {number: split_of(number, count) for number in (*splits, TUNING)}
        for epsilon in epsilons:
            found = {"SimFBO": ends_of(by_simfbo, SETTINGS, epsilon, drawn)}
            found |= {name: ends_of(partial(by_search, k), STEPS, epsilon, drawn) for name, k in TRIALS.items()}
            compare((count, epsilon or "none"), found, "SimFBO", (".4f", ".4f"))


def main(
    parts: tuple[str, ...] = ("accuracy", "search"),
    runs: int = 20,
    clients: tuple[int, ...] = (4000, 12_000),
    splits: tuple[int, ...] = (0, 1, 2, 3, 4),
    epsilons: tuple[int, ...] = (0, 8, 3),
) -> None:
    if "accuracy" in parts:
        accuracy(runs)
    if "search" in parts:
        search(clients, splits, epsilons)
