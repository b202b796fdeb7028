"""Results compared with exact ones: closed forms of x, clients that differ, and a client's reply in float32.

closed-forms  SimFBO, ShroFBO, CorrectedFBO and F2SA on the quadratic task: errors of x that are zero, or fall, by the
              theorems. The last table is in float32, where the rounding error of F2SA's differences grows with λ.
drift         The distance from x* with 1, 5 and 20 local steps of clients that differ, with full batches and all
              clients: CorrectedFBO and SimFBO, which need one exchange in a round, and FedMSA, which is written by hand
              (peers/fedmsa.py) and needs two. All get the same number of exchanges, and try the same grid of two step
              sizes: one for y and v, and one for x. The row has the result with the least error at the end.
replies       A client makes τ steps of gradient descent on a 2NN (784-200-200-10), with batches of 20 of 200 samples.
              Two ways of adding up steps in float32 are compared with float64: the sum of the steps, with gradients at
              start + sum; and the iterate, from which the start is subtracted at the end. The sum costs one more pass
              over the model per step. Errors are relative to the norm of the reply.
"""

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedbilevel as fb
from benchmarks.harness import head, row
from benchmarks.peers import fedmsa
from fedbilevel.tasks import Task
from fedbilevel.tasks.quadratic import quadratic, solution

WORK = np.array([1, 2, 3, 4, 5, 1, 2, 3])
STEPS = (8e-3, 4e-3, 2e-3, 1e-3, 1e-13)
MULTIPLIERS = (10.0, 1e2, 1e3, 1e4, 1e5, None)
GRID = {"on_y": (1.0, 0.3, 0.1, 0.03, 0.01, 0.003), "share": (0.3, 0.1)}  # the step on y and v; of it, that on x
SIZES, SUMS = (784, 200, 200, 10), ("sum", "iterate")
QUICK = {"rounds": 100, "exchanges": 20, "local_steps": (1,), "reply_steps": (1, 10)}


def error(x: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


def end(algorithm: Any, task: Task, rounds: int) -> np.ndarray:
    return np.asarray(fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds).x)


