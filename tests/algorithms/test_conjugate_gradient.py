"""How many products with H, each an exchange where H is the federation's, do conjugate gradient and the series need?

A dense symmetric H of 400 log-spaced eigenvalues from 1e-3 to 1, κ = 1e3, and a random b; both go on until the relative
residual ‖Hv − b‖/‖b‖ is at most 1e-3, which is measured with H itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.parts.linear_solvers import InClient

DIMENSION, KAPPA, TOLERANCE = 400, 1e3, 1e-3
STEP = 2 / (1 / KAPPA + 1)  # 2/(μ + ℓ), the best for a spectrum from μ to ℓ: it leaves (1 − 2/(κ + 1))^N at worst
RNG = np.random.default_rng(0)
AXES = np.linalg.qr(RNG.normal(size=(DIMENSION, DIMENSION)))[0]
EIGENVALUES, B = np.geomspace(1 / KAPPA, 1, DIMENSION), RNG.normal(size=DIMENSION)
MATRIX = AXES * EIGENVALUES @ AXES.T


def left_by_series(terms):
    """‖b − Hv‖/‖b‖ for v = s Σ_{n<N} (I − sH)ⁿ b: the residual is (I − sH)^N b."""
    return np.linalg.norm((1 - STEP * EIGENVALUES) ** terms * (AXES.T @ B)) / np.linalg.norm(B)


def measured(solver, terms):
    """The residual; and the products, as the solver reports them and as counted from without."""
    asked = []

    def product(loop, v, key, number):
        jax.debug.callback(lambda: asked.append(1))
        return jnp.asarray(MATRIX) @ v

    found = jax.jit(lambda b, key: solver.solve(InClient, product, b, key, terms))(B, jax.random.key(0))
    jax.effects_barrier()
    assert int(found.hvps) == len(asked)
    return np.linalg.norm(MATRIX @ np.asarray(found.v) - B) / np.linalg.norm(B), len(asked)


def test_conjugate_gradient_needs_at_most_a_fifth_of_the_exchanges_of_the_series():
    """The series is given the fewest terms with which it gets there for this b, fewer than the worst b would need."""
    worst = int(np.ceil(np.log(TOLERANCE) / np.log(1 - 2 / (KAPPA + 1))))
    terms = next(n for n in range(1, worst + 1) if left_by_series(n) <= TOLERANCE)
    residual, products = measured(fb.parts.Neumann(terms=terms, step=STEP), terms)
    assert residual == pytest.approx(left_by_series(terms), rel=1e-9)
    assert products == terms - 1  # the first term is b
    by_cg, products_by_cg = measured(fb.parts.CG(tolerance=TOLERANCE, max_steps=terms), 1)
    assert max(residual, by_cg) <= TOLERANCE
    assert products_by_cg <= products / 5
    short, few = measured(fb.parts.CG(tolerance=TOLERANCE, max_steps=10), 1)
    assert few == 10
    assert short > TOLERANCE  # so the residual above is work done
