"""The exact search finds the best penalties of scikit-learn's cross-validation, with an exact hypergradient.

It has the same numbers on every engine. Rows of a patient are in one fold.
"""

import jax
import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression as PooledLogistic
from sklearn.linear_model import Ridge as PooledRidge
from sklearn.metrics import log_loss

import fedbilevel as fb
from fedbilevel.estimators import CoxRegression, LogisticRegression, Ridge
from fedbilevel.flower import Flower, InProcess, Site, client_app
from fedbilevel.flower.client.limits import Limits
from fedbilevel.oracles.exact import solve_inner
from fedbilevel.oracles.population import Population
from representatives import slow_but

NAMES = ["north", "south", "west"]
SITES = np.repeat(NAMES, [40, 55, 65])
TWO_LENGTHS = np.repeat(NAMES, [40, 60, 60])  # few lengths: Reference and sites compile each phase for each length
KINDS = {"logistic": LogisticRegression, "ridge": Ridge, "cox": CoxRegression}


def table(kind):
    """Return five features on several scales, and a target that the first three predict."""
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(160, 5)) * [1, 30, 0.1, 1, 5]
    risk = rows @ [0.8, -0.02, 3, 0, 0] + rng.normal(size=160)
    if kind == "cox":
        time = np.ceil(20 * rng.exponential(size=160) / np.exp(risk / 2))
        return rows, np.column_stack([time, rng.random(160) < 0.8])
    return rows, np.where(risk > 0.5, "ill", "well") if kind == "logistic" else risk


def posed(kind, groups="feature", cv=3, sites=SITES):
    """Return the algorithm, the problem, the clients, x0 and y0 with which `fit` would begin a search."""

    class Begun(Exception):
        pass

    class Kept(KINDS[kind]):
        def _train(self, clients, centre, *others):
            raise Begun(*self._models(len(centre)).posed(), clients)

    with pytest.raises(Begun) as begun:
        Kept(cv=cv, penalty_groups=groups).fit(*table(kind), groups=sites)
    algorithm, problem, x0, y0, clients = begun.value.args
    return algorithm, problem, clients, x0, y0


