"""A hundred local steps of ten vectorised clients: a module of PyTorch beside the same model written in JAX.

    .venv/bin/python scripts/bootstrap.py --torch
    .venv/bin/python benchmarks/torch_modules.py [--runs 9]

Both run in one process, in turns, from the same weights and on the same samples, in one compiled program each. Ratios
are of pairs of neighbouring runs: on a shared machine seconds alone say little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn

import fedbilevel as fb
from fedbilevel.torch import from_torch
from machine import describe

CLIENTS, STEPS, CLASSES = 10, 100, 5
Model = Callable[[Any, Any], Any]


def mlp() -> nn.Module:
    """784-200-5, the network of FedAvg's paper with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def mlp_in_jax(p: Any, u: Any) -> Any:
    h = jax.nn.relu(u.reshape(len(u), -1) @ p["1.weight"] + p["1.bias"])
    return h @ p["3.weight"] + p["3.bias"]


def in_jax(weights: Any) -> Any:
    """The layout that one takes in JAX: (inputs, outputs)."""
    return {name: a.T for name, a in weights.items()}


def local_steps(model: Model, batch: int) -> Any:
    """Every client's steps of SGD: (weights, images, labels), each with a leading axis of clients -> losses."""

    def loss(p: Any, u: Any, t: Any) -> Any:
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(model(p, u)), t[:, None], 1))

    def client(p: Any, u: Any, t: Any) -> Any:
        def step(p: Any, i: Any) -> Any:
            rows = (i * batch + jnp.arange(batch)) % len(u)
            value, slope = jax.value_and_grad(loss)(p, u[rows], t[rows])
            return jax.tree.map(lambda a, b: a - 0.01 * b, p, slope), value

        return lax.scan(step, p, jnp.arange(STEPS))[1]

    return jax.jit(jax.vmap(client))


def compare(name: str, module: nn.Module, model: Model, batch: int, runs: int) -> None:
    """Print a row: seconds of both, their ratio, and by how much the losses differ."""
    rng = np.random.default_rng(0)
    u = jnp.asarray(rng.normal(size=(CLIENTS, 2 * batch, 1, 28, 28)), jnp.float32)
    t = jnp.asarray(rng.integers(0, CLASSES, (CLIENTS, 2 * batch)))
    apply, weights = from_torch(module, torch.zeros(1, 1, 28, 28))
    programs = []
    for function, start in ((apply, weights), (model, in_jax(weights))):
        stacked = jax.tree.map(lambda a: jnp.stack([a] * CLIENTS), start)
        began = time.perf_counter()
        compiled = local_steps(function, batch).lower(stacked, u, t).compile()
        programs.append((compiled, stacked, time.perf_counter() - began))
    losses = [np.asarray(compiled(start, u, t)) for compiled, start, _ in programs]
    seconds: list[list[float]] = [[], []]
    for _ in range(runs):
        for times, (compiled, start, _) in zip(seconds, programs, strict=True):
            began = time.perf_counter()
            jax.block_until_ready(compiled(start, u, t))
            times.append(time.perf_counter() - began)
    ratios = sorted(a / b for a, b in zip(*seconds, strict=True))
    ours, by_hand = map(statistics.median, seconds)
    print(
        f"{name:6} {programs[0][2]:8.1f} {programs[1][2]:8.1f} {ours:9.3f} {by_hand:9.3f} "
        f"{statistics.median(ratios):7.2f} {ratios[0]:6.2f} to {ratios[-1]:.2f} "
        f"{np.abs(losses[0] - losses[1])[:, :10].max():9.0e}",
        flush=True,
    )


MODELS = {"mlp": (mlp, mlp_in_jax, 64)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    fb.tune_cpu()
    torch.manual_seed(0)
    print(f"{describe()}, torch {torch.__version__}")
    print(f"{STEPS} steps of {CLIENTS} clients, {options.runs} runs of each in turns\n")
    print("       compile: seconds     run: median seconds     ratio         first 10 losses")
    print("         module   in JAX    module    in JAX    median    min to max     differ by")
    for name, (make, model, batch) in MODELS.items():
        compare(name, make(), model, batch, options.runs)


if __name__ == "__main__":
    main()
