"""Submodels: `cut`, `put` and `held` against NumPy, units and their importance, clear refusals, and less work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.submodel import WHOLE, UnitLayout
from fedbilevel.tasks import networks
from refusals import ANY, refuses

SIZES = {"a": 5, "b": 4, "c": 7}
WORDS = ["_", "a", "b", "c", "2*a", "3*b", "1*c"]


def entries(word, units, length):
    """Return the entries of a submodel along an axis with this word and length, counted one by one."""
    if word == "_":
        return list(range(length))
    count, _, group = word.rpartition("*")
    return [run * SIZES[group] + unit for run in range(int(count or 1)) for unit in units[group]]


def length_of(word, rng):
    """Return a length that the word allows; for "_" a number from 1 to 3."""
    count, _, group = word.rpartition("*")
    return int(rng.integers(1, 4)) if word == "_" else int(count or 1) * SIZES[group]


@pytest.fixture(params=range(2))
def case(request):
    """Return random x and y with arrays of 0 to 3 axes, their structure, and some units of each group."""
    rng = np.random.default_rng(request.param)

    def part():
        said = {f"{i}": " ".join(rng.choice(WORDS, size=i % 4)) for i in range(6)}
        said["all"] = "a _ 3*b c"  # every group is in some array
        return {name: rng.normal(size=[length_of(w, rng) for w in words.split()]) for name, words in said.items()}, said

    (x, x_words), (y, y_words) = part(), part()
    units = {g: np.sort(rng.choice(n, size=rng.integers(1, n), replace=False)) for g, n in SIZES.items()}
    return fb.Structure(x_words, y_words), x, y, units


def grid(leaf, words, units):
    """Return the part of an array that is in the submodel, as an index into the array."""
    pairs = zip(words.split(), np.shape(leaf), strict=True)
    return np.ix_(*(entries(word, units, length) for word, length in pairs))


def on_jax(units):
    return {group: jnp.asarray(chosen) for group, chosen in units.items()}


def test_cut_put_and_held_are_numpys(case):
    """`cut`, `put` and `held` equal NumPy's indexing. `put` after `cut` sets all other entries to 0, and `cut` after
    `put` changes nothing. In a prefix tree, each part is cut like x, cut like y, or left whole.
    """
    structure, x, y, units = case
    unit_layout, chosen = UnitLayout.of(structure, x, y), on_jax(units)
    assert dict(unit_layout.sizes) == SIZES
    kinds, tree = ["x", {"like y": "y", "rest": WHOLE}], [x, {"like y": y, "rest": np.arange(3.0)}]

    @jax.jit
    def there_and_back(tree, chosen):
        cut = unit_layout.cut(kinds, tree, chosen)
        put = unit_layout.put(kinds, cut, chosen)
        return cut, put, unit_layout.held(kinds, tree, chosen, jnp.asarray(0.25)), unit_layout.cut(kinds, put, chosen)

    cut, put, held, again = there_and_back(tree, chosen)
    both = [(x, structure.x, cut[0], put[0], held[0])]
    both.append((y, structure.y, cut[1]["like y"], put[1]["like y"], held[1]["like y"]))
    for full, words, small, back, amount in both:
        for name, leaf in full.items():
            at = grid(leaf, words[name], units)
            mask = np.zeros(np.shape(leaf))
            mask[at] = 1
            np.testing.assert_array_equal(small[name], leaf[at])
            np.testing.assert_array_equal(back[name], leaf * mask)
            np.testing.assert_array_equal(amount[name], 0.25 * mask)
    jax.tree.map(np.testing.assert_array_equal, again, cut)
    for found, expected in ((cut, np.arange(3.0)), (put, np.arange(3.0)), (held, np.full(3, 0.25))):
        np.testing.assert_array_equal(found[1]["rest"], expected)


def test_importance_is_what_leaves_with_a_unit(case):
    """The importance of a unit is Σ of squares over all entries that exist only with this unit.

    A submodel of all other units lacks these entries.
    """
    structure, x, y, _ = case
    found = jax.jit(UnitLayout.of(structure, x, y).importance)(x, y)
    for group, size in SIZES.items():
        for unit in range(size):
            lost = 0.0
            for tree, said in ((x, structure.x), (y, structure.y)):
                for name, leaf in tree.items():
                    for place, word in enumerate(said[name].split()):
                        if word.rpartition("*")[2] == group:
                            of_unit = entries(word, {group: [unit]}, leaf.shape[place])
                            lost += np.sum(np.take(leaf, of_unit, axis=place) ** 2)
            np.testing.assert_allclose(found[group][unit], lost, rtol=1e-13)


def test_kept_is_rounded_to_the_nearest():
    unit_layout = UnitLayout.of(fb.Structure({"w": "five eight"}), {"w": np.zeros((5, 8))}, None)
    assert unit_layout.kept(1.0) == {"eight": 8, "five": 5}
    assert unit_layout.kept(0.5) == {"eight": 4, "five": 3}  # of 2.5
    assert unit_layout.kept(0.25) == {"eight": 2, "five": 1}  # of 1.25
    assert unit_layout.kept(0.1) == {"eight": 1, "five": 1}  # of 0.8 and of 0.5
    with refuses("capacity", 0.09, "at least 0.1, for the 5 units of group 'five'"):
        unit_layout.kept(0.09)


@pytest.mark.parametrize(
    ("pruned", "left"), [("both", {"in": 3, "own": 2, "shared": 4}), ("x", {"in": 3}), ("y", {"own": 2})]
)
def test_a_group_of_x_and_y_is_pruned_with_both_alone(pruned, left):
    x, y = {"w": np.ones((3, 4))}, {"w": np.ones((4, 2))}
    unit_layout = UnitLayout.of(fb.Structure({"w": "in shared"}, {"w": "shared own"}), x, y, pruned)
    assert dict(unit_layout.sizes) == left
    cut = unit_layout.cut("x", x, {group: jnp.arange(1) for group in left})
    assert cut["w"].shape == (1 if "in" in left else 3, 1 if "shared" in left else 4)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ({"w": "_ h"}, ("", ANY, "lacks [\"['b']\"] and has []")),
        (
            {"w": "_ h", "b": "h", "c": "_"},
            ("", ANY, "lacks [] and has [\"['c']\"]"),
        ),
        ({"w": "_", "b": "h"}, ("Structure.x['w']", "_", "(6, 4)")),
        ({"w": "h _", "b": "h"}, ("", ANY, "Structure.x['w'], axis 0: 6 units of group 'h'")),
        ({"w": "4*h _", "b": "_"}, ("Structure.x['w'], axis 0", "4*h _", "6")),
        ({"w": "0*h _", "b": "_"}, ("Structure.x['w']", "0*h _")),
        ({"w": "a-b h", "b": "h"}, ("Structure.x['w']", "a-b h")),
        ({"w": 2, "b": "h"}, ("Structure.x['w']", 2)),
    ],
)
def test_a_structure_that_does_not_fit(words, refusal):
    with refuses(*refusal):
        UnitLayout.of(fb.Structure(words), {"w": np.zeros((6, 4)), "b": np.zeros(4)}, None)


def losses(network):
    """Return the cross-entropy as a function of (x, y) alone, and the same with its gradients."""
    images = jnp.asarray(network.prepare(np.random.default_rng(0).normal(size=(64, 4, 4))))
    labels = jnp.arange(64) % 4
    return jax.value_and_grad(lambda pair: networks.cross_entropy(network.logits(*pair, images), labels))


@pytest.mark.slow
def test_a_cut_network_is_the_whole_one_with_its_other_units_at_zero():
    """A cut network equals the whole network with its other units at zero, also in its gradients.

    The network has no normalisation, so that a unit whose weights are all 0 gives 0 to the next layer.
    """
    network = networks.cnn((4, 4), (6, 8, 7), 4)
    x, y = jax.tree.map(lambda leaf: leaf + 0.1, jax.jit(network.init)(jax.random.key(1)))  # so that biases are not 0
    unit_layout, rng = UnitLayout.of(network.structure, x, y), np.random.default_rng(2)
    units = {g: jnp.sort(jnp.asarray(rng.permutation(n)[: n // 2])) for g, n in unit_layout.sizes.items()}
    kinds, loss = ("x", "y"), losses(network)

    @jax.jit
    def both(pair, units):
        small = unit_layout.cut(kinds, pair, units)
        value, of_whole = loss(unit_layout.put(kinds, small, units))
        return loss(small), (value, unit_layout.cut(kinds, of_whole, units))

    jax.tree.map(lambda mine, theirs: np.testing.assert_allclose(mine, theirs, atol=1e-12), *both((x, y), units))


def test_work_falls_with_the_square_of_the_capacity():
    """The work falls with the square of the capacity c.

    For n images, a layer of h×h costs 6nh² for a value and its gradient, and falls by c²; inputs and outputs fall by c.
    Here h = 512, and (16 + 4)/512 = 4 % of the work is at the edges. So it costs at most c² + 0.04c of the whole, and
    operations element by element (ReLU, biases, softmax) cost less than another per cent.
    """
    network = networks.mlp((4, 4), (512, 512), 4)
    whole = jax.eval_shape(network.init, jax.random.key(0))
    unit_layout, loss = UnitLayout.of(network.structure, *whole), losses(network)

    def flops(capacity):
        units = {group: jnp.arange(count) for group, count in unit_layout.kept(capacity).items()}
        small = jax.eval_shape(lambda pair: unit_layout.cut(("x", "y"), pair, units), whole)
        return jax.jit(loss).lower(small).compile().cost_analysis()["flops"]

    total = flops(1.0)
    assert total > 6 * 64 * 512**2 * 0.95
    for capacity in (1 / 2, 1 / 4, 1 / 8):
        share = flops(capacity) / total
        assert capacity**2 * 0.95 < share <= capacity**2 + 0.04 * capacity + 0.01
