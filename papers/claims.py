"""Decide which claims hold, by confidence intervals of the differences between methods, paired by seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.stats import t

from fedbilevel.authoring import History
from fedbilevel.experiments import COSTS, in_percent
from papers.figure import Claim, Figure
from papers.numbers import POINTS, UNITS, value_in

CONFIDENCE = 0.95
SOME_RUNS = "Some runs of "
FAILED = " failed with "
FAILED_COUNTS = "; a failed run counts with the worst value of the runs of both methods"
UNREACHED = " do not reach the value of the claim; they count with the cost at which they ended"
State = Literal["holds", "contradicted", "level", "open"]
SHARE = 0.01  # accuracies and other shares are level if they differ by at most one percentage point
POWER = 0.1  # logarithms are level if they differ by at most a tenth of a power of ten
RELATIVE = 0.05  # costs and losses are level if they differ by at most this share of the other method's
Runs = Mapping[str, Mapping[str, Sequence[History | None]]]
"""By panel and method: the history of each seed, or None for a run that failed."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of a claim in one panel, against one other method.

    Attributes:
        says: the claim, in a sentence.
        panel: the panel; "" for a slope, which spans several panels.
        better, than: the two methods; for a slope `than` is "".
        better_mean, than_mean: the means of the readings of their runs; for a slope the fitted and the predicted slope.
        difference: the mean over the seeds of how much better `better` is; for a slope the fitted minus the predicted
            slope.
        half_width: half the width of the difference's confidence interval; None if there is no interval.
        state: what the interval decides.
        note: what else a reader has to know.
        unit: the unit of the difference, in words.
    """

    says: str
    panel: str
    better: str
    than: str = ""
    better_mean: float | None = None
    than_mean: float | None = None
    difference: float | None = None
    half_width: float | None = None
    state: State = "open"
    note: str = ""
    unit: str = ""


Decision = Literal["for", "against", "level", "mixed", "open"]


@dataclass(frozen=True, kw_only=True)
class Statement:
    """The decision on a claim. It follows from its cells: a cell is a comparison with another method in a panel.

    Attributes:
        says: the claim, in a sentence.
        decision: "for", "against" or "level" if every cell says so; "open" if a cell is open and none is against;
            otherwise "mixed".
        cells: the number of cells in each state.
        findings: the findings of the cells.
    """

    says: str
    decision: Decision
    cells: Counter[str]
    findings: Sequence[Finding]


def statements(found: Sequence[Finding]) -> list[Statement]:
    """Return the decision on each claim, from the findings of its cells."""
    by_claim: dict[str, list[Finding]] = {}
    for one in found:
        by_claim.setdefault(one.says, []).append(one)
    return [
        Statement(says=says, decision=decision(cells), cells=Counter([str(one.state) for one in cells]), findings=cells)
        for says, cells in by_claim.items()
    ]


def decision(cells: Sequence[Finding]) -> Decision:
    """Return what the cells of a claim decide: see `Statement`."""
    states = {one.state for one in cells}
    if len(states) == 1:
        words: dict[State, Decision] = {"holds": "for", "contradicted": "against", "level": "level", "open": "open"}
        return words[states.pop()]
    if "contradicted" in states or "open" not in states:
        return "mixed"
    return "open"


def findings(figure: Figure, runs: Runs) -> list[Finding]:
    """Return the findings on all claims of a figure."""
    found = []
    for claim in figure.claims:
        if claim.slope is not None:
            found.append(slope(figure, claim, runs))
            continue
        for panel in figure.panels_of(claim):
            found += [comparison(figure, claim, panel, than, runs) for than in claim.than]
    return found


def cells_of(figure: Figure, claim: Claim) -> int:
    """Return the number of findings on a claim."""
    return 1 if claim.slope is not None else len(figure.panels_of(claim)) * len(claim.than)


def verdict(states: Sequence[str]) -> str:
    """Return the verdict on a figure, from the states of the cells of all its claims."""
    if set(states) == {"holds"}:
        return "reproduced"
    if "holds" in states:
        return "partly reproduced"
    return "not reproduced" if {"contradicted", "level"} & set(states) else "undecided"


def unit_of(figure: Figure, claim: Claim) -> str:
    """Return the unit of a claim's differences.

    This is the unit of a cost, percentage points of an accuracy, powers of ten, or the name of a metric.
    """
    if claim.log:
        return "powers of ten"
    name = column_of(figure, claim)
    if name in COSTS:
        return UNITS.get(name, name)
    return POINTS if in_percent(name) else name.replace("_", " ")


def column_of(figure: Figure, claim: Claim) -> str:
    """Return the column from which a claim is decided: a metric, or the cost at which a value is first reached."""
    return claim.against or figure.against if claim.by == "first" else claim.metric or figure.metric


def reading(figure: Figure, claim: Claim, history: History) -> tuple[float, bool]:
    """Return a claim's reading of a run, and whether the run reached the value of the claim.

    If it did not, the reading is the cost at which the run ended.
    """
    metric = claim.metric or figure.metric
    rows = [row for row in history.rows if value_in(row, metric) is not None]
    values = [float(value_in(row, metric) or 0.0) for row in rows]
    if claim.by in ("end", "late"):
        return of_curve(claim.by, [], values), True
    costs = [float(value_in(row, claim.against or figure.against) or 0.0) for row in rows]
    if claim.reach is None:
        return of_curve(claim.by, costs, values), True
    sign = 1 if larger_is_better(history, metric) else -1
    first = [cost for cost, value in zip(costs, values, strict=True) if sign * value >= sign * claim.reach]
    return (first[0], True) if first else (costs[-1], False)


def of_curve(by: str, costs: Sequence[float], values: Sequence[float]) -> float:
    """Return the reading of a curve by "end", "late" or "mean".

    "mean" is the mean over the cost, by the trapezoidal rule.
    """
    if by == "late":
        return float(np.mean(values[len(values) // 2 :]))
    if by == "end" or costs[-1] <= costs[0]:
        return values[-1]
    return float(np.trapezoid(values, costs)) / (costs[-1] - costs[0])


def larger_is_better(history: History, metric: str) -> bool:
    """Return whether a larger value of a metric is better; for a cost, the smaller value is."""
    return metric not in COSTS and history.larger_is_better(metric)


def comparison(figure: Figure, claim: Claim, panel: str, than: str, runs: Runs) -> Finding:
    """Return the finding on a claim in a panel, against one other method."""
    said = Finding(says=claim.says, panel=panel, better=claim.better, than=than, unit=unit_of(figure, claim))
    pairs = claim.sides(panel, than)
    if absent := list(dict.fromkeys(where for where, _ in pairs if where not in runs)):
        verb = "is" if len(absent) == 1 else "are"
        return replace(said, note=f"{' and '.join(absent)} {verb} not run at this scale")
    if missing := [f"{name} is not run in {where} at this scale" for where, name in pairs if name not in runs[where]]:
        return replace(said, note="; ".join(missing))
    ended = [one for where, name in pairs for one in runs[where][name] if one is not None]
    sides = [
        [None if one is None else reading(figure, claim, one) for one in runs[where][name]] for where, name in pairs
    ]
    count, lost = len(sides[1]), [side.count(None) for side in sides]
    rival = f"{than} ({claim.than_in})" if claim.than_in else than
    names = zip((claim.better, rival), lost, strict=True)
    failed = "; ".join(f"{name}{FAILED}{one} of {count} seeds" for name, one in names if one)
    if count in lost:
        there = all(one[1] for one in sides[0] if one)
        return replace(said, state=of_failed(claim, lost, count, there), note=failed)
    sign = 1 if claim.by != "first" and larger_is_better(ended[0], claim.metric or figure.metric) else -1
    worst = min((one for side in sides for one in side if one), key=lambda one: sign * one[0])[0]
    mine, other = ([one or (worst, False) for one in side] for side in sides)
    there, other_there = (all(got for _, got in side) for side in (mine, other))
    first, second = (float(np.mean([value for value, _ in side])) for side in (mine, other))
    if claim.log and any(value <= 0 for value, _ in [*mine, *other]):
        note = "the reading of some run is not above 0: it has no logarithm"
        return replace(said, better_mean=first, than_mean=second, note=note)
    scale = math.log10 if claim.log else float
    apart = [sign * (scale(a) - scale(claim.ratio * b)) for (a, _), (b, _) in zip(mine, other, strict=True)]
    mean, half = interval(apart)
    state, note = state_of(mean, half, claim.level, within(figure, claim, second)), ""
    if failed:
        note = failed + FAILED_COUNTS
        loses, reached = (mean + half < 0, other_there) if lost[0] else (mean - half > 0, there)
        decided = "holds" if claim.level is None and lost[1] else "contradicted"
        state = state if loses and reached and not all(lost) and state == decided else "open"
    elif not there:
        note = f"{claim.better} does not reach the value of the claim in every run"
        state = state if state == "contradicted" and mean < 0 and other_there else "open"
    elif not other_there:
        note = f"{SOME_RUNS}{rival}{UNREACHED}"
        state = state if state == "holds" and claim.level is None else "open"
    elif claim.level is not None and mean - half > claim.level:
        note = f"{claim.better} is better than {rival} by more than the margin"
    said = replace(said, better_mean=first, than_mean=second, difference=mean, half_width=half)
    return replace(said, state=state, note=note)


def of_failed(claim: Claim, lost: Sequence[int], count: int, there: bool) -> State:
    """Return the state that follows from failed runs.

    A method that fails with every seed is worse than a method that fails with none.

    In a claim about the first method to reach a value, a method that does not reach the value in every run is not
    better than a method that fails.
    """
    if lost == [0, count] and claim.level is None and there:
        return "holds"
    return "contradicted" if lost == [count, 0] else "open"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of some values, and half the width of its confidence interval.

    The interval is by Student's t; for one value, the width is infinite.
    """
    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return mean, math.inf
    return mean, float(t.ppf((1 + CONFIDENCE) / 2, count - 1) * np.std(values, ddof=1) / math.sqrt(count))


