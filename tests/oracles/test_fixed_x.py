"""Is a client's inner loss at a fixed x the loss itself, and are its features computed only once?"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.client import Client, Samples
from fedbilevel.oracles import fixed_x, products
from fedbilevel.oracles.differences import Differences
from fedbilevel.oracles.fixed_x import inner_loss_at, inner_loss_on, loss_at_points
from representatives import slow_but

SIZE, LONGEST, PIXELS, HIDDEN = 7, 9, 23, 4
rng = np.random.default_rng(0)
X = {"weight": rng.normal(size=(PIXELS, HIDDEN)), "penalty": rng.normal(size=HIDDEN)}
Y = rng.normal(size=(HIDDEN, 2))
CONSTANT = rng.normal(size=(2, 2))


def network(x, y, batch):
    """Compute a loss with all kinds of terms for the search for features.

    It has a term of x alone (a penalty), features of x and the sample (inside a `jit`), y, a constant, and a part of
    the sample that is used late.
    """
    features = jax.jit(lambda z: jax.nn.relu(z @ x["weight"]))(batch["image"])
    gap = features @ y @ CONSTANT - batch["target"]
    return jnp.mean(jnp.sum(gap**2, axis=1)) + jnp.sum(jnp.exp(x["penalty"])[:, None] * y**2)


def with_loop(x, y, batch):
    """Compute a loss with a loop over something that depends on y; the loop counts as one operation."""
    decay = jax.lax.fori_loop(0, 3, lambda _, a: a * jnp.cos(a), jnp.sum(y))
    return network(x, y, batch) * jnp.exp(decay)


def without_y(x, y, batch):
    return network(x, Y, batch)


def without_samples(x, y, batch):
    return jnp.sum(jnp.exp(x["penalty"])[:, None] * y**2)


LOSSES = {
    "no sample": without_samples,
    "network": network,
    "a loop": with_loop,
    "all of it y": lambda x, y, b: network(X, y, b),
    "no y": without_y,
}


def client(loss, size=SIZE):
    stored = {"image": rng.normal(size=(20, PIXELS)), "target": rng.normal(size=(20, 2))}
    samples = Samples(stored, jnp.asarray(3), jnp.asarray(size), LONGEST, size == LONGEST)
    problem = fb.Bilevel(outer=loss, inner=loss).over_batches()
    return Client(problem, samples, samples, jnp.asarray(0), jnp.asarray(1.0), None)


DRAWS = [(name, *drawn) for name in sorted(LOSSES) for drawn in ((SIZE, None), (LONGEST, None), (SIZE, 4))]
QUICK = [draws for draws in DRAWS if draws[1:] == (SIZE, None)]


@pytest.mark.parametrize(("name", "size", "batch_size"), slow_but(*QUICK, of=DRAWS))
def test_it_is_the_loss_on_the_same_draws(name, size, batch_size):
    """The loss at a fixed x equals the loss on the same draws.

    Sums have a few dozen terms of size 1, in another order, so that 1e-12 is ample.
    """
    who = client(LOSSES[name], size)
    given = inner_loss_at(who, X, jnp.zeros_like(Y), batch_size, steps=6)
    for seed in range(2):
        key, y = jax.random.key(seed), Y + seed
        batch = who.inner_batch(key, batch_size)
        np.testing.assert_allclose(given.loss(y, given.take(key)), who.problem.inner(X, y, batch), rtol=1e-12)
        expected = jax.grad(who.problem.inner, 1)(X, y, batch)
        np.testing.assert_allclose(given.gradient(y, key), expected, rtol=1e-12, atol=1e-12)
        on_batch = inner_loss_on(who.problem, X, jnp.zeros_like(Y), batch)
        np.testing.assert_allclose(jax.grad(on_batch.loss)(y), expected, rtol=1e-12, atol=1e-12)
        of_x = on_batch.pull(jax.grad(on_batch.of_y)(on_batch.features, y))
        expected = jax.grad(who.problem.inner)(X, y, batch)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), of_x, expected)


def sees_pixels(function, *arguments):
    """Return whether any array in the function's program has an axis of this length."""
    return f",{PIXELS}]" in str(jax.make_jaxpr(function)(*arguments))


