"""How costs grow: SimFBO with more clients, with more unknowns, with more local steps.

    .venv/bin/python benchmarks/growth.py [--axes NAME ...] [--picture growth.png] [--out FILE] [--memory 24] [--most N]

x and y are vectors, the losses sums of squares, all samples in each step, float32; every size in a process of its own:

clients     10 to 10⁶, 10 unknowns, 4 samples for each loss, 5 local steps, everyone in each round
cohorts     the same, a cohort of 10 drawn in each round
unknowns    10² to 10⁷ in each of x and y, 4 clients with one sample for each loss, 5 local steps
local steps 1 to 100 of 100 clients, 100 unknowns, 4 samples

Measured are processor seconds of the first call, with its one round; milliseconds of a round after that, by the wall
clock; the peak memory of the process, what importing takes included, or on a GPU of the device. Slopes are fitted to
the three largest sizes. A size that takes over three minutes, or more memory than there may be, is left with a word,
and so are larger ones.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from machine import describe, peak_mb

SECONDS = 180
DECADES = {"clients": range(1, 7), "cohorts": range(1, 7), "unknowns": range(2, 8)}
AXES: dict[str, list[int]] = {name: [10**k for k in powers] for name, powers in DECADES.items()}
AXES["local steps"] = [1, 3, 10, 30, 100]
MEASURES = {"first": "first call, processor s", "round_ms": "a round, ms", "memory_mb": "peak memory, MB"}


def setting(axis: str, size: int) -> dict[str, Any]:
    """The numbers of one point."""
    if axis == "unknowns":
        return {"clients": 4, "dim": size, "samples": 1, "local_steps": 5, "cohort": None}
    if axis == "local steps":
        return {"clients": 100, "dim": 100, "samples": 4, "local_steps": size, "cohort": None}
    return {"clients": size, "dim": 10, "samples": 4, "local_steps": 5, "cohort": 10 if axis == "cohorts" else None}


def measure(clients: int, dim: int, samples: int, local_steps: int, cohort: int | None) -> dict[str, float]:
    """One point, in this process."""
    import jax
    import jax.numpy as jnp

    import fedbilevel as fb

    jax.config.update("jax_enable_compilation_cache", False)
    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal((clients, samples, dim), np.float32) for _ in range(2)]

    def outer(x, y, t):
        return 0.5 * jnp.mean(jnp.sum((y - t) ** 2, axis=1)) + 0.5 * jnp.vdot(x, x)

    def inner(x, y, c):
        return 0.5 * jnp.mean(jnp.sum((y - x - c) ** 2, axis=1))

    given = fb.Bilevel(outer, inner), fb.Clients(drawn[0], drawn[1]), jnp.zeros(dim), jnp.zeros(dim)
    method = fb.SimFBO(local_steps=local_steps, batch_size=None)
    began = processor_seconds()
    fb.solve(method, *given, rounds=1, cohort=cohort)
    first = processor_seconds() - began
    probe = fb.solve(method, *given, rounds=4, cohort=cohort, eval_every=2).history["seconds"]
    stretch = int(np.clip(0.2 / max(float(probe[-1] - probe[-2]) / 2, 1e-6), 1, 300))
    seconds = fb.solve(method, *given, rounds=5 * stretch, cohort=cohort, eval_every=stretch).history["seconds"]
    each = np.diff(np.asarray(seconds, float))[1:] / stretch  # the first stretch warms up
    return {"first": first, "round_ms": 1e3 * float(np.median(each)), "memory_mb": peak_mb()}


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def once(axis: str, size: int, memory_gib: float) -> dict[str, float] | str:
    """One point in a process of its own, or a word on why there is none."""
    command = [sys.executable, __file__, "--point", axis, str(size)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ends = time.monotonic() + SECONDS
    while process.poll() is None:
        time.sleep(0.2)
        word = ""
        if resident_gib(process.pid) > memory_gib:
            word = f"over {memory_gib:g} GiB"
        elif time.monotonic() > ends:
            word = f"over {SECONDS} s"
        if word:
            process.kill()
            process.communicate()
            return word
    printed, errors = process.communicate()
    if process.returncode:
        return errors.strip().splitlines()[-1][:150] if errors.strip() else f"ended with {process.returncode}"
    point: dict[str, float] = json.loads(printed.splitlines()[-1])
    return point


def resident_gib(pid: int) -> float:
    """Memory that a process holds; 0 once it has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30 if len(pages) > 1 else 0.0


