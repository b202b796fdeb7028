"""A whole network as y: MEHA beside methods that need an inner loss which is strongly convex in y.

Hyper-cleaning of digits with a hidden layer, so that the inner loss is not convex in y. x has a weight for each
training sample. Steps adapt. Each method tries four settings on seed 100, and keeps the one with the best accuracy on
held-out samples: MEHA tries penalties and proximities, the others the largest change of an entry of x in a round. Then
each runs on other seeds, and the accuracy is that on test samples. All runs have as many exchanges. MEHA trains y on
both losses. The accuracy "anew" is therefore of a network that is trained from y0 on the inner loss alone, on all
training samples in one place, with the weights at the end of the run.

A run is stable if it ended without an error, never had to go back to an earlier row with smaller steps, and if the
outer loss of all clients ended below its start. CPU seconds are the median over seeds, of programs that are compiled.
"""

from __future__ import annotations

import itertools
import time
import warnings
from typing import Any

import jax
import numpy as np
import optax

import fedbilevel as fb
from fedbilevel.tasks import Task, hyper_cleaning

warnings.simplefilter("ignore")
QUICK = {"seeds": 1, "exchanges": 40}
X_LR = (0.1, 0.3, 1.0, 3.0)
PENALTY, PROXIMITY = (1.0, 10.0), (1.0, 10.0)


def settings(name: str) -> list[tuple[str, Any]]:
    """Return the four settings of a method, as (words, method)."""
    if name == "MEHA":
        pairs = itertools.product(PENALTY, PROXIMITY)
        return [(f"penalty={c:g}, proximity={s:g}", fb.MEHA(penalty=c, proximity=s)) for c, s in pairs]
    return [(f"x_lr={lr:g}", fb.layered(getattr(fb, name)(), fb.AdaptiveSteps(x_lr=lr))) for lr in X_LR]


def made(seed: int, hidden: int, holdout: float) -> Task:
    """Return the task, with 40 % of the training labels drawn at random."""
    return hyper_cleaning(network="mlp", hidden=(hidden,), clients=6, corruption=0.4, holdout=holdout, seed=seed)


def run(method: Any, task: Task, rounds: int, seed: int) -> tuple[fb.Result | None, float]:
    """Return the result, or None if the run ended with an error, and its CPU seconds."""
    began = time.process_time()
    try:
        result = fb.solve(
            method, task.problem, task.clients, task.x0, task.y0, rounds=rounds, key=seed, eval_every=rounds,
            metrics=task.metrics, progress=False,
        )  # fmt: skip
    except fb.errors.FedbilevelError as error:
        print(f"    {type(error).__name__}: {error}")
        return None, time.process_time() - began
    return result, time.process_time() - began


def anew(task: Task, x: Any) -> float:
    """Return the accuracy of a network that is trained from y0 on the inner loss at this x, by 1,000 steps of Adam."""
    adam, samples = optax.adam(1e-2), task.clients.inner.values

    @jax.jit
    def trained(x: Any, y: Any, samples: Any) -> Any:
        def step(_: Any, carry: Any) -> Any:
            y, memory = carry
            updates, memory = adam.update(jax.grad(task.problem.inner, 1)(x, y, samples), memory)
            return optax.apply_updates(y, updates), memory

        return jax.lax.fori_loop(0, 1_000, step, (y, adam.init(y)))[0]

    return float(task.metrics["test_accuracy"](x, trained(x, task.y0, samples)))


def row_of(result: fb.Result | None, task: Task) -> tuple[float, float, bool]:
    """Return the accuracy and the AUC of the weights at the end, and whether the run was stable."""
    if result is None:
        return float("nan"), float("nan"), False
    row = result.history.rows[-1]
    accuracy, auc = (float(row[next(name for name in row if word in name)]) for word in ("accuracy", "auc"))
    whole = [float(np.mean([task.problem.outer(x, y, task.clients.outer.row(i)) for i in range(len(task.clients))]))
             for x, y in ((task.x0, task.y0), (result.x, result.y))]  # fmt: skip
    return accuracy, auc, "halvings" not in row and whole[1] < whole[0]


def interval(numbers: np.ndarray) -> str:
    """Return the mean, and for five numbers half of its 95 % interval by Student's t."""
    half = 2.776 * np.std(numbers, ddof=1) / np.sqrt(5) if len(numbers) == 5 else np.nan
    return f"{np.mean(numbers):.4f} ± {half:.4f}"


def main(
    methods: tuple[str, ...] = ("SimFBO", "F2SA", "FedNest", "MEHA"),
    seeds: int = 5,
    exchanges: int = 300,
    hidden: int = 16,
) -> None:
    tuning = made(100, hidden, holdout=0.25)
    for name in methods:
        tried = settings(name)
        first, _ = run(tried[0][1], tuning, 1, 0)
        assert first is not None
        rounds = exchanges // first.ledger.exchanges
        found = [row_of(run(method, tuning, rounds, 0)[0], tuning) for _, method in tried]
        for (words, _), (accuracy, auc, stable) in zip(tried, found, strict=True):
            print(f"  {name:8} {words:28} held-out accuracy {accuracy:.4f}, AUC {auc:.4f}, stable {stable}", flush=True)
        words, method = tried[int(np.nanargmax([accuracy for accuracy, *_ in found]))]
        ends, times, again = [], [], []
        for seed in range(seeds):
            task = made(seed, hidden, holdout=0.0)
            result, cpu = run(method, task, rounds, seed)
            ends.append(row_of(result, task))
            times.append(cpu)
            again.append(float("nan") if result is None else anew(task, result.x))
        accuracy, auc, stable = (np.array(column, float) for column in zip(*ends, strict=True))
        print(
            f"{name:8} {words:28} {rounds} rounds: test accuracy {interval(accuracy)}, "
            f"anew {interval(np.array(again))}, AUC {np.mean(auc):.4f}, stable {int(stable.sum())} of {seeds}, "
            f"{np.median(times):.1f} CPU s",
            flush=True,
        )
