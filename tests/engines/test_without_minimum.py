"""An inner loss that curves downwards, however far y goes, has no y*(x): every method that needs y* warns once."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.parts.linear_solvers import without_minimum
from representatives import slow_but

pytestmark = pytest.mark.checked  # the tests are about a check before a run

RNG = np.random.default_rng(0)
U = RNG.normal(size=(4, 20, 3))
DATA = {"u": U, "t": U.sum(-1), "label": (U.sum(-1) > 0).astype(float)}
# the lowest eigenvalue of the Hessian of `squares`
LOWEST = np.linalg.eigvalsh(2 * np.einsum("mni,mnj->ij", U, U) / 80)[0]


def squares(x, y, batch):
    return jnp.mean((batch["u"] @ y - batch["t"]) ** 2)


def penalised(lower):
    """Return squares with e^x y² − `lower` y²; the lowest curvature at x = −1 is LOWEST + 2/e − 2 `lower`."""
    return lambda x, y, batch: squares(x, y, batch) + jnp.sum(jnp.exp(x) * y**2) - lower * jnp.sum(y**2)


def logistic(x, y, batch):
    """Compute a loss of the first three entries of y, which is flat along the fourth."""
    s = batch["u"] @ y[:3]
    return jnp.mean(jax.nn.softplus(s) - batch["label"] * s) + jnp.exp(x[0]) * y[0] ** 2


def network(x, y, batch):
    s = jnp.tanh(batch["u"] @ y["a"]) @ y["b"]
    return jnp.mean((s - batch["t"]) ** 2) + jnp.exp(x[0]) * jnp.sum(y["b"] ** 2)


def said(method, problem, y0):
    """Return the warnings of a run of one round from x = −1."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fb.solve(method, problem, fb.Clients(DATA), np.full(3, -1.0), y0, rounds=1, progress=False)
    return [str(one.message) for one in caught]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SimFBO", "AggITD"])
def test_a_concave_inner_loss_is_warned_of_once(name):
    """A concave inner loss is warned of once, with a ridge of half its curvature.

    The loss is concave in one direction, since 1.2 is above LOWEST/2 + 1/e.
    """
    lowest = LOWEST + 2 / np.e - 2.4
    assert lowest < 0
    (warning,) = said(getattr(fb, name)(), fb.Bilevel(squares, penalised(1.2)), np.zeros(3))
    assert f"the inner Hessian has a negative eigenvalue, at most {lowest:.3g}: y*(x) and v are not defined" in warning
    assert f"add c * (y**2).sum() with c above {-lowest / 2:.3g}" in warning


@pytest.mark.parametrize("bits", slow_but(32, of=[32, 64]))
def test_only_a_loss_without_a_minimum_is_told(bits):
    """Only a loss without a minimum is reported.

    A curvature of 0 is not negative. The curvature of a network is negative at its start, but not far from it.
    """
    weights = {"a": RNG.normal(size=(3, 8)), "b": RNG.normal(size=8)}
    cases = [(penalised(1.2), np.zeros(3)), (penalised(1.1), np.zeros(3)), (logistic, np.zeros(4)), (network, weights)]
    with jax.enable_x64(bits == 64):
        found = [at_start(inner, y0) for inner, y0 in cases]
    np.testing.assert_allclose(found, [LOWEST + 2 / np.e - 2.4, 0, 0, 0], atol=1e-5)


def at_start(inner, y0):
    x, y0 = jax.tree.map(jnp.asarray, (np.full(3, -1.0), y0))
    return without_minimum(fb.Bilevel(inner, inner).prepared(), fb.Clients(DATA), x, y0)


@pytest.mark.slow
def test_the_network_curves_downwards_at_its_start():
    """The network of the test above curves downwards at its start, so that the test could fail."""
    weights = {"a": RNG.normal(size=(3, 8)), "b": RNG.normal(size=8)}
    flat, shaped = jax.flatten_util.ravel_pytree(weights)
    batch = jax.tree.map(lambda a: a.reshape(80, *a.shape[2:]), DATA)
    hessian = jax.hessian(lambda y: network(np.full(3, -1.0), shaped(y), batch))(flat)
    ends = np.linalg.eigvalsh(hessian)
    assert ends[0] < -0.01 * ends[-1]
