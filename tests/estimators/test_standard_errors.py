"""Standard errors of coefficients are those of formulas that are written out in NumPy, on sites of unequal size."""

import numpy as np
import pytest

from fedbilevel.estimators import CoxRegression, LogisticRegression, Ridge
from representatives import slow_but

RNG = np.random.default_rng(11)
X = RNG.normal(size=(90, 3)) * [1, 5, 0.2] + [0, 3, 1]
SITE = np.repeat([0, 1, 2], [20, 30, 40])
Z = X @ [0.5, -0.2, 1.0]
LABEL = (RNG.random(90) < 1 / (1 + np.exp(-Z))).astype(int)
DESIGN = np.column_stack([X, np.ones(90)])
PENALTY = 2 * 90 * np.diag([0.05, 0.5, 0.001, 0])  # n·2Λ


def sandwich(information, penalty):
    inverse = np.linalg.inv(information + penalty)
    return np.sqrt(np.diag(inverse @ information @ inverse))[:3]


@pytest.mark.parametrize("penalised", slow_but(True, of=[False, True]))
def test_of_logistic_regression(penalised):
    """Standard errors of logistic regression are those of the sandwich formula with the information Σ p(1 − p) a aᵀ."""
    made = LogisticRegression(penalties=[0.05, 0.5, 0.001] if penalised else 0.0).fit(X, LABEL, groups=SITE)
    chance = made.predict_proba(X)[:, 1]
    information = DESIGN.T @ (DESIGN * (chance * (1 - chance))[:, None])
    np.testing.assert_allclose(made.standard_errors_, sandwich(information, penalised * PENALTY), rtol=1e-6)


@pytest.mark.parametrize("penalised", slow_but(True, of=[False, True]))
def test_of_linear_regression(penalised):
    """Standard errors of ridge regression are those of the covariance s² (AᵀA + nΛ)⁻¹ AᵀA (AᵀA + nΛ)⁻¹.

    s² is the sum of squared residuals divided by the degrees of freedom n − tr AᵀA (AᵀA + nΛ)⁻¹.
    """
    y = 20 * Z + RNG.normal(size=90) + 100
    made = Ridge(penalties=[0.05, 0.5, 0.001] if penalised else 0.0).fit(X, y, groups=SITE)
    products, penalty = DESIGN.T @ DESIGN, penalised * PENALTY / 2
    freedom = np.trace(np.linalg.solve(products + penalty, products))
    variance = np.sum((y - made.predict(X)) ** 2) / (90 - freedom)
    np.testing.assert_allclose(made.standard_errors_, np.sqrt(variance) * sandwich(products, penalty), rtol=1e-6)


def test_of_cox_regression():
    """Standard errors of Cox regression are those of the information of the stratified partial likelihood.

    The information is a sum over events of the covariance of the features among the rows at risk.
    """
    time, event = RNG.integers(1, 20, 90).astype(float), RNG.integers(0, 2, 90)
    made = CoxRegression(penalties=[0.05, 0.5, 0.001]).fit(X, np.column_stack([time, event]), groups=SITE)
    hazard, information = np.exp(X @ made.coef_), np.zeros((3, 3))
    for row in np.flatnonzero(event):
        there = (SITE[row] == SITE) & (time >= time[row])
        information += np.cov(X[there].T, aweights=hazard[there], ddof=0)
    np.testing.assert_allclose(made.standard_errors_, sandwich(information, PENALTY[:3, :3]), rtol=1e-6)
