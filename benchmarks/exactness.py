"""SimFBO and ShroFBO compared with closed forms: errors that are zero, or fall, by the paper's theorems."""

from itertools import pairwise

import jax
import numpy as np

import fedbilevel as fb
from benchmarks.harness import head, row
from fedbilevel.tasks.quadratic import quadratic, solution

WORK = np.array([1, 2, 3, 4, 5, 1, 2, 3])
STEPS = (8e-3, 4e-3, 2e-3, 1e-3, 1e-13)
QUICK = {"rounds": 100}


def limit(algorithm: fb.SimFBO, task: object, rounds: int) -> np.ndarray:
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

    task = quadratic()
    a, b = (limit(m(local_steps=4, batch_size=3, server_lr=0.01), task, 50) for m in (fb.SimFBO, fb.ShroFBO))
    print(f"\nEqual τ_i: SimFBO and ShroFBO differ by at most {np.max(np.abs(a - b)):.1e} after 50 rounds (aim: 1e-12)")