def within(figure: Figure, claim: Claim, than_mean: float) -> float:
    """Return δ: two methods are level if their difference is within ±δ. The rule is the same for every claim."""
    if claim.log:
        return POWER
    return SHARE if unit_of(figure, claim) == POINTS else RELATIVE * abs(claim.ratio * than_mean)


def state_of(mean: float, half: float, level: float | None, within: float = 0.0) -> State:
    """Return the state that a confidence interval decides.

    Args:
        mean, half: the middle of the interval, and half its width.
        level: if given, the claim is that both methods are level. It holds if the interval is within ±level. None: the
            claim is that the first method is better. It holds if the interval is above 0.
        within: for a claim that the first method is better. If the interval contains 0 and is within ±within, the state
            is that both methods are level. This is a test of equivalence by two one-sided tests, each of which errs
            with a probability of at most 2.5 %.
    """
    low, high = mean - half, mean + half
    if level is None:
        if low > 0 or high < 0:
            return "holds" if low > 0 else "contradicted"
        return "level" if -within <= low and high <= within and within > 0 else "open"
    return "holds" if -level <= low and high <= level else "contradicted" if low > level or high < -level else "open"


def slope(figure: Figure, claim: Claim, runs: Runs) -> Finding:
    """Return the finding on a claim about a slope: of readings against the panels' values, on logarithmic axes."""
    assert claim.slope is not None
    panels = [panel for panel in figure.panels_of(claim) if panel in runs]
    sides = [runs[panel][claim.better] for panel in panels]
    read = [[reading(figure, claim, one)[0] for one in side if one is not None] for side in sides]
    said = Finding(says=claim.says, panel="", better=claim.better, unit="in slope")
    if any(one is None for side in sides for one in side):
        return replace(said, note="a run failed")
    if any(value <= 0 for side in read for value in side):
        return replace(said, note="the reading of some run is not above 0: it has no logarithm")
    fitted, error = fitted_slope([figure.panels[panel].value or 0.0 for panel in panels], read)
    apart, half = fitted - claim.slope, 2 * error
    said = replace(said, better_mean=fitted, than_mean=claim.slope, difference=apart, half_width=half)
    return replace(said, state=state_of_slope(apart, half, claim.within))


def state_of_slope(apart: float, half: float, within: float) -> State:
    """Return what the interval of a fitted slope minus the predicted one decides.

    The claim holds if the interval is within ±within.
    """
    most, least = abs(apart) + half, abs(apart) - half
    return "holds" if most <= within else "contradicted" if least > within else "open"


def fitted_slope(x: Sequence[float], y: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the least-squares slope of log y over log x, and its standard error.

    Every seed has an intercept of its own.

    Args:
        x: shape (values,).
        y: shape (values, seeds).
    """
    u, v = np.log(x)[:, None], np.log(y)
    u, v = np.broadcast_to(u - u.mean(), v.shape), v - v.mean(axis=0)
    fitted = float(np.sum(u * v) / np.sum(u * u))
    free = max(v.size - v.shape[1] - 1, 1)
    return fitted, float(np.sqrt(np.sum((v - fitted * u) ** 2) / free / np.sum(u * u)))
