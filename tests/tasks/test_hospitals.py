"""The models of the task of four hospitals are scikit-learn's, and its hypergradient is the slope of their loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

import fedbilevel as fb
import hospital_files
from fedbilevel import data, experiments
from fedbilevel.core.client import RemoteClients
from fedbilevel.data import loaders
from fedbilevel.data.clients import dealt
from fedbilevel.tasks.hospitals import hospitals
from fedbilevel.tasks.linear import site_weights
from implicit import implicit_gradient
from refusals import refuses
from representatives import slow_but

NAMES = list(hospital_files.SIZES)
FOLDS = 3


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        made = tmp_path_factory.mktemp("data")
        hospital_files.write(made, patch)
        yield made / "heart"


@pytest.fixture(scope="module")
def task(folder):
    return hospitals(folds=FOLDS, ridge=0.1)


@pytest.fixture(scope="module")
def x():
    rng = np.random.default_rng(0)
    return {"penalty": jnp.asarray(rng.uniform(-4, -1, 18)), "weight": jnp.asarray([0.5, -0.3, 0.1, 0.8])}


def fitted(rows, labels, weights, penalties):
    """Return the y that minimises Σ_j s_j ℓ_j + Σ_l P_l y_l².

    In w = y√(2P) this is ½‖w‖² + Σ_j s_j ℓ_j, which scikit-learn minimises, without an intercept.
    """
    scale = np.sqrt(2 * np.asarray(penalties))
    model = LogisticRegression(C=1.0, fit_intercept=False, solver="newton-cholesky", tol=1e-13, max_iter=200)
    return model.fit(rows / scale, labels, sample_weight=weights).coef_[0] / scale


def best(task, x):
    """Return y*(x), (features, folds + 1), fitted one model after the other to the patients, by the definition only."""
    table = task.clients.inner.values
    rows, label, fold = table["row"].astype(float), table["label"], table["fold"]
    w = 4 * np.exp(x["weight"]) / np.exp(x["weight"]).sum()
    share = (task.clients.weights * np.asarray(w) / task.clients.inner.size)[table["site"]]
    models = []
    for k in range(FOLDS + 1):
        seen = fold != k
        scale = FOLDS / (FOLDS - 1) if k < FOLDS else 1.0
        models.append(fitted(rows[seen], label[seen], scale * share[seen], np.exp(x["penalty"])))
    return np.stack(models, axis=1)


def test_the_models_are_those_of_scikit_learn(task, x):
    """The task's models at x are those that scikit-learn fits: there the gradient of G in y is below 1e-9.

    Newton's method leaves only rounding errors, and the terms of the gradient are of order 1.
    """
    found = implicit_gradient(task.problem, task.clients, x, jnp.asarray(best(task, x)))
    assert float(jnp.abs(found.inner_gradient).max()) < 1e-9
    np.testing.assert_allclose(site_weights(x).sum(), 4)


def test_the_hypergradient_is_the_slope_of_the_cross_validated_loss(task, x):
    """The hypergradient agrees with central differences of F(y*(x)), with y* fitted by scikit-learn.

    The error of the differences is of the order of h² + ε/h, which is 1e-9 here.
    """
    table = task.clients.outer.values

    def cross_validated(flat):
        y = best(task, unravel(flat))
        z = np.einsum("nf,nf->n", table["row"].astype(float), y.T[table["fold"]])
        each = np.logaddexp(0, z) - table["label"] * z
        means = [each[table["site"] == i].mean() for i in range(4)]
        return float(task.clients.weights @ means)

    flat, unravel = jax.flatten_util.ravel_pytree(x)
    found = implicit_gradient(task.problem, task.clients, x, jnp.asarray(best(task, x))).hypergradient
    slopes = jax.flatten_util.ravel_pytree(found)[0]
    for i in (0, 5, 13, 17, 18, 21):
        h = 1e-5 * np.eye(22)[i]
        by_differences = (cross_validated(flat + h) - cross_validated(flat - h)) / 2e-5
        assert float(slopes[i]) == pytest.approx(by_differences, abs=1e-8)
        assert abs(by_differences) > 1e-5


@pytest.mark.parametrize("offsets", slow_but(True, of=[True, False]))
def test_a_single_level_optimum_is_scikit_learns(offsets):
    task = hospitals(tuned=False, ridge=0.05, offsets=offsets)
    table = task.clients.outer.values
    share = (task.clients.weights / task.clients.outer.size)[table["site"]]
    features = 18 if offsets else 14
    w = fitted(table["row"].astype(float), table["label"], share, np.full(features, 0.05))
    slope = sum(
        p * jax.grad(task.problem.outer)(jnp.asarray(w), None, task.clients.outer.row(i))
        for i, p in enumerate(task.clients.weights)
    )
    np.testing.assert_allclose(slope, 0, atol=1e-9)


@pytest.mark.slow
def test_the_single_level_problem_runs_with_the_preset():
    spec = experiments.configure(task="hospitals", algorithm="fedavg", settings=["task.tuned=false", "run.rounds=2"])
    assert experiments.run(spec).x.shape == (18,)


@pytest.mark.slow
def test_penalties_stay_in_their_bounds(task):
    """Penalties stay between −12 and 0 also after steps of 1e6, which would leave these bounds on both sides.

    Weights of hospitals have no bounds.
    """
    algorithm = fb.SimFBO(
        local_steps=1, batch_size=None, client_lr=fb.XYV(1.0, 0.1, 0.1), server_lr=fb.XYV(1e6, 0.1, 0.1)
    )
    x = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=3).x
    assert (x["penalty"].min(), x["penalty"].max()) == (-12.0, 0.0)
    assert np.abs(x["weight"]).max() > 12


@pytest.mark.slow
def test_a_few_rounds_lower_the_cross_validated_loss(task):
    steps = {"client_lr": fb.XYV(x=1.0, y=0.3, v=0.3), "server_lr": fb.XYV(x=1.0, y=1.0, v=1.0)}
    algorithm = fb.SimFBO(local_steps=1, batch_size=None, **steps)
    result = fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=150, eval_every=50)
    assert result.history["outer_loss"][-1] < 0.9 * np.log(2)


@pytest.mark.parametrize("weighting", ["size", "equal"])
def test_hospitals_are_clients_standardised_by_their_own_patients(weighting):
    task = hospitals(folds=FOLDS, weighting=weighting)
    sizes = [int(0.66 * n) for n, _ in hospital_files.SIZES.values()]
    np.testing.assert_array_equal(task.clients.inner.size, sizes)
    expected = np.full(4, 0.25) if weighting == "equal" else np.array(sizes) / sum(sizes)
    np.testing.assert_allclose(task.clients.weights, expected)
    assert task.clients.inner is task.clients.outer
    for i, name in enumerate(NAMES):
        own = task.clients.inner.row(i)
        np.testing.assert_allclose(own["row"][:, :13].mean(0), 0, atol=1e-6)  # float32
        spread = own["row"][:, :13].std(0)
        assert np.all(np.isclose(spread, 1, atol=1e-6) | (spread == 0))
        np.testing.assert_array_equal(own["row"][:, 13:], [[*np.eye(4)[i], 1]] * sizes[i])
        chosen, _ = loaders.stratified(data.load_heart(name).labels, 0.66, 43)
        np.testing.assert_array_equal(own["label"], data.load_heart(name).labels[chosen])


def test_folds_are_dealt_within_classes():
    labels = np.array([0] * 11 + [1] * 7)
    fold = dealt(labels, 3, np.random.default_rng(0))
    for some in (fold, fold[:11], fold[11:]):
        assert np.ptp(np.bincount(some, minlength=3)) <= 1
    assert fold.tolist() != dealt(labels, 3, np.random.default_rng(1)).tolist()


@pytest.mark.slow
def test_metrics_are_those_of_each_hospitals_test_patients(task):
    w = np.linspace(1, -1, 18)
    y = jnp.asarray(np.column_stack([np.zeros((18, FOLDS)), w]))  # the last model is the one that is used
    found = {name: float(metric(task.x0, y)) for name, metric in task.metrics.items()}
    right, losses = {}, []
    for i, name in enumerate(NAMES):
        patients = data.load_heart(name)
        chosen, rest = loaders.stratified(patients.labels, 0.66, 43)
        own = patients.rows[chosen].astype(float)
        rows = (patients.rows[rest] - own.mean(0)) / np.where(own.std(0) > 0, own.std(0), 1)
        z, c = np.column_stack([rows, np.tile([*np.eye(4)[i], 1], (len(rest), 1))]) @ w, patients.labels[rest]
        right[f"test_accuracy.{name}"] = (z > 0) == c
        losses.append(np.log1p(np.exp(-z * (2 * c - 1))))
    expected = {name: one.mean() for name, one in right.items()}
    expected |= {"test_accuracy": np.concatenate(list(right.values())).mean()}
    expected |= {"test_loss": np.concatenate(losses).mean()}
    assert found == pytest.approx(expected, rel=1e-5)
    batch = task.clients.outer.row(2)
    own = np.mean((batch["row"] @ w > 0) == batch["label"])
    assert float(task.metrics_per_client["client_accuracy"](task.x0, y, batch)) == pytest.approx(own)


def test_a_holdout_takes_training_patients_and_no_others():
    whole, held = hospitals(folds=FOLDS), hospitals(folds=FOLDS, holdout=0.3)
    assert list(held.metrics) == [name.replace("test", "validation") for name in whole.metrics]
    for i, name in enumerate(NAMES):
        chosen, _ = loaders.stratified(data.load_heart(name).labels, 0.66, 43)
        kept, _ = loaders.stratified(data.load_heart(name).labels[chosen], 0.7, 43)
        np.testing.assert_array_equal(held.clients.inner.row(i)["label"], whole.clients.inner.row(i)["label"][kept])
    one = lambda task, seed: task(folds=FOLDS, seed=seed).clients.inner.values["row"]  # noqa: E731
    assert not np.array_equal(one(hospitals, 0), one(hospitals, 1))


def test_a_client_reads_its_own_file_alone(folder, tmp_path, monkeypatch):
    """A hospital reads its own file only, and the server reads none.

    The arrays are those of the whole task, so that a federation has the numbers of a simulation.
    """
    whole = hospitals(folds=FOLDS)
    server = hospitals(folds=FOLDS, party="server")
    assert isinstance(server.clients, RemoteClients)
    np.testing.assert_array_equal(server.clients.weights, whole.clients.weights)
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path))
    (tmp_path / "heart").mkdir()
    own = "processed.switzerland.data"
    (tmp_path / "heart" / own).write_bytes((folder / own).read_bytes())
    alone = hospitals(folds=FOLDS, party=2)
    assert len(alone.clients) == 1
    for name, array in alone.clients.inner.row(0).items():
        np.testing.assert_array_equal(array, whole.clients.inner.row(2)[name])
    assert jax.tree.map(jnp.shape, (alone.x0, alone.y0)) == jax.tree.map(jnp.shape, (whole.x0, whole.y0))


def test_some_hospitals_alone():
    two = hospitals(only=["va", "cleveland"], offsets=False)
    assert two.clients.inner.size.tolist() == [15, 26]
    assert two.x0["weight"].shape == (2,)
    assert list(two.metrics)[2:] == ["test_accuracy.va", "test_accuracy.cleveland"]


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"only": ["va", "va"]}, ("only", ["va", "va"], "once")),
        ({"folds": 1}, ("folds", 1)),
        ({"weighting": "sizes"}, ("weighting", "sizes", "", "size")),
        ({"party": 4}, ("party", 4, "0 to 3")),
    ],
)
def test_wrong_options_are_named(options, refusal):
    with refuses(*refusal):
        hospitals(**options)
