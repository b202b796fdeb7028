"""A quadratic of few dimensions too few, cut by a box, and the point of its minimisers that is nearest to an anchor."""

import jax.numpy as jnp
import numpy as np
from scipy import optimize

import fedbilevel as fb

SIZES, WEIGHTS, BOUND, DIM = (3, 5, 2), np.array([1.0, 2.0, 0.5]), 0.6, 4
RNG = np.random.default_rng(3)
BASIS = RNG.normal(size=(2, DIM))  # all rows lie in its span: F is flat along the other two dimensions
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
    """x* by SciPy: F's minimisers have BASIS·x as any one of them, and ½‖x − a‖² is least in the box."""
    hessian = EVERY_ROW.T @ (SHARE[:, None] * EVERY_ROW)
    some = np.linalg.lstsq(hessian, EVERY_ROW.T @ (SHARE * EVERY_TARGET), rcond=None)[0]
    assert np.all(np.abs(some) < BOUND)  # so that the minimisers over the box are minimisers over the space
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
    """x_λ, the minimiser of F + λH over the box, as bounded least squares."""
    rows = np.concatenate([np.sqrt(SHARE)[:, None] * EVERY_ROW, np.sqrt(penalty) * np.eye(DIM)])
    targets = np.concatenate([np.sqrt(SHARE) * EVERY_TARGET, np.sqrt(penalty) * ANCHOR])
    return optimize.lsq_linear(rows, targets, (-BOUND, BOUND), method="bvls", tol=1e-14).x


def solved(algorithm, rounds, every):
    """The run from START, with the distance of x and of the average from x*."""
    exact = solution()
    metrics = {
        "error": lambda x, y: jnp.linalg.norm(x - exact),
        "average_error": lambda x, y: jnp.linalg.norm(y - exact),
    }
    return fb.solve(algorithm, PROBLEM, CLIENTS, START, rounds=rounds, eval_every=every, metrics=metrics)
