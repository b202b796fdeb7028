"""All that differs between the arms of a claim besides the method is found and named."""

from __future__ import annotations

from typing import Any

import pytest
from papers.arms import besides, in_turn, whole
from papers.figure import PAPERS, load
from small_figure import CONTENT, UNTUNED, made_up


def arms(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    methods = {
        "FedNest": {"algorithm": {"name": "fednest", **first.pop("algorithm", {})}, **first},
        "SimFBO": {"algorithm": {"name": "simfbo", **second.pop("algorithm", {})}, **second},
    }
    claims = [{"says": "-", "better": "SimFBO", "than": ["FedNest"]}]
    return besides(made_up(**{**UNTUNED, "methods": methods, "claims": claims}), None)


def test_methods_differ_by_what_they_are_given() -> None:
    """Arms differ by the settings that their methods get, such as batch sizes, local steps and clients.

    Step sizes do not count, because each method needs its own, and neither do fields that one of the methods lacks.
    """
    assert arms({}, {}) == []
    assert arms({"algorithm": {"outer_lr": 0.5}}, {"algorithm": {"server_lr": 0.1}}) == []
    assert arms({"algorithm": {"batch_size": 7}}, {"algorithm": {"batch_size": 9}}) == ["batch 9, 7 (FedNest)"]
    assert arms({"algorithm": {"inner": {"local_steps": 3}}}, {"algorithm": {"local_steps": 4}}) == [
        "local steps 4, 3 (FedNest)"
    ]
    assert arms({"task": {"clients": 3}}, {"task": {"clients": 5}}) == ["clients 5, 3 (FedNest)"]


def test_values_that_are_tried_are_compared_where_both_have_the_field() -> None:
    """Different values that are tried for a field count as a difference if both methods have the field."""
    grids = ({"outer_lr": [0.1, 0.2]}, {"outer_lr": [0.1, 0.3]})
    methods = {
        name: {"algorithm": {"name": name}, "grid": grid}
        for name, grid in zip(("fednest", "lfednest"), grids, strict=True)
    }
    claims = [{"says": "-", "better": "fednest", "than": ["lfednest"]}]
    figure = made_up(**{**CONTENT, "methods": methods, "claims": claims})
    assert besides(figure, None) == ["tried values of outer_lr"]


def test_what_arms_spent_is_read_off_the_outcome() -> None:
    found = {
        "panels": {
            "all": {
                "SimFBO": {"costs": {"exchanges": 4, "evaluations": 30}},
                "FedBiO": {"costs": {"exchanges": 12, "evaluations": 31}},
            }
        }
    }
    assert besides(made_up(), found) == ["up to 3 times as many exchanges"]  # 30 and 31 evaluations count as equal


def test_numbers_that_are_dealt_out_in_turn_are_said_once() -> None:
    """A list of numbers that clients get in turn is shortened to the part that repeats."""
    assert [in_turn([1, 0.5, 1]), in_turn([1, 1]), in_turn([1, 1, 2]), in_turn(0.5)] == [[1, 0.5], [1], [1, 1, 2], 0.5]


@pytest.mark.parametrize("name", ["rabo-4", "rabo-6"])
def test_what_pruning_saves_is_seen_on_one_method(name: str) -> None:
    """The claims about what pruning saves compare a method with itself.

    At both scales, the arms differ in the capacities of clients and in nothing else.
    """
    figure = load(PAPERS / "rabo" / f"{name}.toml")
    pruning = [claim for claim in figure.claims if claim.than == [f"{claim.better}, whole"]]
    assert len(pruning) == 4
    for claim in pruning:
        for scale in ("quick", "full"):
            pruned, other = (whole(figure, "a round", method, scale) for method in (claim.better, *claim.than))
            assert pruned.pop("clients.capacity") != other.pop("clients.capacity")
            assert pruned == other


def test_methods_on_submodels_are_given_the_same() -> None:
    """Methods on submodels make as many local steps on the same samples, with equally large parts of the model.

    They differ in the policy that chooses the parts, and in the objective, both of which belong to the method.
    """
    figure = load(PAPERS / "rabo" / "rabo-2.toml")
    differing = {line.split(" ")[0] for line in besides(figure, None)}
    assert differing == {"objective", "policy"}
