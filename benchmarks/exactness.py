"""SimFBO, ShroFBO, CorrectedFBO and F2SA compared with closed forms: errors that are zero, or fall, by the theorems.

The last table is in float32, where the rounding error of F2SA's differences grows with λ.
"""

from itertools import pairwise

import jax
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, row
from fedbilevel.authoring import Algorithm
from fedbilevel.tasks import Task
from fedbilevel.tasks.quadratic import quadratic, solution

WORK = np.array([1, 2, 3, 4, 5, 1, 2, 3])
STEPS = (8e-3, 4e-3, 2e-3, 1e-3, 1e-13)
MULTIPLIERS = (10.0, 1e2, 1e3, 1e4, 1e5, None)
QUICK = {"rounds": 100}


def limit(algorithm: Algorithm, task: Task, rounds: int) -> np.ndarray:
    return np.asarray(fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds).x)


def error(x: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


def main(rounds: int = 6000) -> None:
    jax.config.update("jax_enable_x64", True)
    task = quadratic()
    plain = fb.SimFBO(local_steps=1, batch_size=None, server_lr=fb.XYV(0.02, 0.5, 0.5))
    end = error(limit(plain, task, rounds), solution(task.clients).x)
    print(f"τ = 1, full batches, all clients: relative error of x {end:.1e} (aim: 1e-8)")

    task = quadratic(clients=8, condition=5).with_own(local_steps=WORK)
    w = task.clients.weights * WORK
    targets = {"re-weighted": solution(task.clients, w / w.sum()).x, "true": solution(task.clients).x}
    apart = error(targets["re-weighted"], targets["true"])
    print(f"\nUnequal τ_i = {WORK.tolist()}: the two solutions are {apart:.1e} apart. Errors of x:")
    head("method", "solution", *(f"η = {eta:g}" for eta in STEPS), "error / error at half η")
    for method, name in ((fb.SimFBO, "re-weighted"), (fb.ShroFBO, "true")):
        errors = []
        for eta in STEPS:
            algorithm = method(
                batch_size=None,
                client_lr=fb.XYV(eta / 10, eta, eta),
                server_lr=fb.XYV(*(lr / WORK.max() for lr in (0.02, 1.0, 1.0))),
            )
            errors.append(error(limit(algorithm, task, rounds), targets[name]))
        ratios = ", ".join(f"{a / b:.2f}" for a, b in pairwise(errors[:-1]))
        row(method.__name__, name, *(f"{one:.1e}" for one in errors), ratios)

    task, work = quadratic(clients=8, condition=5), 20
    print(f"\nκ = 5, τ = {work}, full batches, clients' steps 0.1 on y and v, 0.01 on x: relative errors of x")
    head("method", "relative error of x")
    server = fb.XYV(*(lr / work for lr in (0.1, 0.5, 0.5)))
    for method in (fb.SimFBO, fb.ShroFBO, fb.CorrectedFBO):
        algorithm = method(local_steps=work, batch_size=None, client_lr=fb.XYV(0.01, 0.1, 0.1), server_lr=server)
        row(method.__name__, f"{error(limit(algorithm, task, rounds), solution(task.clients).x):.1e}")

    print("\nF2SA, κ = 5, τ = 1, full batches, float32; λ = None is chosen at every step: relative errors of x")
    head(*(f"λ = {multiplier:g}" if multiplier else "λ = None" for multiplier in MULTIPLIERS))
    steps = {"local_steps": 1, "batch_size": None, "client_lr": 1.0, "server_lr": fb.XYV(0.02, 0.5, 0.5)}
    with jax.enable_x64(False):
        task = quadratic(condition=5)
        ends = [limit(fb.F2SA(multiplier=multiplier, **steps), task, rounds // 3) for multiplier in MULTIPLIERS]
    row(*(f"{error(x, solution(task.clients).x):.1e}" for x in ends))
