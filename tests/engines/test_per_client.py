"""Is a metric of a client the mean over its own samples, and do columns such as NAME.worst have the right numbers?"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines import evaluation
from fedbilevel.engines.evaluation import DECILES, PerClient, PerClientEvaluation, as_per_client, spread
from fedbilevel.engines.process_group import ProcessGroup
from refusals import ANY, raises_with, refuses

BLOCK = 8
SIZES = (1, 7, 11, 8)  # within a block, over its edge, exactly one block
P = np.arange(1, 5) / 10


@pytest.fixture(scope="module", autouse=True)
def blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "BLOCK", BLOCK)
        yield


def population(map_in=None):
    rng = np.random.default_rng(0)
    outer, inner = ([{"a": rng.normal(size=(n, 3))} for n in sizes] for sizes in (SIZES, SIZES[::-1]))
    if map_in is not None:
        outer, inner = mapped(map_in, "outer", outer), mapped(map_in, "inner", inner)
    return fb.Clients(outer, inner, weights=P)


def mapped(folder, name, rows):
    """Return the same samples in a file."""
    np.save(folder / f"{name}.npy", np.concatenate([row["a"] for row in rows]))
    size = np.array([len(row["a"]) for row in rows])
    return fb.Ragged({"a": np.load(folder / f"{name}.npy", mmap_mode="r")}, np.cumsum(size) - size, size)


PROBLEM = fb.Bilevel(
    lambda x, y, batch: jnp.mean((batch["a"] @ y - x[0]) ** 2),
    lambda x, y, batch: jnp.mean((batch["a"] @ y - x[1]) ** 2) + y @ y,
)
METRICS = {
    "error": lambda x, y, batch: jnp.mean(jnp.abs(batch["a"] @ y - x[0])),
    "fit_accuracy": fb.PerClient(lambda x, y, batch: jnp.mean(batch["a"] @ y > x[1]), "inner", True),
}


def solved(engine=None, clients=None, own=METRICS, rounds=1, **options):
    algorithm = fb.FedBiO(local_steps=1, batch_size=None)
    clients = clients or population()
    options = {"eval_every": 1, "metrics_per_client": own, "engine": engine, **options}
    return fb.solve(algorithm, PROBLEM, clients, jnp.array([0.1, 0.2]), jnp.ones(3) / 3, rounds=rounds, **options)


@pytest.fixture(scope="module")
def result():
    return solved()


def test_columns_are_those_of_a_loop_over_clients(result):
    """The columns equal the numbers that a loop in NumPy over each client's samples computes from their definitions."""
    clients, x, y, row = population(), np.asarray(result.x), np.asarray(result.y), result.history.rows[-1]
    error = np.array([np.mean(abs(clients.outer.row(i)["a"] @ y - x[0])) for i in range(4)])
    fits = np.array([np.mean(clients.inner.row(i)["a"] @ y > x[1]) for i in range(4)])
    assert row["error.mean"] == pytest.approx(P @ error, rel=1e-12)
    assert row["fit_accuracy.mean"] == pytest.approx(P @ fits, rel=1e-12)
    assert [row["error.worst"], row["error.best"]] == pytest.approx([error.max(), error.min()], rel=1e-12)
    assert [row["fit_accuracy.worst"], row["fit_accuracy.best"]] == pytest.approx([fits.min(), fits.max()], rel=1e-12)
    for decile in DECILES:
        assert row[f"error.p{decile}"] == pytest.approx(np.percentile(error, decile), rel=1e-12)
    assert [name for name in row if name.startswith("error")] == [
        "error.mean",
        "error.worst",
        "error.best",
        *(f"error.p{decile}" for decile in range(10, 100, 10)),
    ]


def test_there_is_a_row_for_the_start_and_the_rounds_do_not_notice(result):
    assert all("error.p50" in row for row in result.history.rows)
    assert len(result.history) == 2
    np.testing.assert_array_equal(solved(own=None).x, result.x)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reference", "streamed", "mapped"])
def test_engines_and_places_of_samples_agree(how, result, tmp_path):
    engine = {"reference": fb.Reference(), "streamed": fb.Local(stream=True), "mapped": fb.Local()}[how]
    other = solved(engine, population(map_in=tmp_path) if how == "mapped" else None)
    for name in result.history.columns:
        if name.partition(".")[0] in METRICS:
            np.testing.assert_allclose(other.history[name], result.history[name], rtol=1e-10)


