"""The savings and costs of submodels: RABO on clients with limited capacities, compared with FedMBO on whole models.

There are ten clients, two of each capacity 1, 1/2, 1/4, 1/8 and 1/16, unless another capacity is named.

cost           operations and bytes of a round, as the ledger counts them; an MLP 64-512-512-10 on digits. Aim: of
               both, at most 27 % of FedMBO's
resnet12       only operations, counted without a run; the paper's ResNet-12
time           time of a round, measured in turn; an MLP 64-1024-1024-10
time-conv4     time of a round; Conv-4 on generated characters, with local hypergradients on one draw of tasks
time-few-shot  the same with more local steps and products, and with five images of each character
coverage       rounds until 90 % of the accuracy with which whole models end; all ten clients have the capacity 1/4,
               and segments are assigned anew in each round, so that at least 1 or 2 clients hold each unit
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, round_ms, row, turns
from fedbilevel.engines import submodels
from fedbilevel.engines.recorder import known_flops
from fedbilevel.tasks import Task, few_shot, hyper_representation

SPREAD = 2 * (1.0, 0.5, 0.25, 0.125, 0.0625)
ROUNDS, TERMS = 200, 5
QUICK = {"parts": ["cost", "time"], "passes": 1, "rounds": 3}


def methods(inner: Any, solver: Any, batch_size: int, outer_lr: float = 0.1, paired: bool = False) -> tuple[Any, Any]:
    """Return FedMBO, with products of random length, and RABO."""
    lengths, shared = replace(solver, sampling="random_per_client"), {"outer_lr": outer_lr, "batch_size": batch_size}
    fedmbo = fb.FedMBO(inner=inner, hypergradient=fb.parts.Implicit(solver=lengths), **shared)
    local = fb.parts.LocalImplicit(solver=solver, paired=paired)
    return fedmbo, fb.RABO(inner=inner, hypergradient=local, **shared)


DIGITS = methods(fb.parts.LocalSGD(lr=0.3), fb.parts.Neumann(terms=5, step=0.05), 32, 0.3)
WIDE = methods(fb.parts.LocalSGD(lr=0.01), fb.parts.Neumann(terms=TERMS, step=0.005), 32, 0.01)
TASKS = methods(fb.parts.LocalSGD(lr=1.0), fb.parts.Neumann(terms=TERMS, step=0.2), 2, paired=True)
FEW_SHOT = methods(fb.parts.LocalSGD(local_steps=20, lr=1.0), fb.parts.Neumann(terms=10, step=0.2), 5, paired=True)
Make = Callable[[tuple[float, ...]], Task]
"""A function from the clients' capacities, or () for whole models, to a task."""


def digits(capacities: tuple[float, ...], **given: Any) -> Task:
    return hyper_representation(data="digits", clients=10, **given).with_own(capacity=capacities or None)


def strokes(capacities: tuple[float, ...], **given: Any) -> Task:
    return few_shot(clients=10, test_episodes=1, **given).with_own(capacity=capacities or None)


def play(task: Task, algorithm: Any, rounds: int, *, measured: bool = False, key: int = 0) -> fb.Result:
    """Run a method with all clients in each round, and with a row of the history for every round."""
    given = task.problem, task.clients, task.x0, task.y0
    metrics = task.metrics if measured else None
    return fb.solve(algorithm, *given, rounds=rounds, key=key, eval_every=1, metrics=metrics, count_flops=not measured)


def contenders(make: Make, both: tuple[Any, Any]) -> dict[str, tuple[Task, Any]]:
    return {"FedMBO, whole": (make(()), both[0]), "RABO, cut": (make(SPREAD), both[1])}


def spent(task: Task, algorithm: Any) -> dict[str, float]:
    """Return the GFLOP and MB of a round."""
    ledger = play(task, algorithm, 1).ledger
    return {"GFLOP": ledger.flops / 1e9, "MB": (ledger.bytes_down + ledger.bytes_up) / 1e6}


def counted(task: Task, algorithm: Any) -> dict[str, float]:
    """Return the GFLOP of a round of a network that is too large to run here.

    All clients reply once to each phase, and to TERMS − 1 products if products are exchanges.
    """
    given = task.problem, task.clients, task.x0, task.y0
    classes = submodels.classes(algorithm, *given)
    costs = known_flops(algorithm, *given, classes)
    assert costs is not None
    times = {"hypergradient.hessian_product": TERMS - 1}
    each = len(task.clients) // max(1, len(classes))
    return {"GFLOP": sum(cost * each * times.get(call[0], 1) for call, cost in costs.items()) / 1e9}


