"""The cost of local differential privacy: test accuracy after ten rounds at several ε (docs/explanation/privacy.md).

ε is at δ = 1e-5. The noise multiplier z follows from ε and the number of replies. The clip is below the norms of
replies or, in rows "long", above their median. Steps are inversely proportional to the clip. Runs differ only in their
noise; ± is twice the standard error. The metric is the first metric of each task. The patients' files are read from
$FEDBILEVEL_DATA.
"""

from typing import Any

import jax
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, row
from fedbilevel import experiments
from fedbilevel.experiments.runner import task_of
from fedbilevel.tasks import Task

ROUNDS, DELTA = 10, 1e-5
MULTIPLIERS = {1: 8.091, 3: 2.986, 8: 1.275}  # z/√n for each ε, where n is the number of replies
QUICK = {"runs": 2}


def made(name: str, settings: list[str]) -> Task:
    return task_of(experiments.configure(task=name, settings=["run.cohort=none", *settings]))


def patients(task: Task) -> fb.Clients:
    """Return clients with one patient each."""
    rows = []
    for i in range(len(task.clients)):
        own = task.clients.outer.row(i)
        rows += [jax.tree.map(lambda leaf, j=j: leaf[j : j + 1], own) for j in range(len(own["label"]))]
    return fb.Clients(rows)


def terms(epsilon: int, clip: float, replies: int) -> fb.Privacy | None:
    """Return the terms for an ε and a number of replies; 0 means that there is no noise."""
    return fb.Privacy(clip, MULTIPLIERS[epsilon] * replies**0.5, DELTA) if epsilon else None


def compare(name: str, task: Task, clients: Any, algorithm: Any, clip: float, runs: int) -> None:
    """Print a row of the table: the metric without privacy, and for each ε."""
    metric = next(iter(task.metrics))
    cells = []
    for epsilon in (0, *MULTIPLIERS):
        privacy = terms(epsilon, clip, ROUNDS)
        ends = [
            fb.solve(
                algorithm, task.problem, clients, task.x0, task.y0,
                rounds=ROUNDS, eval_every=ROUNDS, metrics=task.metrics, privacy=privacy, key=key,
            ).history[metric][-1]
            for key in range(runs if epsilon else 1)
        ]  # fmt: skip
        error = f" ± {2 * np.std(ends, ddof=1) / len(ends) ** 0.5:.3f}" if epsilon else ""
        cells.append(f"{np.mean(ends):.3f}{error}")
    row(name, len(clients), f"{clip:g}", *cells)


def fedavg(lr: float) -> Any:
    return fb.FedAvg(lr=lr, local_steps=1, batch_size=None)


def simfbo(x: float, y: float) -> Any:
    steps = fb.XYV(x=x, y=y, v=y)
    return fb.SimFBO(local_steps=1, batch_size=None, client_lr=steps, server_lr=steps)


def main(runs: int = 20) -> None:
    alone, tuned = made("hospitals", ["task.tuned=false"]), made("hospitals", [])
    digits = made("hyper_representation", ["task.clients=300"])
    head(f"{ROUNDS} rounds", "clients", "clip", "without", *(f"ε = {epsilon}" for epsilon in MULTIPLIERS))
    compare("FedAvg, patients", alone, patients(alone), fedavg(2.0), 0.5, runs)
    compare("FedAvg, patients, long", alone, patients(alone), fedavg(0.5), 2.0, runs)
    compare("FedAvg, hospitals", alone, alone.clients, fedavg(2.5), 0.4, runs)
    compare("SimFBO, hospitals", tuned, tuned.clients, simfbo(0.001, 0.3), 0.4, runs)
    compare("SimFBO, digits", digits, digits.clients, simfbo(0.1, 0.1), 3.0, max(2, runs // 4))
