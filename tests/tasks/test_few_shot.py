"""The few-shot objectives are those of their papers: they agree with NumPy, differences and their own fixed points."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.core.submodel import UnitLayout
from fedbilevel.data import DataError, load_characters
from fedbilevel.data.characters import strokes
from fedbilevel.diagnostics.check import local_hypergradient
from fedbilevel.oracles.population import Population
from fedbilevel.tasks import few_shot
from fedbilevel.tasks.few_shot import (
    adapted,
    descended_head,
    draw_episodes,
    fitted_head,
    head_logits,
    held_out_characters,
    prototype_logits,
    smaller,
    support_loss,
)
from implicit import implicit_gradient
from refusals import raises_with, refuses

SIZES = {"clients": 5, "tasks": 5, "way": 3, "shot": 2, "queries": 4, "test_episodes": 12}
SMALL = {"network": "mlp", "hidden": (4,), **SIZES}
LR, STEPS = 0.3, 2
MAML = {"adaptation_lr": LR, "adaptation_steps": STEPS}


@pytest.fixture(scope="module", autouse=True)
def characters():
    """Replace the default characters by fewer: 50 of 5 alphabets for training, and 40 of 4 alphabets for testing."""
    few = strokes(alphabets=(5, 4), characters=10, drawings=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            importlib.import_module("fedbilevel.tasks.few_shot"),
            "load_characters",
            lambda name: few if name == "strokes" else load_characters(name),
        )
        yield few


@pytest.fixture(scope="module")
def tasks():
    return {
        name: few_shot(objective=name, **SMALL, **MAML) for name in ("bilevel", "joint", "protonet", "maml", "fomaml")
    }


def rows(task, client: int, count: int):
    """Return the first samples of a client's outer and inner sets."""
    return tuple(
        jax.tree.map(lambda leaf: leaf[:count], part.row(client)) for part in (task.clients.outer, task.clients.inner)
    )


def head_of(width: int, columns: int):
    rng = np.random.default_rng(5)
    return {"weight": rng.normal(size=(width, columns)), "bias": rng.normal(size=columns)}


def features(x, characters, images) -> np.ndarray:
    """Compute the features (..., 4) of images (..., 28, 28) of type uint8 in NumPy.

    Images are standardised, and go through one dense layer and ReLU. The result is divided as the task describes.
    """
    pixels = (images.reshape(*images.shape[:-2], -1) / 255 - characters.mean) / characters.std
    found = np.maximum(pixels @ np.asarray(x[0]["weight"]) + np.asarray(x[0]["bias"]), 0)
    return found / np.sqrt(1 + np.mean(found**2, axis=-1, keepdims=True))


def cross_entropy(logits: np.ndarray, label: int) -> float:
    return float(np.log(np.sum(np.exp(logits))) - logits[label])


def whose(characters, images) -> np.ndarray:
    """Return the number of the training character of which each image, in (..., 28, 28), is a drawing."""
    known = {drawing.tobytes(): c for c, drawings in enumerate(characters.train.images) for drawing in drawings}
    flat = images.reshape(-1, 28, 28)
    return np.array([known[drawing.tobytes()] for drawing in flat]).reshape(images.shape[:-2])


def test_tasks_are_of_different_characters_of_one_client_with_other_queries(tasks, characters) -> None:
    """Each task has different characters of one client, and its queries are other drawings than its support.

    A client has 10 characters, and a task takes 3. So one shuffled pack of the characters gives 3 tasks, and the 5
    tasks of a client need two packs.
    """
    clients = tasks["bilevel"].clients
    assert clients.outer.values["image"].shape == (25, 3, 4, 28, 28)
    assert clients.inner.values["image"].shape == (25, 3, 2, 28, 28)
    assert clients.inner.values["image"].dtype == np.uint8
    owners = []
    for client in range(5):
        outer, inner = rows(tasks["bilevel"], client, 5)
        for part in (outer, inner):
            np.testing.assert_array_equal(part["task"], np.arange(5 * client, 5 * client + 5))
        both = np.concatenate([inner["image"], outer["image"]], axis=2)  # (5, 3, 6, 28, 28)
        of = whose(characters, both)
        assert np.all(of == of[..., :1])  # a place in a task is one character
        for pack in (of[:3], of[3:]):
            assert len(np.unique(pack)) == pack[..., 0].size
        assert all(len({drawing.tobytes() for drawing in place}) == 6 for task in both for place in task)
        owners.append(set(of.ravel()))
    assert sum(map(len, owners)) == len(set.union(*owners))
    joint = tasks["joint"].clients.outer.values
    np.testing.assert_array_equal(joint["support"], clients.inner.values["image"])
    np.testing.assert_array_equal(joint["query"], clients.outer.values["image"])


