"""Convolutional networks of few-shot and image papers: Conv-4, ResNet-12 and ResNet-18, each with a linear head.

Every convolution is followed by a normalisation without running state: layer norm over height, width and all channels
of one image (Ba et al. 2016), with a gain and a bias per channel. Batch norm would make clients depend on each other's
samples, and its averages are no parameters that a federation could optimise. Statistics over all channels do not change
when channels change places, as they would with groups of channels: units are interchangeable, which a submodel needs.
"""

import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.errors import require
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import PyTree
from fedbilevel.tasks.networks import Network, convolve, dense, head, max_pool, with_head

EPSILON = 1e-5  # added to the variance of a normalisation


def conv4(image_shape: Sequence[int], hidden: Sequence[int], classes: int) -> Network:
    """Four blocks of 3×3 convolution, normalisation, ReLU and 2×2 max-pooling (Vinyals et al. 2016).

    `hidden` is the number of channels, once or for each block, e.g. (64,). The features are the last maps, flattened,
    of 28×28 images (channels,).
    """
    require(len(hidden) in (1, 4) and min(hidden) >= 1, "hidden", hidden, "one positive width or four, e.g. 64")
    height, width, channels = (*image_shape, 1)[:3]
    widths = [channels, *(hidden if len(hidden) == 4 else 4 * tuple(hidden))]
    for _ in range(4):
        height, width = pooled_side(height), pooled_side(width)
    positions = height * width

    def init(key: Array) -> tuple[PyTree, PyTree]:
        *keys, last = jax.random.split(key, 5)
        x = [normed(k, 3, into, out) for k, into, out in zip(keys, widths[:-1], widths[1:], strict=True)]
        return x, dense(last, positions * widths[-1], classes)

    def features(x: PyTree, images: Array) -> Array:
        maps = images.reshape(len(images), *image_shape[:2], channels)
        for layer in x:
            maps = pool(jax.nn.relu(apply(layer, maps)))
        return maps.reshape(len(maps), -1)

    groups = ["_", "block1", "block2", "block3", "block4"]
    body = [normed_axes(into, out) for into, out in itertools.pairwise(groups)]
    return with_head(init, features, maps_of(image_shape), Structure(body, head(f"{positions}*block4")))


def maps_of(image_shape: Sequence[int]) -> Callable[[np.ndarray], np.ndarray]:
    """Images as (n, height, width, channels), whether or not they have an axis of channels."""
    return lambda images: images.reshape(len(images), *(*image_shape, 1)[:3])


def normed(key: Array, size: int, inputs: int, outputs: int) -> dict[str, Array]:
    """A convolution with its normalisation: weights normal with variance 2/(size²·inputs), gain 1, bias 0."""
    weight = jax.random.normal(key, (size, size, inputs, outputs)) * (2 / (size * size * inputs)) ** 0.5
    return {"weight": weight, "gain": jnp.ones(outputs), "bias": jnp.zeros(outputs)}


def normed_axes(inputs: str, outputs: str) -> dict[str, str]:
    """The structure of `normed`, by the groups of its inputs and outputs."""
    return {"weight": f"_ _ {inputs} {outputs}", "gain": outputs, "bias": outputs}


def apply(layer: dict[str, Array], maps: Array, stride: int = 1) -> Array:
    """The convolution, then (maps − mean)/√(variance + ε)·gain + bias, mean and variance being those of an image."""
    maps = convolve(maps, layer["weight"], stride)
    centred = maps - jnp.mean(maps, axis=(1, 2, 3), keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=(1, 2, 3), keepdims=True)
    return centred * jax.lax.rsqrt(variance + EPSILON) * layer["gain"] + layer["bias"]


def pool(maps: Array) -> Array:
    """2×2 max-pooling, stride 2; an odd last row or column is dropped, as in the papers, and a single one is kept."""
    _, height, width, _ = maps.shape
    return max_pool(maps[:, : max(1, height - height % 2), : max(1, width - width % 2)])


def pooled_side(side: int) -> int:
    """The side of `pool`'s maps."""
    return max(1, side // 2)


BACKBONES = {"conv4": conv4}
