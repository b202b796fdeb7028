"""Does `fedbilevel.sweep` make the runs of `solve`, choose the best point, and continue after an interruption?"""

from __future__ import annotations

import importlib
import math
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.tables import with_values
from fedbilevel.engines.history import History
from fedbilevel.errors import CheckpointError, ConfigurationError, InUse, NumericalError
from fedbilevel.sweeps import Sweep, made, measured_on_test, played, product
from fedbilevel.tasks import quadratic
from refusals import ANY, raises_with, refuses
from representatives import slow_but

TASK = quadratic(clients=2, dim_x=2, dim_y=2, samples=(2, 2))
STEPS = {"server_lr.x": [0.05, 0.1]}


def swept(algorithm=None, task=TASK, **given) -> Sweep:
    """Sweep over two step sizes, with six rounds for each run, unless an argument says otherwise."""
    given = {"grid": STEPS, "select": "relative_error", "rounds": 6, "metrics": TASK.metrics, **given}
    return fb.sweep(algorithm or fb.SimFBO(), task.problem, task.clients, task.x0, task.y0, **given)


def player(history) -> SimpleNamespace:
    """Return a player that makes no runs: `history` returns the history for the number of a point and a seed."""
    return SimpleNamespace(make=lambda point: point, run=lambda number, point, seed, display: history(number, seed))


def solved(x: float, seed: int, **given) -> dict:
    """Return the last row of the same run without a sweep, except for its seconds."""
    algorithm = fb.SimFBO(server_lr=fb.XYV(x=x, y=fb.SimFBO().server_lr.y, v=fb.SimFBO().server_lr.v))
    result = fb.solve(
        algorithm, TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=6, key=seed, metrics=TASK.metrics, **given
    )
    return {name: value for name, value in result.history.rows[-1].items() if name != "seconds"}


@pytest.fixture(scope="module")
def two_by_two() -> Sweep:
    return swept(seeds=[0, 3])


def test_its_runs_are_those_of_solve(two_by_two) -> None:
    assert [(row["server_lr.x"], row["seed"]) for row in two_by_two.trials] == [
        (x, s) for x in (0.05, 0.1) for s in (0, 3)
    ]
    assert two_by_two.trials[3] == {"server_lr.x": 0.1, "seed": 3, "error": "", **solved(0.1, 3)}


def test_the_best_point_has_the_best_mean_over_the_seeds(two_by_two) -> None:
    of = [[row["relative_error"] for row in two_by_two.trials if row["server_lr.x"] == x] for x in (0.05, 0.1)]
    errors = dict(zip((0.05, 0.1), of, strict=True))
    best = min(errors, key=lambda x: sum(errors[x]))
    assert two_by_two.best == {"server_lr.x": best}
    assert two_by_two.algorithm.server_lr.x == best
    first = two_by_two.rows[0]
    assert first["relative_error"] == pytest.approx(np.mean(errors[best]), rel=1e-15)
    assert first["sd"] == pytest.approx(np.std(errors[best], ddof=1), rel=1e-12)
    assert two_by_two.spent == {"rounds": 24, "exchanges": 24}


@pytest.mark.parametrize(
    ("values", "best", "said"),
    [
        ([1, 2, 3], 3, ["the best steps, 3, lies on the edge of the grid: better values may lie beyond it"]),
        ([0.5, 2, 3], 0.5, ["the best steps, 0.5, lies on the edge of the grid: better values may lie beyond it"]),
        ([1, 2, 3], 2, []),
        ([1, 2, 3], 1, []),  # a count is at least 1
        ([3], 3, []),
        (["cg", None, 3], 3, []),
        ([True, False], True, []),
    ],
)
def test_a_best_point_on_the_edge_of_its_grid_is_warned_of(values, best, said) -> None:
    def play(number, seed):
        row = {"round": 1, "exchanges": 1, "loss": float(values[number] != best)}
        return History([row])

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = played(player(play), [{"steps": value} for value in values], [0], "loss")
    assert found.best == {"steps": best}
    assert [str(one.message) for one in warned] == said


def test_it_says_of_itself_in_six_lines(two_by_two) -> None:
    """The representation of a sweep has six lines, which name its field and say how many runs were made."""
    lines = repr(two_by_two).splitlines()
    assert len(lines) == 6
    assert lines[0] == "Sweep over server_lr.x"
    assert "4 runs (2 points × 2 seeds); in all 24 rounds, 24 exchanges" in lines[4]
    assert two_by_two._repr_html_().count("<tr>") == 5


