"""Are unrolling and finite differences what calculus says, on the quadratic's closed form?"""

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core.client import Clients
from fedbilevel.core.problem import Bilevel
from fedbilevel.oracles.exact import slopes, solve_inner, unrolled_gradient
from fedbilevel.oracles.population import Population
from fedbilevel.tasks.quadratic import RIDGE, quadratic

EPS = np.finfo(np.float64).eps
CONDITION, STEPS, LR = 10.0, 7, 0.8
ROUNDING = 100 * CONDITION * EPS  # as in test_exact.py


@pytest.fixture(scope="module")
def case():
    """The problem, its mean coefficients, a point x that is not the solution, and Φ's gradient there."""
    task = quadratic(clients=4, dim_x=4, dim_y=5, condition=CONDITION, samples=(2, 5), seed=3)
    m = {}
    for i, p in enumerate(task.clients.weights):
        own = {**task.clients.outer.row(i), **task.clients.inner.row(i)}
        own["Dt"] = np.einsum("nij,nj->ni", own["D"], own["t"])
        for name, value in own.items():
            m[name] = m.get(name, 0) + p * value.mean(0)
    x = np.random.default_rng(0).normal(size=4)
    y = np.linalg.solve(m["A"], m["B"] @ x + m["c"])
    return Population.of(task.problem, task.clients), m, x, y


def outer_gradients(m, x, y):
    return m["E"] @ y + RIDGE * x, m["D"] @ y - m["Dt"] + m["E"].T @ x


def test_unrolling_is_the_derivative_of_the_iteration(case):
    """y_N = (I − αA)^N y_0 + α Σ (I − αA)^n (Bx + c), hence dy_N/dx = α Σ (I − αA)^n B, wherever y_0 is."""
    population, m, x, _ = case
    start = np.arange(5.0)
    powers = [np.linalg.matrix_power(np.eye(5) - LR * m["A"], n) for n in range(STEPS + 1)]
    inverse = LR * sum(powers[:STEPS])
    end = powers[STEPS] @ start + inverse @ (m["B"] @ x + m["c"])
    f_x, f_y = outer_gradients(m, x, end)
    exact = f_x + m["B"].T @ inverse @ f_y
    got = unrolled_gradient(population, x, start, steps=STEPS, lr=LR)
    np.testing.assert_allclose(got.y, end, rtol=0, atol=ROUNDING * np.linalg.norm(start))
    np.testing.assert_allclose(got.hypergradient, exact, rtol=0, atol=ROUNDING * np.linalg.norm(start))


def test_newton_reaches_the_minimum_and_the_pulled_minimum(case):
    """With pull s: (A + sI) y = Bx + c + s·start."""
    population, m, x, best = case
    start = np.arange(5.0)
    for pull in (0.0, 0.3):
        exact = np.linalg.solve(m["A"] + pull * np.eye(5), m["B"] @ x + m["c"] + pull * start)
        got = solve_inner(population, x, start, pull=pull)
        np.testing.assert_allclose(got.y, exact, rtol=0, atol=ROUNDING * np.linalg.norm(exact))
        assert not got.negative_curvature
    assert np.linalg.norm(exact - best) > 0.1  # the pull did something


def test_slopes_of_the_quadratic_have_rounding_errors_alone(case):
    """Φ is quadratic, so that no width has a truncation error."""
    population, m, x, y = case
    f_x, f_y = outer_gradients(m, x, y)
    exact = f_x + m["B"].T @ np.linalg.solve(m["A"], f_y)
    width = 1e-2
    got = slopes(population, x, np.zeros(5), 0, directions=6, width=width)
    np.testing.assert_allclose(np.linalg.norm(got.directions, axis=1), 1, rtol=10 * EPS)
    phi = abs(float(population.outer.value(x, y)))
    np.testing.assert_allclose(got.values, got.directions @ exact, rtol=0, atol=ROUNDING * max(phi, 1) / width)
    assert np.linalg.matrix_rank(got.directions) == 4  # six directions in four dimensions: they differ


def test_slopes_of_a_cubic_have_no_error_of_the_second_order():
    """x³'s central difference is off by h² wherever it is taken, which two widths together take out: h⁴ has no part."""
    problem = Bilevel(lambda x, y, b: jnp.mean(b) * (jnp.sum(x**3) + 0 * y), lambda x, y, b: jnp.mean(b) * y**2)
    population = Population.of(problem, Clients(outer=[np.ones(1)], inner=[np.ones(1)]))
    x = jnp.array([0.5, -1.0])
    got = slopes(population, x, jnp.zeros(()), 0, directions=2, width=0.1)
    np.testing.assert_allclose(got.values, got.directions @ np.array([0.75, 3.0]), rtol=1e-12)
    assert np.all(got.errors > 1e-4)  # ¾ h² Σ d³


def test_newton_survives_where_full_steps_diverge():
    """g = log cosh: from |y| > 1.09 undamped Newton runs off to infinity; halved steps arrive. y*(x) = x."""
    problem = Bilevel(lambda x, y, b: jnp.mean(b) * y, lambda x, y, b: jnp.mean(b) * jnp.sum(jnp.log(jnp.cosh(y - x))))
    population = Population.of(problem, Clients(outer=[np.ones(1)], inner=[np.ones(1)]))
    got = solve_inner(population, jnp.array([0.3]), jnp.array([3.3]))
    assert abs(got.y[0] - 0.3) <= 4 * EPS
    assert got.gradient_norm <= 4 * EPS


@pytest.mark.parametrize(
    ("inner", "start"),
    [
        (lambda y: jnp.cos(y[0]), [0.1]),
        # Curvature 1 and, from |y| < 0.58, below 0: conjugate gradient's second direction meets it. The step that its
        # first makes ends at 0.88, where a second step of Newton's would see nothing of it.
        (lambda y: y[0] ** 2 / 2 + y[1] ** 4 / 4 - y[1] ** 2 / 2, [3.0, 0.5]),
    ],
)
def test_newton_says_where_the_hessian_is_indefinite(inner, start):
    problem = Bilevel(lambda x, y, b: jnp.mean(b) * y[0], lambda x, y, b: jnp.mean(b) * inner(y - x))
    population = Population.of(problem, Clients(outer=[np.ones(1)], inner=[np.ones(1)]))
    got = solve_inner(population, jnp.zeros(1), jnp.array(start))
    assert got.negative_curvature
    assert got.iterations == 1
