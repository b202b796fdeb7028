"""What is read off runs, and which claims hold: differences paired by seed, with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedbilevel.core.metrics import best, in_percent, text
from fedbilevel.engines.curves import PANELS, costs_of, words
from fedbilevel.engines.history import History, Row
from fedbilevel.reproduce.entry import Claim, Entry

CONFIDENCE = 0.95
State = Literal["holds", "contradicted", "open"]
Verdict = Literal["reproduced", "partly reproduced", "not reproduced", "undecided", "ranked"]
Runs = Mapping[str, Mapping[str, Sequence[History | None]]]
"""By panel, then by method: the history of each seed, None of a run that failed."""


@dataclass(frozen=True)
class Finding:
    """What came of a claim in one panel, against one other method.

    Attributes:
        says: the claim.
        panel: "" where it spans several.
        better, than: the methods; no `than` for a slope.
        better_mean, than_mean: of what was read off their runs; None where a run failed or never got there.
        difference: the mean over the seeds of how much better it is; of a slope the fitted one less the predicted one.
        half_width: of its confidence interval; None where it has none.
        state: what the interval says.
        note: what a reader has to know besides.
        unit: of the difference, in words.
    """

    says: str
    panel: str
    better: str
    than: str
    better_mean: float | None
    than_mean: float | None
    difference: float | None
    half_width: float | None
    state: State
    note: str = ""
    unit: str = ""


def findings(entry: Entry, runs: Runs) -> list[Finding]:
    """What came of every claim of an entry."""
    return [
        replace(found, unit=unit_of(entry, claim)) for claim in entry.claims for found in _of_claim(entry, claim, runs)
    ]


PERCENTAGE_POINTS = "percentage points"
UNITS = {"megabytes": "MB", "evaluations": "gradients and hvps", "gflop": "GFLOP", "time": "virtual seconds"}
"""Of costs whose names are no unit."""


def unit_of(entry: Entry, claim: Claim) -> str:
    """Of a claim's differences: a cost's, percentage points of an accuracy, powers of ten, or the name of a metric."""
    if claim.slope is not None:
        return "in slope"
    if claim.log:
        return "powers of ten"
    name = (claim.of or entry.against) if claim.by == "first" else claim.metric or entry.metric
    if name in PANELS:
        return UNITS.get(name, name)
    return PERCENTAGE_POINTS if in_percent(name) else words(name)


def _of_claim(entry: Entry, claim: Claim, runs: Runs) -> Iterator[Finding]:
    if claim.slope is not None:
        yield _slope(entry, claim, runs)
        return
    for panel in entry.panels_of(claim):
        for than in claim.than:
            yield (_comparison if panel in runs else _not_played)(entry, claim, panel, than, runs)


def _not_played(entry: Entry, claim: Claim, panel: str, than: str, runs: Runs) -> Finding:
    note = f"{panel} is not played at this scale"
    return Finding(claim.says, panel, claim.better, than, None, None, None, None, "open", note)


def verdict(found: Sequence[Finding]) -> Verdict:
    """What the claims come to together."""
    states = {one.state for one in found}
    if states == {"holds"}:
        return "reproduced"
    if "holds" in states:
        return "partly reproduced"
    return "not reproduced" if "contradicted" in states else "undecided"


@dataclass(frozen=True)
class Reading:
    """What is read off a run: its value, or of one that never got there the cost at which it ended."""

    value: float
    reached: bool = True


def reading(entry: Entry, claim: Claim, history: History) -> Reading:
    """What a claim reads off a run."""
    metric, cost = claim.metric or entry.metric, claim.of or entry.against
    rows = [row for row in history.rows if metric_in(row, metric) is not None]
    values = [float(metric_in(row, metric) or 0.0) for row in rows]
    larger = larger_is_better(history, metric)
    if claim.by == "best":
        return Reading(best(values, larger))
    costs = [float(metric_in(row, cost) or 0.0) for row in rows]
    if claim.by != "first":
        return Reading(of_curve(claim, costs, values))
    assert claim.reach is not None
    pairs = zip(costs, values, strict=True)
    first = next((at for at, value in pairs if (value >= claim.reach if larger else value <= claim.reach)), None)
    return Reading(costs[-1], reached=False) if first is None else Reading(first)


def of_curve(claim: Claim, costs: Sequence[float], values: Sequence[float]) -> float:
    """What a claim by "end", "late" or "mean" reads off a curve."""
    if claim.by == "late":
        return float(np.mean(values[len(values) // 2 :]))
    return mean_over(costs, values) if claim.by == "mean" else values[-1]


def metric_in(row: Row, name: str) -> float | None:
    """What a row says of a cost, by the names of PANELS, or else of a column."""
    return costs_of(row).get(name, row.get(name))


def mean_over(costs: Sequence[float], values: Sequence[float]) -> float:
    """The mean of a curve over its cost, by the trapezoidal rule; of a single point its value."""
    length = costs[-1] - costs[0]
    return float(np.trapezoid(values, costs)) / length if length > 0 else values[-1]


def _sign(entry: Entry, claim: Claim, history: History) -> int:
    """1 where a larger reading is better, else -1: costs are better the smaller they are."""
    return 1 if claim.by != "first" and larger_is_better(history, claim.metric or entry.metric) else -1


def larger_is_better(history: History, metric: str) -> bool:
    """Which way a metric is better; of a cost the smaller value."""
    return metric not in PANELS and history.larger_is_better(metric)


def _comparison(entry: Entry, claim: Claim, panel: str, than: str, runs: Runs) -> Finding:
    left, right = runs[panel][claim.better], runs[panel][than]
    if any(one is None for one in [*left, *right]):
        return _of_failed(entry, claim, panel, than, left, right)
    mine = [reading(entry, claim, one) for one in left if one is not None]
    other = [reading(entry, claim, one) for one in right if one is not None]
    sign = next(_sign(entry, claim, one) for one in left if one is not None)
    first, second = (float(np.mean([one.value for one in side])) for side in (mine, other))
    if claim.log and any(one.value <= 0 for one in [*mine, *other]):
        note = "what is read off some run is not above 0: it has no logarithm"
        return Finding(claim.says, panel, claim.better, than, first, second, None, None, "open", note)
    scale = math.log10 if claim.log else float
    apart = [sign * (scale(a.value) - scale(claim.ratio * b.value)) for a, b in zip(mine, other, strict=True)]
    mean, half = interval(apart)
    state, note = _state(mean, half, claim.level), ""
    if not all(one.reached for one in mine):
        note = f"{claim.better} does not get there in every run"
        state = "open" if state == "holds" or not all(one.reached for one in other) else state
    elif not all(one.reached for one in other):
        note = f"{than} does not get there in every run: counted with the cost at which it ended"
        state = "open" if state == "contradicted" else state
    return Finding(claim.says, panel, claim.better, than, first, second, mean, half, state, note)


def _of_failed(
    entry: Entry, claim: Claim, panel: str, than: str, left: Sequence[History | None], right: Sequence[History | None]
) -> Finding:
    """A method that fails with every seed is worse than one that does with none; else nothing can be said.

    One that is to get somewhere first, and does not in every run, is not better than one that fails.
    """
    lost = [sum(one is None for one in side) for side in (left, right)]
    state: State = "open"
    if lost == [0, len(right)] and claim.level is None:
        there = all(reading(entry, claim, one).reached for one in left if one is not None)
        state = "holds" if there else "open"
    elif lost == [len(left), 0]:
        state = "contradicted"
    note = "; ".join(
        f"{name} failed with {count} of {len(left)} seeds"
        for name, count in zip((claim.better, than), lost, strict=True)
        if count
    )
    return Finding(claim.says, panel, claim.better, than, None, None, None, None, state, note)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of some values and half the width of its confidence interval, by Student's t; infinite for one value."""
    from scipy.stats import t

    count, mean = len(values), float(np.mean(values))
    if count < 2:
        return mean, math.inf
    return mean, float(t.ppf((1 + CONFIDENCE) / 2, count - 1) * np.std(values, ddof=1) / math.sqrt(count))


