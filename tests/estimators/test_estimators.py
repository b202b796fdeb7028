"""Estimators against closed forms, scikit-learn and NumPy; what they refuse; how they fit into scikit-learn."""

import warnings
from copy import copy

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold, LeaveOneGroupOut, cross_val_score
from sklearn.pipeline import make_pipeline

import fedbilevel as fb
from fedbilevel.engines.solve import solve
from fedbilevel.errors import ConfigurationError, DataWarning
from fedbilevel.oracles.exact import solve_inner
from fedbilevel.oracles.population import Population
from implicit import implicit_gradient
from representatives import slow_but

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


@pytest.mark.parametrize("unit", [2.0**300, 2.0**-300])
def test_a_target_in_another_unit_has_the_same_penalties(unit, table):
    """To the bit, as powers of two round nothing: coefficients grow with the unit, and losses with its square."""
    model, other = (fb.estimators.Ridge(rounds=20).fit(table[0], table[1] * one, groups=SITES) for one in (1.0, unit))
    np.testing.assert_array_equal(other.penalties_, model.penalties_)
    np.testing.assert_array_equal(other.coef_, model.coef_ * unit)
    assert other.intercept_ == model.intercept_ * unit
    np.testing.assert_array_equal(other.history_["outer_loss"], model.history_["outer_loss"] * unit**2)


