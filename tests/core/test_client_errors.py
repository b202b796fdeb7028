"""Is every mistake in the description of a population refused with the name of the field?"""

import jax
import numpy as np
import pytest

from fedbilevel.core.client import Clients
from fedbilevel.core.ragged import Ragged
from refusals import refuses

GOOD = np.zeros((3, 4, 2))
TWO = {"u": np.zeros((2, 2)), "t": np.zeros(2)}
ENTRIES = [np.zeros((n, 2)) for n in (4, 1, 2)]


def with_value(value, dtype=float):
    array = np.zeros((3, 4, 2), dtype)
    array[1, 2, 1] = value
    return array


def flat(start, size, total=10):
    return Ragged(np.zeros((total, 2)), np.array(start), np.array(size))


SAMPLES = {
    "empty client in a list": ([np.zeros((2, 2)), np.zeros((0, 2))], {}, "", "client 1 has no samples"),
    "arrays without clients": (GOOD[:0], {}, "", "0 clients"),
    "empty client by size": (GOOD, {"sizes": [4, 0, 4]}, "", "client 1 has no samples"),
    "size beyond what is stored": (GOOD, {"sizes": [4, 5, 4]}, "", "a size of 5 exceeds the 4 samples"),
    "a NaN": (with_value(np.nan), {}, "", "NaN or infinity, first in sample 2 of client 1, entry [1]"),
    "a NaN in a list": (
        [np.zeros((2, 2)), np.full((1, 2), np.nan)],
        {},
        "",
        "NaN or infinity, first in sample 0 of client 1, entry [0]",
    ),
    "a NaN in the padding": (with_value(np.nan), {"sizes": [4, 2, 4]}, "", "NaN or infinity, first in row 6 "),
    "a list of numbers": ([{"u": np.zeros((2, 2)), "t": [1, 2]}], {}, "['t'] of client 0", "np.asarray"),
    "strings": ([{"t": np.arange(2)}, {"t": np.array(["a", "b"])}], {}, "['t'] of client 1", "holds strings"),
    "objects": ([{"t": np.array([1.0, None])}], {}, "['t'] of client 0", "holds Python objects"),
    "PRNG keys": ([{"k": jax.random.split(jax.random.key(0), 3)}], {}, "['k'] of client 0", "key_data"),
    "a tuple of clients": (tuple(ENTRIES), {}, "", "[0] (4, 2), [1] (1, 2)"),
    "a dict of clients": (dict(zip("abc", ENTRIES, strict=True)), {}, "", "a dict: list(samples.values())"),
    "lists of unequal lengths": ([{"t": [[1.0], [1.0, 2.0]]}], {}, "['t'] of client 0", "different lengths"),
    "a masked array": ([np.ma.array([1.0, 2.0], mask=[0, 1])], {}, " of client 0", ".filled"),
    "no arrays": ([None, None], {}, " of client 0", "no arrays"),
    "a NaN in one leaf": ({"u": GOOD, "t": with_value(np.nan)}, {}, "['t']", "NaN"),
    "leaves of different lengths": ({"u": GOOD, "t": GOOD[:, :3]}, {}, "", "['t'] (3, 3, 2), ['u'] (3, 4, 2)"),
    "a number for samples": ([{"u": np.zeros(3), "t": 1.0}], {}, " of client 0", "['t'] (), ['u'] (3,)"),
    "one leading axis": (np.zeros(3), {}, "", "shape (3,)"),
    "entries of different structure": (
        [[np.zeros(2)], (np.zeros(2),)],
        {},
        "",
        "client 1 is a PyTreeDef((*,)), client 0 a",
    ),
    "an extra key": ([TWO, TWO | {"w": np.zeros(2)}], {}, "", "client 1 has ['w']"),
    "a key missing in the first": ([{"u": TWO["u"]}, TWO, TWO], {}, "", "client 0 lacks ['t']"),
    "other features": (
        [TWO, TWO, TWO | {"u": np.zeros((2, 5))}],
        {},
        "",
        "['u'] is of shape (5,) in client 2, (2,) in client 0",
    ),
    "a row beyond the end": (flat([0, 8], [3, 3]), {}, "", "row 1 (start 8, size 3)"),
    "a row before the beginning": (flat([-1, 3], [3, 3]), {}, "", "row 0 (start -1, size 3)"),
    "flat leaves of different lengths": (
        Ragged({"u": np.zeros(9), "t": np.zeros(6)}, np.array([0, 3]), np.array([3, 4])),
        {},
        "",
        "['t'] (6,), ['u'] (9,)",
    ),
}
"""For each case: samples, options, the place within the samples that begins the message, and a part of the message."""


