"""The task of clients' weights spoils labels of the chosen clients only, and its hypergradient has a closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import fedbilevel as fb
from fedbilevel.oracles.exact import implicit_by_cg, solve_inner
from fedbilevel.oracles.population import Population
from fedbilevel.tasks.client_weights import client_weights, numbered, weights
from fedbilevel.tasks.hyper_cleaning import hyper_cleaning

NON_IID = {"partition_by": "dirichlet", "partition_options": {"alpha": 0.5, "minimum": 2}}


def test_the_hypergradient_is_what_the_page_says():
    """The hypergradient is −M s_i (a_i − Σ_k s_k a_k), with s = softmax(x) and a_i = p_i ⟨v, ∇ℓ_i⟩, as the page says.

    The vector v is computed by a dense solve. The M = 3 clients differ in size and in their labels.
    """
    task = client_weights(clients=3, ridge=0.05, **NON_IID)
    x = jnp.asarray(np.random.default_rng(0).normal(size=3))
    population, start = Population.of(task.problem, task.clients), jax.tree.map(np.float64, task.y0)
    y = solve_inner(population, x, start).y
    found, _ = implicit_by_cg(population, x, y)
    flat, unflat = ravel_pytree(y)
    p, s = task.clients.weights, np.asarray(jax.nn.softmax(x))
    rows = [(task.clients.outer.row(i), task.clients.inner.row(i)) for i in range(3)]

    def mean_inner(y):
        return sum(p[i] * task.problem.inner(x, unflat(y), inner) for i, (_, inner) in enumerate(rows))

    def own_loss(y, i):  # on training samples, by the outer loss, which has neither ridge nor weight
        return task.problem.outer(x, unflat(y), rows[i][1])

    def mean_outer(y):
        return sum(p[i] * task.problem.outer(x, unflat(y), outer) for i, (outer, _) in enumerate(rows))

    v = np.linalg.solve(jax.jit(jax.hessian(mean_inner))(flat), jax.jit(jax.grad(mean_outer))(flat))
    own = jax.jit(jax.grad(own_loss), static_argnums=1)
    a = np.array([p[i] * (v @ own(flat, i)) for i in range(3)])
    np.testing.assert_allclose(found.hypergradient, -3 * s * (a - s @ a), rtol=1e-5, atol=1e-8)
    assert np.ptp(a) > 1e-3


def test_the_chosen_clients_alone_have_wrong_labels():
    """Only the chosen clients have wrong labels, a share of corruption·9/10 = 0.54 of their training labels.

    A replaced label is drawn from ten classes, and one time in ten it is the right one. The other labels are those of
    the split of hyper_cleaning.
    """
    task, clean = client_weights(spoilt=1 / 3, corruption=0.6), hyper_cleaning(corruption=0.0)
    rates = np.array([
        np.mean(task.clients.inner.row(i)["label"] != clean.clients.inner.row(i)["label"]) for i in range(18)
    ])  # fmt: skip
    assert np.sum(rates > 0) == 6
    assert np.all((rates == 0) | ((rates > 0.25) & (rates < 0.85)))  # 40 labels: within 4 standard errors of 0.54
    assert float(task.metrics["spoilt_weight"](task.x0, task.y0)) == pytest.approx(1 / 3)
    shift = jnp.asarray(np.where(rates > 0, -20.0, 0.0))
    assert float(task.metrics["spoilt_weight"](shift, task.y0)) < 1e-6
    assert float(jnp.mean(weights(shift))) == pytest.approx(1)
    for i in range(18):
        np.testing.assert_array_equal(task.clients.outer.row(i)["label"], clean.clients.outer.row(i)["label"])


@pytest.mark.slow
def test_the_clients_with_wrong_labels_lose_their_weight():
    """With steps that adapt, SimFBO lowers the weight of clients with wrong labels from a half to less than a fifth."""
    task = client_weights()
    run = fb.solve(fb.SimFBO(batch_size=None, local_steps=1), task.problem, task.clients, task.x0, task.y0, rounds=60)
    assert float(task.metrics["spoilt_weight"](run.x, run.y)) < 0.2


@pytest.mark.parametrize("wrong", [{"spoilt": 1.5}, {"corruption": -0.1}, {"validation": 1.0}, {"ridge": -1.0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(fb.errors.ConfigurationError) as error:
        client_weights(**wrong)
    assert next(iter(wrong)) in str(error.value)


def test_inner_samples_get_the_number_of_their_client_and_all_else_stays():
    """`numbered` adds to each inner sample the number of its client, and changes nothing else.

    The arrays of the clients are padded, and the padding is dropped.
    """
    rows = np.arange(24.0).reshape(3, 4, 2)
    clients = fb.Clients(rows, rows + 100, inner_sizes=[2, 4, 1], weights="size", local_steps=[1, 2, 3])
    found = numbered(clients)
    for i, size in enumerate((2, 4, 1)):
        row = found.inner.row(i)
        np.testing.assert_array_equal(row["samples"], rows[i, :size] + 100)
        np.testing.assert_array_equal(row["client"], np.full(size, i))
    assert found.outer is clients.outer
    assert found.own is clients.own
    np.testing.assert_allclose(found.weights, [2 / 7, 4 / 7, 1 / 7])
    assert list(clients.inner.size) == [2, 4, 1]
    assert not isinstance(clients.inner.values, dict)
