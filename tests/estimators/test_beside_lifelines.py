"""Cox's model, baseline hazards and Kaplan-Meier curves agree with lifelines and with a direct maximisation.

The constants LIFELINES… have what lifelines 0.30.3 printed for these rows, with `CoxPHFitter().fit(…,
fit_options={"precision": 1e-12})`. The baseline hazard of lifelines is that of mean covariates. Here it is converted to
that of covariates 0. Without tied times, the methods of Breslow and Efron are the same.
"""

import numpy as np
import pytest

from fedbilevel.estimators import CoxRegression
from fedbilevel.estimators.survival_curves import kaplan_meier, steps, survival
from representatives import slow_but

AGE = [73, 50, 44, 51, 56, 72, 58, 43, 53, 64, 72, 69, 79, 47, 75, 42, 62, 50, 48, 66, 52, 62, 50, 46]
DOSE = [3, 1.5, 3, 3, 4, 1.5, 0.5, 2.5, 4, 4, 3.5, 3, 1.5, 1.5, 0, 0.5, 1, 1.5, 2.5, 2, 3, 4, 3.5, 3]
X = np.column_stack([AGE, DOSE]).astype(float)
OF_NORTH = [55, 133, 288, 240, 135, 21, 12, 97, 393, 139]
OF_SOUTH = [171, 62, 11, 148, 67, 115, 57, 36, 116, 131, 93, 20, 321, 68]
TIME = np.array([*OF_NORTH, *OF_SOUTH], float)
TIED = 30 * np.ceil(TIME / 30)  # in months: up to five rows have the same time
EVENT = np.array([1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0], float)
SITE = np.repeat([0, 1], [10, 14])
ONE = np.zeros(24, int)

LIFELINES = {  # whether sites are strata -> coefficients, standard errors
    False: ([0.055052492943626886, -0.6526780753102002], [0.02455220555949026, 0.2360970485648987]),
    True: ([0.04571039453731059, -0.6207053307627298], [0.024558608682783267, 0.25842627141391544]),
}
LIFELINES_TIED = {  # coefficients and standard errors for TIED, by Efron's method
    False: ([0.05280945004833175, -0.6937034042301249], [0.02441587208411945, 0.2411183790082813]),
    True: ([0.04462942311553498, -0.6509781676516592], [0.02457178906998467, 0.26066487115320897]),
}
LIFELINES_HAZARD = {  # the cumulative baseline hazard of each site, at some times
    0: ([12, 55, 133, 240, 393], [0.026970950648, 0.089102230557, 0.187021342176, 0.457217230192, 1.519234742455]),
    1: ([11, 57, 93, 148, 321], [0.011520848036, 0.040312476777, 0.121475305096, 0.442260350290, 1.574571258048]),
}
LIFELINES_CURVE = {  # time -> survival of all rows, and its interval
    12: (0.9166666666666667, 0.7060552678440145, 0.9784830365742961),
    67: (0.6907894736842106, 0.4573124526877068, 0.839539684717227),
    148: (0.35635964912280704, 0.15196600933941423, 0.5683220788986237),
    321: (0.10690789473684213, 0.008759115987142116, 0.34815460637432194),
}
LIFELINES_TIED_CURVE = {
    60: (0.7874999999999999, 0.5621325387365439, 0.9056741543116287),
    150: (0.38216911764705874, 0.17869738508728153, 0.584333068490398),
    330: (0.11465073529411766, 0.009510349389093705, 0.36507728904221),
}


def fit(time, strata):
    return CoxRegression(penalties=0.0).fit(X, np.column_stack([time, EVENT]), groups=strata)


def breslow(time, strata):
    """Maximise Breslow's partial likelihood by Newton's method; return coefficients and standard errors."""
    w = np.zeros(2)
    for _ in range(20):
        score, information = np.zeros(2), np.zeros((2, 2))
        for event in np.flatnonzero(EVENT):
            there = (strata == strata[event]) & (time >= time[event])
            share = np.exp(X[there] @ w)
            share /= share.sum()
            mean = share @ X[there]
            score += X[event] - mean
            information += (X[there] - mean).T @ (share[:, None] * (X[there] - mean))
        w = w + np.linalg.solve(information, score)
    return w, np.sqrt(np.diag(np.linalg.inv(information)))


@pytest.mark.checked
@pytest.mark.parametrize("by_site", slow_but(True, of=[False, True]))
@pytest.mark.parametrize("time", [TIME, TIED], ids=["distinct", "tied"])
def test_coefficients_and_errors_maximise_breslows_partial_likelihood(time, by_site):
    strata = SITE if by_site else ONE
    model, (coefficients, errors) = fit(time, strata), breslow(time, strata)
    np.testing.assert_allclose(model.coef_, coefficients, rtol=0, atol=1e-10)
    np.testing.assert_allclose(model.standard_errors_, errors, rtol=0, atol=1e-10)


@pytest.mark.parametrize("by_site", [False, True])
def test_without_ties_the_numbers_are_those_of_lifelines_and_with_ties_they_are_not(by_site):
    strata = SITE if by_site else ONE
    model, tied = fit(TIME, strata), fit(TIED, strata)
    np.testing.assert_allclose((model.coef_, model.standard_errors_), LIFELINES[by_site], rtol=0, atol=1e-8)
    assert np.abs(tied.coef_ - LIFELINES_TIED[by_site][0]).max() > 0.01


@pytest.mark.parametrize("site", [0, 1])
def test_baseline_hazards_are_those_of_lifelines(site):
    model, here = fit(TIME, SITE), site == SITE
    risk = model.predict(X)[here]
    baseline = steps(TIME[here], EVENT[here], risk, sorted(TIME[here]), 1)
    times, expected = LIFELINES_HAZARD[site]
    found = dict(np.array(baseline)[:, [0, 3]])
    np.testing.assert_allclose([found[time] for time in times], expected, rtol=0, atol=1e-10)
    of_first = np.exp(-np.exp(risk[0]) * np.array(expected))
    np.testing.assert_allclose(survival(baseline, risk, times)[0], of_first, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("time", "expected"), [(TIME, LIFELINES_CURVE), (TIED, LIFELINES_TIED_CURVE)], ids=["distinct", "tied"]
)
def test_kaplan_meier_of_all_sites_is_that_of_lifelines_on_pooled_rows(time, expected):
    grid = np.unique(time).tolist()
    counts = {
        site: steps(time[here], EVENT[here], np.zeros(len(here)), grid, 1)
        for site, here in enumerate((np.arange(10), np.arange(10, 24)))
    }
    found = {row["time"]: (row["survival"], row["low"], row["high"]) for row in kaplan_meier(counts) if "low" in row}
    np.testing.assert_allclose([found[at] for at in expected], [*expected.values()], rtol=0, atol=1e-6)
