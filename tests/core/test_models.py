"""Do models of Equinox and Flax run without changes, and give the numbers of plain dictionaries of arrays?"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.tree import join, split

ROUNDS = 3
# 3 rounds of 2 steps on sums of at most 5 samples and 4 units: well below 10³ roundings of numbers of order 1
AGREEMENT = 1e-12


def samples(seed):
    rng = np.random.default_rng(seed)
    return [{"u": rng.normal(size=(n, 3)), "t": rng.normal(size=n)} for n in (4, 2, 5)]


CLIENTS = fb.Clients(samples(0), samples(1), weights=[1.0, 2.0, 0.5])


def problem(features, head):
    """Return a problem with a representation x of the inputs and a linear head y; both losses have a small ridge."""

    def loss(x, y, batch):
        prediction = jax.vmap(lambda u: head(y, features(x, u)))(batch["u"])[:, 0]
        return jnp.mean((prediction - batch["t"]) ** 2)

    def size(tree):
        return sum(jnp.sum(a**2) for a in jax.tree.leaves(tree) if hasattr(a, "dtype"))

    return fb.Bilevel(outer=loss, inner=lambda x, y, batch: loss(x, y, batch) + 0.1 * size(y))


def run(features, head, x, y):
    algorithm = fb.SimFBO(local_steps=2, batch_size=None, client_lr=0.05, server_lr=0.1)
    return fb.solve(algorithm, problem(features, head), CLIENTS, x, y, rounds=ROUNDS, key=1)


@pytest.fixture(scope="module")
def plain():
    """Return start and result with dictionaries of arrays."""
    rng = np.random.default_rng(2)
    x = {"w": rng.normal(size=(4, 3)), "b": rng.normal(size=4)}
    y = {"w": rng.normal(size=(1, 4)), "b": rng.normal(size=1)}
    result = run(lambda x, u: jnp.tanh(x["w"] @ u + x["b"]), lambda y, h: y["w"] @ h + y["b"], x, y)
    assert not np.allclose(result.x["w"], x["w"], rtol=1e-3)  # x has moved
    return x, y, result


def agree(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert np.all(np.isfinite(a))
        np.testing.assert_allclose(a, b, rtol=0, atol=AGREEMENT)


def test_equinox_modules(plain):
    eqx = pytest.importorskip("equinox")

    class Features(eqx.Module):
        layer: eqx.nn.Linear
        activation: object  # a function is among the leaves
        width: int = eqx.field(static=True)

        def __call__(self, u):
            return self.activation(self.layer(u))

    def linear(weight, bias):
        made = eqx.nn.Linear(weight.shape[1], weight.shape[0], key=jax.random.key(0))
        return eqx.tree_at(lambda m: (m.weight, m.bias), made, (jnp.asarray(weight), jnp.asarray(bias)))

    x0, y0, expected = plain
    x, y = Features(linear(x0["w"], x0["b"]), jnp.tanh, 4), linear(y0["w"], y0["b"])
    result = run(lambda x, u: x(u), lambda y, h: y(h), x, y)
    assert jax.tree.structure((result.x, result.y)) == jax.tree.structure((x, y))
    assert result.x.activation is jnp.tanh
    agree([result.x.layer.weight, result.x.layer.bias], [expected.x["w"], expected.x["b"]])
    agree([result.y.weight, result.y.bias], [expected.y["w"], expected.y["b"]])
    assert result.x(jnp.ones(3)).shape == (4,)  # the result is still a module


@pytest.mark.slow
def test_flax_nnx_states(plain):
    nnx = pytest.importorskip("flax.nnx")

    def taken_apart(tree):
        rows, columns = tree["w"].shape
        layer = nnx.Linear(columns, rows, param_dtype=float, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer, nnx.Param)
        state["kernel"].set_value(jnp.asarray(tree["w"].T))
        state["bias"].set_value(jnp.asarray(tree["b"]))
        return graph, state

    x0, y0, expected = plain
    (x_graph, x), (y_graph, y) = taken_apart(x0), taken_apart(y0)
    result = run(lambda x, u: jnp.tanh(nnx.merge(x_graph, x)(u)), lambda y, h: nnx.merge(y_graph, y)(h), x, y)
    assert jax.tree.structure((result.x, result.y)) == jax.tree.structure((x, y))
    for got, plain_tree in ((result.x, expected.x), (result.y, expected.y)):
        agree([got["kernel"][...].T, got["bias"][...]], [plain_tree["w"], plain_tree["b"]])


class Point(NamedTuple):
    at: float


def test_numbers_of_python_in_the_fields_of_a_module_are_no_variables():
    """A Python number in a field of a module, such as a dropout rate, is not a variable.

    A number in a dict, list or named tuple is a variable.
    """
    eqx = pytest.importorskip("equinox")
    inside = {"d": eqx.nn.Dropout(0.2), "layers": [eqx.nn.Sequential([eqx.nn.Dropout(0.3)])]}
    variable, fixed = split({"inside": inside, "own": [0.5, Point(0.7)]})
    assert jax.tree.leaves(variable) == [0.5, 0.7]
    assert [leaf for leaf in jax.tree.leaves(fixed) if isinstance(leaf, float)] == [0.2, 0.3]
    assert join(variable, fixed)["inside"]["layers"][0].layers[0].p == 0.3


def statistics(library):
    """Return a model with running statistics, and the place that the error names."""
    if library == "linen":
        nn = pytest.importorskip("flax.linen")
        return nn.BatchNorm(use_running_average=False).init(
            jax.random.key(0), jnp.ones((2, 3))
        ), "['batch_stats']['mean']"
    if library == "nnx":
        nnx = pytest.importorskip("flax.nnx")
        return nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0))), "['mean']"
    eqx = pytest.importorskip("equinox")
    return eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, axis_name="batch", mode="batch"), "[1]"


@pytest.mark.parametrize("library", ["linen", "nnx", "equinox"])
def test_running_statistics_are_refused(library):
    """Running statistics are refused, since they would keep their start, or be treated as parameters."""
    tree, place = statistics(library)
    loss = fb.Bilevel(lambda x, y, batch: jnp.sum(y**2), lambda x, y, batch: jnp.sum((y - x) ** 2))
    with pytest.raises(fb.errors.ConfigurationError) as refused:
        fb.solve(fb.SimFBO(), loss, CLIENTS, np.ones(2), tree, rounds=1)
    assert str(refused.value).startswith(f"y0{place} is a running statistic")
    assert "GroupNorm or LayerNorm" in str(refused.value)
