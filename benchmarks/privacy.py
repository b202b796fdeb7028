"""What local differential privacy costs: test accuracy after ten rounds at several ε, by the rule of the page on it.

FEDBILEVEL_DATA=… python benchmarks/privacy.py [--runs 20]

ε is at δ = 1e-5; z follows from ε and the replies, and the clip lies below the norms of replies, or with "long" above
their median. Steps are as long as the clip is short. Runs differ in the noise alone; ± is twice the standard error.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel import experiments
from fedbilevel.experiments.runner import task_of
from fedbilevel.tasks import Task

ROUNDS, DELTA = 10, 1e-5
MULTIPLIERS = {1: 8.091, 3: 2.986, 8: 1.275}  # z/√n for that ε


def made(name: str, settings: list[str]) -> Task:
    return task_of(experiments.configure(task=name, settings=["run.cohort=none", *settings]))


def patients(task: Task) -> fb.Clients:
    """Every patient as a client."""
    rows = []
    for i in range(len(task.clients)):
        own = task.clients.outer.row(i)
        rows += [jax.tree.map(lambda leaf, j=j: leaf[j : j + 1], own) for j in range(len(own["label"]))]
    return fb.Clients(rows)


def row(name: str, task: Task, clients: Any, algorithm: Any, clip: float, runs: int) -> str:
    """A line of the table; the metric is the task's first."""
    metric = next(iter(task.metrics))
    cells = []
    for epsilon in (None, *MULTIPLIERS):
        terms = epsilon and fb.Privacy(clip, MULTIPLIERS[epsilon] * ROUNDS**0.5, DELTA)
        found = [
            fb.solve(
                algorithm, task.problem, clients, task.x0, task.y0,
                rounds=ROUNDS, eval_every=ROUNDS, metrics=task.metrics, privacy=terms or None, key=key,
            ).history[metric][-1]
            for key in range(runs if epsilon else 1)
        ]  # fmt: skip
        error = f" ± {2 * np.std(found, ddof=1) / len(found) ** 0.5:.3f}" if len(found) > 1 else ""
        cells.append(f"{np.mean(found):.3f}{error}")
    return f"| {name} | {len(clients)} | {clip:g} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    alone, tuned = made("hospitals", ["task.tuned=false"]), made("hospitals", [])
    digits = made("hyper_representation", ["task.clients=300"])

    def fedavg(lr: float) -> Any:
        return fb.FedAvg(lr=lr, local_steps=1, batch_size=None)

    def simfbo(x: float, y: float) -> Any:
        steps = fb.XYV(x=x, y=y, v=y)
        return fb.SimFBO(local_steps=1, batch_size=None, client_lr=steps, server_lr=steps)

    print(f"| {ROUNDS} rounds | clients | clip | without | {' | '.join(f'ε = {e}' for e in MULTIPLIERS)} |")
    print("|---|---|---|---|---|---|---|")
    print(row("FedAvg, patients", alone, patients(alone), fedavg(2.0), 0.5, runs), flush=True)
    print(row("FedAvg, patients, long", alone, patients(alone), fedavg(0.5), 2.0, runs), flush=True)
    print(row("FedAvg, hospitals", alone, alone.clients, fedavg(2.5), 0.4, runs), flush=True)
    print(row("SimFBO, hospitals", tuned, tuned.clients, simfbo(0.001, 0.3), 0.4, runs), flush=True)
    print(row("SimFBO, digits", digits, digits.clients, simfbo(0.1, 0.1), 3.0, max(2, runs // 4)), flush=True)


if __name__ == "__main__":
    main()
