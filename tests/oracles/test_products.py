"""Do products computed in one pass equal those of dense second derivatives, and do they cost one pass?"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fedbilevel.core.problem import Bilevel
from fedbilevel.core.tree import XYV
from fedbilevel.oracles.products import cross_v, directions, hess_v, independent_directions

ROUNDING = 1e-12  # relative; the sums have fewer than 10³ terms of size ≤ 10³·result, and each is off by 2⁻⁵³

joint_directions = jax.jit(directions, static_argnums=0)
independent = jax.jit(independent_directions, static_argnums=0)


def flat(tree):
    return np.asarray(ravel_pytree(tree)[0])


def close(tree, expected):
    got = flat(tree)
    assert np.linalg.norm(got - expected) <= ROUNDING * np.linalg.norm(expected)


def dense(instance, batch):
    """Return the gradients of both losses, and the blocks yy and xy of the inner loss's Hessian, as NumPy arrays."""
    return {name: np.asarray(value) for name, value in dense_parts(instance.problem, instance.iterate, batch).items()}


@partial(jax.jit, static_argnums=0)
def dense_parts(problem, iterate, batch):
    x, to_x = ravel_pytree(iterate.x)
    y, to_y = ravel_pytree(iterate.y)

    def on_flat(loss):
        return lambda a, b: loss(to_x(a), to_y(b), batch)

    outer, inner = on_flat(problem.outer), on_flat(problem.inner)
    return {
        "f": outer(x, y),
        "g": inner(x, y),
        "f_x": jax.grad(outer, 0)(x, y),
        "f_y": jax.grad(outer, 1)(x, y),
        "g_y": jax.grad(inner, 1)(x, y),
        "yy": jax.hessian(inner, 1)(x, y),
        "xy": jax.jacfwd(jax.grad(inner, 0), 1)(x, y),
    }


def test_products_are_those_of_the_dense_blocks(instance):
    (x, y, v), batch = instance.iterate, instance.batches[0]
    exact = dense(instance, batch)
    close(jax.jit(hess_v, static_argnums=0)(instance.problem, x, y, v, batch), exact["yy"] @ flat(v))
    close(jax.jit(cross_v, static_argnums=0)(instance.problem, x, y, v, batch), exact["xy"] @ flat(v))


def test_directions_are_those_of_the_dense_blocks(instance):
    exact_f, exact_g = (dense(instance, batch) for batch in instance.batches[:2])
    v = flat(instance.iterate.v)
    got = joint_directions(instance.problem, instance.iterate, *instance.batches[:2])
    close(got.step.x, exact_f["f_x"] - exact_g["xy"] @ v)
    close(got.step.y, exact_g["g_y"])
    close(got.step.v, exact_g["yy"] @ v - exact_f["f_y"])
    assert float(got.outer_loss) == pytest.approx(exact_f["f"], rel=ROUNDING)
    assert float(got.inner_loss) == pytest.approx(exact_g["g"], rel=ROUNDING)
    assert jax.tree.structure(got.step) == jax.tree.structure(instance.iterate)


def test_independent_directions_use_each_batch_where_it_belongs(instance):
    exact = [dense(instance, batch) for batch in instance.batches]
    v = flat(instance.iterate.v)
    zeta, psi_f, psi_g, xi_f, xi_g = instance.batches
    got = independent(instance.problem, instance.iterate, zeta, (psi_f, psi_g), (xi_f, xi_g))
    close(got.step.y, exact[0]["g_y"])
    close(got.step.v, exact[2]["yy"] @ v - exact[1]["f_y"])
    close(got.step.x, exact[3]["f_x"] - exact[4]["xy"] @ v)
    assert float(got.outer_loss) == pytest.approx(exact[3]["f"], rel=ROUNDING)
    assert float(got.inner_loss) == pytest.approx(exact[0]["g"], rel=ROUNDING)


def mlp_instance():
    """Return a problem with three dense layers, of which x has the first two; all other operations are elementwise."""
    rng = np.random.default_rng(1)
    x = [rng.normal(size=(16, 16)), rng.normal(size=(16, 16))]
    y, v, batch = rng.normal(size=(16, 4)), rng.normal(size=(16, 4)), rng.normal(size=(8, 16))

    def loss(x, y, batch):
        hidden = batch
        for weight in x:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean(jnp.tanh(hidden @ y) ** 2)

    return Bilevel(outer=loss, inner=loss), XYV(x, y, v), batch


def test_directions_cost_no_more_than_three_gradients():
    """The directions cost no more than three gradients.

    They take one gradient of f, and a gradient of ⟨∇y g, v⟩, which costs at most twice a gradient of g.
    """
    problem, iterate, batch = mlp_instance()

    def gradient(iterate, batch):
        return jax.grad(problem.inner, (0, 1))(iterate.x, iterate.y, batch)

    def joint(iterate, batch):
        return directions(problem, iterate, batch + 1, batch)  # two batches, so that f and g share nothing

    def separate(iterate, batch):
        x, y, v = iterate
        f = jax.grad(problem.outer, (0, 1))(x, y, batch + 1)
        return f, *(product(problem, x, y, v, batch) for product in (hess_v, cross_v)), gradient(iterate, batch)[1]

    def written(function):
        return str(jax.make_jaxpr(function)(iterate, batch)).count("dot_general")

    def compiled(function):
        return jax.jit(function).lower(iterate, batch).compile().as_text().count(" dot(")

    assert written(gradient) == 3 + 3 + 2  # forward, weights, and activations other than the data
    assert written(joint) <= 3 * written(gradient) < written(separate)
    assert 0 < compiled(joint) <= 3 * written(gradient)