def test_it_shows_which_run_is_played_and_its_rounds() -> None:
    events: list[object] = []
    told = SimpleNamespace(
        stage=lambda name: events.extend([name] if "point" in name else []),
        advance=lambda round, rounds: events.extend([(round, rounds)] if round == rounds else []),
        close=lambda: events.append("closed"),
    )
    swept(progress=told)
    assert events == ["point 1 of 2, seed 0", (6, 6), "point 2 of 2, seed 0", (6, 6), "closed"]
    with refuses("progress", "loud"):
        swept(progress="loud")


def test_a_run_may_end_by_another_cost_than_rounds() -> None:
    """Runs of a sweep may end by another cost than rounds, here by exchanges, of which SimFBO makes one per round."""
    found = swept(rounds=100, eval_every=1, callbacks=[fb.stop_when("exchanges", above=5.5)])
    assert [row["exchanges"] for row in found.rows] == [6, 6]
    best = {**found.best, "seed": 0, "error": "", **solved(found.best["server_lr.x"], 0, eval_every=1)}
    assert best in found.trials


def test_a_swept_field_keeps_its_values_though_a_cost_has_its_name() -> None:
    """If a swept field has the name of a cost, the rows have the values of the field."""

    def history(number: int, seed: int) -> History:
        return History([{"round": 1, "exchanges": 7.0, "fit": float(number)}])

    points = product({"exchanges": [3, 5]})
    found = played(player(history), points, [0], "fit")
    assert [row["exchanges"] for row in found.rows] == [row["exchanges"] for row in found.trials] == [3, 5]
    assert (found.best, found.spent["exchanges"]) == ({"exchanges": 3}, 14)


def test_the_epsilon_of_a_point_is_the_largest_of_its_seeds() -> None:
    def history(number: int, seed: int) -> History:
        return History([{"round": 1, "exchanges": 1.0, "fit": 0.0, "epsilon": 2.0 + abs(seed - 1)}])

    found = played(player(history), product({"a": ["b"]}), [1, 2, 3, 0], "fit")
    assert [row["epsilon"] for row in found.rows] == [4.0]


def test_an_interrupted_sweep_goes_on_to_the_same_table(two_by_two, tmp_path) -> None:
    """A sweep that is interrupted in the third of four runs continues, and has the table of an undisturbed sweep."""
    calls = []

    def stop(result, row) -> None:
        calls.append(result.round)
        if calls.count(6) == 2 and result.round == 3:
            raise KeyboardInterrupt

    given = {"seeds": [0, 3], "folder": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        swept(callbacks=[stop], checkpoint_every=3, **given)
    later = []
    again = swept(callbacks=[lambda result, row: later.append(result.round)], checkpoint_every=3, **given)
    assert later == [*range(1, 7), *range(7)]  # the rest of the third run, and the fourth run
    assert (again.rows, again.trials) == (two_by_two.rows, two_by_two.trials)
    assert swept(grid={"server_lr.x": [0.05, 0.1, 0.2]}, **given).trials[:4] == two_by_two.trials
    with raises_with(CheckpointError, path=tmp_path / "point-000-seed-0.npz", remedy="choose another folder") as error:
        swept(task=quadratic(clients=2, dim_x=2, dim_y=2, samples=(2, 2), seed=1), **given)
    assert {"inner samples of clients 0 to 1", "outer samples of clients 0 to 1"} < error.value.differences.keys()


def test_a_run_that_another_process_plays_is_looked_at_again() -> None:
    """If another process has locked a run, the sweep makes its other runs first, and then tries this one again."""
    calls = []

    def history(number: int, seed: int) -> History:
        calls.append((number, seed))
        if calls.count((0, 0)) == 1 and number == 0 and seed == 0:
            raise InUse("it is in use")
        return History([{"round": 1, "exchanges": 1.0, "fit": number + seed / 10}])

    points = product({"a": [1, 2]})
    found = played(player(history), points, [0, 5], "fit")
    assert calls == [(0, 0), (1, 0), (0, 5), (1, 5), (0, 0)]
    assert [row["fit"] for row in found.trials] == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"grid": {}}, ("grid", {})),
        ({"grid": {"server_lr.x": []}}, ("grid of server_lr.x", [])),
        ({"grid": {"server_lr.x": "0.1"}}, ("grid of server_lr.x", "0.1")),
        ({"grid": {"server_lr.x": [0.1, 0.10]}}, ("grid of server_lr.x", 0.1, "once")),
        (
            {"grid": {"server_lr.x": [0.1, 0.2], "server_lr": [fb.XYV(0.5, 0.5, 0.5)]}},
            ("grid", "server_lr.x", "after server_lr"),
        ),
        ({"grid": {"server_lr.x": jnp.array([0.5, 0.5])}}, ("grid of server_lr.x", ANY, "once")),
        ({"grid": {"local_steps": [5, np.int64(5)]}}, ("grid of local_steps", ANY, "once")),
        ({"grid": {"sever_lr.x": [0.1]}}, ("field of SimFBO", "sever_lr", "", "server_lr")),
        ({"grid": {"server_lr.z": [0.1]}}, ("part of SimFBO.server_lr", "z", "['v', 'x', 'y']")),
        ({"grid": {"server_lr.x": [0.1, "abc"]}}, ("SimFBO.server_lr.x", "abc")),
        ({"metrics": ["relative_error"]}, ("metrics", ["relative_error"])),
        ({"select": "relativ_error"}, ("metric to select on", "relativ_error", "", "relative_error")),
        ({"select": "test_accuracy"}, ("metric to select on", "test_accuracy", "select_on_test=True")),
        ({"rounds": -5}, ("rounds", -5)),
        ({"roundz": 5}, ("argument of fedbilevel.sweep", "roundz", "", "rounds")),
        ({"resume": True}, ("argument of fedbilevel.sweep", "resume")),
        ({"seeds": []}, ("seeds", [])),
        ({"seeds": [1, 1]}, ("seeds", [1, 1])),
        ({"algorithm": 7}, ("algorithm", 7)),
        ({"algorithm": lambda lr: fb.SimFBO()}, ("argument of the function that makes the algorithm", "server_lr.x")),
    ],
)
def test_wrong_input_is_refused_before_anything_runs(given, refusal, monkeypatch) -> None:
    monkeypatch.setattr("fedbilevel.sweeps.played", None)
    with refuses(*refusal):
        swept(**given)


