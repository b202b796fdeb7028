"""Ranks at equal budgets are those that are computed by hand, and the board is what its page says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from papers.leaderboard.__main__ import HERE, overview, play, ranked, ranks_of, read_at, tables
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
        }
    },
    "methods": {"FedBiO": {"algorithm": {"name": "fedbio"}}, "SimFBO": {"algorithm": {"name": "simfbo"}}},
}
BUDGET: dict[str, Any] = {"budgets": {"exchanges": 3}}


def history(values: list[float], per_round: int = 1) -> History:
    costs = {"bytes_down": 0, "bytes_up": 0, "gradients": 0, "hvps": 0, "seconds": 0.0, "time": 0.0}
    rows = [{"round": i, "exchanges": per_round * i, **costs, "fit": value} for i, value in enumerate(values)]
    return History(rows)


def test_the_metric_is_read_in_the_last_row_that_costs_no_more() -> None:
    """A metric at a budget is read in the last row within it; here rows are at 0, 7 and 14 exchanges."""
    run = history([0.1, 0.2, 0.3], per_round=7)
    assert [read_at(run, "fit", "exchanges", amount) for amount in (6, 7, 13, 14, 99)] == [0.1, 0.2, 0.2, 0.3, 0.3]


def test_what_cannot_be_told_apart_shares_a_rank() -> None:
    """Methods whose difference is not certain share a rank.

    B is 0.01 below A with every seed, which is certain. C differs from A by −0.02 ± 0.14 and from B by −0.01 ± 0.14. D
    is far below all three.
    """
    values = {"A": [0.5, 0.7, 0.9], "B": [0.49, 0.69, 0.89], "C": [0.55, 0.65, 0.85], "D": [0.1, 0.3, 0.5]}
    assert ranked(values, larger=True, log=False) == {"A": 1, "B": 2, "C": 1, "D": 4}
    assert ranked(values, larger=False, log=False) == {"A": 3, "B": 2, "C": 2, "D": 1}


def test_errors_are_ranked_by_powers_of_ten() -> None:
    """With `log`, errors are ranked by their powers of ten, unless an error is 0.

    A is a tenth of B with every seed. Without `log` the differences 0.9, 0.009 and 0.00009 decide nothing, as their
    interval is 0.3 ± 1.3.
    """
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
    """A method that scatters may be level with the best one, but by its mean it has the last place.

    0.1, 0.9 and 0.1 do not differ from 0.8 with certainty, and their mean is 0.37.
    """

    def runs(*ends: float) -> list[History]:
        made = [history([0.0, end]) for end in ends]
        return [History([{**row, "accuracy": row["fit"]} for row in one.rows]) for one in made]

    found = ranks_of(BUDGET, "accuracy", {"FedBiO": runs(0.1, 0.9, 0.1), "SimFBO": runs(0.8, 0.81, 0.79)})
    assert {name: at["rank"] for name, at in found["exchanges"].items()} == {"FedBiO": 1, "SimFBO": 1}
    assert [row[:2] for row in overview({"all": found})] == [["SimFBO", "1.0"], ["FedBiO", "2.0"]]


@pytest.mark.slow
def test_a_leaderboard_is_played(tmp_path: Path) -> None:
    """A run of the leaderboard ends as soon as all its budgets are spent, and its metric is read at each budget."""
    found = play(BOARD, tmp_path, (0, 1), say=lambda line: None)
    rows = experiments.load_run(tmp_path / "all/SimFBO/seed-0").history.rows
    spent = [(row["bytes_down"] + row["bytes_up"]) / 1e6 for row in rows]
    assert spent[-2] < 0.0045 <= spent[-1]
    assert 3 < rows[-1]["exchanges"] < 50
    place = found["ranks"]["all"]["exchanges"]["SimFBO"]
    assert place["values"][0] == pytest.approx(rows[3]["relative_error"], rel=1e-4)
    assert json.loads(json.dumps(found)) == found


BOARD_OF_ALL = toml.loads((HERE / "board.toml").read_text("utf-8"))


def given_steps(fields: dict[str, Any], inside: str = "") -> Iterator[str]:
    """Yield the paths of step sizes that are numbers or schedules, also if only that of x, y or v is one."""
    for name, value in fields.items():
        named = name in ("lr", "step") or name.endswith("_lr")
        if isinstance(value, dict) and not named:
            yield from given_steps(value, f"{inside}{name}.")
        elif named and any(one is not None for one in (value.values() if isinstance(value, dict) else [value])):
            yield inside + name


@pytest.mark.parametrize("method", BOARD_OF_ALL["methods"])
def test_no_step_of_a_method_on_the_board_is_chosen(method: str) -> None:
    """No method on the board has a chosen step size.

    A number in `inner.server_lr` is allowed, because it is no step size: it is the factor 1 of the mean change of y.
    """
    for task in BOARD_OF_ALL["panels"]:
        fields = experiments.resolve(tables(BOARD_OF_ALL, task, method)).tables()["algorithm"]
        assert set(given_steps(fields)) <= {"inner.server_lr"}, task


def test_what_the_board_says_of_its_methods_is_true() -> None:
    """The board runs all methods of the library except those that its page names as left out."""
    played = {method["algorithm"]["name"] for method in BOARD_OF_ALL["methods"].values()}
    why = " ".join((HERE / "README.md").read_text("utf-8").partition("ADBO and SDBO")[2].partition("<!--")[0].split())
    left_out = {"FedEx": "fedex", "FedAvg ": "fedavg", "FedLin": "fedlin", "FedAvg-S": "fedavg-s"}
    left_out |= {"BiFISTA": "bi-fista", "FISM": "fism", "IRG": "irg", "IR-IG": "irig"}
    assert all(name in why for name in left_out)
    assert played == ALGORITHMS.keys() - {"adbo", "sdbo", *left_out.values()}
