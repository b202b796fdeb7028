"""The savings and costs of submodels: RABO and RAFBO with limited capacities, compared with whole models and FedMBO.

There are ten clients, two of each capacity 1, 1/2, 1/4, 1/8 and 1/16, unless another capacity is named.

cost       operations and bytes of a round, as the ledger has them; an MLP 64-512-512-10 on digits. Aim: at most 27 % of
           FedMBO's on whole models, of both
resnet12   operations alone, counted without running, of the paper's ResNet-12
time       time of a round on whole models and on submodels, in turn, beside FedMBO's; MLP 64-1024-1024-10
time-conv4 the same with Conv-4 on generated characters, of local hypergradients on one draw of tasks; time-few-shot
           with Omniglot tasks of five images a character
coverage   all ten of capacity 1/4, segments dealt so that each unit is held by at least 1 or 2 clients: rounds to 90 %
           and 95 % of the accuracy that whole models end with
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, row, turns
from fedbilevel.engines import submodels
from fedbilevel.engines.recorder import known_flops
from fedbilevel.tasks import Task, few_shot, hyper_representation

SPREAD = 2 * (1.0, 0.5, 0.25, 0.125, 0.0625)
ROUNDS, TERMS = 200, 5
QUICK = {"parts": ["cost", "time"], "passes": 1, "rounds": 3}


@dataclass(frozen=True)
class Setting:
    """The setting that all methods have in common."""

    inner: fb.parts.LocalSGD
    solver: fb.parts.Neumann
    batch_size: int
    outer_lr: float = 0.1

    def make(self, kind: Any, hypergradient: Any) -> Any:
        return kind(inner=self.inner, hypergradient=hypergradient, outer_lr=self.outer_lr, batch_size=self.batch_size)

    def fedmbo(self) -> fb.FedMBO:
        """Return FedMBO, with products of random length, with which the other methods are compared."""
        return self.make(fb.FedMBO, fb.parts.Implicit(solver=replace(self.solver, sampling="random_per_client")))


DIGITS = Setting(fb.parts.LocalSGD(lr=0.3), fb.parts.Neumann(terms=5, step=0.05), 32, 0.3)
WIDE = Setting(fb.parts.LocalSGD(lr=0.01), fb.parts.Neumann(terms=TERMS, step=0.005), 32, 0.01)
TASKS = Setting(fb.parts.LocalSGD(lr=1.0), fb.parts.Neumann(terms=TERMS, step=0.2), 2)
FEW_SHOT = Setting(fb.parts.LocalSGD(local_steps=20, lr=1.0), fb.parts.Neumann(terms=10, step=0.2), 5)
Methods = dict[str, Callable[[Setting], Any]]
DIFFERENCES = fb.parts.Differences()


METHODS: Methods = {
    "RABO, local": lambda s: s.make(fb.RABO, fb.parts.LocalImplicit(solver=s.solver)),
    "RAFBO, local": lambda s: s.make(fb.RAFBO, fb.parts.LocalImplicit(solver=s.solver, second_order=DIFFERENCES)),
}
PAIRED: Methods = {
    "RABO, local": lambda s: s.make(fb.RABO, fb.parts.LocalImplicit(solver=s.solver, paired=True)),
    "RAFBO, local": lambda s: s.make(
        fb.RAFBO, fb.parts.LocalImplicit(solver=s.solver, paired=True, second_order=DIFFERENCES)
    ),
}


def digits(capacities: tuple[float, ...], seed: int = 0, hidden: tuple[int, ...] = (64,)) -> Task:
    task = hyper_representation(data="digits", hidden=hidden, clients=10, seed=seed)
    return task.with_own(capacity=capacities or None)


def strokes(
    capacities: tuple[float, ...], network: str = "conv4", hidden: tuple[int, ...] = (16,), shot: int = 1
) -> Task:
    task = few_shot(network=network, hidden=hidden, clients=10, shot=shot, test_episodes=1)
    return task.with_own(capacity=capacities or None)


def play(task: Task, algorithm: Any, rounds: int, *, measured: bool = False, key: int = 0) -> fb.Result:
    """Run a method with all clients in each round, and with a row of the history for every round."""
    given = task.problem, task.clients, task.x0, task.y0
    metrics = task.metrics if measured else None
    return fb.solve(algorithm, *given, rounds=rounds, key=key, eval_every=1, metrics=metrics, count_flops=not measured)


def cost() -> None:
    """Print the costs of a round on whole models and on submodels, compared with FedMBO's on whole models."""
    whole, cut = digits((), hidden=(512, 512)), digits(SPREAD, hidden=(512, 512))
    shares = "of FedMBO, %", "of itself, %"
    each = "per exchange: GFLOP of FedMBO, %", "MB of FedMBO, %"
    head("method", "models", "exchanges", "GFLOP", *shares, "MB", *shares, *each)
    for name, models, now, itself, first in beside_fedmbo(spent, whole, cut, WIDE, METHODS):
        cells = [f"{now[0]}"]
        for place in (1, 2):
            cells += [f"{now[place]:.3f}", *(f"{100 * now[place] / of[place]:.1f}" for of in (first, itself))]
        cells += [f"{100 * (now[place] / now[0]) / (first[place] / first[0]):.1f}" for place in (1, 2)]
        row(name, models, *cells)


