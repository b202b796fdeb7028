"""Steps on x that nobody chooses: AdaptiveSteps beside optimizers of Optax, which have one setting each.

FEDBILEVEL_DATA=… python benchmarks/steps_on_x.py [METHOD …] [--tasks NAME …] [--out FILE]

y's and v's steps adapt in all. Every optimizer has one setting, unchanged over tasks: Adam 0.05 and its cosine to 0 at
the horizon, AdaGrad by entry 0.1, DoG and Prodigy 1, Schedule-Free Adam 0.05. Where a run ends after the preset's
rounds, for two seeds; "died" is not finite.
"""

import argparse
from pathlib import Path

import numpy as np
import optax

import fedbilevel as fb
from no_steps import TASKS, asked_for, end, given, played

OPTIMIZERS = {
    "default": lambda rounds: None,
    "Adam": lambda rounds: optax.adam(0.05),
    "Adam, horizon": lambda rounds: optax.adam(optax.cosine_decay_schedule(0.05, rounds)),
    "AdaGrad": lambda rounds: optax.adagrad(0.1),
    "DoG": lambda rounds: optax.contrib.dog(1.0),
    "Prodigy": lambda rounds: optax.contrib.prodigy(1.0),
    "Schedule-Free": lambda rounds: optax.contrib.schedule_free_adamw(0.05),
}
FEW = [name for name in TASKS if not name.startswith("representation, ")] + ["representation, digits"]


def ends(name: str, label: str) -> tuple[str, dict[str, list[float]]]:
    """The metric of a task, and where each optimizer ends."""
    made, plan, metric = asked_for(label, name)
    bare, found = given(made.algorithm, None, None), {}
    for what, make in OPTIMIZERS.items():
        optimizer = make(plan.rounds)
        method = bare if optimizer is None else fb.OuterOptimizer(bare, optimizer=optimizer)
        runs = [played(made, plan, method, plan.rounds, seed) for seed in (0, 1)]
        found[what] = [end(run, metric) for run in runs]
    return metric, found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("methods", nargs="*", default=["simfbo", "fednest"])
    parser.add_argument("--tasks", nargs="*", default=FEW)
    parser.add_argument("--out", type=Path)
    asked, lines = parser.parse_args(), []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    for name in asked.methods:
        say(f"\n{name:46}" + "".join(f"{what:>18}" for what in OPTIMIZERS))
        for label in asked.tasks:
            metric, found = ends(name, label)
            shown = (" ".join("died" if np.isnan(one) else f"{one:.4f}" for one in pair) for pair in found.values())
            say(f"{label:30}{metric:16}" + "".join(f"{one:>18}" for one in shown))
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
