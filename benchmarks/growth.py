"""The growth of SimFBO's costs with more clients, more unknowns, and more local steps.

In the first four axes x and y are vectors, and the losses are sums of squares. All samples are used in each step, in
float32, and steps adapt.

clients      10 to 10⁶, 10 unknowns, 4 samples for each loss, 5 local steps, all clients in each round
cohorts      the same, a cohort of 10 drawn in each round
unknowns     10² to 10⁷ in each of x and y, 4 clients with one sample for each loss, 5 local steps
local-steps  1 to 100 of 100 clients, 100 unknowns, 4 samples

On the other axes there are a thousand to a million clients, and 100 of them reply in each round:

shared        clients share all of y: a network with a hidden layer of 128, five local steps, 10 training and 10
              validation samples of each client, which are memory-mapped (2.7 GB in a temporary folder). Aims: a time of
              at most 1.5 times that with a thousand clients, and at most 4 GiB
on-disk       each client has leaves of y of its own, a linear classifier, which take 1.4 kB with the state of the
              adjoint; two training and two validation samples; these states are in temporary files (`stream=True`)
in-memory     the same, with all samples and states on the device
replies       softmax regression, five local steps: a "synchronous" round has a cohort of 100, and an "asynchronous"
              round waits for the first 100 replies of all clients. It also needs the clock, the tables of replies that
              are under way, and the differences that its clients store. Aim: at most 1.3 times the time of the other

Every size is measured in a process of its own, and the sizes of an axis are measured in turn, `passes` times. The table
has medians: the processor seconds of the first call, with one round, the milliseconds of a later round by the clock,
and the peak memory: of the process with its imports and with pages of files, or on a GPU of the device. The ratio is
the least time of a round, divided by the least time of a round at the smallest size. A slope is fitted to the three
largest sizes, with both axes logarithmic. A size that fails, or takes over three minutes in one of the first four axes,
ends its axis.
"""

import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import fedbilevel as fb
from benchmarks.harness import head, in_process, medians, round_ms, row, turns
from benchmarks.machine import peak_mb
from fedbilevel.data import open_clients, write_clients
from fedbilevel.tasks import networks

VECTORS = ("clients", "cohorts", "unknowns", "local-steps")
MAPPED = ("shared", "on-disk", "in-memory")
MANY = [10**k for k in range(1, 7)]
AXES: dict[str, list[int]] = {
    "clients": MANY,
    "cohorts": MANY,
    "unknowns": [10**k for k in range(2, 8)],
    "local-steps": [1, 3, 10, 30, 100],
    "shared": [1_000, 1_000_000],
    "on-disk": [10_000, 100_000, 1_000_000],
    "in-memory": [10_000, 100_000, 1_000_000],
    "replies": [1_000, 10_000],
}
KINDS = {"replies": ("synchronous", "asynchronous")}  # the kinds of rounds of an axis that are measured in turn
CLASSES, COHORT, BLOCK = 10, 100, 10_000  # BLOCK: the number of clients whose samples are drawn at once
MEASURES = {"first": "first call, processor s", "round": "a round, ms", "memory": "peak memory, MB"}
QUICK = {"axes": ["cohorts", "shared", "replies"], "most": 1000}


def vectors(axis: str, size: int) -> tuple[Any, ...]:
    """Return a method, a problem, its clients, the start and options of `solve`: vectors, and sums of squares."""
    clients, dim, samples, steps = {
        "unknowns": (4, size, 1, 5),
        "local-steps": (100, 100, 4, size),
    }.get(axis, (size, 10, 4, 5))

    def outer(x: Any, y: Any, t: Any) -> Any:
        return 0.5 * jnp.mean(jnp.sum((y - t) ** 2, axis=1)) + 0.5 * jnp.vdot(x, x)

    def inner(x: Any, y: Any, c: Any) -> Any:
        return 0.5 * jnp.mean(jnp.sum((y - x - c) ** 2, axis=1))

    rng = np.random.default_rng(0)
    drawn = [rng.standard_normal((clients, samples, dim), np.float32) for _ in range(2)]
    start, cohort = (jnp.zeros(dim), jnp.zeros(dim)), 10 if axis == "cohorts" else None
    method = fb.SimFBO(local_steps=steps, batch_size=None)
    return method, fb.Bilevel(outer, inner), fb.Clients(*drawn), start, {"cohort": cohort}


