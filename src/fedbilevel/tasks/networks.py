"""Build networks in two parts: x has all layers but the last, and y is the last layer, a linear head.

The first part of the module has small networks. The second part has the convolutional networks of papers on few-shot
learning and images: Conv-4, ResNet-12 and ResNet-18. In these networks, each convolution is followed by layer norm over
height, width and all channels of one image (Ba et al. 2016), with a gain and a bias per channel. Other normalisations
have disadvantages. With batch norm, the output for a sample would depend on other samples, and the running averages are
not parameters that a federation could optimise. Group norm depends on the order of channels. With layer norm, the units
are interchangeable, as submodels require.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.core.errors import is_count, require
from fedbilevel.core.submodel import Structure
from fedbilevel.core.tree import PyTree
from fedbilevel.machinery.threefry import written_out

EVALUATION_BATCH = 500  # the number of images that are evaluated together, which bounds the memory of activations
IN_CACHE = 20  # the number of images that convolutions on a CPU take together, so that patches fit into the cache


class Network(NamedTuple):
    """A classifier with parameters x and y: x computes features of images, and y is a linear head on the features.

    y = {"weight": (width, classes), "bias": (classes,)}.

    Args:
        init: a function from a key to the starting values (x, y).
        logits: a function from (x, y, images) to logits of shape (n, classes).
        prepare: a function from images of a data set to images in the form that `logits` takes.
        features: a function from (x, images) to features of shape (n, width), the inputs of the head.
        structure: the `Structure` of x and y, which names the groups of units.
    """

    init: Callable[[Array], tuple[PyTree, PyTree]]
    logits: Callable[[PyTree, PyTree, Array], Array]
    prepare: Callable[[np.ndarray], np.ndarray]
    features: Callable[[PyTree, Array], Array] = lambda x, images: images
    structure: Structure = Structure()

    @property
    def whole_structure(self) -> PyTree:
        """Return the structure of (body, head), for a task in which x or y alone is the whole network."""
        return self.structure.x, self.structure.y


def with_head(
    init: Callable[[Array], tuple[PyTree, PyTree]],
    features: Callable[[PyTree, Array], Array],
    prepare: Callable[[np.ndarray], np.ndarray],
    structure: Structure,
) -> Network:
    """Build a network from a function that computes features. The logits are features @ weight + bias."""

    def logits(x: PyTree, y: PyTree, images: Array) -> Array:
        return features(x, images) @ y["weight"] + y["bias"]

    return Network(init, logits, prepare, features, structure)


def mlp(image_shape: Sequence[int], hidden: Sequence[int], classes: int) -> Network:
    """Build a fully connected network with ReLU, from the pixels of an image through hidden layers to the classes.

    `hidden` has the widths of the hidden layers.
    """
    check_widths(hidden, len(hidden) >= 1, "one or more positive widths")
    widths = [int(np.prod(image_shape)), *hidden]

    def init(key: Array) -> tuple[PyTree, PyTree]:
        *keys, last = jax.random.split(key, len(widths))
        x = [dense(k, into, out) for k, into, out in zip(keys, widths[:-1], widths[1:], strict=True)]
        return x, dense(last, widths[-1], classes)

    def features(x: PyTree, images: Array) -> Array:
        for layer in x:
            images = jax.nn.relu(images @ layer["weight"] + layer["bias"])
        return images

    groups = ["_", *(f"hidden{i + 1}" for i in range(len(hidden)))]
    body = [{"weight": f"{into} {out}", "bias": out} for into, out in itertools.pairwise(groups)]
    return with_head(init, features, flattened, Structure(body, head(groups[-1])))


def linear(image_shape: Sequence[int], hidden: Sequence[int], classes: int) -> Network:
    """Build a softmax regression: x is empty, and y is a linear layer from pixels to classes, which starts at 0.

    `hidden` must be empty.
    """
    require(len(hidden) == 0, "hidden", hidden, "empty, since a linear network has no hidden layers")
    inputs = int(np.prod(image_shape))

    def init(key: Array) -> tuple[PyTree, PyTree]:
        return [], {"weight": jnp.zeros((inputs, classes)), "bias": jnp.zeros(classes)}

    return with_head(init, lambda x, images: images, flattened, Structure([], head("_")))


def cnn(image_shape: Sequence[int], hidden: Sequence[int], classes: int) -> Network:
    """Build a CNN: two 3×3 convolutions, each with ReLU and 2×2 max-pooling, a dense layer with ReLU, and the head.

    `hidden` is (channels, channels, dense width), e.g. (16, 32, 64).
    """
    check_widths(hidden, len(hidden) == 3, "three positive widths for a CNN, e.g. 16, 32, 64")
    height, width, channels = (*image_shape, 1)[:3]
    first, second, dense_width = hidden
    positions = (-(-height // 4)) * (-(-width // 4))

    def init(key: Array) -> tuple[PyTree, PyTree]:
        a, b, c, last = jax.random.split(key, 4)
        x = {
            "convolutions": [convolution(a, channels, first), convolution(b, first, second)],
            "dense": dense(c, positions * second, dense_width),
        }
        return x, dense(last, dense_width, classes)

    def features(x: PyTree, images: Array) -> Array:
        maps = images
        for layer in x["convolutions"]:
            maps = jax.nn.relu(max_pool(convolve(maps, layer["weight"])) + layer["bias"])
        return jax.nn.relu(maps.reshape(len(maps), -1) @ x["dense"]["weight"] + x["dense"]["bias"])

    body = {
        "convolutions": [
            {"weight": "_ _ _ channels1", "bias": "channels1"},
            {"weight": "_ _ channels1 channels2", "bias": "channels2"},
        ],
        "dense": {"weight": f"{positions}*channels2 hidden", "bias": "hidden"},
    }
    return with_head(init, features, maps_of(image_shape), Structure(body, head("hidden")))


def check_widths(hidden: Sequence[int], as_many: bool, allowed: str) -> None:
    """Refuse `hidden` if `as_many` is False (its length is wrong), or if an entry is not a positive whole number."""
    require(as_many and all(map(is_count, hidden)), "hidden", hidden, allowed)


def head(group: str) -> PyTree:
    """Return the structure of a linear head on features; the features are the units of the group with this name."""
    return {"weight": f"{group} _", "bias": "_"}


def flattened(images: np.ndarray) -> np.ndarray:
    """Flatten images of shape (n, …) to the shape (n, pixels)."""
    return images.reshape(len(images), -1)


def convolve(maps: Array, weight: Array, stride: int = 1) -> Array:
    """Convolve zero-padded maps with a kernel of odd size.

    Outputs are centred on the rows and columns 0, stride, 2·stride, ….

    The convolution is computed as one matrix product over patches. XLA's own convolution was 15 times slower inside a
    loop on a CPU. If it is vectorised over clients that each have their own weight, it becomes a grouped convolution,
    which is slow on all devices.

    Args:
        maps: an array of shape (n, height, width, inputs).
        weight: an array of shape (k, k, inputs, outputs), with an odd k.

    Returns:
        An array of shape (n, ⌈height/stride⌉, ⌈width/stride⌉, outputs).
    """
    _, height, width, inputs = maps.shape
    size = weight.shape[0]
    edge = size // 2
    padded = jnp.pad(maps, ((0, 0), (edge, edge), (edge, edge), (0, 0)))
    places = [slice(i, i + height, stride) for i in range(size)], [slice(j, j + width, stride) for j in range(size)]
    shifted = jnp.concatenate([padded[:, rows, columns] for rows, columns in itertools.product(*places)], axis=-1)
    patches = shifted.reshape(-1, size * size * inputs)
    return (patches @ weight.reshape(size * size * inputs, -1)).reshape(*shifted.shape[:-1], -1)


def max_pool(maps: Array) -> Array:
    """Return the maxima of 2×2 squares of maps, with stride 2. Odd sides are padded.

    `maps` has the shape (n, height, width, channels).
    """
    n, height, width, channels = maps.shape
    padded = jnp.pad(maps, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), constant_values=-jnp.inf)
    squares = padded.reshape(n, padded.shape[1] // 2, 2, padded.shape[2] // 2, 2, channels)
    rows = jnp.maximum(squares[:, :, 0], squares[:, :, 1])
    return jnp.maximum(rows[:, :, :, 0], rows[:, :, :, 1])


def dense(key: Array, inputs: int, outputs: int) -> dict[str, Array]:
    """Draw a dense layer with normal weights of variance 2/inputs (He et al. 2015) and bias 0."""
    return {"weight": drawn(key, (inputs, outputs)), "bias": jnp.zeros(outputs)}


def convolution(key: Array, inputs: int, outputs: int) -> dict[str, Array]:
    """Draw a 3×3 convolution with normal weights of variance 2/(9·inputs) and bias 0."""
    return {"weight": drawn(key, (3, 3, inputs, outputs)), "bias": jnp.zeros(outputs)}


def drawn(key: Array, shape: tuple[int, ...]) -> Array:
    """Draw normal weights (..., outputs) of variance 2/n, where n is the number of weights of each output."""
    return jax.random.normal(written_out(key), shape) * (2 / math.prod(shape[:-1])) ** 0.5


def cross_entropy(logits: Array, labels: Array, weights: Array | float = 1.0) -> Array:
    """Return the mean over samples of −weight·log softmax(logits) at the label, a scalar.

    Args:
        logits: an array of shape (n, classes).
        labels: integers, as an array of shape (n,).
        weights: a number, or a number for each sample, as an array of shape (n,).
    """
    chosen = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -jnp.mean(weights * jnp.sum(chosen * jax.nn.log_softmax(logits), axis=-1))


def accuracy(network: Network, images: np.ndarray, labels: np.ndarray) -> Callable[[PyTree, PyTree], Array]:
    """Return the function from (x, y) to the share of these images whose largest logit is at their label."""
    right = correctness(network, images, labels)
    return lambda x, y: jnp.mean(right(x, y))


def correctness(network: Network, images: np.ndarray, labels: np.ndarray) -> Callable[[PyTree, PyTree], Array]:
    """Return the function from (x, y) to a number for each image: 1 if its largest logit is at its label, else 0."""
    prepared = jnp.asarray(network.prepare(images))
    truth = jnp.asarray(labels)

    def measure(x: PyTree, y: PyTree) -> Array:
        def correct(pair: tuple[Array, Array]) -> Array:
            image, label = pair
            return jnp.argmax(network.logits(x, y, image[None])[0]) == label

        return in_passes(correct, (prepared, truth)).astype(float)

    return measure


def in_passes(function: Callable[[PyTree], PyTree], images: PyTree) -> PyTree:
    """Apply a function to images, which are leaves of shape (n, …), a batch at a time.

    On a CPU, images for convolutions are taken in small batches.
    """
    convolved = max(np.ndim(leaf) for leaf in jax.tree.leaves(images)) > 2
    few = convolved and jax.default_backend() == "cpu"
    return lax.map(function, images, batch_size=IN_CACHE if few else EVALUATION_BATCH)


EPSILON = 1e-5  # layer norm adds this to the variance


def conv4(image_shape: Sequence[int], hidden: Sequence[int], classes: int) -> Network:
    """Build Conv-4: four blocks of 3×3 convolution, normalisation, ReLU and 2×2 max-pooling (Vinyals et al. 2016).

    `hidden` has one number of channels for all blocks, e.g. (64,), or a number for each block. The features are the
    last maps, flattened. For images of 28×28 pixels, they have the shape (channels,).
    """
    check_widths(hidden, len(hidden) in (1, 4), "one positive width or four, e.g. 64")
    height, width, channels = (*image_shape, 1)[:3]
    widths = [channels, *(hidden if len(hidden) == 4 else 4 * tuple(hidden))]
    for _ in range(4):
        height, width = max(1, height // 2), max(1, width // 2)  # the sides after `pool`
    positions = height * width

    def init(key: Array) -> tuple[PyTree, PyTree]:
        *keys, last = jax.random.split(key, 5)
        sides = zip(keys, itertools.pairwise(widths), strict=True)
        return [normed(k, 3, into, out) for k, (into, out) in sides], dense(last, positions * widths[-1], classes)

    def features(x: PyTree, images: Array) -> Array:
        maps = images.reshape(len(images), *image_shape[:2], channels)
        for layer in x:
            maps = jax.nn.relu(pool(apply(layer, maps)))  # equal to pool(relu(…)), with a quarter of the entries
        return maps.reshape(len(maps), -1)

    groups = ["_", "block1", "block2", "block3", "block4"]
    body = [normed_axes(into, out) for into, out in itertools.pairwise(groups)]
    return with_head(init, features, maps_of(image_shape), Structure(body, head(f"{positions}*block4")))


def resnet12(image_shape: Sequence[int], hidden: Sequence[int], classes: int) -> Network:
    """Build ResNet-12: four residual blocks of three 3×3 convolutions and 2×2 max-pooling; then the mean of each map.

    This is the network of few-shot papers (Lee et al. 2019, with 64, 160, 320 and 640 channels), with two differences:
    it has plain ReLU, and does not drop blocks at random. `hidden` has the number of channels of each block.
    """
    channels, widths = four_widths("resnet12", image_shape, hidden)

    def init(key: Array) -> tuple[PyTree, PyTree]:
        *keys, last = jax.random.split(key, 5)
        sides = zip(keys, itertools.pairwise((channels, *widths)), strict=True)
        return [block(k, 3, into, out, shortcut=True) for k, (into, out) in sides], dense(last, widths[-1], classes)

    def features(x: PyTree, images: Array) -> Array:
        maps = images.reshape(len(images), *image_shape[:2], channels)
        for each in x:
            maps = pool(residual(each, maps))
        return jnp.mean(maps, axis=(1, 2))

    names = ["_", "block1", "block2", "block3", "block4"]
    body = [block_axes(out, 3, into, out, shortcut=True) for into, out in itertools.pairwise(names)]
    return with_head(init, features, maps_of(image_shape), Structure(body, head("block4")))


def resnet18(image_shape: Sequence[int], hidden: Sequence[int], classes: int) -> Network:
    """Build ResNet-18: a 3×3 convolution, four stages of two residual blocks, the mean of each map (He et al. 2016).

    Each block has two 3×3 convolutions. This is the form for CIFAR: the first convolution has stride 1 and is not
    followed by pooling, and stages 2 to 4 halve the sides. `hidden` has the number of channels of each stage; in the
    paper, they are 64, 128, 256 and 512.
    """
    channels, widths = four_widths("resnet18", image_shape, hidden)
    plan = [(stage, place) for stage in range(4) for place in range(2)]
    changes = [stage > 0 and place == 0 for stage, place in plan]  # True: the shortcut changes the shape, by weights

    def init(key: Array) -> tuple[PyTree, PyTree]:
        first, *keys, last = jax.random.split(key, 10)
        inputs = [widths[stage - change] for (stage, _), change in zip(plan, changes, strict=True)]
        parts = zip(keys, inputs, plan, changes, strict=True)
        blocks = [block(k, 2, into, widths[stage], shortcut=change) for k, into, (stage, _), change in parts]
        return {"stem": normed(first, 3, channels, widths[0]), "blocks": blocks}, dense(last, widths[-1], classes)

    def features(x: PyTree, images: Array) -> Array:
        maps = images.reshape(len(images), *image_shape[:2], channels)
        maps = jax.nn.relu(apply(x["stem"], maps))
        for each, change in zip(x["blocks"], changes, strict=True):
            maps = residual(each, maps, stride=2 if change else 1)
        return jnp.mean(maps, axis=(1, 2))

    blocks = [
        block_axes(f"stage{stage + 1}_{place + 1}", 2, f"stage{stage + 1 - change}", f"stage{stage + 1}", change)
        for (stage, place), change in zip(plan, changes, strict=True)
    ]
    body = {"stem": normed_axes("_", "stage1"), "blocks": blocks}
    return with_head(init, features, maps_of(image_shape), Structure(body, head("stage4")))


def four_widths(network: str, image_shape: Sequence[int], hidden: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return the number of channels of an image, and the four widths in `hidden`."""
    check_widths(hidden, len(hidden) == 4, f"four positive widths for {network}, e.g. 16, 32, 64, 128")
    return (*image_shape, 1)[2], tuple(hidden)


