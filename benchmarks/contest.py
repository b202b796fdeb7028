"""FedAvg by the library and written by hand in JAX: milliseconds per round, the first call, memory.

There are 100 clients with 600 samples of MNIST's size each, which make 30 local steps with batches of 20, in float32.
The programs by hand compute clients side by side (vmap), in turn (scan), or on as many devices as there are cores
(shard_map, in turn on each device). Every measurement is a process of its own. The loss is measured after --rounds
rounds, on 1,000 samples; batches are drawn by other keys, so the losses agree only roughly. --chunks also runs the
library with other chunks, on one device and on all; the best of them is what a rule for chunks could reach. On a GPU,
clients are computed side by side only, and memory is the device's; CLIENTS=1000 SAMPLES=32 in the environment give more
and smaller clients.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, in_process, medians, row, seconds, spread, turns
from benchmarks.machine import peak_mb
from benchmarks.peers import fedavg, work
from benchmarks.peers.work import BATCH, CLIENTS, LR, STEPS
from fedbilevel.tasks import networks

MODELS = {"2nn": (networks.mlp, (784,), (200, 200)), "cnn": (networks.cnn, (28, 28, 1), (8, 16, 64))}
STRETCHES = 5  # the number of timed stretches of --rounds rounds each
QUICK = {"models": ["2nn"], "passes": 1, "rounds": 1}
Loss = Callable[[Any, Any], Any]


def model_of(name: str) -> tuple[Any, Loss]:
    """Return the starting parameters, and the loss, a function (parameters, batch)."""
    make, shape, hidden = MODELS[name]
    network = make(shape, hidden, 10)

    def loss(parameters: Any, batch: Any) -> Any:
        images = batch["image"].reshape(-1, *shape)
        return jnp.mean(networks.cross_entropy(network.logits(*parameters, images), batch["label"]))

    return network.init(jax.random.key(0)), loss


def samples(arrays: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip(("image", "label"), arrays, strict=True))


def library(model: str, cohort: int, rounds: int, devices: int, chunk: int) -> dict[str, float]:
    """Measure the library in this process. With 0 for `devices` or `chunk`, the library chooses."""
    fb.tune_cpu(devices or None)
    data = samples(work.data())
    began = time.perf_counter()
    start, loss = model_of(model)
    engine = fb.Local(chunk=chunk or None, **({"devices": devices} if devices else {}))
    method, some = fb.FedAvg(lr=LR, local_steps=STEPS, batch_size=BATCH), samples(work.few())
    history = fb.solve(
        method, fb.SingleLevel(loss), fb.Clients(outer=data), start, rounds=(STRETCHES + 1) * rounds,
        eval_every=rounds, cohort=cohort, engine=engine, metrics={"loss": lambda x, y: loss(x, some)},
    ).history  # fmt: skip
    each = np.diff(np.asarray(history["seconds"], float))[1:] / rounds
    first = time.perf_counter() - began - float(np.sum(each)) * rounds
    return {"ms": 1e3 * median(each), "first": first, "mb": peak_mb(), "loss": float(history["loss"][1])}


def by_hand(model: str, cohort: int, rounds: int, how: str) -> dict[str, float]:
    """Measure a hand-written program in this process."""
    data = samples(work.data())
    began = time.perf_counter()
    start, loss = model_of(model)
    run = fedavg.program(
        loss, local_steps=STEPS, batch_size=BATCH, cohort=cohort, one_by_one=how != "vmap",
        devices=jax.device_count() if how == "shard_map" else 1,
    )  # fmt: skip
    arrays, weights = jax.tree.map(jnp.asarray, data), jnp.full(CLIENTS, 1 / CLIENTS)

    def play() -> Any:
        return jax.block_until_ready(run(start, arrays, weights, LR, jax.random.key(0), rounds))

    end = float(jax.jit(loss)(play(), samples(work.few())))
    first = time.perf_counter() - began
    each = [seconds(play) / rounds for _ in range(STRETCHES)]
    return {"ms": 1e3 * median(each), "first": first, "mb": peak_mb(), "loss": end}


def contenders(model: str, cohort: int, rounds: int, chunks: tuple[int, ...]) -> dict[str, Callable[[], Any]]:
    """Return the functions that measure each contender, by the contender's name."""
    of = model, cohort, rounds
    cores = os.cpu_count() or 1
    found = {"library": partial(in_process, library, *of, 0, 0), "vmap": partial(in_process, by_hand, *of, "vmap")}
    if on_cpu := jax.default_backend() == "cpu":
        spread_out = f"--xla_force_host_platform_device_count={cores} --xla_cpu_multi_thread_eigen=false"
        environment = {"XLA_FLAGS": spread_out}
        found["scan"] = partial(in_process, by_hand, *of, "scan")
        found["shard_map"] = partial(in_process, by_hand, *of, "shard_map", environment=environment)
    for devices in sorted({1, cores} if on_cpu else {1}):
        for chunk in chunks:
            if chunk <= -(-cohort // devices):
                name = f"library, devices={devices}, chunk={chunk}"
                found[name] = partial(in_process, library, *of, devices, chunk)
    return found


def main(
    models: tuple[str, ...] = tuple(MODELS),
    cohorts: tuple[int, ...] = (10,),
    passes: int = 3,
    rounds: int = 10,
    chunks: tuple[int, ...] = (),
) -> None:
    head("model", "cohort", "contender", "ms a round", "of vmap by hand", "first call, s", "memory, MB", "loss")
    for model in models:
        for cohort in cohorts:
            measured = turns(contenders(model, cohort, rounds, chunks), passes)
            vmap = medians(measured["vmap"])["ms"]
            for name, runs in measured.items():
                ms, middle = spread((one["ms"] for one in runs), ".2f"), medians(runs)
                first, mb, loss = f"{middle['first']:.1f}", f"{middle['mb']:.0f}", f"{middle['loss']:.3f}"
                row(model, cohort, name, ms, f"{middle['ms'] / vmap:.2f}", first, mb, loss)
