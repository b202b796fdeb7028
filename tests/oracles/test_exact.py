"""Do the implicit gradient, unrolling and finite differences agree with calculus for Φ(x) = F(x, y*(x))?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import hypergradient, mean_matrices

import fedbilevel as fb
from fedbilevel.core.client import Clients
from fedbilevel.core.problem import Bilevel
from fedbilevel.oracles.exact import dense_implicit, slopes, solve_inner, unrolled_gradient
from fedbilevel.oracles.population import Population
from fedbilevel.tasks.quadratic import quadratic, solution
from refusals import refuses

EPS = np.finfo(np.float64).eps
CONDITION, STEPS, LR = 10.0, 7, 0.8
# 4 clients with at most 5 samples of 5-by-4 blocks: sums of ≤ 10² terms, which the linear solve amplifies once
ROUNDING = 100 * CONDITION * EPS
ONE = Clients(outer=[np.ones(1)], inner=[np.ones(1)])
X = np.random.default_rng(0).normal(size=4)


@pytest.fixture(scope="module")
def task():
    return quadratic(clients=4, dim_x=4, dim_y=5, condition=CONDITION, samples=(2, 5), seed=3)


@pytest.fixture(scope="module")
def population(task):
    return Population.of(task.problem, task.clients)


@pytest.fixture(scope="module")
def m(task):
    return mean_matrices(task)


def outer_gradient(m, x, y):
    return m["D"] @ y - m["Dt"] + m["E"].T @ x


def test_the_implicit_gradient_vanishes_at_the_closed_form_solution(task, population):
    exact = solution(task.clients)
    got = dense_implicit(population, jnp.asarray(exact.x), jnp.asarray(exact.y))
    size = np.linalg.norm(exact.x) + np.linalg.norm(exact.y)
    assert np.linalg.norm(got.hypergradient) <= ROUNDING * size
    assert np.linalg.norm(got.inner_gradient) <= ROUNDING * size
    np.testing.assert_allclose(got.v, exact.v, rtol=0, atol=ROUNDING * np.linalg.norm(exact.v))


def test_it_and_slopes_of_the_quadratic_are_exact(population, m):
    """On a quadratic task the implicit gradient and slopes are exact.

    Φ is quadratic, so that central differences have only rounding errors, whatever their width is.
    """
    y, width = np.linalg.solve(m["A"], m["B"] @ X + m["c"]), 1e-2
    exact = hypergradient(m, m, X, y, np.linalg.solve(m["A"], outer_gradient(m, X, y)))
    phi = max(1, abs(float(population.outer.value(X, y))))
    got = dense_implicit(population, jnp.asarray(X), jnp.asarray(y))
    np.testing.assert_allclose(got.hypergradient, exact, rtol=0, atol=ROUNDING * phi)
    assert np.linalg.norm(exact) > 0.1
    along = slopes(population, X, np.zeros(5), 0, directions=6, width=width)
    np.testing.assert_allclose(np.linalg.norm(along.directions, axis=1), 1, rtol=10 * EPS)
    np.testing.assert_allclose(along.values, along.directions @ exact, rtol=0, atol=ROUNDING * phi / width)
    assert np.linalg.matrix_rank(along.directions) == 4  # six directions in four dimensions, which differ


def test_it_is_the_slope_of_the_objective_of_tuned_ridge_regression():
    """The implicit gradient is the slope of the objective of ridge regression as a function of its penalties.

    The problem has trees, a cross derivative that depends on x, an outer loss that is not quadratic, and clients of
    unequal sizes and weights.
    """
    rng = np.random.default_rng(5)

    def samples(count):
        return {"u": rng.normal(size=(count, 3)), "t": rng.normal(size=count)}

    def inner(x, y, batch):
        fit = jnp.mean((batch["u"] @ y["slope"] - batch["t"]) ** 2)
        return 0.5 * fit + 0.5 * jnp.sum(jnp.exp(x["log"]) * y["slope"] ** 2)

    def outer(x, y, batch):
        return jnp.mean(jnp.log(jnp.cosh(batch["u"] @ y["slope"] - batch["t"])))

    weights = np.array([0.2, 0.5, 0.3])
    data = {name: [samples(n) for n in sizes] for name, sizes in {"outer": (4, 2, 6), "inner": (5, 9, 7)}.items()}
    population = Population.of(Bilevel(outer, inner), Clients(**data, weights=weights))

    def best(log):
        normal = sum(p * s["u"].T @ s["u"] / len(s["t"]) for p, s in zip(weights, data["inner"], strict=True))
        target = sum(p * s["u"].T @ s["t"] / len(s["t"]) for p, s in zip(weights, data["inner"], strict=True))
        return np.linalg.solve(normal + np.diag(np.exp(log)), target)

    def objective(log):
        y = best(log)
        gaps = (s["u"] @ y - s["t"] for s in data["outer"])
        return sum(p * np.log(np.cosh(gap)).mean() for p, gap in zip(weights, gaps, strict=True))

    def difference(h):
        return np.array([(objective(log + h * e) - objective(log - h * e)) / (2 * h) for e in np.eye(3)])

    log = np.log([0.3, 0.7, 1.5])
    got = dense_implicit(population, {"log": jnp.asarray(log)}, {"slope": jnp.asarray(best(log))})
    # Richardson: (4 d(h/2) − d(h))/3 has the error O(h⁴), which is at most a 15th of its change when h is halved again
    h = 2.0**-6
    coarse, fine = ((4 * difference(w / 2) - difference(w)) / 3 for w in (h, h / 2))
    bound = np.abs(coarse - fine) + 64 * EPS * abs(objective(log)) / (h / 4)
    assert np.all(np.abs(np.asarray(got.hypergradient["log"]) - fine) <= bound)
    assert np.all(bound <= 1e-6 * np.linalg.norm(fine))
    assert jax.tree.structure(got.v) == jax.tree.structure({"slope": 0})


def test_unrolling_is_the_derivative_of_the_iteration(population, m):
    """Unrolling gives the derivative of the iteration, wherever y_0 is.

    y_N = (I − αA)^N y_0 + α Σ (I − αA)^n (Bx + c), hence dy_N/dx = α Σ (I − αA)^n B.
    """
    start = np.arange(5.0)
    powers = [np.linalg.matrix_power(np.eye(5) - LR * m["A"], n) for n in range(STEPS + 1)]
    inverse = LR * sum(powers[:STEPS])
    end = powers[STEPS] @ start + inverse @ (m["B"] @ X + m["c"])
    exact = hypergradient(m, m, X, end, inverse @ outer_gradient(m, X, end))
    got = unrolled_gradient(population, X, start, steps=STEPS, lr=LR)
    np.testing.assert_allclose(got.y, end, rtol=0, atol=ROUNDING * np.linalg.norm(start))
    np.testing.assert_allclose(got.hypergradient, exact, rtol=0, atol=ROUNDING * np.linalg.norm(start))


def test_newton_reaches_the_minimum_and_the_pulled_minimum(population, m):
    """Newton's method reaches the minimum and, with a pull s, the y with (A + sI) y = Bx + c + s·start."""
    start, ends = np.arange(5.0), []
    for pull in (0.0, 0.3):
        exact = np.linalg.solve(m["A"] + pull * np.eye(5), m["B"] @ X + m["c"] + pull * start)
        got = solve_inner(population, X, start, pull=pull)
        np.testing.assert_allclose(got.y, exact, rtol=0, atol=ROUNDING * np.linalg.norm(exact))
        assert not got.negative_curvature
        ends.append(exact)
    assert np.linalg.norm(ends[1] - ends[0]) > 0.1  # the pull has an effect


