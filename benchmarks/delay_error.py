"""What delays cost at a fixed step: the error that is left, against the mean delay of the answers in use.

AFBO's Theorem 1 bounds the mean of ‖∇Φ‖² by terms of which one grows linearly in the mean outer delay, at fixed steps.
Here: the quadratic task, mini-batches (without noise of samples delays shift no end, and nothing is left), AFBO with a
global hypergradient and one inner round, times that vary; the same number of rounds for all, the second half measured.
More answers waited for, less delay. Every n keeps its step sizes, its problem and its population. The line is fitted
without n = 1, where step·delay comes near what y and v bear.

    python benchmarks/delay_error.py [--seeds 5] [--out delay_error.png]
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic, solution

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CLIENTS, ROUNDS, EVERY = 16, 4_000, 10
FIRST = (16, 8, 5, 3, 2, 1)


def gradient_of(task):
    """x -> ∇Φ(x), which is linear: found from its values at the unit vectors by differentiating Φ."""
    clients = task.clients
    rows = [(p, clients.outer.row(i), clients.inner.row(i)) for i, p in enumerate(clients.weights)]

    def mean(loss, which):
        return lambda x, y: sum(p * loss(x, y, row[which]) for p, *row in rows)

    outer, inner = mean(task.problem.outer, 0), mean(task.problem.inner, 1)

    def phi(x):
        slope, matrix = jax.grad(inner, 1)(x, task.y0), jax.hessian(inner, 1)(x, task.y0)
        return outer(x, task.y0 - jnp.linalg.solve(matrix, slope))

    matrix, offset = jax.jit(jax.hessian(phi))(task.x0), jax.jit(jax.grad(phi))(task.x0)
    assert np.linalg.norm(matrix @ solution(clients).x + offset) < 1e-4
    return lambda x: matrix @ x + offset


def measured(seed, steps):
    """For each n: (mean outer delay, mean ‖∇Φ‖²) over the second half of a run."""
    task = quadratic(clients=CLIENTS, noise=1.0, samples=(30, 30), condition=5, seed=seed)
    gradient = gradient_of(task)
    metrics = {"error": lambda x, y: jnp.sum(gradient(x) ** 2)}
    found = []
    for n in FIRST:
        algorithm = fb.Asynchronous(fb.AFBO(batch_size=1, **steps), wait_for=n)
        engine = fb.Local(clock=fb.Clock(spread=1.0, seed=seed))
        history = fb.solve(
            algorithm, task.problem, task.clients, task.x0, task.y0, rounds=ROUNDS, eval_every=EVERY, metrics=metrics,
            engine=engine, key=seed,
        ).history  # fmt: skip
        late = history["round"] > ROUNDS // 2
        found.append((np.mean(history["delay.outer_directions"][late]), np.mean(history["error"][late])))
    return np.array(found)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", default="delay_error.png")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)  # all seeds and step sizes have their programs in common
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compare(chosen.seeds, chosen.out)


def compare(seeds, out):
    """Measure, print, draw."""
    sizes = {
        f"α = {lr}": {
            "inner": fb.parts.MeanGradient(local_steps=1, lr=10 * lr),
            "hypergradient": fb.parts.SystemSteps(lr=10 * lr),
            "outer_lr": lr,
        }
        for lr in (0.003, 0.006)
    }
    figure, axes = plt.subplots(figsize=(6, 4))
    for name, steps in sizes.items():
        runs = np.stack([measured(seed, steps) for seed in range(seeds)])
        runs[:, :, 1] /= runs[:, :1, 1]  # relative to n = M, whose delay is 0: problems differ in scale
        delay, error = runs.mean(0).T
        spread = runs[:, :, 1].std(0, ddof=1) / np.sqrt(seeds)
        slope, at_zero = np.polyfit(delay[:-1], error[:-1], 1)
        residual = np.sqrt(np.mean((error - slope * delay - at_zero)[:-1] ** 2))
        print(f"{name}: error / error(delay 0) = {at_zero:.2f} + {slope:.3f} · delay, off by {residual:.3f} (rms)")
        for n, d, e, s in zip(FIRST, delay, error, spread, strict=True):
            print(f"    n = {n:2}  mean delay {d:6.2f}   error {e:6.2f} ± {s:.2f}")
        drawn = axes.errorbar(delay, error, spread, fmt="o", label=name)
        axes.plot(delay, at_zero + slope * delay, color=drawn[0].get_color(), linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("mean outer delay [exchanges]")
    axes.set_ylabel("mean ‖∇Φ(x)‖² relative to delay 0")
    axes.set_title("Error at fixed steps, AFBO (global), quadratic")
    axes.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
