"""Do the solvers give what their series and theorems promise, and say honestly where they stand?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.oracles.operators import conjugate_gradient, neumann

EPS = np.finfo(np.float64).eps


def matrix(spectrum, seed=0):
    """A symmetric matrix with the given eigenvalues and random axes."""
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
    powers = [np.linalg.matrix_power(np.eye(6) - step * h, n) for n in range(terms)]
    exact = step * sum(powers) @ b
    solved = neumann(product(h), b, terms=terms, step=step)
    # terms products of 6 x 6 with a contraction: at most 8·terms roundings of numbers of the size of b
    assert np.linalg.norm(solved.v - exact) <= 8 * terms * EPS * np.linalg.norm(b)
    assert int(solved.iterations) == terms - 1


@pytest.mark.parametrize("which", [0, -1])
def test_neumann_misses_an_eigenvector_by_its_bound_exactly(which):
    """(H⁻¹ − v)/H⁻¹ along an eigenvector of λ is (1 − step·λ)^terms; the residual is the same number."""
    h, terms, step = matrix(np.geomspace(0.1, 1, 6)), 12, 0.9
    value, axis = (part[..., which] for part in np.linalg.eigh(h))
    solved = neumann(product(h), axis, terms=terms, step=step)
    bound = (1 - step * value) ** terms
    tolerance = 8 * terms * EPS / value  # roundings of the partial sums, of size up to 1/λ
    assert np.linalg.norm(solved.v - axis / value) * value == pytest.approx(bound, abs=tolerance)
    assert float(solved.residual) == pytest.approx(bound, abs=tolerance)


def test_conjugate_gradient_is_exact_after_as_many_products_as_dimensions():
    h, b = matrix(np.geomspace(0.1, 1, 7)), vector(7)
    solved = conjugate_gradient(product(h), b, tolerance=0, iterations=7)
    # finite termination up to rounding, which conjugacy amplifies by at most κ per step of few: κ·dim² in all
    assert relative(h, solved.v, b) <= 10 * 7**2 * EPS
    assert int(solved.iterations) == 7
    early = conjugate_gradient(product(h), b, tolerance=0, iterations=6)
    assert relative(h, early.v, b) > 1e-6


def test_three_eigenvalues_take_three_products():
    h, b = matrix([1, 1, 1, 2, 2, 5, 5, 5]), vector(8)
    solved = conjugate_gradient(product(h), b, tolerance=1e-12)
    assert int(solved.iterations) == 3


@pytest.mark.parametrize("tolerance", [1e-1, 1e-4, 1e-8])
def test_conjugate_gradient_stops_at_its_tolerance_within_the_bound(tolerance):
    condition = 400.0
    h, b = matrix(np.linspace(1 / condition, 1, 80)), vector(80)
    solved = conjugate_gradient(product(h), b, tolerance=tolerance, iterations=1000)
    assert relative(h, solved.v, b) <= tolerance * (1 + 1e-6)  # recurrence against true residual: 80·κ·ε = 7e-12
    # ‖e_k‖_H ≤ 2((√κ−1)/(√κ+1))^k ‖e_0‖_H, and ‖r‖/‖r_0‖ ≤ √κ ‖e‖_H/‖e_0‖_H
    root = np.sqrt(condition)
    bound = np.log(2 * root / tolerance) / np.log((root + 1) / (root - 1))
    assert 1 <= int(solved.iterations) <= np.ceil(bound)
    before = conjugate_gradient(product(h), b, tolerance=0, iterations=int(solved.iterations) - 1)
    assert relative(h, before.v, b) > tolerance * (1 - 1e-6)  # not a product more than needed


@pytest.mark.parametrize("solver", [neumann, conjugate_gradient])
def test_the_residual_is_true_and_the_products_are_counted(solver):
    h, b, calls = matrix(np.geomspace(0.01, 1, 9)), vector(9), []

    def counted(v):
        jax.debug.callback(lambda: calls.append(1))
        return product(h)(v)

    options = {"terms": 5, "step": 0.5} if solver is neumann else {"tolerance": 0.0, "iterations": 4}
    solved = solver(counted, b, **options)
    jax.effects_barrier()
    assert len(calls) == 4 + 1  # and one for the residual
    assert int(solved.iterations) == 4
    true = relative(h, solved.v, b)
    assert float(solved.residual) == pytest.approx(true, rel=1e-12)  # 9·ε of numbers of the residual's size
    assert true > 1e-3  # far from solved: an estimate by recurrence of zero would show


def first_negative(h, b):
    """Conjugate gradient written out: the iteration whose direction has no positive curvature, and v there."""
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
    assert int(solved.iterations) == at + 1  # the product that showed it was spent
    np.testing.assert_allclose(solved.v, v, rtol=1e-12, atol=1e-14)
    assert np.isfinite(solved.residual)


def test_definite_matrices_are_not_flagged():
    h = matrix(np.geomspace(1e-6, 1, 10))
    assert int(conjugate_gradient(product(h), vector(10), tolerance=1e-10).negative_curvature) == -1


@pytest.mark.parametrize("solver", [neumann, conjugate_gradient])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zero_asks_for_zero(solver, dtype):
    options = {"terms": 3, "step": 0.5} if solver is neumann else {}
    solved = solver(product(np.eye(3, dtype=dtype)), jnp.zeros(3, dtype), **options)
    assert solved.v.dtype == dtype
    assert np.array_equal(solved.v, np.zeros(3))
    assert float(solved.residual) == 0
    assert int(solved.negative_curvature) == -1


@pytest.mark.parametrize("solver", [neumann, conjugate_gradient])
@pytest.mark.parametrize("where", ["operator", "b"])
def test_a_nan_is_never_hidden(solver, where):
    h, b = np.eye(3), np.ones(3)
    (h if where == "operator" else b)[..., 1] = np.nan
    options = {"terms": 3, "step": 0.5} if solver is neumann else {"iterations": 5}
    solved = solver(product(h), jnp.asarray(b), **options)
    assert np.isnan(solved.v).any()
    assert np.isnan(solved.residual)
    assert int(solved.negative_curvature) == -1


TREE = {"a": np.zeros((2, 2)), "b": np.zeros(3)}


def on_tree(h):
    unravel = ravel_pytree(jax.tree.map(jnp.asarray, TREE))[1]
    return unravel, lambda v: unravel(jnp.asarray(h) @ ravel_pytree(v)[0])


@pytest.mark.parametrize("solver", [neumann, conjugate_gradient])
def test_trees_are_solved_as_their_flat_vectors(solver):
    h, b = matrix(np.geomspace(0.2, 1, 7)), vector(7)
    unravel, operator = on_tree(h)
    options = {"terms": 9, "step": 0.8} if solver is neumann else {"tolerance": 1e-3}
    tree, plain = solver(operator, unravel(b), **options), solver(product(h), b, **options)
    assert jax.tree.structure(tree.v) == jax.tree.structure(TREE)
    np.testing.assert_allclose(ravel_pytree(tree.v)[0], plain.v, rtol=0, atol=50 * EPS * np.linalg.norm(b))
    assert int(tree.iterations) == int(plain.iterations)


@pytest.mark.parametrize("solver", [neumann, conjugate_gradient])
def test_jit_and_vmap_solve_each_problem_alone(solver):
    """One batch with an easy problem, a hard one, an indefinite one and b = 0."""
    hs = np.stack([np.eye(5), matrix(np.geomspace(0.01, 1, 5)), matrix([-1, 1, 1, 1, 1]), np.eye(5)])
    bs = np.stack([vector(5, seed) for seed in range(3)] + [np.zeros(5)])
    options = {"terms": 6, "step": 0.5} if solver is neumann else {"tolerance": 1e-8}

    def solve(h, b):
        return solver(lambda v: h @ v, b, **options)

    together = jax.jit(jax.vmap(solve))(hs, bs)
    for i, (h, b) in enumerate(zip(hs, bs, strict=True)):
        alone = solve(h, jnp.asarray(b))
        # at most 6 steps; rounding enters through products summed in another order, amplified by κ ≤ 100
        np.testing.assert_allclose(together.v[i], alone.v, rtol=0, atol=1e4 * EPS * (1 + np.linalg.norm(alone.v)))
        assert int(together.iterations[i]) == int(alone.iterations)
        assert int(together.negative_curvature[i]) == int(alone.negative_curvature)
    assert np.all(np.isfinite(together.v))


@pytest.mark.parametrize("solver", [neumann, conjugate_gradient])
def test_float32_stays_float32(solver):
    eps = np.finfo(np.float32).eps
    h, b = matrix(np.linspace(0.5, 1, 6)).astype(np.float32), vector(6).astype(np.float32)
    options = {"terms": 40, "step": 1.0} if solver is neumann else {"tolerance": 1e-5}
    solved = solver(product(h), jnp.asarray(b), **options)
    assert solved.v.dtype == solved.residual.dtype == np.float32
    # neumann: (1 − ½)^40 is below rounding, 40 terms of at most 2‖b‖ are summed; conjugate gradient: its tolerance
    assert relative(h.astype(float), solved.v, b) <= (80 * eps if solver is neumann else 1e-5 + 80 * eps)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: neumann(product(np.eye(2)), jnp.ones(2), terms=0, step=1.0), "neumann terms = 0"),
        (lambda: conjugate_gradient(product(np.eye(2)), jnp.ones(2), iterations=0), "iterations = 0"),
        (lambda: conjugate_gradient(product(np.eye(2)), jnp.ones(2), tolerance=-1.0), r"tolerance = -1\.0"),
    ],
)
def test_impossible_settings_are_refused(call, words):
    with pytest.raises(ConfigurationError, match=words):
        call()
