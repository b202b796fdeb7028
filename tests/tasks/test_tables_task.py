"""The task of tables has the losses of its definition and scikit-learn's minimisers, and names errors in files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression, PoissonRegressor
from sklearn.metrics import mean_poisson_deviance, r2_score

from fedbilevel import experiments
from fedbilevel.core.client import RemoteClients
from fedbilevel.data import DataError
from fedbilevel.errors import ConfigurationError, DataWarning
from fedbilevel.estimators import Preparer
from fedbilevel.tasks import tables
from refusals import ANY, raises_with, refuses, warns_with

KINDS = ("binary", "classes", "count", "continuous", "survival")
SITES = {"a": 14, "b": 9, "c": 1}


def frames(outcome="binary", seed=0):
    """Return the tables of three sites: u is a number with gaps, v a number that is constant at b, and word has words.

    Site c has a single row.
    """
    rng, made = np.random.default_rng(seed), {}
    for name, count in SITES.items():
        frame = pd.DataFrame({"u": rng.normal(3, 2, count).round(2), "v": rng.normal(size=count).round(2)})
        frame["word"] = rng.choice(["p", "q"] if name == "b" else ["p", "q", "r"], count)
        frame.loc[::5, "u"] = np.nan
        frame["v"] = 1.0 if name == "b" else frame["v"]
        frame["w"] = rng.integers(1, 4, count)
        labels = {
            "binary": np.where(rng.random(count) < 0.5, "ill", "well"),
            "classes": rng.choice(["x", "y"] if name == "b" else ["x", "y", "z"], count),
            "count": rng.integers(0, 6, count),
            "continuous": rng.normal(5, 3, count).round(2),
            "survival": rng.integers(1, 9, count),
        }
        frame["outcome"] = labels[outcome]
        if outcome == "survival":
            frame["event"] = rng.integers(0, 2, count)
        made[name] = frame
    return made


def written(folder, made):
    for name, frame in made.items():
        frame.to_csv(folder / f"{name}.csv", index=False, na_rep="?")
    return str(folder)


def features_of(frame, together):
    """Return the features of rows by their definition.

    Numbers are standardised by the rows of all sites, a gap is 0, and words become indicators.
    """
    made = [np.nan_to_num((frame[name] - together[name].mean()) / together[name].std(ddof=0)) for name in ("u", "v")]
    return np.column_stack([*made, *(frame["word"] == word for word in ("p", "q", "r"))]).astype(float)


def loss_by_hand(outcome, z, rows, seen):
    """Return the loss ℓ of each row under one model, by its definition; rows that the model does not see have 0."""
    c, out = rows.get("label"), np.zeros(len(z))
    for j in np.flatnonzero(seen):
        if outcome == "binary":
            out[j] = np.log(1 + np.exp(z[j])) - c[j] * z[j]
        elif outcome == "classes":
            out[j] = np.log(np.exp(z[j]).sum()) - z[j, c[j]]
        elif outcome == "count":
            out[j] = np.exp(z[j]) - c[j] * z[j]
        elif outcome == "continuous":
            out[j] = (z[j] - c[j]) ** 2 / 2
        elif rows["event"][j]:
            risk = [k for k in np.flatnonzero(seen) if rows["time"][k] >= rows["time"][j]]
            out[j] = np.log(sum(rows["weight"][k] * np.exp(z[k]) for k in risk)) - z[j]
    return out


@pytest.mark.parametrize("outcome", KINDS)
def test_losses_are_those_of_the_definition(outcome, tmp_path):
    """The losses are those of their definition, with weights of rows and of sites, at a random x and y.

    Rows and labels are float32, which limits the agreement.
    """
    made, folds = frames(outcome), 2
    task = tables(
        folder=written(tmp_path, made), outcome=outcome, sample_weight="w", penalty="column", folds=folds, test=0.0,
        site_weights=True,
    )  # fmt: skip
    rng, i = np.random.default_rng(1), 0
    y = 0.5 * rng.normal(size=task.y0.shape)
    x = {name: rng.normal(size=np.shape(value)) for name, value in task.x0.items()}
    rows = task.clients.inner.row(i)
    together = pd.concat(made.values())
    extra = [] if outcome == "survival" else [[1, 0, 0, 1]]  # the sites' offsets and the intercept
    expected = np.hstack([features_of(made["a"], together), np.tile(extra, (len(rows["row"]), 1))[:, : 4 * len(extra)]])
    order = slice(None)
    if outcome == "survival":
        order = np.argsort(-made["a"]["outcome"].to_numpy(), kind="stable")
    np.testing.assert_allclose(rows["row"], expected[order], rtol=1e-6, atol=1e-6)
    v, w = made["a"]["w"].to_numpy(float)[order], 3 * np.exp(x["weight"]) / np.exp(x["weight"]).sum()
    np.testing.assert_allclose(rows["weight"], v / v.mean(), rtol=1e-6)
    f = g = 0.0
    for k in range(folds + 1):
        z = np.tensordot(rows["row"].astype(float), y[:, k], 1)
        out, share = rows["fold"] == k, folds / (folds - 1) if k < folds else 1
        f += np.mean(v / v.mean() * loss_by_hand(outcome, z, rows, out))
        g += w[i] * share * np.mean(v / v.mean() * loss_by_hand(outcome, z, rows, ~out))
    of = [0, 1, 2, 2, 2] + ([] if outcome == "survival" else [3, 3, 3, 4])  # u, v, word, sites, intercept
    g += sum(np.exp(x["penalty"][p]) * np.sum(y[row] ** 2) for row, p in enumerate(of))
    found = jax.jit(lambda x, y, rows: (task.problem.outer(x, y, rows), task.problem.inner(x, y, rows)))(x, y, rows)
    np.testing.assert_allclose(found, (f, g), rtol=1e-5)
    total = np.array([frame["w"].sum() for frame in made.values()])
    np.testing.assert_allclose(task.clients.weights, total / total.sum())


@pytest.mark.parametrize("outcome", ["classes", "count", "continuous"])
def test_a_single_level_optimum_is_scikit_learns(outcome, tmp_path):
    """At scikit-learn's minimiser of the pooled loss, or at that of the normal equations, the gradient is 0.

    It is 0 up to the tolerance of these solvers. The outcome "binary" is in test_hospitals.
    """
    ridge = 0.05
    task = tables(folder=written(tmp_path, frames(outcome)), outcome=outcome, tuned=False, ridge=ridge, test=0.0)
    rows = task.clients.outer.values
    a, c, n = rows["row"].astype(float), rows["label"], len(rows["label"])
    if outcome == "classes":  # ½‖w‖² + C Σ ℓ
        model = LogisticRegression(C=1 / (2 * n * ridge), fit_intercept=False, tol=1e-10, max_iter=5000)
        w = model.fit(a, c).coef_.T
    elif outcome == "count":  # mean ℓ + α/2 ‖w‖²
        model = PoissonRegressor(alpha=2 * ridge, fit_intercept=False, tol=1e-12, solver="newton-cholesky")
        w = model.fit(a, c).coef_
    else:
        w = np.linalg.solve(a.T @ a / n + 2 * ridge * np.eye(a.shape[1]), a.T @ c / n)
    each = [(p, task.clients.outer.row(i)) for i, p in enumerate(task.clients.weights)]
    slope = jax.jit(jax.grad(lambda w: sum(p * task.problem.outer(w, None, row) for p, row in each)))(w)
    np.testing.assert_allclose(slope, 0, atol=1e-6)
    assert np.abs(w).max() > 0.01


@pytest.mark.parametrize("outcome", KINDS)
def test_clients_measure_a_score_that_is_a_mean_over_rows(outcome, tmp_path):
    """R² and concordance are no means over rows: of a single row, neither is defined."""
    task = tables(folder=written(tmp_path, frames(outcome)), outcome=outcome, folds=2, test=0.0)
    assert bool(task.metrics_per_client) == (outcome not in ("continuous", "survival"))
    y = jnp.asarray(np.random.default_rng(1).normal(size=task.y0.shape))
    for metric in task.metrics_per_client.values():
        rows = jax.tree.map(jnp.asarray, task.clients.outer.row(0))
        each = [metric.function(None, y, jax.tree.map(lambda leaf, j=j: leaf[j : j + 1], rows)) for j in range(14)]
        assert float(metric.function(None, y, rows)) == pytest.approx(np.mean(each), rel=1e-5)


@pytest.mark.parametrize("outcome", ["count", "continuous", "survival"])
def test_scores_are_those_of_test_rows(outcome, tmp_path):
    """The scores are those of the rows of test.csv, overall and for each site that has such rows.

    test.csv has rows of two sites. Site c has a single row, so it has no pair of rows, no concordance and no R². All
    test rows count equally in the score and in the mean loss, whatever their weights and their sites' numbers of rows.
    """
    made = frames(outcome)
    tested = pd.concat([frames(outcome, seed=5)[name].assign(site=name) for name in ("a", "c")])
    tested.to_csv(tmp_path / "test.csv", index=False, na_rep="?")
    settings = {
        "folder": written(tmp_path, made),
        "outcome": outcome,
        "offsets": False,
        "folds": 2,
        "sample_weight": "w",
    }
    task = tables(test=0.0, **settings)
    with refuses("test", 0.33, "test.csv"):
        tables(**settings)
    y = np.random.default_rng(1).normal(size=task.y0.shape)
    together = pd.concat(made.values())
    a = features_of(tested, together)
    z = a @ y[:5, -1] + (y[5, -1] if outcome != "survival" else 0)
    c = tested["outcome"].to_numpy(float)
    if outcome == "count":
        m = together["outcome"].mean()
        name, expected = "deviance", mean_poisson_deviance(c, m * np.exp(z)) / m
        loss = np.mean(np.exp(z) - c / m * z)
    elif outcome == "continuous":
        m, s = together["outcome"].mean(), together["outcome"].std(ddof=0)
        name, expected, loss = "r2", r2_score(c, m + s * z), np.mean((z - (c - m) / s) ** 2) / 2
    else:
        t, e, n = c[:14], tested["event"].to_numpy()[:14], range(14)
        pairs = [(z[j] > z[k]) + (z[j] == z[k]) / 2 for j in n for k in n if e[j] and t[j] < t[k]]
        name, expected = "concordance", np.mean(pairs)
    assert float(task.metrics[f"test_{name}"](None, jnp.asarray(y))) == pytest.approx(expected, rel=1e-5)
    assert (f"test_{name}.b" in task.metrics, f"test_{name}.c" in task.metrics) == (False, outcome == "count")
    if outcome != "survival":
        assert float(task.metrics["test_loss"](None, jnp.asarray(y))) == pytest.approx(loss, rel=1e-5)


def test_times_that_are_equal_in_float32_keep_their_order(tmp_path):
    """Times that are equal in float32, such as seconds since 1970, keep their order.

    They give the same risk sets and the same concordance as times that count from another day.
    """
    made, found = frames("survival"), []
    for name, begin in (("late", 1_800_000_000), ("early", 0)):
        (tmp_path / name).mkdir()
        folder = written(
            tmp_path / name, {site: one.assign(outcome=one["outcome"] + begin) for site, one in made.items()}
        )
        task = tables(folder=folder, outcome="survival", test=0.4, folds=2)
        y = jnp.asarray(np.random.default_rng(1).normal(size=task.y0.shape))
        found.append([task.clients.inner.row(0)["last"].tolist(), float(task.metrics["test_concordance"](None, y))])
    assert found[0] == found[1]


def test_codes_that_are_numbers_at_one_site_alone_are_warned_of(tmp_path):
    """A code such as "01" is "1" at a site where all codes are numbers, and stays "01" where one code has a letter."""
    made = {name: frame.assign(word=["01", "02"][i % 2]) for i, (name, frame) in enumerate(frames().items())}
    made["b"]["word"] = np.where(np.arange(9) < 5, "01", "A3")
    with warns_with(DataWarning, "'01', '1'"):
        tables(folder=written(tmp_path, made), categorical=["word"], test=0.0)


def test_folds_and_test_rows_of_a_site_depend_on_no_other_site():
    whole, two = (tables(folds=3, sites=sites) for sites in ([], ["west", "south"]))
    for name, (i, j) in {"south": (1, 1), "west": (2, 0)}.items():
        np.testing.assert_array_equal(
            whole.clients.inner.row(i)["fold"], two.clients.inner.row(j)["fold"], err_msg=name
        )
    label = whole.clients.inner.row(0)["label"]
    assert np.ptp(np.bincount(whole.clients.inner.row(0)["fold"][label > 0], minlength=3)) <= 1
    assert whole.clients.inner.size.tolist() == [120 - 39, 80 - 26, 40 - 13]


def test_the_seed_draws_the_test_rows_and_folds_of_a_site(tmp_path):
    folder = written(tmp_path, frames("continuous"))
    first, again, other = (tables(folder=folder, outcome="continuous", seed=s).clients.inner.row(0) for s in (0, 0, 1))
    for name in ("row", "fold"):
        np.testing.assert_array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name])


def test_rows_of_a_patient_stay_together(tmp_path):
    """All rows of a patient are in one fold, or all are test rows.

    Site a has five patients, four with three rows and one with two. A feature is the number of the patient.
    """
    made = {}
    for name, frame in frames("continuous").items():
        of = np.arange(len(frame)) // 3
        made[name] = frame[["outcome"]].assign(id=[f"{name}{i}" for i in of], number=of.astype(float))
    task = tables(folder=written(tmp_path, made), outcome="continuous", patient="id", folds=2, test=0.4, offsets=False)
    rows = task.clients.inner.row(0)
    numbers, count = np.unique(rows["row"][:, 0], return_counts=True)
    assert len(numbers) == 3  # of five patients two are for the test
    assert set(count) <= {2, 3}
    folds = [set(rows["fold"][rows["row"][:, 0] == number]) for number in numbers]
    assert all(len(of) == 1 for of in folds)
    assert set.union(*folds) == {0, 1}


def test_each_party_reads_its_own_file_alone(tmp_path):
    """A client reads its own file only, and the server reads none.

    With a file columns.json of `Preparer`, the arrays are those of the simulation, to the bit.
    """
    made = frames("classes")
    for name, frame in made.items():
        Preparer(categorical=["word", "outcome"]).fit(frame).save(tmp_path / f"{name}.json", min_count=1)
    (tmp_path / "all").mkdir()
    Preparer.load(*(tmp_path / f"{name}.json" for name in made)).save(tmp_path / "all" / "columns.json", min_count=1)
    settings = {"outcome": "classes", "sites": list(made), "test": 0.0}
    whole = tables(folder=written(tmp_path / "all", made), **settings)
    (tmp_path / "b").mkdir()
    for file in ("b.csv", "columns.json"):
        (tmp_path / "b" / file).write_bytes((tmp_path / "all" / file).read_bytes())
    own = tables(folder=str(tmp_path / "b"), party=1, **settings)
    assert len(own.clients) == 1
    for name, array in own.clients.inner.row(0).items():
        np.testing.assert_array_equal(array, whole.clients.inner.row(1)[name])
    (tmp_path / "b" / "b.csv").unlink()
    server = tables(folder=str(tmp_path / "b"), party="server", sizes=[14, 9, 1], **settings)
    assert isinstance(server.clients, RemoteClients)
    np.testing.assert_array_equal(server.clients.weights, whole.clients.weights)
    assert jax.tree.map(jnp.shape, (server.x0, server.y0)) == jax.tree.map(jnp.shape, (whole.x0, whole.y0))
    one = jax.tree.map(lambda array: (array.shape[1:], array.dtype), server.clients.inner)
    assert one == jax.tree.map(lambda array: (array.shape[1:], array.dtype), own.clients.inner.row(0))
    with pytest.raises(ConfigurationError) as error:
        tables(folder=str(tmp_path / "b"), party="server", **settings)
    assert (error.value.path, error.value.got) == ("weighting", "size")
    assert error.value.allowed == "'equal' on a server without the sites' files, unless `sizes` is given"
    (tmp_path / "b" / "columns.json").unlink()
    with refuses(str(tmp_path / "b" / "columns.json"), "missing"):
        tables(folder=str(tmp_path / "b"), party="server", **settings)


def test_a_site_uses_nothing_that_it_does_not_tell(tmp_path):
    """A site does not use a word that it hides from the others because it has fewer than `min_count` rows with it.

    Site b has nine rows, so that one of its three words has fewer than four rows and counts as a gap. The single row of
    site c has gaps only.
    """
    made = frames()
    task = tables(folder=written(tmp_path, made), test=0.0, min_count=4, offsets=False)
    rows = task.clients.inner.row(2)["row"]
    np.testing.assert_array_equal(rows, [[0] * (rows.shape[1] - 1) + [1]])
    names = [word for word in "pqr" if max((frame["word"] == word).sum() for frame in made.values()) >= 4]
    for i, name in enumerate(("a", "b")):
        told = [word for word in names if (made[name]["word"] == word).sum() >= 4]
        expected = [[float(one == word and word in told) for word in names] for one in made[name]["word"]]
        np.testing.assert_array_equal(task.clients.inner.row(i)["row"][:, 2 : 2 + len(names)], expected)


def test_a_column_that_a_site_does_not_have(tmp_path):
    made = frames()
    made["b"] = made["b"].drop(columns=["v", "word"])
    folder = written(tmp_path, made)
    with refuses("column 'v' of b.csv", "missing", "absent = 'gap'"):
        tables(folder=folder)
    with refuses("column 'v' of b.csv", "missing", "'gap'"):
        tables(folder=folder)
    rows = tables(folder=folder, absent="gap", test=0.0, drop=["w"], offsets=False).clients.inner.row(1)["row"]
    np.testing.assert_array_equal(rows[:, 1:], np.tile([0, 0, 0, 0, 1], (9, 1)))


def test_rows_without_a_target_are_left_out(tmp_path):
    made = frames("continuous")
    made["a"].loc[[0, 3], "outcome"] = np.nan
    with warns_with(DataWarning, "2 of 14 rows of a.csv "):
        task = tables(folder=written(tmp_path, made), outcome="continuous", test=0.0)
    assert task.clients.inner.size.tolist() == [12, 9, 1]


def _changed(outcome, site, column, value):
    made = frames(outcome)
    made[site][column] = value
    return made


WRONG = {
    "no such target": ("binary", None, {"target": "outcomes"}, ("column of a.csv", "outcomes", "", "outcome")),
    "three classes": (
        "classes",
        None,
        {"outcome": "binary"},
        ("classes of 'outcome'", ["x", "y", "z"], "outcome = 'classes'"),
    ),
    "one class": ("binary", ("a", "outcome", "ill"), {"sites": ["a"]}, ("classes of 'outcome'", ["ill"])),
    "positive": ("binary", None, {"positive": "il"}, ("positive", "il", "", "ill")),
    "half a count": ("count", ("b", "outcome", 1.5), {}, ("column 'outcome' of b.csv", [1.5, 1.5, 1.5], "from 0")),
    "a word as target": ("continuous", ("b", "outcome", "x"), {}, ("column 'outcome' of b.csv", "x")),
    "no target": ("binary", ("b", "outcome", np.nan), {}, ("rows of b.csv with a target", 0)),
    "an event of 2": ("survival", ("a", "event", 2), {}, ("column 'event' of a.csv", ANY, "1 if")),
    "no event": ("survival", ("a", "event", 0), {"sites": ["a"]}, ("events 'event'", 0)),
    "weights": ("binary", ("a", "w", -1), {"sample_weight": "w"}, ("weights of a.csv", -1.0)),
    "weights of 0": ("binary", ("a", "w", 0), {"sample_weight": "w"}, ("weights of a.csv", 0.0, "above 0")),
    "words for numbers": ("binary", ("b", "v", "high"), {}, ("column 'v' of a.csv", "numbers")),
    "infinite": ("binary", ("b", "v", np.inf), {}, ("column 'v' of b.csv", ANY, "1e+100")),
    "a group": ("binary", None, {"groups": {"g": ["ward"]}}, ("column in groups", "ward", "", "word")),
    "outcome": ("binary", None, {"outcome": "counts"}, ("outcome", "counts", "", "count")),
    "party": ("binary", None, {"party": 3, "sites": ["a", "b", "c"]}, ("party", 3, "0 to 2")),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case, tmp_path):
    outcome, change, settings, refusal = WRONG[case]
    made = _changed(outcome, *change) if change else frames(outcome)
    with refuses(*refusal):
        tables(**{"folder": written(tmp_path, made), "outcome": outcome, "test": 0.0, **settings})


@pytest.mark.parametrize(
    ("outcome", "change", "settings", "error"),
    [
        ("binary", ("a", "w", 0), {"sample_weight": "w"}, ("weights of a.csv", 0.0, "above 0")),
        ("survival", ("a", "event", 0), {"sites": ["a"]}, ("events 'event'", 0, "one")),
    ],
)
def test_an_error_in_words_of_its_own_has_the_fields_of_an_error(outcome, change, settings, error, tmp_path):
    folder = written(tmp_path, _changed(outcome, *change))
    with refuses(*error):
        tables(folder=folder, outcome=outcome, test=0.0, **settings)


def test_the_rows_of_test_csv_need_a_site(tmp_path):
    folder = written(tmp_path, frames())
    frames()["a"].assign(Site="a").to_csv(tmp_path / "test.csv", index=False)
    with refuses("column of test.csv", "site", near="Site"):
        tables(folder=folder, test=0.0)


def test_a_file_of_agreed_columns_with_other_content_is_refused(tmp_path):
    (tmp_path / "columns.json").write_text(json.dumps({"u": {"count": 3}}))
    with raises_with(DataError, path=str(tmp_path / "columns.json")):
        tables(folder=written(tmp_path, frames()))


@pytest.mark.slow
@pytest.mark.parametrize("outcome", KINDS)
def test_the_preset_lowers_the_cross_validated_loss(outcome):
    spec = experiments.configure(task="tables", settings=[f"task.outcome={outcome}", "run.rounds=60"])
    at_start, first, *_, last = experiments.run(spec).history["outer_loss"]
    assert np.isnan(at_start)  # no round has measured a loss yet
    assert last < first
