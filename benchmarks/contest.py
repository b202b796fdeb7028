"""FedAvg beside what one would write by hand in JAX: milliseconds a round, the first call, memory; and the chunk rule.

    .venv/bin/python benchmarks/contest.py [--models 2nn …] [--cohorts 10 100] [--passes 3] [--chunks N …] [--out FILE]

100 clients of 600 samples like MNIST's, 30 local steps of batches of 20, float32. By hand: clients side by side (vmap),
in turn (scan), and on as many devices as there are cores (shard_map, in turn on each). The library has one line more
than a program without it: `fb.tune_cpu()`, before JAX starts. Every measurement is a process of its own, contenders in
turn; medians over the passes. "loss" is that after --rounds rounds, on 1,000 samples: batches are drawn by other keys,
so that it agrees roughly. --chunks also plays the library with other chunks, on one device and on all: the best of them
is what a rule could reach. On a GPU clients are side by side only, CLIENTS=1000 SAMPLES=32 in the environment are more
and smaller ones, and memory is the device's.

    .venv/bin/python benchmarks/contest.py --others [NAME …] [--keep FILE] [--picture FILE]

The 2NN with a cohort of 10 by other libraries, and here, by the programs peers/with_*.py, each in `.venv-peers/NAME`,
which is made the first time. 30 steps are one pass through a client's samples; the other libraries make it without
replacement, which changes the loss. Cold start: from the process's beginning to the end of the first round, imports and
compilation included, no cache. Memory: the process's peak, and the proportional memory (PSS) of its children, such as
Ray's workers, at the end of a stretch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import others
from peers import work
from peers.work import BATCH, CLIENTS, LR, STEPS

MODELS = ("2nn", "mlp", "cnn", "transformer")
BY_HAND = ("vmap", "scan", "shard_map")


def model_of(name: str) -> tuple:
    """(start, loss(parameters, batch))."""
    import jax
    import jax.numpy as jnp

    from fedbilevel.tasks import networks

    if name == "transformer":
        return transformer()
    make, hidden = {
        "2nn": (networks.mlp, (200, 200)),
        "mlp": (networks.mlp, (32,)),
        "cnn": (networks.cnn, (8, 16, 64)),
    }[name]
    shape = (784,) if make is networks.mlp else (28, 28, 1)
    network = make(shape, hidden, 10)

    def loss(parameters: Any, batch: Any) -> Any:
        images = batch["image"].reshape(-1, *shape)
        return jnp.mean(networks.cross_entropy(network.logits(*parameters, images), batch["label"]))

    return network.init(jax.random.key(0)), loss


def transformer() -> tuple:
    """That of peers/problems.py, with a head."""
    import jax
    import jax.numpy as jnp

    from fedbilevel.tasks import networks
    from peers import problems

    body, x, width = problems.transformer(jnp.float32)

    def loss(p: Any, batch: Any) -> Any:
        return jnp.mean(networks.cross_entropy(body(p[0], batch["image"]) @ p[1], batch["label"]))

    return (x, jax.random.normal(jax.random.key(1), (width, 10)) / width**0.5), loss


def measure(model: str, cohort: int, who: str, devices: int, chunk: int, rounds: int) -> dict[str, float]:
    """One contender in this process; `devices` and `chunk` 0: the library's own choice."""
    if who == "shard_map":
        count = f"--xla_force_host_platform_device_count={os.cpu_count()}"
        os.environ["XLA_FLAGS"] = f"{count} --xla_cpu_multi_thread_eigen=false"
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    data = dict(zip(("image", "label"), work.data(), strict=True))
    play = by_library if who == "library" else by_hand
    seconds, first, loss = play(model, cohort, who, devices, chunk, rounds, data)
    from machine import peak_mb

    return {"ms": 1e3 * statistics.median(seconds), "first": first, "mb": peak_mb(), "loss": float(loss)}


def by_library(model: str, cohort: int, who: str, devices: int, chunk: int, rounds: int, data: Any) -> tuple:
    import numpy as np

    import fedbilevel as fb

    fb.tune_cpu(devices or None)
    began = time.perf_counter()
    start, loss = model_of(model)
    clients, problem = fb.Clients(outer=data), fb.SingleLevel(loss)
    engine = fb.Local(chunk=chunk or None, **({"devices": devices} if devices else {}))
    method, some = fb.FedAvg(lr=LR, local_steps=STEPS, batch_size=BATCH), few()
    history = fb.solve(
        method, problem, clients, start, rounds=6 * rounds, eval_every=rounds, cohort=cohort, engine=engine,
        metrics={"loss": lambda x, y: loss(x, some)},
    ).history  # fmt: skip
    each = np.diff(np.asarray(history["seconds"], float))[1:] / rounds
    return list(each), time.perf_counter() - began - float(np.sum(each)) * rounds, history["loss"][1]