def beside_fedmbo(measure: Any, whole: Task, cut: Task, setting: Setting, methods: Methods) -> Iterator[Any]:
    """Yield (method, models, its costs, its costs on whole models, FedMBO's costs on whole models).

    FedMBO comes first.
    """
    first = itself = measure(whole, setting.fedmbo())
    yield "FedMBO", "whole", first, first, first
    for name, algorithm in methods.items():
        for models, task in (("whole", whole), ("cut", cut)):
            now = measure(task, algorithm(setting))
            itself = now if models == "whole" else itself
            yield name, models, now, itself, first


def spent(task: Task, algorithm: Any) -> tuple[int, float, float]:
    """Return the exchanges, GFLOP and MB of a round."""
    ledger = play(task, algorithm, 1).ledger
    return ledger.exchanges, ledger.flops / 1e9, (ledger.bytes_down + ledger.bytes_up) / 1e6


def resnet12() -> None:
    """Print the operations of a round of each method on a network that is too large to run here."""
    head("method", "models", "GFLOP", "of FedMBO, %", "of itself, %")
    whole, cut = (strokes(capacities, "resnet12", (64, 160, 320, 640)) for capacities in ((), SPREAD))
    for name, models, now, itself, first in beside_fedmbo(counted, whole, cut, TASKS, PAIRED):
        row(name, models, f"{now:,.2f}", *(f"{100 * now / of:.1f}" for of in (first, itself)))


def counted(task: Task, algorithm: Any) -> float:
    """Return the GFLOP of a round.

    All clients reply once to each phase, and to TERMS − 1 products if products are exchanges.
    """
    given = task.problem, task.clients, task.x0, task.y0
    classes = submodels.classes(algorithm, *given)
    costs = known_flops(algorithm, *given, classes)
    assert costs is not None
    each = len(task.clients) // max(1, len(classes))
    return (
        sum(
            cost * each * (TERMS - 1 if call[0] == "hypergradient.hessian_product" else 1)
            for call, cost in costs.items()
        )
        / 1e9
    )


