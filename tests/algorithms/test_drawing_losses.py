"""Do losses that draw get a new key for each sample of each step of each client in each round, on every engine?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import Case

import fedbilevel as fb
from fedbilevel.core.client import Client, Samples
from fedbilevel.core.problem import Keyed
from fedbilevel.oracles.fixed_x import inner_loss_at
from fedbilevel.parts import SVRG, LocalImplicit, LocalSGD
from fedbilevel.tasks.quadratic import inner, outer
from refusals import refuses
from representatives import slow_but

NOISY = fb.Bilevel(
    lambda x, y, batch, key: outer(x, y + 0.1 * jax.random.normal(key, y.shape), batch),
    lambda x, y, batch, key: inner(x, y * jax.random.bernoulli(key, 0.8, y.shape), batch),
)
AGREEMENT = {
    "SimFBO, losses that draw": Case(fb.SimFBO(batch_size=2, local_steps=2), problem=NOISY, slow=True),
    "SimFBO, losses that draw, all samples": Case(fb.SimFBO(batch_size=None, local_steps=2), problem=NOISY, slow=True),
    "FedNest, losses that draw, epochs": Case(
        fb.FedNest(batch_size=2, inner=SVRG(local_epochs=1)), problem=NOISY, slow=True
    ),
    "RABO, losses that draw": Case(
        fb.RABO(batch_size=2, inner=LocalSGD(local_steps=5), hypergradient=LocalImplicit()), problem=NOISY, slow=True
    ),
}

SIZES = 3, 1, 4
LONGEST = max(SIZES)
ROWS = [{"i": np.full(n, i), "s": np.arange(n)} for i, n in enumerate(SIZES)]
CLIENTS = fb.Clients(ROWS)
DRAWN = fb.SingleLevel(lambda x, batch, key: jnp.mean(x[batch["i"], batch["s"]]) * jax.random.uniform(key))
"""A loss whose derivative by x[i, s] is u/n_i, where u is the number that client i drew for its sample s."""


def draws(rounds, steps=1, **options):
    """Return what each sample drew, added up over the local steps of the last round, with the clients in order."""
    method = fb.FedAvg(lr=1.0, local_steps=steps, batch_size=None)
    start = np.zeros((len(SIZES), LONGEST))
    x = [fb.solve(method, DRAWN, CLIENTS, start, rounds=n, **options).x if n else start for n in (rounds - 1, rounds)]
    taken = np.asarray(x[0] - x[1]) * len(SIZES)
    return np.concatenate([taken[i, :n] * n for i, n in enumerate(SIZES)])


def test_each_sample_of_each_client_in_each_round_and_step_has_a_key_of_its_own():
    """In two rounds, and in a second local step, no two of the 8 samples' uniform numbers agree to 1e-6.

    Numbers that agree would come from the same key.
    """
    first, second = draws(1), draws(2)
    step = draws(1, steps=2) - first
    found = np.concatenate([first, second, step])
    assert found.min() > 0
    assert found.max() < 1
    gaps = np.abs(found[:, None] - found) + np.eye(len(found))
    assert gaps.min() > 1e-6
    np.testing.assert_array_equal(draws(1), first)
    assert np.abs(draws(1, key=1) - first).min() > 1e-6


@pytest.mark.parametrize(
    "engine",
    slow_but(
        fb.Reference(),
        fb.Local(chunk=3),
        of=[fb.Reference(), fb.Local(chunk=1), fb.Local(chunk=3), fb.Local(stream=True), fb.Local(devices=2)],
    ),
    ids=str,
)
def test_keys_depend_neither_on_the_engine_nor_on_padding(engine):
    np.testing.assert_allclose(draws(2, engine=engine), draws(2), rtol=1e-12)


def client(problem, size=4):
    rows = Samples({"a": jnp.arange(1.0, size + 1)}, jnp.asarray(0), jnp.asarray(size), longest=size, equal=True)
    return Client(problem, rows, rows, jnp.asarray(0), jnp.asarray(1.0), None, batch_size=2)


def test_many_steps_at_one_x_draw_anew():
    """A loss that draws is drawn anew in each of many steps at one x.

    A part of the loss that does not depend on y may depend on the key, so that it is not computed once for each sample.
    """
    problem = fb.Bilevel(
        lambda x, y, batch: jnp.mean(batch["a"]) * y,
        lambda x, y, batch, key: jnp.mean(batch["a"]) * x * y * jax.random.uniform(key),
    )
    here, x, y = client(problem), jnp.array(2.0), jnp.array(3.0)
    loss = inner_loss_at(here, x, y, 2, steps=20)
    found = [loss.gradient(y, jax.random.key(k)) for k in range(2)]
    for k, value in enumerate(found):
        batch = here.inner_batch(jax.random.key(k), 2)
        (a, b), keys = batch.samples["a"], batch.keys
        expected = x * (a * jax.random.uniform(keys[0]) + b * jax.random.uniform(keys[1])) / 2
        np.testing.assert_allclose(value, expected, rtol=1e-12)
    assert not np.isclose(*found)


def test_the_steps_of_an_epoch_have_keys_of_their_own():
    here = client(DRAWN)
    _, draw = here.outer.in_epochs(jax.random.key(0), 2, 2, False)
    keys = [jax.random.key_data(here.outer_batch(draw(k)).keys) for k in range(4)]
    assert len(np.unique(np.concatenate(keys), axis=0)) == 8


def test_only_a_loss_that_declares_a_key_gets_one():
    def with_a_default(x, y, batch, scale=1.0):
        return scale * jnp.mean(batch["a"]) * y

    def with_a_key(x, y, batch, key=None):
        return jnp.mean(batch["a"]) * y * jax.random.uniform(key)

    here = client(fb.Bilevel(with_a_default, with_a_key))
    assert here.problem.draws == ("inner",)
    assert isinstance(here.inner_batch(jax.random.key(0)), Keyed)
    assert not isinstance(here.outer_batch(jax.random.key(0)), Keyed)


@pytest.mark.slow
def test_minimax_and_compositional_losses_draw():
    """Minimax and compositional losses may draw.

    With F(y, r(x)) = ½y² and r(x) = x + ε, where E ε = 0, the minimum is at x = 0. In a minimax problem, −f draws the
    same numbers as f.
    """
    minimax = fb.Minimax(lambda x, y, batch, key: jax.random.uniform(key) * x * y - y**2)
    assert minimax.draws == ("outer", "inner")
    batch = client(minimax).outer_batch(jax.random.key(0))
    assert minimax.outer(1.0, 2.0, batch) == -minimax.inner(1.0, 2.0, batch)
    compositional = fb.Compositional(
        lambda y, batch: jnp.mean(y**2) / 2, lambda x, batch, key: x + 0.1 * jax.random.normal(key)
    )
    assert compositional.draws == ("inner",)
    rows = fb.Clients([np.zeros(64)] * 4, [np.zeros(64)] * 4)
    method = fb.SimFBO(batch_size=None, client_lr=0.1, server_lr=0.1)
    end = fb.solve(method, compositional, rows, np.array(1.0), np.array(0.0), rounds=200)
    # the mean of 256 samples of deviation 0.1 has a deviation of 0.006 in each round; without steps x would be 1
    assert abs(end.x) < 0.05
    assert abs(end.x) > 1e-4  # without noise x ends at 6e-5


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (
            lambda: fb.Bilevel(lambda x, y, b: 0.0, lambda x, y, b, key, more: 0.0),
            ("Bilevel.inner", "(x, y, b, key, more)"),
        ),
        (
            lambda: fb.WholeLoss(lambda x, y, samples, valid, key: 0.0),
            ("WholeLoss.function", "(x, y, samples, valid, key)"),
        ),
        (
            lambda: fb.SimpleBilevel(None, lambda x, b, key: 0.0, lambda x: x),
            ("SimpleBilevel.inner", "(x, b, key)"),
        ),
    ],
)
def test_what_cannot_draw_is_refused(make, refusal):
    with refuses(*refusal):
        make()
