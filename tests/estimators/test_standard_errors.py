"""Standard errors of coefficients are those of formulas that are written out in NumPy, on sites of unequal size."""

import warnings

import numpy as np
import pandas as pd
import pytest

from fedbilevel.errors import DataWarning
from fedbilevel.estimators import CoxRegression, LogisticRegression, Ridge, Study
from fedbilevel.estimators.agreement import Agreement
from fedbilevel.estimators.coefficient_errors import Minimum
from fedbilevel.estimators.site_table import SiteTable
from refusals import refuses
from representatives import slow_but
from site_tables import fitted, study, tables

RNG = np.random.default_rng(11)
X = RNG.normal(size=(90, 3)) * [1, 5, 0.2] + [0, 3, 1]
SITE = np.repeat([0, 1, 2], [20, 30, 40])
Z = X @ [0.5, -0.2, 1.0]
LABEL = (RNG.random(90) < 1 / (1 + np.exp(-Z))).astype(int)
DESIGN = np.column_stack([X, np.ones(90)])
PENALTIES = [0.05, 0.5, 0.001]
PENALTY = 2 * 90 * np.diag([*PENALTIES, 0])  # n·2Λ
PATIENT = RNG.integers(0, 12, 90)  # at each site; the same numbers at two sites are different patients


def sandwich(information, penalty):
    inverse = np.linalg.inv(information + penalty)
    return np.sqrt(np.diag(inverse @ information @ inverse))[:3]


@pytest.mark.slow
@pytest.mark.parametrize("penalised", [False, True])
def test_of_logistic_regression(penalised):
    """Standard errors of logistic regression are those of the sandwich formula with the information Σ p(1 − p) a aᵀ."""
    made = LogisticRegression(penalties=PENALTIES if penalised else 0.0).fit(X, LABEL, groups=SITE)
    chance = made.predict_proba(X)[:, 1]
    information = DESIGN.T @ (DESIGN * (chance * (1 - chance))[:, None])
    np.testing.assert_allclose(made.standard_errors_, sandwich(information, penalised * PENALTY), rtol=1e-6)


@pytest.mark.parametrize("penalised", slow_but(True, of=[False, True]))
def test_of_linear_regression(penalised):
    """Standard errors of ridge regression are those of the covariance s² (AᵀA + nΛ)⁻¹ AᵀA (AᵀA + nΛ)⁻¹.

    s² is the sum of squared residuals divided by the degrees of freedom n − tr AᵀA (AᵀA + nΛ)⁻¹.
    """
    y = 20 * Z + RNG.normal(size=90) + 100
    made = Ridge(penalties=PENALTIES if penalised else 0.0).fit(X, y, groups=SITE)
    products, penalty = DESIGN.T @ DESIGN, penalised * PENALTY / 2
    freedom = np.trace(np.linalg.solve(products + penalty, products))
    variance = np.sum((y - made.predict(X)) ** 2) / (90 - freedom)
    np.testing.assert_allclose(made.standard_errors_, np.sqrt(variance) * sandwich(products, penalty), rtol=1e-6)


def test_a_constant_target_leaves_no_residuals_and_so_no_errors():
    made = Ridge(penalties=PENALTIES).fit(X, np.full(90, 3.5), groups=SITE)
    np.testing.assert_allclose([*made.coef_, made.intercept_], [0, 0, 0, 3.5], atol=1e-12)
    np.testing.assert_allclose(made.standard_errors_, 0, atol=1e-6)


@pytest.mark.slow
def test_of_cox_regression():
    """Standard errors of Cox regression are those of the information of the stratified partial likelihood.

    The information is a sum over events of the covariance of the features among the rows at risk.
    """
    time, event = RNG.integers(1, 20, 90).astype(float), RNG.integers(0, 2, 90)
    made = CoxRegression(penalties=PENALTIES).fit(X, np.column_stack([time, event]), groups=SITE)
    hazard, information = np.exp(X @ made.coef_), np.zeros((3, 3))
    for row in np.flatnonzero(event):
        there = (SITE[row] == SITE) & (time >= time[row])
        information += np.cov(X[there].T, aweights=hazard[there], ddof=0)
    np.testing.assert_allclose(made.standard_errors_, sandwich(information, PENALTY[:3, :3]), rtol=1e-6)


def by_patient(information, scores):
    """Return the errors of the sandwich of scores that are summed by patient of a site, after their mean is removed.

    `information` is that of all rows, with the penalties, and `scores` is an array of shape (n, D).
    """
    centred, inverse = scores - scores.mean(0), np.linalg.inv(information)
    sums = np.array([centred[one == PATIENT + 100 * SITE].sum(0) for one in np.unique(PATIENT + 100 * SITE)])
    m = len(sums)
    assert m < 40
    return np.sqrt(m / (m - 1) * np.diag(inverse @ sums.T @ sums @ inverse))[:3]


