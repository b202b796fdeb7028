"""Do differences of gradients tend to the exact products as fast as they should, and are their steps well chosen?"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from fedbilevel.oracles import products
from fedbilevel.oracles.differences import Differences, coordinate_slopes
from representatives import slow_but


@partial(jax.jit, static_argnums=0)
def by_differences(problem, x, y, v, outer_batch, batch, perturbation):
    made = Differences(perturbation=perturbation)
    return (
        made.hess_v(problem, x, y, v, batch),
        made.cross_v(problem, x, y, v, batch),
        *made.hypergradient(problem, x, y, v, outer_batch, batch),
    )


@partial(jax.jit, static_argnums=0)
def exactly(problem, x, y, v, outer_batch, batch):
    return (
        products.hess_v(problem, x, y, v, batch),
        products.cross_v(problem, x, y, v, batch),
        *products.hypergradient(problem, x, y, v, outer_batch, batch),
    )


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0], np.float64)


@pytest.fixture(scope="module")
def errors(instance):
    """Return a function of perturbation and dtype: the relative errors of both products and the hypergradient."""
    exact = exactly(instance.problem, *instance.iterate, *instance.batches[:2])

    def of(perturbation, dtype=jnp.float64):
        given = jax.tree.map(lambda a: a.astype(dtype), (*instance.iterate, *instance.batches[:2]))
        found = by_differences(instance.problem, *given, perturbation)
        return {
            name: np.linalg.norm(flat(found[k]) - flat(exact[k])) / np.linalg.norm(flat(exact[k]))
            for name, k in {"hess_v": 0, "cross_v": 1, "hypergradient": 3}.items()
        }

    return of


@pytest.mark.parametrize("name", ["hess_v", "cross_v", "hypergradient"])
def test_half_the_step_leaves_a_quarter_of_the_error(name, errors):
    """Half the step leaves a quarter of the error, which is η²/6·third derivative + O(η⁴) with η = ‖μv‖.

    The error is far above rounding here.
    """
    assert abs(errors(5e-3)[name] / errors(2.5e-3)[name] - 4) < 0.01


@pytest.mark.parametrize("dtype", slow_but(jnp.float64, of=[jnp.float64, jnp.float32]))
def test_the_step_balances_truncation_and_rounding(dtype, errors, instance):
    """The default step balances truncation and rounding: steps 30 times as long or as short are worse.

    The error is about ε^⅔.
    """
    step = float(jnp.cbrt(jnp.finfo(dtype).eps * (1 + optax.tree.norm(instance.iterate.y))))
    best, long, short = (errors(size, dtype) for size in (None, 30 * step, step / 30))
    for name in best:
        assert best[name] < min(long[name], short[name]), name
        assert best[name] < 30 * float(jnp.finfo(dtype).eps) ** (2 / 3), name


def test_along_nothing_there_is_nothing(instance):
    x, y, v = instance.iterate
    zero = optax.tree.zeros_like(v)
    found = by_differences(instance.problem, x, y, zero, *instance.batches[:2], None)
    assert all(not np.any(flat(product)) for product in found[:2])
    left_out = Differences().hypergradient(instance.problem, x, y, None, *instance.batches[:2])
    np.testing.assert_allclose(flat(left_out[1]), flat(found[3]), rtol=1e-12)


def test_slopes_along_coordinates(instance):
    """Slopes ∇_x ⟨∇y g(x, y), w⟩ along three of ten coordinates have an error in proportion to the step.

    Half the step leaves half the error, within 1 %. At the default step the error is about ε^½.
    """
    x, y, w = instance.iterate
    batch = instance.batches[0]
    answer = lambda x: jax.grad(instance.problem.inner, 1)(x, y, batch)  # noqa: E731
    exact = flat(products.cross_v(instance.problem, x, y, w, batch))
    places = jnp.array([7, 0, 4])
    slopes = jax.jit(lambda size: coordinate_slopes(answer, x, w, places, size))
    assert len(exact) == 10
    found = {size: flat(slopes(size)) for size in (None, 2e-4, 1e-4)}
    chosen = np.isin(np.arange(10), places)
    assert np.all(found[None][~chosen] == 0)
    np.testing.assert_allclose(found[None][chosen], exact[chosen], atol=np.finfo(float).eps ** (1 / 2))
    wide, narrow = (np.abs(found[size] - exact)[chosen] for size in (2e-4, 1e-4))
    np.testing.assert_allclose(wide / narrow, 2, rtol=0.01)
