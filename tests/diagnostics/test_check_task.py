"""Does check_task pass correct tasks, and name the mistakes of others?"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.diagnostics.report import outcome
from fedbilevel.tasks import Task, hyper_cleaning, quadratic

pytestmark = pytest.mark.checked  # check_task reports the results of these checks

TASK = quadratic(clients=4, samples=(3, 5), condition=4)
OUTER, INNER = TASK.problem.outer, TASK.problem.inner


def summed(x, y, batch):
    """Compute the inner loss times the number of samples."""
    return INNER(x, y, batch) * len(batch["c"])


def broken(x, y, batch):
    """Compute a loss whose gradient in y is NaN at y = 0, which is the start."""
    return INNER(x, y, batch) + jnp.sqrt(jnp.sum(y**2)) / 10


def infinite(x, y, batch):
    """Compute the outer loss plus a constant that is not finite, so that its gradients are finite."""
    return OUTER(x, y, batch) + jnp.log(0.0)


def concave(x, y, batch):
    """Compute an inner loss with a maximum in y."""
    return INNER(x, y, batch) - jnp.sum(y**2)


def checked(problem, **changes):
    return fb.check_task(replace(TASK, problem=problem, **changes))


def test_tasks_that_are_right():
    report = fb.check_task(TASK)
    found = {check.name: check.detail for check in report.checks}
    assert found["the inner loss is strongly convex at the start"].startswith("eigenvalues from 0.")
    assert found["losses and gradients are finite"].startswith("the largest entry of a gradient is ")
    assert "relative_error 1" in found["metrics are finite"]


@pytest.mark.slow
def test_a_task_of_the_library_is_right():
    assert not fb.check_task(hyper_cleaning(clients=3, ridge=0.1)).failed


@pytest.mark.parametrize(
    ("problem", "name", "words"),
    [
        (
            fb.Bilevel(lambda x, y, b: jnp.vdot(x, x), INNER),
            "x acts on the outer",
            "does not change the outer loss",
        ),
        (fb.Bilevel(OUTER, lambda x, y, b: jnp.vdot(y, y)), "x acts on the outer", "takes the validation loss first"),
        (fb.Bilevel(OUTER, summed), "losses are means", "the inner loss is not a mean"),
        (fb.Bilevel(OUTER, broken), "losses and gradients", r"\['inner'\]\['y'\]"),
        (fb.Bilevel(infinite, INNER), "losses and gradients", "the outer loss is -inf"),
    ],
    ids=["y without effect", "swapped", "a sum", "NaN", "infinite"],
)
def test_what_is_wrong_is_named(problem, name, words):
    with pytest.raises(fb.errors.CheckError, match=words) as error:
        checked(problem, y0=np.zeros(8))
    (failed,) = [line for line in str(error.value).splitlines() if "  failed  " in line]
    assert failed.startswith(name)


def test_a_metric_that_is_not_finite_fails():
    with pytest.raises(fb.errors.CheckError, match="not finite numbers: mine"):
        checked(TASK.problem, metrics={"mine": lambda x, y: jnp.log(-jnp.ones(()))})


def test_metrics_are_tried_in_float64():
    """Metrics are tried in float64; this metric overflows in float32."""
    wide = {"wide": lambda x, y: jnp.sum(y) + y[0] * 1e30 * 1e30}
    report = checked(TASK.problem, y0=np.ones(8, np.float32), metrics=wide)
    assert {check.name: check.detail for check in report.checks}["metrics are finite"] == "wide 1e+60"


def test_labels_outside_of_the_classes_are_warned_of_and_are_no_sums():
    """Labels outside of the classes are warned of, and the loss is not reported as a sum.

    JAX treats label -1 as no class, which may be intended for samples without a label.
    """

    def entropy(x, y, batch):
        score = jax.nn.log_softmax(batch["u"] @ y) * jax.nn.one_hot(batch["c"], 3)
        return jnp.exp(x) * jnp.sum(y**2) - score.sum(1).mean()

    rng = np.random.default_rng(0)
    samples = {"u": rng.normal(size=(4, 20, 2)), "c": rng.integers(-1, 3, size=(4, 20))}
    problem, y0 = fb.Bilevel(entropy, entropy), rng.normal(size=(2, 3))
    with pytest.warns(fb.errors.DataWarning, match=r"entry -1 .* 0 to 2\b"):
        report = fb.check_task(Task("labels", problem, fb.Clients(samples), np.zeros(()), y0))
    assert not report.failed


def test_an_inner_loss_without_minimum_is_warned_of():
    with pytest.warns(fb.errors.NumericalWarning, match="not strongly convex in y at the start"):
        report = checked(fb.Bilevel(OUTER, concave))
    assert not report.failed


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(fb.errors.ConfigurationError):
        checked(TASK.problem, y0=np.zeros(5))


def test_an_error_of_several_lines_is_one_row():
    def fails():
        raise ValueError("first line\n  second line")

    found = outcome("a check", fails)
    assert (found.outcome, found.detail) == ("failed", "ValueError: first line second line")
