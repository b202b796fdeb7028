"""Estimators against closed forms, scikit-learn and NumPy; what they refuse; how they fit into scikit-learn."""

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression

import fedbilevel as fb
from fedbilevel.data.loaders import stratified
from fedbilevel.engines.solve import solve
from fedbilevel.oracles.exact import solve_inner
from fedbilevel.oracles.population import Population
from implicit import implicit_gradient

SITES = np.repeat(["a", "b", "c"], [40, 70, 90])


@pytest.fixture(scope="module")
def table():
    """Two features that predict and four that do not, on scales from 0.1 to 100, not centred; sites differ in size."""
    rng = np.random.default_rng(4)
    scale = np.array([1.0, 100.0, 0.1, 1.0, 10.0, 1.0])
    rows = rng.normal(size=(200, 6)) * scale + 2 * scale
    target = rows[:, 0] - rows[:, 1] / 100 + rng.normal(size=200)
    return pd.DataFrame(rows, columns=[f"f{k}" for k in range(6)]), target


@pytest.fixture(scope="module")
def ridge(table):
    return fb.estimators.Ridge().fit(*table, groups=SITES)


def solved(rows, target, penalties):
    """(AᵀA/n + diag λ) w = Aᵀc/n, with A and c centred: the intercept has no penalty, and makes up for the means."""
    centred, c = rows - rows.mean(0), target - target.mean()
    w = np.linalg.solve(centred.T @ centred / len(c) + np.diag(penalties), centred.T @ c / len(c))
    return w, target.mean() - rows.mean(0) @ w


@pytest.mark.parametrize("penalties", [0.3, [0.1, 2000.0, 0.0, 1.0, 5.0, 0.01]])
def test_ridge_with_given_penalties_is_that_of_the_pooled_rows(table, penalties):
    rows, target = table
    model = fb.estimators.Ridge(penalties=penalties).fit(rows, target, groups=SITES)
    w, b = solved(rows.to_numpy(), target, np.broadcast_to(penalties, 6))
    np.testing.assert_allclose(model.coef_, w, rtol=1e-8)
    np.testing.assert_allclose(model.intercept_, b, rtol=1e-8)
    np.testing.assert_allclose(model.predict(rows), rows @ w + b, rtol=1e-8)
    assert model.history_ is None


def test_ridge_ends_at_its_own_penalties_solution(ridge, table):
    rows, target = table
    w, b = solved(rows.to_numpy(), target, ridge.penalties_.to_numpy())
    np.testing.assert_allclose(ridge.coef_, w, rtol=1e-8)
    assert ridge.intercept_ == pytest.approx(b, rel=1e-8)


def orthogonal(trained, judged):
    """Rows whose features are orthonormal over training rows and over validation rows, so that the least-squares
    coefficients on these are `trained` and `judged`: (rows, target, validation rows, training rows)."""
    rng = np.random.default_rng(1)
    draws = [stratified(np.zeros(np.sum(site == SITES), np.int32), 0.5, i) for i, site in enumerate("abc")]
    rows, target = np.zeros((200, len(trained))), np.zeros(200)
    both = [
        np.concatenate([np.flatnonzero(s == SITES)[d[k]] for s, d in zip("abc", draws, strict=True)]) for k in (0, 1)
    ]
    for part, w in zip(both, (judged, trained), strict=True):
        basis = np.linalg.qr(np.column_stack([np.ones(100), rng.normal(size=(100, len(w) + 1))]))[0][:, 1:] * 10
        rows[part], target[part] = basis[:, :-1], basis @ [*w, 0.5] + 3
    return rows, target, *both


def test_penalties_are_those_of_the_closed_form():
    """On orthonormal features w_k = u_k/(1 + λ_k), u trained without penalties, and f = Σ (w_k − v_k)² + constant, with
    v fitted to validation rows: λ_k = u_k/v_k − 1 where v_k has u_k's sign and is smaller. Else it is at
    a bound: at 999 where the signs differ, as of useless features, and at 1/999 where v_k is larger."""
    trained = np.array([1.0, 0.8, 0.6, 0.6, 0.5, 0.7])
    judged = np.array([0.9, 0.4, 0.1, -0.3, 0.7, -0.1])
    rows, target, held, training = orthogonal(trained, judged)
    model = fb.estimators.Ridge().fit(rows, target, groups=SITES)
    found = model.penalties_
    np.testing.assert_allclose(found[:3], trained[:3] / judged[:3] - 1, rtol=1e-6)
    np.testing.assert_allclose(found[3:], [999, 1 / 999, 999], rtol=1e-6)

    def loss(penalties):
        w, b = solved(rows[training], target[training], penalties)
        return np.mean((rows[held] @ w + b - target[held]) ** 2)

    assert loss(found) < min(loss(np.full(6, one)) for one in np.logspace(-5, 2, 50))
    assert model.history_["outer_loss"][-1] == pytest.approx(loss(found), rel=1e-6)


@pytest.fixture(scope="module")
def classes(table):
    """Whether the target is above its mean; at site a everyone is of one class."""
    return table[0], np.where((table[1] > table[1].mean()) | (SITES == "a"), "ill", "healthy")


