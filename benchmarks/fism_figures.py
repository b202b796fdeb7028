"""Figures 2 and 3 of the FISM paper: MNIST's zeros and ones, IR-IG and FISM with S in {1, 2, 4, 8} clients.

    FEDBILEVEL_DATA=FOLDER .venv/bin/python benchmarks/fism_figures.py [--runs 10] [--folder docs/images]

Figure 2: seconds of 200 rounds against the number m of training images. Figure 3: test accuracy (2,115 images) and
train loss at m = 11000 against time. γ_k = 10/k^0.8, λ_k = 1/k^0.1 (here divided by m), half of the images of either
class, drawn and ordered anew in every run, start uniform on [−1, 1]^784, float32. Clients vectorised, the default, and
one after the other, `Local(chunk=1)`. Seconds as in fism_table.py: of processor time, on one core.
"""

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fism_table import METHODS, SMALL_LOOPS, on_cores, play

SIZES, ROUNDS = (1000, 4000, 7000, 11000), 200
COLOURS = dict(zip(METHODS, ("#222222", "#E69F00", "#56B4E9", "#009E73", "#CC79A7"), strict=True))  # M. Okabe, K. Ito


class Line(NamedTuple):
    """A method, and whether its clients are vectorised."""

    name: str
    vectorised: bool

    @property
    def label(self) -> str:
        return self.name + ("" if self.vectorised else ", chunk=1")

    @property
    def style(self) -> dict[str, Any]:
        return {"color": COLOURS[self.name], "linestyle": "-" if self.vectorised else "--", "label": self.label}


LINES = [Line(name, True) for name in METHODS] + [Line(name, False) for name in METHODS if METHODS[name] > 1]


class Seen(NamedTuple):
    """What one run of figure 3 had at its stops."""

    seconds: list[float]
    accuracy: list[float]
    loss: list[float]
    sparsity: float  # at the end
    outer: float


def prepared(line: Line, m: int, seed: int) -> tuple[Any, Any, Any]:
    """A run before its first round, its carry, and the task."""
    import jax

    import fedbilevel as fb
    from fedbilevel.engines.engine import first_carry
    from fedbilevel.tasks import selection

    task = selection(data="mnist", samples=m, clients=METHODS[line.name], start=1.0, seed=seed)
    cls = fb.IRIG if line.name == "IR-IG" else fb.FISM
    algorithm = cls(lr=10.0, lr_decay=0.8, regularization=1 / m, regularization_decay=0.1)
    carry = first_carry(algorithm, task.problem, task.clients, task.x0, None)
    engine = fb.Local() if line.vectorised else fb.Local(chunk=1)
    return (
        engine.start(algorithm, task.problem, task.clients, len(task.clients), jax.random.key(seed), carry),
        carry,
        task,
    )


def timed(line: Line, m: int, runs: int) -> list[float]:
    """Seconds of 200 rounds, run by run."""
    first, carry, _ = prepared(line, m, 0)
    play(first, carry, 1)  # compiles; nothing in the program is of this run alone
    seconds = []
    for seed in range(runs):
        run, carry, _ = prepared(line, m, seed)
        run.program = first.program
        seconds.append(play(run, carry, ROUNDS)[1])
    return seconds


def watched(line: Line, m: int, seed: int) -> Seen:
    """One run, looked at after 1, 2, 3, … and then fewer and fewer of its rounds."""
    first, carry, _ = prepared(line, m, seed)
    play(first, carry, 1)  # compiles
    run, carry, task = prepared(line, m, seed)
    run.program = first.program
    seen, total = Seen([], [], [], 0.0, 0.0), 0.0
    for stop in np.unique(np.geomspace(1, ROUNDS, 40).astype(int)):
        carry, seconds = play(run, carry, int(stop))
        total += seconds
        x = carry.state.x
        seen.seconds.append(total)
        seen.accuracy.append(float(task.metrics["test_accuracy"](x, x)))
        seen.loss.append(float(task.metrics["train_loss"](x, x)))
    return seen._replace(sparsity=float(task.metrics["sparsity"](x, x)), outer=float(task.metrics["outer_loss"](x, x)))


def draw_2(found: dict[tuple[Line, int], list[float]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    panel = figure.subplots()
    for line in LINES:
        panel.plot(SIZES, [np.mean(found[line, m]) for m in SIZES], marker="o", markersize=3, **line.style)
    panel.set_xlabel("training images m")
    panel.set_ylabel(f"seconds of {ROUNDS} rounds, one core")
    panel.set_ylim(0, None)
    panel.legend(fontsize=8, ncols=2)
    panel.grid(alpha=0.3)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def draw_3(found: dict[Line, Seen], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    accuracy, loss = figure.subplots(1, 2, sharex=True)
    for line, seen in found.items():
        accuracy.plot(seen.seconds, [100 * a for a in seen.accuracy], **line.style)
        loss.plot(seen.seconds, seen.loss, **line.style)
    accuracy.set_ylabel("test accuracy, %")
    accuracy.set_ylim(98.5, 100.05)
    loss.set_ylabel("train loss")
    loss.set_yscale("log")
    loss.legend(fontsize=8)
    for panel in (accuracy, loss):
        panel.set_xscale("log")
        panel.set_xlabel("seconds, one core")
        panel.grid(alpha=0.3)
    figure.savefig(file, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="of figure 2")
    parser.add_argument("--processes", type=int, default=2, help="at once, with a core each")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    from machine import describe

    print(describe(), "; load", ", ".join(f"{load:.1f}" for load in os.getloadavg()), flush=True)
    seen = on_cores(watched, [(line, max(SIZES), 0) for line in LINES], options.processes, SMALL_LOOPS)
    draw_3(dict(zip(LINES, seen, strict=True)), options.folder / "fism-figure-3.png")
    print(f"Figure 3, m = {max(SIZES)}, after {ROUNDS} rounds")
    print(
        "| | seconds | test accuracy, % | best | train loss | H | share of zeros |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    for line, s in zip(LINES, seen, strict=True):
        ends = f"{s.seconds[-1]:.2f} | {100 * s.accuracy[-1]:.2f} | {100 * max(s.accuracy):.2f} | {s.loss[-1]:.2e}"
        print(f"| {line.label} | {ends} | {s.outer:.0f} | {s.sparsity:.3f} |", flush=True)
    jobs = [(line, m) for m in SIZES for line in LINES]
    seconds = on_cores(timed, [(*job, options.runs) for job in jobs], options.processes, SMALL_LOOPS)
    found = dict(zip(jobs, seconds, strict=True))
    draw_2(found, options.folder / "fism-figure-2.png")
    print(f"\nFigure 2, seconds of {ROUNDS} rounds, means of {options.runs} runs")
    print("| | " + " | ".join(f"m = {m}" for m in SIZES) + " |\n|---|" + "---:|" * len(SIZES))
    for line in LINES:
        print(f"| {line.label} | " + " | ".join(f"{np.mean(found[line, m]):.3f}" for m in SIZES) + " |")


if __name__ == "__main__":
    main()
