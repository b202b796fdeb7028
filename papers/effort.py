"""Estimate what would decide an open statement: how many seeds, and how many hours of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.stats import t

from papers.claims import (
    CONFIDENCE,
    FAILED_COUNTS,
    SOME_RUNS,
    UNREACHED,
    Finding,
    Statement,
    state_of,
    state_of_slope,
    within,
)
from papers.figure import Claim, Figure

MOST = 1000  # the largest number of seeds; a cell that would need more is practically level


def seeds_in(found: Mapping[str, Any], panel: str) -> list[int]:
    """Return the seeds of an outcome in a panel; for a slope, whose panel is "", those of all panels."""
    return list(found.get("seeds_of", {}).get(panel, found["seeds"]))


def what_decides(figure: Figure, found: Mapping[str, Any], statement: Statement) -> str:
    """Say what would decide the open cells of a statement: the number of seeds, and the hours of further runs.

    The number of seeds is the least at which the interval would decide, if difference and scatter stayed the same. The
    hours are those of the further runs of both methods. Trials are not repeated.
    """
    claim = next(one for one in figure.claims if one.says == statement.says)
    left = [one for one in statement.findings if one.state == "open"]
    lacking = [panels_without_runs(found, claim, one) for one in left]
    unplayed = list(dict.fromkeys(panel for panels in lacking for panel in panels))
    needed = [
        (one, seeds_that_decide(figure, claim, one, len(seeds_in(found, one.panel))))
        for one, panels in zip(left, lacking, strict=True)
        if not panels
    ]
    words = []
    if known := [count for _, count in needed if count is not None]:
        hours = hours_of(figure, found, claim, needed)
        more = f"about {hours:.1f} more hours" if hours >= 0.05 else "a few more minutes"
        words.append(f"{max(known)} seeds in all ({more} of runs)")
    unknown = [one.note for one, count in needed if count is None and one.note]
    if hopeless := sum(count is None for _, count in needed) - len(unknown):
        some = f" {hopeless} of the {len(left)} open comparisons" if hopeless < len(left) else " it"
        words.append(f"even {MOST:,} seeds would not decide{some}")
    if unknown:
        some = f" for {len(unknown)} of the {len(left)} open comparisons" if len(unknown) < len(left) else ""
        reasons = " and ".join(dict.fromkeys(map(reason, unknown)))
        words.append(f"no estimate{some}, because {reasons}")
    if unplayed:
        settings = f"setting{'s' * (len(unplayed) > 1)} {' and '.join(f'“{panel}”' for panel in unplayed)}"
        words.append(f"runs in the {settings}, whose time is not counted here")
    return "; ".join(words)


def panels_without_runs(found: Mapping[str, Any], claim: Claim, one: Finding) -> list[str]:
    """Return the panels in which an outcome lacks a method of a comparison; for a slope, none."""
    if claim.slope is not None:
        return []
    return [panel for panel, method in claim.sides(one.panel, one.than) if method not in found["panels"].get(panel, {})]


def reason(note: str) -> str:
    """Return why no number of seeds is estimated, from the note of a finding, such as that runs failed."""
    if note.endswith(UNREACHED):
        return f"some runs of {note.removeprefix(SOME_RUNS).removesuffix(UNREACHED)} never reach the value of the claim"
    return note.removesuffix(FAILED_COUNTS).replace("; ", " and ")


def seeds_that_decide(figure: Figure, claim: Claim, one: Finding, played: int) -> int | None:
    """Return the least number of seeds at which a cell would not be open; None if more than MOST are needed.

    The result is also None if a run failed or did not reach the claim's value, since it is not known how often that
    would happen with more seeds.
    """
    if one.difference is None or one.half_width is None or math.isinf(one.half_width) or one.note:
        return None
    counts = np.arange(played + 1, MOST + 1)
    shrinks = np.sqrt(played / counts)
    if claim.slope is not None:
        halves = one.half_width * shrinks
        states = [state_of_slope(one.difference, half, claim.within) for half in halves]
    else:
        quantiles = t.ppf((1 + CONFIDENCE) / 2, counts - 1) / t.ppf((1 + CONFIDENCE) / 2, played - 1)
        margin = within(figure, claim, one.than_mean or 0.0)
        states = [state_of(one.difference, half, claim.level, margin) for half in one.half_width * shrinks * quantiles]
    return next((int(count) for count, state in zip(counts, states, strict=True) if state != "open"), None)


def hours_of(figure: Figure, found: Mapping[str, Any], claim: Claim, needed: list[tuple[Finding, int | None]]) -> float:
    """Estimate the hours of the further runs. Runs of a method that several cells need are counted once.

    The ledger of a run has the seconds of its rounds. What remains of the minutes of the whole figure (starting,
    compiling, evaluating, and all trials) is spread evenly over the runs. Trials are not repeated, so the estimate is
    too large rather than too small. If every run of a method failed, its rounds count as 0 seconds.
    """
    further: dict[tuple[str, str], int] = {}
    for one, count in needed:
        sloped = [(panel, one.better) for panel in figure.panels_of(claim)]
        for pair in claim.sides(one.panel, one.than) if claim.slope is None else sloped:
            further[pair] = max(further.get(pair, 0), (count or 0) - len(seeds_in(found, pair[0])))
    played = {
        (panel, method): (len(of["values"]), of["costs"].get("seconds", 0.0))
        for panel, methods in found["panels"].items()
        for method, of in methods.items()
    }
    ended = sum(runs for runs, _ in played.values())
    rest = max(60 * found["minutes"] - sum(runs * seconds for runs, seconds in played.values()), 0) / max(ended, 1)
    return sum(more * (played[pair][1] + rest) for pair, more in further.items() if pair in played) / 3600
