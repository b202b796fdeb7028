"""Hyper-cleaning spoils as many labels as asked for, each weight is its own sample's, and the AUC counts pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.metrics import directions
from fedbilevel.core.ragged import Ragged
from fedbilevel.data import load
from fedbilevel.tasks.hyper_cleaning import auc, cleaning_weights, hyper_cleaning, spoiled
from refusals import refuses

NON_IID = {"partition_by": "dirichlet", "partition_options": {"alpha": 0.5, "minimum": 2}}


@pytest.fixture(scope="module")
def task():
    """Return the task with clients of unequal size, and with half of the labels drawn anew."""
    return hyper_cleaning(clients=7, corruption=0.5, ridge=0.05, **NON_IID)


@pytest.fixture(scope="module")
def point(task):
    """Return a random x, and a y that is not the start."""
    rng = np.random.default_rng(0)
    y = jax.tree.map(lambda leaf: jnp.asarray(0.1 * rng.normal(size=leaf.shape)), task.y0)
    return jnp.asarray(rng.normal(size=task.x0.shape)), y


def true_labels():
    """Return the true label of each image that clients have; hardly any image of the digits occurs twice."""
    found = load("digits").standardised()
    return {
        image.tobytes(): label
        for image, label in zip(found.train_images.reshape(-1, 64), found.train_labels, strict=True)
    }


def test_the_loss_and_the_gradient_of_each_weight(task, point):
    """The losses and the derivative of the inner loss in each weight are those of the formulas.

    g_i is the mean of σ(x_ij)·CE_ij over the samples j of client i, plus ridge·‖y‖². Its derivative in x_ij is
    σ(x_ij)(1 − σ(x_ij))·CE_ij/n_i, and its derivatives in the other entries of x are 0.
    """
    x, (body, head) = point
    row = task.clients.inner.row(3)
    n = len(row["label"])
    assert n < task.x0.shape[1]
    logits = np.asarray(row["image"] @ head["weight"] + head["bias"], float)
    loss = np.log(np.exp(logits).sum(1)) - logits[np.arange(n), row["label"]]
    weight = 1 / (1 + np.exp(-np.asarray(x[3, :n])))
    value, gradient = jax.value_and_grad(task.problem.inner)(x, (body, head), row)
    size = float(np.sum(np.square(head["weight"])) + np.sum(np.square(head["bias"])))
    assert float(value) == pytest.approx(np.mean(weight * loss) + 0.05 * size, rel=1e-6)  # images are float32
    expected = np.zeros(x.shape)
    expected[3, :n] = weight * (1 - weight) * loss / n
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-15)
    outer = task.problem.outer(x, (body, head), row)
    assert float(outer) == pytest.approx(loss.mean(), rel=1e-6)


def test_a_client_needs_its_own_row_alone(task, point):
    """A client's loss and gradients depend on the client's row of x only, without its padding.

    An x that has only this row, of shape (1, longest), gives the same numbers as an x with the rows of all clients.
    """
    x, y = point
    gradients = jax.jit(jax.value_and_grad(task.problem.inner, (0, 1)))
    for i in (0, 6):
        row = task.clients.inner.row(i)
        n = len(row["label"])
        only = jnp.full_like(x, jnp.nan).at[i, :n].set(x[i, :n])
        whole = gradients(only, y, row)
        alone = gradients(only[i : i + 1], y, row)
        for a, b, c in zip(*map(jax.tree.leaves, (whole, alone, gradients(x, y, row))), strict=True):
            here, there = (a[i], b[0]) if a.shape == x.shape else (a, b)
            np.testing.assert_allclose(here, there, rtol=1e-12, atol=1e-15)
            np.testing.assert_array_equal(a, c)
    assert task.x0.shape == (7, task.clients.inner.size.max())


def test_as_many_labels_are_wrong_as_said():
    """A share ρ(1 − 1/C) of the labels is wrong, and all wrong classes are equally frequent.

    A share ρ of the labels is drawn anew from C classes, of which one is right. The shares are within four standard
    errors. With ρ = 0 no label changes.
    """
    n, classes, rate = 100_000, 5, 0.4
    label = np.random.default_rng(0).integers(classes, size=n).astype(np.int32)
    samples = Ragged({"label": label}, np.array([0, 70_000]), np.array([70_000, 30_000]))
    found = spoiled(samples, classes, rate, seed=1).values
    wrong = rate * (1 - 1 / classes)
    assert abs(found["corrupted"].mean() - wrong) < 4 * np.sqrt(wrong * (1 - wrong) / n)
    share = np.bincount((found["label"] - label) % classes, minlength=classes) / n
    each = rate / classes
    assert np.all(np.abs(share[1:] - each) < 4 * np.sqrt(each * (1 - each) / n))
    np.testing.assert_array_equal(found["corrupted"], found["label"] != label)
    np.testing.assert_array_equal(found["row"], np.repeat([0, 1], [70_000, 30_000]))
    np.testing.assert_array_equal(found["place"], np.concatenate([np.arange(70_000), np.arange(30_000)]))
    np.testing.assert_array_equal(spoiled(samples, classes, 0.0, seed=1).values["label"], label)


def test_only_training_labels_are_spoilt(task):
    truth = true_labels()
    inner, outer = task.clients.inner.values, task.clients.outer.values
    label = np.array([truth[image.tobytes()] for image in inner["image"]])
    np.testing.assert_array_equal(inner["label"] != label, inner["corrupted"])
    assert 0.3 < inner["corrupted"].mean() < 0.6
    np.testing.assert_array_equal([truth[image.tobytes()] for image in outer["image"]], outer["label"])
    assert len(inner["label"]) + len(outer["label"]) == 1442


def test_auc_counts_pairs_and_ties():
    """The AUC is the share of pairs in which the first number is larger than the second; a tie counts one half."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(1, 5, size=40), rng.integers(4, size=25)
    gap = a[:, None] - b[None]
    by_pairs = np.mean((gap > 0) + 0.5 * (gap == 0))
    assert float(auc(jnp.asarray(a), jnp.asarray(b))) == pytest.approx(by_pairs, rel=1e-12)
    assert by_pairs not in (0, 0.5, 1)


