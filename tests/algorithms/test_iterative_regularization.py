"""FISM with cohorts of clients of unequal size, schedules that reach 0, various starts, and users' subgradients."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from refusals import refuses

NEAR, FAR = np.zeros(1), np.ones(9)  # one sample at 0, nine at 1
CLIENTS = fb.Clients([{"b": NEAR}, {"b": FAR}])


def distance(x, batch):
    return jnp.mean((x - batch["b"]) ** 2) / 2


def problem(outer=lambda x: x**2 / 2, **fields):
    return fb.SimpleBilevel(outer, distance, fb.projections.box(-5.0, 5.0), **fields)


def solved(algorithm, rounds, x0=0.0, problem=problem(), clients=CLIENTS, **fields):  # noqa: B008
    return fb.solve(algorithm, problem, clients, jnp.asarray(x0), rounds=rounds, **fields)


@pytest.mark.parametrize("method", [fb.FISM, fb.IRG])
def test_cohorts_leave_the_weights_where_they_are(method):
    """With cohorts of one client, x ends where the weights say, whatever the numbers of samples are.

    Both clients have the weight ½, so that F = ¼x² + ¼(x − 1)² has its minimum at ½. A mean over each cohort by itself
    would count samples, and end at 0.9.

    In the end x moves randomly around ½: a draw moves it by about γ_k/(n S̄)·½, with S̄ = Σ p_i/n_i = 5/9. After 20,000
    rounds, γ_k = 0.1/k^0.6 is 2.6e-4. The noise then has a standard deviation of √(γ/2·variance) < 0.02, and 0.1 is
    five times that.
    """
    end = solved(method(lr=0.1, regularization=1e-9), 20_000, cohort=1, key=3)
    assert abs(float(end.x) - 0.5) < 0.1


@pytest.mark.parametrize("steps", [optax.linear_schedule(0.3, 0.0, 2), optax.linear_schedule(0.0, 0.3, 2)])
def test_a_step_may_begin_or_end_at_0(steps):
    """A schedule of steps may begin or end at 0.

    The two clients have one sample each, at 0 and at 1. Without λ, a round is x ← x + γ_k (½ − x), and x̂ is the mean
    of x_k with the weights γ_k. Optax computes schedules in float32, so that 1e-7 is allowed.
    """
    clients = fb.Clients({"b": np.array([[0.0], [1.0]])})
    found = solved(fb.FISM(lr=steps, regularization=1e-12), 4, 0.2, clients=clients)
    x, total, weighted = 0.2, 0.0, 0.0
    for k in range(4):
        gamma = float(steps(k)) / (k + 1) ** 0.6
        total, weighted = total + gamma, weighted + gamma * x
        x += gamma * (0.5 - x)
    assert float(found.x) == pytest.approx(x, abs=1e-7)
    assert float(found.y) == pytest.approx(weighted / total, abs=1e-7)


def test_what_cannot_be_told_is_refused():
    with refuses("cohort", 1, "FISM"):
        solved(fb.FISM(tolerance=1e-3), 2, cohort=1)
    with refuses("x0", fact="SimpleBilevel.project"):
        solved(fb.IRG(), 2, 6.0)
    with refuses("FISM: lr·regularization·μ", fact="at most 2"):
        solved(fb.FISM(lr=3.0, regularization=1.0), 2)


@pytest.mark.slow
def test_a_subgradient_of_ones_own():
    """The user's subgradient of H is the one that a round follows.

    H = |x| + ½x² has every slope from −1 to 1 at 0. A round from 0 moves x by −γ₁λ₁ times the given slope, because both
    clients have one sample at 0, where f is flat.
    """
    clients = fb.Clients({"b": np.zeros((2, 1))})
    for slope in (-1.0, 0.0, 0.5):
        own = problem(
            lambda x: jnp.abs(x) + x**2 / 2, subgradient=lambda x, s=slope: jnp.where(x == 0, s, jnp.sign(x)) + x
        )
        found = solved(fb.FISM(lr=0.5, regularization=0.2), 1, problem=own, clients=clients)
        assert float(found.x) == pytest.approx(-0.1 * slope)
    with refuses("SimpleBilevel.subgradient", fact="None if outer is None"):
        problem(None, subgradient=lambda x: x)