def few() -> Any:
    """Ten samples of each client."""
    return dict(zip(("image", "label"), work.few(), strict=True))


def by_hand(model: str, cohort: int, who: str, devices: int, chunk: int, rounds: int, data: Any) -> tuple:
    import jax
    import jax.numpy as jnp

    from peers import fedavg

    began = time.perf_counter()
    start, loss = model_of(model)
    spread = jax.device_count() if who == "shard_map" else 1
    run = fedavg.program(
        loss, local_steps=STEPS, batch_size=BATCH, cohort=cohort, one_by_one=who != "vmap", devices=spread
    )
    arrays, weights = jax.tree.map(jnp.asarray, data), jnp.full(CLIENTS, 1 / CLIENTS)
    play = lambda: jax.block_until_ready(run(start, arrays, weights, LR, jax.random.key(0), rounds))  # noqa: E731
    loss_then = jax.jit(loss)(play(), few())
    first, each = time.perf_counter() - began, []
    for _ in range(5):
        began = time.perf_counter()
        play()
        each.append((time.perf_counter() - began) / rounds)
    return each, first, loss_then


def contenders(chunks: list[int] | None, cohort: int) -> list[tuple[str, int, int]]:
    """(who, devices, chunk)."""
    import jax

    on_cpu = jax.default_backend() == "cpu"
    devices = {1, os.cpu_count() or 1} if on_cpu else {1}
    found = [("library", 0, 0), *((who, 0, 0) for who in (BY_HAND if on_cpu else BY_HAND[:1]))]
    if chunks is not None:
        sizes = sorted({*(chunks or (1, 2, 5, 10, 25, 50, cohort))} & set(range(1, cohort + 1)))
        found += [("library", d, c) for d in sorted(devices) for c in sizes if c <= -(-cohort // d)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["2nn"])
    parser.add_argument("--cohorts", nargs="+", type=int, default=[10])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10, help="of each of five timed stretches")
    parser.add_argument("--chunks", nargs="*", type=int, metavar="N")
    parser.add_argument(
        "--others", nargs="*", choices=others.NAMES, metavar="NAME", help=f"of {', '.join(others.NAMES)}; none: all"
    )
    parser.add_argument("--keep", type=Path, help="of --others: add its passes to those in this file")
    parser.add_argument("--picture", type=Path, help="of --others: draw it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--contender", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        model, cohort, who, devices, chunk = options.contender
        print(json.dumps(measure(model, int(cohort), who, int(devices), int(chunk), options.rounds)))
        return
    from machine import describe

    lines = [describe(), f"load {os.getloadavg()[0]:.1f} at the start", "", *HEAD]
    if options.others is not None:
        lines = [
            *lines[:-2],
            *others.play(options.others or list(others.NAMES), options.passes, options.keep, options.picture),
        ]
        finish(lines, options.out)
        return
    print("\n".join(lines), flush=True)
    for model in options.models:
        for cohort in options.cohorts:
            found: dict[tuple, list] = {one: [] for one in contenders(options.chunks, cohort)}
            for _ in range(options.passes):
                for one, passes in found.items():
                    command = [sys.executable, __file__, "--rounds", str(options.rounds), "--contender"]
                    done = subprocess.run(
                        [*command, model, str(cohort), *map(str, one)], check=True, capture_output=True, text=True
                    )
                    passes.append(json.loads(done.stdout.splitlines()[-1]))
            yardstick = statistics.median(p["ms"] for p in found["vmap", 0, 0])
            for (who, devices, chunk), passes in found.items():
                label = who if not devices else f"library, devices={devices}, chunk={chunk}"
                ms = [p["ms"] for p in passes]
                first, mb, loss = (statistics.median(p[key] for p in passes) for key in ("first", "mb", "loss"))
                lines.append(
                    f"| {model} | {cohort} | {label} | {statistics.median(ms):.2f} | {min(ms):.2f} to {max(ms):.2f} "
                    f"| **{statistics.median(ms) / yardstick:.2f}** | {first:.1f} | {mb:.0f} | {loss:.3f} |"
                )
                print(lines[-1], flush=True)
    finish(lines, options.out)


def finish(lines: list[str], out: Path | None) -> None:
    """Add the load, and write to a file what is asked to be there."""
    lines += ["", f"load {os.getloadavg()[0]:.1f} at the end"]
    if out:
        out.write_text("\n".join(lines) + "\n")


HEAD = [
    "| model | cohort | who | ms a round | from to | of vmap by hand | first call, s | memory, MB | loss |",
    "|---|---|---|---|---|---|---|---|---|",
]


if __name__ == "__main__":
    main()
