"""Methods whose steps adapt, compared with tuned steps: where they end, and the cost of tuning.

For each task there are three runs with the preset's batches and local steps, and with the same number of exchanges. The
first run has steps that were chosen from 16 pairs, by the outer loss at the end of 16 runs of this length. The second
run, only of SimFBO, has the steps 0.1. In the third run, steps adapt. The column "holds" says whether the third run
ends within one percentage point of accuracy, or of error, of the first run, or does so after twice the exchanges. Then
there are runs with 8 seeds and steps that adapt; if x is not the weights of a network, their x starts two units away.
The table says how many of them end with finite numbers, and in which range. --tuned takes the tuned steps from an
earlier table.

--family 7 uses the random problems of family.py in place of these tasks, for eight methods, and --group 4 only the
group with this number. --reach, --rise, --shared and --warm-up change REACH, RISE, SHARED and WARM_UP of the steps on x
(algorithms/parts/adagrad.py, curvature.py). Data sets are read from $FEDBILEVEL_DATA.
"""

from __future__ import annotations

import itertools
import re
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fedbilevel as fb
from benchmarks import family as random_problems
from fedbilevel.algorithms.parts import adagrad, curvature
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
    readme = played(made, plan, given(made.algorithm, 0.1, 0.1), plan.rounds) if name == "simfbo" else None
    return end(best, metric), len(GRID) * best.ledger.exchanges, end(readme, metric)


def tuned_before(table: Path) -> dict[tuple[str, str], tuple[float, int, float]]:
    """Return the results of `by_hand` for each (method, task) of an earlier table."""
    found, name = {}, ""
    for line in table.read_text().splitlines():
        name = line if re.fullmatch("[a-z]+", line) else name
        if parts := re.match(r"(.{30})\w+\s+(\S+)\s+([\d,]+)\s+(\S+)\s", line):
            label, best, cost, readme = parts.groups()
            found[name, label.strip()] = float(best), int(cost.replace(",", "")), float(readme)
    return found


def row(label: str, name: str, seeds: int, before: tuple[float, int, float] | None) -> bool:
    """Print the row of a task. Return whether steps that adapt hold: see the docstring of the module."""
    made, plan, metric = asked_for(label, name)
    better, rounds, bare = 1 if "accuracy" in metric else -1, plan.rounds, given(made.algorithm, None, None)
    tuned, cost, readme = before or by_hand(made, plan, name, metric)
    twice = played(made, plan, bare, 2 * rounds)
    once = twice.history[metric][len(twice.history[metric]) // 2] if twice else float("nan")
    holds = better * (once - tuned) >= -0.01 or better * (end(twice, metric) - tuned) >= 0
    shifts = (0.0,) if label.startswith("representation") else (0.0, 2.0, -2.0)
    others = [end(played(made, plan, bare, rounds, seed, off), metric) for off in shifts for seed in range(seeds)]
    print(
        f"{label:30}{metric:16}{tuned:10.4f}{cost:9,d}{readme:10.4{'f' if readme < 1e3 else 'g'}}"
        f"{once:10.4f}{end(twice, metric):10.4f}"
        f"  {'yes' if holds else 'no':4}{sum(map(np.isfinite, others))}/{len(others)}"
        f"  {np.nanmin(others):.4f} to {np.nanmax(others):.4f}",
        flush=True,
    )
    return bool(holds)


def main(
    methods: tuple[str, ...] = (),
    tasks: tuple[str, ...] = tuple(TASKS),
    seeds: int = 8,
    tuned: str = "",
    family: int = 0,
    reach: float = adagrad.REACH,
    rise: float = curvature.RISE,
    shared: float = adagrad.SHARED,
    warm_up: float = adagrad.WARM_UP,
    group: int = -1,
) -> None:
    adagrad.REACH, curvature.RISE, adagrad.SHARED, adagrad.WARM_UP = reach, rise, shared, warm_up
    if family:
        groups = range(len(random_problems.GROUPS)) if group < 0 else [group]
        random_problems.table(list(methods or random_problems.ROUNDS), family, groups)
        return
    before = tuned_before(Path(tuned)) if tuned else {}
    for name in methods or ["simfbo"]:
        labels = [label for label in tasks if not before or (name, label) in before]
        print(f"\n{name}\n{'':46}{'tuned':>10}{'cost':>9}{'0.1':>10}{'none':>10}{'twice':>10}  holds finite  range")
        held = [row(label, name, seeds, before.get((name, label))) for label in labels]
        print(sum(held), "of", len(held), "hold")
