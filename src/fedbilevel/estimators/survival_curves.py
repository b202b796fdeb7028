"""Baseline hazards and Kaplan-Meier curves of sites that keep their rows.

A site counts the rows that it has fitted on a grid of times that is part of the study. Neighbouring intervals of the
grid are merged until `min_count` rows or more leave in each step, by an event or because they are not seen any longer.
Where fewer leave after the last such step, it ends with the grid. Where none do, and `min_count` or more stay beyond
the grid, a step up to its end follows in which none leave. Of each step the site sends

    its end t_k, the rows at risk n_k (that leave in it or later), the events d_k in it, and
    H(t_k) = Σ_{t_j ≤ t_k} e_j / Σ_{l: t_l ≥ t_j} exp(a_lᵀw), Breslow's cumulative baseline hazard (Biometrics 1974)

which is exact at t_k. A patient of the site survives t with exp(−H exp(aᵀw)), where H is that of the last end up to t.
The Kaplan-Meier curve of all sites is Π (1 − Σ_i d_i/Σ_i n_i) over the ends, in which a site's rows leave at the ends
of its steps: with `min_count` = 1 and a grid of all times it is that of the pooled rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.errors import ConfigurationError
from fedbilevel.estimators.columns import Numbers
from fedbilevel.estimators.measures import NORMAL, merged
from fedbilevel.extending import require

CurveSteps = list[list[float]]
"""Of each step of a site's curve its end, rows at risk, events, and cumulative baseline hazard."""


def steps(time: Numbers, event: Numbers, risk: Numbers, grid: Sequence[float], least: int) -> CurveSteps | None:
    """Describe a site's rows by steps in which `least` rows or more leave; None where fewer leave in all."""
    cell = np.searchsorted(grid, time, "left")
    leaving = np.bincount(cell, minlength=len(grid) + 1)[: len(grid)]
    groups = merged(leaving, least)
    if not groups:
        return None
    start, stop = groups[-1]
    if leaving[stop:].any():
        groups[-1] = start, len(grid)
    elif stop < len(grid) and np.sum(cell == len(grid)) >= least:
        groups.append((stop, len(grid)))
    order = np.argsort(time, kind="stable")
    at_risk = np.cumsum(np.exp(risk[order])[::-1])[::-1]
    each = event[order] / at_risk[np.searchsorted(time[order], time[order], "left")]
    found = []
    for start, stop in groups:
        inside = (start <= cell) & (cell < stop)
        hazard = float(each[cell[order] < stop].sum())
        found.append([float(grid[stop - 1]), int(np.sum(start <= cell)), int(event[inside].sum()), hazard])
    return found


def check_steps(site: str, told: Any, grid: Sequence[float]) -> None:
    """Refuse what is not as `steps` returns it.

    Raises:
        ConfigurationError: it names the site.
    """
    try:
        end, at_risk, events, hazard = np.array(told, float).reshape(-1, 4).T
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"steps of {site}: {error}") from error
    fits = len(end) > 0 and np.isin(end, grid).all() and (np.diff(end) > 0).all() and (np.diff(at_risk) < 0).all()
    fits = fits and ((events >= 0) & (events <= at_risk) & (at_risk >= 1)).all()
    fits = fits and np.isfinite(hazard).all() and (np.diff(hazard, prepend=0) >= 0).all()
    require(bool(fits), f"steps of {site}", "something else", "times of the grid, falling counts, a rising hazard")


def kaplan_meier(told: Mapping[str, CurveSteps]) -> list[dict[str, float]]:
    """Estimate the survival of sites' rows together, with Greenwood's 95 % intervals of log(−log survival)."""
    sites = [np.array(one) for one in told.values()]
    found, survival, variance = [], 1.0, 0.0
    for end in np.unique(np.concatenate([one[:, 0] for one in sites])):
        places = [int(np.searchsorted(one[:, 0], end)) for one in sites]
        there = [
            (one[place], one[place, 0] == end) for one, place in zip(sites, places, strict=True) if place < len(one)
        ]
        at_risk = sum(one[1] for one, _ in there)
        events = sum(one[2] for one, ends in there if ends)
        survival *= 1 - events / at_risk
        row = {"time": float(end), "at risk": int(at_risk), "events": int(events), "survival": float(survival)}
        if 0 < survival < 1:
            variance += events / (at_risk * (at_risk - events))
            width = NORMAL * variance**0.5 / abs(np.log(survival))
            row |= {"low": float(survival ** np.exp(width)), "high": float(survival ** np.exp(-width))}
        found.append(row)
    return found


def survival(told: CurveSteps, risk: Numbers, times: Any) -> Numbers:
    """Compute the probability that rows with these log hazards survive each time, (n, times)."""
    ends, hazard = np.array(told)[:, 0], np.append(0.0, np.array(told)[:, 3])
    times = np.atleast_1d(np.asarray(times, float))
    fits = times.ndim == 1 and bool(((times >= 0) & (times <= ends[-1])).all())
    require(fits, "times", times.tolist(), f"from 0 to {ends[-1]:g}, the end of the site's baseline")
    at = hazard[np.searchsorted(ends, times, "right")]
    return np.asarray(np.exp(-np.exp(risk)[:, None] * at))
