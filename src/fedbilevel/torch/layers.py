"""Define the rules for operators of layers: products, attention, normalisation, pooling and recurrence.

Importing this module completes the table of rules that `operations.py` begins.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.torch.operations import DRAWING, RULES, Rule, native_dropout, rule, several

__all__ = ["DRAWING", "RULES"]

# Products.

rule("mm", "bmm", "matmul", "mv", "dot")(jnp.matmul)


@rule("addmm", "baddbmm")
def addmm(c: Array, a: Array, b: Array, beta: float = 1, alpha: float = 1) -> Array:
    return (c if beta == 1 else beta * c) + (a @ b if alpha == 1 else alpha * (a @ b))


@rule("linear")
def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    return x @ weight.T if bias is None else x @ weight.T + bias


def taps(x: Array, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[Array]:
    """Slide a window over x, and return an array for each position inside the window: the entries of x found there.

    Such an array has an entry for each place of the window. The array x has the shape (…, *space), and is already
    padded.
    """
    n = len(kernel)
    counts = [(s - d * (k - 1) - 1) // t + 1 for s, k, t, d in zip(x.shape[-n:], kernel, stride, dilation, strict=True)]

    def seen(place: Sequence[int]) -> Array:
        first = [d * i for i, d in zip(place, dilation, strict=True)]
        cuts = [slice(a, a + (c - 1) * t + 1, t) for a, c, t in zip(first, counts, stride, strict=True)]
        return x[(..., *cuts)]

    return [seen(place) for place in itertools.product(*map(range, kernel))]


@rule("convolution")
def convolution(
    x: Array, weight: Array, bias: Array | None, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int,
) -> Array:  # fmt: skip
    """Convolve x (samples, channels, *space) by a matrix product over patches.

    XLA's own convolution is slow if each client has its own weight.
    """
    n = weight.ndim - 2
    stride, padding, dilation, extra = (several(value, n) for value in (stride, padding, dilation, output_padding))
    if transposed:
        out = transposed_convolution(x, weight, stride, padding, dilation, extra, groups)
    else:
        padded = jnp.pad(
            x.swapaxes(0, 1), [(0, 0), (0, 0), *((p, p) for p in padding)]
        )  # with channels first, no transposes are needed
        patches = jnp.stack(taps(padded, weight.shape[2:], stride, dilation), 1)  # (channels, taps, samples, *space)
        shape = patches.shape[2:]
        product = weight.reshape(groups, weight.shape[0] // groups, -1) @ patches.reshape(groups, -1, math.prod(shape))
        out = product.reshape(-1, *shape).swapaxes(0, 1)
    return out if bias is None else out + channelwise(bias, out)


def transposed_convolution(
    x: Array, weight: Array, stride: Any, padding: Any, dilation: Any, extra: Any, groups: int
) -> Array:
    n = weight.ndim - 2
    flipped = jnp.flip(weight, range(2, 2 + n)).reshape(groups, -1, *weight.shape[1:]).swapaxes(1, 2)
    reach = [d * (k - 1) - p for d, k, p in zip(dilation, weight.shape[2:], padding, strict=True)]
    edges = [(r, r + e) for r, e in zip(reach, extra, strict=True)]
    kernel = flipped.reshape(-1, *flipped.shape[2:])
    return lax.conv_general_dilated(x, kernel, (1,) * n, edges, stride, dilation, feature_group_count=groups)


@rule("scaled_dot_product_attention", draws=True)
def attention(
    key: Callable[[], Array], query: Array, keys: Array, values: Array, mask: Array | None = None,
    dropout_p: float = 0.0, causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Array:  # fmt: skip
    """Compute attention for queries, keys and values (…, places, width).

    A boolean mask is True for the places that may be seen; other masks are added to the scores. A query that sees no
    place gets 0.
    """
    if enable_gqa:
        keys, values = (jnp.repeat(a, query.shape[-3] // a.shape[-3], -3) for a in (keys, values))
    scores = query @ keys.swapaxes(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if mask is None:
        weights = jax.nn.softmax(scores)
    else:
        seen = mask if mask.dtype == bool else mask != -jnp.inf
        some = jnp.any(seen, -1, keepdims=True)
        scores = jnp.where(seen, scores if mask.dtype == bool else scores + mask, -jnp.inf)
        weights = jnp.where(some, jax.nn.softmax(jnp.where(some, scores, 0)), 0)  # also without NaN in derivatives
    return native_dropout(key, weights, dropout_p, True)[0] @ values


# Normalisation.


def channelwise(a: Array, x: Array) -> Array:
    """Reshape an array (channels,) such that it broadcasts with x (samples, channels, *space)."""
    return a.reshape(-1, *(1,) * (x.ndim - 2))


def affine(x: Array, weight: Array | None, bias: Array | None) -> Array:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def normalised(x: Array, over: Any, eps: float) -> Array:
    centred = x - jnp.mean(x, over, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred * centred, over, keepdims=True) + eps)


@rule("layer_norm")
def layer_norm(
    x: Array, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, _: bool = True
) -> Array:
    return affine(normalised(x, tuple(range(-len(shape), 0)), eps), weight, bias)


@rule("group_norm")
def group_norm(x: Array, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, _: bool = True) -> Array:
    normal = normalised(x.reshape(x.shape[0], groups, -1), -1, eps).reshape(x.shape)
    return affine(normal, *(None if a is None else channelwise(a, x) for a in (weight, bias)))


@rule("_native_batch_norm_legit_no_training")
def batch_norm(
    x: Array, weight: Any, bias: Any, mean: Array, variance: Array, momentum: float, eps: float
) -> tuple[Array, None, None]:
    """Normalise with the mean and variance that the module holds."""
    normal = (x - channelwise(mean, x)) / jnp.sqrt(channelwise(variance, x) + eps)
    return affine(normal, *(None if a is None else channelwise(a, x) for a in (weight, bias))), None, None


@rule("instance_norm")
def instance_norm(
    x: Array, weight: Any, bias: Any, mean: Any, variance: Any, of_inputs: bool, momentum: float, eps: float, _: bool
) -> Array:
    if of_inputs:
        return group_norm(x, x.shape[1], weight, bias, eps)
    return batch_norm(x, weight, bias, mean, variance, momentum, eps)[0]


# Pooling.


def windows(
    x: Array, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, edge: float, outside: float
) -> list[Array]:
    """Pad x (…, *space) and return its `taps`.

    The padding has the value `edge`. With `ceil`, a last window may reach beyond the padding, where entries have the
    value `outside`.
    """
    n = len(kernel)
    stride, padding, dilation = several(stride or kernel, n), several(padding, n), several(dilation, n)
    beyond = []
    for size, k, t, p, d in zip(x.shape[-n:], kernel, stride, padding, dilation, strict=True):
        reach, room = d * (k - 1) + 1, size + 2 * p
        last = (room - reach) // t * t
        stands_out = ceil and last + reach < room and last + t < size + p  # one more window, if it begins inside
        beyond.append(max(0, last + t + reach - room) if stands_out else 0)
    whole = [(0, 0)] * (x.ndim - n)
    x = jnp.pad(x, whole + [(p, p) for p in padding], constant_values=edge)
    x = jnp.pad(x, whole + [(0, b) for b in beyond], constant_values=outside)
    return taps(x, kernel, stride, dilation)


@rule("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(x: Array, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False) -> Array:
    """Pool by maxima; the first of equal maxima gets the gradient."""
    best, *others = windows(x, kernel, stride, padding, dilation, ceil, -jnp.inf, -jnp.inf)
    for other in others:
        best = jnp.where((other > best) | jnp.isnan(other), other, best)
    return best


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool(
    x: Array, kernel: Any, stride: Any = (), padding: Any = 0, ceil: bool = False,
    count_padding: bool = True, divisor: int | None = None,
) -> Array:  # fmt: skip
    total = functools.reduce(jnp.add, windows(x, kernel, stride, padding, 1, ceil, 0, 0))
    if divisor is not None:
        return total / divisor
    ones = jnp.ones(x.shape[-len(kernel) :], x.dtype)
    return total / functools.reduce(jnp.add, windows(ones, kernel, stride, padding, 1, ceil, float(count_padding), 0))


def spans(size: int, out: int) -> list[tuple[int, int]]:
    """Return the span of inputs of each output of an adaptive pooling: from ⌊j size/out⌋ to ⌈(j + 1) size/out⌉ − 1."""
    return [(j * size // out, -(-(j + 1) * size // out)) for j in range(out)]


def mixed(x: Array, axis: int, share: np.ndarray) -> Array:
    """Mix the entries along an axis: entry j becomes the sum of share[i, j] times entry i over all i."""
    return jnp.moveaxis(jnp.moveaxis(x, axis, -1) @ jnp.asarray(share, x.dtype), -1, axis)


@rule("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_avg_pool(x: Array, shape: Sequence[int | None]) -> Array:
    for axis, out in zip(range(-len(shape), 0), shape, strict=True):
        size = x.shape[axis]
        if out is None or out == size:
            continue
        share = np.zeros((size, out))
        for j, (first, last) in enumerate(spans(size, out)):
            share[first:last, j] = 1 / (last - first)
        x = mixed(x, axis, share)
    return x


@rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(x: Array, shape: Sequence[int]) -> tuple[Array, Array]:
    """Return (maxima, their places within a channel).

    The last axis is reduced first, so that the first of equal maxima is taken.
    """
    space = x.shape[-len(shape) :]
    where = jnp.broadcast_to(jnp.arange(math.prod(space)).reshape(space), x.shape)
    for axis in range(-1, -len(shape) - 1, -1):
        best = [
            jnp.argmax(lax.slice_in_dim(x, *span, axis=axis), axis, keepdims=True) + span[0]
            for span in spans(x.shape[axis], shape[axis])
        ]
        chosen = jnp.concatenate(best, axis)
        x, where = (jnp.take_along_axis(a, chosen, axis) for a in (x, where))
    return x, where


# Resizing: `scales` are the factors out/in that the caller gave, which may differ from the ratios of the sizes.


def resizings(
    x: Array, shape: Sequence[int] | None, scales: Sequence[float] | None
) -> list[tuple[int, int, int, float]]:
    """Return (axis, size, new size, step) for each axis of space.

    The step is the distance between neighbouring new places, in units of the distance between old places.
    """
    space = x.shape[2:]
    new = [int(size * scale) for size, scale in zip(space, scales or (), strict=True)] if shape is None else shape
    steps = [old / n for old, n in zip(space, new, strict=True)] if scales is None else [1 / scale for scale in scales]
    return list(zip(range(2, x.ndim), space, new, steps, strict=True))


@rule("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def nearest(x: Array, shape: Sequence[int] | None, scales: Sequence[float] | None) -> Array:
    for axis, size, new, step in resizings(x, shape, scales):
        places = np.arange(new, dtype=np.float32) * np.float32(step)  # float32 rounds as PyTorch does
        x = jnp.take(x, np.minimum(places.astype(int), size - 1), axis)
    return x


@rule("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def linearly(x: Array, shape: Sequence[int] | None, corners: bool, scales: Sequence[float] | None) -> Array:
    """Interpolate linearly between the two nearest places; with `corners`, the first and the last place are kept."""
    for axis, size, new, step in resizings(x, shape, scales):
        aligned = np.arange(new) * ((size - 1) / max(new - 1, 1))
        places = aligned if corners else np.clip((np.arange(new) + 0.5) * step - 0.5, 0, size - 1)
        x = mixed(x, axis, np.maximum(0, 1 - abs(np.arange(size)[:, None] - places)))
    return x


# Recurrent layers, with one `lax.scan` for each layer and direction.


def lstm_cell(
    gates: Array, recur: Callable[[Array], Array], project: Rule, state: tuple[Array, ...]
) -> tuple[Array, ...]:
    h, c = state
    i, f, g, o = jnp.split(gates + recur(h), 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return project(jax.nn.sigmoid(o) * jnp.tanh(c)), c


def gru_cell(
    gates: Array, recur: Callable[[Array], Array], project: Rule, state: tuple[Array, ...]
) -> tuple[Array, ...]:
    (h,) = state
    (ri, zi, ni), (rh, zh, nh) = jnp.split(gates, 3, -1), jnp.split(recur(h), 3, -1)
    z = jax.nn.sigmoid(zi + zh)
    return ((1 - z) * jnp.tanh(ni + jax.nn.sigmoid(ri + rh) * nh) + z * h,)


def plain_cell(activation: Rule) -> Rule:
    return lambda gates, recur, project, state: (activation(gates + recur(state[0])),)


def recurrent(
    cell: Rule, key: Callable[[], Array], x: Array, start: Sequence[Array], weights: Sequence[Array],
    biases: bool, layers: int, dropout_p: float, train: bool, both: bool, batch_first: bool,
) -> tuple[Array, ...]:  # fmt: skip
    """Run PyTorch's stacked recurrent layers, in one direction or both, and return (outputs, *last states).

    Args:
        x: an array of shape (length, samples, inputs), or of shape (samples, length, inputs) with `batch_first`.
        start: the starting states, each of shape (layers × directions, samples, width).
    """
    x = x.swapaxes(0, 1) if batch_first else x
    directions = 2 if both else 1
    each = len(weights) // (layers * directions)
    ends = []
    for layer in range(layers):
        outputs = []
        for at in range(directions * layer, directions * (layer + 1)):
            of_layer = weights[each * at : each * (at + 1)]
            end, out = one_direction(cell, x, [state[at] for state in start], of_layer, biases, at % directions == 1)
            ends.append(end)
            outputs.append(out)
        x = jnp.concatenate(outputs, -1)
        if train and dropout_p and layer + 1 < layers:
            x = native_dropout(lambda layer=layer: jax.random.fold_in(key(), layer), x, dropout_p, True)[0]
    return (x.swapaxes(0, 1) if batch_first else x, *(jnp.stack(state) for state in zip(*ends, strict=True)))


def one_direction(
    cell: Rule, x: Array, start: Sequence[Array], weights: Sequence[Array], biases: bool, backwards: bool
) -> tuple[tuple[Array, ...], Array]:
    """Run one layer in one direction, and return (last states, outputs (length, samples, width)).

    `weights` has the weights of inputs and of states, then two biases and a projection, if there are any.
    """
    of_inputs, of_states, *rest = weights
    b_inputs, b_states, *projection = rest if biases else (None, None, *rest)

    def step(state: tuple[Array, ...], gates: Array) -> tuple[tuple[Array, ...], Array]:
        project = (lambda h: linear(h, projection[0])) if projection else (lambda h: h)
        state = cell(gates, lambda h: linear(h, of_states, b_states), project, state)
        return state, state[0]

    return lax.scan(step, tuple(start), linear(x, of_inputs, b_inputs), reverse=backwards)


def of_one_state(cell: Rule) -> Rule:
    return lambda key, x, start, *rest: recurrent(cell, key, x, (start,), *rest)


rule("lstm.input", draws=True)(lambda key, x, start, *rest: recurrent(lstm_cell, key, x, start, *rest))
rule("gru.input", draws=True)(of_one_state(gru_cell))
rule("rnn_tanh.input", draws=True)(of_one_state(plain_cell(jnp.tanh)))
rule("rnn_relu.input", draws=True)(of_one_state(plain_cell(jax.nn.relu)))


@rule("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(scores: Array, labels: Array, weight: Array | None, reduction: int, ignored: int) -> tuple[Array, Array]:
    """Return (loss, sum of weights) for scores (samples, classes, …) or (classes,); labels have no axis of classes."""
    at, axis = jnp.where(labels == ignored, 0, labels), min(1, scores.ndim - 1)
    share = jnp.where(labels == ignored, 0, 1 if weight is None else weight[at]).astype(scores.dtype)
    losses = -share * jnp.take_along_axis(scores, jnp.expand_dims(at, axis), axis).squeeze(axis)
    total, whole = jnp.sum(losses), jnp.sum(share)
    return {0: losses, 1: total / whole, 2: total}[reduction], whole
