"""FedNest's Figure 4 as a program: copy this file, and put in your losses, data, methods and claims.

    python -m papers.sketch.fednest_4

The program runs every method on every problem with every seed, draws the means, and says which claims hold. It has no
trials on a holdout and no second scale, and cannot continue after an interruption. If you need these, write the figure
as a file.
"""

from itertools import product
from typing import Any

import numpy as np
from matplotlib import pyplot

import fedbilevel as fb
from papers.claims import POWER, interval, state_of

SEEDS = (0, 1, 2)
CLIENTS, DIM, ROUNDS = 100, 10, 200
FULL: Any = {"batch_size": None}  # use all samples in every step
ROUNDS_ON_Y: Any = {"rounds": 10, "local_steps": 50, "lr": 0.01}
METHODS = {
    "FedNest": fb.FedNest(outer_lr=0.1, outer_steps=20, inner=fb.parts.SVRG(**ROUNDS_ON_Y), **FULL),
    "LFedNest": fb.LFedNest(outer_lr=0.1, outer_steps=20, inner=fb.parts.LocalSGD(**ROUNDS_ON_Y), **FULL),
    "FedAvg-S": fb.FedAvgS(local_steps=500, inner_lr=0.1, outer_lr=0.1, **FULL),
}
CLAIMS = [("FedNest", "LFedNest"), ("FedNest", "FedAvg-S"), ("LFedNest", "FedAvg-S")]  # the first ends nearer x*


def loss(x: Any, y: Any, rows: Any) -> Any:
    """Return f, a mean over the samples of a client, which x minimises and y maximises."""
    inside = 0.5 * rows["C"] @ y**2 - rows["b"] @ y + (rows["A"] @ x) @ y
    return (0.5 * rows["P"] @ x**2 - inside).mean()


def draw(seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Return the coefficients of two problems, with one sample for each client: shapes (clients, 1, …)."""
    rng = np.random.default_rng(seed)
    b, t = rng.normal(size=(CLIENTS, 1, DIM)), rng.uniform(0, 0.1, size=(CLIENTS, 1, 1, 1))
    one, curves = np.ones((CLIENTS, 1, DIM)), rng.uniform(0.5, 1.5, size=(2, CLIENTS, 1, DIM))
    dense = rng.normal(size=(CLIENTS, 1, DIM, DIM)) / DIM**0.5
    return {
        "the paper's": {"P": 10 * one, "C": one, "A": t * np.eye(DIM), "b": b - b.mean(axis=0)},
        "dense": {"P": 10 * curves[0], "C": curves[1], "A": dense, "b": b + 1},
    }


def solution(of: dict[str, np.ndarray]) -> np.ndarray:
    """Return x at the saddle point."""
    P, C, A, b = (of[name].mean(axis=(0, 1)) for name in "PCAb")
    return np.linalg.solve(np.diag(P) + (A.T / C) @ A, (A.T / C) @ b)


def main() -> dict[tuple[str, str, str], str]:
    """Run everything. Return, by problem and claim, whether the claim holds."""
    ends: dict[tuple[str, str, int], float] = {}
    figure, cells = pyplot.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
    problem, problems = fb.Minimax(loss), {seed: draw(seed) for seed in SEEDS}
    for axes, name in zip(cells, problems[0], strict=True):
        for method, algorithm in METHODS.items():
            curves = []
            for seed in SEEDS:
                x, start = solution(problems[seed][name]), np.random.default_rng(seed).normal(size=(2, DIM))
                clients = fb.Clients(outer=problems[seed][name])
                metrics = {"distance": lambda at, y, x=x: ((at - x) ** 2).sum()}
                result = fb.solve(
                    algorithm, problem, clients, *start, rounds=ROUNDS, eval_every=4, metrics=metrics, progress=False
                )
                curves.append(result.history["distance"])
                ends[name, method, seed] = np.log10(curves[-1][-1])
            axes.semilogy(result.history["round"], np.mean(curves, axis=0), label=method)
        axes.set(title=name, xlabel="rounds", ylabel="‖x − x*‖²")
    figure.legend(*cells[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig("fednest_4.png")
    apart = {  # differences, in powers of ten
        (name, better, than): [ends[name, than, seed] - ends[name, better, seed] for seed in SEEDS]
        for (better, than), name in product(CLAIMS, problems[0])
    }
    return {claim: state_of(*interval(values), None, POWER) for claim, values in apart.items()}


if __name__ == "__main__":
    for claim, state in main().items():
        print(*claim, state, sep=" · ")
