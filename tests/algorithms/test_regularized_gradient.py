"""Do IRG and BiFISTA compute their equations, and do they follow the minimisers of F + λH to the solution?"""

import numpy as np
import pytest
import simple_bilevel as flat
from agreement import SIMPLE_BILEVEL, Case

import fedbilevel as fb

AGREEMENT = {
    "BiFISTA, mini-batches": Case(fb.BiFISTA(batch_size=4, lr=0.1), problem=SIMPLE_BILEVEL, slow=True),
    "IRG, mini-batches": Case(fb.IRG(batch_size=4, lr=0.1), problem=SIMPLE_BILEVEL, slow=True),
}
NEVER_LATE = {fb.BiFISTA: "iterates diverge with gradients"}
LEARNS = {fb.BiFISTA: "selection", fb.IRG: "selection"}

ROUNDS = 4
FIELDS = {"lr": 0.4, "regularization": 0.3, "regularization_decay": 0.25}


def slope(x):
    """Return ∇F, the weighted mean of the clients' gradients."""
    return flat.EVERY_ROW.T @ (flat.SHARE * (flat.EVERY_ROW @ x - flat.EVERY_TARGET))


def clipped(x):
    return np.minimum(np.maximum(x, -flat.BOUND), flat.BOUND)


def irg():
    x, total, steps = flat.START, np.zeros(flat.DIM), 0.0
    for k in range(1, ROUNDS + 1):
        gamma, penalty = 0.4 / k**0.7, 0.3 / k**0.25
        total, steps = total + gamma * x, steps + gamma
        x = clipped(x - gamma * (slope(x) + penalty * (x - flat.ANCHOR)))
    return x, total / steps


def bifista(momentum=5.0):
    """Run BiFISTA with z_k from k = 0 on, where x_{−1} = x_0; all steps have one size, so that x̂ is the plain mean."""
    x = before = flat.START
    seen = []
    for k in range(ROUNDS):
        seen.append(x)
        z = x + (1 - momentum / (k + momentum)) * (x - before)
        before, x = x, clipped(z - 0.4 * (slope(z) + 0.3 / (k + 1) ** 0.25 * (z - flat.ANCHOR)))
    return x, np.mean(seen, axis=0)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [(fb.IRG(lr_decay=0.7, **FIELDS), irg), (fb.BiFISTA(momentum=5.0, **FIELDS), bifista)],
)
def test_as_written(algorithm, expected):
    """Four rounds equal the equations in NumPy, where x meets sides of its box and clients are unequal."""
    result = fb.solve(algorithm, flat.PROBLEM, flat.CLIENTS, flat.START, rounds=ROUNDS)
    for have, want in zip((result.x, result.y), expected(), strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-12)
    assert np.max(np.abs(result.x)) == flat.BOUND
    assert result.ledger.gradients == ROUNDS * len(flat.CLIENTS)


@pytest.mark.parametrize(
    ("algorithm", "penalty"),
    [
        (fb.IRG(lr=5.0, regularization=0.1), lambda k: 0.1 / k**0.35),
        (fb.BiFISTA(lr=0.5, regularization=0.1, regularization_decay=1.0), lambda k: 0.1 / k),
    ],
)
def test_the_nearest_of_many_minimisers(algorithm, penalty):
    """x_K is at x_λ, the minimiser of F + λ_K H, much more precisely than x_λ is at x*.

    SciPy finds both points. The distance of x_K from x_λ is less than a twentieth of that of x_λ from x*. If all steps
    have the same size, λ may go to 0 fast, and then x is near x* much earlier.
    """
    rounds = 2000
    result = flat.solved(algorithm, rounds, every=rounds // 4)
    there = flat.on_path(penalty(rounds))
    behind = np.linalg.norm(there - flat.solution())
    assert behind < 0.006
    assert np.linalg.norm(result.x - there) < behind / 20
    for column in ("error", "average_error"):
        assert np.all(np.diff(result.history[column]) < 0)
