"""Methods whose steps adapt, compared with tuned steps: where they end, and the cost of tuning.

For each task there are three runs with the preset's batches and local steps, and with the same number of exchanges. The
first run has steps that were chosen from 16 pairs, by the outer loss at the end of 16 runs of this length. The second
run, only of SimFBO, has the steps 0.1. In the third run, steps adapt. The column "holds" says whether the third run
ends within one percentage point of accuracy, or of error, of the first run, or does so after twice the exchanges. Then
there are runs with 8 seeds and steps that adapt; if x is not the weights of a network, their x starts two units away.
The table says how many of them end with finite numbers, and in which range. Data sets are read from $FEDBILEVEL_DATA.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, row
from fedbilevel.algorithms.parts.layers import Layered
from fedbilevel.experiments import resolve
from fedbilevel.experiments.experiment import Experiment
from fedbilevel.experiments.runner import build, first_metric

warnings.simplefilter("ignore")
TASKS: dict[str, dict[str, Any]] = {
    "quadratic, κ = 10": {"name": "quadratic", "condition": 10.0},
    "quadratic, κ = 100": {"name": "quadratic", "condition": 100.0},
    "quadratic, κ = 10⁴": {"name": "quadratic", "condition": 1e4},
    "regularization, digits": {"name": "regularization", "data": "digits"},
    "regularization, Covertype": {"name": "regularization", "data": "covtype"},
    "hyper-cleaning, digits": {"name": "hyper_cleaning", "data": "digits"},
    "hospitals": {"name": "hospitals"},
    "loss tuning": {"name": "loss_tuning"},
    "representation, digits": {"name": "hyper_representation", "data": "digits"},
    "representation, MNIST iid": {"name": "hyper_representation", "data": "mnist", "partition_by": "iid"},
    "representation, MNIST shards": {"name": "hyper_representation", "data": "mnist", "partition_by": "shards"},
    "representation, Fashion-MNIST": {"name": "hyper_representation", "data": "fashion-mnist"},
}
GRID = list(itertools.product((0.01, 0.1, 1.0, 10.0), (0.03, 0.1, 0.3, 1.0)))
"""The pairs of steps: the step on x, and the step on y and v."""
QUICK = {"tasks": ["quadratic, κ = 10"], "seeds": 1}


def given(method: Any, x: float | None, y: float | None) -> Any:
    """Return the method with these steps; with None, its steps adapt."""
    if isinstance(method, Layered):  # AFBO's presets are asynchronous, for which steps cannot adapt
        return given(method.algorithm, x, y)
    names = {field.name for field in fields(method)}
    steps = fb.XYV(x=x, y=y, v=y)
    if "server_lr" in names:
        return replace(method, server_lr=steps, client_lr=None)
    if "client_lr" in names:
        return replace(method, client_lr=steps)
    changed = {"inner": replace(method.inner, lr=y), "outer_lr": x}
    hypergradient = getattr(method, "hypergradient", None)
    if hasattr(hypergradient, "lr"):
        changed["hypergradient"] = replace(hypergradient, lr=y)
    elif hasattr(getattr(hypergradient, "solver", None), "step"):
        changed["hypergradient"] = replace(hypergradient, solver=replace(hypergradient.solver, step=y))
    return replace(method, **changed)


def played(made: Experiment, plan: Any, method: Any, rounds: int, seed: int = 0, off: float = 0.0) -> fb.Result | None:
    """Run an experiment, and return the result; None if the run diverged or was refused."""
    x0 = jax.tree.map(lambda leaf: leaf + off, made.task.x0)
    try:
        return made._replace(algorithm=method, task=replace(made.task, x0=x0)).solve(
            replace(plan, seed=seed), rounds=rounds, eval_every=max(1, rounds // 20), metrics=made.task.metrics
        )
    except (fb.errors.NonFiniteError, fb.errors.ConfigurationError):
        return None


def asked_for(label: str, name: str) -> tuple[Experiment, Any, str]:
    """Return the experiment of a task and a method, its plan, and the metric that is compared."""
    spec = resolve({"task": TASKS[label], "algorithm": name})
    made = build(spec)
    return made, spec.run, next((one for one in made.task.metrics if "accuracy" in one), first_metric(made.task))


def end(run: fb.Result | None, metric: str) -> float:
    """Return the metric at the end of a run; NaN if the run diverged."""
    return float("nan") if run is None else float(run.history[metric][-1])


def by_hand(made: Experiment, plan: Any, name: str, metric: str) -> tuple[float, int, float]:
    """Return where the best of 16 pairs of steps ends, the exchanges of these 16 runs, and where the steps 0.1 end."""
    tried = [played(made, plan, given(made.algorithm, *steps), plan.rounds) for steps in GRID]
    alive = [run for run in tried if run is not None and np.isfinite(run.history["outer_loss"][-1])]
    best = min(alive, key=lambda run: run.history["outer_loss"][-1])
    plain = played(made, plan, given(made.algorithm, 0.1, 0.1), plan.rounds) if name == "simfbo" else None
    return end(best, metric), len(GRID) * best.ledger.exchanges, end(plain, metric)


def cells(label: str, name: str, seeds: int) -> list[str]:
    """Return the cells of a task's row: see the docstring of the module."""
    made, plan, metric = asked_for(label, name)
    better, rounds, bare = 1 if "accuracy" in metric else -1, plan.rounds, given(made.algorithm, None, None)
    tuned, cost, plain = by_hand(made, plan, name, metric)
    twice = played(made, plan, bare, 2 * rounds)
    once = twice.history[metric][len(twice.history[metric]) // 2] if twice else float("nan")
    holds = better * (once - tuned) >= -0.01 or better * (end(twice, metric) - tuned) >= 0
    shifts = (0.0,) if label.startswith("representation") else (0.0, 2.0, -2.0)
    others = [end(played(made, plan, bare, rounds, seed, off), metric) for off in shifts for seed in range(seeds)]
    ends = [f"{one:.4g}" for one in (tuned, plain, once, end(twice, metric), np.nanmin(others), np.nanmax(others))]
    finite = f"{np.isfinite(others).sum()}/{len(others)}"
    return [metric, ends[0], f"{cost:,}", *ends[1:4], "yes" if holds else "no", finite, f"{ends[4]} to {ends[5]}"]


def main(methods: tuple[str, ...] = (), tasks: tuple[str, ...] = tuple(TASKS), seeds: int = 8) -> None:
    columns = "tuned", "cost, exchanges", "steps 0.1", "adapting", "twice the exchanges", "holds", "finite", "range"
    head("method", "task", "metric", *columns)
    for name in methods or ("simfbo",):
        for label in tasks:
            row(name, label, *cells(label, name, seeds))
