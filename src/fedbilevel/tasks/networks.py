"""Small networks cut in two: x, everything up to the last layer, and y, the linear head."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.core.errors import require
from fedbilevel.core.tree import PyTree

EVALUATION_BATCH = 2000  # images per pass when measuring accuracy: bounds the memory of activations


class Network(NamedTuple):
    """A classifier."""

    init: Callable[[Array], tuple[PyTree, PyTree]]  # key -> (x, y)
    logits: Callable[[PyTree, PyTree, Array], Array]  # (x, y, images) -> (n, classes)
    prepare: Callable[[np.ndarray], np.ndarray]  # images as the data set has them -> as `logits` takes them


def mlp(image_shape: Sequence[int], hidden: Sequence[int], classes: int) -> Network:
    """Fully connected, ReLU: image pixels → hidden widths → classes."""
    require(len(hidden) >= 1 and all(width >= 1 for width in hidden), "hidden", hidden, "one or more positive widths")
    widths = [int(np.prod(image_shape)), *hidden]

    def init(key: Array) -> tuple[PyTree, PyTree]:
        *keys, last = jax.random.split(key, len(widths))
        x = [dense(k, into, out) for k, into, out in zip(keys, widths[:-1], widths[1:], strict=True)]
        return x, dense(last, widths[-1], classes)

    def logits(x: PyTree, y: PyTree, images: Array) -> Array:
        features = images
        for layer in x:
            features = jax.nn.relu(features @ layer["weight"] + layer["bias"])
        return features @ y["weight"] + y["bias"]

    return Network(init, logits, lambda images: images.reshape(len(images), -1))


def linear(image_shape: Sequence[int], hidden: Sequence[int], classes: int) -> Network:
    """Softmax regression: x is empty, y the one layer image pixels → classes, started at 0. `hidden` is empty."""
    require(len(hidden) == 0, "hidden", hidden, "empty for a linear network, which has no hidden layers")
    inputs = int(np.prod(image_shape))

    def init(key: Array) -> tuple[PyTree, PyTree]:
        return [], {"weight": jnp.zeros((inputs, classes)), "bias": jnp.zeros(classes)}

    def logits(x: PyTree, y: PyTree, images: Array) -> Array:
        return images @ y["weight"] + y["bias"]

    return Network(init, logits, lambda images: images.reshape(len(images), -1))


def cnn(image_shape: Sequence[int], hidden: Sequence[int], classes: int) -> Network:
    """Two 3×3 convolutions, each with ReLU and 2×2 max-pooling, a dense layer with ReLU, and the head.

    `hidden` is (channels, channels, dense width), e.g. (16, 32, 64).
    """
    require(len(hidden) == 3 and min(hidden) >= 1, "hidden", hidden, "three positive widths for a CNN, e.g. 16, 32, 64")
    height, width, channels = (*image_shape, 1)[:3]
    first, second, dense_width = hidden

    def init(key: Array) -> tuple[PyTree, PyTree]:
        a, b, c, last = jax.random.split(key, 4)
        pooled = (-(-height // 4)) * (-(-width // 4)) * second
        x = {
            "convolutions": [convolution(a, channels, first), convolution(b, first, second)],
            "dense": dense(c, pooled, dense_width),
        }
        return x, dense(last, dense_width, classes)

    def logits(x: PyTree, y: PyTree, images: Array) -> Array:
        maps = images
        for layer in x["convolutions"]:
            maps = max_pool(jax.nn.relu(convolve(maps, layer["weight"]) + layer["bias"]))
        features = jax.nn.relu(maps.reshape(len(maps), -1) @ x["dense"]["weight"] + x["dense"]["bias"])
        return features @ y["weight"] + y["bias"]

    return Network(init, logits, lambda images: images.reshape(len(images), height, width, channels))


def convolve(maps: Array, weight: Array) -> Array:
    """3×3 convolution, zero-padded: (n, height, width, inputs) → (n, height, width, outputs).

    As one matrix product over patches: inside a loop, XLA's own convolution was 15 times slower on a CPU, and with a
    weight for each vectorised client it is a grouped convolution, slow everywhere.
    """
    n, height, width, inputs = maps.shape
    padded = jnp.pad(maps, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    patches = jnp.concatenate(shifted, axis=-1).reshape(n * height * width, 9 * inputs)
    return (patches @ weight.reshape(9 * inputs, -1)).reshape(n, height, width, -1)


def max_pool(maps: Array) -> Array:
    """2×2, stride 2; odd edges are padded. (n, height, width, channels) in and out."""
    n, height, width, channels = maps.shape
    padded = jnp.pad(maps, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), constant_values=-jnp.inf)
    return padded.reshape(n, padded.shape[1] // 2, 2, padded.shape[2] // 2, 2, channels).max(axis=(2, 4))


def dense(key: Array, inputs: int, outputs: int) -> dict[str, Array]:
    """A dense layer, weights normal with variance 2/inputs (He et al. 2015), bias 0."""
    return {"weight": jax.random.normal(key, (inputs, outputs)) * (2 / inputs) ** 0.5, "bias": jnp.zeros(outputs)}


def convolution(key: Array, inputs: int, outputs: int) -> dict[str, Array]:
    """A 3×3 convolution, weights normal with variance 2/(9·inputs), bias 0."""
    weight = jax.random.normal(key, (3, 3, inputs, outputs)) * (2 / (9 * inputs)) ** 0.5
    return {"weight": weight, "bias": jnp.zeros(outputs)}


def cross_entropy(logits: Array, labels: Array, weights: Array | float = 1.0) -> Array:
    """Mean of −weight·log softmax at the labels; weights: one, or one per sample."""
    chosen = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -jnp.mean(weights * jnp.sum(chosen * jax.nn.log_softmax(logits), axis=-1))


def accuracy(network: Network, images: np.ndarray, labels: np.ndarray) -> Callable[[PyTree, PyTree], Array]:
    """(x, y) -> share of these images whose largest logit is at their label."""
    right = _right(network, images, labels)
    return lambda x, y: jnp.mean(right(x, y))


def class_accuracies(
    network: Network, images: np.ndarray, labels: np.ndarray, classes: int
) -> Callable[[PyTree, PyTree], Array]:
    """(x, y) -> the same share in each class, shape (classes,); every class needs an image."""
    right = _right(network, images, labels)
    truth, counts = jnp.asarray(labels), np.bincount(labels, minlength=classes)
    return lambda x, y: jax.ops.segment_sum(right(x, y), truth, classes) / counts


def _right(network: Network, images: np.ndarray, labels: np.ndarray) -> Callable[[PyTree, PyTree], Array]:
    """(x, y) -> (n,): 1 where an image's largest logit is at its label, else 0."""
    prepared = jnp.asarray(network.prepare(images))
    truth = jnp.asarray(labels)

    def measure(x: PyTree, y: PyTree) -> Array:
        def correct(pair: tuple[Array, Array]) -> Array:
            image, label = pair
            return jnp.argmax(network.logits(x, y, image[None])[0]) == label

        return lax.map(correct, (prepared, truth), batch_size=EVALUATION_BATCH).astype(float)

    return measure
