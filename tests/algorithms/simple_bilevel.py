"""A quadratic F with many minimisers in a box, and H, half the squared distance from an anchor, which selects one.

F depends on two of the four dimensions of x. The solution is the minimiser of F that is nearest to the anchor.
"""

import jax.numpy as jnp
import numpy as np
from scipy import optimize

import fedbilevel as fb

SIZES, WEIGHTS, BOUND, DIM = (3, 5, 2), np.array([1.0, 2.0, 0.5]), 0.6, 4
RNG = np.random.default_rng(3)
BASIS = RNG.normal(size=(2, DIM))  # all rows lie in the span of BASIS, so that F is flat along the other two dimensions
ROWS = [RNG.normal(size=(n, 2)) @ BASIS / 2 for n in SIZES]
TARGETS = [rows @ np.array([0.5, -0.3, 0.2, 0.4]) + 0.3 * RNG.normal(size=len(rows)) for rows in ROWS]
ANCHOR, START = np.array([1.5, -1.0, 1.0, -2.0]), np.full(DIM, 0.5)
SHARE = np.concatenate([np.full(n, p / n) for n, p in zip(SIZES, WEIGHTS / WEIGHTS.sum(), strict=True)])  # p_i/n_i
EVERY_ROW, EVERY_TARGET = np.concatenate(ROWS), np.concatenate(TARGETS)


def within(bound):
    return fb.SimpleBilevel(
        lambda x: jnp.sum((x - ANCHOR) ** 2) / 2,
        lambda x, batch: jnp.mean((batch["a"] @ x - batch["b"]) ** 2) / 2,
        fb.projections.box(-bound, bound),
    )


PROBLEM = within(BOUND)
CLIENTS = fb.Clients([{"a": a, "b": b} for a, b in zip(ROWS, TARGETS, strict=True)], weights=WEIGHTS)


def solution():
    """Find x* with SciPy: the point of the box that minimises ½‖x − a‖² under BASIS·x = BASIS·x_0, with a the anchor.

    All minimisers of F have the same product with BASIS as any one minimiser x_0.
    """
    hessian = EVERY_ROW.T @ (SHARE[:, None] * EVERY_ROW)
    some = np.linalg.lstsq(hessian, EVERY_ROW.T @ (SHARE * EVERY_TARGET), rcond=None)[0]
    # so that the minimisers of F in the box are also its minimisers in the whole space
    assert np.all(np.abs(some) < BOUND)
    found = optimize.minimize(
        lambda x: ((x - ANCHOR) @ (x - ANCHOR) / 2, x - ANCHOR),
        some,
        jac=True,
        bounds=[(-BOUND, BOUND)] * DIM,
        constraints={"type": "eq", "fun": lambda x: BASIS @ (x - some), "jac": lambda x: BASIS},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert found.success
    return found.x


def on_path(penalty):
    """Return x_λ, the minimiser of F + λH over the box, as the solution of a bounded least-squares problem."""
    rows = np.concatenate([np.sqrt(SHARE)[:, None] * EVERY_ROW, np.sqrt(penalty) * np.eye(DIM)])
    targets = np.concatenate([np.sqrt(SHARE) * EVERY_TARGET, np.sqrt(penalty) * ANCHOR])
    return optimize.lsq_linear(rows, targets, (-BOUND, BOUND), method="bvls", tol=1e-14).x


def solved(algorithm, rounds, every):
    """Run the algorithm from START; the metrics are the distances of x and of the average from x*."""
    exact = solution()
    metrics = {
        "error": lambda x, y: jnp.linalg.norm(x - exact),
        "average_error": lambda x, y: jnp.linalg.norm(y - exact),
    }
    return fb.solve(algorithm, PROBLEM, CLIENTS, START, rounds=rounds, eval_every=every, metrics=metrics)
