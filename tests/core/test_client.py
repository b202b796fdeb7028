"""Does every client get all of its own samples and no others, whatever the form of the population is?"""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core.client import Client, Clients, Samples
from fedbilevel.core.problem import Bilevel, Padded
from fedbilevel.core.ragged import Ragged
from refusals import refuses

SIZES = np.array([3, 1, 4, 2])
EPS = np.finfo(np.float64).eps


def entries(seed=0):
    rng = np.random.default_rng(seed)
    return [{"u": rng.normal(size=(n, 2)), "t": rng.integers(0, 9, n)} for n in SIZES]


def stacked(data, filler):
    """Pad the samples to the longest client, with numbers that must not be used."""

    def pad(*leaves):
        out = np.full((len(leaves), SIZES.max(), *leaves[0].shape[1:]), filler, leaves[0].dtype)
        for i, leaf in enumerate(leaves):
            out[i, : len(leaf)] = leaf
        return out

    return jax.tree.map(pad, *data)


def ragged(data):
    """Return the same rows in another order, with a gap between clients."""
    order, gap = [2, 0, 3, 1], 5
    start, flat, position = np.zeros(4, np.int64), [], 0
    for i in order:
        start[i] = position
        position += SIZES[i] + gap
        flat += [data[i], jax.tree.map(lambda a: np.full_like(a[:1], 77).repeat(gap, 0), data[i])]
    return Ragged(jax.tree.map(lambda *leaves: np.concatenate(leaves), *flat), start, SIZES.copy())


def populations(data):
    return {
        "list": Clients(data, data),
        "stacked": Clients(*[stacked(data, 55)] * 2, outer_sizes=SIZES, inner_sizes=SIZES),
        "ragged": Clients(ragged(data), ragged(data)),
    }


@pytest.mark.parametrize("form", ["list", "stacked", "ragged"])
def test_each_form_holds_the_same_rows(form):
    data = entries()
    clients = populations(data)[form]
    assert len(clients) == 4
    for rows in (clients.outer, clients.inner):
        assert rows.size.tolist() == SIZES.tolist()
        for i, own in enumerate(data):
            jax.tree.map(np.testing.assert_array_equal, rows.row(i), own)


def test_stacking_copies_nothing():
    array = np.zeros((4, 6, 2))
    assert np.shares_memory(Clients(array, array).outer.values, array)


def window(rows, i, longest=4, equal=False):
    """Return client i's samples as an engine gives them to a phase."""
    return Samples(rows.values, jnp.asarray(rows.start[i]), jnp.asarray(rows.size[i]), longest, equal)


def alone(own):
    """Return this client's samples as those of the only client."""
    size = len(jax.tree.leaves(own)[0])
    return Samples(own, jnp.asarray(0), jnp.asarray(size), size, True)


@pytest.mark.parametrize("form", ["list", "stacked", "ragged"])
def test_draws_depend_on_the_key_and_the_client_alone(form):
    """Draws do not depend on padding, on the place in the flat arrays, or on the other clients."""
    data = entries()
    rows = populations(data)[form].inner
    for i, own in enumerate(data):
        key = jax.random.key(i)
        jax.tree.map(np.testing.assert_array_equal, window(rows, i).batch(key, 50), alone(own).batch(key, 50))


def test_draws_are_uniform_with_replacement():
    count = 4000
    numbered = Clients(*[[np.arange(n) + 100 * i for i, n in enumerate(SIZES)]] * 2).inner
    for i, size in enumerate(SIZES):
        drawn = np.asarray(window(numbered, i).batch(jax.random.key(i), count)) - 100 * i
        assert drawn.min() == 0
        assert drawn.max() == size - 1
        share = 1 / size
        error = np.sqrt(share * (1 - share) / count)
        assert np.all(np.abs(np.bincount(drawn) / count - share) <= 5 * error)
        assert len(drawn) > size  # there are more draws than samples, so that draws are with replacement


def loss(x, y, batch):
    """Compute a mean over samples, plus a term that does not depend on samples."""
    return jnp.mean(jnp.log1p(jnp.exp(batch["u"] @ y * x)) * batch["t"]) + jnp.sum(x**2) * jnp.sum(jnp.cosh(y))


