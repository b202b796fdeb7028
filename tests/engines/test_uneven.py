"""Does a run say that y is far from trained because columns of the samples differ in scale, and is it silent else?"""

from __future__ import annotations

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.ragged import Ragged
from fedbilevel.engines import uneven
from fedbilevel.engines.ends import Descent, Spent
from fedbilevel.engines.options import RunOptions
from fedbilevel.engines.posed import PosedProblem, losses_seen
from fedbilevel.engines.uneven import spread_of, untrained
from refusals import warns_with

pytestmark = pytest.mark.checked
D = 4


def samples(scales, target=1.0, weights=None):
    """Return five clients, of 20 to 40 rows with features of these scales and a target that depends on all features."""
    rng = np.random.default_rng(3)
    rows = []
    for count in (20, 25, 30, 35, 40):
        features = rng.normal(size=(count, D))
        value = target * (features @ [1.0, -1.0, 0.5, 2.0] + 0.1 * rng.normal(size=count))
        rows.append(np.column_stack([features * scales, value]))
    return fb.Clients(rows, rows, weights=weights)


def outer(x, y, rows):
    return jnp.mean((rows[:, :D] @ y - rows[:, D]) ** 2)


def inner(x, y, rows):
    return outer(x, y, rows) + jnp.sum(10**x * y**2)


PROBLEM, START = fb.Bilevel(outer, inner), (np.full(D, -6.0), np.zeros(D))


def solve(clients, method=None, rounds=60, **given):
    return fb.solve(method or fb.SimFBO(batch_size=None), PROBLEM, clients, *START, rounds=rounds, **given)


def least(clients, x):
    """Return the least inner loss of all clients at x: in a ridge regression it has a closed form."""
    each = [p / len(rows) for p, rows in zip(clients.weights, map(clients.inner.row, range(len(clients))), strict=True)]
    whole = np.concatenate([np.sqrt(p) * clients.inner.row(i) for i, p in enumerate(each)])
    features, value = whole[:, :D], whole[:, D]
    y = np.linalg.solve(features.T @ features + np.diag(10.0 ** np.asarray(x)), features.T @ value)
    return float(np.sum((features @ y - value) ** 2) + np.sum(10.0 ** np.asarray(x) * y**2))


@pytest.mark.parametrize("scales", [(1, 100, 1, 1), (1e-4, 1, 1, 30), (2000, 2000, 0.01, 1)])
@pytest.mark.parametrize("weights", [None, [1, 2, 3, 4, 5]])
def test_a_run_on_columns_of_different_scales_says_so(scales, weights):
    """The remark has the inner loss of all clients at the end, and a loss between the least one and 1.1 times it."""
    clients = samples(np.array(scales), weights=weights)
    with warns_with(fb.errors.NumericalWarning, "differ in scale"):
        result = solve(clients)
    (said,) = [one for one in result.remarks if "differ in scale" in one]
    loss = float(
        np.dot(clients.weights, [inner(result.x, result.y, clients.inner.row(i)) for i in range(len(clients))])
    )
    assert f" {loss:.4g}," in said
    reached = float(said.partition("can fall to ")[2].split()[0])
    start = float(np.dot(clients.weights, [inner(result.x, START[1], clients.inner.row(i)) for i in range(5)]))
    lowest = least(clients, result.x)
    assert lowest * 0.999 <= reached <= lowest + 0.9 * (loss - lowest)
    assert loss - lowest > 0.1 * (start - lowest)


@pytest.mark.parametrize("scales", [(1, 1, 1, 1), (3, 1, 2, 0.7)])
def test_a_run_on_columns_of_similar_scales_is_silent(scales):
    assert not [one for one in solve(samples(np.array(scales))).remarks if "differ in scale" in one]


def test_a_column_that_does_not_slow_y_is_no_reason_for_a_remark():
    """A target that is a thousand times as large as the features changes no curvature, so that y is trained."""
    clients = samples(np.ones(D), target=1000.0)
    assert spread_of(clients.inner) > 100
    assert not [one for one in solve(clients).remarks if "differ in scale" in one]


def test_a_short_run_is_not_judged():
    """Six gradients of each client pay for one gradient of the check, and fewer than ten decide nothing."""
    assert not [one for one in solve(samples(np.array([1, 100, 1, 1])), rounds=3).remarks if "differ in scale" in one]


def test_noise_for_privacy_hides_the_losses_also_here():
    method = fb.SimFBO(batch_size=None, server_lr=1e-6, client_lr=1e-6)
    terms = fb.Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5)
    result = solve(samples(np.array([1, 100, 1, 1])), method, privacy=terms)
    assert not [one for one in result.remarks if "differ in scale" in one]


