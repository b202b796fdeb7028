"""Do the solvers keep what their series and theorems promise, and does conjugate gradient report its residual?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from matrices import neumann as series

from fedbilevel.oracles.operators import conjugate_gradient, neumann
from refusals import refuses

EPS = np.finfo(np.float64).eps


def matrix(spectrum, seed=0):
    """Return a symmetric matrix with these eigenvalues and random axes."""
    spectrum = np.asarray(spectrum, float)
    axes = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(spectrum),) * 2))[0]
    return (axes * spectrum) @ axes.T


def vector(size, seed=1):
    return np.random.default_rng(seed).normal(size=size)


def product(h):
    return lambda v: jnp.asarray(h) @ v


def relative(h, v, b):
    return np.linalg.norm(h @ np.asarray(v) - b) / np.linalg.norm(b)


@pytest.mark.parametrize("terms", [1, 2, 7])
def test_neumann_is_the_truncated_sum(terms):
    h, b, step = matrix(np.geomspace(0.1, 1, 6)), vector(6), 0.7
    found = neumann(product(h), b, terms=terms, step=step)
    # `terms` products of 6 x 6 with a contraction: at most 8·terms roundings of numbers of the size of b
    assert np.linalg.norm(found - series(h, step, terms) @ b) <= 8 * terms * EPS * np.linalg.norm(b)


def test_conjugate_gradient_is_exact_after_as_many_products_as_eigenvalues():
    h, b = matrix(np.geomspace(0.1, 1, 7)), vector(7)
    solved = conjugate_gradient(product(h), b, tolerance=0, iterations=7)
    # it ends up to rounding, which conjugacy amplifies by at most κ in each of few steps: κ·dim² in all
    assert relative(h, solved.v, b) <= 10 * 7**2 * EPS
    assert int(solved.iterations) == 7
    early = conjugate_gradient(product(h), b, tolerance=0, iterations=6)
    assert relative(h, early.v, b) > 1e-6
    three = conjugate_gradient(product(matrix([1, 1, 1, 2, 2, 5, 5, 5])), vector(8), tolerance=1e-12)
    assert int(three.iterations) == 3


@pytest.mark.parametrize("tolerance", [1e-1, 1e-4, 1e-8])
def test_conjugate_gradient_stops_at_its_tolerance_within_the_bound(tolerance):
    condition = 400.0
    h, b = matrix(np.linspace(1 / condition, 1, 80)), vector(80)
    solved = conjugate_gradient(product(h), b, tolerance=tolerance, iterations=1000)
    # the recurrence against the true residual: 80·κ·ε = 7e-12
    assert relative(h, solved.v, b) <= tolerance * (1 + 1e-6)
    # ‖e_k‖_H ≤ 2((√κ−1)/(√κ+1))^k ‖e_0‖_H, and ‖r‖/‖r_0‖ ≤ √κ ‖e‖_H/‖e_0‖_H
    root = np.sqrt(condition)
    bound = np.log(2 * root / tolerance) / np.log((root + 1) / (root - 1))
    assert 1 <= int(solved.iterations) <= np.ceil(bound)
    before = conjugate_gradient(product(h), b, tolerance=0, iterations=int(solved.iterations) - 1)
    assert relative(h, before.v, b) > tolerance * (1 - 1e-6)  # it makes no product more than needed
    assert int(solved.negative_curvature) == -1


def test_the_residual_is_true_and_the_products_are_counted():
    h, b, calls = matrix(np.geomspace(0.01, 1, 9)), vector(9), []

    def counted(v):
        jax.debug.callback(lambda: calls.append(1))
        return product(h)(v)

    solved = conjugate_gradient(counted, b, tolerance=0.0, iterations=4)
    jax.effects_barrier()
    assert len(calls) == 4 + 1  # one more for the residual
    assert int(solved.iterations) == 4
    true = relative(h, solved.v, b)
    assert float(solved.residual) == pytest.approx(true, rel=1e-12)  # 9·ε of numbers of the size of the residual
    assert true > 1e-3  # far from solved, so that an estimate of 0 by a recurrence would show


def first_negative(h, b):
    """Run conjugate gradient; return the iteration whose direction has no positive curvature, and v there."""
    v, r, p = np.zeros_like(b), b.copy(), b.copy()
    for k in range(len(b)):
        if p @ h @ p <= 0:
            return k, v
        length = (r @ r) / (p @ h @ p)
        v, after = v + length * p, r - length * (h @ p)
        r, p = after, after + (after @ after) / (r @ r) * p
    raise AssertionError("definite")


@pytest.mark.parametrize(
    ("spectrum", "b"),
    [
        ([-1.0, 2.0, 3.0], [1.0, 0.0, 0.0]),
        ([0.0, 2.0, 3.0], [1.0, 0.0, 0.0]),
        ([1.0, 2.0, -1.0], [1.0, 1.0, 0.1]),
        ([1.0, 2.0, 3.0, 4.0, -0.1], [1.0, 1.0, 1.0, 1.0, 0.01]),
    ],
)
def test_negative_curvature_is_flagged_where_it_is_met(spectrum, b):
    h, b = np.diag(spectrum), np.array(b)
    at, v = first_negative(h, b)
    solved = conjugate_gradient(product(h), b, tolerance=1e-12)
    assert int(solved.negative_curvature) == at
    assert int(solved.iterations) == at + 1  # the product that showed the curvature counts
    np.testing.assert_allclose(solved.v, v, rtol=1e-12, atol=1e-14)
    assert np.isfinite(solved.residual)


def test_zero_asks_for_zero():
    solved = conjugate_gradient(product(np.eye(3)), jnp.zeros(3))
    assert np.array_equal(solved.v, np.zeros(3))
    assert float(solved.residual) == 0
    assert int(solved.negative_curvature) == -1


@pytest.mark.parametrize("where", ["operator", "b"])
def test_a_nan_is_never_hidden(where):
    h, b = np.eye(3), np.ones(3)
    (h if where == "operator" else b)[..., 1] = np.nan
    solved = conjugate_gradient(product(h), jnp.asarray(b), iterations=5)
    assert np.isnan(solved.v).any()
    assert np.isnan(solved.residual)
    assert int(solved.negative_curvature) == -1


def test_trees_are_solved_as_their_flat_vectors():
    h, b = matrix(np.geomspace(0.2, 1, 7)), vector(7)
    like = {"a": jnp.zeros((2, 2)), "b": jnp.zeros(3)}
    unravel = ravel_pytree(like)[1]
    tree = conjugate_gradient(lambda v: unravel(jnp.asarray(h) @ ravel_pytree(v)[0]), unravel(b), tolerance=1e-3)
    plain = conjugate_gradient(product(h), b, tolerance=1e-3)
    assert jax.tree.structure(tree.v) == jax.tree.structure(like)
    np.testing.assert_allclose(ravel_pytree(tree.v)[0], plain.v, rtol=0, atol=50 * EPS * np.linalg.norm(b))
    assert int(tree.iterations) == int(plain.iterations)


def test_jit_and_vmap_solve_each_problem_alone():
    """Under `jit` and `vmap`, each problem of a batch is solved by itself.

    The batch has an easy problem, a hard one, an indefinite one, and one with b = 0.
    """
    hs = np.stack([np.eye(5), matrix(np.geomspace(0.01, 1, 5)), matrix([-1, 1, 1, 1, 1]), np.eye(5)])
    bs = np.stack([vector(5, seed) for seed in range(3)] + [np.zeros(5)])

    def solve(h, b):
        return conjugate_gradient(product(h), b, tolerance=1e-8)

    together = jax.jit(jax.vmap(solve))(hs, bs)
    for i, (h, b) in enumerate(zip(hs, bs, strict=True)):
        alone = solve(h, jnp.asarray(b))
        # at most 6 steps; products are summed in another order, whose rounding is amplified by κ ≤ 100
        np.testing.assert_allclose(together.v[i], alone.v, rtol=0, atol=1e4 * EPS * (1 + np.linalg.norm(alone.v)))
        assert int(together.iterations[i]) == int(alone.iterations)
        assert int(together.negative_curvature[i]) == int(alone.negative_curvature)
    assert np.all(np.isfinite(together.v))


def test_float32_stays_float32():
    h, b = matrix(np.linspace(0.5, 1, 6)).astype(np.float32), vector(6).astype(np.float32)
    solved = conjugate_gradient(product(h), jnp.asarray(b), tolerance=1e-5)
    assert solved.v.dtype == solved.residual.dtype == np.float32
    assert relative(h.astype(float), solved.v, b) <= 1e-5 + 80 * np.finfo(np.float32).eps


@pytest.mark.parametrize(("field", "wrong"), [("iterations", 0), ("tolerance", -1.0)])
def test_impossible_settings_are_refused(field, wrong):
    with refuses(f"conjugate_gradient {field}", wrong):
        conjugate_gradient(product(np.eye(2)), jnp.ones(2), **{field: wrong})
