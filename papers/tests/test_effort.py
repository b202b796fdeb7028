"""What would decide an open statement, against numbers computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
from papers.claims import Finding, statements
from papers.effort import seeds_that_decide, what_decides
from papers.figure import Figure
from small_figure import UNTUNED, made_up

CLAIM = {"says": "A is better", "better": "A", "than": ["B", "C"]}
OPEN = {"says": "A is better", "panel": "iid", "better": "A", "unit": "percentage points", "better_mean": 0.5}


def figure(**claim: Any) -> Figure:
    methods: dict[str, Any] = {"A": {}, "B": {}, "C": {}}
    panels: dict[str, Any] = {"iid": {"value": 1.0}, "shards": {"value": 2.0}}
    bare = {"spec": {}, "panels": panels, "methods": methods, "claims": [{**CLAIM, "panels": ["iid"], **claim}]}
    return made_up(**{**UNTUNED, **bare, "quick": {}, "full": {}, "metric": "test_accuracy", "series": "n"})


def cell(than: str = "B", **more: Any) -> Finding:
    return Finding(**{**OPEN, "than": than, "than_mean": 0.5, **more})


def needed(one: Finding, played: int, **claim: Any) -> int | None:
    made = figure(**claim)
    return seeds_that_decide(made, made.claims[0], one, played)


def test_a_difference_is_told_from_0_once_its_interval_is_shorter() -> None:
    """Three seeds with s = 1 have the half width t(2)/√3 = 4.302653/√3 = 2.484138. A difference of 1 lies outside of
    t(n − 1)/√n from n = 7 on: 2.570582/√6 = 1.0494, 2.446912/√7 = 0.9248."""
    assert needed(cell(difference=1.0, half_width=2.484138), 3) == 7
    assert needed(cell(difference=-1.0, half_width=2.484138), 3) == 7


def test_methods_that_are_alike_are_level_in_the_end() -> None:
    """δ is a percentage point. With a difference of 0 and s = 0.01 the half width is below δ from n = 7 on."""
    assert needed(cell(difference=0.0, half_width=0.02484138), 3) == 7
    assert needed(cell(difference=0.02, half_width=0.02484138), 3, level=0.02) is None  # at the bound itself


def test_seeds_do_not_mend_a_run_that_fails() -> None:
    assert needed(cell(note="B failed with 1 of 3 seeds"), 3) is None
    assert needed(cell(difference=0.02, half_width=0.03, note="A does not get there in every run"), 3) is None


def test_a_slope_shrinks_as_the_root_of_the_seeds() -> None:
    """0.04 ± 0.08 lies within ±0.1 once 0.08 √(8/n) ≤ 0.06: n ≥ 8 · 16/9 = 14.2."""
    slope = Finding(**{**OPEN, "panel": "", "difference": 0.04, "half_width": 0.08})
    assert needed(slope, 8, than=[], panels=[], slope=0.5, within=0.1) == 15


def test_runs_that_two_cells_need_are_counted_once() -> None:
    """7 seeds against B and 15 against C (2.144787/√15 = 0.5538 < 0.56 < 2.160369/√14 = 0.5774): 12 further runs of A
    and of C, 4 of B, at 600 s each are 28 · 600 s = 4.7 h."""
    of = {method: {"costs": {"seconds": 600.0}} for method in "ABC"}
    cells = [cell(difference=1.0, half_width=2.484138), cell("C", difference=0.56, half_width=2.484138)]
    (statement,) = statements(cells)
    found = {"seeds": [0, 1, 2], "panels": {"iid": of}}
    assert what_decides(figure(), found, statement) == "15 seeds, 4.7 hours"
    (failed,) = statements([cells[0], cell("C", note="C failed with 1 of 3 seeds")])
    assert (
        what_decides(figure(), found, failed)
        == "7 seeds, 1.3 hours; no number of seeds up to 1,000 for 1 of the open cells"
    )
    (unplayed,) = statements([cell(panel="shards")])
    assert what_decides(figure(), found, unplayed) == "runs of shards"


def test_a_method_whose_runs_all_failed_has_no_hours() -> None:
    """Of four further runs of each of A, B and C, those of C have no time: 8 · 600 s = 1.3 h."""
    of: dict[str, Any] = {method: {"costs": {"seconds": 600.0}} for method in "AB"}
    cells = [cell(difference=1.0, half_width=2.484138), cell("C", difference=1.0, half_width=2.484138)]
    (statement,) = statements(cells)
    found = {"seeds": [0, 1, 2], "panels": {"iid": {**of, "C": {"costs": {}}}}}
    assert what_decides(figure(), found, statement) == "7 seeds, 1.3 hours"


def test_a_statement_that_is_decided_needs_nothing() -> None:
    (statement,) = statements([cell(difference=1.0, half_width=0.1, state="holds")])
    assert what_decides(figure(), {"seeds": [0, 1], "panels": {"iid": {}}}, statement) == ""


@pytest.mark.parametrize("difference", [0.0, 1e-9])
def test_what_scatters_far_more_than_the_margin_is_hopeless(difference: float) -> None:
    assert needed(cell(difference=difference, half_width=5.0), 3) is None
