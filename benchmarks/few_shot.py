"""Few-shot learning with weak clients: accuracy, operations and bytes of bilevel, single-level and full-model methods.

    FEDBILEVEL_DATA=FOLDER .venv/bin/python benchmarks/few_shot.py [--data omniglot] [--ways 5] [--shots 1,5]
        [--seeds 0,1,2] [--rounds 100] [--methods rabo,simfbo] [--out runs/few-shot]

Ten clients, two of each capacity 1, 1/2, 1/4, 1/8, 1/16; Conv-4; the same number of rounds for everyone, and batches
with which RABO takes no more operations in a round than FedAvg. ProtoNet, MAML and FedMBO train the whole model on
all of them. Static, OAP, FedRolex and FIARSE are FedAvg on submodels (first units, segments, rolling, important units),
on the single-level objective "joint". A run that is in --out is not run again. Prints accuracies after the last round
beside those of Table II of RABO's paper, and draws accuracy against operations and bytes (few-shot.png in --out).

--methods rabo-c1,rabo-c2,rafbo-c1,rafbo-c2: figure 3, all clients of capacity 1/4, units that one or two of them hold.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator

import fedbilevel as fb
from fedbilevel.experiments import resolve
from fedbilevel.experiments.presets.table import merged
from fedbilevel.experiments.runner import algorithm_of
from fedbilevel.tasks import few_shot

BY_SHOT = {5: {"outer_lr": 2.0}}  # of 0.5, 1 and 2 on seed 0, twice; of FIARSE's 1, 2 and 4 the best was 2
CAPACITIES = (1.0, 0.5, 0.25, 0.125, 0.0625)
META, JOINT = ({"name": "fedavg", "local_steps": 5, "batch_size": 2, "outer_lr": lr} for lr in (0.5, 2.0))


@dataclass(frozen=True)
class Method:
    """An algorithm, the objective that it is given, and the shares of the model that clients hold; none: all of it."""

    algorithm: dict[str, Any]  # as in a spec: what it leaves out comes from the presets
    objective: str = "bilevel"
    capacities: tuple[float, ...] = CAPACITIES
    paper: dict[tuple[int, int], float] = field(default_factory=dict)  # (way, shot) -> %, ResNet-12
    by_shot: dict[int, dict[str, Any]] = field(default_factory=dict)  # fields that are others for so many images
    units: dict[str, Any] = field(default_factory=dict)  # the policy by which clients get theirs; {}: by importance


def paper(*percents: float) -> dict[tuple[int, int], float]:
    return dict(zip([(5, 1), (5, 5), (20, 1), (20, 5)], percents, strict=True))


def dealt(policy: str, percents: dict[tuple[int, int], float]) -> Method:
    """FedAvg whose clients get their units by another policy than by importance."""
    return Method(JOINT, "joint", CAPACITIES, percents, units={"policy": policy})


METHODS = {
    "ProtoNet": Method(META, "protonet", (), paper(80.76, 89.33, 60.05, 78.01)),
    "MAML": Method(META, "maml", (), paper(81.46, 92.01, 61.36, 78.35)),
    "FedMBO": Method({"name": "fedmbo"}, "bilevel", (), paper(82.66, 93.69, 63.18, 81.64), BY_SHOT),
    "Static": dealt("static", paper(72.34, 85.09, 42.99, 51.01)),
    "OAP": dealt("covered", paper(73.58, 86.16, 45.45, 51.92)),
    "FedRolex": dealt("rolling", paper(73.74, 86.95, 47.25, 55.29)),
    "FIARSE": Method(JOINT, "joint", CAPACITIES, paper(74.33, 87.78, 49.52, 55.87)),
    "RABO": Method({"name": "rabo"}, paper=paper(76.05, 89.12, 54.97, 77.41), by_shot=BY_SHOT),
    "RAFBO": Method({"name": "rafbo"}, paper=paper(75.09, 88.57, 51.37, 71.16), by_shot=BY_SHOT),
    "SimFBO": Method({"name": "simfbo"}, by_shot={5: {"server_lr": {"x": 1.0, "y": 10.0, "v": 10.0}}}),
}
COVERAGE = {
    f"{name.upper()}-C{least}": Method(
        {"name": name, "inner": {"server_lr": 1.0}},
        capacities=(0.25,),
        units={"policy": "covered", "min_coverage": least},
    )
    for name in ("rabo", "rafbo")
    for least in (1, 2)
}
"""Figure 3: all of capacity 1/4, each unit held by at least one or two clients, and a fourth of them by the others. The
server takes one mean step of y: ten of them go too far where a single client holds an entry."""
ALL = {**METHODS, **COVERAGE}


def algorithm_for(method: Method, shot: int, more: dict[str, Any]) -> Any:
    """The method with all its fields, `more` before all others."""
    fields = merged(merged(method.algorithm, method.by_shot.get(shot, {})), more)
    return algorithm_of(resolve({"task": {"name": "few_shot"}, "algorithm": fields, "submodels": method.units}))


def play(name: str, options: argparse.Namespace, way: int, shot: int, seed: int) -> dict[str, Any]:
    """One run: its rows and the seconds that it took."""
    method = ALL[name]
    task = few_shot(
        data=options.data,
        hidden=(options.channels,),
        way=way,
        shot=shot,
        objective=method.objective,
        capacities=method.capacities,
        test_episodes=options.episodes,
        seed=seed,
    )
    algorithm = algorithm_for(method, shot, options.fields)
    began = time.perf_counter()
    result = fb.solve(
        algorithm,
        task.problem,
        task.clients,
        task.x0,
        task.y0,
        rounds=options.rounds,
        key=seed,
        eval_every=max(1, options.rounds // options.evaluations),
        metrics=task.metrics,
        count_flops=True,
    )
    seconds = time.perf_counter() - began
    return {"rows": result.history.rows, "seconds": seconds, "compiling": result.compile_seconds}


def kept(file: Path, options: argparse.Namespace, make: Any) -> dict[str, Any]:
    """What the file has, or what `make` gives, then written there at once; runs with other options are refused."""
    names = ("data", "rounds", "evaluations", "channels", "episodes", "fields")
    setting = {name: getattr(options, name) for name in names}
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = {**make(), "setting": setting}
        draft = file.with_suffix(".new")
        draft.write_text(json.dumps(made))
        draft.replace(file)
    found: dict[str, Any] = json.loads(file.read_text())
    if found["setting"] != setting:
        sys.exit(f"{file} was made with {found['setting']}, not {setting}; give another --out")
    return found


def row(runs: list[dict[str, Any]], name: str, setting: tuple[int, int]) -> str:
    last = [run["rows"][-1] for run in runs]
    accuracy = 100 * np.array([one["test_accuracy"] for one in last])
    spread = f"± {accuracy.std(ddof=1):4.2f}" if len(runs) > 1 else ""
    megabytes = np.mean([one["bytes_down"] + one["bytes_up"] for one in last]) / 1e6
    gflop = np.mean([one["flops"] for one in last]) / 1e9 if all("flops" in one for one in last) else np.nan
    seconds = np.mean([one["seconds"] for one in last])
    theirs = ALL[name].paper.get(setting)
    return (
        f"| {name} | {accuracy.mean():.2f} {spread} | {theirs or '–'} | {gflop:,.0f} | {megabytes:,.1f} "
        f"| {seconds:.0f} | {np.mean([run['compiling'] for run in runs]):.0f} |"
    )


def draw(found: dict[tuple[int, int], dict[str, list[dict[str, Any]]]], file: Path) -> None:
    """Accuracy against operations and against bytes, a row of panels for each setting."""
    figure, panels = plt.subplots(len(found), 2, figsize=(10, 3.6 * len(found)), squeeze=False, layout="constrained")
    for (left, right), ((way, shot), methods) in zip(panels, found.items(), strict=True):
        for name, runs in methods.items():
            accuracy = np.mean([[100 * one["test_accuracy"] for one in run["rows"]] for run in runs], axis=0)
            style = {
                "color": plt.get_cmap("tab10")(list(ALL).index(name) % 10),
                "linestyle": "-" if ALL[name].capacities else "--",
            }
            for panel, of in ((left, lambda r: r.get("flops", np.nan) / 1e9), (right, traffic)):
                cost = np.mean([[of(one) for one in run["rows"]] for run in runs], axis=0)
                panel.plot(cost[1:], accuracy[1:], label=name, marker=".", **style)
        for panel, label in ((left, "GFLOP (all clients)"), (right, "traffic (MB, down + up)")):
            panel.set(xscale="log", xlabel=label, ylabel=f"test accuracy (%), {way}-way {shot}-shot")
            panel.grid(alpha=0.3)
            panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter("")
    curves = panels[0, 0].get_legend_handles_labels()
    figure.legend(*curves, loc="outside right upper", fontsize=8, title="dashed: whole models", title_fontsize=8)
    figure.savefig(file, dpi=110)


def traffic(one: dict[str, float]) -> float:
    return (one["bytes_down"] + one["bytes_up"]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="omniglot")
    parser.add_argument("--ways", default="5")
    parser.add_argument("--shots", default="1,5")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--evaluations", type=int, default=5, help="in a run, after the start")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=200, help="new tasks of the test")
    parser.add_argument("--fields", type=json.loads, default={}, help="of the algorithm, as JSON: for choosing steps")
    parser.add_argument("--out", type=Path, default=Path("runs/few-shot"))
    options = parser.parse_args()
    fb.tune_cpu()
    names = {name.lower(): name for name in ALL}
    chosen = [names[name.strip().lower()] for name in options.methods.split(",")]
    jax.config.update("jax_compilation_cache_dir", str(options.out.absolute() / "compiled"))
    found: dict[tuple[int, int], dict[str, list[dict[str, Any]]]] = {}
    for way in map(int, options.ways.split(",")):
        for shot in map(int, options.shots.split(",")):
            print(f"\n{way}-way {shot}-shot, {options.rounds} rounds\n")
            print("| method | accuracy % | paper % | GFLOP | MB | s in rounds | s compiling |")
            print("|---|---|---|---:|---:|---:|---:|")
            for name in chosen:
                files = [options.out / f"{way}-{shot}" / f"{name}-{seed}.json" for seed in options.seeds.split(",")]
                seeds = map(int, options.seeds.split(","))
                runs = [
                    kept(file, options, partial(play, name, options, way, shot, seed))
                    for file, seed in zip(files, seeds, strict=True)
                ]
                found.setdefault((way, shot), {})[name] = runs
                print(row(runs, name, (way, shot)), flush=True)
    draw(found, options.out / "few-shot.png")


if __name__ == "__main__":
    main()