def heads_of(width: int, tasks: int, way: int):
    rng = np.random.default_rng(5)
    return {"weight": rng.normal(size=(tasks, width, way)), "bias": rng.normal(size=(tasks, way))}


@pytest.mark.parametrize("objective", ["bilevel", "joint"])
def test_the_losses_are_those_of_two_tasks_by_hand(objective, tasks, characters) -> None:
    """The losses f and g of two tasks are those that NumPy computes, and on a joint sample the loss is (f + g)/2.

    The tasks 16 and 17 are the second and the third of client 3.
    """
    x, y = tasks["bilevel"].x0, heads_of(4, 25, 3)
    outer, inner = (jax.tree.map(lambda leaf: leaf[1:], part) for part in rows(tasks["bilevel"], 3, 3))
    expected = {}
    for name, batch in (("outer", outer), ("inner", inner)):
        values = []
        for task, images in zip((16, 17), batch["image"], strict=True):
            for label, drawings in enumerate(features(x, characters, images)):
                values += [cross_entropy(z @ y["weight"][task] + y["bias"][task], label) for z in drawings]
        expected[name] = np.mean(values)
    squares = [np.sum(y["weight"][task] ** 2) + np.sum(y["bias"][task] ** 2) for task in (16, 17)]
    expected["inner"] += 0.01 * np.mean(squares)
    if objective == "bilevel":
        problem = tasks["bilevel"].problem
        found = {"outer": problem.outer(x, y, outer), "inner": problem.inner(x, y, inner)}
    else:
        batch, _ = rows(tasks["joint"], 3, 3)
        batch = jax.tree.map(lambda leaf: leaf[1:], batch)
        stored = jax.tree.map(lambda leaf: leaf / SMALL["clients"] ** 0.5, y)
        found = {"mean": tasks["joint"].problem.outer((x, stored), None, batch)}
        expected = {"mean": (expected["outer"] + expected["inner"]) / 2}
    for name, value in found.items():
        assert abs(value - expected[name]) < 1e-12 * expected[name], name


@pytest.mark.slow
def test_the_mean_over_clients_moves_a_head_as_far_as_its_owner_alone_would(tasks) -> None:
    """In a round of FedAvg with one local step, a head moves by −lr times the gradient of its owner's loss.

    Only one of M clients moves a head, and the mean over clients with weights 1/M leaves an M-th of its step. But a
    head is √M times its stored array. So the gradient in the stored array is √M times as large, and a move of the array
    is a move √M times as large of the head. Together these factors make up for the mean.
    """
    task, lr, count = tasks["joint"], 0.1, SMALL["clients"]
    method = fb.FedAvg(local_steps=1, batch_size=None, lr=lr)
    moved = fb.solve(method, task.problem, task.clients, task.x0, task.y0, rounds=1).x[1]
    for client in range(count):
        batch, _ = rows(task, client, SMALL["tasks"])

        def of_heads(heads, batch=batch):
            stored = jax.tree.map(lambda leaf: leaf / count**0.5, heads)
            return task.problem.outer((task.x0[0], stored), None, batch)

        slope = jax.grad(of_heads)(jax.tree.map(lambda leaf: leaf * count**0.5, task.x0[1]))
        own = batch["task"]
        for new, old, along in zip(*map(jax.tree.leaves, (moved, task.x0[1], slope)), strict=True):
            expected = old[own] * count**0.5 - lr * along[own]
            np.testing.assert_allclose(new[own] * count**0.5, expected, rtol=0, atol=1e-12)
            assert np.any(along[own] != 0)


DEEP = {**SMALL, "head_hidden": (6, 5)}


