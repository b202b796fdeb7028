"""Tasks on images thin classes as asked, have the losses and optima of the formulas, and measure what they say."""

import gc
import weakref
from dataclasses import replace

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.problem import Padded
from fedbilevel.data import Dataset, load
from fedbilevel.tasks import (
    classification,
    fair_classification,
    hyper_cleaning,
    hyper_representation,
    loss_tuning,
    networks,
)
from fedbilevel.tasks.images import LabelledImages, held_out, long_tailed
from fedbilevel.tasks.loss_tuning import balancing_weights
from refusals import ANY, refuses
from representatives import slow_but

NON_IID = {"partition_by": "dirichlet", "partition_options": {"alpha": 0.5, "minimum": 2}}


def population_loss(loss, clients, x, y):
    """Return the mean over clients, with weights p_i, of the mean loss over each client's outer samples."""
    rows, loss = (clients.outer.row(i) for i in range(len(clients))), jax.jit(loss)
    return sum(p * loss(x, y, row) for p, row in zip(clients.weights, rows, strict=True))


def network(body, head, images):
    """Compute the logits of the network with one hidden layer, in NumPy."""
    (layer,) = body
    hidden = np.maximum(np.asarray(images) @ np.asarray(layer["weight"]) + np.asarray(layer["bias"]), 0)
    return hidden @ np.asarray(head["weight"]) + np.asarray(head["bias"])


def cross_entropies(logits, labels):
    """Compute −log softmax at the label of each sample, in NumPy."""
    logits = np.asarray(logits, float)
    return np.log(np.exp(logits - logits[np.arange(len(labels)), labels][:, None]).sum(1))


def test_the_tail_is_exponential():
    """The sizes of classes fall exponentially with the ratio 0.01, for the published class sizes of MNIST.

    A class has 6,000 images on average. Of class c at most ⌊6000·0.01^(c/9)⌋ + 1 images stay, so that class 0, with
    fewer than 6,001, keeps all.
    """
    published = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10, dtype=np.int32), published))
    images = np.arange(60_000)[:, None, None]  # each image is its own number
    whole = Dataset("mnist", images, labels, images[:5], labels[:5], 10, (0.0,), (1.0,))
    thin = long_tailed(whole, 0.01)
    counts = np.bincount(thin.train_labels)
    assert counts.tolist() == [5923, 3597, 2157, 1293, 775, 465, 279, 167, 101, 61]
    assert counts.sum() == 14_818
    np.testing.assert_array_equal(labels[thin.train_images[:, 0, 0]], thin.train_labels)
    assert len(np.unique(thin.train_images)) == 14_818
    assert thin.test_images is whole.test_images
    assert np.bincount(long_tailed(whole, 1e-9).train_labels)[-1] == 1


def test_the_tail_reaches_the_clients():
    counts = np.bincount(long_tailed(load("digits"), 0.1).train_labels)
    task = loss_tuning()
    labels = np.concatenate([task.clients.outer.values["label"], task.clients.inner.values["label"]])
    assert np.bincount(labels).tolist() == counts.tolist()
    assert counts[-1] == 15  # images with the ranks 0, 1, … up to 144.2·0.1
    share = task.clients.outer.size / (task.clients.outer.size + task.clients.inner.size)
    assert np.all(np.abs(share - 0.2) < 1 / task.clients.inner.size)
    held = classification(holdout=0.5, ratio=0.1)
    # the tail keeps about Σ_c 0.1^(c/9) = 4.1 classes of 10
    assert len(held.clients.outer.values["label"]) < 0.5 * 1442 / 2


def test_the_weighted_validation_loss_is_balanced():
    """The balanced validation loss is the mean over classes of each class's mean loss.

    The mean over samples is another number.
    """
    task = loss_tuning(clients=8, **NON_IID)
    x, (body, head) = task.x0, task.y0
    weights, share, mean = task.clients.weights, np.zeros(10), np.zeros(10)
    for i, p in enumerate(weights):
        row = task.clients.outer.row(i)
        logits = network(body, head, row["image"])
        loss = cross_entropies(logits, row["label"])
        share += p * np.array([np.mean(row["label"] == c) for c in range(10)])
        mean += p * np.array([np.mean((row["label"] == c) * loss) for c in range(10)])
    by_class = mean / share
    found = population_loss(task.problem.outer, task.clients, x, task.y0)
    assert float(found) == pytest.approx(by_class.mean(), rel=1e-12)
    assert abs(mean.sum() - by_class.mean()) > 1e-3
    assert np.sum(share * balancing_weights(task.clients, 10)) == pytest.approx(1, rel=1e-12)