def cost(measure: Callable[[Task, Any], dict[str, float]], make: Make, both: tuple[Any, Any]) -> None:
    """Print the costs of a round of RABO on submodels, compared with FedMBO's on whole models."""
    found = {name: measure(*run) for name, run in contenders(make, both).items()}
    first = found["FedMBO, whole"]
    head("method, models", *(column for unit in first for column in (unit, "of FedMBO's, %")))
    for name, costs in found.items():
        shares = ((f"{of:,.3f}", f"{100 * of / first[unit]:.1f}") for unit, of in costs.items())
        row(name, *(cell for pair in shares for cell in pair))


def time(make: Make, both: tuple[Any, Any], passes: int, rounds: int) -> None:
    """Print the median time of a round, compared with FedMBO's on whole models."""

    def measure(task: Task, algorithm: Any) -> float:
        return round_ms(play(task, algorithm, rounds).history["seconds"], 1)

    times = turns({name: partial(measure, *run) for name, run in contenders(make, both).items()}, passes)
    head("method, models", "ms", "of FedMBO's, %", "pass by pass")
    for name, own in times.items():
        each = [100 * b / a for a, b in zip(times["FedMBO, whole"], own, strict=True)]
        row(name, f"{median(own):.1f}", f"{median(each):.0f}", ", ".join(f"{one:.0f}" for one in each))


def coverage(seeds: range) -> None:
    """Print RABO's mean rounds to 90 % of the accuracy of whole models, by the least number of holders of a unit."""

    def accuracies(capacities: tuple[float, ...], **choice: Any) -> np.ndarray:
        """Return the test accuracies, an array (seeds, rows of the history)."""
        algorithm = fb.Submodels(DIGITS[1], **choice)
        runs = [play(digits(capacities, seed=seed), algorithm, ROUNDS, measured=True, key=seed) for seed in seeds]
        return np.array([run.history["test_accuracy"] for run in runs])

    found = {10: accuracies(())}
    found |= {least: accuracies(10 * (0.25,), policy="covered", min_coverage=least) for least in (1, 2)}
    enough = {least: of >= 0.9 * found[10][:, -1].mean() for least, of in found.items()}
    assert all(there.any(axis=1).all() for there in enough.values()), "a run that never gets there has no such round"
    rounds = {least: there.argmax(axis=1) for least, there in enough.items()}
    head("holders of a unit, at least", "rounds to 90 %", "accuracy at the end, %")
    for least, of in found.items():
        row(least, f"{rounds[least].mean():.1f}", f"{100 * of[:, -1].mean():.2f} ± {100 * of[:, -1].std(ddof=1):.2f}")
    sooner = rounds[1] - rounds[2]
    error = sooner.std(ddof=1) / np.sqrt(len(seeds))
    print(f"\n2 instead of 1: sooner by {sooner.mean():.1f} ± {error:.1f} rounds, mean and standard error")


def main(
    parts: tuple[str, ...] = ("cost", "resnet12", "time", "time-conv4", "time-few-shot", "coverage"),
    passes: int = 5,
    rounds: int = 8,
    seeds: int = 3,
) -> None:
    paper = partial(strokes, network="resnet12", hidden=(64, 160, 320, 640))
    conv4 = partial(strokes, hidden=(16,))
    run = {
        "cost": lambda: cost(spent, partial(digits, hidden=(512, 512)), WIDE),
        "resnet12": lambda: cost(counted, paper, TASKS),
        "time": lambda: time(partial(digits, hidden=(1024, 1024)), WIDE, passes, rounds),
        "time-conv4": lambda: time(conv4, TASKS, passes, rounds),
        "time-few-shot": lambda: time(partial(conv4, shot=5), FEW_SHOT, passes, rounds),
        "coverage": lambda: coverage(range(seeds)),
    }
    with tempfile.TemporaryDirectory() as compiled:  # runs that differ only in their seeds use one program
        jax.config.update("jax_compilation_cache_dir", compiled)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        fb.tune_cpu(1)
        for name in parts:
            print(f"\n{name}", flush=True)
            run[name]()
