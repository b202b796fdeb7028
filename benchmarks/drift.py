"""The distance from x* with 1, 5 and 20 local steps of clients that differ: CorrectedFBO, FedMSA and SimFBO.

The task is the quadratic one, with equal numbers of samples, all clients and full batches. CorrectedFBO and SimFBO need
one exchange in a round, and FedMSA, which is written by hand (peers/fedmsa.py), needs two. All methods get the same
number of exchanges. All three take the mean of the clients' points after a round, so each has two step sizes: one for y
and v, and one for x. Each method tries the same grid of step sizes, and the row has the result with the least error at
the end.
"""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from benchmarks.exactness import error
from benchmarks.harness import head, row
from benchmarks.peers import fedmsa
from fedbilevel.engines.engine import first_carry
from fedbilevel.tasks.quadratic import quadratic, solution

warnings.simplefilter("ignore")
Y_STEPS, X_SHARES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003), (0.3, 0.1)
METHODS = "CorrectedFBO", "FedMSA", "SimFBO"
PART, FAR = 20, 1e3  # rounds between two checks; the run diverges if x is farther away than FAR
QUICK = {"exchanges": 20, "local_steps": (1,)}


def contender(name: str, task: fb.tasks.Task, local_steps: int, exchanges: int) -> Callable[[fb.XYV], np.ndarray]:
    """Return a function of the step sizes that runs a method and returns x at the end; NaN if the run diverges."""
    if name == "FedMSA":
        run = fedmsa.program(task.problem, local_steps=local_steps)
        flat = {part: getattr(task.clients, part).values for part in ("outer", "inner")}
        stacked = jax.tree.map(lambda leaf: leaf.reshape(len(task.clients), -1, *leaf.shape[1:]), flat)
        start, weights = (task.x0, task.y0, jnp.zeros_like(task.y0)), jnp.asarray(task.clients.weights)
        return lambda steps: np.asarray(run(start, stacked, weights, tuple(steps), exchanges // 2)[0])

    task = task.with_own(local_steps=local_steps)  # one program serves all numbers of steps

    def method(steps: fb.XYV) -> Any:
        return getattr(fb, name)(batch_size=None, client_lr=steps, server_lr=steps)

    first = fb.XYV(1.0, 1.0, 1.0)
    start = first_carry(method(first), task.problem, task.clients, task.x0, task.y0)
    run = fb.Local().start(method(first), task.problem, task.clients, len(task.clients), jax.random.key(0), start)

    def end(steps: fb.XYV) -> np.ndarray:
        carry, run.algorithm = jax.tree.map(jnp.copy, start), method(steps)  # also arguments of the program
        for _ in range(0, exchanges, PART):  # one exchange in each round
            carry = run.advance(carry, PART).carry
            if jnp.linalg.norm(carry.state.x) > FAR:
                return np.full(len(task.x0), np.nan)
        return np.asarray(carry.state.x)

    return end


def main(exchanges: int = 500, local_steps: tuple[int, ...] = (1, 5, 20)) -> None:
    jax.config.update("jax_enable_x64", True)
    task = quadratic(samples=(5, 5))
    exact = solution(task.clients).x
    head("τ", "method", "relative error of x", "step on y and v", "step on x")
    for tau, name in itertools.product(local_steps, METHODS):
        end, found = contender(name, task, tau, exchanges), []
        for on_y, share in itertools.product(Y_STEPS, X_SHARES):
            off = error(end(fb.XYV(x=on_y * share, y=on_y, v=on_y)), exact)
            found.append((off if np.isfinite(off) else np.inf, on_y, on_y * share))
        least, on_y, on_x = min(found)
        row(tau, name, f"{least:.1e}", f"{on_y:g}", f"{on_x:g}")