def test_a_test_metric_decides_only_where_that_is_said() -> None:
    metrics = {"test_accuracy": fb.Metric(TASK.metrics["relative_error"], larger_is_better=True)}
    found = swept(select="test_accuracy", metrics=metrics, select_on_test=True, rounds=1)
    assert "SELECTED ON TEST DATA" in repr(found)


OF_TEST = (
    "test test_accuracy testAccuracy TestAccuracy testacc accTest test2 acc_test1 acc2test acc_on_tests on-tests "
    "TESTLoss lossTEST balanced_test_accuracy.worst testing_loss test/fit TEST_ACC"
)
NOT_OF_TEST = "validation_accuracy latest contest greatest_fit fastestRound attest attests protests2 latest_loss.worst"


@pytest.mark.parametrize(("names", "are"), [(OF_TEST, True), (NOT_OF_TEST, False)])
def test_a_name_says_whether_a_metric_is_of_test_data(names, are) -> None:
    assert [name for name in names.split() if measured_on_test(name) != are] == []


@pytest.mark.slow
def test_a_function_may_make_the_algorithm() -> None:
    found = swept(lambda steps: fb.SimFBO(local_steps=steps), grid={"steps": [3, 4]}, rounds=1)
    assert found.algorithm == fb.SimFBO(local_steps=found.best["steps"])


def made_up(values, seeds=(0,), larger: bool = False) -> Sweep:
    """Return a sweep without real runs: `values` has the metric of each point and seed, or why the run failed."""

    def history(number: int, seed: int) -> History:
        value = values[number][seeds.index(seed)]
        if isinstance(value, str):
            raise NumericalError(value)
        return History([{"round": 100, "exchanges": 2.0, "fit": value}], {"fit": larger})

    points = product({"a": list(range(len(values)))})
    return played(player(history), points, seeds, "fit")


def test_which_value_is_better_is_as_the_metric_says() -> None:
    assert [made_up([[2.0], [1.0], [3.0]], larger=larger).best for larger in (False, True)] == [{"a": 1}, {"a": 2}]


def test_a_failed_point_is_a_row_that_says_why_and_stands_last() -> None:
    found = made_up([[0.0, "it diverged"], [5.0, 6.0], [math.nan, math.nan]], seeds=(0, 1))
    assert [row["a"] for row in found.rows] == [1, 0, 2]
    assert [row["error"] for row in found.rows] == ["", "seed 1: it diverged", "seeds 0, 1: fit is nan"]
    assert [row["fit"] for row in found.rows] == [5.5, None, None]
    assert "6 runs (3 points × 2 seeds), 3 failed" in repr(found)
    found = made_up([["no"], ["no"]])
    assert (found.best, found.algorithm) == (None, None)
    assert "every point failed" in repr(found)


