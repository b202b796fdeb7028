"""Is a saved result read back completely, and do the ready-made callbacks stop when they should?"""

import io
import zipfile
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.core.errors import CheckpointError
from fedbilevel.engines import checkpoint
from fedbilevel.engines.history import Best
from refusals import raises_with, refuses


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
    path = tmp_path / "result.npz"
    with raises_with(CheckpointError, path=path, differences={"['y']": ("float64[1]", "float64[2]")}):
        fb.Result.load(tmp_path / "result.npz", saved.x, jnp.zeros(2))
    leaves = dict.fromkeys(f"['x']['{name}']" for name in ("half", "other", "w"))
    with raises_with(CheckpointError, path=path, differences=leaves):
        fb.Result.load(tmp_path / "result.npz", {"other": jnp.zeros(2)}, saved.y)


@pytest.mark.parametrize(
    "x",
    [
        jnp.arange(3.0),
        {"w": [jnp.ones((2, 3)), (jnp.zeros(()), None)], "half": jnp.ones(2, jnp.bfloat16)},
        (jnp.ones(1), jnp.zeros((0, 2))),
    ],
)
def test_a_file_knows_how_x_and_y_are_built(x, tmp_path):
    best = Best(jax.tree.map(lambda leaf: leaf + 1, x), None, 2, "loss", 0.5)
    saved = result(x=x, y=None, best=best)
    saved.save(tmp_path / "result.npz")
    got = fb.Result.load(tmp_path / "result.npz")
    for ours, theirs in ((got.x, x), (got.best.x, best.x)):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert (got.y, got.best.y, got.best[2:]) == (None, None, (2, "loss", 0.5))


class Pair(NamedTuple):
    a: jax.Array


@pytest.mark.parametrize("x", [{"w": jnp.ones(2), "depth": 2}, Pair(jnp.ones(2)), {1: jnp.ones(2)}])
def test_a_file_without_an_outline_asks_for_x0_and_y0(x, tmp_path):
    """A file without an outline needs x0 and y0, since fixed leaves and nodes of other classes are in no file."""
    saved = result(x=x)
    saved.save(tmp_path / "result.npz")
    with raises_with(CheckpointError, "x0 and y0", path=tmp_path / "result.npz"):
        fb.Result.load(tmp_path / "result.npz")
    assert jax.tree.structure(fb.Result.load(tmp_path / "result.npz", x, saved.y).x) == jax.tree.structure(x)


def test_float64_is_not_rounded_in_silence(tmp_path):
    result(x=jnp.ones(2)).save(tmp_path / "result.npz")
    with jax.enable_x64(False), raises_with(CheckpointError, "jax_enable_x64", path=tmp_path / "result.npz"):
        fb.Result.load(tmp_path / "result.npz")


ONE = ["dict", ["x"], ["array"]]


@pytest.mark.parametrize(
    "outline",
    [
        "tree",
        7,
        [],
        ["set", [], []],
        ["dict", ["x"], []],
        ["dict", [["x"]], ["array"]],
        ["list", [], ["array"]],
        True,
        ONE,
    ],
)
def test_an_outline_that_save_does_not_write_is_refused(outline, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_outline", lambda tree: outline)
    result(x=jnp.ones(2), y=None).save(tmp_path / "result.npz")
    with raises_with(CheckpointError, path=tmp_path / "result.npz", errno=None):
        fb.Result.load(tmp_path / "result.npz")


def test_a_shape_beyond_the_file_takes_no_memory(tmp_path):
    path, claim = tmp_path / "result.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(claim, {"descr": "<f8", "fortran_order": False, "shape": (10**12,)})
    result(x=jnp.ones(2), y=None).save(path)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (entries | {"['x'].npy": claim.getvalue()}).items():
            archive.writestr(name, content)
    with raises_with(CheckpointError, "['x']", path=path, errno=None, differences={}):
        fb.Result.load(path)


def test_checkpoints_and_results_are_told_apart(tmp_path):
    start = fb.Clients(np.ones((2, 3))), 0.5, 0.5
    problem = fb.Bilevel(lambda x, y, b: (x * y - b.mean()) ** 2, lambda x, y, b: (y - x) ** 2)
    options = {"rounds": 1, "checkpoint": tmp_path / "run.npz", "engine": fb.Reference()}
    fb.solve(fb.FedBiO(), problem, *start, **options).save(tmp_path / "result.npz")
    path = tmp_path / "run.npz"
    with raises_with(CheckpointError, f"fb.solve(…, checkpoint={str(path)!r}", path=path, differences={}):
        fb.Result.load(tmp_path / "run.npz")
    with raises_with(CheckpointError, "has a result", path=tmp_path / "result.npz", differences={}):
        fb.solve(fb.FedBiO(), problem, *start, **options | {"checkpoint": tmp_path / "result.npz"}, resume=True)


def told(callback, values, metric="m"):
    """Return what a callback returns at each row of a run, if the metric has these values.

    A value of None makes a call between two rows, which has no row.
    """
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
    """A misspelt metric is refused after row 0, since row 0 lacks the losses of rounds, and later rows have them."""
    with refuses("metric", "m", "other"):
        told(callback, [1, 2, 3], metric="other")