def test_of_logistic_regression_by_patient():
    made = LogisticRegression(penalties=PENALTIES).fit(X, LABEL, groups=SITE, patients=PATIENT)
    chance = made.predict_proba(X)[:, 1]
    information = DESIGN.T @ (DESIGN * (chance * (1 - chance))[:, None])
    errors = by_patient(information + PENALTY, (chance - LABEL)[:, None] * DESIGN)
    np.testing.assert_allclose(made.standard_errors_, errors, rtol=1e-8)


def test_of_linear_regression_by_patient():
    """Errors of ridge regression by patient need no residual variance: the scores are 2(prediction − target) a."""
    y = 20 * Z + RNG.normal(size=90) + 100
    made = Ridge(penalties=PENALTIES).fit(X, y, groups=SITE, patients=PATIENT)
    errors = by_patient(2 * DESIGN.T @ DESIGN + PENALTY, 2 * (made.predict(X) - y)[:, None] * DESIGN)
    np.testing.assert_allclose(made.standard_errors_, errors, rtol=1e-8)


def test_of_cox_regression_by_patient():
    """Errors of Cox regression by patient are those of scores that loops over pairs of rows compute.

    A row's score has a part from its own event, and from each event of its site while it is at risk: the share of its
    hazard in the sum over rows at risk, times the difference between its features and their weighted mean.
    """
    time, event = RNG.integers(1, 20, 90).astype(float), RNG.integers(0, 2, 90)
    target = np.column_stack([time, event])
    made = CoxRegression(penalties=PENALTIES).fit(X, target, groups=SITE, patients=PATIENT)
    hazard, information, scores = np.exp(X @ made.coef_), PENALTY[:3, :3].copy(), np.zeros((90, 3))
    for row in np.flatnonzero(event):
        there = (SITE[row] == SITE) & (time >= time[row])
        information += np.cov(X[there].T, aweights=hazard[there], ddof=0)
        mean = np.average(X[there], axis=0, weights=hazard[there])
        scores[row] -= X[row] - mean
        scores[there] += (hazard[there] / hazard[there].sum())[:, None] * (X[there] - mean)
    np.testing.assert_allclose(made.standard_errors_, by_patient(information, scores), rtol=1e-8)


@pytest.mark.parametrize("kind", slow_but(Ridge, of=[LogisticRegression, Ridge, CoxRegression]))
def test_copies_of_rows_do_not_make_coefficients_more_certain(kind):
    """Three copies of each row, as rows of one patient, have the errors of rows without copies.

    All sums over rows, also that of the scores of a patient, are three times as large, and so are the information and
    the penalties of a sum of rows. In the covariance the factors 3⁻¹ · 3² · 3⁻¹ cancel. Without patients, errors are
    smaller by the factor √3.
    """
    rng = np.random.default_rng(5)
    y = np.column_stack([rng.exponential(5, 90), LABEL]) if kind is CoxRegression else LABEL

    def errors(copies, patients):
        number = np.arange(90) if patients else None
        rows, target, site, patient = (
            None if one is None else np.repeat(one, copies, axis=0) for one in (X, y, SITE, number)
        )
        return kind(penalties=PENALTIES).fit(rows, target, groups=site, patients=patient).standard_errors_

    np.testing.assert_allclose(errors(3, True), errors(1, True), rtol=1e-6)
    freedom = np.sqrt((270 - 4) / (3 * (90 - 4))) if kind is Ridge else 1.0  # n − D, nearly, if penalties are small
    np.testing.assert_allclose(errors(3, False) * np.sqrt(3) * freedom, errors(1, False), rtol=2e-2)


@pytest.mark.slow
def test_without_repeated_rows_errors_by_patient_are_the_usual_ones_if_shares_are_exactly_as_predicted():
    """In a model of two groups of rows without penalties, both formulas have the same errors, up to √(m/(m − 1)).

    The model predicts the share p of each group. Of n rows of a group, np have the residual 1 − p and n(1 − p) have −p,
    so the sum of squared residuals is np(1 − p)² + n(1 − p)p² = np(1 − p), as in the information. The mean score is 0.
    """
    label = np.repeat([1, 0, 1, 0], [4, 12, 9, 15])
    rows, site = np.repeat([0.0, 1.0], [16, 24])[:, None], np.arange(40) % 2
    usual, found = (
        LogisticRegression(penalties=0.0).fit(rows, label, groups=site, patients=patients).standard_errors_
        for patients in (None, np.arange(40))
    )
    np.testing.assert_allclose(found, usual * np.sqrt(40 / 39), rtol=1e-8)
    np.testing.assert_allclose(usual, np.sqrt(1 / (16 / 4 * 3 / 4) + 1 / (24 * 3 / 8 * 5 / 8)), rtol=1e-8)


