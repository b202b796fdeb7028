"""Ranks at equal budgets, against values computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.engines.history import History
from fedbilevel.experiments.spec import configure
from fedbilevel.report.entries import entry_page
from fedbilevel.reproduce import outcome, picture, protocol
from fedbilevel.reproduce.entry import load, read
from fedbilevel.reproduce.ranking import overview, ranked, ranks, reading_at, told_apart

CONTENT: dict[str, Any] = {
    **dict.fromkeys(("paper", "part", "title", "shows", "setting"), "-"),
    "metric": "relative_error",
    "against": "exchanges",
    "spec": {"task": {"name": "quadratic", "clients": 3}, "run": {"rounds": 50, "eval_every": 1}},
    "panels": {"all": {"budgets": {"exchanges": 3, "megabytes": 0.0045}, "log": True, "select": "outer_loss"}},
    "methods": {
        "FedBiO": {"algorithm": {"name": "fedbio"}, "ladder": "client_lr.x"},
        "SimFBO": {"algorithm": {"name": "simfbo"}, "ladder": "server_lr.x"},
    },
    "tuning": {
        "select": "relative_error",
        "factors": [0.5, 1e12],
        "spec": {"run": {"rounds": "none", "exchanges": 2}},
    },
    "quick": {"minutes": 1},
    "full": {"minutes": 1},
}


def history(values: list[float], per_round: int = 1) -> History:
    costs = {"bytes_down": 0, "bytes_up": 0, "gradients": 0, "hvps": 0, "seconds": 0.0, "time": 0.0}
    rows = [{"round": i, "exchanges": per_round * i, **costs, "fit": value} for i, value in enumerate(values)]
    return History(rows)


def test_the_metric_is_read_in_the_last_row_that_costs_no_more() -> None:
    """Rows at 0, 7 and 14 exchanges."""
    run = history([0.1, 0.2, 0.3], per_round=7)
    assert [reading_at(run, "fit", "exchanges", amount) for amount in (6, 7, 13, 14, 99)] == [0.1, 0.2, 0.2, 0.3, 0.3]


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
    made = read("made-up", {**CONTENT, "metric": "fit"})
    good, bad = history([0.9, 0.5]), history([0.9, 0.7])
    found = ranks(made, {"all": {"FedBiO": [good, None], "SimFBO": [bad, bad]}})
    assert found["all"]["exchanges"]["FedBiO"] == {"rank": None, "place": None, "values": [], "mean": None, "sd": None}
    assert found["all"]["exchanges"]["SimFBO"]["rank"] == 1
    assert overview(found) == {
        "method": ["SimFBO", "FedBiO"],
        "mean place": ["1.0", "2.0"],
        "level with the best": ["2 of 2", "0 of 2"],
        "all": ["1 1", "– –"],
    }
    assert told_apart(found)[0] == ("all", "exchanges", ["SimFBO"], 1)


def test_a_method_that_scatters_is_level_with_the_best_and_not_well_placed() -> None:
    """0.1, 0.9 and 0.1 cannot be told from 0.8; by its mean, 0.37, the method is the last."""
    made = read("made-up", {**CONTENT, "metric": "test_accuracy"})

    def runs(*ends: float) -> list[History]:
        return [replaced(history([0.0, end]), "fit", "test_accuracy") for end in ends]

    found = ranks(made, {"all": {"FedBiO": runs(0.1, 0.9, 0.1), "SimFBO": runs(0.8, 0.81, 0.79)}})
    assert {name: at["rank"] for name, at in found["all"]["exchanges"].items()} == {"FedBiO": 1, "SimFBO": 1}
    assert overview(found)["method"] == ["SimFBO", "FedBiO"]
    assert overview(found)["mean place"] == ["1.0", "2.0"]


def replaced(run: History, before: str, now: str) -> History:
    return History([{now if name == before else name: value for name, value in row.items()} for row in run.rows])


def test_a_leaderboard_is_played(tmp_path: Path) -> None:
    """Steps are multiples of the presets'; a run ends when all budgets are spent."""
    made = read("made-up", CONTENT)
    preset = configure(made.tables("all", "FedBiO", "quick")).algorithm.fields["client_lr"]["x"]
    assert made.grid("all", "FedBiO", "quick") == {"client_lr.x": [0.5 * preset, 1e12 * preset]}
    played = protocol.play(made, "quick", tmp_path, seeds=(0, 1))
    rows = played.runs["all"]["SimFBO"][0].rows  # type: ignore[union-attr]
    spent = [(row["bytes_down"] + row["bytes_up"]) / 1e6 for row in rows]
    assert spent[-2] < 0.0045 <= spent[-1]
    assert 3 < rows[-1]["exchanges"] < 50
    found = outcome.outcome_of(played)
    assert found["verdict"] == "ranked"
    assert found["panels"]["all"]["SimFBO"]["chosen"] == {"server_lr.x": 0.005}  # the other diverges
    place = found["ranks"]["all"]["exchanges"]["SimFBO"]
    assert place["values"][0] == pytest.approx(rows[3]["relative_error"], rel=1e-4)
    outcome.keep(found, tmp_path)
    assert outcome.read(tmp_path / outcome.FILE) == found
    (axes,) = picture.draw(made, found).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["exchanges", "megabytes"]
    page = entry_page(made, found)
    assert "Ranks under equal budgets" in page
    assert "0.0045 MB" in page


def test_a_leaderboard_has_no_claims_and_budgets_of_every_panel() -> None:
    with pytest.raises(ConfigurationError, match="budgets"):
        read("made-up", {**CONTENT, "panels": {**CONTENT["panels"], "other": {}}})
    with pytest.raises(ConfigurationError, match="claims"):
        read("made-up", {**CONTENT, "claims": [{"says": "-", "better": "SimFBO", "than": ["FedBiO"]}]})


def test_what_the_leaderboard_says_of_its_methods_is_true() -> None:
    """It plays methods that there are, and none that it says it leaves out; a new method may be neither."""
    board = load("leaderboard")
    played = {method.spec["algorithm"]["name"] for method in board.methods.values()}
    (why,) = [said for said in board.differences if "BiO-FISTA" in said]
    left_out = {"BiO-FISTA": "bi-fista", "FISM": "fism", "IR-G ": "irg", "IR-IG": "irig", "FedAvg-S": "fedavg-s"}
    assert played <= ALGORITHMS.keys() - left_out.values()
    assert all(name in why for name in left_out)
    assert all(set(board.methods_of(panel)) >= {"SimFBO", "AFBO", "SDBO"} for panel in board.panels)
