"""Measures of predictions agree with scikit-learn, and their standard errors with derivatives in the rows' weights."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score

from fedbilevel.estimators import CoxRegression, measures

RNG = np.random.default_rng(3)
LABEL = RNG.integers(0, 2, 60)
SCORE = (RNG.normal(size=60) + LABEL).round(1)  # with ties
TIME, EVENT = RNG.integers(1, 15, 60).astype(float), RNG.integers(0, 2, 60).astype(float)


def harrell(weight):
    """Return the concordance by its definition, pair by pair; a pair has the product of the weights of its rows."""
    right = pairs = 0.0
    for i in range(60):
        for j in range(60):
            if EVENT[i] and TIME[i] < TIME[j]:
                pairs += weight[i] * weight[j]
                right += weight[i] * weight[j] * ((SCORE[i] > SCORE[j]) + (SCORE[i] == SCORE[j]) / 2)
    return right / pairs


MEASURES = {
    "auroc": (lambda: measures.auroc(SCORE, LABEL), lambda w: roc_auc_score(LABEL, SCORE, sample_weight=w)),
    "auprc": (lambda: measures.auprc(SCORE, LABEL), lambda w: average_precision_score(LABEL, SCORE, sample_weight=w)),
    "concordance": (lambda: measures.concordance(TIME, EVENT, SCORE)[1:], harrell),
}


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_and_its_derivatives_in_the_weights(name):
    """A measure is that of its definition, and a row's influence is the derivative of the measure in the row's weight.

    The derivative in the weight of row j is (θ(w + h e_j) − θ(w − h e_j))/2h with h = 1e-4. Its error is of order h².
    """
    found, weighted = MEASURES[name]
    value, influence = found()
    assert value == pytest.approx(weighted(np.ones(60)), abs=1e-12)
    for row in range(0, 60, 7):
        step = 1e-4 * np.eye(60)[row]
        slope = (weighted(1 + step) - weighted(1 - step)) / 2e-4
        assert influence[row] == pytest.approx(slope, abs=1e-8)
    assert influence.sum() == pytest.approx(0, abs=1e-12)


def test_the_standard_error_of_a_mean_is_the_known_one():
    """The standard error of a mean of n numbers is s/√n, and two equal rows of a patient count as one.

    The influence of the number a_j on the mean is (a_j − mean)/n.
    """
    numbers = RNG.normal(size=20)
    influence = (numbers - numbers.mean()) / 20
    assert measures.standard_error(influence, None) == pytest.approx(numbers.std(ddof=1) / np.sqrt(20))
    patients = np.repeat(np.arange(20) * 3, 2)  # numbers of patients may have gaps
    twice = measures.standard_error(np.repeat(influence, 2) / 2, patients)
    assert twice == pytest.approx(numbers.std(ddof=1) / np.sqrt(20))


def test_the_standard_error_is_that_of_many_bootstraps():
    """The standard error of AUROC is the standard deviation over 2,000 bootstrap samples, stratified by class, to 8 %.

    With 2,000 samples the standard deviation is known to 2 %. The rest is for terms of order 1/n.
    """
    rng, parts = np.random.default_rng(0), [np.flatnonzero(one == LABEL) for one in (0, 1)]
    drawn = [np.concatenate([rng.choice(part, len(part)) for part in parts]) for _ in range(2000)]
    found = np.std([measures.auroc(SCORE[rows], LABEL[rows])[0] for rows in drawn])
    assert measures.standard_error(measures.auroc(SCORE, LABEL)[1], None) == pytest.approx(found, rel=0.08)


def test_calibration_is_that_of_a_regression_on_the_scores():
    """The slope of calibration is that of scikit-learn's regression on the scores, with its standard error.

    The intercept b, at slope 1, has Σ (label − p(b + score)) = 0.
    """
    b, b_error, slope, slope_error = measures.calibration(lambda at: measures.calibration_sums(SCORE, LABEL, at))
    made = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000).fit(SCORE[:, None], LABEL)
    assert slope == pytest.approx(made.coef_[0, 0], abs=1e-6)
    chance = 1 / (1 + np.exp(-b - SCORE))
    assert np.sum(LABEL - chance) == pytest.approx(0, abs=1e-9)
    assert b_error == pytest.approx(np.sum(chance * (1 - chance)) ** -0.5)
    chance, design = made.predict_proba(SCORE[:, None])[:, 1], np.stack([np.ones(60), SCORE], 1)
    covariance = np.linalg.inv(design.T @ (design * (chance * (1 - chance))[:, None]))
    assert slope_error == pytest.approx(covariance[1, 1] ** 0.5, rel=1e-5)


def sandwich(design, label, chance, patients):
    """Return standard errors from scores that are summed by patient; the model has the log odds design @ w."""
    information = design.T @ (design * (chance * (1 - chance))[:, None])
    left = (label - chance)[:, None] * design
    scores = np.array([left[patients == one].sum(0) for one in np.unique(patients)])
    inverse, m = np.linalg.inv(information), len(scores)
    return np.sqrt(m / (m - 1) * np.diag(inverse @ scores.T @ scores @ inverse))


def test_calibration_has_errors_by_patient():
    """With patients, the errors of calibration are those of the sandwich of scores that are summed by patient.

    The patients have numbers with gaps, and one to four rows each. For the intercept the score is an offset, and the
    only column of the design is 1.
    """
    patients = 7 * np.random.default_rng(2).integers(0, 25, 60)
    b, b_error, slope, slope_error = measures.calibration(
        lambda at: measures.calibration_sums(SCORE, LABEL, at, patients)
    )
    assert [b, slope] == measures.calibration(lambda at: measures.calibration_sums(SCORE, LABEL, at))[::2]
    made = LogisticRegression(C=np.inf, tol=1e-12, max_iter=1000).fit(SCORE[:, None], LABEL)
    design = np.stack([np.ones(60), SCORE], 1)
    errors = sandwich(design, LABEL, made.predict_proba(SCORE[:, None])[:, 1], patients)
    assert slope_error == pytest.approx(errors[1], rel=1e-5)
    errors = sandwich(design[:, :1], LABEL, 1 / (1 + np.exp(-b - SCORE)), patients)
    assert b_error == pytest.approx(errors[0], rel=1e-9)


def test_errors_of_calibration_by_patient_are_the_usual_ones_if_shares_are_exactly_as_predicted():
    """Without repeated rows, and with the shares of positive rows that the model predicts, both errors are equal.

    Of n rows with the probability p, np are positive, with the residual 1 − p, and n(1 − p) negative, with −p. So the
    sum of squared residuals is np(1 − p)² + n(1 − p)p² = np(1 − p), which is the part of these rows in the information
    matrix. So the sandwich is the inverse of this matrix, except for the factor m/(m − 1). Ten copies of each row, as
    rows of one patient, change nothing.
    """
    share = np.repeat([0.25, 0.5, 0.75], [8, 4, 8])
    score, label = np.log(share / (1 - share)), np.repeat([1, 0, 1, 0, 1, 0], [2, 6, 2, 2, 6, 2])
    usual = measures.calibration(lambda at: measures.calibration_sums(score, label, at))
    expected = usual * np.array([1, np.sqrt(20 / 19)] * 2)
    assert usual[::2] == pytest.approx([0, 1], abs=1e-9)
    for copies in (1, 10):
        rows, patients = (np.repeat(one, copies) for one in (score, np.arange(20)))
        labels = np.repeat(label, copies)
        found = measures.calibration(lambda at: measures.calibration_sums(rows, labels, at, patients))  # noqa: B023
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_calibration_of_a_single_patient_has_no_error():
    patients = np.zeros(60, int)
    assert measures.calibration(lambda at: measures.calibration_sums(SCORE, LABEL, at, patients)) is None


def test_scores_that_separate_the_classes_have_no_slope():
    score = np.where(LABEL, 1.0, -1.0) * RNG.uniform(1, 2, 60)
    assert measures.calibration(lambda at: measures.calibration_sums(score, LABEL, at)) is None


def test_an_interval_of_a_share_stays_between_0_and_1():
    """The interval of a share is computed for its log odds, so that it stays between 0 and 1.

    The log odds of 0.95 are log 19. An error of 0.04 in the share is an error of 0.04/(0.95·0.05) = 0.04/0.0475 in
    them.
    """
    low, high = measures.interval(0.95, 0.04, share=True)
    assert np.log(low / (1 - low)) == pytest.approx(np.log(19) - 1.959964 * 0.04 / 0.0475, abs=1e-5)
    assert 0.95 < high < 1
    assert measures.interval(1.0, 0.0, share=True) is None
    assert measures.interval(2.0, 1.0) == pytest.approx((0.040036, 3.959964), abs=1e-6)


@pytest.mark.parametrize("least", [1, 5, 40])
def test_each_group_has_the_least_number_of_rows(least):
    counts = np.random.default_rng(least).poisson(2, 50)
    groups = measures.merged(counts, least)
    rows = [counts[start:stop].sum() for start, stop in groups]
    assert min(rows) >= least
    assert 0 <= counts.sum() - sum(rows) < least
    assert [start for start, _ in groups] == [0, *(stop for _, stop in groups[:-1])]
    probability = np.repeat((np.arange(50) + 0.5) / 50, counts)
    label = (np.arange(len(probability)) % 3 == 0).astype(int)
    made = np.array(measures.grouped(probability, label, least))
    assert (made[0, 0], made[-1, 1]) == (0, 50)
    assert made[:, 2:4].sum(1).min() >= least
    assert made[:, 2:].sum(0) == pytest.approx([np.sum(label == 0), label.sum(), probability.sum()])
    if least == 1:
        assert len(groups) == len(made) == np.sum(counts > 0)


@pytest.mark.slow
def test_the_slope_of_hazards_is_that_of_a_cox_regression_without_penalty():
    made = CoxRegression(penalties=0.0).fit(SCORE[:, None], np.column_stack([TIME, EVENT]), groups=np.zeros(60))
    slope, error = measures.hazard_slope(TIME, EVENT, SCORE)
    assert slope == pytest.approx(made.coef_[0], rel=1e-6)
    assert error == pytest.approx(made.standard_errors_[0], rel=1e-5)
    for times in (0.01, 1e4):
        assert measures.hazard_slope(TIME, EVENT, times * SCORE) == pytest.approx([slope / times, error / times])


def test_rows_of_a_patient_do_not_narrow_the_interval_of_the_slope_of_hazards():
    """Ten copies of each row, as rows of one patient, have the standard error of the rows without copies.

    Without copies, the error by patients is about that of the information: they agree to 30 %.
    """
    slope, error = measures.hazard_slope(TIME, EVENT, SCORE)
    once = measures.hazard_slope(TIME, EVENT, SCORE, np.arange(60))
    tenfold = (np.repeat(each, 10) for each in (TIME, EVENT, SCORE, np.arange(60)))
    assert once == pytest.approx([slope, error], rel=0.3)
    assert measures.hazard_slope(*tenfold) == pytest.approx(once, rel=1e-9)


def test_the_error_by_patients_is_that_of_the_slope_s_derivatives_in_the_weights():
    """The standard error by patients is that of the derivatives of the slope in the weights of the rows.

    The derivatives are differences between slopes where one row occurs 99 or 101 times, and all others 100 times.
    """
    influence = []
    for row in range(60):
        times = np.full(60, 100)
        slope = []
        for count in (99, 101):
            times[row] = count
            slope.append(measures.hazard_slope(*(np.repeat(each, times) for each in (TIME, EVENT, SCORE)))[0])
        influence.append((slope[1] - slope[0]) / 0.02)
    patients = np.arange(60) // 3
    _, error = measures.hazard_slope(TIME, EVENT, SCORE, patients)
    assert error == pytest.approx(measures.standard_error(np.array(influence), patients), rel=1e-3)


@pytest.mark.parametrize("risk", [np.zeros(60), -TIME])
def test_hazards_without_a_maximum_have_no_slope(risk):
    """There is no slope if all predictions are equal, or if they have exactly the order of the events."""
    assert measures.hazard_slope(TIME, np.ones(60), risk) is None