def _state(mean: float, half: float, level: float | None) -> State:
    """Whether the interval lies above 0, or with `level` within ±level; the contrary; or neither."""
    low, high = mean - half, mean + half
    if level is not None:
        return (
            "holds" if -level <= low and high <= level else "contradicted" if low > level or high < -level else "open"
        )
    return "holds" if low > 0 else "contradicted" if high < 0 else "open"


def mean_in_words(metric: str, of: Mapping[str, Any]) -> str:
    """What a method's runs ended with, from its record: mean ± standard deviation over the seeds, or "failed"."""
    if of["mean"] is None:
        return "failed"
    if of["sd"] is None:
        return text(metric, of["mean"])
    return f"{text(metric, of['mean']).removesuffix(' %')} ± {text(metric, of['sd'])}"


def _slope(entry: Entry, claim: Claim, runs: Runs) -> Finding:
    """The slope of readings against the panels' values, on logarithmic axes."""
    assert claim.slope is not None
    panels = [panel for panel in entry.panels_of(claim) if panel in runs]
    sides = {panel: runs[panel][claim.better] for panel in panels}
    if any(one is None for side in sides.values() for one in side):
        return Finding(claim.says, "", claim.better, "", None, None, None, None, "open", "a run failed")
    at = [float(entry.panels[panel].value or 0.0) for panel in panels]
    read = [[reading(entry, claim, one).value for one in side if one is not None] for side in sides.values()]
    if any(value <= 0 for side in read for value in side):
        note = "what is read off some run is not above 0: it has no logarithm"
        return Finding(claim.says, "", claim.better, "", None, None, None, None, "open", note)
    slope, error = fitted_slope(at, read)
    apart, half = slope - claim.slope, 2 * error
    most, least = abs(apart) + half, abs(apart) - half
    state: State = "holds" if most <= claim.within else "contradicted" if least > claim.within else "open"
    return Finding(claim.says, "", claim.better, "", slope, claim.slope, apart, half, state)


def fitted_slope(x: Sequence[float], y: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The least-squares slope of log y over log x, and its standard error; every seed has an intercept of its own.

    Args:
        x: shape (values,).
        y: shape (values, seeds).
    """
    u, v = np.log(x)[:, None], np.log(y)
    u, v = np.broadcast_to(u - u.mean(), v.shape), v - v.mean(axis=0)
    slope = float(np.sum(u * v) / np.sum(u * u))
    free = max(v.size - v.shape[1] - 1, 1)
    return slope, float(np.sqrt(np.sum((v - slope * u) ** 2) / free / np.sum(u * u)))
