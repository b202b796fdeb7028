"""JAX's default random numbers, by a program that CPUs compile quickly.

On CPUs JAX makes the 20 rounds of its hash a loop, some ten kernels for each place where a key is split or bits are
drawn: half of a small program's compilation. Written out they are one kernel, as JAX has it on other devices. The bits
are the same.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw. "Parallel random numbers: as easy as 1, 2, 3". SC 2011.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.random import define_prng_impl

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)
NAME = "threefry2x32"
TAG = "fbl"  # in what JAX says of types: key<fbl>[]


def written_out(key: Array) -> Array:
    """A key whose streams have the same bits as those of `key`, for programs that a CPU runs; other kinds as they are.

    jax.random.poisson takes JAX's own keys alone, and raises NotImplementedError.
    """
    own = jax.random.key_impl(key) == NAME and jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if not own or jax.default_backend() != "cpu":
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_implementation())


def about_keys(error: Exception) -> bool:
    """Whether an error comes of keys of this kind where JAX's own are asked for."""
    return isinstance(error, NotImplementedError) or f"key<{TAG}>" in str(error)


def computed_once(drawn: Array) -> Array:
    """The whole numbers (..., n) as they are, each of which a program computes once.

    XLA takes what is read into the loop that reads it: the hash of a drawn place would be computed for every entry of
    every sample at such a place, which was two thirds of a round on a CPU, and two fifths on a GPU. An optimization
    barrier keeps only the latter from that; a window of one number does neither; a sum over windows of one number and
    a zero does it on a CPU.
    """
    if jax.default_backend() != "cpu":
        return lax.optimization_barrier(drawn)
    window = (1,) * (drawn.ndim - 1) + (2,)
    padding = [(0, 0)] * (drawn.ndim - 1) + [(0, 1)]
    return lax.reduce_window(drawn, np.zeros((), drawn.dtype), lax.add, window, window, padding, base_dilation=window)


@jax.jit
def threefry(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds, of counters (high, low), uint32 of one shape, under a key (2,).

    Jitted so that its 140 operations are traced once for each shape, and lowered once for each program, not wherever a
    key is split: that was a tenth of the time until a small program runs. XLA puts calls in line: it compiles the same.
    """
    k = key[0], key[1], key[0] ^ key[1] ^ PARITY
    a, b = high + k[0], low + k[1]
    for block in range(5):
        for by in ROTATIONS[block % 2]:
            a = a + b
            b = a ^ (lax.shift_left(b, np.uint32(by)) | lax.shift_right_logical(b, np.uint32(32 - by)))
        a, b = a + k[(block + 1) % 3], b + k[(block + 2) % 3] + np.uint32(block + 1)
    return a, b


def _counters(shape: tuple[int, ...]) -> tuple[Array, Array]:
    if math.prod(shape) >= 2**32:
        raise ValueError(f"{math.prod(shape):,} random numbers at once are not allowed: at most 2³² − 1")
    return jnp.zeros(shape, jnp.uint32), lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)


def _seed(seed: Array) -> Array:
    return jax.random.key_data(jax.random.key(seed, impl=NAME))


def _fold_in(key: Array, number: Array | int) -> Array:
    low = jnp.asarray(number, jnp.uint32)
    return jnp.stack(threefry(key, jnp.zeros((), jnp.uint32), low))


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    return computed_once(jnp.stack(threefry(key, *_counters(shape)), axis=len(shape)))


def _bits(key: Array, width: int, shape: tuple[int, ...]) -> Array:
    high, low = threefry(key, *_counters(shape))
    if width == 64:
        return lax.shift_left(high.astype(jnp.uint64), jnp.asarray(32, jnp.uint64)) | low.astype(jnp.uint64)
    return lax.convert_element_type(high ^ low, f"uint{width}")


@cache
def _implementation() -> Any:
    return define_prng_impl(
        key_shape=(2,),
        seed=_seed,
        split=_split,
        random_bits=_bits,
        fold_in=_fold_in,
        name="threefry2x32_written_out",
        tag=TAG,
    )


def uniform_below(key: Array, bound: Array | int, shape: tuple[int, ...] = ()) -> Array:
    """Draw integers uniform on 0..bound − 1, int32.

    One hash where jax.random.randint takes three, which a third of a small program's compilation would go to; the
    probabilities differ by less than 2⁻³² from each other.
    """
    drawn = jax.random.bits(key, shape, jnp.uint32)
    return jax.lax.rem(drawn, jnp.full_like(drawn, bound)).astype(jnp.int32)