def block(key: Array, depth: int, inputs: int, outputs: int, shortcut: bool) -> dict[str, PyTree]:
    """Draw the parameters of a residual block of `depth` 3×3 convolutions.

    If `shortcut` is True, the shortcut is a 1×1 convolution.
    """
    *keys, last = jax.random.split(key, depth + 1)
    layers = [normed(k, 3, inputs if i == 0 else outputs, outputs) for i, k in enumerate(keys)]
    return {"layers": layers, **({"shortcut": normed(last, 1, inputs, outputs)} if shortcut else {})}


def block_axes(name: str, depth: int, inputs: str, outputs: str, shortcut: bool) -> dict[str, PyTree]:
    """Return the structure of a residual block, from the names of its groups of units.

    The outputs of the last layer and of the shortcut are added, so they are units of the same group. If the shortcut
    has no convolution, the block's inputs are added to its outputs, so `inputs` and `outputs` must be the same group.
    """
    groups = [inputs, *(f"{name}_inner{i + 1}" for i in range(depth - 1)), outputs]
    layers = [normed_axes(into, out) for into, out in itertools.pairwise(groups)]
    return {"layers": layers, **({"shortcut": normed_axes(inputs, outputs)} if shortcut else {})}


def residual(parts: dict[str, PyTree], maps: Array, stride: int = 1) -> Array:
    """Apply a residual block: ReLU of (last layer + shortcut). The first layer and the shortcut have the given stride.

    `maps` has the shape (n, height, width, channels).
    """
    added = apply(parts["shortcut"], maps, stride) if "shortcut" in parts else maps
    first, *middle, last = parts["layers"]
    maps = jax.nn.relu(apply(first, maps, stride))
    for layer in middle:
        maps = jax.nn.relu(apply(layer, maps))
    return jax.nn.relu(apply(last, maps) + added)


