"""Tasks have the closed forms that they promise, keep training and validation samples apart, and refuse bad options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks import TASKS, hyper_representation, quadratic
from fedbilevel.tasks.quadratic import TiedUnits, solution
from fedbilevel.tasks.task import client_means
from implicit import implicit_gradient
from refusals import ANY, refuses


@pytest.mark.parametrize("condition", [10.0, 1e4])
@pytest.mark.parametrize("weights", [None, "other"])
def test_the_closed_form_is_stationary(condition, weights):
    """At the closed form (x*, y*) of the quadratic task, ∇y G and the dense hypergradient are 0, for any weights.

    The solution v of ∇²yy G·v = ∇y F also equals the v of the closed form. Two solves with Ā increase rounding errors
    by at most κ².
    """
    task = quadratic(condition=condition)
    clients = task.clients
    if weights:
        clients = fb.Clients(outer=clients.outer, inner=clients.inner, weights=np.arange(1.0, 11.0))
    exact = solution(clients)
    found = implicit_gradient(task.problem, clients, jnp.asarray(exact.x), jnp.asarray(exact.y))
    scale = 1e-13 * condition**2 * max(1.0, np.linalg.norm(exact.v))
    assert float(jnp.linalg.norm(found.inner_gradient)) < scale
    assert float(jnp.linalg.norm(found.hypergradient)) < scale
    np.testing.assert_allclose(found.v, exact.v, rtol=1e-6)


def test_the_squared_gradient_is_that_of_the_dense_hypergradient():
    """The metric `squared_gradient` of the quadratic task is the squared norm of the dense hypergradient.

    It is compared at an x that is not x*, with y*(x) = Ā⁻¹(B̄x + c̄) = y* + Ā⁻¹B̄(x − x*).
    """
    task = quadratic(condition=3.0, clients=3)
    exact, own = solution(task.clients), client_means(task.clients)
    a, b = (np.tensordot(task.clients.weights, own[name], 1) for name in "AB")
    x = exact.x + np.arange(1.0, 6.0)
    y = exact.y + np.linalg.solve(a, b) @ (x - exact.x)
    found = implicit_gradient(task.problem, task.clients, jnp.asarray(x), jnp.asarray(y))
    assert float(jnp.linalg.norm(found.inner_gradient)) < 1e-12
    np.testing.assert_allclose(
        task.metrics["squared_gradient"](jnp.asarray(x), None), found.hypergradient @ found.hypergradient, rtol=1e-12
    )


def test_the_closed_form_of_units_is_stationary():
    """The closed form of the quadratic task with units is stationary.

    The units have another scale than the core, and are tied to it, so that x* is not that of the core alone.
    """
    units = TiedUnits(3, scale=0.5, tie=0.1)
    task = quadratic(condition=2.0, units=3, unit_scale=0.5, tie=0.1)
    exact = solution(task.clients, units=units)

    def form(z):
        parts = jnp.asarray(z).reshape(4, -1)
        return {"core": parts[0], "units": parts[1:]}

    found = implicit_gradient(task.problem, task.clients, form(exact.x), form(exact.y))
    for part in (found.inner_gradient, found.hypergradient):
        assert max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(part)) < 1e-12
    assert float(task.metrics["relative_error"](form(exact.x), None)) < 1e-15
    alone = solution(task.clients)
    assert np.linalg.norm(exact.x[:5] - alone.x) > 0.01 * np.linalg.norm(alone.x)
    np.testing.assert_allclose(exact.x[5:10], exact.x[10:15], rtol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "refusal"), [({"tie": 0.1}, ("units", 0)), ({"units": 4, "tie": 0.25}, ("tie", 0.25))]
)
def test_ties_without_units_or_too_strong_are_refused(wrong, refusal):
    with refuses(*refusal):
        quadratic(condition=2.0, **wrong)


@pytest.mark.parametrize(
    ("task", "sizes", "refusal"),
    [
        ("quadratic", {"clients": 10**11}, ("clients", 10**11, "26,960 bytes")),
        ("quadratic", {"samples": (1, 10**12)}, ("", ANY, "1,664,000,000,003,664 bytes")),
        ("compositional", {"clients": 10**9}, ("clients", 10**9, "GB")),
        ("portfolio", {"clients": 10**11}, ("clients", 10**11, "GB")),
        ("saddle", {"clients": 10**9}, ("clients", 10**9, "GB")),
        ("location", {"targets": 10**9}, ("targets", 10**9, "GB")),
        ("few_shot", {"test_episodes": 10**9}, ("test_episodes", 10**9, "GB")),
        ("few_shot", {"tasks": 10**9}, ("tasks", 10**9, "GB")),
    ],
)
def test_what_does_not_fit_into_memory_is_refused_before_it_is_made(task, sizes, refusal):
    """A task that does not fit into memory is refused before its arrays are made.

    The sizes would need 2 TB or more. A client is counted with 16 bytes for each of its numbers, and with 2,000 bytes
    for its Python objects.
    """
    with refuses(*refusal):
        TASKS[task](**sizes)


def test_the_quadratic_is_what_it_says():
    """The quadratic task has matrices A_i of the given condition, and clients of different weights and sizes.

    The matrices B are not square. Without heterogeneity all clients have the same A.
    """
    task = quadratic(condition=50.0)
    inner = [task.clients.inner.row(i) for i in range(10)]
    for row in inner:
        assert np.linalg.cond(row["A"][0]) == pytest.approx(50.0)
    assert np.linalg.norm(inner[0]["A"][0] - inner[1]["A"][0]) > 0.1
    assert len(set(task.clients.weights)) == 10
    assert len(set(task.clients.inner.size)) > 1
    assert inner[0]["B"][0].shape == (8, 5)
    same = quadratic(heterogeneity=0.0, noise=0.0)
    rows = [same.clients.inner.row(i) for i in range(10)]
    np.testing.assert_allclose(rows[0]["A"][0], rows[9]["A"][0], atol=1e-15)


def test_halves_do_not_mix_and_cover_the_training_set():
    task = hyper_representation(clients=7, validation=0.3)
    sizes = task.clients.outer.size + task.clients.inner.size
    assert sizes.sum() == 1442
    assert np.all(np.abs(task.clients.outer.size / sizes - 0.3) < 1 / sizes)
    rows = [task.clients.outer.values["image"], task.clients.inner.values["image"]]
    seen = {image.tobytes() for image in rows[0]} & {image.tobytes() for image in rows[1]}
    assert len(seen) <= 1  # hardly any image of the digits occurs twice


@pytest.mark.parametrize("name", ["client_weights", "hyper_cleaning", "hyper_representation", "regularization"])
def test_the_outer_loss_gets_the_validation_share(name):
    """The outer loss gets the share `validation` of each client's samples, and the inner loss gets the others."""
    clients = TASKS[name](clients=4, validation=0.2).clients
    sizes = clients.outer.size + clients.inner.size
    assert sizes.sum() == 1442
    assert np.all(np.abs(clients.outer.size - 0.2 * sizes) < 1)


