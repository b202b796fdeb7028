"""Are RABO's and RAFBO's hypergradients those of each client's submodel, averaged over the holders of each entry?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedbilevel as fb

INPUTS, HIDDEN = 2, 4
CAPACITY, WEIGHTS = np.array([1.0, 0.5, 0.25]), np.array([0.5, 0.2, 0.3])
KEPT = (CAPACITY * HIDDEN).astype(int)
COMMON = {"batch_size": None, "inner": fb.parts.LocalSGD(local_steps=1, lr=0.3), "outer_lr": 1.0}
METHODS = {
    "RABO": fb.RABO(hypergradient=fb.parts.LocalImplicit(solver=fb.parts.CG(tolerance=1e-12)), **COMMON),
    "coordinate": fb.RAFBO(hypergradient=fb.parts.Coordinates(terms=300, step=0.8), **COMMON),
}


def outer(x, y, batch):
    return jnp.mean((jnp.tanh(batch["input"] @ x) @ y - batch["target"]) ** 2)


def inner(x, y, batch):
    return outer(x, y, batch) / 2 + 0.1 * jnp.sum(y**2)


@pytest.fixture(scope="module")
def rounds():
    """Return x, y, the clients' samples, and a function that runs one round of a method by name."""
    rng = np.random.default_rng(0)
    rows = [
        [{"input": rng.normal(size=(n, INPUTS)), "target": rng.normal(size=n)} for n in sizes]
        for sizes in ([3, 5, 4], [6, 4, 5])
    ]
    clients = fb.Clients(*rows, weights=WEIGHTS, capacity=CAPACITY)
    problem = fb.Bilevel(outer, inner, structure=fb.Structure(x="_ hidden", y="hidden"))
    x, y = jnp.asarray(rng.normal(size=(INPUTS, HIDDEN))), jnp.asarray(rng.normal(size=HIDDEN))
    found = functools.cache(
        lambda name: fb.solve(fb.Submodels(METHODS[name], policy="static"), problem, clients, x, y, rounds=1)
    )
    return x, y, rows, found


@functools.partial(jax.jit, static_argnames="settled")
def dense(x, y, outer_batch, inner_batch, settled):
    """Return ∇x f − ∇²xy g [∇²yy g]⁻¹ ∇y f with matrices, for a g that is quadratic in y.

    ∇²xy g is taken at y or, if `settled`, at the client's own y*(x).
    """
    flat, back = ravel_pytree(x)
    f_x, f_y = jax.grad(outer, (0, 1))(x, y, outer_batch)
    hessian = jax.hessian(inner, 1)(x, y, inner_batch)
    where = y - jnp.linalg.solve(hessian, jax.grad(inner, 1)(x, y, inner_batch)) if settled else y
    cross = jax.jacobian(jax.grad(lambda x, y: inner(back(x), y, inner_batch), 0), 1)(flat, where)
    return f_x - back(cross @ jnp.linalg.solve(hessian, f_y))


def mean_over_holders(parts, shape):
    """Return Σ p_i u_i / Σ p_i over the clients that hold the entry; they hold the first units, along the last axis."""
    total, held = np.zeros(shape), np.zeros(shape)
    for weight, kept, part in zip(WEIGHTS, KEPT, parts, strict=True):
        total[..., :kept] += weight * np.asarray(part)
        held[..., :kept] += weight
    return total / held


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tolerance"), [("RABO", 1e-9), ("coordinate", 1e-6)])
def test_a_round_is_that_of_the_sliced_problems(name, tolerance, rounds):
    """A round equals that of the sliced problems, with matrices in NumPy.

    Conjugate gradient leaves an error of 1e-12. Forward differences leave ε^½ times κ < 13, and the series leaves less,
    (1 − 0.8·0.2)^300.

    "coordinate" follows y_N(x), which has reached the client's own y*(x), so that the derivative is taken there.
    """
    x, y, (outer_rows, inner_rows), found = rounds
    slope = jax.jit(jax.grad(inner, 1))
    steps = [-0.3 * slope(x[:, :k], y[:k], row) for k, row in zip(KEPT, inner_rows, strict=True)]
    y = y + mean_over_holders(steps, y.shape)
    np.testing.assert_allclose(found(name).y, y, rtol=1e-12)
    own = name == "coordinate"
    each = [dense(x[:, :k], y[:k], *rows, settled=own) for k, *rows in zip(KEPT, outer_rows, inner_rows, strict=True)]
    np.testing.assert_allclose(found(name).x, x - mean_over_holders(each, x.shape), atol=tolerance)


@pytest.mark.slow
def test_coordinates_are_the_submodels(rounds):
    """A client computes a step on y, ∇f, and N steps from x and from each of the 2·(units held) points beside x."""
    gradients = rounds[3]("coordinate").ledger.gradients
    assert gradients == sum(1 + 1 + 300 * (1 + INPUTS * kept) for kept in KEPT)
