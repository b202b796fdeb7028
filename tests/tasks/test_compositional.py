"""The closed forms of the compositional tasks minimise F(R(x)), and averaging F_i(R_i(x)) over clients misses them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks import TASKS, compositional, portfolio
from fedbilevel.tasks.compositional import inner, outer, solution
from fedbilevel.tasks.portfolio import moments, moments_of, shares
from fedbilevel.tasks.portfolio import solution as best_shares
from implicit import implicit_gradient
from limit_points import local_point
from refusals import refuses

MARKETS = portfolio(clients=4, assets=5, months=(30, 60))


def mean_over(clients, rows, function):
    values = [function(rows.row(i)) for i in range(len(clients))]
    return sum(p * value for p, value in zip(clients.weights, values, strict=True))


def composed(task, outside, inside):
    """Return the function x -> F(R(x)), made from the losses only."""
    clients = task.clients

    def whole(x):
        y = mean_over(clients, clients.inner, lambda row: inside(x, row))
        return mean_over(clients, clients.outer, lambda row: outside(y, row))

    return whole


@pytest.mark.parametrize("weights", [None, "other"])
def test_the_closed_form_is_stationary(weights):
    """At the closed form x*, ∇(F∘R) is 0, and so is the implicit hypergradient of the bilevel form at y = R(x*)."""
    task = compositional(clients=4)
    if weights:
        changed = fb.Clients(task.clients.outer, task.clients.inner, weights=[1.0, 2.0, 3.0, 4.0])
        task = replace(task, clients=changed)
    x = jnp.asarray(solution(task.clients))
    whole = composed(task, outer, inner)
    slope = jax.jit(jax.grad(whole))
    np.testing.assert_allclose(slope(x), 0, atol=1e-13)
    if not weights:
        np.testing.assert_allclose(
            task.metrics["squared_gradient"](x + 1, None), jnp.sum(slope(x + 1) ** 2), rtol=1e-12
        )
    y = mean_over(task.clients, task.clients.inner, lambda row: inner(x, row))
    found = implicit_gradient(task.problem, task.clients, x, y)
    np.testing.assert_allclose(found.hypergradient, 0, atol=1e-13)
    np.testing.assert_allclose(found.inner_gradient, 0, atol=1e-13)


@pytest.mark.slow
def test_clients_differ_enough_to_tell_methods_apart():
    """The clients of the compositional task differ enough to tell a biased method from an exact one.

    A method that averages B_iᵀ∇f_i(y) at the common y ends far from x*, and so does a method that ignores the weights.
    """
    task = compositional()
    exact, other = solution(task.clients), local_point(task.clients)
    y = mean_over(task.clients, task.clients.inner, lambda row: inner(other, row))
    own = lambda i: task.clients.inner.row(i)["B"].mean(0).T @ jax.grad(outer)(y, task.clients.outer.row(i))  # noqa: E731
    pull = sum(p * own(i) for i, p in enumerate(task.clients.weights))
    np.testing.assert_allclose(pull, 0, atol=1e-13)
    size = np.linalg.norm(exact)
    assert np.linalg.norm(other - exact) > 0.05 * size
    assert np.linalg.norm(solution(task.clients, np.full(10, 0.1)) - exact) > 0.01 * size
    assert float(task.metrics["relative_error"](exact, None)) == 0
    assert float(task.metrics["relative_error"](task.x0, None)) == pytest.approx(1)


def test_the_regret_of_a_portfolio_is_its_loss_above_the_least():
    """The regret is −μᵀw + (λ/2) wᵀΣw less the value of this loss at the optimum w*.

    μ and Σ are the moments of all clients' pooled rows. The loss is least at w*: from w* it rises in both directions of
    every line along which the shares keep their sum.
    """
    rows = np.concatenate([MARKETS.clients.outer.row(i)["returns"] for i in range(4)])
    best = best_shares(moments(MARKETS.clients), 0.1)

    def loss(w):
        return -rows.mean(0) @ w + 0.05 * w @ np.cov(rows, rowvar=False, bias=True) @ w

    for x in np.random.default_rng(0).normal(size=(3, 5)):
        off = np.asarray(shares(x)) - best
        assert float(MARKETS.metrics["regret"](x, None)) == pytest.approx(loss(best + off) - loss(best), rel=1e-9)
        assert loss(best) < loss(best + 1e-3 * off)
        assert loss(best) < loss(best - 1e-3 * off)


@pytest.mark.slow
def test_the_portfolio_is_optimal():
    """The optimum of the portfolio task minimises −μᵀw + (λ/2) wᵀΣw, with the moments of all clients' pooled rows.

    F∘R is this function. The metric `regret` is its value minus its value at the optimum.
    """
    task, clients = MARKETS, MARKETS.clients
    whole = composed(task, lambda y, row: task.problem.outer(None, y, row), moments_of)
    start = np.array([0.3, -0.2, 0.1, 0.0, 0.4])
    pooled = np.concatenate([clients.outer.row(i)["returns"] for i in range(4)])  # weights are by size
    mean, spread = pooled.mean(0), np.cov(pooled, rowvar=False, bias=True)
    w = np.asarray(shares(start))
    assert w.sum() == pytest.approx(1)
    assert float(whole(start)) == pytest.approx(-mean @ w + 0.05 * w @ spread @ w, rel=1e-12)
    np.testing.assert_allclose(moments(clients).covariance, spread, rtol=1e-10)
    # A Newton step on a quadratic ends at its minimum. w does not depend on the sum of x, so that the Hessian is
    # singular along equal entries; adding ones removes this.
    hessian = jax.jit(jax.hessian(whole))(start) + np.ones((5, 5))
    best = start - np.linalg.solve(hessian, jax.jit(jax.grad(whole))(start))
    assert float(task.metrics["relative_error"](best, None)) < 1e-10
    assert float(task.metrics["relative_error"](task.x0, None)) == pytest.approx(1)
    assert float(task.metrics["regret"](start, None)) == pytest.approx(float(whole(start) - whole(best)), rel=1e-9)


@pytest.mark.parametrize(("task", "lr"), [(compositional(clients=4), 0.1), (MARKETS, 0.2)])
def test_a_method_reaches_the_closed_form(task, lr):
    """SimFBO, with one local step a round on all samples, ends at the closed form; with one step it has no bias."""
    server_lr = fb.XYV(x=lr, y=0.5, v=0.5)
    algorithm = fb.SimFBO(local_steps=1, batch_size=None, client_lr=1e-3, server_lr=server_lr)
    result = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=300, metrics=task.metrics)
    assert result.history["relative_error"][-1] < 1e-11


@pytest.mark.parametrize(
    ("task", "options", "refusal"),
    [
        ("compositional", {"dim_y": 4}, ("dim_y", 4)),
        ("compositional", {"samples": (3, 2)}, ("samples", (3, 2))),
        ("portfolio", {"months": (1, 3)}, ("months", (1, 3))),
    ],
)
def test_wrong_options_are_named(task, options, refusal):
    with refuses(*refusal):
        TASKS[task](**options)