def drawn_like(tree):
    rng = np.random.default_rng(5)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), tree)


@pytest.mark.parametrize("shared", [False, True])
def test_the_losses_of_heads_with_hidden_layers_by_hand(shared, characters) -> None:
    """With heads that have hidden layers, f and g of the tasks 16 and 17 are those that NumPy computes.

    The widths of a head are 4, 6, 5 and 3. Each task has a head of its own, or both share one.
    """
    task = few_shot(**DEEP, shared=shared)
    y = drawn_like(task.y0)
    outer, inner = (jax.tree.map(lambda leaf: leaf[1:], part) for part in rows(task, 3, 3))
    heads = [y, y] if shared else [jax.tree.map(lambda leaf, j=j: leaf[j], y) for j in (16, 17)]
    expected = []
    for batch in (outer, inner):
        values = []
        for head, images in zip(heads, batch["image"], strict=True):
            for label, z in enumerate(features(task.x0, characters, images)):
                for layer in head["hidden"]:
                    z = np.maximum(z @ layer["weight"] + layer["bias"], 0)
                values += [cross_entropy(one, label) for one in z @ head["weight"] + head["bias"]]
        expected.append(np.mean(values))
    expected[1] += 0.01 * np.mean([sum(np.sum(leaf**2) for leaf in jax.tree.leaves(head)) for head in heads])
    found = [task.problem.outer(task.x0, y, outer), task.problem.inner(task.x0, y, inner)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.slow
def test_hidden_units_of_heads_are_cut_too() -> None:
    """Hidden units of heads are cut like other units.

    With capacity ½, 2 of 4 features and 3 of 6 and of 5 hidden units are left. If only hidden units are cut, the
    smaller head gives the same loss as the whole head with zeros for the other units. This does not hold if features
    are cut, because φ divides by their mean square.
    """
    for shared in (False, True):
        task = few_shot(**DEEP, shared=shared)
        both, layout = (UnitLayout.of(task.problem.structure, task.x0, task.y0, pruned) for pruned in ("both", "y"))
        assert both.kept(0.5) == {"head1": 3, "head2": 3, "hidden1": 2}
        units = {"head1": jnp.array([0, 2, 5]), "head2": jnp.array([1, 2, 3])}
        y, (outer, _) = drawn_like(task.y0), rows(task, 3, 3)
        part = layout.cut("y", y, units)
        assert part["hidden"][1]["weight"].shape[-2:] == (3, 3)
        whole, padded, cut = (
            task.problem.outer(task.x0, heads, outer) for heads in (y, layout.put("y", part, units), part)
        )
        assert abs(padded - cut) < 1e-12 * cut
        assert abs(whole - cut) > 0.01


@pytest.mark.slow
def test_a_head_with_hidden_layers_cannot_begin_at_zero() -> None:
    """A head with hidden layers does not begin at 0, because 0 is a saddle point.

    With equally many images of each character, the gradient at 0 is 0, and the loss is log 3. Nearby, on the way to a
    fitted head, it is lower. From the task's start the loss falls below 0.1, as 10 features can tell 6 images apart.
    """
    support = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, 10)))
    start = {"hidden": [{"weight": jnp.asarray(head_of(10, 8)["weight"]) / 5**0.5, "bias": jnp.zeros(8)}]}
    start |= {"weight": jnp.zeros((8, 3)), "bias": jnp.zeros(3)}
    zero = jax.tree.map(jnp.zeros_like, start)
    loss = support_loss(support, 1e-4)
    stuck, head = (descended_head(support, begin, 1e-4) for begin in (zero, start))
    assert optax.tree.norm(stuck) < 1e-12
    assert abs(loss(stuck) - np.log(3)) < 1e-12
    assert loss(optax.tree.scale(0.3, head)) < np.log(3) - 0.01
    assert loss(head) < 0.1
    assert optax.tree.norm(few_shot(**DEEP).y0["hidden"]) > 1


