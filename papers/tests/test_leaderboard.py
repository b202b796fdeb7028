"""Ranks at equal budgets, against values computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from papers.leaderboard.__main__ import HERE, ladder, overview, play, ranked, ranks_of, read_at, tables
from papers.leaderboard.__main__ import tomllib as toml

from fedbilevel import experiments
from fedbilevel.authoring import ALGORITHMS, History

BOARD: dict[str, Any] = {
    "metric": "relative_error",
    "spec": {"run": {"rounds": 50, "eval_every": 1}},
    "panels": {
        "all": {
            "task": {"name": "quadratic", "clients": 3},
            "budgets": {"exchanges": 3, "megabytes": 0.0045},
            "log": True,
            "select": "outer_loss",
        }
    },
    "methods": {
        "FedBiO": {"algorithm": {"name": "fedbio"}, "ladder": "client_lr.x"},
        "SimFBO": {"algorithm": {"name": "simfbo"}, "ladder": "server_lr.x"},
    },
    "tuning": {
        "select": "relative_error",
        "seeds": [100],
        "factors": [0.5, 1e12],
        "spec": {"run": {"rounds": "none", "exchanges": 2}},
    },
}
BUDGET: dict[str, Any] = {"budgets": {"exchanges": 3}}


def history(values: list[float], per_round: int = 1) -> History:
    costs = {"bytes_down": 0, "bytes_up": 0, "gradients": 0, "hvps": 0, "seconds": 0.0, "time": 0.0}
    rows = [{"round": i, "exchanges": per_round * i, **costs, "fit": value} for i, value in enumerate(values)]
    return History(rows)


def test_the_metric_is_read_in_the_last_row_that_costs_no_more() -> None:
    """Rows at 0, 7 and 14 exchanges."""
    run = history([0.1, 0.2, 0.3], per_round=7)
    assert [read_at(run, "fit", "exchanges", amount) for amount in (6, 7, 13, 14, 99)] == [0.1, 0.2, 0.2, 0.3, 0.3]


def test_what_cannot_be_told_apart_shares_a_rank() -> None:
    """B is 0.01 below A with every seed; C differs from both by 0.02 ± 0.17 or so; D is far below all three."""
    values = {"A": [0.5, 0.7, 0.9], "B": [0.49, 0.69, 0.89], "C": [0.55, 0.65, 0.85], "D": [0.1, 0.3, 0.5]}
    assert ranked(values, larger=True, log=False) == {"A": 1, "B": 2, "C": 1, "D": 4}
    assert ranked(values, larger=False, log=False) == {"A": 3, "B": 2, "C": 2, "D": 1}


def test_errors_are_ranked_by_powers_of_ten() -> None:
    """A is a tenth of B with every seed, at errors of very different sizes: 0.9, 0.009 and 0.00009 are 0.3 ± 1.3."""
    values = {"A": [0.1, 0.001, 0.00001], "B": [1.0, 0.01, 0.0001]}
    assert ranked(values, larger=False, log=True) == {"A": 1, "B": 2}
    assert ranked(values, larger=False, log=False) == {"A": 1, "B": 1}
    assert ranked({"A": [0.0, 0.0], "B": [1.0, 1.0]}, larger=False, log=True) == {"A": 1, "B": 2}  # no logarithm of 0


def test_a_method_that_fails_has_no_rank() -> None:
    good, bad = history([0.9, 0.5]), history([0.9, 0.7])
    found = ranks_of(BUDGET, "fit", {"FedBiO": [good, None], "SimFBO": [bad, bad]})
    assert found["exchanges"]["FedBiO"] == {"rank": None, "place": None, "values": []}
    assert found["exchanges"]["SimFBO"]["rank"] == 1
    assert overview({"all": found}) == [["SimFBO", "1.0", "1 of 1", "1"], ["FedBiO", "2.0", "0 of 1", "–"]]


def test_a_method_that_scatters_is_level_with_the_best_and_not_well_placed() -> None:
    """0.1, 0.9 and 0.1 cannot be told from 0.8; by its mean, 0.37, the method is the last."""

    def runs(*ends: float) -> list[History]:
        made = [history([0.0, end]) for end in ends]
        return [History([{**row, "accuracy": row["fit"]} for row in one.rows]) for one in made]

    found = ranks_of(BUDGET, "accuracy", {"FedBiO": runs(0.1, 0.9, 0.1), "SimFBO": runs(0.8, 0.81, 0.79)})
    assert {name: at["rank"] for name, at in found["exchanges"].items()} == {"FedBiO": 1, "SimFBO": 1}
    assert [row[:2] for row in overview({"all": found})] == [["SimFBO", "1.0"], ["FedBiO", "2.0"]]


@pytest.mark.slow
def test_a_leaderboard_is_played(tmp_path: Path) -> None:
    """Steps are multiples of the presets'; a run ends when all budgets are spent."""
    preset = experiments.resolve(tables(BOARD, "all", "FedBiO")).tables()["algorithm"]["client_lr"]["x"]
    assert ladder(BOARD, "all", "FedBiO") == [{"client_lr.x": 0.5 * preset}, {"client_lr.x": 1e12 * preset}]
    found = play(BOARD, tmp_path, (0, 1), say=lambda line: None)
    rows = experiments.load_run(tmp_path / "runs/all/SimFBO/seed-0").history.rows
    spent = [(row["bytes_down"] + row["bytes_up"]) / 1e6 for row in rows]
    assert spent[-2] < 0.0045 <= spent[-1]
    assert 3 < rows[-1]["exchanges"] < 50
    assert found["chosen"]["all · SimFBO · seed 1"] == {"server_lr.x": 0.005}  # the other diverges
    place = found["ranks"]["all"]["exchanges"]["SimFBO"]
    assert place["values"][0] == pytest.approx(rows[3]["relative_error"], rel=1e-4)
    assert json.loads(json.dumps(found)) == found


@pytest.mark.slow
def test_steps_of_a_task_that_is_apart_are_chosen_by_trials_with_each_runs_seed(tmp_path: Path) -> None:
    """Such trials see what the seed gives a run to train on, and no more."""
    apart = {**BOARD, "panels": {"all": {**BOARD["panels"]["all"], "apart": True}}}
    play(apart, tmp_path, (0, 1), say=lambda line: None)
    assert {file.parent.name for file in tmp_path.rglob("trials/**/summary.json")} == {"seed-0", "seed-1"}


def test_what_the_board_says_of_its_methods_is_true() -> None:
    """It plays methods that there are, and none that it says it leaves out; and no trial sees a test patient."""
    board = toml.loads((HERE / "board.toml").read_text("utf-8"))
    played = {method["algorithm"]["name"] for method in board["methods"].values()}
    why = next(part for part in (HERE / "README.md").read_text("utf-8").split("\n- ") if "BiO-FISTA" in part)
    left_out = {"BiO-FISTA": "bi-fista", "FISM": "fism", "IR-G ": "irg", "IR-IG": "irig", "FedAvg-S": "fedavg-s"}
    assert played <= ALGORITHMS.keys() - left_out.values()
    assert all(name in why.replace("\n", " ") for name in left_out)
    for task, panel in board["panels"].items():
        for method in panel.get("methods", board["methods"]):
            assert experiments.resolve(tables(board, task, method)).task.fields.get("holdout", 0) == 0
            if panel["task"]["name"] == "hospitals":
                assert panel["apart"]
                assert tables(board, task, method, tuning=True)["task"]["holdout"] > 0
