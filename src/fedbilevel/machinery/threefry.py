"""Compute JAX's default random numbers by a program that compiles quickly on CPUs.

On CPUs, JAX runs the 20 rounds of its hash Threefry as a loop. Each place where a key is split or bits are drawn then
becomes about ten kernels, and their compilation takes half of the time for a small program. In this module the rounds
are written out one after the other, as JAX does on other devices. This becomes one kernel. The bits are the same.

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
TAG = "fbl"  # the name of these keys in JAX's types: key<fbl>[]


def written_out(key: Array) -> Array:
    """Return a key that gives the same bits as `key` by a program that a CPU compiles quickly.

    On other devices, and for keys of other generators, the result is `key` itself. `jax.random.poisson` accepts only
    JAX's own keys: for the new key it raises NotImplementedError.
    """
    default = jax.random.key_impl(key) == NAME and jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if not default or jax.default_backend() != "cpu":
        return key
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_implementation())


def about_keys(error: Exception) -> bool:
    """Return whether an error was raised because a function accepts only JAX's own keys."""
    missing_rule = any(isinstance(one, NotImplementedError) for one in (error, error.__cause__))
    return missing_rule or f"key<{TAG}>" in str(error)


def computed_once(drawn: Array) -> Array:
    """Return the integers `drawn` unchanged, and make XLA compute each of them only once.

    Without this function, XLA fuses the computation of a random index into the loop that reads the sample at this
    index. The hash is then computed again for every entry of the sample, which took two thirds of a round on a CPU, and
    two fifths on a GPU. On a GPU an optimization barrier prevents this. On a CPU the barrier does not help. A sum over
    windows helps there if each window contains a number and a zero, but not if it contains the number alone.
    """
    if jax.default_backend() != "cpu":
        return lax.optimization_barrier(drawn)
    window = (1,) * (drawn.ndim - 1) + (2,)
    padding = [(0, 0)] * (drawn.ndim - 1) + [(0, 1)]
    return lax.reduce_window(drawn, np.zeros((), drawn.dtype), lax.add, window, window, padding, base_dilation=window)


@jax.jit
def threefry(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Compute Threefry-2x32 with 20 rounds, for a key (2,) and counters `high` and `low`, uint32 of the same shape.

    With `jit`, the 140 operations are traced once for each shape, and lowered once for each program. Without `jit`,
    they are traced at every place where a key is split. In a small program, this took a tenth of the time that passed
    before the program could run. XLA inlines the calls, so that the compiled program is the same.
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
    """Draw integers uniformly from 0 to bound − 1, as int32 of the given shape.

    This function computes one hash. `jax.random.randint` computes three, which takes a third of a small program's
    compilation time. The probabilities of two integers differ by less than 2⁻³².
    """
    drawn = jax.random.bits(key, shape, jnp.uint32)
    return jax.lax.rem(drawn, jnp.full_like(drawn, bound)).astype(jnp.int32)