def test_the_training_loss_is_the_vector_scaling_loss():
    """The training loss is the vector-scaling loss: x scales the logits by σ(Δ) and shifts them by ℓ.

    At x = 0 it is the cross-entropy of half the logits. The ridge is on all of y.
    """
    task = loss_tuning(ridge=0.0)
    batch = task.clients.inner.row(0)
    logits = network(*task.y0, batch["image"])
    start = task.problem.inner(task.x0, task.y0, batch)
    assert float(start) == pytest.approx(cross_entropies(logits / 2, batch["label"]).mean(), rel=1e-12)
    scale, shift = np.linspace(-2, 2, 10), np.linspace(1, -1, 10) ** 3
    moved = task.problem.inner({"scale": scale, "shift": shift}, task.y0, batch)
    by_hand = cross_entropies(logits / (1 + np.exp(-scale)) + shift, batch["label"]).mean()
    assert float(moved) == pytest.approx(by_hand, rel=1e-12)
    size = sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(task.y0))
    ridged = loss_tuning(ridge=0.25).problem.inner(task.x0, task.y0, batch) - start
    assert float(ridged) == pytest.approx(0.25 * size, rel=1e-10)
    of_outer = jax.grad(task.problem.outer)(task.x0, task.y0, batch)  # only the inner loss sees x
    assert all(np.abs(leaf).max() == 0 for leaf in jax.tree.leaves(of_outer))


def test_weights_of_classes_are_a_softmax_over_the_training_loss():
    """With class weights, the training loss is the mean of each sample's cross-entropy times the weight of its class.

    The weights are C·softmax(x), which are 1 at the start.
    """
    task, plain = loss_tuning(ridge=0.0, class_weights=True), loss_tuning(ridge=0.0)
    batch = task.clients.inner.row(0)
    start = float(task.problem.inner(task.x0, task.y0, batch))
    assert start == pytest.approx(float(plain.problem.inner(plain.x0, plain.y0, batch)), rel=1e-12)
    raw = np.linspace(-1, 2, 10)
    weights = 10 * np.exp(raw) / np.exp(raw).sum()
    assert weights.mean() == pytest.approx(1)
    logits = network(*task.y0, batch["image"]) / 2
    by_hand = np.mean(weights[batch["label"]] * cross_entropies(logits, batch["label"]))
    moved = task.problem.inner({**task.x0, "weight": raw}, task.y0, batch)
    assert float(moved) == pytest.approx(by_hand, rel=1e-12)


def test_the_printed_loss_of_both_levels():
    """With `outer="vs"` and weights that are not normalised, f is the loss of section V-B of RABO's paper.

    f is the loss of g on other samples, with an entry of x as the weight of each class. At a fixed y it is linear in
    these weights: if all are multiplied by t, so is f, and it falls below 0 with them.
    """
    task = loss_tuning(class_weights=True, normalised=False, outer="vs")
    batch, raw = task.clients.outer.row(0), np.linspace(0.5, 2, 10)
    x = {"scale": np.linspace(-2, 2, 10), "shift": np.linspace(1, -1, 10), "weight": raw}
    logits = network(*task.y0, batch["image"]) / (1 + np.exp(-x["scale"])) + x["shift"]
    by_hand = np.mean(raw[batch["label"]] * cross_entropies(logits, batch["label"]))
    f = task.problem.outer
    assert float(f(x, task.y0, batch)) == pytest.approx(by_hand, rel=1e-12)
    for factor in (0.5, 0.0, -1.0):
        assert float(f({**x, "weight": factor * raw}, task.y0, batch)) == pytest.approx(factor * by_hand, rel=1e-12)
    plain = loss_tuning(outer="vs")  # weights start at 1
    at_start = [float(one.problem.outer(one.x0, one.y0, batch)) for one in (task, plain)]
    assert at_start[0] == pytest.approx(at_start[1], rel=1e-12)
    with refuses("normalised", False, "class_weights"):
        loss_tuning(normalised=False)
    with refuses("normalised", "no", "True or False"):
        loss_tuning(class_weights=True, normalised="no")
    with refuses("outer", "balance", near="balanced"):
        loss_tuning(outer="balance")


