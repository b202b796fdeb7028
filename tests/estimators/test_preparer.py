"""A table's numbers, agreed on by sites that tell sums and names: beside everyone's rows in one place, and errors."""

import numpy as np
import pandas as pd
import pytest

from fedbilevel.errors import ConfigurationError
from fedbilevel.estimators import Preparer


def site(**columns):
    return pd.DataFrame({"age": [50.0, 60.0], "sex": ["f", "m"], "pain": [1, 4], **columns})


SITES = [
    site(age=[np.nan, np.nan]),
    site(age=[np.nan, 80.0], sex=["m", "x"]),
    site(age=[50.0, 59.0], sex=["m", None], pain=[2, 4]),
]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_sites_in_any_order_tell_what_all_rows_in_one_place_do(order):
    preparer, everyone = Preparer(categorical=["pain"]), pd.concat(SITES)
    for i in order:
        preparer.partial_fit(SITES[i])
    pd.testing.assert_frame_equal(preparer.transform(everyone), Preparer(categorical=["pain"]).fit_transform(everyone))
    assert preparer.categories_ == {"sex": ["f", "m", "x"], "pain": [1, 2, 4]}


def test_numbers_are_standardised_and_gaps_filled():
    """Of 50, 59 and 80 the mean is 63 and the deviation √((13² + 4² + 17²)/3) = √158."""
    preparer = Preparer(categorical=["pain"]).fit(pd.concat(SITES))
    made = preparer.transform(SITES[2].set_axis(["p", "q"]))
    expected = {
        "age": [-13 / 158**0.5, -4 / 158**0.5],
        "sex_f": [0.0, 0.0],
        "sex_m": [1.0, 0.0],
        "sex_x": [0.0, 0.0],
        "pain_1": [0.0, 0.0],
        "pain_2": [1.0, 0.0],
        "pain_4": [0.0, 1.0],
    }
    pd.testing.assert_frame_equal(made, pd.DataFrame(expected, index=["p", "q"]))
    assert preparer.get_feature_names_out().tolist() == list(expected)
    assert preparer.transform(SITES[0])["age"].tolist() == [0.0, 0.0]


def test_pandas_own_types_and_constant_columns():
    frame = pd.DataFrame(
        {
            "count": pd.array([1, None, 3], dtype="Int64"),
            "kind": pd.Categorical(["u", "v", "u"]),
            "yes": [True, False, True],
            "same": 7,
        }
    )
    made = Preparer().fit_transform(frame)
    assert list(made) == ["count", "kind_u", "kind_v", "yes", "same"]
    np.testing.assert_allclose(made["count"], [-1, 0, 1])
    np.testing.assert_allclose(made["yes"], np.array([1, -2, 1]) / 2**0.5)
    assert made["same"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (site().drop(columns="sex"), r"column 'sex' is missing; the frame has age, pain"),
        (site(aeg=[1, 2]), r"unknown column 'aeg'; did you mean 'age'"),
        (site(age=["50", "old"]), r"type of column 'age' = '(str|object)' is not allowed: it must be of numbers"),
        (site(age=[np.inf, 1]), "infinite numbers"),
        (np.zeros((2, 3)), r"X = 'ndarray' is not allowed: it must be a pandas.DataFrame"),
    ],
)
@pytest.mark.parametrize("method", ["partial_fit", "transform"])
def test_what_does_not_fit_is_named(frame, words, method):
    preparer = Preparer().fit(site())
    with pytest.raises(ConfigurationError, match=words):
        getattr(preparer, method)(frame)


def test_an_unknown_category_is_named():
    with pytest.raises(ConfigurationError, match=r"unknown category of column 'sex' 'w'.*allowed: f, m"):
        Preparer().fit(site()).transform(site(sex=["w", "m"]))
    with pytest.raises(ConfigurationError, match=r"unknown categorical column 'pian'; did you mean 'pain'"):
        Preparer(categorical=["pian"]).fit(site())


def test_fit_forgets():
    preparer = Preparer().fit(site(more=[1, 2])).fit(site())
    assert preparer.get_feature_names_out().tolist() == ["age", "sex_f", "sex_m", "pain"]
    assert preparer.counts_.tolist() == [2, 2]