@pytest.mark.slow
def test_accuracy_with_hidden_layers_is_that_of_heads_descended_from_the_start(characters) -> None:
    task = few_shot(**DEEP)
    start = jax.tree.map(lambda leaf: leaf[0], task.y0)
    drawn = draw_episodes(characters.test.images, 12, 3, 2, 4, seed=0)
    found, right = features(task.x0, characters, drawn.images), []
    for support, query in zip(found[drawn.support], found[drawn.query], strict=True):
        logits = head_logits(descended_head(jnp.asarray(support), start, 0.01), query)
        right.append(logits.argmax(axis=-1) == np.arange(3)[:, None])
    assert abs(task.metrics["test_accuracy"](task.x0, None) - np.mean(right)) < 1e-12


@pytest.mark.slow
def test_a_shared_head_cannot_tell_characters_apart_but_learns_labels_by_heart(characters) -> None:
    """A shared head cannot tell characters apart, except that it learns labels by heart.

    200 tasks give n = 600 characters labels in random order. So on other characters no head has a smaller loss than
    log 3. On these characters the best head on 16 features fits the random labels: on the support, maximum likelihood
    gains in all half of a χ² variable with (3 − 1)·16 degrees of freedom, which is 16 ± 4, and on the queries no more.
    So the mean loss is at most (16 + 3·4)/n below log 3. Heads that are fitted to one task each are far below. If there
    is only one task in all, the shared head is that task's own head.
    """
    options = {**SMALL, "hidden": (16,), "tasks": 40, "ridge": 0.1}
    one, own = few_shot(**options, shared=True), few_shot(**options)
    outer, inner = (
        jax.tree.map(lambda *leaves: np.concatenate(leaves), *(part.row(i) for i in range(5)))
        for part in (own.clients.outer, own.clients.inner)
    )
    found = jnp.asarray(features(own.x0, characters, inner["image"]))  # (tasks, way, shot, width)
    zero = jax.tree.map(jnp.zeros_like, one.y0)
    best = fitted_head(jnp.moveaxis(found, 0, 1).reshape(3, -1, 16), zero, 0.1)
    slope = jax.grad(one.problem.inner, 1)(one.x0, best, inner)
    assert optax.tree.norm(slope) < 1e-6
    shared = one.problem.outer(one.x0, best, outer)
    apart = own.problem.outer(own.x0, jax.vmap(lambda z: fitted_head(z, zero, 0.1))(found), outer)
    assert np.log(3) - (16 + 3 * 4) / 600 < shared < np.log(3) + 3 * 4 / 600
    assert apart < 0.8
    alone = [few_shot(**{**SMALL, "clients": 1, "tasks": 1}, shared=shared) for shared in (True, False)]
    y = drawn_like(alone[0].y0)
    first, second = (
        task.problem.inner(task.x0, head, task.clients.inner.row(0))
        for task, head in zip(alone, (y, jax.tree.map(lambda leaf: leaf[None], y)), strict=True)
    )
    assert abs(first - second) < 1e-12 * first


@pytest.mark.slow
def test_own_hypergradients_are_those_of_the_federation_if_no_head_is_shared(tasks) -> None:
    """If no head is shared, the mean of clients' own hypergradients is the hypergradient of the federation, at any y.

    ∇²yy g is block diagonal, with a block for each head, and a client's p_i cancels in H⁻¹b. Each batch has all tasks
    of a client. The agreement is limited by the tolerance of conjugate gradient. With one head for all, the clients'
    Hessians would differ.
    """
    task = tasks["bilevel"]
    y, p = jax.tree.map(lambda leaf: leaf / 5, heads_of(4, 25, 3)), jnp.asarray(task.clients.weights)
    own, failed = local_hypergradient(Population.each(task.problem, task.clients, range(5)), p, task.x0, y)
    whole = implicit_gradient(task.problem, task.clients, task.x0, y).hypergradient
    assert failed == 0
    direct = jax.grad(
        lambda x: sum(task.problem.outer(x, y, rows(task, i, 5)[0]) for i in range(5)) / 5
    )(task.x0)  # fmt: skip
    assert optax.tree.norm(optax.tree.sub(own, whole)) < 1e-9 * optax.tree.norm(whole)
    # without the part that comes through y, the comparison would not test H
    assert optax.tree.norm(optax.tree.sub(whole, direct)) > 0.01 * optax.tree.norm(direct)