@pytest.mark.slow
def test_a_single_patient_has_no_errors():
    with pytest.warns(DataWarning, match="one patient"):
        made = LogisticRegression(penalties=PENALTIES).fit(X, LABEL, groups=np.zeros(90), patients=np.zeros(90))
    assert made.standard_errors_ is None
    assert made.covariance_ is None


def test_as_many_coefficients_as_patients_cause_a_warning():
    """If there are as many patients as coefficients (with the intercept), there is a warning; with one more, none."""
    size = X.shape[1] + 1
    with pytest.warns(DataWarning, match=f"{size} patients and {size} coefficients"):
        LogisticRegression(penalties=PENALTIES).fit(X, LABEL, groups=np.zeros(90), patients=np.arange(90) % size)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        LogisticRegression(penalties=PENALTIES).fit(X, LABEL, groups=np.zeros(90), patients=np.arange(90) % (size + 1))


def test_a_site_with_few_patients_sends_no_scores_and_there_are_no_errors():
    """A site with one patient less than min_count does not answer; then there are no errors, and a warning names it."""
    agreement, asked = fitted("ridge").agreement, fitted("ridge").estimator._minimum.question
    frame = tables()["west"]
    for patients, told in ((8, True), (7, False)):
        few = frame.assign(patient=np.arange(len(frame)) % patients)
        answer = SiteTable(study("ridge", min_count=8), "west", few).answer(agreement, asked)
        assert (answer is not None) == told
    with pytest.warns(DataWarning, match="fewer than min_count patients at west"):
        assert fitted("ridge").estimator._minimum.covariance_by_patient({"west": answer}) is None


def test_scores_of_many_features_are_not_sent():
    """A site refuses a question about scores with more than 300 features, which only a dishonest server asks."""
    rng, width = np.random.default_rng(0), 301
    frame = pd.DataFrame(rng.normal(size=(12, width)), columns=[f"x{j}" for j in range(width)])
    frame = frame.assign(y=rng.normal(size=12), patient=range(12))
    given = Study(estimator="ridge", target="y", sites=("north",), patient="patient", min_count=1)
    table = SiteTable(given, "north", frame)
    agreement = Agreement.of(given, [table.statistics()])
    with refuses("question", "mean gradient", "at most 300 features"):
        table.answer(agreement, {"model": [0.0] * (width + 2), "mean gradient": [0.0] * (width + 2)})


def test_scores_are_asked_for_only_where_patients_may_have_several_rows():
    """A site answers about scores only if the study has a column of patients, and says nothing if it is held out."""
    agreement, asked = fitted("ridge").agreement, fitted("ridge").estimator._minimum.question
    for given, told in ((study("ridge"), True), (study("ridge", holdout="west"), False)):
        answer = SiteTable(given, "west", tables()["west"]).answer(agreement, asked)
        assert (answer is not None) == told
    with refuses("question", "mean gradient", "column of patients"):
        given = study("ridge", patient="", drop=("patient", "ill", "died"))
        SiteTable(given, "west", tables()["west"]).answer(agreement, asked)
    one = SiteTable(study("ridge"), "west", tables()["west"])
    with refuses("model of the question", (2,), "(11,)"):
        one.answer(agreement, asked | {"model": [0.0, 1.0]})
    with refuses("model of the question", "missing"):
        one.answer(agreement, {name: value for name, value in asked.items() if name != "model"})


@pytest.mark.parametrize(
    ("answer", "path"),
    [
        ([], "scores of north"),
        ({"patients": 2}, "scores of north"),
        ({"patients": 0, "products": [[1.0]]}, "scores of north"),
        ({"patients": 2, "products": [1.0]}, "products of north"),
        ({"patients": 2, "products": [[float("nan")]]}, "products of north"),
        ({"patients": 2, "products": [[-1.0]]}, "least eigenvalue of the products of north"),
    ],
)
def test_an_answer_about_scores_of_another_form_is_refused(answer, path):
    one = np.ones((1, 1))
    minimum = Minimum(one[0], one[0], one, one[0], one, 10)
    with refuses(path):
        minimum.covariance_by_patient({"north": answer})
