"""Whether a larger or a smaller metric is better: declared once, and used by tables, callbacks, files and columns."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from refusals import refuses, warns_with

PROBLEM = fb.SingleLevel(lambda x, batch: jnp.mean((x - batch["a"]) ** 2))
ROWS = [{"a": np.full((2, 1), float(i))} for i in range(4)]
"""x moves from 0 towards the mean of these rows, 1.5, so that the score x grows in every round."""


def solved(**options):
    metrics = {"score": fb.Metric(lambda x, y: x[0], True), "error": lambda x, y: 1.5 - x[0]}
    options = {"rounds": 4, "eval_every": 1, "metrics": metrics} | options
    return fb.solve(
        fb.FedAvg(local_steps=1, batch_size=None, lr=0.1), PROBLEM, fb.Clients(ROWS), jnp.zeros(1), **options
    )


@pytest.fixture(scope="module")
def result():
    per_client = {
        "gap": fb.PerClient(lambda x, y, batch: jnp.mean(batch["a"]), larger_is_better=True),
        "gap_accuracy": fb.PerClient(lambda x, y, batch: jnp.mean(batch["a"]), larger_is_better=False),
    }
    return solved(metrics_per_client=per_client)


def test_the_best_value_is_the_largest_where_larger_was_declared_better(result):
    score = result.history["score"]
    assert (np.diff(score) > 0).all()
    assert result.history.in_words()["score"].endswith(f"best {score[-1]:.4g} at round 4")
    assert result.history.larger_is_better("score")


def test_the_worst_client_is_by_the_declaration_not_by_the_name(result):
    """The worst client is found by the declaration, not by the metric's name.

    The value of client i is i. If larger is better, client 0 is the worst of 0 … 3; if smaller is better, client 3.
    """
    row = result.history.rows[-1]
    assert (row["gap.worst"], row["gap.best"]) == (0, 3)
    assert (row["gap_accuracy.worst"], row["gap_accuracy.best"]) == (3, 0)
    assert result.history.larger_is_better("gap.p10")
    assert not result.history.larger_is_better("gap_accuracy.mean")


def test_without_progress_goes_by_the_declaration(result):
    """A score that grows makes progress if larger was declared better; an error makes progress if it falls.

    An error needs no declaration.
    """
    assert solved(callbacks=[fb.stop_without_progress("score", patience=1)]).round == 4
    assert solved(callbacks=[fb.stop_without_progress("error", patience=1)]).round == 4
    plain = {"score": lambda x, y: x[0]}  # a plain function: a smaller value is better
    assert solved(metrics=plain, callbacks=[fb.stop_without_progress("score", patience=1)]).round == 1
    stopped = solved(callbacks=[fb.stop_without_progress("score", patience=1, larger_is_better=False)])
    assert (stopped.round, stopped.stopped) == (1, "score has not improved for 1 evaluations")


def test_by_a_metric_of_which_neither_value_is_better_nothing_is_judged(recwarn):
    """A metric of which neither a larger nor a smaller value is better is only measured.

    It grows by 35 powers of ten here. A run whose loss grew so much would be reported as diverging.
    """
    heights = {"height": fb.Metric(lambda x, y: 10 ** (40 * x[0]) * 1e-9, None)}
    found = solved(metrics=heights, best_by=None).history
    assert found["height"][-1] > 1e5
    assert "height" in found.columns
    assert "height" not in found.judged
    assert "best" not in found.in_words()["height"]
    assert not recwarn
    with warns_with(fb.errors.NumericalWarning, "height has grown"):
        solved(metrics={"height": heights["height"].function})


@pytest.mark.parametrize("name", ["accuracy", "inaccuracy", "test_accuracy.young"])
def test_no_name_says_which_way_is_better(name):
    with refuses(f"metric {name}", fact="Metric"):
        solved(metrics={name: lambda x, y: x[0]})
    with refuses(f"metric {name}", fact="Metric"):
        solved(metrics_per_client={name: lambda x, y, batch: jnp.mean(batch["a"])})
    said = solved(metrics={name: fb.Metric(lambda x, y: 1.5 - x[0], larger_is_better=False)}, rounds=1)
    assert said.history.in_words()[name].startswith("150.00 %" if name != "inaccuracy" else "1.5 →")


def test_patience_with_two_rows_alone_is_warned_of(result):
    with warns_with(UserWarning, "eval_every"):
        assert solved(callbacks=[fb.stop_without_progress("score", patience=3)], eval_every=4).round == 4


def test_a_saved_result_and_a_resumed_run_keep_the_declaration(result, tmp_path):
    result.save(tmp_path / "result.npz")
    assert fb.Result.load(tmp_path / "result.npz", result.x, None).history == result.history
    solved(rounds=2, checkpoint=tmp_path / "run.npz")
    assert solved(checkpoint=tmp_path / "run.npz", resume=True).history.larger_is_better("score")


@pytest.mark.parametrize(
    ("make", "path", "got", "fact"),
    [
        (lambda: fb.Metric(3, True), "Metric.function", 3, "(x, y)"),
        (lambda: fb.Metric(lambda x, y: x, "yes"), "Metric.larger_is_better", "yes", "True, False or None"),
        (lambda: fb.PerClient(lambda x, y, b: x, larger_is_better=1), "PerClient.larger_is_better", 1, "None"),
    ],
)
def test_a_wrong_declaration_is_refused(make, path, got, fact):
    with refuses(path, got, fact):
        make()


def test_a_metric_of_other_arguments_is_refused():
    with refuses("metrics['m']", "(x)", "(x, y)"):
        solved(metrics={"m": fb.Metric(lambda x: x, True)})