def test_logistic_regression_is_scikit_learns_on_the_pooled_rows(classes):
    """Which has one C: on features divided by √λ_k, C = 1/2n and its coefficients times √λ_k are the same problem."""
    rows, label = classes
    model = fb.estimators.LogisticRegression().fit(rows, label, groups=SITES)
    root = np.sqrt(model.penalties_.to_numpy())
    pooled = LogisticRegression(C=1 / 400, tol=1e-10, max_iter=10_000).fit((rows - rows.mean()) / root, label)
    np.testing.assert_allclose(model.coef_, pooled.coef_[0] / root, rtol=1e-4, atol=1e-7 / root.min())
    proba = pooled.predict_proba((rows - rows.mean()) / root)
    np.testing.assert_allclose(model.predict_proba(rows), proba, atol=1e-5)
    assert model.classes_.tolist() == ["healthy", "ill"]
    assert (model.predict(rows) == pooled.predict((rows - rows.mean()) / root)).all()
    assert model.score(rows, label) > 0.7


def test_nothing_is_left_of_the_hypergradient(classes, monkeypatch):
    """Inside the bounds; at a bound it pushes outwards."""
    seen = []

    def recorded(*arguments, **options):
        result = solve(*arguments, **options)
        seen.append((*arguments[1:3], result))
        return result

    monkeypatch.setattr("fedbilevel.estimators.linear.solve", recorded)
    fb.estimators.LogisticRegression().fit(*classes, groups=SITES)
    problem, clients, result = seen[0]
    left, first = (
        np.asarray(implicit_gradient(problem, clients, x, y).hypergradient)
        for x, y in (
            (result.x, trained(problem, clients, result.x, result.y)),
            (np.full(6, 0.5), trained(problem, clients, np.full(6, 0.5), result.y)),
        )
    )
    left = np.where(((result.x < 0.00101) & (left > 0)) | ((result.x > 0.99899) & (left < 0)), 0, left)
    print(left, first, result.x)
    assert np.linalg.norm(left) < 1e-3 * np.linalg.norm(first)


def trained(problem, clients, x, y):
    return solve_inner(Population.of(problem, clients), x, y).y


def partial_likelihood(risk, time, event, sites):
    """By two loops over rows, with Breslow's ties: the mean over all rows."""
    total = 0.0
    for j in range(len(time)):
        at_risk = sum(np.exp(risk[k]) for k in range(len(time)) if sites[k] == sites[j] and time[k] >= time[j])
        total += event[j] * (np.log(at_risk) - risk[j])
    return total / len(time)


@pytest.fixture(scope="module")
def survival():
    """Proportional hazards with a baseline of each site's own, censored, in whole days."""
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(1500, 4))
    sites = np.repeat(["a", "b", "c"], [300, 500, 700])
    hazard = np.repeat([0.2, 1.0, 5.0], [300, 500, 700]) * np.exp(rows @ TRUE)
    time, end = rng.exponential(size=1500) / hazard, rng.exponential(size=1500) * 2
    return rows, np.column_stack([np.ceil(365 * np.minimum(time, end)), time <= end]), sites


TRUE = np.array([1.0, -0.5, 0.0, 0.0])


def test_cox_regression_minimises_the_stratified_partial_likelihood(survival):
    """By central differences of two loops in NumPy, of an error of 1e-10 or so: the slope of loss and penalty is 0."""
    rows, target, sites = (part[::10] for part in survival)
    target = np.ceil(target / [60, 1])  # many ties
    assert len(np.unique(target[:, 0])) < 30
    penalties = np.array([0.01, 0.02, 0.5, 0.0])
    model = fb.estimators.CoxRegression(penalties=penalties).fit(rows, target, groups=sites)

    def loss(w):
        return partial_likelihood(rows @ w, *target.T, sites) + penalties @ w**2

    slope = [(loss(model.coef_ + h) - loss(model.coef_ - h)) / 2e-5 for h in 1e-5 * np.eye(4)]
    np.testing.assert_allclose(slope, 0, atol=1e-8)


def test_cox_regression_recovers_the_coefficients(survival):
    """A coefficient's standard error is about 1/√events, 0.03."""
    rows, target, sites = survival
    model = fb.estimators.CoxRegression().fit(pd.DataFrame(rows), pd.DataFrame(target), groups=sites)
    np.testing.assert_allclose(model.coef_, TRUE, atol=0.12)
    assert model.score(rows, target, sites) > 0.7
    assert not hasattr(model, "intercept_")


def test_concordance_is_of_pairs_of_a_site():
    """Pairs: (0, 1) is in order, (0, 2) tied, (3, 4) out of order; 1 is censored, and b's rows meet none of a's."""
    model = fb.estimators.CoxRegression(penalties=0.1)
    model.fit(np.arange(5.0)[:, None], np.ones((5, 2)))
    model.coef_ = np.array([1.0])
    rows = np.array([[2.0], [1.0], [2.0], [0.0], [3.0]])
    target = np.array([[1, 1], [2, 0], [3, 0], [1, 1], [2, 1]])
    assert model.score(rows, target, ["a", "a", "a", "b", "b"]) == pytest.approx(1.5 / 3)
