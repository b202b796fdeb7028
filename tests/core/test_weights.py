"""Submodels weight by weight: the held weights against NumPy's order, what is sent, and the slopes of TCB-GD."""

import jax
import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.core.submodel import ClientSlot, UnitLayout, UnitPolicy
from fedbilevel.core.weights import WeightLayout, controlled

STRUCTURE = fb.Structure({"bias": "_", "weight": "_ hidden"}, {"scale": "hidden", "shift": "_"})
SLOT = ClientSlot(0, jax.random.key(0), 0, 0, 1)


def parts(rng):
    x = {"bias": rng.normal(size=3), "weight": rng.normal(size=(3, 4))}
    return x, {"scale": rng.normal(size=4), "shift": rng.normal(size=2)}


def laid_out(x, y, capacity, pruned="both"):
    weight_layout = WeightLayout.over(UnitLayout.of(STRUCTURE, x, y), x, y, pruned, biased=False)
    kept, importance = weight_layout.kept(capacity), weight_layout.importance(x, y)
    return weight_layout, UnitPolicy(policy="weights").units(weight_layout, kept, importance, SLOT)


def test_cut_put_and_held_are_numpys():
    """At a capacity of ½, the largest 6 of 12 weights of x, and 2 of 4 of y, are held; a part with "_" is whole."""
    rng = np.random.default_rng(0)
    (x, y), others, kinds = parts(rng), parts(rng), ("x", {"like y": "y", "rest": "whole"})
    weight_layout, units = laid_out(x, y, 0.5)
    assert weight_layout.sizes == {"x": 12, "y": 4}
    tree = others[0], {"like y": others[1], "rest": np.arange(3.0)}
    masks = {}
    for part, leaf in (("x", x["weight"]), ("y", y["scale"])):
        least = np.sort(np.abs(leaf).ravel())[-(leaf.size // 2)]
        masks[part] = np.abs(leaf) >= least
        np.testing.assert_allclose(units[part].least, least)
    cut = weight_layout.cut(kinds, tree, units)
    np.testing.assert_array_equal(cut[0]["held"], others[0]["weight"][masks["x"]])
    np.testing.assert_array_equal(cut[1]["like y"]["whole"][0], others[1]["shift"])
    put = weight_layout.put(kinds, cut, units)
    held = weight_layout.held(kinds, cut, units, jnp.asarray(0.25))
    for got, leaf in ((put, others), (held, jax.tree.map(lambda leaf: np.full(leaf.shape, 0.25), others))):
        np.testing.assert_array_equal(got[0]["weight"], leaf[0]["weight"] * masks["x"])
        np.testing.assert_array_equal(got[1]["like y"]["scale"], leaf[1]["scale"] * masks["y"])
        np.testing.assert_array_equal(got[0]["bias"], leaf[0]["bias"])
    np.testing.assert_array_equal(held[1]["rest"], np.full(3, 0.25))


def test_as_many_are_held_as_the_capacity_says_and_no_more():
    """As many weights are held as the capacity says: of equal magnitudes the first ones.

    A client that holds all weights gets the whole message.
    """
    x, y = jax.tree.map(np.ones_like, parts(np.random.default_rng(0)))
    _, units = laid_out(x, y, 0.25)
    assert units["x"].places.tolist() == [0, 1, 2]
    weight_layout, everything = laid_out(x, y, 1.0)
    assert weight_layout.sent("x", x, everything) is x


def test_what_is_sent_says_which_weights_it_has():
    """A message has a flag for each weight: two bytes for the 12 weights of x, with the first flag in the highest bit.

    y is not cut with pruned = "x".
    """
    structure_of_x = fb.Structure({"bias": "_", "weight": "_ hidden"})
    x, y = {"bias": np.zeros(3), "weight": np.array([[9.0, 0, 0, 8], [7, 0, 0, 0], [0, 0, 0, 6]])}, np.zeros(2)
    weight_layout = WeightLayout.over(UnitLayout.of(structure_of_x, x, y), x, y, "x", biased=True)
    units = UnitPolicy(policy="weights").units(weight_layout, {"x": 4}, weight_layout.importance(x, y), SLOT)
    sent = weight_layout.sent(("x", "y"), (x, y), units)
    assert sent.bits["x"].tolist() == [0b10011000, 0b00010000]
    assert (sent.content[0]["held"].tolist(), float(sent.least["x"])) == ([9.0, 8.0, 7.0, 6.0], 6.0)
    assert sent.content[1] is y


def test_weights_of_one_variable_are_its_own():
    """With pruned = "x" or "y", weights of one variable can be cut although its units cannot.

    Here the only group of units has entries in x and in y.
    """
    x, y = parts(np.random.default_rng(1))
    assert [dict(laid_out(x, y, 0.5, pruned)[0].sizes) for pruned in ("x", "y")] == [{"x": 12}, {"y": 4}]
    assert UnitLayout.of(STRUCTURE, x, y, "x").sizes == {}


def test_slopes_are_those_of_threshold_controlled_descent():
    """The slope is 1 + 2|w|θ/(|w| + θ)² for |w| ≥ θ and 0 below θ.

    At w = 2, −1, ½, 0 with θ = 1 it is 13/9, 3/2, 0, 0. With θ = 0 it is 1.
    """
    weights = jnp.array([2.0, -1.0, 0.5, 0.0])
    value, slopes = jax.vjp(lambda w: controlled(w, jnp.asarray(1.0)), weights)
    np.testing.assert_array_equal(value, [2.0, -1.0, 0.0, 0.0])
    np.testing.assert_allclose(slopes(jnp.ones(4))[0], [13 / 9, 3 / 2, 0.0, 0.0], rtol=1e-15)
    _, plain = jax.vjp(lambda w: controlled(w, jnp.asarray(0.0)), weights)
    np.testing.assert_array_equal(plain(jnp.ones(4))[0], np.ones(4))