def test_protonet_is_the_softmax_of_squared_distances_to_means(tasks, characters) -> None:
    task = tasks["protonet"]
    batch, _ = rows(task, 0, 2)
    values = []
    for support, query in zip(batch["support"], batch["query"], strict=True):
        prototypes = features(task.x0, characters, support).mean(axis=1)
        for label, drawings in enumerate(features(task.x0, characters, query)):
            values += [cross_entropy(-np.sum((z - prototypes) ** 2, axis=1), label) for z in drawings]
    assert abs(task.problem.outer(task.x0, None, batch) - np.mean(values)) < 1e-12 * np.mean(values)


@pytest.fixture(scope="module")
def maml_point(tasks):
    """Return the x at which MAML's objectives are compared, and a batch of one task."""
    backbone, _ = tasks["maml"].x0
    batch, _ = rows(tasks["maml"], 0, 1)
    return (backbone, head_of(4, 3)), batch


@jax.jit
@jax.value_and_grad
def of_pixels(x, pixels, label):
    (layer,), head = x
    found = jax.nn.relu(pixels @ layer["weight"] + layer["bias"])
    found = found / jnp.sqrt(1 + jnp.mean(found**2, axis=1, keepdims=True))
    z = found @ head["weight"] + head["bias"]
    return jnp.mean(jax.nn.logsumexp(z, axis=1) - z[np.arange(len(label)), label])


def plain(x, characters, images):
    """Return the cross-entropy of one episode, and its gradient in weight and bias of the layer and of the head."""
    pixels = (images.reshape(-1, 784) / 255 - characters.mean) / characters.std
    return of_pixels(x, pixels, np.repeat(np.arange(3), images.shape[1]))


def test_prototypes_are_means_and_several_steps_are_repeated_steps() -> None:
    """A prototype is the mean of its support, and an adaptation of two steps is one of one step, made twice."""
    rng = np.random.default_rng(3)
    support, query = rng.normal(size=(3, 2, 5)), rng.normal(size=(3, 4, 5))
    gaps = query.reshape(12, 1, 5) - np.stack([(one[0] + one[1]) / 2 for one in support])
    np.testing.assert_allclose(prototype_logits(support, query), -np.sum(gaps**2, axis=-1), rtol=1e-12)
    x, images = (jnp.ones(5), head_of(5, 3)), jnp.asarray(support[:, :, None])
    once, twice = (adapted(lambda b, i: b * i.reshape(-1, 5), LR, steps, first_order=False) for steps in (1, 2))
    found, expected = twice(x, images), once(once(x, images), images)
    assert optax.tree.norm(optax.tree.sub(found, expected)) < 1e-14
    assert optax.tree.norm(optax.tree.sub(found, once(x, images))) > 0.1


def test_adaptation_is_as_the_options_say_and_of_first_order_for_fomaml_alone(monkeypatch) -> None:
    given = []
    module = importlib.import_module("fedbilevel.tasks.few_shot")
    monkeypatch.setattr(module, "adapted", lambda features, *options: given.append(options))
    for objective in ("maml", "fomaml"):
        few_shot(objective=objective, **SMALL, **MAML)
    assert given == [(LR, STEPS, False), (LR, STEPS, True)]


@pytest.mark.slow
def test_first_order_maml_has_the_gradient_of_the_query_loss_where_the_steps_end(tasks, maml_point, characters) -> None:
    x, batch = maml_point
    there = x
    for _ in range(STEPS):
        _, gradient = plain(there, characters, batch["support"][0])
        there = optax.tree.add_scale(there, -LR, gradient)
    value, expected = plain(there, characters, batch["query"][0])
    reached, found = jax.jit(jax.value_and_grad(tasks["fomaml"].problem.outer))(x, None, batch)
    assert abs(reached - value) < 1e-12 * value
    assert optax.tree.norm(optax.tree.sub(found, expected)) < 1e-12 * optax.tree.norm(expected)