@pytest.mark.parametrize("field", ["outer", "inner"])
@pytest.mark.parametrize("case", SAMPLES)
def test_bad_samples_are_refused(case, field):
    data, options, place, fact = SAMPLES[case]
    other = {"outer": "inner", "inner": "outer"}[field]
    options = {f"{field}_{name}": value for name, value in options.items()}
    with refuses("", fact=fact, where=f"Clients.{field}{place}"):
        Clients(**{field: data, other: GOOD}, **options)


@pytest.mark.parametrize("field", ["outer", "inner"])
def test_no_clients_and_wrong_sizes_are_refused(field):
    other = {"outer": "inner", "inner": "outer"}[field]
    with refuses(f"Clients.{field}", [], "at least one client"):
        Clients(**{field: [], other: GOOD})
    with refuses(f"Clients.{field}_sizes", [4, 4], "(3,)"):
        Clients(**{field: GOOD, other: GOOD, f"{field}_sizes": [4, 4]})
    with refuses(f"Clients.{field}_sizes", [4, 1, 2], "left out"):
        Clients(**{field: ENTRIES, other: GOOD, f"{field}_sizes": [4, 1, 2]})


def test_a_number_beyond_the_precision_of_jax_is_named():
    """A number above the largest float32, 3.4e38, is named if JAX computes in float32."""
    fact = "-1e+39, which is infinite in float32, first in sample 2 of client 1, entry [1]"
    with jax.enable_x64(False):
        Clients(with_value(-3e38))
        with refuses("", fact=fact, where="Clients.outer"):
            Clients(with_value(-1e39))
    with jax.enable_x64(True):
        Clients(with_value(-1e39))


@pytest.mark.parametrize("use", ["train", "val", "test_rows"])
def test_a_use_of_samples_is_answered_with_the_losses(use):
    with refuses("argument of Clients", use) as error:
        Clients(**{use: GOOD})
    assert "`outer`" in str(error.value)
    with refuses("argument of Clients", "qqq") as error:
        Clients(GOOD, qqq=GOOD)
    assert "`outer`" not in str(error.value)


def test_both_losses_need_the_same_clients():
    with refuses("", fact="outer has 2 clients and inner has 3", where="Clients"):
        Clients(GOOD[:2], GOOD)


@pytest.mark.parametrize(
    ("weights", "refusal"),
    [
        ([1.0, 1.0], ("Clients.weights", [1.0, 1.0], "(3,)")),
        ([1.0, -0.1, 1.0], ("Clients.weights", [1.0, -0.1, 1.0])),
        ([1.0, np.inf, 1.0], ("Clients.weights", [1.0, np.inf, 1.0])),
        ([1.0, 0.0, 1.0], ("Clients.weights", [1.0, 0.0, 1.0])),
        ([1.0, 1e-320, 1e300], ("Clients.weights", [1.0, 1e-320, 1e300], "rounds to 0")),
        ("sizes", ("Clients.weights", "sizes", "'size'")),
    ],
)
def test_bad_weights_are_refused(weights, refusal):
    with refuses(*refusal):
        Clients(GOOD, GOOD, weights=weights)


def test_large_weights_sum_to_one():
    """Large weights are normalised, although their sum, 3.5e308, is too large for a float."""
    np.testing.assert_allclose(Clients(GOOD, GOOD, weights=[1e308, 1e308, 1.5e308]).weights, [2 / 7, 2 / 7, 3 / 7])


@pytest.mark.parametrize(
    "steps",
    [0, (3, 2), (0, 2), (1.5, 3), [1, 2], [1, 2, 0], [1.0, 2.0, 3.0], "3", [True, True, True], lambda round: 1],
)
def test_bad_local_steps_are_refused(steps):
    with refuses("Clients.local_steps"):  # some values are reported by their shape or by their first wrong entry
        Clients(GOOD, GOOD, local_steps=steps)


class Frame:
    """What the library uses of a data frame of pandas or polars: the names of the columns, and each column's array."""

    def __init__(self, **columns):
        self.data, self.columns = columns, list(columns)

    def __getitem__(self, name):
        return Frame.Column(self.data[name])

    def to_numpy(self):
        raise AssertionError("columns have dtypes of their own")

    class Column(list):
        def to_numpy(self):
            return np.asarray(self)


def test_a_data_frame_is_the_dict_of_its_columns():
    clients = Clients([Frame(age=[1.5, 2.5], label=[0, 1]), Frame(age=[3.5], label=[1])])
    assert {name: a.tolist() for name, a in clients.outer.values.items()} == {
        "age": [1.5, 2.5, 3.5],
        "label": [0, 1, 1],
    }
    assert clients.outer.values["label"].dtype == int
    with refuses("", fact="strings", where="Clients.outer['label'] of client 0"):
        Clients([Frame(label=["a", "b"])])
