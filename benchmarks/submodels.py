"""What submodels save and cost: RABO and RAFBO on clients of limited capacity, beside whole models and FedMBO.

    .venv/bin/python benchmarks/submodels.py [PART ...] [--seeds 3]

Ten clients, two of each capacity 1, 1/2, 1/4, 1/8, 1/16, unless said otherwise.

cost       operations and bytes of a round, as the ledger has them, and the share of each array that is held on average;
           an MLP 64-512-512-10 on digits. Aim: at most 27 % of FedMBO's on whole models, of both.
conv4      the same with Conv-4 on generated characters, of local hypergradients on one draw of tasks
networks   operations alone, counted without playing, of Conv-4 with 16 and 64 channels and of the paper's ResNet-12
time       time of a round on whole models and on submodels, in turn, beside FedMBO's; MLP 64-1024-1024-10
time-conv4 the same with Conv-4 as in conv4; time-few-shot with Omniglot tasks of five images a character
coverage   all ten of capacity 1/4, segments dealt so that each unit is held by at least 1 or 2 clients: rounds to 90 %
           and 95 % of the accuracy that whole models end with
policies   accuracy of each choice of units
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

import fedbilevel as fb
import machine
from fedbilevel.core.submodel import UnitLayout
from fedbilevel.engines import submodels
from fedbilevel.engines.recorder import known_flops
from fedbilevel.tasks import Task, few_shot, hyper_representation

SPREAD = 2 * (1.0, 0.5, 0.25, 0.125, 0.0625)
ROUNDS, TERMS = 200, 5


@dataclass(frozen=True)
class Setting:
    """What all methods have in common."""

    inner: fb.parts.LocalSGD
    solver: fb.parts.Neumann
    batch_size: int
    outer_lr: float = 0.1

    def make(self, kind: Any, hypergradient: Any) -> Any:
        return kind(inner=self.inner, hypergradient=hypergradient, outer_lr=self.outer_lr, batch_size=self.batch_size)

    def fedmbo(self) -> fb.FedMBO:
        """What others are compared with, by products of random length."""
        return self.make(fb.FedMBO, fb.parts.Implicit(solver=replace(self.solver, sampling="random_per_client")))


DIGITS = Setting(fb.parts.LocalSGD(lr=0.3), fb.parts.Neumann(terms=5, step=0.05), 32, 0.3)
WIDE = Setting(fb.parts.LocalSGD(lr=0.01), fb.parts.Neumann(terms=TERMS, step=0.005), 32, 0.01)
TASKS = Setting(fb.parts.LocalSGD(lr=1.0), fb.parts.Neumann(terms=TERMS, step=0.2), 2)
FEW_SHOT = Setting(fb.parts.LocalSGD(local_steps=20, lr=1.0), fb.parts.Neumann(terms=10, step=0.2), 5)
Methods = dict[str, Callable[[Setting], Any]]
DIFFERENCES = fb.parts.Differences()


def one_coordinate(solver: fb.parts.Neumann) -> fb.parts.Coordinates:
    return fb.parts.Coordinates(count=1, terms=solver.most_terms, step=solver.step)


METHODS: Methods = {
    "RABO, local": lambda s: s.make(fb.RABO, fb.parts.LocalImplicit(solver=s.solver)),
    "RABO, global": lambda s: s.make(fb.RABO, fb.parts.Implicit(solver=s.solver)),
    "RAFBO, local": lambda s: s.make(fb.RAFBO, fb.parts.LocalImplicit(solver=s.solver, second_order=DIFFERENCES)),
    "RABO, global, by differences": lambda s: s.make(
        fb.RABO, fb.parts.Implicit(solver=s.solver, second_order=DIFFERENCES)
    ),
    "RAFBO, one coordinate": lambda s: s.make(fb.RAFBO, one_coordinate(s.solver)),
}
LOCAL: Methods = {name: METHODS[name] for name in ("RABO, local", "RAFBO, local")}
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
    """All clients in each round; a row of the history for every round."""
    given = task.problem, task.clients, task.x0, task.y0
    metrics = task.metrics if measured else None
    return fb.solve(algorithm, *given, rounds=rounds, key=key, eval_every=1, metrics=metrics, count_flops=not measured)


def arrays(task: Task) -> None:
    """Of each array, the share of all entries that it is, and the share of it that clients hold on average."""
    model = (task.x0, task.y0)
    unit_layout = UnitLayout.of(task.problem.structure, *model)

    def sizes(capacity: float) -> np.ndarray:
        units = {group: np.arange(count) for group, count in unit_layout.kept(capacity).items()}
        small = jax.eval_shape(lambda model: unit_layout.cut(("x", "y"), model, units), model)
        return np.array([leaf.size for leaf in jax.tree.leaves(small)])

    whole, held = sizes(1.0), np.mean([sizes(one) for one in SPREAD], axis=0)
    print("| array | shape | of all entries, % | held on average, % |\n|---|---|---:|---:|")
    for (path, leaf), size, part in zip(jax.tree_util.tree_leaves_with_path(model), whole, held, strict=True):
        name = "xy"[path[0].idx] + jax.tree_util.keystr(path[1:])
        print(f"| {name} | {leaf.shape} | {100 * size / whole.sum():.1f} | {100 * part / size:.1f} |")
    print(f"| all | | 100 | {100 * held.sum() / whole.sum():.1f} |")
    print(f"mean of c: {100 * np.mean(SPREAD):.2f} %, of c²: {100 * np.mean(np.square(SPREAD)):.2f} %\n")


def cost(make: Any, setting: Setting, methods: Methods = METHODS) -> None:
    """A round of each method on whole models and on submodels, beside FedMBO's on whole models."""
    whole, cut = make(()), make(SPREAD)
    arrays(cut)
    print(
        "| method | models | exchanges | GFLOP | of FedMBO, % | of itself, % | MB | of FedMBO, % | of itself, % ",
        end="",
    )
    print("| per exchange: GFLOP of FedMBO, % | MB of FedMBO, % |\n|---|---|" + 9 * "---:|")
    for name, models, now, itself, first in beside_fedmbo(spent, whole, cut, setting, methods):
        print(f"| {name} | {models} | {row(now, itself, first)}", flush=True)


