"""A whole network as y: MEHA compared with methods that need an inner loss that is strongly convex in y.

The page docs/reference/algorithms/meha.md describes both problems, the settings and the columns. The networks have a
hidden layer, so the inner loss is not convex in y. All runs have the same number of exchanges. MEHA trains y on both
losses. Therefore the accuracy "anew" is of a new network that is trained from y0 on the inner loss alone, on all
training samples in one place, with the x at the end of the run. The row "x0" has this accuracy for the x at the start.
CPU seconds are the median over seeds, without compilation.
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
from benchmarks.harness import estimate, head, row
from fedbilevel.tasks import Task, hyper_cleaning, loss_tuning

warnings.simplefilter("ignore")
QUICK = {"problems": ["hyper_cleaning"], "methods": ["SimFBO"], "seeds": 2, "exchanges": 40}
ADAM, AT_ONCE = 1_000, 1_500  # the steps that train a new network, and the largest number of samples in a step
X_LR = (0.1, 0.3, 1.0, 3.0)
PENALTY, PROXIMITY = (1.0, 10.0), (1.0, 10.0)


def settings(name: str) -> list[tuple[str, Any]]:
    """Return the four settings of a method, as (words, method)."""
    if name == "MEHA":
        pairs = itertools.product(PENALTY, PROXIMITY)
        return [(f"penalty={c:g}, proximity={s:g}", fb.MEHA(penalty=c, proximity=s)) for c, s in pairs]
    return [(f"x_lr={lr:g}", fb.layered(getattr(fb, name)(), fb.AdaptiveSteps(x_lr=lr))) for lr in X_LR]


def made(problem: str, seed: int, hidden: int, holdout: float) -> Task:
    """Return the task. In hyper-cleaning, 40 % of the training labels are drawn at random."""
    shared: Any = {"network": "mlp", "hidden": (hidden,), "clients": 6, "holdout": holdout, "seed": seed}
    if problem == "hyper_cleaning":
        return hyper_cleaning(corruption=0.4, **shared)
    return loss_tuning(data="digits", ratio=0.1, **shared)


def run(method: Any, task: Task, rounds: int, seed: int) -> tuple[fb.Result | None, float]:
    """Run a method. Return the result, or None if the run ended with an error, and the CPU seconds."""
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
    """Return the accuracy of a new network that is trained from y0 on the inner loss at this x, by Adam."""
    adam, samples = optax.adam(1e-2), task.clients.inner.values
    count = len(jax.tree.leaves(samples)[0])

    @jax.jit
    def trained(x: Any, y: Any, samples: Any) -> Any:
        def step(k: Any, carry: Any) -> Any:
            y, memory = carry
            drawn = jax.random.choice(jax.random.key(k), count, (min(count, AT_ONCE),), replace=False)
            batch = jax.tree.map(lambda leaf: leaf[drawn], samples)
            updates, memory = adam.update(jax.grad(task.problem.inner, 1)(x, y, batch), memory)
            return optax.apply_updates(y, updates), memory

        return jax.lax.fori_loop(0, ADAM, step, (y, adam.init(y)))[0]

    return float(task.metrics[accuracy_of(task)](x, trained(x, task.y0, samples)))


def accuracy_of(task: Task) -> str:
    """Return the name of the task's metric that is an accuracy."""
    return next(name for name in task.metrics if "accuracy" in name)


def cells_of(task: Task, result: fb.Result | None) -> tuple[float, float, bool]:
    """Return the accuracy and the weights' AUC (NaN if x has no weights) at the end, and whether the run was stable."""
    if result is None:
        return float("nan"), float("nan"), False
    last = result.history.rows[-1]
    start, end = (
        np.mean([task.problem.outer(x, y, task.clients.outer.row(i)) for i in range(len(task.clients))])
        for x, y in ((task.x0, task.y0), (result.x, result.y))
    )
    return float(last[accuracy_of(task)]), float(last.get("auc", "nan")), "halvings" not in last and bool(end < start)


def main(
    problems: tuple[str, ...] = ("hyper_cleaning", "loss_tuning"),
    methods: tuple[str, ...] = ("SimFBO", "F2SA", "FedNest", "MEHA"),
    seeds: int = 5,
    exchanges: int = 300,
    hidden: int = 16,
) -> None:
    columns = "accuracy", "anew", "AUC of the weights", "stable", "CPU s"
    head("problem", "method", "setting", "rounds", "samples", *columns)
    for problem in problems:
        tuning, tasks = made(problem, 100, hidden, 0.25), [made(problem, seed, hidden, 0.0) for seed in range(seeds)]
        first = np.array([anew(task, task.x0) for task in tasks])
        row(problem, "x0", "", "", "test", "", estimate(first, form=".4f"), "", "", "")
        for name in methods:
            compare(problem, name, tuning, tasks, exchanges)


def compare(problem: str, name: str, tuning: Task, tasks: list[Task], exchanges: int) -> None:
    """Print a row for each setting of a method on the tuning task, and a row for the best setting on all tasks."""
    tried = settings(name)
    first, _ = run(tried[0][1], tuning, 1, 0)
    assert first is not None
    rounds = exchanges // first.ledger.exchanges
    held_out = []
    for words, method in tried:
        accuracy, auc, stable = cells_of(tuning, run(method, tuning, rounds, 0)[0])
        held_out.append(accuracy)
        row(problem, name, words, rounds, "held-out", f"{accuracy:.4f}", "", f"{auc:.4f}", stable, "")
    words, method = tried[int(np.nanargmax(held_out))]
    runs = [(task, *run(method, task, rounds, seed)) for seed, task in enumerate(tasks)]
    ends = np.array([(*cells_of(task, result), seconds) for task, result, seconds in runs])
    again = np.array([np.nan if result is None else anew(task, result.x) for task, result, _ in runs])
    cells = estimate(ends[:, 0], form=".4f"), estimate(again, form=".4f"), f"{ends[:, 1].mean():.4f}"
    stable = f"{ends[:, 2].sum():.0f} of {len(tasks)}"
    row(problem, name, words, rounds, "test", *cells, stable, f"{np.median(ends[:, 3]):.1f}")
