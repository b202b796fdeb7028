"""Does the sum of differences equal the mean over a table of last replies?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.algorithms.parts.memory import LastReplies, LastReply, ReplyDelta
from fedbilevel.core.fed import Public

CLIENTS, SIZE = 6, 3


def exchanges(rng, count):
    """Return for each exchange the clients that reply, and for each of them when it was asked, and its reply.

    The request to which a client replies is never older than that of its previous reply.
    """
    asked = np.full(CLIENTS, -1)
    for t in range(count):
        who = rng.choice(CLIENTS - 1 if t < count // 2 else CLIENTS, size=rng.integers(1, 4), replace=False)
        for i in who:
            asked[i] = rng.integers(asked[i] + 1, t + 1) if asked[i] < t else t
        yield t, [(i, asked[i], {"u": rng.normal(size=SIZE), "n": rng.normal()}) for i in who]


def played(weights, count, seed=0):
    """Return after each exchange the memory, and the table {client: (when it was asked, reply)}."""
    memory = LastReplies.none({"u": jnp.zeros(SIZE), "n": jnp.zeros(())})
    kept = {i: LastReply.none(memory.total) for i in range(CLIENTS)}
    table = {}
    for _, answers in exchanges(np.random.default_rng(seed), count):
        total = jax.tree.map(jnp.zeros_like, ReplyDelta(memory.total, *[Public(jnp.zeros(()))] * 2))
        for i, asked, answer in answers:
            change, kept[i] = ReplyDelta.since(kept[i], jax.tree.map(jnp.asarray, answer), jnp.asarray(asked))
            total = jax.tree.map(lambda a, b, p=weights[i]: a + p * b, total, change)
            table[i] = asked, answer
        memory = memory.after(total)
        yield memory, dict(table)


def test_mean_weight_and_delay_are_those_of_the_table():
    """Mean, weight and delay are those of the table.

    The last client is silent for half of the exchanges. Until it replies, the mean leaves it out, and its delay counts
    from the start.
    """
    weights = np.random.default_rng(1).uniform(0.5, 2, CLIENTS)
    weights /= weights.sum()
    for t, (memory, table) in enumerate(played(weights, 60)):
        known = sum(weights[i] for i in table)
        mean = sum(weights[i] * answer["u"] for i, (_, answer) in table.items()) / known
        np.testing.assert_allclose(memory.mean["u"], mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(memory.weight, known, rtol=1e-12)
        delay = sum(weights[i] * (t - (table[i][0] if i in table else -1)) for i in range(CLIENTS))
        np.testing.assert_allclose(memory.delay, delay, rtol=1e-12, atol=1e-12)
        assert int(memory.exchanges) == t + 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_what_rounding_leaves_in_the_sum(dtype):
    """Rounding errors of the sum stay below five of the standard deviations that are derived here.

    5,000 exchanges have one reply each, uniform in [−1, 1]. Rounding a difference, its product with the weight, and the
    sum makes errors of at most 2, 2p and 1 times ε/2, whose signs are independent. Their standard deviation after n
    exchanges is less than 3·ε/2·√n.
    """
    count, weights = 5_000, jnp.asarray(np.arange(1, CLIENTS + 1) / 21)

    def one(carry, key):
        memory, kept = carry
        who, what = jax.random.split(key)
        i = jax.random.randint(who, (), 0, CLIENTS)
        answer = jax.random.uniform(what, (SIZE,), dtype, -1, 1)
        change, mine = ReplyDelta.since(jax.tree.map(lambda leaf: leaf[i], kept), answer, memory.exchanges)
        memory = memory.after(jax.tree.map(lambda leaf: leaf * weights[i].astype(leaf.dtype), change))
        return (memory, jax.tree.map(lambda rows, row: rows.at[i].set(row), kept, mine)), None

    nothing = jnp.zeros(SIZE, dtype)
    kept = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (CLIENTS, *leaf.shape)), LastReply.none(nothing))
    keys = jax.random.split(jax.random.key(0), count)
    (memory, kept), _ = jax.lax.scan(one, (LastReplies.none(nothing), kept), keys)
    exact = np.asarray(weights) @ np.asarray(kept.update, float)
    off, bound = np.max(np.abs(memory.mean - exact)), 5 * 3 * np.finfo(dtype).eps / 2 * np.sqrt(count)
    assert off < bound
    assert bound < 1e-3 * np.max(np.abs(exact))
    delay = np.asarray(weights) @ (count - 1 - np.asarray(kept.exchange))
    np.testing.assert_allclose(memory.delay, delay, rtol=1e-12)  # counts are weighted in float64 here
