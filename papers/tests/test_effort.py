"""The seeds and hours that would decide an open statement are those that are computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
from papers.claims import SOME_RUNS, UNREACHED, Finding, statements
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
    """A difference is decided as soon as there are so many seeds that its interval does not contain 0.

    With three seeds and s = 1, half the width is t(2)/√3 = 4.302653/√3 = 2.484138. With n seeds it is t(n − 1)/√n,
    which is 2.570582/√6 = 1.0494 for six seeds and 2.446912/√7 = 0.9248 for seven. So a difference of 1 needs seven.
    """
    assert needed(cell(difference=1.0, half_width=2.484138), 3) == 7
    assert needed(cell(difference=-1.0, half_width=2.484138), 3) == 7


def test_methods_that_are_alike_are_level_in_the_end() -> None:
    """Methods that differ by 0 are level as soon as half the width of the interval is below δ, one percentage point.

    With s = 0.01 this needs seven seeds: the numbers are a hundredth of those of the test before. A claim of level
    whose difference is at its bound is never decided.
    """
    assert needed(cell(difference=0.0, half_width=0.02484138), 3) == 7
    assert needed(cell(difference=0.02, half_width=0.02484138), 3, level=0.02) is None  # at the bound itself


def test_seeds_do_not_mend_a_run_that_fails() -> None:
    assert needed(cell(note="B failed with 1 of 3 seeds"), 3) is None
    assert needed(cell(difference=0.02, half_width=0.03, note="A does not reach the value in every run"), 3) is None


def test_a_slope_shrinks_as_the_root_of_the_seeds() -> None:
    """The interval of a slope shrinks as the square root of the number of seeds.

    With eight seeds it is 0.04 ± 0.08. With n seeds it is within ±0.1 if 0.08 √(8/n) ≤ 0.06, that is if
    n ≥ 8 · 16/9 = 14.2.
    """
    slope = Finding(**{**OPEN, "panel": "", "difference": 0.04, "half_width": 0.08})
    assert needed(slope, 8, than=[], panels=[], slope=0.5, within=0.1) == 15


def ran(seconds: float, runs: int = 3) -> dict[str, Any]:
    """Return what an outcome has of a method whose runs ended, with these seconds for the rounds of each run."""
    return {"values": [0.0] * runs, "costs": {"seconds": seconds}}


def test_runs_that_two_cells_need_are_counted_once() -> None:
    """A further run that two cells need is counted once.

    The cell of A and B needs 7 seeds, and that of A and C needs 15, as 2.144787/√15 = 0.5538 < 0.56 < 2.160369/√14 =
    0.5774. There are three seeds. So A and C need 12 further runs each, and B needs 4. The rounds of a run take 600 s
    for A and B, and 1,200 s for C: 120 min for all nine runs. The whole figure took 210 min, so the other 90 min are
    600 s for each run. The further runs take 16 · 1,200 s + 12 · 1,800 s = 11.3 h.
    """
    of = {method: ran(seconds) for method, seconds in zip("ABC", (600.0, 600.0, 1200.0), strict=True)}
    cells = [cell(difference=1.0, half_width=2.484138), cell("C", difference=0.56, half_width=2.484138)]
    (statement,) = statements(cells)
    found = {"seeds": [0, 1, 2], "panels": {"iid": of}, "minutes": 210.0}
    assert what_decides(figure(), found, statement) == "15 seeds in all (about 11.3 more hours of runs)"
    (failed,) = statements([cells[0], cell("C", note="C failed with 1 of 3 seeds")])
    assert (
        what_decides(figure(), found, failed)
        == "7 seeds in all (about 2.7 more hours of runs); no estimate for 1 of the 2 open comparisons, because C "
        "failed with 1 of 3 seeds"
    )
    (late,) = statements([cell("C", note=f"{SOME_RUNS}C{UNREACHED}")])
    assert what_decides(figure(), found, late) == (
        "no estimate, because some runs of C never reach the value of the claim"
    )
    (unplayed,) = statements([cell(panel="shards")])
    assert what_decides(figure(), found, unplayed) == "runs in the setting “shards”, whose time is not counted here"
    (left_out,) = statements([cell("D", note="D is not run in iid at this scale")])
    assert what_decides(figure(), found, left_out) == "runs in the setting “iid”, whose time is not counted here"


def test_both_panels_of_a_comparison_are_looked_at() -> None:
    """If a claim compares a panel with another one, the other method's runs are those of the other panel.

    A and B need four further runs each. The rounds take 600 s in a run of A, and 1,200 s in a run of B. Together these
    are, with three runs of each, all of the 90 min. So the further runs take 4 · 1,800 s = 2 h.
    """
    made = figure(than=["B"], than_in="shards")
    (statement,) = statements([cell(difference=1.0, half_width=2.484138)])
    found = {"seeds": [0, 1, 2], "minutes": 90.0}
    both = {"iid": {"A": ran(600.0)}, "shards": {"B": ran(1200.0)}}
    assert what_decides(made, {**found, "panels": both}, statement) == "7 seeds in all (about 2.0 more hours of runs)"
    (unplayed,) = statements([cell(note="shards is not run at this scale")])
    alone = {"iid": {"A": ran(600.0), "B": ran(600.0)}}
    assert (
        what_decides(made, {**found, "panels": alone}, unplayed)
        == "runs in the setting “shards”, whose time is not counted here"
    )


def test_a_panel_with_more_seeds_needs_fewer_further_runs() -> None:
    """The seeds that a panel has already are those of the panel, not those of the rest of the figure.

    With six seeds and s = 1, half the width is 1.0494 (see above), and a difference of 1 needs seven. So A and B need
    one further run each. The rounds of a run take 900 s, and the twelve runs took 180 min in all, so two runs take
    half an hour.
    """
    of = {method: ran(900.0, 6) for method in "AB"}
    (statement,) = statements([cell(difference=1.0, half_width=1.0494)])
    found = {"seeds": [0, 1, 2], "seeds_of": {"iid": list(range(6))}, "panels": {"iid": of}, "minutes": 180.0}
    assert what_decides(figure(), found, statement) == "7 seeds in all (about 0.5 more hours of runs)"


def test_a_method_whose_runs_all_failed_has_no_hours() -> None:
    """The rounds of a method whose runs all failed add no hours, because their time is not known.

    A, B and C need four further runs each. The rounds of a run of A and B take 600 s, and those of their six runs took
    all of the figure's 60 min. So the eight further runs of A and B take 8 · 600 s = 1.3 h.
    """
    of = {method: ran(600.0) for method in "AB"}
    cells = [cell(difference=1.0, half_width=2.484138), cell("C", difference=1.0, half_width=2.484138)]
    (statement,) = statements(cells)
    found = {"seeds": [0, 1, 2], "panels": {"iid": {**of, "C": {"values": [], "costs": {}}}}, "minutes": 60.0}
    assert what_decides(figure(), found, statement) == "7 seeds in all (about 1.3 more hours of runs)"


def test_a_statement_that_is_decided_needs_nothing() -> None:
    (statement,) = statements([cell(difference=1.0, half_width=0.1, state="holds")])
    assert what_decides(figure(), {"seeds": [0, 1], "panels": {"iid": {}}}, statement) == ""


@pytest.mark.parametrize("difference", [0.0, 1e-9])
def test_what_scatters_far_more_than_the_margin_is_hopeless(difference: float) -> None:
    """If the interval is far wider than the margin of level, no number of seeds up to the limit decides a cell."""
    assert needed(cell(difference=difference, half_width=5.0), 3) is None