def test_with_a_robust_rule_the_limit_is_another_and_is_not_judged():
    method = fb.layered(fb.SimFBO(batch_size=None), fb.parts.Median())
    result = solve(samples(np.array([1, 100, 1, 1])), method)
    assert not [one for one in result.remarks if "differ in scale" in one]


def test_a_result_is_not_lost_by_the_check(monkeypatch):
    def out_of_memory(*given):
        raise MemoryError

    monkeypatch.setattr("fedbilevel.engines.uneven.descent", out_of_memory)
    result = solve(samples(np.array([1, 100, 1, 1])))
    assert np.all(np.isfinite(result.y))
    assert not [one for one in result.remarks if "differ in scale" in one]


@pytest.mark.parametrize(
    ("columns", "spread"),
    [
        ({"age": np.array([50.0, 70.0]), "pay": np.array([5000.0, 7000.0])}, 100),
        (np.array([[1.0, 0.0, 3.0], [-1.0, 0.0, -3.0]]), 3),  # a column of zeros has no scale
        (np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]]), 1),  # a category that is rare
        ({"image": np.ones((2, 3, 3)), "label": np.array([1, 700])}, 1),  # neither images nor classes are columns
        (np.array([[1.0, 2019.0], [2.0, 2021.0]]), 2020 / np.sqrt(2.5)),  # numbers that are far from 0
    ],
)
def test_the_spread_of_columns(columns, spread):
    clients = fb.Clients([columns], [columns])
    assert spread_of(clients.inner) == pytest.approx(spread, rel=1e-3)


def judged(monkeypatch, begin, first, last):
    """Return the remark for an inner loss that was `begin` at y0 and `first` at the end, and can fall to `last`."""
    monkeypatch.setattr(uneven, "losses_at", lambda *given: [begin])
    monkeypatch.setattr(uneven, "descent", lambda problem, clients, x, y, count: Descent(y, first, last, True))
    return untrained(PROBLEM, samples(np.array([1, 100, 1, 1])), *START, START[1], 100)


@pytest.mark.filterwarnings("ignore::fedbilevel.core.errors.NumericalWarning")
def test_a_start_that_was_trained_before_is_no_reason_for_a_remark(monkeypatch):
    """If y0 was trained by an earlier run, the inner loss hardly falls, and a tenth of its fall is rounding."""
    assert judged(monkeypatch, begin=2.0, first=1.5, last=1.0)
    assert not judged(monkeypatch, begin=1.0 + 2e-7, first=1.0 + 1e-7, last=1.0)
    assert not judged(monkeypatch, begin=1.0 - 1e-7, first=1.0, last=1.0)


def test_an_infinite_loss_at_the_end_is_no_warning_of_numpy():
    """exp of 5 · 100 is infinite in float32. The check then says nothing, and NumPy does not either."""

    def poisson(x, y, rows):
        return jnp.mean(jnp.exp(rows[:, :D] @ y)) + jnp.sum(10**x * y**2)

    problem = fb.Bilevel(poisson, poisson).prepared()
    y0, y = np.zeros(D, np.float32), np.full(D, 5, np.float32)
    with warnings.catch_warnings(action="error"):
        clients = samples(np.array([1, 100, 1, 1]))
        assert untrained(problem, clients, START[0], y0, y, 100) == ""


def test_padding_of_stored_samples_is_no_sample():
    """The numbers that only fill up the arrays of short clients are not read."""
    stacked = np.ones((2, 3, 2))
    stacked[0, 1:] = 1e6
    assert spread_of(fb.Clients(stacked, stacked, outer_sizes=[1, 3], inner_sizes=[1, 3]).inner) == 1


def test_few_samples_are_read_if_they_are_wide(monkeypatch):
    """An array of 100 samples of 50 numbers is read up to 200 numbers: four samples, from the first to the last."""
    monkeypatch.setattr(uneven, "NUMBERS", 200)
    wide = np.ones((100, 50))
    wide[1:33, 0] = 1e3  # samples 0, 33, 66 and 99 are read
    assert spread_of(Ragged.listed("inner", [wide[:60], wide[60:]])) == 1
    wide[99, 0] = 1e3
    assert spread_of(Ragged.listed("inner", [wide[:60], wide[60:]])) > 100


def test_later_trials_of_a_search_are_not_judged(monkeypatch):
    """A search shows no warnings of its trials, and its later trials do not pay for the check."""
    monkeypatch.setattr("fedbilevel.engines.posed.untrained", lambda *given: "said")
    clients, spent = samples(np.array([1, 100, 1, 1])), Spent(10**6, None)
    posed = PosedProblem.of(PROBLEM, clients, *START, RunOptions(rounds=1))
    assert posed.uneven(START, spent) == "said"
    with losses_seen(clients):
        assert posed.uneven(START, spent) == ""