def test_fit_without_sites_warns_and_says_what_reaches_it():
    """scikit-learn hands the groups of a cross-validation to the splitter alone."""
    ridge, sites = fb.estimators.Ridge(penalties=0.01), np.repeat(["a", "b"], 4)
    with pytest.warns(
        DataWarning, match=r"Ridge\.fit got no groups, .*enable_metadata_routing.*set_fit_request\(groups"
    ):
        cross_val_score(ridge, ROWS, TARGET, groups=sites, cv=GroupKFold(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ridge.fit(ROWS[:4], TARGET[:4], groups=np.zeros(4)).sites_.tolist() == [0]


def test_sites_and_classes_that_are_spelled_alike_are_named(table):
    names = np.repeat(["North", "north ", "south"], [40, 70, 90])
    with pytest.warns(
        DataWarning, match=r"groups has names that differ by blanks or case alone.*: 'North', 'north '\."
    ):
        model = fb.estimators.Ridge(penalties=1.0).fit(*table, groups=names)
    assert model.sites_.tolist() == ["North", "north ", "south"]
    with pytest.warns(DataWarning, match=r"y has names .*: 'Ill', 'ill'"), pytest.raises(ValueError, match="3 classes"):
        fb.estimators.LogisticRegression().fit(ROWS, ["ill", "Ill", "well", "well"] * 2, groups=np.zeros(8))


def test_ridge_ends_at_its_own_penalties_solution(ridge, table):
    rows, target = table
    w, b = solved(rows.to_numpy(), target, ridge.penalties_.to_numpy())
    np.testing.assert_allclose(ridge.coef_, w, rtol=1e-8)
    assert ridge.intercept_ == pytest.approx(b, rel=1e-8)


def orthogonal(first, second):
    """Rows whose features are orthonormal in each of two folds, and whose least-squares coefficients there are given:
    (rows, target, [the numbers of each fold's rows])."""
    rng = np.random.default_rng(1)
    fold = np.concatenate(
        [fb.estimators.Ridge(cv=2)._folds(site, np.zeros(np.sum(site == SITES)), None) for site in "abc"]
    )
    rows, target, folds = np.zeros((200, len(first))), np.zeros(200), [np.flatnonzero(fold == k) for k in (0, 1)]
    for part, w in zip(folds, (first, second), strict=True):
        basis = np.linalg.qr(np.column_stack([np.ones(100), rng.normal(size=(100, len(w) + 1))]))[0][:, 1:] * 10
        rows[part], target[part] = basis[:, :-1], basis @ [*w, 0.5] + 3
    return rows, target, folds


def test_penalties_are_those_of_the_closed_form():
    """On orthonormal features, with least-squares coefficients u in one fold and v in the other, a share c_l is left:
    f = ½ Σ (c_l u_l − v_l)² + (c_l v_l − u_l)² + constant is least at c_l = 2 u_l v_l/(u_l² + v_l²). Where the signs
    differ, as those of useless features do half of the time, c_l is at its bound, 0.001, where they are equal at 0.999.
    """
    u = np.array([1.0, 0.8, 0.6, 0.6, 0.5, 0.7])
    v = np.array([0.9, 0.4, 0.1, -0.3, 0.5, -0.1])
    rows, target, (one, other) = orthogonal(u, v)
    model = fb.estimators.Ridge(cv=2, penalty_groups="feature").fit(rows, target, groups=SITES)
    share = np.clip(2 * u * v / (u**2 + v**2), 0.001, 0.999)
    np.testing.assert_allclose(1 / (1 + model.penalties_), share, rtol=5e-3)

    def loss(penalties):
        halves = [solved(rows[part], target[part], penalties) for part in (one, other)]
        unseen = [np.mean((rows[a] @ w + b - target[a]) ** 2) for a, (w, b) in zip((other, one), halves, strict=True)]
        return np.mean(unseen)

    assert loss(model.penalties_) < min(loss(np.full(6, single)) for single in np.logspace(-5, 2, 50))
    assert model.history_["outer_loss"][-1] == pytest.approx(loss(model.penalties_), rel=1e-4)


@pytest.mark.slow
def test_features_of_a_group_share_a_penalty():
    """min over c of Σ (c u_l − v_l)² + (c v_l − u_l)² is at 2 Σ u_l v_l/Σ (u_l² + v_l²)."""
    u, v = np.array([1.0, 0.8, 0.6]), np.array([0.9, 0.4, -0.2])
    rows, target, _ = orthogonal(u, v)
    model = fb.estimators.Ridge(cv=2, penalty_groups=["p", "q", "p"]).fit(rows, target, groups=SITES)
    p, q = (2 * u[part] @ v[part] / (u[part] @ u[part] + v[part] @ v[part]) for part in ([0, 2], [1]))
    np.testing.assert_allclose(1 / (1 + model.penalties_), [p, q, p], rtol=1e-3)


@pytest.fixture(scope="module")
def classes(table):
    """Whether the target is above its mean; at site a everyone is of one class."""
    return table[0], np.where((table[1] > table[1].mean()) | (SITES == "a"), "ill", "healthy")


def test_logistic_regression_is_scikit_learns_on_the_pooled_rows(classes):
    """Which has one C: on features divided by √λ_k, C = 1/2n and its coefficients times √λ_k are the same problem."""
    rows, label = classes
    model = fb.estimators.LogisticRegression(cv=3, penalty_groups="feature").fit(rows, label, groups=SITES)
    root = np.sqrt(model.penalties_.to_numpy())
    pooled = LogisticRegression(C=1 / 400, tol=1e-10, max_iter=10_000).fit((rows - rows.mean()) / root, label)
    np.testing.assert_allclose(model.coef_, pooled.coef_[0] / root, rtol=1e-4, atol=1e-7 / root.min())
    proba = pooled.predict_proba((rows - rows.mean()) / root)
    np.testing.assert_allclose(model.predict_proba(rows), proba, atol=1e-5)
    assert model.classes_.tolist() == ["healthy", "ill"]
    assert (model.predict(rows) == pooled.predict((rows - rows.mean()) / root)).all()
    assert model.score(rows, label) > 0.7


def searched(monkeypatch):
    """The arguments and the result of each run that an estimator makes."""
    seen = []

    def recorded(*arguments, **options):
        seen.append((arguments, solve(*arguments, **options)))
        return seen[-1][-1]

    monkeypatch.setattr(fb, "solve", recorded)
    return seen


def hypergradient(problem, clients, x, y):
    """That of tests/implicit.py, of a dense Hessian, at the trained models."""
    y = solve_inner(Population.of(problem, clients), x, y).y
    return np.array(implicit_gradient(problem, clients, x, y).hypergradient)


@pytest.mark.parametrize("groups", slow_but("feature", of=["one", "feature"]))
def test_nothing_is_left_of_the_hypergradient(groups, classes, monkeypatch):
    """But what pushes outwards at a bound: log x is nearly the projection of a step of gradient descent from there."""
    seen = searched(monkeypatch)
    fb.estimators.LogisticRegression(cv=3, penalty_groups=groups).fit(*classes, groups=SITES)
    ((_, problem, clients, *_), result), bound = seen[0], np.log(999)
    x = np.asarray(result.x)
    slope = x * hypergradient(problem, clients, x, result.y)
    left = np.log(x) - np.clip(np.log(x) - slope, -bound, bound)
    assert np.abs(left).max() <= 1.001e-5, (x, left)
    np.testing.assert_allclose(slope, result.state.best.slope, rtol=1e-6, atol=1e-9)


def test_many_features_with_given_penalties_have_the_closed_form(monkeypatch):
    """Of more features than rows, in which Newton's method with conjugate gradient has one penalty of 0."""
    monkeypatch.setattr("fedbilevel.estimators.linear.WIDE", 5)
    rng, penalties = np.random.default_rng(3), np.append(np.geomspace(0.01, 1000, 11), 0.0)
    rows, target = rng.normal(size=(9, 12)) * np.geomspace(0.1, 100, 12), rng.normal(size=9)
    model = fb.estimators.Ridge(penalties=penalties).fit(rows, target, groups=np.arange(9) // 4)
    w, b = solved(rows, target, penalties)
    np.testing.assert_allclose(model.coef_, w, rtol=1e-8)
    np.testing.assert_allclose(model.intercept_, b, rtol=1e-8)
    assert model.standard_errors_ is None


@pytest.mark.slow
def test_many_features_are_left_to_simfbo(classes, monkeypatch):
    """Which stops where a hundred rounds bring nothing, close to where nothing is left of the hypergradient."""
    monkeypatch.setattr("fedbilevel.estimators.linear.WIDE", 5)
    seen = searched(monkeypatch)
    fb.estimators.LogisticRegression(cv=3, penalty_groups="feature").fit(*classes, groups=SITES)
    (_, problem, clients, *_), result = seen[0]
    x = np.asarray(result.x)
    left = x - np.clip(x - hypergradient(problem, clients, x, result.y), 0.001, 0.999)
    start = hypergradient(problem, clients, np.full(6, 0.5), result.y)
    assert np.linalg.norm(left) < 2e-2 * np.linalg.norm(start), (x, result.stopped)


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


PENALTIES = np.array([0.01, 0.02, 0.5, 0.0])


@pytest.fixture(scope="module")
def tied(survival):
    """A tenth of the rows, with many ties."""
    rows, target, sites = (part[::10] for part in survival)
    return rows, np.ceil(target / [60, 1]), sites


@pytest.fixture(scope="module")
def cox(tied):
    rows, target, sites = tied
    return fb.estimators.CoxRegression(penalties=PENALTIES).fit(rows, target, groups=sites)


def test_cox_regression_minimises_the_stratified_partial_likelihood(tied, cox):
    """By central differences of two loops in NumPy, of an error of 1e-10 or so: the slope of loss and penalty is 0."""
    rows, target, sites = tied
    assert len(np.unique(target[:, 0])) < 30

    def loss(w):
        return partial_likelihood(rows @ w, *target.T, sites) + PENALTIES @ w**2

    slope = [(loss(cox.coef_ + h) - loss(cox.coef_ - h)) / 2e-5 for h in 1e-5 * np.eye(4)]
    np.testing.assert_allclose(slope, 0, atol=1e-8)


@pytest.mark.slow
def test_cox_regression_recovers_the_coefficients(survival):
    """A coefficient's standard error is about 1/√events, 0.03."""
    rows, target, sites = survival
    model = fb.estimators.CoxRegression().fit(pd.DataFrame(rows), pd.DataFrame(target), groups=sites)
    np.testing.assert_allclose(model.coef_, TRUE, atol=0.12)
    assert model.score(rows, target, sites) > 0.7
    assert not hasattr(model, "intercept_")


def test_concordance_is_of_pairs_of_a_site(cox):
    """Pairs: (0, 1) is in order, (0, 2) tied, (3, 4) out of order; 1 is censored, and b's rows meet none of a's."""
    model = copy(cox)
    model.coef_ = np.array([1.0, 0.0, 0.0, 0.0])
    rows = np.outer([2.0, 1.0, 2.0, 0.0, 3.0], np.ones(4))
    target = np.array([[1, 1], [2, 0], [3, 0], [1, 1], [2, 1]])
    assert model.score(rows, target, ["a", "a", "a", "b", "b"]) == pytest.approx(1.5 / 3)
    with pytest.warns(DataWarning, match=r"CoxRegression\.score got no groups"):
        model.score(rows, target)


ROWS, TARGET = np.arange(24.0).reshape(8, 3) % 5, np.arange(8) % 2
ONE_SITE = {"groups": np.zeros(8)}
CENSORED = np.column_stack([np.arange(1.0, 9), TARGET])


def with_cell(value):
    rows = ROWS.copy()
    rows[2, 1] = value
    return rows


@pytest.mark.parametrize(
    ("model", "fields", "arguments", "words"),
    [
        ("Ridge", {}, (ROWS, None), "requires y to be passed"),
        ("Ridge", {}, (np.where(ROWS == 4, np.nan, ROWS), TARGET), r"column 0 of X, row 3 = 'a gap' .* Preparer fill"),
        ("Ridge", {}, (with_cell(np.inf), TARGET), r"column 1 of X, row 2 = inf"),
        ("Ridge", {}, (with_cell(1.7e308), TARGET), r"column 1 of X, row 2 = 1\.7e\+308 .* from -1e\+100 to 1e\+100"),
        ("CoxRegression", {}, (with_cell(-1e155), CENSORED), r"column 1 of X, row 2 = -1e\+155"),
        (
            "LogisticRegression",
            {},
            (ROWS * 1e-155, TARGET),
            r"deviation of column 0 of X = 'below 1e-100' .* smaller unit",
        ),
        ("Ridge", {}, (ROWS, TARGET * 1e155), r"y, row 1 = 1e\+155"),
        ("Ridge", {}, (ROWS, TARGET * 5e-324), r"standard deviation of y = 'below 1e-100'"),
        ("Ridge", {}, (ROWS, np.where(TARGET, np.nan, 1)), r"y, row 1 = 'a gap' .* rows without a target"),
        ("Ridge", {}, (ROWS, [0, pd.NA] * 4), r"y, row 1 = 'a gap'"),
        ("Ridge", {}, (ROWS, ["a"] * 8), r"y must hold numbers: could not convert string to float"),
        ("Ridge", {}, (ROWS, np.arange(8).astype("M8[D]")), r"type of y = 'datetime64\[D\]' .* numbers"),
        ("LogisticRegression", {}, (ROWS, ["a", pd.NA] * 4), r"y, entry 1 = 'a gap' .* the class of each row"),
        ("LogisticRegression", {}, (ROWS, np.where(TARGET, np.nan, 1)), r"y, entry 1 = 'a gap'"),
        (
            "CoxRegression",
            {},
            (ROWS, [[1, 1], [pd.NA, 0]] * 4),
            r"times = \[nan, nan, nan, nan\] .* finite, and 0 or later",
        ),
        ("CoxRegression", {}, (ROWS, CENSORED * [np.inf, 1]), r"times = \[inf, "),
        ("Ridge", {}, (ROWS, TARGET, ["a"] * 7), r"groups = \(7,\) .* the site of each row.*, 8 in all"),
        ("Ridge", {}, (ROWS, TARGET, ["a"] * 7 + [None]), r"groups, entry 7 = 'a gap' .* the site of each row"),
        ("Ridge", {}, (ROWS, TARGET, pd.array(["a", pd.NA] * 4, dtype="string")), r"groups, entry 1 = 'a gap'"),
        ("Ridge", {}, (ROWS, TARGET, ["a", 1] * 4), r"groups = 'int and str' .* of one type, .*groups\.astype\(str\)"),
        ("Ridge", {"cv": 1}, (ROWS, TARGET), r"cv = 1 is not allowed: it must be 2 to 8"),
        ("Ridge", {"cv": 9}, (ROWS, TARGET), r"cv = 9"),
        ("Ridge", {"random_state": -1}, (ROWS, TARGET), r"random_state = -1 .* a whole number from 0 on"),
        ("Ridge", {"rounds": 0}, (ROWS, TARGET), r"rounds = 0"),
        (
            "Ridge",
            {"penalties": -1.0},
            (ROWS, TARGET),
            r"penalties = -1.0 .* None, a number that is at least 0, or 3 such numbers",
        ),
        ("Ridge", {"penalties": [1, 2]}, (ROWS, TARGET), r"penalties = \[1, 2\]"),
        ("Ridge", {"penalties": "auto"}, (ROWS, TARGET), r"penalties must hold numbers"),
        ("Ridge", {"penalty_groups": ["a", "b"]}, (ROWS, TARGET), r"penalty_groups = \(2,\) .* each feature, 3 in all"),
        ("LogisticRegression", {}, (ROWS, np.ones(8)), "y has one class only"),
        ("LogisticRegression", {}, (ROWS, np.arange(8) % 3), "y has 3 classes. Only binary"),
        ("CoxRegression", {}, (ROWS, TARGET), r"shape of y = \(8,\) .* \(n, 2\): times and events"),
        ("CoxRegression", {}, (ROWS, np.column_stack([TARGET - 1, TARGET])), r"times = \[-1.0, .* 0 or later"),
        ("CoxRegression", {}, (ROWS, np.column_stack([TARGET, TARGET + 1])), r"events = \[1.0, 2.0\]"),
        ("CoxRegression", {}, (ROWS, np.column_stack([TARGET, 0 * TARGET])), r"events = 'none' .* one at least"),
    ],
)
def test_what_does_not_fit_is_named(model, fields, arguments, words):
    with pytest.raises(ValueError, match=words):
        getattr(fb.estimators, model)(**fields).fit(*arguments, **({} if arguments[2:] else ONE_SITE))


def test_words_and_misspelt_arguments_are_named():
    frame = pd.DataFrame(ROWS, columns=list("abc")).assign(site="north")
    with pytest.raises(
        ConfigurationError, match=r"column 'site' of X = '(str|object)' .* Preparer .*; sites are groups"
    ):
        fb.estimators.Ridge().fit(frame, TARGET)
    with pytest.raises(ConfigurationError, match=r"groups = 'site' .* the site of each row, such as frame\['site'\]"):
        fb.estimators.Ridge().fit(frame[["a", "b"]], TARGET, groups="site")
    with pytest.raises(ConfigurationError, match="argument of Ridge 'round'; did you mean 'rounds'"):
        fb.estimators.Ridge(round=3)
    with pytest.raises(ConfigurationError, match=r"argument of Penalised.fit 'group'; did you mean 'groups'"):
        fb.estimators.Ridge().fit(ROWS, TARGET, group=TARGET)


def test_unknown_columns_are_named(ridge, table):
    with pytest.raises(ValueError, match=r"(?s)Feature names unseen at fit time:\n- g.*yet now missing:\n- f0"):
        ridge.predict(table[0].rename(columns={"f0": "g"}))


def test_penalties_are_a_series_by_feature_and_a_clone_knows_nothing(ridge):
    assert ridge.penalties_.index.tolist() == ridge.feature_names_in_.tolist() == [f"f{k}" for k in range(6)]
    again = clone(ridge.set_params(rounds=7))
    assert again.get_params() == ridge.get_params()
    assert again.get_params()["rounds"] == 7
    with pytest.raises(NotFittedError):
        again.predict(ROWS)


def test_scikit_learn_hands_sites_on(table):
    """Through a pipeline and a cross-validation that leaves a site out, with metadata routing."""
    rows, target = (part[:180] for part in table)
    sites = np.repeat(["a", "b", "c"], 60)  # of one length, as one program serves whichever two are trained on
    with sklearn.config_context(enable_metadata_routing=True):
        model = fb.estimators.Ridge(penalties=0.01).set_fit_request(groups=True)
        pipeline = make_pipeline(fb.estimators.Preparer(), model)
        assert pipeline.fit(*table, groups=SITES)[-1].sites_.tolist() == ["a", "b", "c"]
        scores = cross_val_score(pipeline, rows, target, params={"groups": sites}, cv=LeaveOneGroupOut())
    assert len(scores) == 3
    assert min(scores) > 0.4
