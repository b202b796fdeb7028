"""Is the dense implicit gradient that of Φ(x) = F(x, y*(x))?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core.client import Clients
from fedbilevel.core.problem import Bilevel
from fedbilevel.tasks.quadratic import RIDGE, quadratic, solution
from implicit import implicit_gradient

EPS = np.finfo(np.float64).eps
CONDITION = 10.0
# 4 clients of at most 5 samples of 5-by-4 blocks: sums of ≤ 10² terms, amplified once by the linear solve
ROUNDING = 100 * CONDITION * EPS


@pytest.fixture(scope="module")
def drawn():
    return quadratic(clients=4, dim_x=4, dim_y=5, condition=CONDITION, samples=(2, 5), seed=3)


def implicit(problem, clients, x, y):
    return jax.jit(lambda x, y: implicit_gradient(problem, clients, x, y))(x, y)


def means(clients):
    """Weighted means over clients of the coefficients of the quadratic task, and of D·t."""
    out: dict[str, np.ndarray] = {}
    for i, p in enumerate(clients.weights):
        own = {**clients.outer.row(i), **clients.inner.row(i)}
        own["Dt"] = np.einsum("nij,nj->ni", own["D"], own["t"])
        own["tDt"] = np.einsum("ni,ni->n", own["t"], own["Dt"])
        for name, value in own.items():
            out[name] = out.get(name, 0) + p * value.mean(0)
    return out


def test_it_vanishes_at_the_closed_form_solution(drawn):
    exact = solution(drawn.clients)
    got = implicit(drawn.problem, drawn.clients, jnp.asarray(exact.x), jnp.asarray(exact.y))
    size = np.linalg.norm(exact.x) + np.linalg.norm(exact.y)
    assert np.linalg.norm(got.hypergradient) <= ROUNDING * size
    assert np.linalg.norm(got.inner_gradient) <= ROUNDING * size
    np.testing.assert_allclose(got.v, exact.v, rtol=0, atol=ROUNDING * np.linalg.norm(exact.v))


def test_it_is_the_slope_of_the_objective_of_the_quadratic(drawn):
    """Φ is quadratic: central differences have rounding errors alone, whatever the width."""
    m = means(drawn.clients)

    def best(x):
        return np.linalg.solve(m["A"], m["B"] @ x + m["c"])

    def objective(x):
        y = best(x)
        return 0.5 * y @ m["D"] @ y - y @ m["Dt"] + 0.5 * m["tDt"] + x @ m["E"] @ y + 0.5 * RIDGE * x @ x

    x = np.random.default_rng(0).normal(size=4)
    slope = np.array([(objective(x + e) - objective(x - e)) / 2 for e in np.eye(4)])
    got = implicit(drawn.problem, drawn.clients, jnp.asarray(x), jnp.asarray(best(x)))
    largest = max(abs(objective(x + s * e)) for e in np.eye(4) for s in (1, -1))
    np.testing.assert_allclose(got.hypergradient, slope, rtol=0, atol=ROUNDING * largest)
    assert np.linalg.norm(slope) > 0.1


def test_it_is_the_slope_of_the_objective_of_tuned_ridge_regression():
    """Trees, a cross derivative that depends on x, an outer loss that is not quadratic; unequal clients and sizes."""
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
    clients = Clients(**data, weights=weights)

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
    got = implicit(Bilevel(outer, inner), clients, {"log": jnp.asarray(log)}, {"slope": jnp.asarray(best(log))})
    # Richardson: (4 d(h/2) − d(h))/3 has error O(h⁴); how far it moves when h is halved again bounds that, 15-fold
    h = 2.0**-6
    coarse, fine = ((4 * difference(w / 2) - difference(w)) / 3 for w in (h, h / 2))
    bound = np.abs(coarse - fine) + 64 * EPS * abs(objective(log)) / (h / 4)
    assert np.all(np.abs(np.asarray(got.hypergradient["log"]) - fine) <= bound)
    assert np.all(bound <= 1e-6 * np.linalg.norm(fine))
    assert jax.tree.structure(got.v) == jax.tree.structure({"slope": 0})
