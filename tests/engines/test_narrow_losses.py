"""Losses that compute in bfloat16, or again in the derivatives (jax.checkpoint), and variables of several dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fixed_steps import fixed
from representatives import slow_but

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(3, 16, 4)).astype(np.float32)
WEIGHTS = np.array([1.0, -0.5, 0.25, 2.0], np.float32)
CLIENTS = fb.Clients([{"u": u, "target": np.tanh(u @ WEIGHTS)} for u in ROWS])
START = np.full((4, 4), 0.25, np.float32) + np.eye(4, dtype=np.float32)
UNIT = 2.0**-9  # half a unit in the last place of bfloat16, which has 8 significant bits


def loss_of(dtype, again):
    """Return the loss of a network with two layers, x and y, whose first layer computes in `dtype`.

    With `again`, the first layer is computed again in the derivatives.
    """

    def layer(x, u):
        return jnp.tanh(u.astype(dtype) @ x.astype(dtype)).astype(jnp.float32)

    first = jax.checkpoint(layer) if again else layer
    return lambda x, y, batch: jnp.mean((first(x, batch["u"]) @ y - batch["target"]) ** 2)


def simfbo(dtype, again):
    fit = loss_of(dtype, again)
    problem = fb.Bilevel(fit, lambda x, y, batch: fit(x, y, batch) + 0.1 * jnp.sum(y**2))
    result = fb.solve(fixed(fb.SimFBO(batch_size=None)), problem, CLIENTS, START, np.zeros(4, np.float32), rounds=20)
    return result.x, result.y


def fedavg(dtype, again):
    fit = loss_of(dtype, again)
    problem = fb.SingleLevel(lambda xy, batch: fit(xy["x"], xy["y"], batch))
    start = {"x": START, "y": np.zeros(4, np.float32)}
    result = fb.solve(fb.FedAvg(lr=0.05, batch_size=None), problem, CLIENTS, start, rounds=20)
    return result.x["x"], result.x["y"]


METHODS = {"SimFBO": simfbo, "FedAvg": fedavg}


@pytest.mark.parametrize("method", slow_but("FedAvg", of=METHODS))
def test_a_loss_in_bfloat16_trains_parameters_in_float32(method):
    """A loss in bfloat16 trains parameters in float32.

    The features have rounding errors of a few UNIT, which is half the spacing of bfloat16 at 1, and the errors of the
    parameters are about as large.
    """
    wide, narrow = METHODS[method](jnp.float32, False), METHODS[method](jnp.bfloat16, False)
    for expected, computed in zip(wide, narrow, strict=True):
        assert computed.dtype == jnp.float32
        assert 0 < np.abs(computed - expected).max() < 8 * UNIT
    assert np.abs(wide[0] - START).max() > 16 * UNIT  # x has moved by more than the error
    assert np.abs(wide[1]).max() > 16 * UNIT


@pytest.mark.parametrize("method", slow_but("FedAvg", of=METHODS))
def test_a_layer_that_is_computed_again_gives_the_same_numbers(method):
    for expected, computed in zip(METHODS[method](jnp.float32, False), METHODS[method](jnp.float32, True), strict=True):
        np.testing.assert_allclose(computed, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_computed_again_has_the_same_inner_solution():
    """A layer that is computed again gives the same inner solution in float32, with the products of Newton's method.

    JAX's 64-bit mode is on in these tests.
    """

    def solution(again):
        fit = loss_of(jnp.float32, again)
        problem = fb.Bilevel(fit, lambda x, y, batch: fit(x, y, batch) + 0.1 * jnp.sum(y**2))
        return fb.inner_solution(problem, CLIENTS, START, np.zeros(4, np.float32)).y

    assert solution(True).dtype == jnp.float32
    np.testing.assert_allclose(solution(True), solution(False), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("x0", [0.0, jnp.log(1.0), np.float16(0), np.zeros(())], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("y_dtype", slow_but(np.float32, of=[np.float32, np.float64]))
def test_a_scalar_x_may_have_another_dtype_than_y_and_the_samples(x0, y_dtype):
    """A scalar x may have another dtype than y and the samples, and keeps it.

    The inner loss is float32 at a Python number, and would be float64 after the first step on x.
    """
    rows = [{"u": u, "target": np.tanh(u @ WEIGHTS)} for u in ROWS]
    mean = lambda y, batch: jnp.mean((batch["u"] @ y - batch["target"]) ** 2)  # noqa: E731
    problem = fb.Bilevel(lambda x, y, b: mean(y, b), lambda x, y, b: mean(y, b) + 10**x * jnp.sum(y**2))
    y0 = np.zeros(4, y_dtype)
    result = fb.solve(fixed(fb.SimFBO(batch_size=None)), problem, fb.Clients(rows, rows), x0, y0, rounds=20)
    assert (result.x.dtype, result.y.dtype) == (np.asarray(x0).dtype, y_dtype)
    assert result.x < 0  # the target has no noise, so that a smaller penalty is better


FIVE = fb.FedAvg(local_steps=5, lr=1.0)


@pytest.mark.parametrize("dtype", slow_but("bfloat16", of=["bfloat16", "float16"]))
@pytest.mark.parametrize("method", [FIVE, fb.Asynchronous(FIVE, wait_for=1000)])
def test_the_mean_of_many_replies_of_16_bits_has_one_rounding_error(dtype, method):
    """The mean of many replies of 16 bits has one rounding error.

    All 1,000 clients change x by 5. If the terms 5/1000 were added in bfloat16, their sum would not grow beyond 2.
    """
    problem = fb.SingleLevel(lambda x, rows: -jnp.sum(x.astype(jnp.float32)) * rows.mean())
    clients = fb.Clients(np.ones((1000, 1), np.float32))
    result = fb.solve(method, problem, clients, jnp.zeros(2, dtype), rounds=1, engine=fb.Local(chunk=1))
    assert result.x.dtype == dtype
    np.testing.assert_allclose(result.x.astype(float), 5.0, rtol=2.0**-9)