def beside_fedmbo(measure: Any, whole: Task, cut: Task, setting: Setting, methods: Methods) -> Iterator[Any]:
    """(method, models, what it costs, what it costs on whole models, what FedMBO costs on these), FedMBO first."""
    first = itself = measure(whole, setting.fedmbo())
    yield "FedMBO", "whole", first, first, first
    for name, algorithm in methods.items():
        for models, task in (("whole", whole), ("cut", cut)):
            now = measure(task, algorithm(setting))
            itself = now if models == "whole" else itself
            yield name, models, now, itself, first


def spent(task: Task, algorithm: Any) -> tuple[int, float, float]:
    """Exchanges, GFLOP and MB of a round."""
    ledger = play(task, algorithm, 1).ledger
    return ledger.exchanges, ledger.flops / 1e9, (ledger.bytes_down + ledger.bytes_up) / 1e6


def networks() -> None:
    """Operations of a round of each method on networks that would take long to play here."""
    print("| network | method | models | GFLOP | of FedMBO, % | of itself, % |\n|---|---|---|---:|---:|---:|")
    for network, hidden in (("conv4", (16,)), ("conv4", (64,)), ("resnet12", (64, 160, 320, 640))):
        whole, cut = strokes((), network, hidden), strokes(SPREAD, network, hidden)
        for name, models, now, itself, first in beside_fedmbo(counted, whole, cut, TASKS, PAIRED):
            shares = " | ".join(f"{100 * now / of:.1f}" for of in (first, itself))
            print(f"| {network} {hidden} | {name} | {models} | {now:,.2f} | {shares} |", flush=True)


def counted(task: Task, algorithm: Any) -> float:
    """GFLOP of a round: everyone answers each phase once, and where they are exchanges TERMS − 1 products."""
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


def row(now: tuple[int, float, float], itself: tuple[int, float, float], first: tuple[int, float, float]) -> str:
    cells = [f"{now[0]}"]
    for place in (1, 2):
        cells += [f"{now[place]:.3f}", *(f"{100 * now[place] / of[place]:.1f}" for of in (first, itself))]
    cells += [f"{100 * (now[place] / now[0]) / (first[place] / first[0]):.1f}" for place in (1, 2)]
    return " | ".join(cells) + " |"


