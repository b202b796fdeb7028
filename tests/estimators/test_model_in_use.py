"""The table of a model says by how much predictions change with a column; scikit-learn gives the same predictions."""

import numpy as np
import pandas as pd
import pytest
from sklearn import linear_model

from fedbilevel.estimators import StudyModel
from fedbilevel.estimators.site_table import SiteTable
from refusals import refuses
from representatives import slow_but
from site_tables import TARGETS, fitted, study, tables


@pytest.mark.parametrize("kind", TARGETS)
def test_rows_that_differ_by_one_unit_differ_by_the_coefficient(kind, tmp_path):
    fitted(kind).save(tmp_path / "model.json")
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
    """Standard errors have the unit of the coefficient, and a saved model keeps them.

    To have the unit of a column, the coefficient of a standardised number and its standard error are divided by the
    same deviation, so that their quotient stays as it is.
    """
    model = fitted("ridge")
    model.save(tmp_path / "model.json")
    printed = StudyModel.load(tmp_path / "model.json").table()
    pd.testing.assert_frame_equal(printed, model.table())
    rest, made = printed.iloc[1:], model.estimator
    np.testing.assert_allclose(
        rest.coefficient / rest["standard error"], made.coef_ / made.standard_errors_, rtol=1e-12
    )
    told = model.agreement.features["age"]
    deviation = np.sqrt(told["squares"] / told["count"])
    place = model.agreement.names.index("age")
    np.testing.assert_allclose(rest["standard error"].iloc[place], made.standard_errors_[place] / deviation, rtol=1e-12)
    np.testing.assert_array_equal(rest.penalty, made.penalties_)


def test_the_intercept_has_the_error_of_the_sandwich_of_the_columns_as_they_are():
    """Standard errors of the table, also the intercept's, are those of the sandwich formula for the original columns.

    The design matrix here is not standardised, and its gaps are filled by means. A penalty λ of a standardised column
    is λ(deviation)² for the original column. The scores of rows, less their mean, are added up by patient of a site. If
    S has these sums in its rows, one for each of m patients, and I is the information with the penalties, the
    covariance is m/(m − 1) I⁻¹ SᵀS I⁻¹.
    """
    given, frames = study("logistic"), tables()
    model = fitted("logistic")
    told, parts, patients, ill = model.agreement.features, [], [], []
    for site, frame in frames.items():
        own = SiteTable(given, site, frame)
        kept = own.features
        patients += [(site, one) for one in own.patients]
        ill += [*(own.target.ill == "yes")]
        made = pd.DataFrame(index=kept.index)
        for name, one in told.items():
            if "categories" in one:
                words = kept[name].map(lambda word: f"{word:g}" if isinstance(word, float) else word)
                for word in one["categories"]:
                    made[f"{name} {word}"] = (words == word) * 1.0
            else:
                made[name] = kept[name].fillna(one["mean"])
        parts.append(made)
    design = pd.concat(parts).assign(one=1.0).to_numpy()
    each = [one for one in told.values() for _ in one.get("categories", [""])]
    deviations = [np.sqrt(one["squares"] / one["count"]) if "count" in one else 1.0 for one in each]
    table = model.table()
    chance = 1 / (1 + np.exp(-design @ [*table.coefficient[1:], table.coefficient[0]]))
    information = design.T @ (design * (chance * (1 - chance))[:, None])
    penalty = 2 * len(design) * np.append(model.estimator.penalties_ * np.square(deviations), 0)
    inverse = np.linalg.inv(information + np.diag(penalty))
    scores = (chance - ill)[:, None] * design
    sums = pd.DataFrame(scores - scores.mean(0)).groupby(pd.MultiIndex.from_tuples(patients)).sum().to_numpy()
    m = len(sums)
    assert m < len(design)
    errors = np.sqrt(m / (m - 1) * np.diag(inverse @ sums.T @ sums @ inverse))
    np.testing.assert_allclose(table["standard error"], [errors[-1], *errors[:-1]], rtol=1e-8)


@pytest.mark.parametrize("kind", slow_but("ridge", of=TARGETS))
def test_a_pipeline_of_scikit_learn_predicts_the_same(kind, tmp_path):
    """The pipeline has a linear model of scikit-learn, and predicts as the study's model does.

    It does so for rows of a site of the study, and of a site that was not in it. The positive class is chosen by
    `positive`, and is not the last one in the alphabet. A Cox model is refused.
    """
    positive = {"positive": "no"} if kind == "logistic" else {}
    model = study(kind, **positive).fit(tables())
    if kind == "cox":
        with refuses("pipeline", "cox", "Cox"):
            model.pipeline()
        return
    pipeline, rows = model.pipeline(), tables()["south"][["age", "dose", "kind", "code"]]
    assert type(pipeline[-1]) in (linear_model.LogisticRegression, linear_model.Ridge)
    for site in ("south", ""):
        frame = rows.assign(site=site or None)
        if kind == "logistic":
            made = pipeline.predict_proba(frame)[:, 1]
            np.testing.assert_allclose(made, model.predict_proba(rows, site), rtol=0, atol=1e-12)
            assert list(pipeline.predict(frame)) == list(model.predict(rows, site))
            assert list(pipeline.classes_) == ["yes", "no"]
        else:
            np.testing.assert_allclose(pipeline.predict(frame), model.predict(rows, site), rtol=1e-12)


@pytest.mark.parametrize("kind", ["logistic", "ridge"])
def test_the_model_of_the_pipeline_becomes_onnx(kind):
    """The linear model of the pipeline can be converted to ONNX, and predicts the same in float32.

    The operators of ONNX for linear models compute in float32.
    """
    skl2onnx, onnxruntime = pytest.importorskip("skl2onnx"), pytest.importorskip("onnxruntime")
    pipeline = fitted(kind).pipeline()
    rows = pipeline[0].transform(tables()["south"][["age", "dose", "kind", "code"]].assign(site="south"))
    rows = rows.astype(np.float32)
    values = rows.to_numpy()
    onnx = skl2onnx.to_onnx(pipeline[-1], values[:1], options={"zipmap": False} if kind == "logistic" else None)
    names = [output.name for output in onnx.graph.output]
    found = dict(
        zip(names, onnxruntime.InferenceSession(onnx.SerializeToString()).run(None, {"X": values}), strict=True)
    )
    if kind == "logistic":
        np.testing.assert_allclose(found["probabilities"], pipeline[-1].predict_proba(rows), rtol=0, atol=1e-6)
        assert found["label"].tolist() == pipeline[-1].predict(rows).tolist()
    else:
        np.testing.assert_allclose(found["variable"][:, 0], pipeline[-1].predict(rows), rtol=1e-5)
