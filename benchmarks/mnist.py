"""Accuracy against exchanges on MNIST: SimFBO, MLP 784-200-10, 100 clients, cohort 10, three seeds.

    FEDBILEVEL_DATA=… python benchmarks/mnist.py [--seeds 0,1,2] [--out DIR]

Runs the two specs in benchmarks/specs, each in its run folder, and prints the test accuracy, mean ± standard deviation
over seeds, and the first exchange at which it passes some marks. A seed changes partition, start, cohorts and batches.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np

import fedbilevel as fb
from fedbilevel import authoring, experiments
from fedbilevel.experiments import toml

SPECS = Path(__file__).with_name("specs")
MARKS = (0.85, 0.90, 0.95)
TARGETS = {"mnist-iid": {60: 0.85, 500: 0.95}, "mnist-shards": {500: 0.90}}


def passed(history: authoring.History, mark: float) -> float:
    """The first exchange with at least that accuracy; infinity if none."""
    reached = history["exchanges"][history["test_accuracy"] >= mark]
    return float(reached[0]) if len(reached) else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, help="folder for the run folders; default: temporary")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    fb.tune_cpu()
    with tempfile.TemporaryDirectory() as temporary:
        for name, targets in TARGETS.items():
            histories = []
            for seed in seeds:
                spec = experiments.configure(toml.read(SPECS / f"{name}.toml")).replace(
                    run={"seed": seed}, task={"seed": seed}
                )
                folder = (options.out or Path(temporary)) / name / f"seed-{seed}"
                histories.append(experiments.run(spec, folder).history)
            report(name, targets, histories)


def report(name: str, targets: dict[int, float], histories: list[authoring.History]) -> None:
    print(f"{name}: test accuracy in %, mean ± standard deviation of {len(histories)} seeds")
    for exchange in (10, 60, 100, 250, 500):
        values = np.array([100 * h["test_accuracy"][h["exchanges"] == exchange][0] for h in histories])
        goal = f"   (to reach: {100 * targets[exchange]:.0f})" if exchange in targets else ""
        each = ", ".join(f"{value:.2f}" for value in values)
        print(f"  after {exchange:3d} exchanges  {values.mean():6.2f} ± {values.std(ddof=1):.2f}   ({each}){goal}")
    for mark in MARKS:
        firsts = ", ".join(f"{passed(h, mark):.0f}" for h in histories)
        print(f"  first at {100 * mark:.0f} %: exchange {firsts}")
    seconds = np.mean([h["seconds"][-1] for h in histories])
    print(f"  {seconds:.0f} s in rounds on average")


if __name__ == "__main__":
    main()
