"""Does Lanczos find the ends of the spectrum, and do the residuals bound its errors?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.oracles.operators import extreme_eigenvalues
from refusals import refuses

EPS = np.finfo(np.float64).eps


def matrix(spectrum, seed=0):
    spectrum = np.asarray(spectrum, float)
    axes = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(spectrum),) * 2))[0]
    return jnp.asarray((axes * spectrum) @ axes.T)


def whole(h, seed):
    return extreme_eigenvalues(lambda v: h @ v, jnp.zeros(len(h)), seed, iterations=10**6)


SPECTRA = {
    "spread": np.geomspace(1e-4, 1, 12),
    "indefinite": np.linspace(-2, 3, 12),
    "repeated": np.repeat([1.0, 2.0, 5.0], 4),
    "identity": np.ones(12),
    "zero": np.zeros(12),
}


@pytest.mark.parametrize("name", sorted(SPECTRA))
def test_as_many_steps_as_dimensions_give_the_ends_to_rounding(name):
    """With as many steps as dimensions, the ends are exact to rounding.

    Repeated eigenvalues make the Krylov space smaller than the whole space, so that new directions are necessary.
    """
    h = matrix(SPECTRA[name])
    got = whole(h, 1)
    exact = np.linalg.eigvalsh(h)
    rounding = 100 * EPS * np.abs(exact).max()  # 12-dimensional products, and Gram–Schmidt over 12 vectors
    assert abs(got.smallest - exact[0]) <= rounding
    assert abs(got.largest - exact[-1]) <= rounding
    for theta, residual, u in (
        (got.smallest, got.smallest_residual, got.smallest_vector),
        (got.largest, got.largest_residual, got.largest_vector),
    ):
        assert residual <= rounding
        assert np.linalg.norm(u) == pytest.approx(1, abs=10 * EPS)
        np.testing.assert_allclose(h @ u, theta * u, rtol=0, atol=rounding)


def test_few_steps_stay_inside_and_within_their_bounds():
    """With few steps, Ritz values are inside the spectrum, within their residual of an eigenvalue; also on trees."""
    h = matrix(np.linspace(-1, 4, 200))
    like = {"a": jnp.zeros((10, 10)), "b": jnp.zeros(100)}

    @jax.jit
    def product(v):
        flat = h @ jnp.concatenate([v["a"].ravel(), v["b"]])
        return {"a": flat[:100].reshape(10, 10), "b": flat[100:]}

    got = extreme_eigenvalues(product, like, 0, iterations=15)
    exact = np.linalg.eigvalsh(h)
    assert exact[0] <= got.smallest < got.largest <= exact[-1]
    for theta, residual in ((got.smallest, got.smallest_residual), (got.largest, got.largest_residual)):
        assert 1e-6 < np.abs(exact - theta).min() <= residual  # it has not converged, and its residual says so
    assert got.largest > 3.8  # by Kaniel and Paige the ends converge first
    assert jax.tree.structure(got.largest_vector) == jax.tree.structure(like)


@pytest.mark.parametrize(("entry", "largest"), [(np.nan, np.nan), (np.inf, np.nan), (1e200, 1e200)])
def test_products_that_are_not_finite_give_nan_and_no_warning(entry, largest):
    """Products that are not finite give NaN without a warning.

    If a norm overflows, NumPy would give a RuntimeWarning, which is an error in the tests.
    """
    got = whole(matrix(np.ones(12)).at[3, 3].set(entry), 0)
    assert got.largest == pytest.approx(largest, rel=1e-9, nan_ok=True)


def test_no_steps_are_refused():
    with refuses("lanczos iterations", 0):
        extreme_eigenvalues(lambda v: v, jnp.zeros(3), 0, iterations=0)
