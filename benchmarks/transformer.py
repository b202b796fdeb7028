"""A small transformer that classifies images, with plain attention or with attention in blocks.

Attention is causal: a token attends to earlier tokens and to itself. Attention in blocks never has the whole matrix of
weights, of shape (tokens, tokens), in memory, and skips blocks of later tokens. It follows Tri Dao et al.,
"FlashAttention", NeurIPS 2022, arXiv:2205.14135.

Attention in blocks has no second derivatives, as compiled kernels for attention have none. Its forward pass is a loop
whose number of steps depends on the block, and JAX cannot differentiate such a loop in reverse. So the backward pass is
programmed explicitly (`jax.custom_vjp`). It is a loop of the same kind, and cannot be differentiated again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

PATCH, BLOCK = 2, 28  # pixels along a side of a patch; tokens of a block
Attention = Callable[[Array, Array, Array], Array]
"""A function (queries, keys, values), each (tokens, width), -> (tokens, width)."""


def plain(q: Array, k: Array, v: Array) -> Array:
    """Compute causal attention from the whole matrix of weights."""
    scores = q @ k.T / jnp.sqrt(q.shape[1])
    return jax.nn.softmax(jnp.where(jnp.tri(len(q), dtype=bool), scores, -jnp.inf)) @ v


@jax.custom_vjp
def in_blocks(q: Array, k: Array, v: Array) -> Array:
    """Compute causal attention block by block; the number of tokens is a multiple of BLOCK."""
    return forward(q, k, v)[0]


def block(a: Array, i: Array) -> Array:
    """Return block i of some rows."""
    return lax.dynamic_slice_in_dim(a, i * BLOCK, BLOCK)


def scores(q: Array, k: Array, i: Array, j: Array) -> Array:
    """Return the scores of block i of queries and block j of keys."""
    place = jnp.arange(BLOCK)
    earlier = i * BLOCK + place[:, None] >= j * BLOCK + place
    return jnp.where(earlier, block(q, i) @ block(k, j).T / jnp.sqrt(q.shape[1]), -jnp.inf)


def forward(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    """Return the attention, and the arrays that the backward pass needs."""

    def of_block(i: Array) -> tuple[Array, Array]:
        def step(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            most, total, mean = carry
            s = scores(q, k, i, j)
            new = jnp.maximum(most, s.max(1))
            weights, shrink = jnp.exp(s - new[:, None]), jnp.exp(most - new)
            return new, shrink * total + weights.sum(1), shrink[:, None] * mean + weights @ block(v, j)

        start = jnp.full(BLOCK, -jnp.inf, q.dtype), jnp.zeros(BLOCK, q.dtype), jnp.zeros_like(block(v, i))
        most, total, mean = lax.fori_loop(0, i + 1, step, start)
        return mean / total[:, None], most + jnp.log(total)

    out, norms = lax.map(of_block, jnp.arange(len(q) // BLOCK))
    out = out.reshape(v.shape)
    return out, (q, k, v, out, norms)


def backward(kept: Any, slope: Array) -> tuple[Array, Array, Array]:
    """Return the derivatives in q, k and v. The weights are computed again from the norms, block by block."""
    q, k, v, out, norms = kept
    along = jnp.sum(out * slope, axis=1)

    def row(i: Array, slopes: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        def step(j: Array, slopes: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            weights = jnp.exp(scores(q, k, i, j) - norms[i][:, None])
            of_weights = block(slope, i) @ block(v, j).T - block(along, i)[:, None]
            of_scores = weights * of_weights / jnp.sqrt(q.shape[1])
            parts = (i, of_scores @ block(k, j)), (j, of_scores.T @ block(q, i)), (j, weights.T @ block(slope, i))
            added = [
                lax.dynamic_update_slice_in_dim(a, block(a, at) + part, at * BLOCK, 0)
                for a, (at, part) in zip(slopes, parts, strict=True)
            ]
            return added[0], added[1], added[2]

        return lax.fori_loop(0, i + 1, step, slopes)

    return lax.fori_loop(0, len(q) // BLOCK, row, (jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)))


in_blocks.defvjp(forward, backward)


def start(key: Array, side: int, width: int, layers: int, classes: int) -> dict[str, Any]:
    """Draw the parameters for square images with this side; the parameters of all layers are stacked."""
    keys = iter(jax.random.split(key, 7))
    tokens = (side // PATCH) ** 2

    def drawn(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape) / jnp.sqrt(shape[-2])

    return {
        "patch": drawn(PATCH**2, width),
        "place": drawn(tokens, width),
        "layers": {
            "qkv": drawn(layers, width, 3 * width),
            "out": drawn(layers, width, width) / layers,
            "wide": drawn(layers, width, 2 * width),
            "back": drawn(layers, 2 * width, width) / layers,
        },
        "head": drawn(width, classes),
    }


def logits(y: Any, images: Array, attention: Attention, heads: int) -> Array:
    """Return the logits, (n, classes), of images, (n, side, side)."""
    n, side, _ = images.shape
    patches = images.reshape(n, side // PATCH, PATCH, side // PATCH, PATCH).swapaxes(2, 3).reshape(n, -1, PATCH**2)

    def split(a: Array) -> Array:
        return a.reshape(*a.shape[:2], heads, -1).swapaxes(1, 2)

    def step(h: Array, w: Any) -> tuple[Array, None]:
        q, k, v = map(split, jnp.split(jax.nn.standardize(h) @ w["qkv"], 3, axis=-1))
        seen = jax.vmap(jax.vmap(attention))(q, k, v).swapaxes(1, 2).reshape(h.shape)
        h = h + seen @ w["out"]
        return h + jax.nn.gelu(jax.nn.standardize(h) @ w["wide"]) @ w["back"], None

    h, _ = lax.scan(step, patches @ y["patch"] + y["place"], y["layers"])
    return h.mean(1) @ y["head"]