def fitted(points: dict[int, dict[str, float]], measure: str) -> tuple[list[int], float, list[float]]:
    """The three largest sizes, the power of the size that a measure grows with there, and the fitted measures."""
    last = sorted(points)[-3:]
    if len(last) < 2:
        return last, float("nan"), [points[size][measure] for size in last]
    power, offset = np.polyfit(np.log(last), np.log([points[size][measure] for size in last]), 1)
    return last, float(power), [float(np.exp(offset + power * np.log(size))) for size in last]


def draw(found: dict[str, dict[int, dict[str, float]]], words: dict[str, str], path: Path) -> None:
    """A panel for each axis and measure, both logarithmic, with the fitted slope."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(MEASURES), len(found), figsize=(3.2 * len(found), 8), sharex="col", sharey="row", squeeze=False
    )
    for column, (axis, points) in enumerate(found.items()):
        sizes = sorted(points)
        for row, (key, title) in enumerate(MEASURES.items()):
            panel = panels[row][column]
            panel.loglog(sizes, [points[size][key] for size in sizes], "o-", color="tab:blue", markersize=4)
            last, power, line = fitted(points, key)
            panel.loglog(last, line, "--", color="tab:orange", label=f"slope {power:.2f}")
            panel.legend(loc="upper left", frameon=False)
            panel.grid(alpha=0.3)
            if column == 0:
                panel.set_ylabel(title)
        panels[0][column].set_title(axis if axis != "cohorts" else "clients, cohorts of 10")
        panels[-1][column].set_xlabel(axis if axis != "cohorts" else "clients")
        if axis in words:
            panels[-1][column].text(0.97, 0.03, words[axis], transform=panels[-1][column].transAxes, ha="right")
    for key, row in zip(MEASURES, panels, strict=True):
        every = [point[key] for points in found.values() for point in points.values()]
        middle = np.sqrt(min(every) * max(every))
        row[0].set_ylim(
            min(min(every) / 1.5, middle / 10), max(max(every) * 3, middle * 10)
        )  # two decades at the least
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=AXES, default=list(AXES), metavar="NAME", help=", ".join(AXES))
    parser.add_argument("--picture", type=Path, default=Path("growth.png"))
    parser.add_argument("--out", type=Path, help="write what is printed here as well")
    parser.add_argument("--memory", type=float, default=24.0, help="GiB that a process may hold")
    parser.add_argument("--most", type=int, default=10**7, help="leave out larger sizes")
    parser.add_argument("--point", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point:
        print(json.dumps(measure(**setting(options.point[0], int(options.point[1])))))
        return
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    say(describe())
    say(f"load {', '.join(f'{one:.1f}' for one in os.getloadavg())} at the start")
    say("\n| axis | size | " + " | ".join(MEASURES.values()) + " |\n|---|---:|" + "---:|" * len(MEASURES))
    found: dict[str, dict[int, dict[str, float]]] = {}
    words: dict[str, str] = {}
    for axis in options.axes:
        points = found.setdefault(axis, {})
        for size in (size for size in AXES[axis] if size <= options.most):
            point = once(axis, size, options.memory)
            if isinstance(point, str):
                words[axis] = f"{size:,}: {point}"
                say(f"| {axis} | {size:,} | {point} | | |")
                break
            points[size] = point
            say(f"| {axis} | {size:,} | {point['first']:.2f} | {point['round_ms']:.3f} | {point['memory_mb']:.0f} |")
        if points:
            say(f"| {axis} | slope | " + " | ".join(f"{fitted(points, key)[1]:.2f}" for key in MEASURES) + " |")
    say(f"\nload {', '.join(f'{one:.1f}' for one in os.getloadavg())} at the end")
    draw({axis: points for axis, points in found.items() if points}, words, options.picture)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
