"""Do the methods whose inverse Hessian is random reach x* on average, where clients differ?

On the quadratic task with full batches, (x, y) follows an affine recursion. Its coefficients depend on the lengths and
the cohorts that a round draws and not on (x, y), and in expectation they are those of the N-term series. So the mean of
x tends to the end of the method that has the series for its inverse, which N makes x* for all that can be seen here.
One long run each, its mean over blocks of 750 rounds within five standard errors of x*, coordinate by coordinate.
"""

from typing import NamedTuple

import numpy as np
import pytest
from matrices import end_with_series, mean_matrices

import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic, solution

TERMS, STEP, ALPHA = 8, 1.5, 0.05
BURN_IN, BLOCKS, BLOCK, EVERY = 1_500, 32, 750, 30  # long against 1/(¾α) = 27 rounds, in which a distance falls e-fold
PRECISION = 0.022  # standard errors, relative to ‖x*‖
STEPS = {"outer_lr": ALPHA, "batch_size": None}
THRICE, ONCE, SGD = (
    fb.parts.SVRG(local_steps=3, lr=STEP),
    fb.parts.SVRG(local_steps=1, lr=STEP),
    fb.parts.LocalSGD(local_steps=1, lr=STEP),
)


def implicit(kind=fb.parts.Implicit, sampling="random", step=STEP, **fields):
    return kind(solver=fb.parts.Neumann(terms=TERMS, step=step, sampling=sampling), **fields)


FEDMBO = fb.FedMBO(inner=SGD, hypergradient=implicit(sampling="random_per_client"), **STEPS)
UNBIASED = {
    "FedNest": (fb.FedNest(inner=THRICE, hypergradient=implicit(), outer_steps=2, **STEPS), None),
    "FedNest, cohorts": (fb.FedNest(inner=ONCE, hypergradient=implicit(), **STEPS), 4),
    "FedMBO": (FEDMBO, None),
    "FedMBO, cohorts": (FEDMBO, 4),
    "AggITD": (
        fb.AggITD(inner=fb.parts.LocalSGD(rounds=TERMS, local_steps=1, lr=STEP), sampling="random", **STEPS),
        None,
    ),  # its cohorts are not fresh
}
BIASED = {
    "local Hessians": (fb.LFedNest(inner=SGD, hypergradient=implicit(fb.parts.LocalImplicit), **STEPS), None),
    "a series too short": (fb.FedNest(inner=THRICE, hypergradient=implicit(step=0.1), outer_steps=2, **STEPS), None),
    "one cohort for all factors": (fb.FedNest(inner=ONCE, hypergradient=implicit(fresh_cohorts=False), **STEPS), 4),
}


class Mean(NamedTuple):
    """Of x over a run, and its standard error; leaves (dim_x,)."""

    x: np.ndarray
    error: np.ndarray

    def off(self, exact):
        """The largest distance of a coordinate, in standard errors."""
        return np.max(np.abs(self.x - exact) / self.error)


@pytest.fixture(scope="module")
def task():
    return quadratic(clients=6, dim_x=3, dim_y=4, condition=5, noise=0.0, samples=(2, 4))


def mean_of(algorithm, cohort, task):
    coordinates = {f"x{i}": (lambda x, y, i=i: x[i]) for i in range(3)}
    history = fb.solve(
        algorithm, task.problem, task.clients, task.x0, task.y0, rounds=BURN_IN + BLOCKS * BLOCK, cohort=cohort,
        eval_every=EVERY, metrics=coordinates,
    ).history  # fmt: skip
    walk = np.stack([history[name] for name in coordinates], axis=1)[history["round"] > BURN_IN]
    blocks = walk.reshape(BLOCKS, BLOCK // EVERY, 3).mean(1)
    return Mean(blocks.mean(0), blocks.std(0, ddof=1) / np.sqrt(BLOCKS))


QUICK = ("AggITD",)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in UNBIASED]
)
def test_the_mean_of_x_is_the_solution(name, task):
    """To about 2 % of ‖x*‖, beside which the bias of a method below is large; (1 − sμ)^N is out of sight."""
    exact, found = solution(task.clients).x, mean_of(*UNBIASED[name], task)
    assert found.off(exact) < 5
    assert 0 < np.linalg.norm(found.error) < PRECISION * np.linalg.norm(exact)
    eigenvalues = np.linalg.eigvalsh(mean_matrices(task)["A"])
    assert np.max(np.abs(1 - STEP * eigenvalues)) ** TERMS < PRECISION / 2
    assert np.all(np.abs(end_with_series(task, STEP, TERMS) - exact) < found.error / 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a series too short", "local Hessians", "one cohort for all factors"])
def test_what_is_biased_is_found_out(name, task):
    """By the same measure: 8 standard errors and more, and a mean as precise."""
    exact, found = solution(task.clients).x, mean_of(*BIASED[name], task)
    assert found.off(exact) > 8
    assert 0 < np.linalg.norm(found.error) < PRECISION * np.linalg.norm(exact)
