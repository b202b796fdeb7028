"""The table of a study's model: rows that differ by one unit differ in their predictions by the coefficient."""

import numpy as np
import pandas as pd
import pytest

from fedbilevel.estimators import StudyModel
from site_tables import TARGETS, study, tables


@pytest.mark.parametrize("kind", TARGETS)
def test_rows_that_differ_by_one_unit_differ_by_the_coefficient(kind, tmp_path):
    study(kind).fit(tables()).save(tmp_path / "model.json")
    model = StudyModel.load(tmp_path / "model.json")
    printed = model.table()
    known = printed.set_index(["column", "category"])

    def score(site="", **values):
        row = {"age": 50.0, "dose": 1.0, "kind": None, "code": None, **values}
        frame = pd.DataFrame({name: [value] for name, value in row.items()})
        if kind != "logistic":
            return float(model.predict(frame, site)[0])
        share = float(model.predict_proba(frame, site)[0])
        return np.log(share / (1 - share))

    changes = {("age", ""): {"age": 51.0}, ("dose", ""): {"dose": 2.0}, ("kind", "b"): {"kind": "b"}}
    changes |= {("code", "2"): {"code": 2}, **({} if kind == "cox" else {("site", "west"): {"site": "west"}})}
    for place, change in changes.items():
        coefficient = known.loc[place, "coefficient"]
        assert abs(coefficient) > 1e-4
        np.testing.assert_allclose(score(**change) - score(), coefficient, rtol=0, atol=1e-9)
    ratio = {"logistic": "odds ratio", "cox": "hazard ratio"}.get(kind)
    assert list(printed.columns) == [
        *("column", "category", "coefficient"),
        *([ratio] if ratio else []),
        *("standard error", "penalty"),
    ]
    if ratio:
        np.testing.assert_allclose(known.loc[("age", ""), ratio], np.exp(score(age=51.0) - score()), rtol=1e-9)
    if kind == "cox":
        assert "(intercept)" not in list(printed.column)
    else:
        np.testing.assert_allclose(score(age=0.0, dose=0.0), known.loc[("(intercept)", ""), "coefficient"], atol=1e-9)


def test_standard_errors_are_in_the_unit_of_the_coefficient_and_saved(tmp_path):
    """Of a standardised number coefficient and error are divided by the same deviation: their quotient stays."""
    fitted = study("ridge").fit(tables())
    fitted.save(tmp_path / "model.json")
    printed = StudyModel.load(tmp_path / "model.json").table()
    pd.testing.assert_frame_equal(printed, fitted.table())
    rest, made = printed.iloc[1:], fitted.estimator
    np.testing.assert_allclose(
        rest.coefficient / rest["standard error"], made.coef_ / made.standard_errors_, rtol=1e-12
    )
    told = fitted.agreement.features["age"]
    deviation = np.sqrt(told["squares"] / told["count"])
    place = fitted.agreement.names.index("age")
    np.testing.assert_allclose(rest["standard error"].iloc[place], made.standard_errors_[place] / deviation, rtol=1e-12)
    np.testing.assert_array_equal(rest.penalty, made.penalties_)
    assert np.isnan(printed["standard error"][0])
