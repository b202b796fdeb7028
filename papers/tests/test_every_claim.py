"""Every claim of every figure can hold, be contradicted and stay open, with outcomes that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from papers.claims import findings, verdict
from papers.figure import Claim, Figure, files, load
from small_figure import CONTENT, made_up

from fedbilevel.authoring import History
from fedbilevel.experiments import COSTS, in_percent

CLAIMS = [
    pytest.param(figure, claim, id=f"{figure.id}: {claim.says}: {claim.better}")
    for figure in map(load, files())
    for claim in figure.claims
]
COMPARED = [one for one in CLAIMS if one.values[1].slope is None]
SLOPES = [one for one in CLAIMS if one.values[1].slope is not None]
VERDICTS = {"holds": "reproduced", "contradicted": "not reproduced", "level": "not reproduced", "open": "undecided"}
SEEDS = 3
Reading = Callable[[str, int], float]
"""A function of panel and seed: the value that the claim reads off a run that is made up."""


def row(cost: float, metric: str, value: float) -> dict[str, float]:
    """Return a row in which every cost of COSTS is `cost`."""
    costs = dict.fromkeys(("round", "exchanges", "gradients", "seconds", "time"), cost)
    costs |= {"bytes_down": 1e6 * cost, "bytes_up": 0, "hvps": 0, "flops": 1e9 * cost}
    return costs if metric in COSTS else {**costs, metric: value}


def run(figure: Figure, claim: Claim, reading: float) -> History:
    """Return a run from which the claim reads this value.

    If the claim is about the first row that reaches a value, the run starts at chance, or at a loss of 1.
    """
    metric = claim.metric or figure.metric
    if claim.by == "first":
        assert claim.reach is not None
        return History([row(0, metric, 0.1 if in_percent(metric) else 1.0), row(reading, metric, claim.reach)])
    ends = (0, reading) if metric in COSTS else (0, 1)
    return History([row(cost, metric, reading) for cost in ends])


def state(figure: Figure, claim: Claim, better: Reading, than: Reading) -> str:
    """Return the state of a claim, which must be one in all panels, for readings of its method and of all others."""
    panels, rivals = figure.panels_of(claim), dict.fromkeys(claim.than, than)
    arms = {panel: {claim.better: better} if claim.than_in else rivals | {claim.better: better} for panel in panels}
    arms |= {claim.than_in: rivals} if claim.than_in else {}
    runs = {
        panel: {name: [run(figure, claim, of(panel, seed)) for seed in range(SEEDS)] for name, of in methods.items()}
        for panel, methods in arms.items()
    }
    found = [one.state for one in findings(replace(figure, claims=[claim]), runs)]
    assert len(found) == (len(panels) * len(claim.than) if claim.slope is None else 1)
    (came,) = set(found)
    assert verdict(found) == VERDICTS[came]
    return came


def good_and_bad(figure: Figure, claim: Claim) -> tuple[float, float]:
    """Return readings that fulfil a claim clearly: one of its method, and one of the others."""
    metric = claim.metric or figure.metric
    if claim.by != "first" and in_percent(metric):
        return 0.9, 0.5
    return min(claim.ratio, 1.0) * (0.005 if claim.log else 5.0), 0.5 if claim.log else 10.0


@pytest.mark.parametrize(("figure", "claim"), COMPARED)
def test_a_comparison_can_fail(figure: Figure, claim: Claim) -> None:
    """Every claim that compares methods can hold, be contradicted and stay open.

    Equal arms are level. A claim that methods are level then holds, and so does a claim that a reading is at most a
    multiple of the other; a claim that it is at most a share of the other is contradicted. A claim stays open if from
    seed to seed another arm is better.
    """
    good, bad = good_and_bad(figure, claim)

    def came(better: list[float], than: list[float]) -> str:
        return state(figure, claim, lambda panel, seed: better[seed], lambda panel, seed: than[seed])

    equal = "holds" if claim.level is not None or claim.ratio > 1 else "level" if claim.ratio == 1 else "contradicted"
    first = "holds" if claim.level is None else "contradicted"
    assert came([good] * 3, [bad] * 3) == first
    assert came([bad] * 3, [good] * 3) == "contradicted"
    assert came([bad] * 3, [bad] * 3) == equal
    assert came([good, bad, good], [bad, good, bad] if claim.level is None else [good] * 3) == "open"


@pytest.mark.parametrize(("figure", "claim"), SLOPES)
def test_a_slope_can_fail(figure: Figure, claim: Claim) -> None:
    """Every claim about a slope can hold, be contradicted and stay open.

    Readings along the predicted slope fulfil it, readings along other slopes contradict it, and readings that are
    scattered by factors of three leave it open.
    """
    predicted = claim.slope or 0.0
    places = {panel: figure.panels[panel].value or 0.0 for panel in figure.panels_of(claim)}
    turned = {panel: (-1) ** number for number, panel in enumerate(places)}

    def came(power: float, factor: float = 1.0) -> str:
        def along(panel: str, seed: int) -> float:
            return float(places[panel] ** power * factor ** (turned[panel] * (-1) ** seed))

        return state(figure, claim, along, along)

    assert came(predicted) == "holds"
    assert [came(predicted + 1), came(predicted - 1)] == ["contradicted", "contradicted"]
    assert came(0.0) == ("holds" if predicted == 0 else "contradicted")  # readings do not depend on the panel
    assert came(predicted, 3.0) == "open"


@pytest.mark.parametrize("weak", [{"level": 1.0}, {"by": "first", "reach": 0.1}, {"metric": "megabytes", "ratio": 9.0}])
def test_a_comparison_that_nothing_contradicts_is_seen(weak: dict[str, Any]) -> None:
    """The test of comparisons fails for claims that no outcome can contradict.

    There are three such claims: that two methods differ by at most 100 points; that a method is the first to reach a
    value at which every run starts; and that a method needs at most nine times as many bytes as another.
    """
    figure = made_up(metric="test_accuracy", claims=[{**CONTENT["claims"][0], **weak}])
    with pytest.raises(AssertionError):
        test_a_comparison_can_fail(figure, figure.claims[0])


def test_a_slope_that_nothing_contradicts_is_seen() -> None:
    """The test of slopes must reject a claim that no slope contradicts, here that a slope is between −2.5 and 1.5.

    The test makes up slopes that differ by 1 from the predicted slope −0.5. They do not contradict this claim.
    """
    panels = {str(value): {"value": value} for value in (1.0, 2.0, 4.0)}
    claim = {"says": "-", "better": "SimFBO", "slope": -0.5, "within": 2.0}
    figure = made_up(panels=panels, series="clients", claims=[claim])
    with pytest.raises(AssertionError):
        test_a_slope_can_fail(figure, figure.claims[0])