def test_a_step_does_not_see_what_features_were_made_of():
    few, many = (inner_loss_at(client(network), X, Y, 4, steps) for steps in (1, 6))
    assert sees_pixels(few.gradient, Y, jax.random.key(0))  # with fewer draws than samples, the loss itself is used
    assert not sees_pixels(many.gradient, Y, jax.random.key(0))


def test_a_loss_on_one_batch_does_not_see_what_features_were_made_of():
    batch = client(network).inner_batch(jax.random.key(0), 4)
    assert sees_pixels(jax.grad(lambda y: network(X, y, batch)), Y)
    assert not sees_pixels(jax.grad(inner_loss_on(fb.Bilevel(outer=network, inner=network), X, Y, batch).loss), Y)


@pytest.mark.parametrize("rows", [1, 4])
def test_features_of_many_samples_are_computed_block_by_block(monkeypatch, rows):
    """Features of nine samples are computed in blocks of one or four, with the same numbers.

    No layer is then computed for all nine samples at once.
    """
    who, key = client(network, LONGEST), jax.random.key(0)

    def drawn(x):
        return inner_loss_at(who, x, Y, 4, steps=6).take(key)

    layer = f"[{LONGEST},1,{HIDDEN}] = dot_general"
    assert layer in str(jax.make_jaxpr(lambda x: drawn(x))(X))  # below the limit, all samples are computed at once
    whole = drawn(X)
    # image, target, z and ReLU
    monkeypatch.setattr(fixed_x, "BYTES_AT_ONCE", rows * 8 * (PIXELS + 2 + HIDDEN + HIDDEN))
    program = str(jax.make_jaxpr(lambda x: drawn(x))(X))  # a new function, which JAX has not traced yet
    assert layer not in program
    assert f"[{rows},1,{HIDDEN}] = dot_general" in program
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(drawn(X)), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12)


@pytest.mark.slow
def test_derivatives_go_through_complex_features():
    """Derivatives go through complex features: |FFT(x ⊙ image)|² is real, although its parts are not.

    ⟨∇²xy g, v⟩ is compared to the number that JAX computes without features.
    """

    def loss(x, y, batch):
        spectrum = jnp.fft.fft(batch["image"] * x, axis=1)
        return jnp.mean(jnp.abs(spectrum * y) ** 2 @ jnp.arange(PIXELS) ** 0.5)

    problem, batch = fb.Bilevel(loss, loss), {"image": rng.normal(size=(3, PIXELS))}
    x, y, v = rng.normal(size=(3, PIXELS))
    on_batch = inner_loss_on(problem, x, y, batch)
    exact = products.cross_v(problem, x, y, v, batch)
    assert np.max(np.abs(exact)) > 1
    found = on_batch.pull(products.cross_of(on_batch.of_y, on_batch.features, y, v))
    np.testing.assert_allclose(found, exact, rtol=1e-10)
    np.testing.assert_allclose(Differences().cross_v(problem, x, y, v, batch), exact, rtol=1e-6)


@pytest.mark.slow
def test_several_points_share_what_does_not_depend_on_y():
    """Several points share the features, and values and derivatives are those of the loss.

    For both points together, x is multiplied once forward and once backward.
    """
    batch = {"image": rng.normal(size=(SIZE, PIXELS)), "target": rng.normal(size=(SIZE, 2))}

    def apart(x, points):
        return sum(scale * network(x, y, batch) for scale, y in zip((1.0, -3.0), points, strict=True))

    def together(x, points):
        first, second = loss_at_points(network, x, Y, batch)(x, points)
        return first - 3 * second

    points = Y, 2 * Y
    for have, want in zip(
        *(jax.tree.leaves(jax.value_and_grad(f, (0, 1))(X, points)) for f in (together, apart)), strict=True
    ):
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-12)
    products = [str(jax.make_jaxpr(jax.grad(f))(X, points)).count("dot_general") for f in (together, apart)]
    assert products[1] - products[0] == 2
