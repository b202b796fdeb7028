"""Figures 1 to 4 of the AFBO paper: test accuracy against time, synchronous and asynchronous methods side by side.

    FEDBILEVEL_DATA=FOLDER .venv/bin/python benchmarks/afbo_figures.py 1 [--seeds 0,1,2] [--out runs/afbo-1]

1  hyper_cleaning on MNIST, iid              3  regularization on Covertype
2  hyper_cleaning on MNIST, non-iid          4  the same with stragglers
(1 and 2 have the stragglers as well.) 18 clients, 5 of which are stragglers that take 5 times as long; an exchange
takes a client 1 s on its way and 0.02 s per batch gradient or product, each times a log-normal factor. AFBO waits for
the first 9, and so does ADBO. All else is what the presets say: the script only calls `fedbilevel compare`, whose
folder it leaves in --out, with a picture of time alone (figure.png), and reads from the runs when AFBO and ADBO first
have what FedNest and SDBO end with.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedbilevel.experiments import LoadedRun
from fedbilevel.experiments.compare import RunGroup, load_groups

CLEANING = ["hyper_cleaning", "--data", "mnist", "--set", "task.corruption=0.3"]
SHARDS = ["--set", "task.partition_by=dirichlet", "--set", "task.partition_options={alpha = 0.5, minimum = 20}"]
COVERTYPE = ["regularization", "--data", "covtype"]
STRAGGLERS = ["--set", "clock.stragglers=5", "--set", "clock.slowdown=5.0"]
FIGURES = {
    1: [*CLEANING, *STRAGGLERS],
    2: [*CLEANING, *SHARDS, *STRAGGLERS],
    3: COVERTYPE,
    4: [*COVERTYPE, *STRAGGLERS],
}
SECONDS = {1: 1500, 2: 1000, 3: 600, 4: 2000}  # of virtual time
CLOCK = ["--set", "clock.network=1.0", "--set", "clock.compute=0.02", "--set", "clock.spread=0.5"]
METHODS, SYNCHRONOUS = ("afbo", "adbo", "sdbo", "fednest"), ("fednest", "sdbo")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
WINDOW = 40.0  # virtual seconds over which accuracy is averaged: the noise of many rows is not to count as progress


def accuracy(run: LoadedRun) -> tuple[np.ndarray, np.ndarray]:
    """(time, test accuracy) of each row, the accuracy as the best so far of means over the last WINDOW seconds."""
    time, values = run.history["time"], run.history[run.metric]
    means = [values[(time > now - WINDOW) & (time <= now)].mean() for now in time]
    return time, np.maximum.accumulate(means)


def report(groups: list[RunGroup]) -> None:
    by_name = {group.algorithm: group for group in groups}
    print("\nmethod    accuracy at the end, per seed     time at the end")
    for name, group in by_name.items():
        ends = [accuracy(run)[1][-1] for run in group.runs]
        times = [run.history["time"][-1] for run in group.runs]
        print(f"{name:8}  {'  '.join(f'{end:.4f}' for end in ends):32}  {np.mean(times):10.0f}")
    for asynchronous in ("afbo", "adbo"):
        for name in SYNCHRONOUS:
            shares = []
            for fast, slow in zip(by_name[asynchronous].runs, by_name[name].runs, strict=True):
                time, reached = accuracy(slow)
                ours, best = accuracy(fast)
                first = time[np.argmax(reached >= reached[-1])]
                there = np.flatnonzero(best >= reached[-1])
                shares.append(ours[there[0]] / first if there.size else np.inf)
            shown = "  ".join(f"{share:.2f}" for share in shares)
            print(f"{asynchronous} reaches what {name} ends with in this share of its time, per seed: {shown}")


def draw(groups: list[RunGroup], file: Path) -> None:
    """Test accuracy against time: for each method the mean of the seeds, and from the least to the greatest."""
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    ends = []
    for group, colour, style in zip(groups, COLOURS, ("-", "--", "-.", ":"), strict=True):
        times = np.linspace(0, min(run.history["time"][-1] for run in group.runs), 300)
        values = [np.interp(times, run.history["time"], 100 * run.history[run.metric]) for run in group.runs]
        axes.plot(times, np.mean(values, axis=0), style, color=colour, label=group.algorithm)
        axes.fill_between(times, np.min(values, axis=0), np.max(values, axis=0), color=colour, alpha=0.2, linewidth=0)
        ends.append(np.max(values))
    axes.set(xlabel="virtual seconds", ylabel="test accuracy (%)", ylim=(min(ends) - 6, max(ends) + 0.5))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", type=int, choices=FIGURES)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--time", help="virtual seconds of each run")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="as `fedbilevel compare` has it"
    )
    options = parser.parse_args()
    out = options.out or Path("runs") / f"afbo-{options.figure}"
    more = [part for setting in options.set for part in ("--set", setting)]
    command = [*FIGURES[options.figure], *CLOCK, "--algorithms", ",".join(METHODS), "--seeds", options.seeds]
    command += ["--time", options.time or str(SECONDS[options.figure]), "--out", str(out), "--quiet"]
    command += ["--set", "run.eval_every=1", *more]
    subprocess.run([sys.executable, "-m", "fedbilevel.cli", "compare", *command], check=True)
    groups = load_groups([out / name for name in METHODS])
    report(groups)
    draw(groups, out / "figure.png")


if __name__ == "__main__":
    main()
