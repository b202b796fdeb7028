"""The small networks have the right shapes, and their convolution and pooling are JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedbilevel.tasks import networks
from refusals import refuses


@pytest.mark.parametrize(("size", "stride"), [(3, 1), (3, 2), (1, 2), (5, 3)])
def test_convolve_is_the_convolution(size, stride):
    rng = np.random.default_rng(0)
    maps, weight = rng.normal(size=(3, 8, 7, 6)), rng.normal(size=(size, size, 6, 7))
    edges = [(size // 2, size // 2)] * 2
    expected = lax.conv_general_dilated(
        maps, weight, (stride, stride), edges, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    found = jax.jit(networks.convolve, static_argnums=2)(maps, weight, stride)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", [4, 5])
def test_max_pool_pads_odd_edges(side):
    maps = np.random.default_rng(0).normal(size=(2, side, side, 3))
    expected = lax.reduce_window(
        maps, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), [(0, 0), (0, side % 2), (0, side % 2), (0, 0)]
    )
    np.testing.assert_array_equal(jax.jit(networks.max_pool)(maps), expected)


def test_cross_entropy_of_known_logits():
    """Logits of (0, ln 3) mean the probabilities ¼ and ¾, so that the cross-entropies are ln 4 and ln 4/3."""
    logits = jnp.array([[0.0, jnp.log(3.0)]] * 2)
    assert float(networks.cross_entropy(logits, jnp.array([0, 1]))) == pytest.approx((np.log(4) + np.log(4 / 3)) / 2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere passes are long")
def test_short_passes_give_the_same_bits(monkeypatch):
    """Images that are evaluated 20 at a time have the same logits, to the bit, as in one pass.

    The 50 images make two and a half short passes.
    """
    network = networks.cnn((16, 16, 3), (4, 8, 16), 10)
    x, y = jax.jit(network.init)(jax.random.key(0))
    images = np.random.default_rng(1).normal(size=(50, 16, 16, 3))

    def logits(images):
        return networks.in_passes(lambda image: network.logits(x, y, image[None])[0], images)

    short = jax.jit(logits)(images)
    monkeypatch.setattr(networks, "IN_CACHE", networks.EVALUATION_BATCH)
    np.testing.assert_array_equal(short, jax.jit(lambda images: logits(images))(images))


@pytest.mark.parametrize(
    ("make", "shape", "hidden", "pixels"),
    [
        (networks.mlp, (8, 8), (16, 12), 64),
        pytest.param(networks.cnn, (9, 7), (2, 3, 5), None, marks=pytest.mark.slow),
    ],
)
def test_shapes_and_accuracy(make, shape, hidden, pixels):
    network = make(shape, hidden, 10)
    x, y = jax.jit(network.init)(jax.random.key(0))
    images = np.random.default_rng(0).normal(size=(6, *shape))
    prepared = network.prepare(images)
    logits = jax.jit(network.logits)(x, y, prepared)
    assert logits.shape == (6, 10)
    again = jax.jit(lambda x, y, given: network.features(x, given) @ y["weight"] + y["bias"])(x, y, prepared)
    np.testing.assert_array_equal(logits, again)
    assert y["weight"].shape == (hidden[-1], 10)
    best = np.argmax(logits, axis=1)
    labels = np.where(np.arange(6) < 4, best, (best + 1) % 10)
    assert float(networks.accuracy(network, images, labels)(x, y)) == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("make", "hidden", "refusal"),
    [
        (networks.mlp, (), ("hidden", ())),
        (networks.mlp, (3, 0), ("hidden", (3, 0))),
        (networks.cnn, (3, 4), ("hidden", (3, 4))),
    ],
)
def test_wrong_widths(make, hidden, refusal):
    with refuses(*refusal):
        make((8, 8), hidden, 10)
