"""How many products with H, each an exchange where H is the federation's, do conjugate gradient and the series need?

A dense symmetric H of 400 log-spaced eigenvalues from 1e-3 to 1, κ = 1e3, and a random b; both go on until the relative
residual ‖Hv − b‖/‖b‖ is at most 1e-3, which is measured with H itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.parts.linear_solvers import InClient

DIMENSION, KAPPA, TOLERANCE = 400, 1e3, 1e-3
STEP = 2 / (1 / KAPPA + 1)  # 2/(μ + ℓ), the best for a spectrum from μ to ℓ: it leaves (1 − 2/(κ + 1))^N at worst


class System(NamedTuple):
    eigenvalues: np.ndarray
    axes: np.ndarray  # columns
    b: np.ndarray

    @property
    def matrix(self):
        return self.axes * self.eigenvalues @ self.axes.T

    def left_by_series(self, terms):
        """‖b − Hv‖/‖b‖ for v = s Σ_{n<N} (I − sH)ⁿ b: the residual is (I − sH)^N b."""
        return np.linalg.norm((1 - STEP * self.eigenvalues) ** terms * (self.axes.T @ self.b)) / np.linalg.norm(self.b)


class Measured(NamedTuple):
    residual: float
    products: int  # as the inverse reports
    asked: int  # as counted from without


@pytest.fixture(scope="module")
def system():
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(DIMENSION, DIMENSION)))[0]
    return System(np.geomspace(1 / KAPPA, 1, DIMENSION), axes, rng.normal(size=DIMENSION))


def measure(system, solver):
    matrix, asked = system.matrix, []

    def product(loop, v, key, number):
        jax.debug.callback(lambda: asked.append(1))
        return jnp.asarray(matrix) @ v

    terms = solver.terms if isinstance(solver, fb.parts.Neumann) else 1
    solve = jax.jit(lambda b, key: solver.solve(InClient, product, b, key, terms))
    found = solve(system.b, jax.random.key(0))
    jax.effects_barrier()
    residual = np.linalg.norm(matrix @ np.asarray(found.v) - system.b) / np.linalg.norm(system.b)
    return Measured(residual, int(found.hvps), len(asked))


def test_conjugate_gradient_needs_at_most_a_fifth_of_the_exchanges_of_the_series(system):
    """The series is given the fewest terms with which it gets there for this b, fewer than the worst b would need."""
    worst = int(np.ceil(np.log(TOLERANCE) / np.log(1 - 2 / (KAPPA + 1))))
    terms = next(n for n in range(1, worst + 1) if system.left_by_series(n) <= TOLERANCE)
    series = measure(system, fb.parts.Neumann(terms=terms, step=STEP))
    cg = measure(system, fb.parts.CG(tolerance=TOLERANCE, max_steps=terms))
    assert series.residual == pytest.approx(system.left_by_series(terms), rel=1e-9)
    assert max(series.residual, cg.residual) <= TOLERANCE
    assert series.products == series.asked == terms - 1  # the first term is b
    assert cg.products == cg.asked
    assert cg.products <= series.products / 5


def test_with_too_few_products_neither_gets_there(system):
    """So the residuals above are work done: ten products leave conjugate gradient, and a fifth the series, short."""
    cg = measure(system, fb.parts.CG(tolerance=TOLERANCE, max_steps=10))
    series = measure(system, fb.parts.Neumann(terms=501, step=STEP))
    assert (cg.products, cg.asked, series.products, series.asked) == (10, 10, 500, 500)
    assert min(cg.residual, series.residual) > TOLERANCE
