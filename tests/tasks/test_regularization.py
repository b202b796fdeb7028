"""The task of regularization coefficients has the losses of the formulas, and its solution shrinks noise most."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import data
from fedbilevel.tasks.regularization import logits, regularization, with_one
from implicit import implicit_gradient
from refusals import refuses

INFORMATIVE, NOISE = 2, 3


@pytest.fixture(scope="module")
def made_up():
    """Replace the table a9a by one with 240 training rows.

    Two of its features tell its two classes apart, and three do not.
    """
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, INFORMATIVE + NOISE)).astype(np.float32)
    label = (rows[:, :INFORMATIVE].sum(1) + 0.5 * rng.normal(size=300) > 0).astype(np.int32)
    halves = (rows[:240], label[:240]), (rows[240:], label[240:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(data.TABLES, "a9a", lambda name: (*halves, 2))
        yield data.load_table("a9a")


@pytest.fixture(scope="module")
def task(made_up):
    return regularization(data="a9a", clients=3, partition_by="quantity", partition_options={"alpha": 1.0})


def mean_over(task, rows, loss, x, y):
    each = zip(task.clients.weights, (rows.row(i) for i in range(len(task.clients))), strict=True)
    return sum(p * loss(x, y, row) for p, row in each)


def test_two_classes_have_one_logit(task):
    """With two classes there is one logit aᵀw, and the losses are those of the formulas.

    The outer loss is the mean of −log σ(±aᵀw). The last entry of every row a is 1. The inner loss adds exp(x_l) w_l²
    for each entry l of w.
    """
    row = task.clients.inner.row(1)
    x, w = np.linspace(-3, 1, 6), np.linspace(1, -2, 6)
    np.testing.assert_array_equal(row["row"][:, -1], 1)
    z = row["row"].astype(float) @ w * (2 * row["label"] - 1)
    loss = np.log1p(np.exp(-z)).mean()
    found = task.problem.inner(jnp.asarray(x), jnp.asarray(w)[:, None], row)
    assert float(found) == pytest.approx(loss + np.sum(np.exp(x) * w**2), rel=1e-6)  # rows are float32
    assert float(task.problem.outer(None, jnp.asarray(w)[:, None], row)) == pytest.approx(loss, rel=1e-6)
    slope = jax.grad(task.problem.inner)(jnp.asarray(x), jnp.asarray(w)[:, None], row)
    np.testing.assert_allclose(slope, np.exp(x) * w**2, rtol=1e-12)
    np.testing.assert_allclose(np.exp(task.x0), 0.01, rtol=1e-12)


@pytest.mark.slow
def test_the_hypergradient_is_the_slope_of_the_validation_loss(task):
    """The implicit hypergradient agrees with central differences of Φ(x) = F(y*(x)), with y*(x) by Newton's method.

    The error of the differences is of the order of h² + ε/h, which is 1e-10 for h = 1e-5.
    """
    whole = jax.jit(lambda x, w: mean_over(task, task.clients.inner, task.problem.inner, x, w[:, None]))
    slope, curve = jax.jit(jax.grad(whole, 1)), jax.jit(jax.hessian(whole, 1))
    measured = jax.jit(lambda w: mean_over(task, task.clients.outer, task.problem.outer, None, w[:, None]))

    def best(x):
        w = jnp.zeros(6)
        for _ in range(8):
            w = w - jnp.linalg.solve(curve(x, w), slope(x, w))
        np.testing.assert_allclose(slope(x, w), 0, atol=1e-14)
        return w

    x = jnp.linspace(-5.0, -2.0, 6)
    by_differences = [(measured(best(x + h)) - measured(best(x - h))) / 2e-5 for h in 1e-5 * np.eye(6)]
    found = implicit_gradient(task.problem, task.clients, x, best(x)[:, None])
    np.testing.assert_allclose(found.hypergradient, by_differences, atol=1e-9)
    assert np.abs(by_differences).min() > 1e-6


@pytest.mark.slow
def test_noise_is_shrunk_most(task):
    """Every feature that predicts nothing ends with a larger coefficient than every feature that predicts."""
    steps = fb.XYV(x=2.0, y=0.5, v=0.5)
    algorithm = fb.SimFBO(local_steps=1, batch_size=None, client_lr=0.1, server_lr=steps)
    result = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=200, metrics=task.metrics)
    x = np.asarray(result.x)
    assert x[INFORMATIVE : INFORMATIVE + NOISE].min() > x[:INFORMATIVE].max()
    assert result.history["test_loss"][-1] < np.log(2)


def test_metrics_are_those_of_the_test_rows(task, made_up):
    w = np.array([1.0, 0.8, 0.1, -0.2, 0.3, 0.05])
    z = with_one(made_up.standardised().test_images).astype(float) @ w
    right = (z > 0) == made_up.test_labels
    loss = np.log1p(np.exp(-z * (2 * made_up.test_labels - 1))).mean()
    found = {name: float(metric(None, jnp.asarray(w)[:, None])) for name, metric in task.metrics.items()}
    assert found == pytest.approx({"test_accuracy": right.mean(), "test_loss": loss}, rel=1e-6)


def test_more_classes_have_a_logit_each():
    task = regularization(clients=10, partition_by="one_label", holdout=0.2)
    assert task.y0.shape == (65, 10)
    assert list(task.metrics) == ["validation_accuracy", "validation_loss"]
    for i in range(10):
        assert set(task.clients.inner.row(i)["label"]) | set(task.clients.outer.row(i)["label"]) == {i}
    y, row = jnp.arange(650.0).reshape(65, 10), jnp.ones((2, 65))
    np.testing.assert_array_equal(logits(y, row), row @ y)
    assert float(task.problem.outer(task.x0, task.y0, task.clients.outer.row(0))) == pytest.approx(np.log(10))
    again = regularization(clients=10, partition_by="one_label", holdout=0.2)
    np.testing.assert_array_equal(again.clients.inner.values["row"], task.clients.inner.values["row"])


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"data": "covtyp"}, ("data", "covtyp", "digits", "covtype")),
        ({"validation": 1.0}, ("validation", 1.0)),
        ({"ridge": 0.0}, ("ridge", 0.0)),
    ],
)
def test_wrong_options_are_named(options, refusal):
    with refuses(*refusal):
        regularization(**options)