@pytest.mark.slow
def test_training_accuracy_is_measured_on_drawn_training_images():
    """`train_accuracy` is measured on training images that are drawn once, and are not held out.

    On all training images of the digits it is the share that NumPy counts. Fewer images are the same for every task of
    one seed.
    """
    digits = load("digits").standardised()
    total = len(digits.train_labels)
    task = hyper_representation(train_samples=total)
    logits = network(task.x0, task.y0, digits.train_images.reshape(-1, 64))
    share = np.mean(np.argmax(logits, axis=1) == digits.train_labels)
    assert float(task.metrics["train_accuracy"](task.x0, task.y0)) == pytest.approx(share, abs=1e-12)
    assert "train_accuracy" not in hyper_representation().metrics
    few = [hyper_representation(train_samples=50) for _ in range(2)]
    assert len({float(one.metrics["train_accuracy"](one.x0, one.y0)) for one in few}) == 1
    left = total - round(0.2 * total)
    with refuses("train_samples", total, f"at most {left}"):
        hyper_representation(train_samples=total, holdout=0.2)


def test_both_halves_have_every_class():
    """The training part and the validation part have samples of every class.

    The last class has three images. A random split has none of them in its validation part with probability
    0.8³ = 0.51, and is then drawn again.
    """
    for seed in range(8):
        task = loss_tuning(ratio=0.02, seed=seed)
        tails = [half.values["label"] == 9 for half in (task.clients.outer, task.clients.inner)]
        assert sum(map(np.sum, tails)) == 3
        for half in (task.clients.outer, task.clients.inner):
            assert set(half.values["label"].tolist()) == set(range(10))


def test_accuracies_by_class():
    """Accuracies by class are the shares of right predictions in each class; a class without images is an error.

    Two of three images of class 0 are right, the one of class 1, and none of two of class 2.
    """
    constant = networks.Network(lambda key: ((), ()), lambda x, y, images: images, lambda images: images)
    labels = np.array([0, 0, 0, 1, 2, 2], np.int32)
    logits = np.eye(3)[[0, 0, 1, 1, 0, 1]]
    data = Dataset("made up", logits, labels, logits, labels, 3, (0.0,), (1.0,))
    images = LabelledImages(data, constant, "test")
    np.testing.assert_allclose(images.class_accuracies()((), ()), [2 / 3, 1, 0], rtol=1e-15)
    assert float(images.accuracy()((), ())) == pytest.approx(0.5)
    with refuses("number of test images of class 2", 0, "holdout"):
        LabelledImages(replace(data, test_labels=labels.clip(0, 1)), constant, "test").class_accuracies()


def test_metrics_of_the_tasks_read_the_right_network():
    """The metrics of each task evaluate its network: at the start they are what NumPy counts on the test images."""
    digits = load("digits").standardised()
    for make, part in ((loss_tuning, "y0"), (fair_classification, "x0"), (classification, "x0")):
        task = make()
        best = np.argmax(network(*getattr(task, part), digits.test_images.reshape(-1, 64)), axis=1)
        each = [np.mean(best[digits.test_labels == c] == c) for c in range(10)]
        expected = {
            "test_accuracy": np.mean(best == digits.test_labels),
            "balanced_test_accuracy": np.mean(each),
            "worst_class_test_accuracy": np.min(each),
        }
        for name, metric in task.metrics.items():
            assert float(metric(task.x0, task.y0)) == pytest.approx(expected[name], rel=1e-12), name


def test_the_losses_of_networks_that_are_all_of_x():
    """The losses of classification and of fair classification agree with their formulas, at the start and any y."""
    plain, fair = classification(ridge=0.25), fair_classification(concavity=0.3)
    batch, y = plain.clients.outer.row(0), np.linspace(-1, 2, 10)
    each = cross_entropies(network(*plain.x0, batch["image"]), batch["label"])
    size = sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(plain.x0))
    found = plain.problem.outer(plain.x0, None, batch), fair.problem.outer(plain.x0, y, batch)
    expected = each.mean() + 0.25 * size, np.mean((1 + y[batch["label"]]) * each) - 0.15 * y @ y
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_held_out_images_are_drawn_by_the_seed_and_are_not_trained_on():
    labels = np.arange(20, dtype=np.int32) % 3
    images = np.arange(20)[:, None, None]  # each image is its own number
    whole = Dataset("made up", images, labels, images[:5] + 100, labels[:5], 3, (0.0,), (1.0,))
    held, again, other = (held_out(whole, 0.25, seed) for seed in (0, 0, 1))
    tested, trained = held.test_images.ravel(), held.train_images.ravel()
    assert len(tested) == 5
    assert sorted([*tested, *trained]) == list(range(20))
    np.testing.assert_array_equal(labels[tested], held.test_labels)
    np.testing.assert_array_equal(labels[trained], held.train_labels)
    np.testing.assert_array_equal(again.test_images, held.test_images)
    assert set(other.test_images.ravel()) != set(tested)


