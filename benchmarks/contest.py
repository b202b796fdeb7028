"""FedAvg by this library, written by hand in JAX, and by other libraries: the time of a round, and the cold start.

There are 100 clients with 600 samples of MNIST's size each, which make 30 local steps with batches of 20, in float32.
The programs by hand compute clients side by side (vmap), in turn (scan), or on as many devices as there are cores
(shard_map, in turn on each device). Every measurement is a process of its own. The clock is read five times, and
--rounds is the number of rounds between two readings. The cold start is the time from the beginning of the process to
the end of the first round, with imports and compilation, and without a cache; "first call" leaves out the imports. The
program by hand imports the library only for the CNN, whose network the library contains, and not for the 2NN. The loss
after all rounds is measured on 1,000 samples; batches are drawn by other keys, so the losses agree only roughly.

--others torch pfl fedjax also runs peers/with_NAME.py, for the 2NN and cohorts of 10. Each has an environment of its
own, `.venv-peers/NAME`, which is made the first time. The other libraries draw samples without replacement,
so that 30 batches are one pass through a client's samples; this changes the loss. The row "products" has the matrix
products of the 2NN alone, by NumPy, with a thread for each core.

--chunks also runs the library with other chunks, on one device and on all. On a GPU, clients are computed side by side
only. CLIENTS=1000 SAMPLES=32 in the environment give more and smaller clients.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import ROOT, head, in_process, medians, row, seconds, spread, turns
from benchmarks.peers import fedavg, work
from benchmarks.peers.work import BATCH, CLIENTS, COHORT, LR, STEPS

MODELS = ("2nn", "cnn")
TORCH = ["torch==2.13.0", "numpy==2.4.6"]
PINS = {
    "torch": TORCH,
    "pfl": ["pfl==0.6.0", *TORCH],
    "fedjax": ["fedjax==0.0.17", "dm-haiku==0.0.11", "jax==0.4.25", "jaxlib==0.4.25", "numpy==1.26.4", "scipy==1.12.0"],
}
"""The packages that pip installs, by library. FedJAX needs a JAX that still has `jax.tree_map`."""
LIMIT = 600  # the time limit for one program of another library, in seconds
QUICK = {"models": ["2nn"], "passes": 1, "rounds": 1}
Loss = Callable[[Any, Any], Any]


def model_of(name: str) -> tuple[Any, Loss]:
    """Return the starting parameters, and the loss, a function (parameters, batch)."""

    def entropy(logits: Any, label: Any) -> Any:
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], axis=1))

    def of_2nn(x: Any, batch: Any) -> Any:
        hidden = jax.nn.relu(batch["image"] @ x[0] + x[1])
        return entropy(jax.nn.relu(hidden @ x[2] + x[3]) @ x[4] + x[5], batch["label"])

    if name == "2nn":
        return work.start(), of_2nn
    from fedbilevel.tasks import networks

    cnn = networks.cnn((28, 28, 1), (8, 16, 64), 10)

    def of_cnn(parameters: Any, batch: Any) -> Any:
        return entropy(cnn.logits(*parameters, batch["image"].reshape(-1, 28, 28, 1)), batch["label"])

    return cnn.init(jax.random.key(0)), of_cnn


def samples(arrays: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip(("image", "label"), arrays, strict=True))


def library(model: str, cohort: int, devices: int | None = None, chunk: int | None = None) -> dict[str, float]:
    """Measure the library in this process. If `devices` or `chunk` is None, the library chooses it."""
    import fedbilevel as fb

    fb.tune_cpu(devices)
    data, clock = samples(work.data()), work.Clock()
    start, loss = model_of(model)
    method = fb.FedAvg(lr=LR, local_steps=STEPS, batch_size=BATCH)
    given = fb.SingleLevel(loss), fb.Clients(outer=data), start
    play = partial(fb.solve, method, *given, cohort=cohort, engine=fb.Local(chunk=chunk, devices=devices))
    play(rounds=1)
    clock.tick(1)
    result = play(rounds=work.ROUNDS, eval_every=work.STRETCH)
    for one in result.history.rows[1:]:
        clock.tick(one["round"], one["seconds"])
    return clock.result(loss(result.x, samples(work.few())))


def by_hand(model: str, cohort: int, how: str) -> dict[str, float]:
    """Measure a hand-written program in this process."""
    data, clock = samples(work.data()), work.Clock()
    x, loss = model_of(model)
    run = fedavg.program(
        loss, local_steps=STEPS, batch_size=BATCH, cohort=cohort, one_by_one=how != "vmap",
        devices=jax.device_count() if how == "shard_map" else 1,
    )  # fmt: skip
    arrays, weights = jax.tree.map(jnp.asarray, data), jnp.full(CLIENTS, 1 / CLIENTS)
    for begin, end in pairwise((0, 1, *range(work.STRETCH, work.ROUNDS + 1, work.STRETCH))):
        x = jax.block_until_ready(run(x, arrays, weights, LR, jax.random.key(begin), end - begin))
        clock.tick(end)
    return clock.result(loss(x, samples(work.few())))


def python_with(name: str) -> str:
    """Return the Python of a library's environment. The environment is made unless one with these versions exists."""
    room, pins = ROOT / ".venv-peers" / name, "\n".join(PINS[name])
    done, python = room / "pins.txt", str(room / "bin" / "python")
    if not done.exists() or done.read_text() != pins:
        uv = str(Path(sys.executable).with_name("uv"))  # libraries with the same PyTorch share its files
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(room)], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *PINS[name]], check=True)
        done.write_text(pins)
    return python