def classifier(model: Any, penalty: Any, own: Any = None) -> fb.Bilevel:
    """Return the problem of training a network, with a penalty that is a function of x."""

    def outer(x: Any, y: Any, batch: Any) -> Any:
        return networks.cross_entropy(model.logits(x, y, batch["image"]), batch["label"])

    def inner(x: Any, y: Any, batch: Any) -> Any:
        return outer(x, y, batch) + penalty(x) * sum((leaf**2).sum() for leaf in jax.tree.leaves(y))

    return fb.Bilevel(outer, inner, own=own)


def replies(axis: str, clients: int) -> tuple[Any, ...]:
    """Return the same for clients with random bytes as images, and random labels."""
    rng, model = np.random.default_rng(0), networks.linear((784,), (), CLASSES)
    images = rng.integers(0, 255, (clients, 32, 784), dtype=np.uint8)
    samples = {"image": images, "label": rng.integers(0, CLASSES, (clients, 32))}
    method: Any = fb.SimFBO(local_steps=5, batch_size=32, client_lr=1e-4, server_lr=1e-4)
    clock = fb.Clock(compute=0.1, spread=0.5, stragglers=clients // 4)
    options = {"engine": fb.Local(clock=clock), "cohort": COHORT}
    if axis == "asynchronous":
        method, options["cohort"] = fb.Asynchronous(method, wait_for=COHORT), None
    start = jnp.asarray(-5.0), model.init(jax.random.key(0))[1]
    return method, classifier(model, jnp.exp), fb.Clients(samples, samples), start, options


def shape(axis: str) -> tuple[int, int]:
    """Return the number of features, and the number of each client's samples for each loss."""
    return (32, 10) if axis == "shared" else (16, 2)


def population(axis: str, clients: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the samples of each client, labelled by a random linear map, or by one for each client."""
    rng, (features, samples) = np.random.default_rng(0), shape(axis)
    truth = rng.normal(size=(features, CLASSES))
    for first in range(0, clients, BLOCK):
        count = min(BLOCK, clients - first)
        images = rng.normal(size=(count, 2 * samples, features)).astype(np.float32)
        maps = truth if axis == "shared" else rng.normal(size=(count, features, CLASSES))
        labels = np.argmax(images @ maps, axis=-1).astype(np.int32)
        for image, label in zip(images, labels, strict=True):
            yield {"image": image, "label": label}


def mapped(axis: str, folder: str) -> tuple[Any, ...]:
    """Return the same for memory-mapped clients."""
    packed, (features, samples) = open_clients(Path(folder)), shape(axis)
    first, size = np.asarray(packed.start), np.full(len(packed.start), samples)
    inner, outer = (fb.Ragged(packed.arrays, start, size) for start in (first, first + samples))
    options = {"cohort": COHORT, "engine": fb.Local(stream={"on-disk": True, "in-memory": False}.get(axis))}
    if axis == "shared":
        model = networks.mlp((features,), (128,), CLASSES)
        method, start = fb.SimFBO(local_steps=5, batch_size=10), model.init(jax.random.key(0))
        problem = classifier(model, lambda x: 1e-3)
    else:
        model = networks.linear((features,), (), CLASSES)
        steps = fb.XYV(x=0.01, y=0.1, v=0.1)
        method = fb.SimFBO(local_steps=1, batch_size=None, client_lr=0.1, server_lr=steps)
        start = -1.0, model.init(jax.random.key(0))[1]
        problem = classifier(model, lambda x: 10**x, own=lambda path: True)
    return method, problem, fb.Clients(inner=inner, outer=outer), start, options


def measure(axis: str, size: int, folder: str) -> dict[str, float]:
    """Measure one size, in this process."""
    if axis in MAPPED:
        method, problem, clients, start, options = mapped(axis, folder)
    else:
        method, problem, clients, start, options = (vectors if axis in VECTORS else replies)(axis, size)
    play = partial(fb.solve, method, problem, clients, *start, progress=False, **options)
    began = process_time()
    play(rounds=1)
    first = process_time() - began
    probe = play(rounds=4, eval_every=2).history["seconds"]
    stretch = int(np.clip(0.2 / max(float(probe[-1] - probe[-2]) / 2, 1e-6), 1, 300))
    result = play(rounds=5 * stretch, eval_every=stretch)
    assert problem.own is None or any(np.any(result.own(i)["weight"]) for i in range(size)), "no own leaf was stored"
    return {"first": first, "round": round_ms(result.history["seconds"], stretch), "memory": peak_mb()}


def attempt(axis: str, size: int, folder: str, failed: dict[str, int]) -> dict[str, float] | None:
    """Measure one size in a process of its own. The result is None if this size, or a smaller one, failed."""
    if size >= failed.get(axis, np.inf):
        return None
    try:
        return in_process(measure, axis, size, folder, limit=180 if axis in VECTORS else 3600)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        failed[axis] = size
        return None


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
        varied = "clients" if axis == "cohorts" else axis.replace("-", " ")
        panels[0][column].set_title("clients, cohorts of 10" if axis == "cohorts" else varied)
        panels[-1][column].set_xlabel(varied)
    for key, row_of_panels in zip(MEASURES, panels, strict=True):
        every = [point[key] for points in found.values() for point in points.values()]
        middle = np.sqrt(min(every) * max(every))
        low, high = min(min(every) / 1.5, middle / 10), max(max(every) * 3, middle * 10)  # at least two decades
        row_of_panels[0].set_ylim(low, high)
    figure.savefig(file, dpi=120)


def report(kind: str, runs: dict[int, list[Any]]) -> dict[int, dict[str, float]]:
    """Print the rows of an axis. Return the medians of each size that all passes have measured."""
    points = {size: medians(each) for size, each in runs.items() if None not in each}
    least = {size: min(run["round"] for run in runs[size]) for size in points}
    for size, (first, ms, memory) in ((size, of.values()) for size, of in points.items()):
        ratio = least[size] / least[min(least)]
        row(kind, f"{size:,}", f"{first:.2f}", f"{ms:.3f}", f"{memory:.0f}", f"{ratio:.2f}")
    if len(points) > 1:
        row(kind, "slope", *(f"{fitted(points, key)[1]:.2f}" for key in MEASURES), "")
    return points


def main(axes: tuple[str, ...] = tuple(AXES), most: int = 10**7, passes: int = 1, picture: str = "") -> None:
    head("axis", "size", *MEASURES.values(), "ratio")
    found: dict[str, dict[int, dict[str, float]]] = {}
    for axis in axes:
        failed: dict[str, int] = {}
        kinds, sizes = KINDS.get(axis, (axis,)), [size for size in AXES[axis] if size <= most]
        if not sizes:
            row(axis, f"none up to {most:,}", "", "", "", "")
            continue
        with tempfile.TemporaryDirectory() as room:
            for size in sizes if axis in MAPPED else []:
                write_clients(Path(room, str(size)), np.full(size, 2 * shape(axis)[1]), population(axis, size))
            contenders = {
                (kind, size): partial(attempt, kind, size, f"{room}/{size}", failed) for kind in kinds for size in sizes
            }
            measured = turns(contenders, passes)
        for kind in kinds:
            found[kind] = report(kind, {size: measured[kind, size] for size in sizes})
        for kind, size in failed.items():
            row(kind, f"{size:,}", "failed, or took too long", "", "", "")
    if picture:
        draw({axis: points for axis, points in found.items() if len(points) > 1}, picture)