def maps_of(image_shape: Sequence[int]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that gives images the shape (n, height, width, channels).

    Images without an axis of channels get one channel.

    `image_shape` is (height, width) or (height, width, channels).
    """
    return lambda images: images.reshape(len(images), *(*image_shape, 1)[:3])


def normed(key: Array, size: int, inputs: int, outputs: int) -> dict[str, Array]:
    """Draw a convolution with normalisation: normal weights of variance 2/(size²·inputs), gain 1 and bias 0."""
    weight = drawn(key, (size, size, inputs, outputs))
    return {"weight": weight, "gain": jnp.ones(outputs), "bias": jnp.zeros(outputs)}


def normed_axes(inputs: str, outputs: str) -> dict[str, str]:
    """Return the structure of a convolution with normalisation, from the groups of its inputs and outputs."""
    return {"weight": f"_ _ {inputs} {outputs}", "gain": outputs, "bias": outputs}


def apply(layer: dict[str, Array], maps: Array, stride: int = 1) -> Array:
    """Convolve maps, and apply layer norm: (maps − mean)/√(variance + ε)·gain + bias.

    Mean and variance are computed for each image, over all its pixels and channels. `maps` has the shape (images,
    height, width, channels).
    """
    maps = convolve(maps, layer["weight"], stride)
    centred = maps - jnp.mean(maps, axis=(1, 2, 3), keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=(1, 2, 3), keepdims=True)
    return centred * jax.lax.rsqrt(variance + EPSILON) * layer["gain"] + layer["bias"]


def pool(maps: Array) -> Array:
    """Return the maxima of 2×2 squares of maps, with stride 2.

    If a side is odd, its last row or column is dropped, as in the papers, unless it is the only one. `maps` has the
    shape (n, height, width, channels).
    """
    _, height, width, _ = maps.shape
    return max_pool(maps[:, : max(1, height - height % 2), : max(1, width - width % 2)])


BACKBONES = {"conv4": conv4, "resnet12": resnet12, "resnet18": resnet18}