def test_deciles_count_clients_and_the_mean_their_weights():
    """Deciles give all clients the same weight, and the mean uses the clients' weights.

    Eleven clients have the values 0 … 10, so that the k-th decile is k. All weight is on the last one, so that the mean
    is 10.
    """
    values, weights = np.arange(11.0), np.eye(11)[10]
    row = spread("loss", values, weights)
    assert [row[f"loss.p{10 * k}"] for k in range(1, 10)] == pytest.approx(list(range(1, 10)))
    assert (row["loss.mean"], row["loss.worst"], row["loss.best"]) == (10, 10, 0)
    assert spread("test_accuracy", values, weights)["test_accuracy.worst"] == 0


def test_a_value_that_is_not_finite_names_its_client():
    metrics = {"m": lambda x, y, batch: jnp.mean(jnp.where(batch["a"] == 5.0, jnp.nan, 1.0))}
    clients = fb.Clients([{"a": np.full((n, 3), 5.0 if n == 11 else 1.0)} for n in SIZES])
    with raises_with(fb.errors.NonFiniteError, "nan", round=0, during="evaluation", client=2, names=("m",)):
        solved(clients=clients, own=metrics)


def test_a_mapped_sample_that_is_not_finite_is_refused(tmp_path):
    rows = [{"a": np.ones((n, 3))} for n in SIZES]
    rows[2]["a"][1, 1] = np.inf
    clients = fb.Clients(mapped(tmp_path, "outer", rows))
    with refuses("", fact="NaN or infinity, first in sample 1 of client 2", where="Clients.outer['a']"):
        PerClientEvaluation({"m": PerClient(METRICS["error"])}, clients, (None, None))(0, jnp.ones(2), jnp.ones(3))


@pytest.mark.parametrize(
    ("metrics", "path", "got", "fact"),
    [
        ([1], "metrics_per_client", [1], "(x, y, batch)"),
        ({"m": 0.5}, "metrics_per_client['m']", 0.5, "PerClient"),
        ({"m": lambda x, y, batch: batch["a"]}, "the value of metrics_per_client['m']", ["float64[1,3]"], "one real"),
        ({"m": fb.Metric(METRICS["error"], None)}, "metrics_per_client['m'].larger_is_better", None, "True or False"),
    ],
)
def test_a_metric_that_is_none_is_refused_by_its_name(metrics, path, got, fact):
    with refuses(path, got, fact):
        solved(own=metrics)


@pytest.mark.parametrize(
    ("metrics", "refusal"),
    [
        ({"m": lambda x, y: 1.0}, ("metrics_per_client['m']", "(x, y)", "(x, y, batch)")),
        (
            {"m": lambda x, y, batch: batch["b"]},
            ("", ANY, "KeyError: 'b'"),
        ),
    ],
)
def test_a_metric_that_is_none_is_refused_before_anything_runs(metrics, refusal):
    with refuses(*refusal):
        solved(own=metrics)


def test_samples_are_outer_or_inner_and_a_column_is_measured_once():
    with refuses("PerClient.samples", "test", "'outer' or 'inner'"):
        fb.PerClient(METRICS["error"], "test")
    with refuses("metrics", "error.worst", "another name"):
        solved(own={"error": METRICS["error"]}, metrics={"error.worst": lambda x, y: 0.0})


def test_a_loss_that_draws_is_a_metric_too():
    """The function inside such a loss takes one argument more."""
    drawn = fb.Bilevel(lambda x, y, batch, key: jnp.mean(batch["a"][:, 0]), lambda x, y, batch: y @ y).outer
    rows = [{"a": np.array([[1.0], [3.0]])}, {"a": np.array([[5.0], [7.0]])}]
    evaluate = PerClientEvaluation(as_per_client({"drawn": drawn}), fb.Clients(rows), (None, None))
    np.testing.assert_allclose(evaluate.each(jnp.ones(2), jnp.ones(3))["drawn"], [2.0, 6.0], rtol=1e-12)