def time(make: Callable[..., Task], setting: Setting, methods: Methods, passes: int, rounds: int) -> None:
    """Print the median time of a round, compared with FedMBO's on whole models and with the operations."""
    tasks = {"whole": make(()), "cut": make(SPREAD)}
    runs = {"FedMBO, whole": (tasks["whole"], setting.fedmbo())}
    for name, algorithm in methods.items():
        runs |= {f"{name}, {models}": (task, algorithm(setting)) for models, task in tasks.items()}
    results = turns({name: partial(play, *run, rounds) for name, run in runs.items()}, passes)
    times = {
        name: [float(np.median(np.diff(one.history["seconds"])[1:])) for one in passes]
        for name, passes in results.items()
    }
    flops = {name: passes[0].ledger.flops for name, passes in results.items()}
    head("method, models", "ms", "of FedMBO's time, %", "pass by pass", "of its operations, %")
    for name, own in times.items():
        each = [100 * b / a for a, b in zip(times["FedMBO, whole"], own, strict=True)]
        by_pass, operations = ", ".join(f"{one:.0f}" for one in each), 100 * flops[name] / flops["FedMBO, whole"]
        row(name, f"{1e3 * median(own):.1f}", f"{median(each):.0f}", by_pass, f"{operations:.1f}")


def coverage(seeds: range) -> None:
    """Print RABO's mean rounds to shares of the accuracy of whole models, by the least number of holders of a unit."""

    def ends(capacities: tuple[float, ...], **choice: Any) -> list[np.ndarray]:
        algorithm = fb.Submodels(METHODS["RABO, local"](DIGITS), **choice)
        runs = [play(digits(capacities, seed), algorithm, ROUNDS, measured=True, key=seed) for seed in seeds]
        return [run.history["test_accuracy"] for run in runs]

    whole = ends(())
    level = float(np.mean([end[-1] for end in whole]))
    head("units", "at least", "rounds to 90 %", "to 95 %", "accuracy at the end, %")
    row("all", 10, *mean_rounds(reached(whole, level)), percent(whole))
    for fixed in (False, True):
        kind, rounds = "fixed" if fixed else "dealt anew", []
        for least in (1, 2):
            runs = ends((0.25,), policy="covered", min_coverage=least, fixed=fixed)
            rounds.append(reached(runs, level))
            row(kind, least, *mean_rounds(rounds[-1]), percent(runs))
        sooner = rounds[0] - rounds[1]
        error = sooner.std(axis=1, ddof=1) / np.sqrt(len(seeds))
        each = [f"{mean:.1f} ± {one:.1f}" for mean, one in zip(sooner.mean(axis=1), error, strict=True)]
        row(kind, "sooner by, mean and standard error", *each, "")


def reached(ends: list[np.ndarray], level: float) -> np.ndarray:
    """Return the first rounds with at least 90 % and 95 % of the level, for each seed: (2, seeds)."""
    there = np.array([[end >= share * level for end in ends] for share in (0.9, 0.95)])
    assert there.any(axis=-1).all(), "a run that never gets there has no such round"
    return there.argmax(axis=-1)


def mean_rounds(rounds: np.ndarray) -> list[str]:
    return [f"{of_share.mean():.1f}" for of_share in rounds]


def percent(ends: list[np.ndarray]) -> str:
    last = 100 * np.array([end[-1] for end in ends])
    return f"{last.mean():.2f} ± {last.std(ddof=1):.2f}"


def main(
    parts: tuple[str, ...] = ("cost", "resnet12", "time", "time-conv4", "time-few-shot", "coverage"),
    passes: int = 5,
    rounds: int = 8,
    seeds: int = 3,
) -> None:
    timed = {"passes": passes, "rounds": rounds}
    run = {
        "cost": cost,
        "resnet12": resnet12,
        "time": lambda: time(partial(digits, hidden=(1024, 1024)), WIDE, METHODS, **timed),
        "time-conv4": lambda: time(strokes, TASKS, PAIRED, **timed),
        "time-few-shot": lambda: time(partial(strokes, shot=5), FEW_SHOT, PAIRED, **timed),
        "coverage": lambda: coverage(range(seeds)),
    }
    with tempfile.TemporaryDirectory() as compiled:  # runs that differ only in their seeds use one program
        jax.config.update("jax_compilation_cache_dir", compiled)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        fb.tune_cpu(1)
        for name in parts:
            print(f"\n{name}", flush=True)
            run[name]()
