"""Does a key whose hash is written out in operations of JAX give the bits of JAX's own key?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core.client import Samples
from fedbilevel.machinery.threefry import computed_once, threefry, written_out
from representatives import slow_but

USES = {
    "bits": lambda key: jax.random.bits(key, (7, 3)),
    "8 bits": lambda key: jax.random.bits(key, (5,), jnp.uint8),
    "16 bits": lambda key: jax.random.bits(key, (5,), jnp.uint16),
    "64 bits": lambda key: jax.random.bits(key, (5,), jnp.uint64),
    "normal": lambda key: jax.random.normal(key, (11,)),
    "whole numbers": lambda key: jax.random.randint(key, (4,), 0, 10),
    "permutation": lambda key: jax.random.permutation(key, 33),
    "gamma": lambda key: jax.random.gamma(key, 2.0, (3,)),
    "split in a shape": lambda key: jax.random.key_data(jax.random.split(key, (2, 3))),
    "folded": lambda key: jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, 5), 2**32 - 1)),
    "vectorised": lambda key: jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i)))(jnp.arange(5)),
}


@pytest.mark.parametrize("use", slow_but(*(USES.keys() - {"gamma"}), of=USES))
def test_bits_are_those_of_jax(use):
    key = jax.random.key(2**31 + 1)
    quick = written_out(key)
    assert (quick.dtype != key.dtype) == (jax.default_backend() == "cpu")
    np.testing.assert_array_equal(USES[use](key), USES[use](quick))


def test_the_hash_is_that_of_its_paper():
    """The hash is that of its paper: it has the published answers for threefry2x32 with 20 rounds.

    They are in the file kat_vectors of Random123 1.14, by the paper's authors.
    """
    ones, pi = 0xFFFFFFFF, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    other = jax.random.key(0, impl="rbg")
    assert written_out(other) is other  # keys of other kinds stay as they are
    for (high, low, *key), expected in [
        ((0, 0, 0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ones, ones, ones, ones), (0x1CB996FC, 0xBB002BE7)),
        (pi, (0xC4923A9C, 0x483DF7A0)),
    ]:
        found = threefry(jnp.array(key, jnp.uint32), jnp.uint32(high), jnp.uint32(low))
        assert tuple(map(int, found)) == expected


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3)])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_what_is_computed_once_stays_as_it_is(shape, dtype):
    """`computed_once` returns the numbers that it gets, also vectorised, and also the largest number of the type."""
    numbers = np.random.default_rng(0).integers(0, 2**31, shape).astype(dtype)
    numbers.flat[0] = np.iinfo(dtype).max
    for given in (computed_once, jax.vmap(computed_once)):
        rows = np.stack([numbers, numbers[::-1]]) if given is not computed_once else numbers
        np.testing.assert_array_equal(given(jnp.asarray(rows)), rows)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="how a CPU's compiler puts loops together")
def test_drawn_places_are_not_drawn_anew_for_every_entry():
    """The compiled loop that reads the drawn samples does not compute their places again for every entry.

    It has no remainder and no xor, of which the draws and the hash consist.
    """

    @jax.jit
    def drawn(values, sizes, key):
        keys = jax.random.split(written_out(key), 3)
        one = lambda size, key: Samples(values, jnp.asarray(0), size, 8, False).batch(key, 4)  # noqa: E731
        return jnp.tensordot(jnp.ones(4), jnp.swapaxes(jax.vmap(one)(sizes, keys), 0, 1), 1)

    given = jnp.ones((8, 2, 2)), jnp.array([5, 8, 3]), jax.random.key(0)
    loops = drawn.lower(*given).compile().as_text().split("\n}")
    reading = [loop for loop in loops if " gather(" in loop]
    assert reading
    assert not [loop for loop in reading if " remainder(" in loop or " xor(" in loop]
