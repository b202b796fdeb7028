"""Readings of runs, and the decisions on claims, are those that are computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from papers.claims import Finding, decision, findings, fitted_slope, interval, of_curve, statements, verdict
from papers.figure import Figure
from small_figure import UNTUNED, made_up

from fedbilevel.authoring import History
from refusals import refuses

COSTS = {"bytes_down": 0, "bytes_up": 0, "gradients": 0, "hvps": 0, "seconds": 0.0, "time": 0.0}


def history(values: Sequence[float], metric: str = "test_accuracy") -> History:
    """Return a history with these values at exchanges 0, 10, 20, …"""
    rows = [{"round": i, "exchanges": 10 * i, **COSTS, metric: value} for i, value in enumerate(values)]
    return History(rows)


def figure(claims: list[dict[str, Any]], **more: Any) -> Figure:
    methods = {"A": {}, "B": {}}
    bare = {"spec": {}, "panels": {"iid": {}}, "methods": methods, "claims": claims, "quick": {}, "full": {}}
    return made_up(**{**UNTUNED, **bare, "metric": "test_accuracy", **more})


def only(claim: dict[str, Any], a: Sequence[History | None], b: Sequence[History | None]) -> Finding:
    made = figure([{"says": "-", "better": "A", "than": ["B"], **claim}])
    (found,) = findings(made, {"iid": {"A": a, "B": b}})
    return found


def test_an_interval_is_students() -> None:
    # for n = 3, t(0.975, 2) = 4.302653; with s = 1, half the width is 4.302653/√3 = 2.484138
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 2.484138), abs=1e-6)
    assert interval([5.0]) == (5.0, math.inf)


def test_a_difference_is_paired_by_seed() -> None:
    """The difference of two methods is paired by seed.

    Here seeds differ by far more than methods do. Without pairing nothing would be decided, and with it the difference
    is 0.02 for every seed.
    """
    found = only(
        {},
        [history([0.1, value]) for value in (0.5, 0.7, 0.9)],
        [history([0.1, value]) for value in (0.48, 0.68, 0.88)],
    )
    assert found.state == "holds"
    assert found.difference == pytest.approx(0.02)
    assert found.half_width == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("gaps", "state"),
    [
        ((0.1, 0.11, 0.12), "holds"),
        ((-0.1, -0.11, -0.12), "contradicted"),
        ((0.1, -0.1, 0.02), "open"),
        ((0.1,), "open"),
    ],
)
def test_the_interval_decides(gaps: tuple[float, ...], state: str) -> None:
    """A claim holds if the interval is above 0, and is contradicted if it is below 0; otherwise it is open.

    One seed gives no interval, so that the claim is open.
    """
    found = only({}, [history([0.5 + gap]) for gap in gaps], [history([0.5]) for _ in gaps])
    assert found.state == state


def test_an_error_is_better_the_smaller() -> None:
    made = figure([{"says": "-", "better": "A", "than": ["B"]}], metric="relative_error")
    runs = {"A": [history([0.1], "relative_error")] * 2, "B": [history([0.3], "relative_error")] * 2}
    (found,) = findings(made, {"iid": runs})
    assert (found.state, found.difference) == ("holds", pytest.approx(0.2))


@pytest.mark.parametrize(
    ("gaps", "state"),
    [
        ((0.001, -0.001, 0.0005), "level"),  # t(0.975, 2)·s/√3 = 0.0026: the interval lies within one point
        ((0.004, -0.004, 0.002), "open"),  # an interval four times as wide
        ((0.004, 0.005, 0.006), "holds"),  # the interval lies within one point, and above 0
    ],
)
def test_two_methods_are_level_where_the_interval_lies_within_a_point(gaps: tuple[float, ...], state: str) -> None:
    found = only({}, [history([0.5 + gap]) for gap in gaps], [history([0.5]) for _ in gaps])
    assert found.state == state


def test_losses_and_costs_are_level_within_a_twentieth_of_the_others() -> None:
    """Losses and costs are level if the interval of their difference is within a twentieth of the other method's value.

    The interval is −0.001 ± 0.0025, as s = 0.001 and t(0.975, 2)·s/√3 = 0.0025. It is within 0.05 times 0.5, and not
    within 0.05 times 0.05.
    """
    gaps, made = (0.001, 0.0, 0.002), figure([{"says": "-", "better": "A", "than": ["B"]}], metric="test_loss")
    for level, state in ((0.5, "level"), (0.05, "open")):
        runs = {"A": [history([level + gap], "test_loss") for gap in gaps], "B": [history([level], "test_loss")] * 3}
        assert findings(made, {"iid": runs})[0].state == state


def test_a_method_that_is_better_than_level_says_so() -> None:
    better, worse = [history([0.60]), history([0.61])], [history([0.50]), history([0.51])]
    assert "A is better than B by more than the margin" in only({"level": 0.02}, better, worse).note
    assert only({"level": 0.02}, worse, better).note == ""


@pytest.mark.parametrize(
    ("states", "decided"),
    [
        (["holds", "holds"], "for"),
        (["contradicted"], "against"),
        (["level", "level"], "level"),
        (["holds", "level"], "mixed"),
        (["holds", "contradicted", "open"], "mixed"),
        (["contradicted", "open"], "mixed"),
        (["holds", "open"], "open"),
        (["open"], "open"),
    ],
)
def test_cells_decide_a_statement(states: list[Any], decided: str) -> None:
    """A statement is decided for, against or level if all its cells agree, and is otherwise mixed or open."""
    cells = [Finding(says="-", panel=str(k), better="A", state=state) for k, state in enumerate(states)]
    assert decision(cells) == decided
    (found,) = statements(cells)
    assert (found.decision, found.cells.total()) == (decided, len(states))


def test_level_is_an_interval_within_bounds() -> None:
    """A claim that methods are level holds if the interval is within its bounds, and fails if it is outside."""
    near, far = [history([0.50]), history([0.51])], [history([0.60]), history([0.61])]
    same = [history([0.50]), history([0.51])]
    assert only({"level": 0.02}, near, same).state == "holds"
    assert only({"level": 0.02}, far, same).state == "contradicted"


def test_the_first_row_that_gets_there() -> None:
    """The reading "first" is the cost of the first row that reaches the value: here exchanges 10 and 20."""
    fast, slow = [history([0.1, 0.8, 0.9])] * 2, [history([0.1, 0.2, 0.85])] * 2
    found = only({"by": "first", "reach": 0.8}, fast, slow)
    assert (found.better_mean, found.than_mean, found.difference, found.state) == (10, 20, 10, "holds")


def test_a_claim_may_have_a_cost_of_its_own() -> None:
    """A claim may have another cost than its figure.

    The better method gets there in its second row: at exchange 10 in the figure's cost, at round 1 in the claim's.
    """
    fast, slow = [history([0.1, 0.8, 0.9])] * 2, [history([0.1, 0.2, 0.85])] * 2
    found = only({"by": "first", "reach": 0.8, "against": "rounds"}, fast, slow)
    assert (found.better_mean, found.than_mean, found.unit) == (1, 2, "rounds")
    with refuses("cost of a claim", "round", near="rounds", where="made-up.toml"):
        only({"by": "first", "reach": 0.8, "against": "round"}, fast, slow)


def test_one_that_never_gets_there_counts_with_its_end() -> None:
    """A method that never reaches the value counts with the cost at its end; if none reaches it, the claim is open."""
    fast, never = [history([0.1, 0.8, 0.9])] * 2, [history([0.1, 0.2, 0.3])] * 2
    found = only({"by": "first", "reach": 0.8}, fast, never)
    assert (found.difference, found.state) == (10, "holds")
    assert "Some runs of B do not reach the value of the claim" in found.note
    turned = only({"by": "first", "reach": 0.8}, never, fast)
    assert turned.state == "contradicted"
    assert only({"by": "first", "reach": 0.8}, never, never).state == "open"


def test_a_method_that_never_gets_there_is_not_level() -> None:
    """If the runs of one method never reach the value, the two methods are not level.

    Here one method reaches the value only in the last row. The other does not reach it, and ends at the same cost. Its
    true cost is larger by an unknown number, so that the comparison is open. If both reach it in the last row, they are
    level.
    """
    late, never = [history([0.1, 0.2, 0.85])] * 2, [history([0.1, 0.2, 0.3])] * 2
    for claim in ({"by": "first", "reach": 0.8}, {"by": "first", "reach": 0.8, "level": 5.0}):
        assert only(claim, late, never).state == "open"
        assert only(claim, never, late).state == "open"
    assert only({"by": "first", "reach": 0.8}, late, late).state == "level"
    assert only({"by": "first", "reach": 0.8, "level": 5.0}, late, late).state == "holds"


def test_a_run_that_ends_early_without_the_value_does_not_contradict_that_methods_are_level() -> None:
    """A's runs end after 10 exchanges without the value, and B's reach it after 50. A's true costs may be 50, too.

    If B's runs reach it after no exchange, A's true costs are larger by more than 5.
    """
    claim = {"by": "first", "reach": 0.8, "level": 5.0}
    ended, late, soon = [history([0.1, 0.2])] * 2, [history([0.1] * 5 + [0.85])] * 2, [history([0.85, 0.9])] * 2
    assert only(claim, ended, late).state == "open"
    assert only(claim, ended, soon).state == "contradicted"


def test_notes_name_the_setting_of_the_other_runs() -> None:
    """If a method is compared with itself in another panel, notes say in which panel runs failed or were late."""
    claim = {"says": "-", "better": "A", "than": ["A"], "than_in": "iid", "by": "first", "reach": 0.8}
    made = figure([claim], panels={"iid": {}, "shards": {}})
    soon, late = [history([0.1, 0.9, 0.9])] * 3, [history([0.1, 0.1, 0.1])] * 3
    (found,) = findings(made, {"iid": {"A": late}, "shards": {"A": soon}})
    assert (found.state, found.panel) == ("holds", "shards")
    assert found.note.startswith("Some runs of A (iid) do not reach")
    (found,) = findings(made, {"iid": {"A": [*soon[:2], None]}, "shards": {"A": soon}})
    assert found.note.startswith("A (iid) failed with 1 of 3 seeds")


@pytest.mark.parametrize(("seeds", "probability"), [((3, 9), 0.09), ((8, 16), 0.09), ((12, 30, 90), 0.12)])
def test_further_looks_decide_more_often_by_chance(seeds: tuple[int, ...], probability: float) -> None:
    """If more seeds are run because a comparison was open, chance decides it more often than in 5 % of all cases.

    The differences are normal with mean 0. The comparison is decided if the interval after some number of `seeds` does
    not contain 0. With 4,000 draws, the standard error of the probability is 0.005.
    """
    drawn = np.random.default_rng(0).normal(size=(4000, seeds[-1]))
    looks = [[interval(row[:count]) for count in seeds] for row in drawn]
    decided = [any(abs(mean) > half for mean, half in look) for look in looks]
    assert np.mean(decided) == pytest.approx(probability, abs=0.02)


def test_the_mean_over_the_cost_is_trapezoidal() -> None:
    # the mean is (0 + 1)/2 over the first tenth of the cost and 1 over the rest: 0.05 + 0.9 = 0.95
    assert of_curve("mean", [0, 10, 100], [0.0, 1.0, 1.0]) == pytest.approx(0.95)


def test_the_late_half_is_a_mean_over_rows() -> None:
    """The reading "late" is the mean over the second half of the rows: here of 0.2 and 0.4, and of 0.1 and 0.1."""
    found = only({"by": "late"}, [history([9.0, 9.0, 0.2, 0.4])] * 2, [history([9.0, 0.1, 0.1])] * 2)
    assert (found.better_mean, found.than_mean) == (pytest.approx(0.3), pytest.approx(0.1))


def test_costs_are_compared_by_their_ratio() -> None:
    """With `ratio`, a claim about costs is that one method needs at most this share of the other's cost.

    A ends at 20 exchanges and B at 100, so that A needs 0.3·100 − 20 = 10 less than the claim allows.
    """
    made = figure([{"says": "-", "better": "A", "than": ["B"], "metric": "exchanges", "ratio": 0.3}])
    runs = {"A": [history([0.1] * 3)] * 2, "B": [history([0.1] * 11)] * 2}
    (found,) = findings(made, {"iid": runs})
    assert (found.difference, found.state) == (pytest.approx(0.3 * 100 - 20), "holds")


def test_errors_may_be_compared_by_powers_of_ten() -> None:
    """With `log`, errors are compared by powers of ten, so that seeds with large errors do not count more.

    1e-6 against 1e-4 is a difference of two powers, 1e-9 against 10^−7.1 of 1.9, and 1e-8 against 1e-6 of two.
    """
    made = figure([{"says": "-", "better": "A", "than": ["B"], "log": True}], metric="relative_error")
    ends = {"A": (1e-6, 1e-9, 1e-8), "B": (1e-4, 10**-7.1, 1e-6)}
    runs = {name: [history([value], "relative_error") for value in values] for name, values in ends.items()}
    (found,) = findings(made, {"iid": runs})
    assert (found.state, found.difference) == ("holds", pytest.approx((2 + 1.9 + 2) / 3))


@pytest.mark.parametrize(
    ("claim", "unit"),
    [
        ({}, "percentage points"),
        ({"metric": "outer_loss"}, "outer loss"),
        ({"metric": "outer_loss", "log": True}, "powers of ten"),
        ({"metric": "megabytes"}, "MB"),
        ({"by": "first", "reach": 0.8}, "exchanges"),
        ({"metric": "time"}, "virtual seconds"),
        ({"by": "mean"}, "percentage points"),
    ],
)
def test_a_difference_has_a_unit(claim: dict[str, Any], unit: str) -> None:
    assert only(claim, [None], [None]).unit == unit


def test_failed_runs() -> None:
    """A method that fails with every seed is worse than one that fails with none.

    A single failed run counts with the worst value of the runs of both methods. So its method may lose, here by 0.4
    with either seed, but it cannot win or be level. If runs of both methods fail, the claim is open.
    """
    good, bad = [history([0.5])] * 2, [None, None]
    assert only({}, good, bad).state == "holds"
    assert only({}, bad, good).state == "contradicted"
    partly = [None, history([0.1])]
    found = only({}, good, partly)
    assert (found.state, found.difference, found.than_mean) == ("holds", pytest.approx(0.4), pytest.approx(0.1))
    assert found.note.startswith("B failed with 1 of 2 seeds; a failed run counts with the worst value")
    turned = only({}, partly, good)
    assert (turned.state, turned.difference) == ("contradicted", pytest.approx(-0.4))
    ahead = [None, history([0.5])]  # the failed run counts as the other method's 0.1, and the other one is better
    assert only({}, ahead, [history([0.1])] * 2).state == "open"
    assert only({}, [None, history([0.9])], [history([0.1])] * 2).state == "open"
    assert only({}, [None, *[history([0.5])] * 2], [history([0.5])] * 3).state == "open"  # all differences are 0
    assert only({}, partly, [history([0.5]), None]).state == "open"
    assert only({}, bad, partly).state == "open"
    assert only({"level": 0.5}, good, partly).state == "open"  # within the margin, but a method that fails is not level
    assert only({"level": 0.2}, good, partly).state == "contradicted"
    assert only({"level": 0.2}, partly, good).state == "contradicted"
    most, low = [None, *[history([0.9])] * 9], [history([0.1])] * 10  # 0.8 apart, and in one of ten seeds 0
    assert only({"level": 0.2}, most, low).state == "open"
    assert only({"level": 0.2}, [history([0.1])] * 10, most).state == "open"
    assert only({"level": 0.2}, [*low[1:], None], most).state == "open"


def test_a_failed_run_is_as_late_as_the_latest() -> None:
    """If a claim is about the first to reach a value, a failed run counts with the largest cost of all runs.

    Both runs of A reach 0.8 at exchange 10. One run of B reaches it at exchange 20, and the other fails and so counts
    with 20, too. So B loses by 10 with either seed.
    """
    claim = {"by": "first", "reach": 0.8}
    fast, partly = [history([0.1, 0.8, 0.9])] * 2, [history([0.1, 0.2, 0.85]), None]
    found = only(claim, fast, partly)
    assert (found.state, found.difference, found.than_mean) == ("holds", 10, 20)
    assert only(claim, partly, fast).state == "contradicted"
    never, late = [history([0.1, 0.2, 0.3])] * 2, [history([0.1] * 10 + [0.9]), None]
    assert only(claim, never, late).state == "open"  # A ends at exchange 20, but never reaches the value
    assert only(claim, late, never).state == "open"


def test_what_never_gets_there_is_no_better_than_what_fails() -> None:
    claim = {"by": "first", "reach": 0.8}
    there, never = history([0.1, 0.9]), history([0.1, 0.7])
    assert only(claim, [there, there], [None, None]).state == "holds"
    assert only(claim, [there, never], [None, None]).state == "open"
    fast = history([0.1, 0.1, 0.9])  # reaches the value, but later than the other method's runs end
    assert only(claim, [never, never], [fast, None]).state == "open"
    assert only(claim, [fast, None], [never, never]).state == "open"


def test_an_error_of_0_has_no_logarithm() -> None:
    errors = [history([1.0, value], "relative_error") for value in (1e-9, 0.0)]
    found = only({"log": True, "metric": "relative_error"}, errors, [history([1.0, 0.1], "relative_error")] * 2)
    assert (found.state, found.difference) == ("open", None)
    assert "logarithm" in found.note


def test_a_slope_and_its_error() -> None:
    """A fitted slope is exact without noise, and with noise its standard error is that of repeated fits."""
    x = np.array([1.0, 10.0, 100.0, 1000.0])
    seeds = np.array([3.0, 700.0])  # each seed has an intercept of its own, which does not add to the error
    assert fitted_slope(x, np.outer(x**-0.5, seeds)) == pytest.approx((-0.5, 0.0), abs=1e-12)
    rng = np.random.default_rng(0)
    noisy = [fitted_slope(x, np.outer(x**-0.5, seeds) * np.exp(0.1 * rng.normal(size=(4, 2)))) for _ in range(2000)]
    slopes, errors = np.transpose(noisy)
    # The variance of the slope is σ²/Σ(u − ū)², u = log x. With spacing ln 10 and two seeds the sum is 2·5 (ln 10)².
    expected = 0.1 / math.sqrt(10) / math.log(10)
    assert np.std(slopes) == pytest.approx(expected, rel=0.1)
    assert np.sqrt(np.mean(errors**2)) == pytest.approx(expected, rel=0.1)


def test_a_claim_of_a_slope() -> None:
    """A claim about a slope holds if the interval of the fitted slope is within its bounds.

    It is contradicted if the interval is outside the bounds, and open if only a part of it is.
    """
    claims = [{"says": "-", "better": "A", "slope": -1.0, "within": 0.05}]
    panels = {str(value): {"value": value} for value in (1.0, 2.0, 4.0)}
    made = figure(claims, panels=panels, series="clients", metric="relative_error")

    def runs(power: float, noise: float = 0.0) -> Any:
        signs = {1.0: (1, -1), 2.0: (-1, 1), 4.0: (1, -1)}
        return {
            str(value): {"A": [history([value**power * (1 + sign * noise)], "relative_error") for sign in signs[value]]}
            for value in (1.0, 2.0, 4.0)
        }

    assert findings(made, runs(-1.0))[0].state == "holds"
    assert findings(made, runs(-0.5))[0].state == "contradicted"
    assert findings(made, runs(-1.0, 0.5))[0].state == "open"  # the error of the fit is large
    (near,) = findings(made, runs(-0.97, 0.02))  # the interval of the difference, 0.03 ± 0.035, exceeds 0.05
    assert near.difference == pytest.approx(0.03, abs=0.005)
    assert near.half_width == pytest.approx(0.035, abs=0.015)
    assert near.state == "open"


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["holds", "holds"], "reproduced"),
        (["holds", "open"], "partly reproduced"),
        (["holds", "contradicted"], "partly reproduced"),
        (["contradicted", "open"], "not reproduced"),
        (["open"], "undecided"),
    ],
)
def test_a_verdict(states: list[Any], expected: str) -> None:
    """The verdict on a figure is "reproduced" if all findings hold, and "partly reproduced" if some do.

    If none holds, it is "undecided" if all are open, and otherwise "not reproduced".
    """
    assert verdict(states) == expected