@pytest.mark.slow
def test_second_order_maml_has_the_gradient_of_its_objective(tasks, maml_point) -> None:
    """Second-order MAML has the gradient of its objective, by central differences along a direction.

    With h = 1e-5 the error of the differences is about h² times the third derivative, plus 1e-16/h: 1e-10. The gradient
    of first-order MAML is off by far more.
    """
    x, batch = maml_point
    rng = np.random.default_rng(2)
    direction = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape) / 30, x)
    objective = {name: jax.jit(jax.value_and_grad(tasks[name].problem.outer)) for name in ("maml", "fomaml")}
    h = 1e-5
    ahead, behind = (objective["maml"](optax.tree.add_scale(x, step, direction), None, batch)[0] for step in (h, -h))
    slope = (ahead - behind) / (2 * h)
    second, first = (optax.tree.vdot(loss(x, None, batch)[1], direction) for loss in objective.values())
    assert abs(second - slope) < 1e-7 * abs(slope)
    assert abs(first - slope) > 1e-3 * abs(slope)


def test_a_new_head_is_the_minimiser(tasks) -> None:
    """A new head is the minimiser of its loss: its gradient is less than 1e-3 of the gradient at 0.

    The features are far from having mean 0. They have ‖φ‖² of about 25, like those of a normalised backbone with ReLU.
    """
    rng = np.random.default_rng(1)
    support = np.abs(rng.normal(size=(5, 1, 25)))
    ridge = 0.01

    def gradient(head):
        logits = support[:, 0] @ head["weight"] + head["bias"]
        off = np.exp(logits - logits.max(1, keepdims=True))
        off = off / off.sum(1, keepdims=True) - np.eye(5)
        return support[:, 0].T @ off / 5 + 2 * ridge * head["weight"], off.mean(0) + 2 * ridge * head["bias"]

    zero = {"weight": np.zeros((25, 5)), "bias": np.zeros(5)}
    head = jax.tree.map(np.asarray, fitted_head(jnp.asarray(support), zero, ridge))
    norms = [np.sqrt(sum(np.sum(part**2) for part in gradient(at))) for at in (head, zero)]
    assert norms[0] < 1e-3 * norms[1]


