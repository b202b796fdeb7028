"""Do planes have the values that they should, do the right planes stay, and is there always room for the next one?"""

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.algorithms.adbo import FREE, Cut, Planes, combined, products

CAPACITY = 3
X, Z = {"u": jnp.array([1.0, -2.0]), "w": jnp.array([[0.5]])}, jnp.array([3.0, 0.0, -1.0])


def cut(size: float) -> Cut:
    return Cut(jnp.asarray(size), {"u": jnp.array([size, 1.0]), "w": jnp.array([[-size]])}, size * Z, jnp.asarray(0.7))


def with_multipliers(numbers: list[float]) -> Planes:
    """Return planes 0, 1, … in this order, each with its multiplier."""
    planes = Planes.none(X, Z, CAPACITY)
    for serial, number in enumerate(numbers):
        slot = planes.free_slot()
        planes = planes.with_cut(cut(1.0 + serial), 0.1, X, Z, jnp.asarray(serial))
        planes = planes._replace(multiplier=planes.multiplier.at[slot].set(number))
    return planes


def kept(planes: Planes) -> list[int]:
    return sorted(int(serial) for serial in planes.serial if serial != FREE)


def test_a_plane_is_the_linearisation_less_the_tolerance():
    """A plane's value is h + a·(x' − x) + Σ p_i b_i·(y_i' − y_i) + c·(z' − z) − ε, here for h = 2 and ε = 0.1."""
    planes = Planes.none(X, Z, CAPACITY).with_cut(cut(2.0), 0.1, X, Z, jnp.asarray(0))
    assert float(planes.values(X, Z)[0]) == pytest.approx(1.9, abs=1e-14)
    moved = {"u": X["u"] + jnp.array([0.25, 1.0]), "w": X["w"] - 3}
    inner = planes.inner.at[0].add(0.4)
    there = planes._replace(inner=inner).values(moved, Z + 1)[0]
    expected = 1.9 + 2 * 0.25 + 1 * 1.0 - 2 * -3.0 + 0.4 + 2 * (3 + 0 - 1)
    assert float(there) == pytest.approx(expected, abs=1e-13)
    assert planes.values(X, Z)[1:].tolist() == [0.0] * CAPACITY


def test_multipliers_ascend_in_units_of_a_planes_length_and_stay_positive():
    planes = with_multipliers([0.5, 0.5])
    up = planes.ascended(X, Z, 0.2, 0.3)
    # the length is 4h, which is |b|² + |c|², since b and c are twice the gaps
    value, length = planes.values(X, Z)[:2], 4 * np.array([1.0, 2.0])
    np.testing.assert_allclose(up.multiplier[:2], 0.5 + 0.2 * (value / length - 0.3 * 0.5), rtol=1e-14)
    assert planes.ascended(X, Z, 1e3, 0.3).multiplier.tolist() == [
        pytest.approx(0.5 + 1e3 * (0.9 / 4 - 0.15)), pytest.approx(0.5 + 1e3 * (1.9 / 8 - 0.15)), 0, 0,
    ]  # fmt: skip
    assert planes.ascended(X, Z, 10.0, 100.0).multiplier.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("multipliers", "stay"),
    [
        ([0.0], [0]),  # the newest plane stays, since its multiplier has not had time to grow
        ([0.3, 0.0, 0.2], [0, 2]),
        ([0.0, 0.0, 0.0], [2]),
        ([0.1, 0.1, 0.0, 0.0], [0, 1, 3]),
        ([0.9, 0.1, 0.1, 0.0], [1, 2, 3]),  # four planes in four slots: the oldest one goes, whatever its multiplier is
    ],
)
def test_which_planes_stay(multipliers, stay):
    planes = with_multipliers(multipliers)
    newest = jnp.argmax(planes.serial)
    left = planes.without_idle(newest)
    assert kept(left) == stay
    assert not bool(left.active[left.free_slot()])
    assert bool(jnp.all((left.multiplier == 0) | left.active))


def test_tables_of_trees():
    planes = with_multipliers([0.5, 2.0])
    dots = products(planes.outer, X)
    np.testing.assert_allclose(dots, [1 * 1 - 2 - 0.5, 2 * 1 - 2 - 1.0, 0, 0], rtol=1e-14)
    pull = combined(planes.multiplier, planes.outer)
    np.testing.assert_allclose(pull["u"], [0.5 * 1 + 2 * 2, 2.5], rtol=1e-14)
    np.testing.assert_allclose(pull["w"], [[-4.5]], rtol=1e-14)