@pytest.mark.slow
def test_a_run_that_diverges_is_charged_once_in_a_first_and_in_a_second_call(tmp_path) -> None:
    """A run that diverges is charged for its rounds once, in a first call and in a second one.

    Its second round is not finite. A second call repeats this round from the checkpoint, which has the first round.
    """
    method = fb.SimFBO(client_lr=0.05, server_lr=fb.XYV(x=0.01, y=0.05, v=0.05))
    grid = {"server_lr.y": [0.05, 1e200]}
    given = {"grid": grid, "rounds": 4, "folder": tmp_path, "metrics": {}, "select": "outer_loss"}
    first, second = swept(method, **given), swept(method, **given)
    assert first.trials[1]["exchanges"] == first.trials[1]["round"] == 2
    assert first.spent == {"rounds": 6, "exchanges": 6}
    assert second.trials == first.trials
    assert second.spent == first.spent


@pytest.mark.parametrize("engine", slow_but(fb.Local(), of=[fb.Local(), fb.Reference()]))
@pytest.mark.parametrize("budget", slow_but(None, of=[None, 100.0]))
def test_a_run_that_diverges_says_what_it_has_cost(engine, budget) -> None:
    """The error of a run that diverges has the costs of the run.

    Two rounds have two exchanges, so that ε is that of two replies of a client. The engine `Reference` stops at the
    first reply that is not finite, which is the third of all replies.
    """
    privacy = fb.Privacy(clip=1.0, noise_multiplier=5.0, delta=1e-5, budget=budget)
    steps = fb.XYV(x=0.05, y=1e200, v=0.05)
    with pytest.raises(NumericalError) as failed:
        fb.solve(
            fb.SimFBO(server_lr=steps, client_lr=0.05), TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=6,
            privacy=privacy, engine=engine,
        )  # fmt: skip
    ledger = failed.value.ledger
    assert (ledger.rounds, ledger.exchanges, ledger.replies) == (2, 2, 4 if isinstance(engine, fb.Local) else 3)
    assert (ledger.epsilon, ledger.delta) == (privacy.epsilon_after(2), 1e-5)


def test_an_unlucky_combination_is_a_row_and_a_value_that_never_fits_is_refused() -> None:
    """A refused combination of values is a failed row. A value that is refused in every combination is an error."""

    def make(point):
        if point["a"] * point["b"] > limit:
            raise ConfigurationError(f"{point['a']} and {point['b']} are too much")
        return point

    points, limit = product({"a": [1, 2], "b": [1, 2]}), 3
    assert [isinstance(one, ConfigurationError) for one in made(points, make)] == [False, False, False, True]
    limit = 1
    with pytest.raises(ConfigurationError) as error:
        made(points, make)
    first, second = error.value.wrong  # the first points with b = 2 and with a = 2
    assert (str(first), str(second)) == ("1 and 2 are too much", "2 and 1 are too much")


def test_fields_of_parts_are_replaced_by_their_paths() -> None:
    whole = with_values(
        fb.FedNest(), {"hypergradient.solver": fb.parts.CG(), "hypergradient.solver.max_steps": 7, "inner.lr": 0.2}
    )
    assert (whole.hypergradient.solver, whole.inner.lr) == (fb.parts.CG(max_steps=7), 0.2)
    wrapped = with_values(fb.Asynchronous(fb.SimFBO(), wait_for=1), {"algorithm.server_lr.y": 0.3, "late.wait_for": 2})
    assert (wrapped.algorithm.server_lr.y, wrapped.late.wait_for) == (0.3, 2)


def test_a_part_is_swept_before_its_fields_and_not_after_them() -> None:
    """A part must be swept before its fields, because setting the part replaces its fields."""
    assert len(product({"inner": ["svrg"], "inner.lr": [0.1, 0.2]})) == 2
    with refuses("grid", "inner.lr", "after inner"):
        product({"inner.lr": [0.1], "inner": ["svrg"]})


@pytest.mark.slow
def test_the_example_of_a_search_of_ones_own_searches(monkeypatch) -> None:
    optuna = pytest.importorskip("optuna")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    example = importlib.import_module("search_with_optuna")
    study = example.search(trials=6)
    task, best = example.TASK, study.best_trial
    given = {"rounds": example.ROUNDS, "metrics": task.metrics}
    alone = fb.solve(fb.SimFBO(**best.params), task.problem, task.clients, task.x0, task.y0, **given)
    assert study.best_value == alone.history.rows[-1][example.METRIC]
    assert best.intermediate_values.keys() == set(range(10, 91, 10))
    ended = {optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED}
    assert (len(study.trials), {trial.state for trial in study.trials} - ended) == (6, set())