def seconds(make: Any, setting: Setting, methods: Methods, passes: int, rounds: int) -> None:
    """Median time of a round, each method in turn, beside FedMBO's on whole models and beside the operations."""
    tasks = {"whole": make(()), "cut": make(SPREAD)}
    print("| method, models | ms | of FedMBO's time, % | pass by pass | of its operations, % |")
    print("|---|---:|---:|---|---:|")
    runs = {
        "FedMBO, whole": (tasks["whole"], setting.fedmbo()),
        **{
            f"{name}, {models}": (task, algorithm(setting))
            for name, algorithm in methods.items()
            for models, task in tasks.items()
        },
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    flops: dict[str, float] = {}
    loads = []
    for _ in range(passes):
        for name, (task, algorithm) in runs.items():
            result = play(task, algorithm, rounds)
            times[name].append(float(np.median(np.diff(result.history["seconds"])[1:])))
            flops[name] = result.ledger.flops
            loads.append(os.getloadavg()[0])
    first = times["FedMBO, whole"]
    for name, own in times.items():
        each = [100 * b / a for a, b in zip(first, own, strict=True)]
        print(
            f"| {name} | {1e3 * statistics.median(own):.1f} | {statistics.median(each):.0f} "
            f"| {', '.join(f'{one:.0f}' for one in each)} | {100 * flops[name] / flops['FedMBO, whole']:.1f} |",
            flush=True,
        )
    print(f"load {min(loads):.1f} to {max(loads):.1f}")


def coverage(seeds: range) -> None:
    """RABO's mean rounds to shares of what whole models reach, by how many clients hold each unit at least."""

    def ends(capacities: tuple[float, ...], **choice: Any) -> list[np.ndarray]:
        algorithm = fb.Submodels(METHODS["RABO, local"](DIGITS), **choice)
        runs = [play(digits(capacities, seed), algorithm, ROUNDS, measured=True, key=seed) for seed in seeds]
        return [run.history["test_accuracy"] for run in runs]

    whole = ends(())
    level = float(np.mean([end[-1] for end in whole]))
    print("| units | at least | rounds to 90 % | to 95 % | accuracy at the end, % |\n|---|---:|---|---|---|")
    print(f"| all | 10 | {_told(_reached(whole, level))} | {_percent(whole)} |", flush=True)
    for fixed in (False, True):
        kind, rounds = "fixed" if fixed else "dealt anew", []
        for least in (1, 2):
            runs = ends((0.25,), policy="covered", min_coverage=least, fixed=fixed)
            rounds.append(_reached(runs, level))
            print(f"| {kind} | {least} | {_told(rounds[-1])} | {_percent(runs)} |", flush=True)
        sooner = rounds[0] - rounds[1]
        error = sooner.std(axis=1, ddof=1) / np.sqrt(len(seeds))
        each = " | ".join(f"{mean:.1f} ± {one:.1f}" for mean, one in zip(sooner.mean(axis=1), error, strict=True))
        print(f"| {kind} | sooner by, mean and standard error | {each} | |", flush=True)


def _reached(ends: list[np.ndarray], level: float) -> np.ndarray:
    """The first rounds with at least 90 % and 95 % of the level, seed by seed: (2, seeds)."""
    there = np.array([[end >= share * level for end in ends] for share in (0.9, 0.95)])
    assert there.any(axis=-1).all(), "a run that never gets there has no such round"
    return there.argmax(axis=-1)


def _told(rounds: np.ndarray) -> str:
    return " | ".join(f"{row.mean():.1f}" for row in rounds)


def _percent(ends: list[np.ndarray]) -> str:
    last = 100 * np.array([end[-1] for end in ends])
    return f"{last.mean():.2f} ± {last.std(ddof=1):.2f}"


def policies(seeds: range) -> None:
    print(f"RABO, accuracy in % after {ROUNDS} rounds\n")
    print("| units | mean ± deviation of those that end | seed by seed |\n|---|---|---|")
    for policy in ("whole", "importance", "static", "rolling", "random", "covered"):
        whole = METHODS["RABO, local"](DIGITS)
        algorithm = whole if policy == "whole" else fb.Submodels(whole, policy=policy)
        capacities = () if policy == "whole" else SPREAD
        ends = [_end(digits(capacities, seed), algorithm, seed) for seed in seeds]
        finite = [end for end in ends if not isinstance(end, str)]
        each = ", ".join(end if isinstance(end, str) else f"{100 * end[-1]:.2f}" for end in ends)
        print(f"| {policy} | {_percent(finite) if len(finite) > 1 else ''} | {each} |", flush=True)


def _end(task: Task, algorithm: Any, seed: int) -> np.ndarray | str:
    """Accuracy round by round, or how the run ended before its time."""
    try:
        return play(task, algorithm, ROUNDS, measured=True, key=seed).history["test_accuracy"]
    except fb.errors.NonFiniteError as error:
        return str(error).split(",")[0] + ": not finite"


def main() -> None:
    parts = {
        "cost": lambda: cost(lambda capacities: digits(capacities, hidden=(512, 512)), WIDE),
        "conv4": lambda: cost(strokes, TASKS, PAIRED),
        "networks": networks,
        "time": lambda: timed(lambda capacities: digits(capacities, hidden=(1024, 1024)), WIDE, LOCAL),
        "time-conv4": lambda: timed(strokes, TASKS, PAIRED),
        "time-few-shot": lambda: timed(lambda capacities: strokes(capacities, shot=5), FEW_SHOT, PAIRED),
        "coverage": lambda: coverage(range(options.seeds)),
        "policies": lambda: policies(range(options.seeds)),
    }
    timed = lambda *what: seconds(*what, options.passes, options.rounds)  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *parts], help="all, where none is named")
    parser.add_argument("--passes", type=int, default=5, help="of time, each of the two in turn")
    parser.add_argument("--rounds", type=int, default=8, help="of a pass of time; the first is left out")
    parser.add_argument("--seeds", type=int, default=3, help="of coverage and policies; from 0 on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as compiled:  # runs that differ in their seeds alone are one program
        jax.config.update("jax_compilation_cache_dir", compiled)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        fb.tune_cpu(1)
        print(machine.describe())
        for name in options.parts or parts:
            print(f"\n{name} (load {os.getloadavg()[0]:.1f})\n", flush=True)
            parts[name]()


if __name__ == "__main__":
    main()
