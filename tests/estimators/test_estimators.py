"""Estimators agree with closed forms, scikit-learn and NumPy, refuse bad input, and work within scikit-learn."""

import warnings
from copy import copy

import jax
import jax.numpy as jnp
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
from fedbilevel.errors import DataWarning
from fedbilevel.estimators.wide_search import Newton
from fedbilevel.oracles.exact import solve_inner
from fedbilevel.oracles.population import Population
from implicit import implicit_gradient
from refusals import refuses

SITES = np.repeat(["a", "b", "c"], [40, 70, 90])


@pytest.fixture(scope="module")
def table():
    """Return features and a target: two features predict it, and four do not.

    The features have scales from 0.1 to 100, and means that are not 0. SITES has three sites of different sizes.
    """
    rng = np.random.default_rng(4)
    scale = np.array([1.0, 100.0, 0.1, 1.0, 10.0, 1.0])
    rows = rng.normal(size=(200, 6)) * scale + 2 * scale
    target = rows[:, 0] - rows[:, 1] / 100 + rng.normal(size=200)
    return pd.DataFrame(rows, columns=[f"f{k}" for k in range(6)]), target


@pytest.fixture(scope="module")
def ridge(table):
    return fb.estimators.Ridge().fit(*table, groups=SITES)


def solved(rows, target, penalties):
    """Solve (AᵀA/n + diag λ) w = Aᵀc/n, with A and c centred; return w and the intercept.

    The intercept has no penalty, so that it is the mean of the target minus w times the mean row.
    """
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


@pytest.mark.slow
@pytest.mark.parametrize("unit", [2.0**300, 2.0**-300])
def test_a_target_in_another_unit_has_the_same_penalties(unit, table):
    """A target in another unit has the same penalties, coefficients times the unit, and losses times its square.

    They are equal to the bit, because a multiplication by a power of two rounds nothing.
    """
    model, other = (fb.estimators.Ridge(rounds=20).fit(table[0], table[1] * one, groups=SITES) for one in (1.0, unit))
    np.testing.assert_array_equal(other.penalties_, model.penalties_)
    np.testing.assert_array_equal(other.coef_, model.coef_ * unit)
    assert other.intercept_ == model.intercept_ * unit
    np.testing.assert_array_equal(other.history_["outer_loss"], model.history_["outer_loss"] * unit**2)


@pytest.mark.slow
@pytest.mark.checked
def test_fit_without_sites_warns_and_says_what_reaches_it():
    """`fit` without groups warns, and the warning says how groups reach it in a cross-validation of scikit-learn.

    By default scikit-learn passes the groups of a cross-validation to the splitter only. There is no warning if groups
    are given, also if all rows are of one site.
    """
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
    with pytest.warns(DataWarning, match=r"^groups .*: 'North', 'north '\."):
        model = fb.estimators.Ridge(penalties=1.0).fit(*table, groups=names)
    assert model.sites_.tolist() == ["North", "north ", "south"]
    with pytest.warns(DataWarning, match=r"y has names .*: 'Ill', 'ill'"), pytest.raises(ValueError, match="3 classes"):
        fb.estimators.LogisticRegression().fit(ROWS, ["ill", "Ill", "well", "well"] * 2, groups=np.zeros(8))


def test_ridge_ends_at_its_own_penalties_solution(ridge, table):
    """After a search, the coefficients of ridge regression are the closed form for the penalties that were found."""
    rows, target = table
    w, b = solved(rows.to_numpy(), target, ridge.penalties_.to_numpy())
    np.testing.assert_allclose(ridge.coef_, w, rtol=1e-8)
    assert ridge.intercept_ == pytest.approx(b, rel=1e-8)


