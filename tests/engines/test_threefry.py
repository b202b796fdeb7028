"""Keys whose hash is written out have the bits of JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.engines.local.threefry import threefry, written_out

USES = {
    "bits": lambda key: jax.random.bits(key, (7, 3)),
    "one number": lambda key: jax.random.bits(key, (), jnp.uint32),
    "8 bits": lambda key: jax.random.bits(key, (5,), jnp.uint8),
    "16 bits": lambda key: jax.random.bits(key, (5,), jnp.uint16),
    "64 bits": lambda key: jax.random.bits(key, (5,), jnp.uint64),
    "normal": lambda key: jax.random.normal(key, (11,)),
    "whole numbers": lambda key: jax.random.randint(key, (4,), 0, 10),
    "permutation": lambda key: jax.random.permutation(key, 33),
    "choice": lambda key: jax.random.choice(key, 100, (7,), replace=False),
    "gamma": lambda key: jax.random.gamma(key, 2.0, (3,)),
    "split": lambda key: jax.random.key_data(jax.random.split(key, 3)),
    "split in a shape": lambda key: jax.random.key_data(jax.random.split(key, (2, 3))),
    "folded": lambda key: jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, 5), 2**32 - 1)),
    "vectorised": lambda key: jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(jnp.arange(5)),
}


@pytest.mark.parametrize("use", USES)
def test_bits_are_those_of_jax(use):
    for seed in (0, 1, 2**31):
        key = jax.random.key(seed)
        quick = written_out(key)
        assert quick.dtype != key.dtype
        np.testing.assert_array_equal(USES[use](key), USES[use](quick))


def test_the_hash_is_that_of_its_paper():
    """Known answers of the authors' Random123 1.14, file kat_vectors: threefry2x32, 20 rounds."""
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    for (high, low, *key), expected in [
        ((0, 0, 0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ones, ones, ones, ones), (0x1CB996FC, 0xBB002BE7)),
        (pi, (0xC4923A9C, 0x483DF7A0)),
    ]:
        found = threefry(jnp.array(key, jnp.uint32), jnp.uint32(high), jnp.uint32(low))
        assert tuple(map(int, found)) == expected


def test_keys_of_other_kinds_stay_as_they_are():
    key = jax.random.key(0, impl="rbg")
    assert written_out(key) is key
