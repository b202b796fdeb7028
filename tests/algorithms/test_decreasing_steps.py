"""Do methods with late answers and drawn samples near x*, with steps that fall as 1/t, as fast as they should?

With steps c/(t + t₀), and c times the slowest rate of the mean motion above 1/2, stochastic approximation has
E‖x_t − x*‖² = V/(t + t₀) to first order (Chung 1954), and what is left of the start fades faster; delays are bounded
and change terms of higher order alone. From N rounds to 4N the mean square error thus falls at least to
(N + t₀)/(4N + t₀) of itself.
"""

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic, solution

ROUNDS, LATER, SEEDS = 2_000, 8_000, 10
T0 = 800


def falling(first):
    return lambda t: first / (1 + t / T0)


METHODS = {
    "AFBO, global": fb.AFBO(
        batch_size=2,
        inner=fb.parts.MeanGradient(local_steps=1, client_lr=0.2, lr=falling(0.2)),
        hypergradient=fb.parts.SystemSteps(lr=falling(0.2)),
        outer_lr=falling(0.02),
    ),
    "SimFBO": fb.SimFBO(
        batch_size=2,
        local_steps=1,
        client_lr=1.0,
        server_lr=fb.XYV(falling(0.02), falling(0.2), falling(0.2)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_the_mean_square_error_falls_as_the_steps_do(name):
    """By at least that, two standard errors of the paired difference clear; constant steps would leave it as it is."""
    task = quadratic(clients=5, dim_x=3, dim_y=4, condition=5, samples=(8, 16))
    exact = solution(task.clients).x
    clock = fb.Clock(spread=0.5, stragglers=1, slowdown=4.0)
    squares = []
    for seed in range(SEEDS):
        history = fb.solve(
            fb.Asynchronous(METHODS[name], wait_for=2),
            task.problem,
            task.clients,
            task.x0,
            task.y0,
            rounds=LATER,
            key=seed,
            engine=fb.Local(clock=clock),
            eval_every=ROUNDS,
            metrics={"square": lambda x, y: ((x - exact) ** 2).sum()},
        ).history
        squares.append((history["square"][1], history["square"][-1]))
    squares = np.array(squares)
    predicted = (ROUNDS + T0) / (LATER + T0)
    difference = squares[:, 1] - predicted * squares[:, 0]
    assert difference.mean() < -2 * difference.std(ddof=1) / np.sqrt(SEEDS)
