"""SimFBO with steps that adapt, compared with SimFBO with tuned steps: where they end on twelve tasks.

For each task there are two runs with the preset's batches and local steps, and with the same number of exchanges. The
first run has steps that were chosen from 16 pairs, by the outer loss at the end of 16 runs of this length. In the
second run, steps adapt. The column "holds" says whether the second run ends within one percentage point of accuracy,
or of error, of the first run, or does so after twice the exchanges. Data sets are read from $FEDBILEVEL_DATA.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from typing import Any

import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, row
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
QUICK = {"tasks": ["quadratic, κ = 10"]}


def played(made: Experiment, plan: Any, steps: tuple[float | None, float | None], rounds: int) -> fb.Result | None:
    """Run an experiment with one step size for x, and one for y and v; a step size of None adapts.

    The result is None if the run diverged or was refused.
    """
    x, y = steps
    method = replace(made.algorithm, server_lr=fb.XYV(x=x, y=y, v=y), client_lr=None)
    try:
        return made._replace(algorithm=method).solve(
            plan, rounds=rounds, eval_every=max(1, rounds // 20), metrics=made.task.metrics
        )
    except (fb.errors.NonFiniteError, fb.errors.ConfigurationError):
        return None


def cells(label: str) -> list[str]:
    """Return the cells of a task's row: see the docstring of the module."""
    spec = resolve({"task": TASKS[label], "algorithm": "simfbo"})
    made, plan = build(spec), spec.run
    metric = next((one for one in made.task.metrics if "accuracy" in one), first_metric(made.task))
    better = 1 if "accuracy" in metric else -1
    tried = [played(made, plan, steps, plan.rounds) for steps in GRID]
    alive = [run for run in tried if run is not None and np.isfinite(run.history["outer_loss"][-1])]
    best = min(alive, key=lambda run: run.history["outer_loss"][-1])
    tuned = float(best.history[metric][-1])
    adapting = played(made, plan, (None, None), 2 * plan.rounds)
    ends = np.full(3, np.nan) if adapting is None else adapting.history[metric]
    once, twice = ends[len(ends) // 2], ends[-1]
    holds = better * (once - tuned) >= -0.01 or better * (twice - tuned) >= 0
    return [metric, *(f"{one:.4g}" for one in (tuned, once, twice)), "yes" if holds else "no"]


def main(tasks: tuple[str, ...] = tuple(TASKS)) -> None:
    head("task", "metric", "tuned", "adapting", "after twice the exchanges", "holds")
    for label in tasks:
        row(label, *cells(label))
