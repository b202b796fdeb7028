"""The selection task has the rows and signs of its data set and the losses of the formulas, and refuses bad options."""

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import data
from fedbilevel.tasks import selection
from refusals import refuses


def training(task):
    """Return the rows (m, n) and the signs (m,) of all clients."""
    rows = [task.clients.inner.row(i) for i in range(len(task.clients))]
    return tuple(np.concatenate([row[name] for row in rows]) for name in ("row", "sign"))


@pytest.fixture(scope="module")
def task():
    return selection(classes=(3, 5), clients=7, partition_by="dirichlet", partition_options={"alpha": 0.5}, seed=1)


@pytest.fixture(scope="module")
def points():
    return np.random.default_rng(4).normal(size=(2, 64)) * (np.arange(64) % 3 > 0)


def test_clients_hold_every_row_of_the_two_classes_once(task):
    digits = data.load("digits")
    ours = np.isin(digits.train_labels, (3, 5))
    expected = {
        (image.astype(np.float32).tobytes(), 1.0 if label == 5 else -1.0)
        for image, label in zip(digits.train_images[ours].reshape(-1, 64), digits.train_labels[ours], strict=True)
    }
    rows, signs = training(task)
    assert len(rows) == np.sum(ours)
    assert {(row.tobytes(), sign) for row, sign in zip(rows, signs.tolist(), strict=True)} == expected
    assert 0 == rows.min() < rows.max() == 1
    sizes = task.clients.inner.size
    assert len(set(sizes)) > 1
    np.testing.assert_allclose(task.clients.weights, sizes / sizes.sum())


def test_samples_are_as_many_of_each_class_and_the_same_for_a_seed():
    few, again, other = (training(selection(samples=60, clients=2, seed=seed)) for seed in (3, 3, 4))
    assert (np.sum(few[1] == 1), np.sum(few[1] == -1)) == (30, 30)
    np.testing.assert_array_equal(few[0], again[0])
    assert not np.array_equal(few[0], other[0])


def test_losses_and_metrics_are_those_of_the_formulas(task, points):
    """Losses and metrics are those of the formulas, to rounding.

    Pixels are multiples of 1/16, which float32 represents exactly. Metrics that are shares are float32 numbers.
    """
    digits, (rows, signs), (x, y) = data.load("digits"), training(task), points
    margins = signs * (rows.astype(np.float64) @ x)
    inner = np.mean(np.log1p(np.exp(-np.abs(margins))) + np.maximum(-margins, 0))
    ours = np.isin(digits.test_labels, (3, 5))
    tested, truth = digits.test_images[ours].reshape(-1, 64), digits.test_labels[ours]
    expected = {
        "test_accuracy": np.mean(np.where(tested @ x > 0, 5, 3) == truth),
        "average_test_accuracy": np.mean(np.where(tested @ y > 0, 5, 3) == truth),
        "train_loss": inner,
        "preference": np.sum(np.abs(x)) + x @ x / 2,
        "sparsity": np.mean(np.abs(x) <= 1e-3 * np.max(np.abs(x))),
    }
    found = {name: float(metric(x, y)) for name, metric in task.metrics.items()}
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-7)
    losses = {name: expected[name] for name in ("train_loss", "preference")}
    assert {name: found[name] for name in losses} == pytest.approx(losses, rel=1e-12)
    assert found["sparsity"] >= 1 / 3
    weighted = sum(
        p * float(task.problem.inner(x, None, task.clients.inner.row(i))) for i, p in enumerate(task.clients.weights)
    )
    assert weighted == pytest.approx(found["train_loss"], rel=1e-12)


def test_the_box_and_the_start(task):
    """x stays in a box, and starts at 0 or, with `start`, at a random point that depends on the seed."""
    project = selection(bound=0.5, clients=2).problem.project
    np.testing.assert_array_equal(project(np.array([-3.0, 0.2, 0.7])), [-0.5, 0.2, 0.5])
    assert not np.any(task.x0)
    anywhere, again, other = (selection(start=2.0, clients=2, seed=seed).x0 for seed in (0, 0, 1))
    assert 1 < np.max(np.abs(anywhere)) <= 2
    np.testing.assert_array_equal(anywhere, again)
    assert np.any(np.asarray(anywhere) != np.asarray(other))


def test_held_out_rows_are_training_rows_and_the_metrics_say_so():
    task = selection(holdout=0.25, clients=2)
    assert list(task.metrics)[:2] == ["validation_accuracy", "average_validation_accuracy"]
    whole = {row.tobytes() for row in training(selection(clients=2))[0]}
    kept = {row.tobytes() for row in training(task)[0]}
    assert kept < whole


@pytest.mark.slow
@pytest.mark.checked
def test_a_preference_that_rises_is_no_divergence(recwarn):
    """No warning says that the run diverges if the preference H rises while x begins to fit the data.

    From a start near 0, H rises at least a thousandfold.
    """
    task = selection(start=0.01, clients=1)
    algorithm = fb.FISM(lr=10.0, lr_decay=0.8, regularization=1e-3, regularization_decay=0.1)
    run = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=1, metrics=task.metrics)
    assert run.history["preference"][-1] > 1000 * max(run.history["preference"][0], 1)
    assert run.history["train_loss"][-1] < run.history["train_loss"][0]
    assert not [one for one in recwarn if issubclass(one.category, fb.errors.NumericalWarning)]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"classes": (0, 0)}, ("classes", [0, 0], "0 to 9")),
        ({"samples": 288}, ("samples", 288, "at most 286")),
        ({"bound": -1.0}, ("bound", -1.0)),
        ({"start": 101.0}, ("start", 101.0, "bound = 100")),
        ({"holdout": 1.0}, ("holdout", 1.0)),
    ],
)
def test_wrong_options_are_named(options, refusal):
    with refuses(*refusal):
        selection(**options)