def orthogonal(first, second):
    """Return rows, a target, and the indices of the rows of each of two folds.

    In each fold the features have mean 0 and AᵀA/n = I, and the least-squares coefficients are `first` or `second`.
    """
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
    """The search finds the penalties of a closed form, and they are better than any single penalty.

    The features are orthonormal in each of two folds, with least-squares coefficients u and v. A penalty λ_l leaves the
    share c_l = 1/(1 + λ_l) of a coefficient. Then f = ½ Σ (c_l u_l − v_l)² + (c_l v_l − u_l)² + constant is least at
    c_l = 2 u_l v_l/(u_l² + v_l²). Shares are bounded by 0.001 and 0.999. c_l is at the lower bound if the signs of u_l
    and v_l differ, and at the upper bound if u_l = v_l.
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
    """Features of a group share the penalty that is best for all of them.

    The share c of all coefficients of a group minimises Σ (c u_l − v_l)² + (c v_l − u_l)², which is least at
    c = 2 Σ u_l v_l/Σ (u_l² + v_l²).
    """
    u, v = np.array([1.0, 0.8, 0.6]), np.array([0.9, 0.4, -0.2])
    rows, target, _ = orthogonal(u, v)
    model = fb.estimators.Ridge(cv=2, penalty_groups=["p", "q", "p"]).fit(rows, target, groups=SITES)
    p, q = (2 * u[part] @ v[part] / (u[part] @ u[part] + v[part] @ v[part]) for part in ([0, 2], [1]))
    np.testing.assert_allclose(1 / (1 + model.penalties_), [p, q, p], rtol=1e-3)


@pytest.fixture(scope="module")
def classes(table):
    """Return the features, and as classes whether the target is above its mean; all rows of site a are of one class."""
    return table[0], np.where((table[1] > table[1].mean()) | (SITES == "a"), "ill", "healthy")


@pytest.mark.checked
def test_logistic_regression_is_scikit_learns_on_the_pooled_rows(classes):
    """Logistic regression with a penalty for each feature has the coefficients of scikit-learn on the pooled rows.

    scikit-learn has one C for all features. On features divided by √λ_k, its problem with C = 1/(2n) is the same, with
    coefficients √λ_k times as large. There are n = 200 rows.
    """
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
    """Return a list to which each run of an estimator adds its arguments and its result."""
    seen = []

    def recorded(*arguments, **options):
        seen.append((arguments, solve(*arguments, **options)))
        return seen[-1][-1]

    monkeypatch.setattr(fb, "solve", recorded)
    return seen


def hypergradient(problem, clients, x, y):
    """Train the models at x, and return the hypergradient there that a dense Hessian gives."""
    y = solve_inner(Population.of(problem, clients), x, y).y
    return np.array(implicit_gradient(problem, clients, x, y).hypergradient)


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["one", "feature"])
def test_nothing_is_left_of_the_hypergradient(groups, classes, monkeypatch):
    """Where the search ends, the hypergradient in log x is 0, except where it points out of the bounds of x.

    This holds if a step of gradient descent in log x, projected onto the bounds, ends where it began. The search ends
    if the difference is at most 1e-5. The entries of x lie between 1/999 and 999.
    """
    seen = searched(monkeypatch)
    fb.estimators.LogisticRegression(cv=3, penalty_groups=groups).fit(*classes, groups=SITES)
    ((_, problem, clients, *_), result), bound = seen[0], np.log(999)
    x = np.asarray(result.x)
    slope = x * hypergradient(problem, clients, x, result.y)
    left = np.log(x) - np.clip(np.log(x) - slope, -bound, bound)
    assert np.abs(left).max() <= 1.001e-5, (x, left)
    np.testing.assert_allclose(slope, result.state.best.slope, rtol=1e-6, atol=1e-9)


def test_many_features_with_given_penalties_have_the_closed_form(monkeypatch):
    """Newton's method with conjugate gradient finds the closed form, also for more features than rows.

    One of the features has no penalty.
    """
    monkeypatch.setattr("fedbilevel.estimators.fold_models.WIDE", 5)
    rng, penalties = np.random.default_rng(3), np.append(np.geomspace(0.01, 1000, 11), 0.0)
    rows, target = rng.normal(size=(9, 12)) * np.geomspace(0.1, 100, 12), rng.normal(size=9)
    model = fb.estimators.Ridge(penalties=penalties).fit(rows, target, groups=np.arange(9) // 4)
    w, b = solved(rows, target, penalties)
    np.testing.assert_allclose(model.coef_, w, rtol=1e-8)
    np.testing.assert_allclose(model.intercept_, b, rtol=1e-8)
    assert model.standard_errors_ is None


@pytest.mark.filterwarnings("ignore:x does not change y")
def test_the_round_that_ends_the_last_training_asks_for_no_product():
    """The round that finds that training has ended asks for no product with the Hessian.

    For a single coefficient and a quadratic loss, one product gives the whole Hessian. So the first round ends at the
    solution, and the second round finds a gradient that consists of rounding errors.
    """

    def inner(x, y, rows, valid):
        return jnp.sum(jnp.where(valid, (y["coef"][0, 0] - rows["target"]) ** 2, 0)) / 3

    problem = fb.Bilevel(fb.WholeLoss(lambda x, y, *_: x[0] * jnp.sum(y["coef"])), fb.WholeLoss(inner))
    target = np.random.default_rng(2).normal(size=4)
    clients, start = fb.Clients([{"target": target}]), {"coef": np.zeros((1, 1))}
    with jax.enable_x64(True):
        result = fb.solve(Newton(), problem, clients, np.zeros(1), start, rounds=30, progress=False)
    np.testing.assert_allclose(result.y["coef"], np.mean(target), rtol=1e-14)
    assert result.ledger.exchanges_by_phase == {"gradient": 2, "product": 1}


def test_the_search_of_many_features_finds_the_penalties_of_the_exact_search(monkeypatch):
    """The search for many features, by SimFBO, finds the penalties of the exact search to two percent.

    The penalties of standardised features differ by more than a factor of 200, so that equal penalties would fail.
    """
    rng, scale = np.random.default_rng(4), np.array([1.0, 100.0, 0.1])
    rows = (rng.normal(size=(200, 3)) + 2) * scale
    target = rows[:, 0] - rows[:, 1] / 100 + 3 * rng.normal(size=200)
    exact, wide = (fb.estimators.Ridge(cv=2, penalty_groups="feature") for _ in range(2))
    exact.fit(rows, target, groups=SITES)
    monkeypatch.setattr("fedbilevel.estimators.fold_models.WIDE", 2)
    wide.fit(rows, target, groups=SITES)
    assert np.ptp(np.log(exact.penalties_ / scale**2)) > np.log(200)
    np.testing.assert_allclose(wide.penalties_, exact.penalties_, rtol=0.02)
    np.testing.assert_allclose(wide.coef_, exact.coef_, rtol=0.005)


@pytest.mark.slow
def test_many_features_are_left_to_simfbo(classes, monkeypatch):
    """With many features SimFBO searches, and it ends close to a point where the hypergradient is 0 within the bounds.

    The projected hypergradient there is less than 2 % of the hypergradient at the start, in norm.
    """
    monkeypatch.setattr("fedbilevel.estimators.fold_models.WIDE", 5)
    seen = searched(monkeypatch)
    fb.estimators.LogisticRegression(cv=3, penalty_groups="feature").fit(*classes, groups=SITES)
    (_, problem, clients, *_), result = seen[0]
    x = np.asarray(result.x)
    left = x - np.clip(x - hypergradient(problem, clients, x, result.y), 0.001, 0.999)
    start = hypergradient(problem, clients, np.full(6, 0.5), result.y)
    assert np.linalg.norm(left) < 2e-2 * np.linalg.norm(start), (x, result.stopped)


def partial_likelihood(risk, time, event, sites):
    """Return the negative logarithm of the partial likelihood, stratified by sites, as a mean over all rows.

    It is computed by two loops over rows, with Breslow's method for ties.
    """
    total = 0.0
    for j in range(len(time)):
        at_risk = sum(np.exp(risk[k]) for k in range(len(time)) if sites[k] == sites[j] and time[k] >= time[j])
        total += event[j] * (np.log(at_risk) - risk[j])
    return total / len(time)


@pytest.fixture(scope="module")
def survival():
    """Return rows, times with events, and sites: proportional hazards with another baseline at each site.

    Some times are censored, and times are in whole days.
    """
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
    """Return a tenth of the rows, with times rounded up to multiples of 60 days, so that many are tied."""
    rows, target, sites = (part[::10] for part in survival)
    return rows, np.ceil(target / [60, 1]), sites


@pytest.fixture(scope="module")
def cox(tied):
    rows, target, sites = tied
    return fb.estimators.CoxRegression(penalties=PENALTIES).fit(rows, target, groups=sites)


def test_cox_regression_minimises_the_stratified_partial_likelihood(tied, cox):
    """At the coefficients of Cox regression, the slope of the stratified partial likelihood with its penalty is 0.

    The slope is a central difference, whose error is about 1e-10, of a loss that two loops in NumPy compute.
    """
    rows, target, sites = tied
    assert len(np.unique(target[:, 0])) < 30

    def loss(w):
        return partial_likelihood(rows @ w, *target.T, sites) + PENALTIES @ w**2

    slope = [(loss(cox.coef_ + h) - loss(cox.coef_ - h)) / 2e-5 for h in 1e-5 * np.eye(4)]
    np.testing.assert_allclose(slope, 0, atol=1e-8)


@pytest.mark.slow
def test_cox_regression_recovers_the_coefficients(survival):
    """Cox regression finds the coefficients from which the times were drawn, to four standard errors.

    The standard error of a coefficient is about 1/√(number of events), which is 0.03.
    """
    rows, target, sites = survival
    model = fb.estimators.CoxRegression().fit(pd.DataFrame(rows), pd.DataFrame(target), groups=sites)
    np.testing.assert_allclose(model.coef_, TRUE, atol=0.12)
    assert model.score(rows, target, sites) > 0.7
    assert not hasattr(model, "intercept_")


def test_concordance_is_of_pairs_of_a_site(cox):
    """Concordance compares pairs of rows of the same site only.

    There are three pairs: (0, 1) is in order, (0, 2) is tied and counts one half, and (3, 4) is out of order. Row 1 is
    censored, so that (1, 2) is no pair. `score` without groups warns.
    """
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


NUMBER = "from -1e+100 to 1e+100"


@pytest.mark.parametrize(
    ("model", "arguments", "path", "got", "fact"),
    [
        ("Ridge", (np.where(ROWS == 4, np.nan, ROWS), TARGET), "column 0 of X, row 3", "a gap", "Preparer"),
        ("Ridge", (with_cell(np.inf), TARGET), "column 1 of X, row 2", np.inf, NUMBER),
        ("Ridge", (with_cell(1.7e308), TARGET), "column 1 of X, row 2", 1.7e308, NUMBER),
        ("CoxRegression", (with_cell(-1e155), CENSORED), "column 1 of X, row 2", -1e155, NUMBER),
        (
            "LogisticRegression",
            (ROWS * 1e-155, TARGET),
            "standard deviation of column 0 of X",
            "below 1e-100",
            "1e-100 or more",
        ),
        ("Ridge", (ROWS, TARGET * 1e155), "y, row 1", 1e155, NUMBER),
        ("Ridge", (ROWS, TARGET * 5e-324), "standard deviation of y", "below 1e-100", "1e-100 or more"),
        ("Ridge", (ROWS, np.where(TARGET, np.nan, 1)), "y, row 1", "a gap", NUMBER),
        ("Ridge", (ROWS, [0, pd.NA] * 4), "y, row 1", "a gap", NUMBER),
        ("Ridge", (ROWS, np.arange(8).astype("M8[D]")), "type of y", "datetime64[D]", "numbers"),
        ("LogisticRegression", (ROWS, ["a", pd.NA] * 4), "y, entry 1", "a gap", "class"),
        ("LogisticRegression", (ROWS, np.where(TARGET, np.nan, 1)), "y, entry 1", "a gap", "class"),
        ("CoxRegression", (ROWS, [[1, 1], [pd.NA, 0]] * 4), "times", [np.nan] * 4, "0 or later"),
        ("CoxRegression", (ROWS, CENSORED * [np.inf, 1]), "times", [np.inf] * 5, "0 or later"),
        ("Ridge", (ROWS, TARGET, ["a"] * 7), "groups", (7,), "8 in all"),
        ("Ridge", (ROWS, TARGET, ["a"] * 7 + [None]), "groups, entry 7", "a gap", "site"),
        ("Ridge", (ROWS, TARGET, pd.array(["a", pd.NA] * 4, dtype="string")), "groups, entry 1", "a gap", "site"),
        ("Ridge", (ROWS, TARGET, ["a", 1] * 4), "groups", "int and str", "groups.astype(str)"),
        ("CoxRegression", (ROWS, TARGET), "shape of y", (8,), "(n, 2)"),
        ("CoxRegression", (ROWS, np.column_stack([TARGET - 1, TARGET])), "times", [-1.0] * 4, "0 or later"),
        ("CoxRegression", (ROWS, np.column_stack([TARGET, TARGET + 1])), "events", [1.0, 2.0], "1"),
        ("CoxRegression", (ROWS, np.column_stack([TARGET, 0 * TARGET])), "events", 0, "one"),
    ],
)
def test_a_table_that_does_not_fit_is_named(model, arguments, path, got, fact):
    with refuses(path, got, fact):
        getattr(fb.estimators, model)().fit(*arguments, **({} if arguments[2:] else ONE_SITE))


@pytest.mark.parametrize(
    ("field", "got", "shown", "fact"),
    [
        ("cv", 1, 1, "2 to 8"),
        ("cv", 9, 9, "2 to 8"),
        ("random_state", -1, -1, "from 0"),
        ("rounds", 0, 0, ""),
        ("penalties", -1.0, -1.0, "3 such numbers"),
        ("penalties", [1, 2], [1, 2], "3 such numbers"),
        ("penalty_groups", ["a", "b"], (2,), "3 in all"),
    ],
)
def test_a_field_that_does_not_fit_is_named(field, got, shown, fact):
    with refuses(field, shown, fact):
        fb.estimators.Ridge(**{field: got}).fit(ROWS, TARGET, **ONE_SITE)


@pytest.mark.parametrize(
    ("model", "target", "words"),
    [
        (fb.estimators.Ridge(), None, "requires y to be passed"),
        (fb.estimators.Ridge(), ["a"] * 8, "y must hold numbers: could not convert string to float"),
        (fb.estimators.Ridge(penalties="auto"), TARGET, "penalties must hold numbers"),
        (fb.estimators.LogisticRegression(), np.ones(8), "y has one class only"),
        (fb.estimators.LogisticRegression(), np.arange(8) % 3, "y has 3 classes. Only binary"),
    ],
)
def test_what_scikit_learn_and_numpy_say_is_kept(model, target, words):
    """Errors of scikit-learn and of NumPy reach the user with their own words."""
    with pytest.raises(ValueError, match=words):
        model.fit(ROWS, target, **ONE_SITE)


def test_words_and_misspelt_arguments_are_named():
    frame = pd.DataFrame(ROWS, columns=list("abc")).assign(site="north")
    with refuses("column 'site' of X", fact="Preparer"):  # the type that is reported depends on the version of pandas
        fb.estimators.Ridge().fit(frame, TARGET)
    with refuses("groups", "site", "frame['site']"):
        fb.estimators.Ridge().fit(frame[["a", "b"]], TARGET, groups="site")
    with refuses("argument of Ridge", "round", near="rounds"):
        fb.estimators.Ridge(round=3)
    with refuses("argument of Penalised.fit", "group", near="groups"):
        fb.estimators.Ridge().fit(ROWS, TARGET, group=TARGET)


def test_unknown_columns_are_named(ridge, table):
    with pytest.raises(ValueError, match=r"(?s)Feature names unseen at fit time:\n- g.*yet now missing:\n- f0"):
        ridge.predict(table[0].rename(columns={"f0": "g"}))


def test_penalties_are_a_series_by_feature_and_a_clone_knows_nothing(ridge):
    """Penalties are a pandas Series with the names of the features, and a clone has the parameters but no results."""
    assert ridge.penalties_.index.tolist() == ridge.feature_names_in_.tolist() == [f"f{k}" for k in range(6)]
    again = clone(ridge.set_params(rounds=7))
    assert again.get_params() == ridge.get_params()
    assert again.get_params()["rounds"] == 7
    with pytest.raises(NotFittedError):
        again.predict(ROWS)


@pytest.mark.slow
def test_scikit_learn_hands_sites_on(table):
    """With metadata routing, scikit-learn passes sites through a pipeline, and through a cross-validation.

    Each fold of the cross-validation leaves one site out.
    """
    rows, target = (part[:180] for part in table)
    sites = np.repeat(["a", "b", "c"], 60)  # of equal length, so that one program fits any two of them
    with sklearn.config_context(enable_metadata_routing=True):
        model = fb.estimators.Ridge(penalties=0.01).set_fit_request(groups=True)
        pipeline = make_pipeline(fb.estimators.Preparer(), model)
        assert pipeline.fit(*table, groups=SITES)[-1].sites_.tolist() == ["a", "b", "c"]
        scores = cross_val_score(pipeline, rows, target, params={"groups": sites}, cv=LeaveOneGroupOut())
    assert len(scores) == 3
    assert min(scores) > 0.4
