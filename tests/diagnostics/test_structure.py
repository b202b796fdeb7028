"""Does check_structure pass every network of the library, and name the group of every wrong structure?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.submodel import UnitLayout
from fedbilevel.tasks import classification, loss_tuning, networks
from fedbilevel.tasks.networks import BACKBONES, normed, residual
from refusals import refuses

SIDE = 8
MODELS = {
    "mlp": (networks.mlp, (6, 5)),
    "linear": (networks.linear, ()),
    "cnn": (networks.cnn, (3, 4, 5)),
    "conv4": (BACKBONES["conv4"], (3,)),
    "resnet12": (BACKBONES["resnet12"], (2, 3, 4, 5)),
    "resnet18": (BACKBONES["resnet18"], (2, 3, 4, 5)),
}
GROUPS = {"mlp": 2, "linear": 0, "cnn": 3, "conv4": 4, "resnet12": 4 * 3, "resnet18": 4 + 8}


def problem_of(network, structure):
    """Return a problem with the cross-entropy of the network, and with a ridge on y in the inner loss."""

    def outer(x, y, batch):
        return networks.cross_entropy(network.logits(x, y, batch["image"]), batch["label"])

    return fb.Bilevel(outer, lambda x, y, batch: outer(x, y, batch) + jnp.sum(y["weight"] ** 2), structure=structure)


def made(name, side=SIDE):
    """Return a small network, its start, and four samples."""
    make, hidden = MODELS[name]
    network = make((side, side), hidden, 3)
    images = np.random.default_rng(0).normal(size=(4, side, side))
    batch = {"image": jnp.asarray(network.prepare(images)), "label": jnp.array([0, 1, 2, 1])}
    return network, *jax.jit(network.init)(jax.random.key(0)), batch


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name not in ("linear", "cnn") else []) for name in MODELS],
)
def test_every_network_says_its_units(name):
    """The structure of every network has the right number of groups, and passes the check.

    Flattened maps have 2×2 positions: sides of 8 after two poolings, and sides of 32 after the four of Conv-4.
    """
    network, x, y, batch = made(name, 32 if name == "conv4" else SIDE)
    assert len(UnitLayout.of(network.structure, x, y).sizes) == GROUPS[name]
    fb.check_structure(problem_of(network, network.structure), x, y, batch, batch)


def test_single_precision():
    """If x and y are in float32, the tolerance is that of float32."""
    network, x, y, batch = made("mlp")
    x, y, batch = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if leaf.dtype == jnp.float64 else leaf, (x, y, batch)
    )
    fb.check_structure(problem_of(network, network.structure), x, y, batch, batch)


def small(**changed):
    """Return a loss: two positions of an image, a layer of 4 units, ReLU, flattened to (2, 4), and a head on that."""
    words = {"weight": "_ hidden", "bias": "hidden", "head": "2*hidden _", **changed}

    def loss(x, batch):
        maps = jax.nn.relu(batch["image"] @ x["weight"] + x["bias"])
        return networks.cross_entropy(maps.reshape(len(maps), -1) @ x["head"], batch["label"])

    rng = np.random.default_rng(1)
    x = {"weight": rng.normal(size=(3, 4)), "bias": np.zeros(4), "head": rng.normal(size=(8, 5))}
    batch = {"image": jnp.asarray(rng.normal(size=(6, 2, 3))), "label": jnp.arange(6) % 5}
    return fb.SingleLevel(loss, structure=fb.Structure(words)), x, batch


@pytest.mark.parametrize(
    "changed",
    [
        {"bias": "_"},  # the bias starts at 0, so that permuting the start alone would show nothing
        {"weight": "_ _"},
        {"head": "_ _"},
        {"head": "2*hidden _", "bias": "other"},
    ],
)
def test_an_axis_that_is_not_said(changed):
    problem, x, batch = small(**changed)
    with refuses("problem.structure") as error:
        fb.check_structure(problem, x, None, batch, batch)
    assert any("'hidden' (outer loss" in group for group in error.value.got)


def test_a_flattened_axis_in_the_wrong_order():
    """An axis that is flattened as (units, positions) is refused.

    A structure can describe only an axis that is flattened as (positions, units).
    """
    problem, x, batch = small()

    def loss(x, batch):
        maps = jax.nn.relu(batch["image"] @ x["weight"] + x["bias"])
        return networks.cross_entropy(maps.swapaxes(1, 2).reshape(len(maps), -1) @ x["head"], batch["label"])

    wrong = fb.SingleLevel(loss, structure=problem.structure)
    with refuses("problem.structure") as error:
        fb.check_structure(wrong, x, None, batch, batch)
    assert any("'hidden'" in group for group in error.value.got)


def test_a_branch_whose_units_are_not_the_shortcuts():
    """A branch whose last units are of another group than its shortcut is refused.

    In maps + layer(layer(maps)), the units of the last layer are added to those of the maps, and must be of their
    group.
    """
    inner, last = jax.random.split(jax.random.key(3))
    x = {
        "stem": jax.random.normal(inner, (1, 1, 1, 4)),
        "block": {"layers": [normed(inner, 3, 4, 3), normed(last, 3, 3, 4)]},
    }

    def outer(x, y, batch):
        maps = networks.convolve(batch, x["stem"])
        return jnp.mean((jnp.mean(residual(x["block"], maps), axis=(1, 2)) @ y) ** 2)

    def check(branch):
        layers = [
            {"weight": "_ _ maps inner", "gain": "inner", "bias": "inner"},
            {"weight": f"_ _ inner {branch}", "gain": branch, "bias": branch},
        ]
        structure = fb.Structure({"stem": "_ _ _ maps", "block": {"layers": layers}}, "maps _")
        problem = fb.Bilevel(outer, outer, structure=structure)
        batch = jax.random.normal(jax.random.key(4), (2, 4, 4, 1))
        fb.check_structure(problem, x, jax.random.normal(jax.random.key(5), (4, 2)), batch, batch)

    check("maps")
    with refuses("problem.structure") as error:
        check("branch")
    groups = [group.partition("'")[2].partition("'")[0] for group in error.value.got if "outer loss" in group]
    assert groups == ["branch", "maps"]


def test_each_loss_is_compared():
    """A ridge on a single entry of the head makes its inputs differ, in the inner loss alone."""
    network, x, y, batch = made("mlp")
    plain = problem_of(network, network.structure)
    inner = lambda x, y, batch: plain.outer(x, y, batch) + y["weight"][0, 0] ** 2  # noqa: E731
    with refuses("problem.structure") as error:
        fb.check_structure(fb.Bilevel(plain.outer, inner, structure=network.structure), x, y, batch, batch)
    (only,) = error.value.got
    assert only.startswith("'hidden2' (inner loss ")


@pytest.mark.parametrize("make", [loss_tuning, lambda: classification(hidden=(8,))])
def test_the_tasks_hand_the_structure_on(make):
    task = make()
    outer, inner = (
        {name: jnp.asarray(values[:5]) for name, values in rows.row(0).items()}
        for rows in (task.clients.outer, task.clients.inner)
    )
    assert len(UnitLayout.of(task.problem.structure, task.x0, task.y0).sizes) == 1
    fb.check_structure(task.problem, task.x0, task.y0, outer, inner)


def test_refusals():
    problem, x, batch = small()
    fb.check_structure(problem, x, None, batch, batch)
    none = fb.SingleLevel(lambda x, batch: jnp.zeros(()))
    with refuses("problem.structure", None):
        fb.check_structure(none, x, None, batch, batch)
    with refuses("the outer loss at (x, y) and near it"):
        fb.check_structure(problem, {**x, "bias": np.full(4, np.inf)}, None, batch, batch)
