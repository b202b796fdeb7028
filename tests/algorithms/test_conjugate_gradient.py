"""How many products with H do conjugate gradient and the Neumann series need?

If H is the federation's, each product is an exchange. Here H is dense and symmetric, with 400 log-spaced eigenvalues
from 1e-3 to 1, so that κ = 1e3, and b is random. Both solvers go on until the relative residual ‖Hv − b‖/‖b‖, which is
measured with H itself, is at most 1e-3.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.parts.linear_solvers import InClient

DIMENSION, KAPPA, TOLERANCE = 400, 1e3, 1e-3
STEP = 2 / (1 / KAPPA + 1)  # 2/(μ + ℓ), the best step for a spectrum from μ to ℓ: it leaves at most (1 − 2/(κ + 1))^N
RNG = np.random.default_rng(0)
AXES = np.linalg.qr(RNG.normal(size=(DIMENSION, DIMENSION)))[0]
EIGENVALUES, B = np.geomspace(1 / KAPPA, 1, DIMENSION), RNG.normal(size=DIMENSION)
MATRIX = AXES * EIGENVALUES @ AXES.T


def left_by_series(terms):
    """Return ‖b − Hv‖/‖b‖ for v = s Σ_{n<N} (I − sH)ⁿ b; the residual is (I − sH)^N b."""
    return np.linalg.norm((1 - STEP * EIGENVALUES) ** terms * (AXES.T @ B)) / np.linalg.norm(B)


def measured(solver, terms):
    """Return the residual, the products that the solver reports, and the products counted at H."""
    asked = []

    def product(loop, v, key, number):
        jax.debug.callback(lambda: asked.append(1))
        return jnp.asarray(MATRIX) @ v

    found = jax.jit(lambda b, key: solver.solve(InClient, product, b, key, terms))(B, jax.random.key(0))
    jax.effects_barrier()
    assert int(found.hvps) == len(asked)
    return np.linalg.norm(MATRIX @ np.asarray(found.v) - B) / np.linalg.norm(B), len(asked)


def test_conjugate_gradient_needs_at_most_a_fifth_of_the_exchanges_of_the_series():
    """Conjugate gradient needs at most a fifth of the exchanges of the series.

    The series has the smallest number of terms that is enough for this b, which is smaller than for the worst b.
    """
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
    assert short > TOLERANCE  # so that the residual above takes all these products