def test_test_episodes_are_of_different_characters_and_drawings() -> None:
    images = np.arange(7 * 6, dtype=np.uint8).reshape(7, 6, 1, 1)  # the pixel of an image is its number
    drawn = draw_episodes(images, 50, way=4, shot=2, queries=3, seed=0)
    support, query = (drawn.images[part][..., 0, 0] for part in (drawn.support, drawn.query))
    assert support.shape == (50, 4, 2)
    assert query.shape == (50, 4, 3)
    both = np.concatenate([support, query], axis=2)
    assert all(len(np.unique(episode)) == 20 for episode in both)
    assert np.all(both // 6 == both[..., :1] // 6)  # all images of a class are of one character
    assert len(np.unique(both)) == 42  # all images are used


def test_held_out_characters_are_measured_and_not_trained_on(characters) -> None:
    """With a holdout of a quarter, accuracy is measured on a quarter of the training characters.

    No client has an image of these characters, and none of their images is a test image.
    """
    plain = characters
    task = few_shot(**SMALL, holdout=0.25)
    assert list(task.metrics) == ["validation_accuracy"]
    assert list(few_shot(**SMALL).metrics) == ["test_accuracy"]
    found = held_out_characters(plain, 0.25, seed=0)
    total = len(plain.train.images)
    assert (len(found.test.images), len(found.train.images)) == (round(total / 4), total - round(total / 4))
    parts = [{image.tobytes() for image in part.images} for part in (found.train, found.test, plain.test)]
    assert not parts[0] & parts[1]
    assert not parts[1] & parts[2]
    assert parts[0] | parts[1] == {image.tobytes() for image in plain.train.images}
    held = {drawing.tobytes() for part in (task.clients.outer, task.clients.inner) for drawing in drawings(part)}
    assert held <= {drawing.tobytes() for drawing in found.train.images.reshape(-1, 28, 28)}


def test_pixels_of_smaller_images_are_means_of_squares(characters) -> None:
    """With a side of 7, each pixel is the mean of 4 × 4 pixels, and pixels are divided by the deviation of these."""
    found = smaller(characters, 7)
    image = characters.train.images[3, 2]
    by_hand = [[np.rint(image[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].mean()) for j in range(7)] for i in range(7)]
    np.testing.assert_array_equal(found.train.images[3, 2], by_hand)
    assert found.test.images.shape == (*characters.test.images.shape[:2], 7, 7)
    assert found.std == pytest.approx(np.std(found.train.images / 255))
    task = few_shot(**SMALL, side=7)
    assert task.clients.outer.values["image"].shape[-2:] == (7, 7)


def drawings(part) -> np.ndarray:
    """Return all images of the outer or of the inner samples."""
    return np.asarray(part.values["image"]).reshape(-1, 28, 28)


@pytest.mark.slow
def test_accuracy_is_measured_on_prototypes_as_by_hand(tasks, characters) -> None:
    task = tasks["protonet"]
    drawn = draw_episodes(characters.test.images, 12, 3, 2, 4, seed=0)
    found = features(task.x0, characters, drawn.images)
    right = []
    for support, query in zip(found[drawn.support], found[drawn.query], strict=True):
        gaps = np.sum((query[:, :, None] - support.mean(axis=1)) ** 2, axis=-1)
        right.append(gaps.argmin(axis=-1) == np.arange(3)[:, None])
    measured = task.metrics["test_accuracy"](task.x0, None)
    assert abs(measured - np.mean(right)) < 1e-12
    again = few_shot(objective="protonet", **SMALL)
    assert again.metrics["test_accuracy"](again.x0, None) == measured


@pytest.mark.slow
def test_an_adapted_accuracy_is_that_of_the_adapted_network(tasks, characters) -> None:
    task = tasks["maml"]
    x = (task.x0[0], head_of(4, 3))
    drawn = draw_episodes(characters.test.images, 12, 3, 2, 4, seed=0)
    right = []
    for support, query in zip(drawn.images[drawn.support], drawn.images[drawn.query], strict=True):
        there = x
        for _ in range(STEPS):
            there = optax.tree.add_scale(there, -LR, plain(there, characters, support)[1])
        logits = features(there[0], characters, query) @ np.asarray(there[1]["weight"]) + np.asarray(there[1]["bias"])
        right.append(logits.argmax(axis=-1) == np.arange(3)[:, None])
    assert abs(task.metrics["test_accuracy"](x, None) - np.mean(right)) < 1e-12


def test_units_are_the_backbones_and_the_head_shares_its_last_ones() -> None:
    """Units of a few-shot network are the channels of its backbone; those of the last block are the inputs of heads."""
    task = few_shot(hidden=(2,), clients=2, way=2, queries=2, test_episodes=1)
    assert task.problem.structure.x[0] == {"weight": "_ _ _ block1", "gain": "block1", "bias": "block1"}
    assert task.problem.structure.y == {"weight": "_ 1*block4 _", "bias": "_ _"}
    assert task.y0["weight"].shape == (40, 2, 2)  # 20 tasks of each client
    joint = few_shot(hidden=(2,), objective="joint", clients=2, way=2, queries=2, test_episodes=1).problem.structure
    assert joint.x == (task.problem.structure.x, task.problem.structure.y)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"way": 11}, ("way", 11, "at most 10")),
        ({"shot": 8}, ("shot", 8, "at most 7")),
        ({"queries": 7}, ("queries", 7, "at most 6")),
        ({"objective": "protonets"}, ("objective", "protonets", "", "protonet")),
        ({"partition_by": "alphabets", "clients": 6}, ("clients", 6, "at most 5")),
        ({"adaptation_lr": "x"}, ("adaptation_lr", "x")),
        ({"side": 13}, ("side", 13, "divisor of 28")),
        ({"hidden": 4}, ("hidden", 4)),
        ({"head_hidden": 4}, ("head_hidden", 4)),
        ({"head_hidden": (4, 0)}, ("head_hidden", (4, 0))),
        ({"head_hidden": (4,), "objective": "protonet"}, ("head_hidden", (4,), "'protonet'")),
        ({"shared": 1}, ("shared", 1, "True or False")),
        ({"shared": True, "objective": "maml"}, ("shared", True, "'bilevel' and 'joint'")),
    ],
)
def test_wrong_input_is_refused_by_field(options, refusal) -> None:
    with refuses(*refusal):
        few_shot(**SMALL | options)


def test_data_of_another_name_are_refused():
    with raises_with(DataError, path="set of characters", got="omniglott", near="omniglot"):
        few_shot(**SMALL | {"data": "omniglott"})