@pytest.mark.slow
def test_the_best_class_weights():
    """The best class weights of fair classification are y_c = E[1{class is c} CE]/ρ.

    There the gradient of the population's loss in y is 0. The loss is concave with modulus ρ, so that at y + d the
    gradient is −ρ d.
    """
    task = fair_classification(clients=3, concavity=0.3, **NON_IID)
    best = np.zeros(10)
    for i, p in enumerate(task.clients.weights):
        row = task.clients.outer.row(i)
        loss = cross_entropies(network(*task.x0, row["image"]), row["label"])
        best += p * np.bincount(row["label"], loss, 10) / len(loss) / 0.3
    assert best.min() > 0
    whole = jax.jit(lambda y: population_loss(task.problem.outer, task.clients, task.x0, y))
    gradient = jax.jit(jax.grad(whole))
    np.testing.assert_allclose(gradient(best), 0, atol=1e-14)
    away = np.linspace(-1, 1, 10)
    np.testing.assert_allclose(gradient(best + away), -0.3 * away, atol=1e-14)
    opposite = population_loss(task.problem.inner, task.clients, task.x0, best)
    assert float(opposite) == pytest.approx(-float(whole(best)), rel=1e-12)


def test_full_batches_of_unequal_clients():
    """A padded full batch gives the loss of its true samples."""
    task = loss_tuning(clients=8, **NON_IID)
    row = task.clients.outer.row(0)
    padded = jax.tree.map(lambda a: np.concatenate([a, a[:3]]), row)
    mask = np.arange(len(row["label"]) + 3) < len(row["label"])
    plain = jax.jit(task.problem.outer)(task.x0, task.y0, row)
    both = jax.jit(task.problem.over_batches().outer)(task.x0, task.y0, Padded(padded, mask))
    assert float(both) == pytest.approx(float(plain), rel=1e-12)


@pytest.mark.slow
def test_loss_tuning_learns():
    """Thirty rounds raise the accuracy on the digits from 10 %, which is chance, to more than 50 %, and move x."""
    task = loss_tuning(clients=4)
    algorithm = fb.LFedNest(
        inner=fb.parts.LocalSGD(local_steps=20, lr=2.0),
        hypergradient=fb.parts.LocalImplicit(solver=fb.parts.Neumann(step=0.05)),
        outer_lr=1.0,
    )
    result = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=30, metrics=task.metrics)
    assert result.history["balanced_test_accuracy"][-1] > 0.5
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(result.x)) > 0.01


@pytest.mark.slow
def test_fair_classification_learns():
    task = fair_classification(clients=4)
    steps = fb.XYV(x=0.1, y=1.0, v=0.1)
    algorithm = fb.SimFBO(local_steps=5, client_lr=steps, server_lr=steps)
    result = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=30, metrics=task.metrics)
    assert result.history["test_accuracy"][-1] > 0.5
    assert np.all(result.y > 0)


@pytest.mark.parametrize(
    ("make", "options", "refusal"),
    [
        (loss_tuning, {"ratio": 0.0}, ("ratio", 0.0)),
        (loss_tuning, {"ratio": 0.001}, ("", ANY, "class, 7, has 1 samples")),
        (classification, {"ridge": -1.0}, ("ridge", -1.0)),
        (fair_classification, {"concavity": 0.0}, ("concavity", 0.0)),
        (fair_classification, {"network": "resnet"}, ("network", "resnet")),
    ],
)
def test_wrong_options_are_named(make, options, refusal):
    with refuses(*refusal):
        make(**options)


@pytest.mark.parametrize(
    "make",
    slow_but(
        classification,
        hyper_cleaning,
        hyper_representation,
        of=[classification, fair_classification, hyper_cleaning, hyper_representation, loss_tuning],
    ),
)
def test_losses_hold_no_images(make, monkeypatch):
    """The losses of a task do not keep its images and its data set in memory."""
    held = []

    def holding(*parts):
        images = LabelledImages(*parts)
        held.extend([weakref.ref(images), weakref.ref(images.data)])
        return images

    monkeypatch.setattr("fedbilevel.tasks.images.LabelledImages", holding)
    _problem = make(seed=1).problem
    gc.collect()
    assert [one() for one in held] == [None, None]
