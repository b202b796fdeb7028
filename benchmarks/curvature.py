"""Exchanges until a loss is reached: default steps, README's 0.1, and steps on y and v that follow the curvature.

python benchmarks/curvature.py
"""

from __future__ import annotations

import warnings
from functools import partial

import fedbilevel as fb
from fedbilevel.authoring import Algorithm
from fedbilevel.tasks import hyper_representation, quadratic, regularization
from fedbilevel.tasks.task import Task

warnings.simplefilter("ignore")
EXCHANGES = 600
TASKS = {
    "quadratic, κ = 10": (partial(quadratic, condition=10.0), "relative_error", 0.1),
    "quadratic, κ = 100": (partial(quadratic, condition=100.0), "relative_error", 0.2),
    "quadratic, κ = 10⁴": (partial(quadratic, condition=1e4), "relative_error", 0.5),
    "regularization, digits": (regularization, "outer_loss", 0.35),
    "hyper-representation, digits": (hyper_representation, "outer_loss", 0.5),
}
"""By name: the task, what is measured of it, and the value to reach."""
EVERYONE = {
    "SimFBO": (fb.SimFBO(), fb.SimFBO(server_lr=0.1)),
    "FedBiO": (fb.FedBiO(), fb.FedBiO(client_lr=0.1)),
    "AFBO": (fb.AFBO(), None),
    "RABO": (fb.RABO(), None),
    "AggITD": (fb.AggITD(), None),
    "FedNest": (fb.FedNest(), None),
}
"""By name: the method with default steps, and with README's."""


def reached(method: Algorithm | None, task: Task, metric: str, value: float) -> str:
    """Say after how many exchanges the metric was at the value, and what it was at the end."""
    if method is None:
        return "–"
    try:
        one = fb.solve(method, task.problem, task.clients, task.x0, task.y0, rounds=1).ledger.exchanges
        every = max(1, 10 // one)
        given = task.problem, task.clients, task.x0, task.y0
        run = fb.solve(method, *given, rounds=EXCHANGES // one, eval_every=every, metrics=task.metrics)
    except fb.errors.ConfigurationError:
        return "refused"
    except fb.errors.NonFiniteError:
        return "diverged"
    rows = run.history["round"][run.history[metric] <= value]
    first = f"{int(rows[0]) * one:,}" if len(rows) else "never"
    return f"{first} ({run.history[metric][-1]:.3g})"


def main() -> None:
    heads = "method", "default", "0.1", "default, curvature", "0.1, curvature"
    for name, (make, metric, value) in TASKS.items():
        task = make()
        print(f"\n{name}: exchanges until {metric} = {value:g}, and what it is after {EXCHANGES:,}")
        print("".join(f"{head:22}" for head in heads))
        for label, (default, readme) in EVERYONE.items():
            methods = (*(default, readme), *(one and fb.CurvatureSteps(one) for one in (default, readme)))
            cells = [reached(method, task, metric, value) for method in methods]
            print("".join(f"{cell:22}" for cell in (label, *cells)), flush=True)


if __name__ == "__main__":
    main()