def test_a_padded_full_batch_gives_the_loss_of_the_true_samples():
    """A padded full batch gives the value, gradients and second derivatives of the samples, for unequal sizes."""
    data = entries()
    x, y = jnp.asarray(0.7), jnp.asarray([0.3, -1.1])
    extended = Bilevel(loss, loss).over_batches()

    @jax.jit
    def everything(batch):
        hessian = jax.hessian(extended.inner, 1)(x, y, batch)
        return jax.value_and_grad(extended.outer, (0, 1))(x, y, batch), hessian

    @jax.jit
    def exact(own):
        return jax.value_and_grad(loss, (0, 1))(x, y, own), jax.hessian(loss, 1)(x, y, own)

    rows = populations(data)["stacked"].inner
    batches = [window(rows, i).batch(jax.random.key(0), None) for i in range(4)]
    assert all(isinstance(batch, Padded) for batch in batches)
    for own, batch in zip(data, batches, strict=True):
        true = exact(own)
        # at most 4 samples of 2 features, none larger than 10² times the sum: 10² roundings are plenty
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=100 * EPS), everything(batch), true)


def test_what_lies_in_the_padding_reaches_no_gradient():
    """If the loss of the padding or of the next client's samples is infinite, no gradient becomes NaN from 0·∞."""
    data = np.array([[1.0, 2.0, 0.0, 0.0], [3.0, 4.0, 5.0, 6.0]])
    samples = Samples(data.ravel(), jnp.asarray(0), jnp.asarray(2), 4, False)
    logarithm = lambda x, y, batch: jnp.mean(jnp.log(x * batch))  # noqa: E731
    extended = Bilevel(logarithm, logarithm).over_batches()
    value, slope = jax.value_and_grad(extended.inner)(jnp.asarray(0.5), None, samples.batch(jax.random.key(0), None))
    assert float(value) == pytest.approx(np.log([0.5, 1.0]).mean(), rel=4 * EPS)
    assert float(slope) == pytest.approx(2.0, rel=4 * EPS)


@pytest.mark.parametrize("key", [None, 5])
def test_samples_in_turn_are_each_its_own(key):
    """`in_turn` takes every sample once, in place and from a copy; without a key, in the client's own order."""
    order = None if key is None else jax.random.key(key)
    numbered = Clients(*[[np.arange(n) + 10 * i for i, n in enumerate(SIZES)]] * 2).inner
    for i, size in enumerate(SIZES):
        turns = []
        for apart in (True, False):
            take, bound, count = replace(window(numbered, i), unbatched=apart).in_turn(order, None)
            assert (bound, int(count)) == (4, size)
            turns.append([take(j).tolist() for j in range(size)])
        assert turns[0] == turns[1]
        own = [[10 * i + n] for n in range(size)]
        assert turns[0] == own if key is None else sorted(turns[0]) == own


def test_one_client_reads_samples_in_turn_without_a_copy():
    """Samples of a single client are read in turn without a copy.

    If clients are vectorised, a walk holds all their samples in its program's memory; a single client's walk holds
    none.
    """
    values = np.ones((500, 64))

    def memory(apart):
        def walk(values):
            samples = Samples(values, jnp.asarray(0), jnp.asarray(500), 500, True, unbatched=apart)
            take, bound, _ = samples.in_turn(jax.random.key(0), None)
            return jax.lax.fori_loop(0, bound, lambda j, total: total * 0.5 + take(j)[0], jnp.zeros(64))

        return jax.jit(walk).lower(values).compile().memory_analysis().temp_size_in_bytes

    assert memory(True) < values.nbytes / 10 < values.nbytes < memory(False)


def test_a_full_batch_of_equal_clients_is_not_padded():
    array = np.arange(24.0).reshape(4, 3, 2)
    rows = Clients(array, array).inner
    batch = window(rows, 2, longest=3, equal=True).batch(jax.random.key(0), None)
    np.testing.assert_array_equal(batch, array[2])


def test_weights_are_normalised():
    data = entries()
    assert Clients(data, data).weights.tolist() == [0.25] * 4
    assert Clients(data, data, weights="size").weights.tolist() == (SIZES / 10).tolist()
    by_inner = Clients(data, data[::-1], weights="size").weights
    assert by_inner.tolist() == (SIZES[::-1] / 10).tolist()
    assert Clients(data, data, weights=[1, 1, 4, 2]).weights.tolist() == [0.125, 0.125, 0.5, 0.25]


def test_clients_local_steps_are_the_populations_or_else_the_algorithms():
    make = lambda own: Client(  # noqa: E731
        Bilevel(loss, loss), SimpleNamespace(), SimpleNamespace(), jnp.asarray(0), jnp.asarray(1.0), None, own
    )
    assert make({}).local_steps(7) == 7
    assert int(make({"local_steps": jnp.asarray(3)}).local_steps(7)) == 3


@pytest.mark.parametrize("field", ["weights", "capacity"])
@pytest.mark.parametrize("given", [[1, "x"], {"a": 1}, [[1], [1, 1]], "some"])
def test_what_holds_no_numbers_is_refused_by_name(field, given):
    with refuses(f"Clients.{field}", given):
        Clients([np.ones((3, 1)), np.ones((3, 1))], **{field: given})
