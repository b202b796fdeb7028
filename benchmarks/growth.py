"""The growth of SimFBO's costs with more clients, more unknowns, and more local steps.

x and y are vectors, and the losses are sums of squares. All samples are used in each step, in float32. Every size is
measured in a process of its own:

clients     10 to 10⁶, 10 unknowns, 4 samples for each loss, 5 local steps, all clients in each round
cohorts     the same, a cohort of 10 drawn in each round
unknowns    10² to 10⁷ in each of x and y, 4 clients with one sample for each loss, 5 local steps
local steps 1 to 100 of 100 clients, 100 unknowns, 4 samples

For each size the table has the processor seconds of the first call, with one round, the milliseconds of a later round
by the clock, and the peak memory: of the process with its imports, or on a GPU of the device. A slope is fitted to the
three largest sizes, both axes logarithmic. A size that fails or takes over three minutes ends its axis.
"""

import subprocess
from time import process_time
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import fedbilevel as fb
from benchmarks.harness import head, in_process, round_ms, row
from benchmarks.machine import peak_mb

SECONDS = 180
DECADES = {"clients": range(1, 7), "cohorts": range(1, 7), "unknowns": range(2, 8)}
AXES: dict[str, list[int]] = {name: [10**k for k in powers] for name, powers in DECADES.items()}
AXES["local steps"] = [1, 3, 10, 30, 100]
MEASURES = {"first": "first call, processor s", "round": "a round, ms", "memory": "peak memory, MB"}
QUICK = {"axes": ["cohorts"], "most": 1000}


def setting(axis: str, size: int) -> dict[str, Any]:
    """Return the numbers of clients, unknowns, samples and steps for one size."""
    if axis == "unknowns":
        return {"clients": 4, "dim": size, "samples": 1, "local_steps": 5, "cohort": None}
    if axis == "local steps":
        return {"clients": 100, "dim": 100, "samples": 4, "local_steps": size, "cohort": None}
    return {"clients": size, "dim": 10, "samples": 4, "local_steps": 5, "cohort": 10 if axis == "cohorts" else None}


def outer(x, y, t):
    return 0.5 * jnp.mean(jnp.sum((y - t) ** 2, axis=1)) + 0.5 * jnp.vdot(x, x)


def inner(x, y, c):
    return 0.5 * jnp.mean(jnp.sum((y - x - c) ** 2, axis=1))


def measure(axis: str, size: int) -> dict[str, float]:
    """Measure one size, in this process."""
    s, rng = setting(axis, size), np.random.default_rng(0)
    drawn = [rng.standard_normal((s["clients"], s["samples"], s["dim"]), np.float32) for _ in range(2)]
    given = fb.Bilevel(outer, inner), fb.Clients(*drawn), jnp.zeros(s["dim"]), jnp.zeros(s["dim"])
    method, cohort = fb.SimFBO(local_steps=s["local_steps"], batch_size=None), s["cohort"]
    began = process_time()
    fb.solve(method, *given, rounds=1, cohort=cohort)
    first = process_time() - began
    probe = fb.solve(method, *given, rounds=4, cohort=cohort, eval_every=2).history["seconds"]
    stretch = int(np.clip(0.2 / max(float(probe[-1] - probe[-2]) / 2, 1e-6), 1, 300))
    seconds = fb.solve(method, *given, rounds=5 * stretch, cohort=cohort, eval_every=stretch).history["seconds"]
    return {"first": first, "round": round_ms(seconds, stretch), "memory": peak_mb()}


def fitted(points: dict[int, dict[str, float]], measure: str) -> tuple[list[int], float, list[float]]:
    """Return the three largest sizes, the power of the size with which a measure grows there, and fitted values."""
    last = sorted(points)[-3:]
    power, offset = np.polyfit(np.log(last), np.log([points[size][measure] for size in last]), 1)
    return last, float(power), [float(np.exp(offset + power * np.log(size))) for size in last]


def draw(found: dict[str, dict[int, dict[str, float]]], file: str) -> None:
    """Draw a panel for each varied number and each measure, with logarithmic scales.

    A slope is fitted to the time of a round alone. The other measures have a bend where the samples begin to count.
    """
    figure = Figure(figsize=(3.2 * len(found), 8), layout="tight")
    panels = figure.subplots(len(MEASURES), len(found), sharex="col", sharey="row", squeeze=False)
    for column, (axis, points) in enumerate(found.items()):
        sizes = sorted(points)
        for panel, (key, title) in zip(panels[:, column], MEASURES.items(), strict=True):
            panel.loglog(sizes, [points[size][key] for size in sizes], "o-", color="tab:blue", markersize=4)
            if key == "round":
                last, power, line = fitted(points, key)
                panel.loglog(last, line, "--", color="tab:orange", label=f"slope {power:.2f}")
                panel.legend(loc="upper left", frameon=False)
            panel.grid(alpha=0.3)
            if column == 0:
                panel.set_ylabel(title)
        panels[0][column].set_title(axis if axis != "cohorts" else "clients, cohorts of 10")
        panels[-1][column].set_xlabel(axis if axis != "cohorts" else "clients")
    for key, row_of_panels in zip(MEASURES, panels, strict=True):
        every = [point[key] for points in found.values() for point in points.values()]
        middle = np.sqrt(min(every) * max(every))
        low, high = min(min(every) / 1.5, middle / 10), max(max(every) * 3, middle * 10)  # at least two decades
        row_of_panels[0].set_ylim(low, high)
    figure.savefig(file, dpi=120)


def main(axes: tuple[str, ...] = tuple(AXES), most: int = 10**7, picture: str = "") -> None:
    head("axis", "size", *MEASURES.values())
    found: dict[str, dict[int, dict[str, float]]] = {}
    for axis in axes:
        points = found.setdefault(axis, {})
        for size in (size for size in AXES[axis] if size <= most):
            try:
                points[size] = in_process(measure, axis, size, limit=SECONDS)
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                row(axis, f"{size:,}", type(error).__name__, "", "")
                break
            first, ms, memory = points[size].values()
            row(axis, f"{size:,}", f"{first:.2f}", f"{ms:.3f}", f"{memory:.0f}")
        if len(points) > 1:
            row(axis, "slope", *(f"{fitted(points, key)[1]:.2f}" for key in MEASURES))
    if picture:
        draw({axis: points for axis, points in found.items() if len(points) > 1}, picture)