@pytest.mark.parametrize("map_in", [False, True])
def test_a_loss_of_all_samples_gets_all_samples_of_a_client(map_in, tmp_path):
    """The largest value of a client is neither a mean over its samples, nor that of a block or of the padding."""

    def largest(x, y, samples, valid):
        return jnp.max(jnp.where(valid, samples["a"] @ y - x[0], -jnp.inf))

    clients = population(tmp_path if map_in else None)
    for name in ("outer", "inner"):
        row = solved(clients=clients, own={"m": fb.PerClient(fb.WholeLoss(largest), name)}, eval_every=None)
        x, y, rows = np.asarray(row.x), np.asarray(row.y), getattr(population(), name)
        want = np.array([np.max(rows.row(i)["a"] @ y - x[0]) for i in range(4)])
        assert row.history.rows[-1]["m.mean"] == pytest.approx(P @ want, rel=1e-12)
        assert row.history.rows[-1]["m.worst"] == pytest.approx(want.max(), rel=1e-12)


def test_each_client_has_its_own_leaves_in_a_loss_of_all_samples():
    """Client i has y = i + 1 here, and the metric is y times the sum of its samples."""
    whole = fb.WholeLoss(lambda x, y, samples, valid: y * jnp.sum(jnp.where(valid, samples, 0)))
    clients = fb.Clients([np.array([1.0, 2.0]), np.array([5.0])])
    evaluate = PerClientEvaluation({"m": PerClient(whole)}, clients, (None, None), own=lambda path: True)
    np.testing.assert_allclose(evaluate.each(jnp.ones(()), np.array([1.0, 2.0]))["m"], [3.0, 10.0], rtol=1e-12)


@pytest.mark.checked
@pytest.mark.parametrize("name", ["root", "largest", "shared root", "mean", "accuracy", "whole", "drawing"])
def test_a_metric_that_is_no_mean_over_samples_is_named(name):
    """The mean of roots is not the root of the mean. A loss of all samples, or that draws, is no such metric."""
    square = lambda x, y, batch: (batch["a"] @ y - x[0]) ** 2  # noqa: E731
    metric = {
        "root": lambda x, y, batch: jnp.sqrt(jnp.mean(square(x, y, batch))),
        "largest": lambda x, y, batch: jnp.max(square(x, y, batch)),
        "shared root": lambda x, y, batch: jnp.mean(jnp.sqrt(square(x, y, batch))),
        "mean": lambda x, y, batch: jnp.mean(square(x, y, batch)) + y @ y,
        "accuracy": fb.Metric(lambda x, y, batch: jnp.mean(batch["a"] @ y > 0), True),
        "whole": fb.WholeLoss(lambda x, y, samples, valid: jnp.max(jnp.where(valid, square(x, y, samples), 0))),
        "drawing": fb.Bilevel(lambda x, y, batch, key: jax.random.normal(key), PROBLEM.inner).outer,
    }[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        solved(own={"m": metric})
    named = [one for one in seen if "metrics_per_client['m']" in str(one.message)]
    assert len(named) == (name in ("root", "largest"))


@pytest.mark.checked
@pytest.mark.parametrize("function", [jnp.mean, jnp.max])
def test_rounding_to_sixteen_bits_makes_no_warning(function):
    """A mean in bfloat16 differs by up to 1/128 from the mean of its values; the largest value differs by much more."""

    def metric(x, y, batch):
        half = (batch["a"].astype(jnp.bfloat16) @ y.astype(jnp.bfloat16) - x[0].astype(jnp.bfloat16)) ** 2
        return function(half)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        solved(own={"m": metric})
    named = [one for one in seen if "metrics_per_client['m']" in str(one.message)]
    assert len(named) == (function is jnp.max)


def test_of_several_processes_each_measures_its_share(monkeypatch):
    """Each of several processes measures its share of the clients, and reads no other samples.

    The processes run one after the other here; the samples of other processes' clients are wrong.
    """
    measured = {"error": PerClient(METRICS["error"])}
    x, y = jnp.array([0.1, 0.2]), jnp.ones(3) / 3
    whole = population()
    want = PerClientEvaluation(measured, whole, (None, None)).each(x, y)["error"]
    said = []
    for process, own in enumerate([slice(0, 1), slice(1, 2), slice(2, 4)]):  # 4 clients in 3 ranges
        group = ProcessGroup(processes=3, process=process)
        monkeypatch.setattr(group, "gather", lambda word: [word])
        others = np.setdiff1d(np.arange(4), np.arange(4)[own])
        rows = [
            {"a": np.full_like(whole.outer.row(i)["a"], 1e6) if i in others else whole.outer.row(i)["a"]}
            for i in range(4)
        ]
        said.append(PerClientEvaluation(measured, fb.Clients(rows), (None, None), group).each(x, y)["error"])
    np.testing.assert_allclose(np.concatenate(said), want, rtol=1e-12)
