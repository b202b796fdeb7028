"""A site's curve has steps with enough rows; Kaplan-Meier curves of several sites are compared with pooled rows."""

import numpy as np
import pytest

from fedbilevel.estimators.survival_curves import check_steps, kaplan_meier, steps
from refusals import refuses

RNG = np.random.default_rng(5)
GRID = [*range(1, 13)]
SITES = {name: (RNG.integers(1, 16, rows), RNG.integers(0, 2, rows)) for name, rows in (("a", 30), ("b", 45))}


def product_limit(time, event):
    """Return the Kaplan-Meier estimate and Greenwood's sum at each distinct time, by their definitions."""
    share, total, found = 1.0, 0.0, {}
    for t in np.unique(time):
        at_risk, events = np.sum(time >= t), np.sum(event[time == t])
        share *= 1 - events / at_risk
        total += events / (at_risk * (at_risk - events)) if at_risk > events else 0
        found[t] = share, total
    return found


def told(least, grid=GRID):
    return {name: steps(time, event, np.zeros(len(time)), grid, least) for name, (time, event) in SITES.items()}


def test_with_a_grid_of_all_times_the_curve_is_that_of_the_pooled_rows():
    time, event = (np.concatenate(each) for each in zip(*SITES.values(), strict=True))
    expected = product_limit(time, event)
    rows = kaplan_meier(told(1))
    assert [row["time"] for row in rows] == GRID
    for row in rows:
        share, total = expected[row["time"]]
        assert row["survival"] == pytest.approx(share, abs=1e-12)
        assert row["at risk"] == np.sum(time >= row["time"])
        width = 1.959964 * np.sqrt(total) / abs(np.log(share))
        assert [row["low"], row["high"]] == pytest.approx([share ** np.exp(width), share ** np.exp(-width)], abs=1e-6)


@pytest.mark.parametrize("least", [4, 8])
def test_each_step_has_the_rows_that_min_count_demands(least):
    """At least `min_count` rows leave in each step, and the curve is that of rows that leave at their step's end."""
    moved = []
    for name, found in told(least).items():
        time, event = SITES[name]
        ends = np.array(found)[:, 0]
        at_risk = np.array([np.sum(time > before) for before in (0, *ends)])
        assert np.array(found)[:, 1].tolist() == at_risk[:-1].tolist()
        assert np.min(-np.diff(at_risk)) >= least
        # if the last step ends before the grid does, rows that leave later count as censored at its end
        after, whole = time > ends[-1], ends[-1] == GRID[-1]
        later = np.where(after & whole, 99, ends[np.minimum(np.searchsorted(ends, time), len(ends) - 1)])
        moved.append((later, np.where(after, 0, event)))
    time, event = (np.concatenate(each) for each in zip(*moved, strict=True))
    expected = product_limit(time, event)
    rows = kaplan_meier(told(least))
    assert len(rows) > 1
    for row in rows:
        assert row["survival"] == pytest.approx(expected[row["time"]][0], abs=1e-12)


def test_steps_end_with_the_grid_where_that_hides_who_leaves_last():
    """The last step ends with the grid if it would otherwise be known that fewer than `min_count` rows leave after it.

    The grid is 1, 2 and 3, and `min_count` is 8. Eight rows leave at time 1. If three rows leave at time 2, they are in
    one step with the eight rows. If no further row leaves, there is a second step, in which no row leaves, unless fewer
    than 8 rows stay.
    """
    event, risk = np.ones(20), np.zeros(20)

    def found(*later):
        time = np.repeat([1, *[t for t, _ in later]], [8, *[n for _, n in later]])
        return [step[:3] for step in steps(time, event[: len(time)], risk[: len(time)], [1, 2, 3], 8)]

    assert found((2, 3), (9, 9)) == [[3, 20, 11]]
    assert found((9, 12)) == [[1, 20, 8], [3, 12, 0]]
    assert found((9, 5)) == [[1, 13, 8]]


def test_fewer_rows_than_min_count_have_no_curve():
    time, event = SITES["a"]
    few = int(np.sum(time <= 2))
    assert steps(time, event, np.zeros(30), [1, 2], few + 1) is None
    assert steps(time, event, np.zeros(30), [1, 2], few) is not None


@pytest.mark.parametrize(
    "wrong", [[], [[1, 5, 2]], [[1.5, 5, 2, 0.1]], [[1, 5, 6, 0.1]], [[1, 5, 2, 0.3], [2, 4, 0, 0.2]], "x"]
)
def test_steps_of_another_form_are_refused(wrong):
    with refuses("survival curve of the site south", wrong):
        check_steps("south", wrong, GRID)