def closed_forms(rounds: int) -> None:
    """Print the errors of x at the end of runs."""
    task = quadratic()
    plain = fb.SimFBO(local_steps=1, batch_size=None, server_lr=fb.XYV(0.02, 0.5, 0.5))
    off = error(end(plain, task, rounds), solution(task.clients).x)
    print(f"τ = 1, full batches, all clients: relative error of x {off:.1e} (aim: 1e-8)")

    task = quadratic(clients=8, condition=5).with_own(local_steps=WORK)
    w = task.clients.weights * WORK
    targets = {"re-weighted": solution(task.clients, w / w.sum()).x, "true": solution(task.clients).x}
    apart = error(targets["re-weighted"], targets["true"])
    print(f"\nUnequal τ_i = {WORK.tolist()}: the two solutions are {apart:.1e} apart. Errors of x:")
    head("method", "solution", *(f"η = {eta:g}" for eta in STEPS), "error / error at half η")
    server = fb.XYV(*(lr / WORK.max() for lr in (0.02, 1.0, 1.0)))
    for method, name in ((fb.SimFBO, "re-weighted"), (fb.ShroFBO, "true")):
        errors = []
        for eta in STEPS:
            algorithm = method(batch_size=None, client_lr=fb.XYV(eta / 10, eta, eta), server_lr=server)
            errors.append(error(end(algorithm, task, rounds), targets[name]))
        ratios = ", ".join(f"{a / b:.2f}" for a, b in itertools.pairwise(errors[:-1]))
        row(method.__name__, name, *(f"{one:.1e}" for one in errors), ratios)

    task, work = quadratic(clients=8, condition=5), 20
    print(f"\nκ = 5, τ = {work}, full batches, clients' steps 0.1 on y and v, 0.01 on x: relative errors of x")
    head("method", "relative error of x")
    server = fb.XYV(*(lr / work for lr in (0.1, 0.5, 0.5)))
    for method in (fb.SimFBO, fb.ShroFBO, fb.CorrectedFBO):
        algorithm = method(local_steps=work, batch_size=None, client_lr=fb.XYV(0.01, 0.1, 0.1), server_lr=server)
        row(method.__name__, f"{error(end(algorithm, task, rounds), solution(task.clients).x):.1e}")

    print("\nF2SA, κ = 5, τ = 1, full batches, float32; λ = None is chosen at every step: relative errors of x")
    head(*(f"λ = {multiplier:g}" if multiplier else "λ = None" for multiplier in MULTIPLIERS))
    steps = {"local_steps": 1, "batch_size": None, "client_lr": 1.0, "server_lr": fb.XYV(0.02, 0.5, 0.5)}
    with jax.enable_x64(False):
        task = quadratic(condition=5)
        ends = [end(fb.F2SA(multiplier=multiplier, **steps), task, rounds // 3) for multiplier in MULTIPLIERS]
    row(*(f"{error(x, solution(task.clients).x):.1e}" for x in ends))


def least(name: str, task: Task, tau: int, exchanges: int) -> tuple[float, float, float]:
    """Return the least relative error of x that a method reaches, and the two step sizes."""

    def method(on_y: float, share: float) -> Any:
        steps = fb.XYV(x=on_y * share, y=on_y, v=on_y)
        return getattr(fb, name)(local_steps=tau, batch_size=None, client_lr=steps, server_lr=steps)

    given = task.problem, task.clients, task.x0, task.y0
    options: dict[str, Any] = {"metrics": task.metrics, "on_divergence": "stop", "progress": False}
    found = fb.sweep(
        method, *given, grid=GRID, select="relative_error", rounds=exchanges, eval_every=exchanges, **options
    )
    best = found.rows[0]
    return best["relative_error"], best["on_y"], best["share"]


def least_of_fedmsa(task: Task, tau: int, exchanges: int) -> tuple[float, float, float]:
    run = fedmsa.program(task.problem, local_steps=tau)
    flat = {part: getattr(task.clients, part).values for part in ("outer", "inner")}
    stacked = jax.tree.map(lambda leaf: leaf.reshape(len(task.clients), -1, *leaf.shape[1:]), flat)
    start, weights = (task.x0, task.y0, jnp.zeros_like(task.y0)), jnp.asarray(task.clients.weights)
    exact, found = solution(task.clients).x, []
    for on_y, share in itertools.product(*GRID.values()):
        x, *_ = run(start, stacked, weights, (on_y * share, on_y, on_y), exchanges // 2)
        found.append((error(x, exact) if np.all(np.isfinite(x)) else np.inf, on_y, share))
    return min(found)


def drift(exchanges: int, local_steps: tuple[int, ...]) -> None:
    """Print the least error of each method, and the step sizes with which it was reached."""
    task = quadratic(samples=(5, 5))
    head("τ", "method", "relative error of x", "step on y and v", "step on x")
    for tau, name in itertools.product(local_steps, ("CorrectedFBO", "FedMSA", "SimFBO")):
        given = task, tau, exchanges
        off, on_y, share = least_of_fedmsa(*given) if name == "FedMSA" else least(name, *given)
        row(tau, name, f"{off:.1e}", f"{on_y:g}", f"{on_y * share:g}")


def loss(weights: Any, rows: Any, labels: Any) -> Any:
    for place, w in enumerate(weights):
        rows = (jax.nn.relu(rows) if place else rows) @ w
    return optax.softmax_cross_entropy_with_integer_labels(rows, labels).mean()


def reply(how: str, dtype: Any, tau: int, lr: float) -> Any:
    """Return the change of the model by τ local steps of size lr."""
    rng = np.random.default_rng(0)
    start = [jnp.asarray(rng.normal(size=(a, b)) / a**0.5, dtype) for a, b in itertools.pairwise(SIZES)]
    rows, labels = jnp.asarray(rng.random((200, SIZES[0])), dtype), jnp.asarray(rng.integers(0, 10, 200))
    drawn = jnp.asarray(rng.integers(0, 200, (tau, 20)))
    add = optax.tree.add

    def step(at: Any, k: Any) -> Any:
        return optax.tree.scale(dtype(-lr), jax.grad(loss)(at, rows[drawn[k]], labels[drawn[k]]))

    if how == "sum":
        zeros = optax.tree.zeros_like(start)
        return jax.lax.fori_loop(0, tau, lambda k, total: add(total, step(add(start, total), k)), zeros)
    return optax.tree.sub(jax.lax.fori_loop(0, tau, lambda k, at: add(at, step(at, k)), start), start)


def replies(steps: tuple[int, ...]) -> None:
    """Print the errors of replies by the size and the number of local steps."""
    head("step size", "local steps", *SUMS)
    for lr, tau in itertools.product((0.1, 1e-3, 1e-5), steps):
        exact, *rounded = (
            jax.jit(lambda how=how, dtype=dtype, lr=lr, tau=tau: reply(how, dtype, tau, lr))()
            for how, dtype in (("sum", np.float64), *((how, np.float32) for how in SUMS))
        )
        off = (optax.tree.norm([a.astype(np.float64) - b for a, b in zip(one, exact, strict=True)]) for one in rounded)
        row(f"{lr:.0e}", f"{tau:,}", *(f"{float(one / optax.tree.norm(exact)):.0e}" for one in off))


def main(
    parts: tuple[str, ...] = ("closed-forms", "drift", "replies"),
    rounds: int = 6000,
    exchanges: int = 500,
    local_steps: tuple[int, ...] = (1, 5, 20),
    reply_steps: tuple[int, ...] = (1, 10, 100, 1_000),
) -> None:
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("ignore")  # some pairs of the grid diverge
    run = {
        "closed-forms": lambda: closed_forms(rounds),
        "drift": lambda: drift(exchanges, local_steps),
        "replies": lambda: replies(reply_steps),
    }
    for part in parts:
        print(f"\n{part}")
        run[part]()