def test_slopes_of_a_cubic_have_no_error_of_the_second_order():
    """The slopes of a cubic are exact, since two widths together remove the error of second order.

    The central difference of x³ is off by h² everywhere, and has no error of order h⁴.
    """
    problem = Bilevel(lambda x, y, b: jnp.mean(b) * (jnp.sum(x**3) + 0 * y), lambda x, y, b: jnp.mean(b) * y**2)
    x = jnp.array([0.5, -1.0])
    got = slopes(Population.of(problem, ONE), x, jnp.zeros(()), 0, directions=2, width=0.1)
    np.testing.assert_allclose(got.values, got.directions @ np.array([0.75, 3.0]), rtol=1e-12)
    assert np.all(got.errors > 1e-4)  # the reported error is ¾ h² Σ d³


def newton(inner, start):
    """Run Newton's method from `start` for a g that is a function of y alone."""
    problem = Bilevel(lambda x, y, b: jnp.mean(b) * y[0], lambda x, y, b: jnp.mean(b) * inner(y - x))
    return solve_inner(Population.of(problem, ONE), jnp.zeros(1), jnp.array(start))


def test_newton_survives_where_full_steps_diverge():
    """Newton's method with halved steps converges for g = log cosh, where full steps diverge from |y| > 1.09."""
    got = newton(lambda y: jnp.log(jnp.cosh(y[0])), [3.0])
    assert abs(got.y[0]) <= 4 * EPS
    assert got.gradient_norm <= 4 * EPS


@pytest.mark.parametrize(
    ("inner", "start"),
    [
        (lambda y: jnp.cos(y[0]), [0.1]),
        # The curvatures are 1 and, for |y| < 0.58, below 0; the second direction of conjugate gradient meets the
        # latter. Its first direction makes a step that ends at 0.88, where a second step of Newton's method would not
        # see it.
        (lambda y: y[0] ** 2 / 2 + y[1] ** 4 / 4 - y[1] ** 2 / 2, [3.0, 0.5]),
    ],
)
def test_newton_says_where_the_hessian_is_indefinite(inner, start):
    got = newton(inner, start)
    assert got.negative_curvature
    assert got.iterations == 1


def test_the_inner_solution_is_that_of_all_samples_of_all_clients() -> None:
    """The inner solution is that of all samples of all clients.

    (y − a)² + x y², where a has the mean m by the clients' weights, is least at m/(1 + x). Here m = ¾·2 + ¼·7.
    """
    problem = fb.Bilevel(lambda x, y, a: jnp.mean((y - a) ** 2), lambda x, y, a: jnp.mean((y - a) ** 2) + x * y**2)
    clients = fb.Clients([np.zeros(1), np.zeros(1)], [np.array([1.0, 3.0]), np.array([7.0])], weights=[0.75, 0.25])
    found = fb.inner_solution(problem, clients, 0.5, 0.0)
    np.testing.assert_allclose(found.y, (0.75 * 2 + 0.25 * 7) / 1.5, rtol=4 * EPS)


@pytest.mark.parametrize("named", [{"local": "x"}, {"own": lambda path: True}], ids=["local", "own"])
def test_parts_that_clients_keep_are_refused(named) -> None:
    """Every client has its own x or y here, and a loss that is given the parts of all clients takes wrong ones."""
    pull = lambda x, y, a: jnp.mean((y[0] - a) ** 2) + x[0] * y[0] ** 2  # noqa: E731
    problem, clients = fb.Bilevel(pull, pull, **named), fb.Clients([np.ones(1), np.ones(1)])
    for compute in (fb.inner_solution, fb.check_hypergradient, fb.diagnose):
        with refuses(f"Bilevel.{next(iter(named))}", next(iter(named.values()))):
            compute(problem, clients, np.ones(2), np.zeros(2))