def test_a_holdout_takes_training_images_and_never_the_test_set():
    task, whole = hyper_representation(holdout=0.25), hyper_representation()
    assert list(task.metrics) == ["validation_accuracy"]
    assert list(whole.metrics) == ["test_accuracy"]
    total = lambda t: int(t.clients.outer.size.sum() + t.clients.inner.size.sum())  # noqa: E731
    assert total(task) == 1442 - round(0.25 * 1442)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"hidden": (32, 16)}, {"network": "cnn", "hidden": (4, 8, 16)}],
)
def test_a_few_rounds_learn(options):
    """Thirty rounds raise the accuracy on the digits from 10 %, which is chance, to more than 50 %."""
    task = hyper_representation(**options)
    algorithm = fb.SimFBO(local_steps=5, batch_size=32, client_lr=0.1, server_lr=0.1, radius=10.0)
    result = fb.solve(
        algorithm, task.problem, task.clients, task.x0, task.y0, rounds=30, cohort=5, metrics=task.metrics
    )
    assert result.history["test_accuracy"][-1] > 0.5


def test_seeds_reproduce():
    a, b, c = (hyper_representation(seed=seed) for seed in (3, 3, 4))
    assert jax.tree.all(jax.tree.map(jnp.array_equal, a.x0, b.x0))
    np.testing.assert_array_equal(a.clients.inner.values["label"], b.clients.inner.values["label"])
    assert not jax.tree.all(jax.tree.map(jnp.array_equal, a.x0, c.x0))


@pytest.mark.parametrize(
    ("task", "options", "refusal"),
    [
        ("quadratic", {"condition": 0.5}, ("condition", 0.5)),
        ("quadratic", {"samples": (3, 2)}, ("samples", (3, 2))),
        ("hyper_representation", {"network": "resnet"}, ("network", "resnet")),
        ("hyper_representation", {"validation": 0.0}, ("validation", 0.0)),
        ("hyper_representation", {"ridge": -1.0}, ("ridge", -1.0)),
    ],
)
def test_wrong_options_are_named(task, options, refusal):
    with refuses(*refusal):
        TASKS[task](**options)
