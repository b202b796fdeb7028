"""Does a saved result come back whole, and do the ready-made callbacks stop when they say?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.errors import CheckpointError


def result(rows=(), **entries):
    ledger = authoring.Ledger(rounds=3, exchanges=6, bytes_up=10**15, exchanges_by_phase={"ask": 6})
    x = {"w": jnp.array([[1.0, 0.1 + 0.2]]), "half": jnp.ones(2, jnp.bfloat16), "activation": jnp.tanh, "depth": 2}
    made = {"x": x, "y": jnp.array([3.0]), "round": 3, "rounds": 5, "compile_seconds": 0.25, "stopped": "why"}
    return fb.Result(**(made | entries), history=authoring.History(list(rows)), ledger=ledger)


def test_a_result_comes_back_as_it_was(tmp_path):
    saved = result([{"round": 0}, {"round": 3, "loss": 0.1}])
    saved.save(tmp_path / "a" / "result.npz")
    blank = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if hasattr(leaf, "dtype") else leaf, saved.x)
    got = fb.Result.load(str(tmp_path / "a" / "result.npz"), blank, jnp.zeros(1))
    assert jax.tree.structure(got.x) == jax.tree.structure(saved.x)
    assert (got.x["activation"], got.x["depth"], got.x["half"].dtype) == (jnp.tanh, 2, jnp.bfloat16)
    np.testing.assert_array_equal(got.x["w"], saved.x["w"])
    np.testing.assert_array_equal(got.y, saved.y)
    for name in ("round", "rounds", "history", "ledger", "compile_seconds", "stopped"):
        assert getattr(got, name) == getattr(saved, name)


def test_a_result_of_another_model_is_refused(tmp_path):
    saved = result()
    saved.save(tmp_path / "result.npz")
    with pytest.raises(CheckpointError, match=r"\['y'\] is float64\[1\] there, float64\[2\] here"):
        fb.Result.load(tmp_path / "result.npz", saved.x, jnp.zeros(2))
    with pytest.raises(CheckpointError, match="another model"):
        fb.Result.load(tmp_path / "result.npz", {"other": jnp.zeros(2)}, saved.y)


def told(callback, values, metric="m"):
    """What a callback says to a run that measures these values, None being a call between rows."""
    history, said = [], []
    for value in values:
        row = None if value is None else {"round": len(history), metric: value}
        history += [] if row is None else [row]
        said.append(callback(result(history), row))
    return said


FELL = "m has not improved for 1 evaluations"


@pytest.mark.parametrize(
    ("callback", "values", "said"),
    [
        (fb.stop_when("m", above=0.9), [0.5, None, 0.899, 0.9, 0.95], 3 * [None] + 2 * ["m reached 0.9"]),
        (fb.stop_when("m", below=1e-3), [1.0, 2e-3, 1e-3], [None, None, "m fell to 0.001"]),
        (fb.stop_when("m", above=2, below=0), [1, 2, -1], [None, "m reached 2", "m fell to 0"]),
        (
            fb.stop_without_progress("m", patience=2, larger_is_better=True),
            [1, 2, None, 2, 3, 1, 3],
            6 * [None] + ["m has not improved for 2 evaluations"],
        ),
        (fb.stop_without_progress("m", patience=1, larger_is_better=False), [3, 2, 1, 1], 3 * [None] + [FELL]),
    ],
)
def test_a_callback_stops_when_it_says(callback, values, said):
    assert told(callback, values) == said


@pytest.mark.parametrize("callback", [fb.stop_when("m", above=0), fb.stop_without_progress("m", patience=1)])
def test_a_misspelt_metric_is_refused_once_there_are_rounds(callback):
    """Row 0 lacks the losses of the rounds; any later row must have the metric."""
    with pytest.raises(fb.errors.ConfigurationError, match=r"unknown metric 'm'.*other"):
        told(callback, [1, 2, 3], metric="other")