@pytest.mark.parametrize("kind", slow_but("logistic", of=KINDS))
def test_the_hypergradient_is_that_of_finite_differences(kind):
    """The hypergradient in log x is that of central differences of F(x, y*(x)).

    It is taken at penalties that the search passes. The differences have h = 1e-4, and an error of about h² = 1e-8.
    """
    with jax.enable_x64(True):
        algorithm, problem, clients, x0, y0 = posed(kind)
        on_the_way = fb.solve(algorithm, problem, clients, x0, y0, rounds=9, progress=False)
        population, best = Population.of(problem, clients), on_the_way.state.best
        assert best.moves >= 2

        def value(log_x):
            x = np.exp(log_x)
            return float(population.outer.value(x, solve_inner(population, x, y0, tolerance=1e-8).y))

        log_x = np.asarray(best.log_x)
        slope = [(value(log_x + h) - value(log_x - h)) / 2e-4 for h in 1e-4 * np.eye(len(log_x))]
        assert float(best.value) == pytest.approx(value(log_x), abs=1e-10)
    assert np.abs(slope).max() > 1e-4  # so that a hypergradient of 0 would fail
    np.testing.assert_allclose(best.slope, slope, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_engines_agree(kind):
    """Reference, Local and Flower in one process give the same penalties and coefficients, up to rounding.

    Ten exchanges increase rounding errors to at most 1e-10. The loss of Cox regression is a function of all rows of a
    site together. The losses of ridge and logistic regression are made in the same way.
    """
    with jax.enable_x64(True):
        algorithm, problem, clients, x0, y0 = posed(kind, "one", cv=2, sites=TWO_LENGTHS)

        def site(_, node):
            k = node["partition-id"]
            rows, limits = clients.outer.row(k), Limits(min_local_samples=8)
            return Site(id=k, algorithm=algorithm, problem=problem, x0=x0, y0=y0, outer=rows, limits=limits)

        def run(engine, known=clients):
            return fb.solve(algorithm, problem, known, x0, y0, rounds=10, engine=engine, progress=False)

        remote = fb.RemoteClients.of(clients)
        runs = [run(fb.Reference()), run(fb.Local()), run(Flower(grid=InProcess(client_app(site), clients=3)), remote)]
    assert np.abs(np.log(runs[0].x)) > 0.1
    for other in runs[1:]:
        np.testing.assert_allclose(other.x, runs[0].x, rtol=1e-10)
        for name in y0:
            np.testing.assert_allclose(other.y[name], runs[0].y[name], rtol=0, atol=1e-10)


def folds(model, rows):
    """Return the fold of each row of a pooled table."""
    return np.concatenate([model._folds(site, rows[site == SITES], None) for site in np.unique(SITES)])


@pytest.mark.slow
def test_one_penalty_is_the_best_of_scikit_learns_cross_validation():
    """With the same folds, the loss of scikit-learn on unseen rows is least at the penalty that the search finds.

    It is compared with six other penalties. On all rows, the coefficients of scikit-learn are the same. Its C is
    1/(2 n λ) on features of variance 1, and n is 3/4 of all rows for a model that is fitted without one of four folds.
    """
    rows, label = table("logistic")
    model = LogisticRegression(cv=4).fit(rows, label, groups=SITES)
    scaled, fold = (rows - rows.mean(0)) / rows.std(0), folds(model, (label == "well").astype(int))

    def fitted(penalty, chosen):
        n = len(rows) * (1 if chosen.all() else 3 / 4)
        return PooledLogistic(C=1 / (2 * n * penalty), tol=1e-12, max_iter=10_000).fit(scaled[chosen], label[chosen])

    def loss(penalty):
        unseen = [fitted(penalty, fold != k).predict_proba(scaled[fold == k])[:, 1] for k in range(4)]
        return log_loss(np.concatenate([label[fold == k] for k in range(4)]), np.concatenate(unseen))

    (penalty,) = set(np.round(model.penalties_ / rows.var(0), 12))
    assert model.history_["outer_loss"][-1] == pytest.approx(loss(penalty), abs=1e-8)
    assert all(loss(penalty) < loss(penalty * factor) for factor in [0.01, 0.5, 0.8, 1.25, 2, 100])
    np.testing.assert_allclose(model.coef_ * rows.std(0), fitted(penalty, fold >= 0).coef_[0], atol=1e-6)


def test_one_penalty_of_ridge_is_scikit_learns_on_the_pooled_rows():
    rows, target = table("ridge")
    model = Ridge().fit(rows, target, groups=SITES)
    (penalty,) = set(np.round(model.penalties_ / rows.var(0), 12))
    pooled = PooledRidge(alpha=penalty * len(rows)).fit((rows - rows.mean(0)) / rows.std(0), target)
    np.testing.assert_allclose(model.coef_ * rows.std(0), pooled.coef_, rtol=1e-9)


def test_a_search_that_does_not_end_warns():
    with pytest.warns(ConvergenceWarning, match=r"^Ridge .* gradient .* 4 exchanges"):
        Ridge(rounds=4).fit(*table("ridge"), groups=SITES)
    with pytest.warns(ConvergenceWarning, match=r"^CoxRegression .* after 2\b"):
        CoxRegression(rounds=2, penalties=0.1).fit(*table("cox"), groups=SITES)


def test_folds_of_a_site_do_not_depend_on_other_sites():
    model, stratum = Ridge(), np.zeros(40, int)
    assert (model._folds("north", stratum, None) == model._folds("north", stratum, None)).all()
    assert (model._folds("north", stratum, None) != model._folds("south", stratum, None)).any()
    assert np.bincount(model._folds("north", stratum, None)).tolist() == [8] * 5


def test_rows_of_a_patient_are_dealt_together():
    """All rows of a patient are in one fold, so that a model is not judged by patients to which it was fitted.

    In this table features and target depend on the patient only, and the features do not predict the target of another
    patient. If rows of a patient are in several folds, the model recognises patients, and its loss is too small.
    """
    patient = np.arange(160) // 4
    stratum = (patient % 3 == 0).astype(int)
    dealt = LogisticRegression()._folds("north", stratum, patient)
    assert (dealt.reshape(40, 4) == dealt[::4, None]).all()
    assert np.bincount(dealt[::4]).tolist() == [8] * 5
    assert np.ptp([stratum[dealt == k].sum() for k in range(5)]) <= 4  # 14 patients of the class: 2 or 3 in each fold
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 20))[patient]  # the same for all rows of a patient, as is the target
    target = rng.normal(size=40)[patient]
    by_row, by_patient = (
        Ridge().fit(rows, target, groups=TWO_LENGTHS, patients=whose).history_["outer_loss"][-1]
        for whose in (None, patient)
    )
    assert by_row < 0.9 * target.var() < by_patient