def test_metrics_look_at_the_weights_of_both_kinds(task):
    """The metrics are the AUC and the mean weights of samples with right and with wrong labels.

    At the start all weights are σ(0) = ½. With x = 1 for right labels and −2 for wrong ones, the AUC is 1, and the
    mean weights are σ(1) and σ(−2). The padding of x is not read.
    """
    inner = task.clients.inner.values
    names = ["test_accuracy", "auc", "clean_weight", "corrupted_weight"]
    assert list(task.metrics) == names
    assert directions(task.metrics) == dict(zip(names, [True, True, True, False], strict=True))
    start = [float(task.metrics[name](task.x0, task.y0)) for name in names]
    assert start[1:] == pytest.approx([0.5, 0.5, 0.5], rel=1e-12)
    known = np.full(task.x0.shape, np.nan)
    known[inner["row"], inner["place"]] = np.where(inner["corrupted"], -2.0, 1.0)
    found = [float(task.metrics[name](jnp.asarray(known), task.y0)) for name in names[1:]]
    assert found == pytest.approx([1, 1 / (1 + np.exp(-1)), 1 / (1 + np.exp(2))])
    clean, corrupted = cleaning_weights(task, jnp.asarray(known))
    assert (clean.mean(), corrupted.mean()) == pytest.approx(tuple(found[1:]))
    assert len(corrupted) == inner["corrupted"].sum()
    assert list(hyper_cleaning(corruption=0.0, holdout=0.2).metrics) == ["validation_accuracy"]


@pytest.mark.slow
def test_weights_learn_which_labels_are_wrong():
    """SimFBO learns weights that tell wrong labels from right ones, and the model gains accuracy by them.

    An AUC of ½ is chance. This model, trained to convergence with equal weights, is right on 79 % of the test images,
    and on 95 % if it is trained on samples with right labels only.
    """
    task = hyper_cleaning(corruption=0.5)
    steps = fb.XYV(x=50.0, y=0.1, v=0.1)
    algorithm = fb.SimFBO(client_lr=fb.XYV(x=1e-3, y=0.05, v=0.05), server_lr=steps, radius=10.0)
    result = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=100, metrics=task.metrics)
    assert result.history["auc"][-1] > 0.95
    assert result.history["test_accuracy"][-1] > 0.92
    assert result.history["clean_weight"][-1] > 0.5 > result.history["corrupted_weight"][-1]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"corruption": 1.0}, ("corruption", 1.0, "at least 0 and below 1")),
        ({"corruption": float("nan")}, ("corruption", float("nan"))),
        ({"validation": 1.0}, ("validation", 1.0)),
        ({"network": "linaer"}, ("network", "linaer", "'linear'")),
        ({"hidden": (64,)}, ("hidden", (64,), "linear")),
    ],
)
def test_wrong_options_are_named(options, refusal):
    with refuses(*refusal):
        hyper_cleaning(**options)