def by_other(name: str, stretch: dict[str, str]) -> dict[str, float]:
    """Measure another library in its environment."""
    program = Path(work.__file__).with_name(f"with_{name}.py")
    started = {**os.environ, **stretch, "STARTED": str(time.time())}
    command = [python_with(name), str(program)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=LIMIT, env=started)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"ms"')))


def products() -> dict[str, float]:
    """Measure the matrix products of a round of the 2NN alone, in this process.

    A layer has a product in the forward pass and another one for the gradient of its weights. All layers except the
    first also have a product for the gradient of their inputs.
    """
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    layers = [(drawn(BATCH, into), drawn(into, out), drawn(BATCH, out)) for into, out in pairwise(work.WIDTHS)]

    def client(_: int) -> None:
        for _ in range(STEPS):
            for number, (rows, weight, slope) in enumerate(layers):
                rows @ weight
                rows.T @ slope
                if number:
                    slope @ weight.T

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        times = [seconds(lambda: list(pool.map(client, range(COHORT)))) for _ in range(10)]
    return {"ms": 1e3 * median(times), **dict.fromkeys(("cold", "first", "loss"), float("nan"))}


def contenders(
    model: str, cohort: int, rounds: int, chunks: tuple[int, ...], others: tuple[str, ...]
) -> dict[str, Callable[[], Any]]:
    """Return the functions that measure each contender, by the contender's name."""
    stretch = {"STRETCH": str(rounds)}

    def measure(function: Callable[..., Any], *arguments: Any, **environment: str) -> Callable[[], Any]:
        return partial(in_process, function, *arguments, environment={**stretch, **environment})

    found = {"library": measure(library, model, cohort), "by hand, vmap": measure(by_hand, model, cohort, "vmap")}
    cores = [1]
    if jax.default_backend() == "cpu":
        cores = sorted({1, os.cpu_count() or 1})
        flags = f"--xla_force_host_platform_device_count={cores[-1]} --xla_cpu_multi_thread_eigen=false"
        found["by hand, scan"] = measure(by_hand, model, cohort, "scan")
        found["by hand, shard_map"] = measure(by_hand, model, cohort, "shard_map", XLA_FLAGS=flags)
    for devices in cores:
        for chunk in chunks:
            if chunk <= -(-cohort // devices):
                found[f"library, {devices=}, {chunk=}"] = measure(library, model, cohort, devices, chunk)
    if others and model == "2nn" and cohort == COHORT:
        found |= {PINS[name][0]: partial(by_other, name, stretch) for name in others}
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        found["products"] = measure(products, **threads)
    return found


def draw(measured: dict[str, list[dict[str, float]]], file: str) -> None:
    """Draw the times of a round and of the cold start: bars for medians, dots for passes, a line for their range."""
    from matplotlib.figure import Figure

    shown = {name: measured[name] for name in reversed(measured) if name != "products"}
    figure = Figure(figsize=(8, 0.45 * len(shown) + 1.1), dpi=120, layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    titles = {"ms": "a round, ms", "cold": "from start to the end of the first round, s"}
    for one, (key, title) in zip(axes, titles.items(), strict=True):
        most = max(each[key] for passes in shown.values() for each in passes)
        for height, (name, passes) in enumerate(shown.items()):
            values = [each[key] for each in passes]
            color = "tab:blue" if name == "library" else "0.6"
            one.barh(height, median(values), color=color, alpha=0.5, height=0.65)
            one.plot([min(values), max(values)], [height, height], color="black", linewidth=1)
            one.plot(values, [height] * len(values), "o", color="black", markersize=3)
            one.text(max(values) + 0.02 * most, height, f"{median(values):.{0 if key == 'ms' else 1}f}", va="center")
        one.set_xlim(0, 1.18 * most)
        one.set_xlabel(title)
        one.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(shown)), list(shown))
    figure.savefig(file)


def main(
    models: tuple[str, ...] = tuple(MODELS),
    cohorts: tuple[int, ...] = (COHORT,),
    passes: int = 3,
    rounds: int = 10,
    chunks: tuple[int, ...] = (),
    others: tuple[str, ...] = (),
    picture: str = "",
) -> None:
    for name in others:
        python_with(name)
    columns = "ms a round", "the library's, divided by this", "cold start, s", "first call, s", "loss"
    head("model", "cohort", "contender", *columns)
    for model in models:
        for cohort in cohorts:
            measured = turns(contenders(model, cohort, rounds, chunks, others), passes)
            ours = medians(measured["library"])["ms"]
            for name, runs in measured.items():
                ms, cold = spread((one["ms"] for one in runs), ".2f"), spread((one["cold"] for one in runs), ".1f")
                middle = medians(runs)
                ratio, first = f"{ours / middle['ms']:.2f}", f"{middle['first']:.1f}"
                row(model, cohort, name, ms, ratio, cold, first, f"{middle['loss']:.3f}")
            if picture and "products" in measured:
                draw(measured, picture)
