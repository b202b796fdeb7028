"""Conv-4 and the ResNets have the shapes, numbers of parameters, normalisation and strides of their papers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.tasks.networks import (
    BACKBONES,
    EPSILON,
    apply,
    conv4,
    convolve,
    normed,
    pool,
    residual,
    resnet12,
    resnet18,
)
from refusals import refuses


def parameters(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_the_sizes_of_the_papers():
    """The networks have as many parameters as in the papers.

    ResNet-18 for CIFAR-10 has 11,173,962 parameters. The body of Conv-4 for images with c channels has
    64·9·(c + 3·64) weights, and 8·64 gains and biases. A block of ResNet-12 from a to b channels has 9(ab + 2b²) + ab
    weights, and 4·2b gains and biases.
    """
    of = lambda make, shape, hidden: jax.eval_shape(make(shape, hidden, 10).init, jax.random.key(0))  # noqa: E731
    x, y = of(resnet18, (32, 32, 3), (64, 128, 256, 512))
    assert parameters((x, y)) == 11_173_962
    x, y = of(conv4, (28, 28), (64,))
    assert parameters(x) == 64 * 9 * (1 + 3 * 64) + 8 * 64
    assert y["weight"].shape == (64, 10)  # sides 28, 14, 7, 3, 1
    assert of(conv4, (84, 84, 3), (64,))[1]["weight"].shape == (1600, 10)  # sides 84, 42, 21, 10, 5
    x, y = of(resnet12, (84, 84, 3), (64, 160, 320, 640))
    widths = (3, 64, 160, 320, 640)
    pairs = list(itertools.pairwise(widths))
    assert parameters(x) == sum(9 * (a * b + 2 * b * b) + a * b + 8 * b for a, b in pairs) == 12_424_320


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "conv4" else []) for name in BACKBONES]
)
def test_features_are_under_the_head(name):
    """The logits are the head's function of the features, in float32 if images and weights are in float32.

    Images may have no axis of channels.
    """
    network = BACKBONES[name]((12, 9), (2, 2, 4, 3), 5)
    x, y = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), jax.jit(network.init)(jax.random.key(0)))
    images = np.random.default_rng(0).normal(size=(3, 12, 9)).astype(np.float32)
    assert network.prepare(images).shape == (3, 12, 9, 1)
    both = jax.jit(lambda given: (network.features(x, given), network.logits(x, y, given)))
    features, logits = both(images)
    assert features.shape == (3, 3)  # sides 12 and 9 end at 1
    assert features.dtype == logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, features @ y["weight"] + y["bias"], rtol=1e-5, atol=1e-6)
    others = images.copy()
    others[[0, 2]] *= -2
    same = np.all(np.asarray(both(others)[0]) == features, axis=1)
    assert same.tolist() == [False, True, False]  # an image's features depend on no other image
    assert jax.eval_shape(network.features, x, network.prepare(images)) == jax.eval_shape(network.features, x, images)


def test_the_normalisation_is_of_an_image():
    """The maps of an image together have mean 0 and variance 1 before gain and bias, except for ε."""
    layer, maps = normed(jax.random.key(0), 3, 2, 4), jax.random.normal(jax.random.key(1), (3, 6, 5, 2))
    raw = np.asarray(convolve(maps, layer["weight"]))
    given = {**layer, "gain": jnp.arange(1.0, 5.0), "bias": jnp.arange(4.0)}
    found = apply(given, maps)
    for image in range(3):
        normal = (raw[image] - raw[image].mean()) / np.sqrt(raw[image].var() + EPSILON)
        np.testing.assert_allclose(found[image], normal * np.arange(1, 5) + np.arange(4), rtol=1e-11, atol=1e-12)


def test_pool_drops_an_odd_edge_and_keeps_a_single_one():
    maps = jnp.arange(2 * 5 * 3.0).reshape(2, 5, 3, 1)
    np.testing.assert_array_equal(pool(maps)[0, :, :, 0], [[4], [10]])  # rows 0–3 and columns 0–1 of [[0, 1, 2], …]
    np.testing.assert_array_equal(pool(maps[:, :1])[0, :, :, 0], [[1]])
    assert pool(maps[:, :1, :1]).shape == (2, 1, 1, 1)


@pytest.mark.slow
def test_a_residual_block_adds_its_shortcut():
    """A residual block adds its shortcut before the last ReLU.

    If the last layer gives 0, the block is the ReLU of the shortcut, which with stride 2 takes every second position.
    """
    layers = [normed(jax.random.key(i), 3, 2 if i == 0 else 4, 4) for i in range(2)]
    layers[1] = {**layers[1], "gain": jnp.zeros(4)}
    maps = jax.random.normal(jax.random.key(5), (3, 6, 6, 2))
    across = normed(jax.random.key(3), 1, 2, 4)
    found = residual({"layers": layers, "shortcut": across}, maps, stride=2)
    added = apply(across, maps[:, ::2, ::2])
    np.testing.assert_allclose(found, np.maximum(added, 0), rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "hidden", "fact"),
    [("conv4", (3, 4), "or four"), ("conv4", (), "or four")]
    + [(name, hidden, f"for {name}") for name in ("resnet12", "resnet18") for hidden in ((8,), ())]
    + [("resnet18", (8, 8, 0, 8), "for resnet18")],
)
def test_wrong_widths(name, hidden, fact):
    with refuses("hidden", hidden, fact):
        BACKBONES[name]((8, 8), hidden, 10)
