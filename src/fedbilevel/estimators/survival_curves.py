"""Compute baseline hazards and Kaplan-Meier curves of sites that keep their rows.

The study has a grid of times, `Study.times`. On this grid, each site counts the rows to which the model is fitted. A
row leaves the risk set at its time, by an event or because it is no longer observed. Neighbouring intervals of the grid
are merged into steps, so that at least `min_count` rows leave in each step. If a few rows leave after the last such
step, but fewer than `min_count`, this step is extended to the end of the grid. If no row leaves after the last step,
and at least `min_count` rows stay beyond the grid, there is one more step, in which no row leaves, up to the end of the
grid. For each step the site sends

    its end t_k, the rows at risk n_k (those that leave in this step or later), the events d_k in this step, and
    H(t_k) = Σ_{t_j ≤ t_k} e_j / Σ_{l: t_l ≥ t_j} exp(a_lᵀw), Breslow's cumulative baseline hazard (Biometrics 1974)

Row j has the features a_j and the time t_j; e_j is 1 for an event and otherwise 0; w are the coefficients. The sum H is
exact at t_k. A patient of the site with the features a survives the time t with the probability exp(−H exp(aᵀw)), where
H is the value at the last end that is not after t. The Kaplan-Meier curve of all sites is the product of
(1 − Σ_i d_i/Σ_i n_i) over all ends, with sums over sites i. In this curve, a site's rows leave at the ends of the
site's steps. With `min_count` = 1 and a grid that contains all times of rows, it is the Kaplan-Meier curve of the
pooled rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.errors import ConfigurationError
from fedbilevel.estimators.columns import Numbers
from fedbilevel.estimators.measures import NORMAL, merged
from fedbilevel.extending import require

CurveSteps = list[list[float]]
"""The steps of a site's curve: for each step its end, rows at risk, events, and cumulative baseline hazard."""


def steps(time: Numbers, event: Numbers, risk: Numbers, grid: Sequence[float], least: int) -> CurveSteps | None:
    """Return the steps of a site's curve; at least `least` rows leave in each step. None if fewer rows leave in all."""
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


def check_steps(site: str, baseline: Any, grid: Sequence[float]) -> None:
    """Refuse a survival curve of a site if it does not have the form that `steps` returns.

    Raises:
        ConfigurationError: the curve has another form; the message names the site.
    """
    curve, allowed = f"survival curve of the site {site}", "steps on the grid, as `steps` returns them"
    try:
        end, at_risk, events, hazard = np.array(baseline, float).reshape(-1, 4).T
    except (ValueError, TypeError) as error:
        message = f"the {curve} cannot be read: {error}"
        raise ConfigurationError(path=curve, got=baseline, allowed=allowed, message=message) from error
    fits = len(end) > 0 and np.isin(end, grid).all() and (np.diff(end) > 0).all() and (np.diff(at_risk) < 0).all()
    fits = fits and ((events >= 0) & (events <= at_risk) & (at_risk >= 1)).all()
    fits = fits and np.isfinite(hazard).all() and (np.diff(hazard, prepend=0) >= 0).all()
    if not fits:
        message = (
            f"the {curve} is not valid: it must have at least one time, its times must be on the grid and increase, "
            "its numbers of rows at risk must decrease and not be below the numbers of events, and its hazard must not "
            "fall"
        )
        raise ConfigurationError(path=curve, got=baseline, allowed=allowed, message=message)


def kaplan_meier(baselines: Mapping[str, CurveSteps]) -> list[dict[str, float]]:
    """Return the Kaplan-Meier estimate of survival for all sites' rows.

    The 95 % intervals are Greenwood's, computed for log(−log survival).
    """
    sites = [np.array(one) for one in baselines.values()]
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


def survival(baseline: CurveSteps, risk: Numbers, times: Any) -> Numbers:
    """Return, for each of these log hazards, a row with the probability to survive each time."""
    ends, hazard = np.array(baseline)[:, 0], np.append(0.0, np.array(baseline)[:, 3])
    times = np.atleast_1d(np.asarray(times, float))
    fits = times.ndim == 1 and bool(((times >= 0) & (times <= ends[-1])).all())
    require(fits, "times", times.tolist(), f"from 0 to {ends[-1]:g}, the end of the site's baseline")
    at = hazard[np.searchsorted(ends, times, "right")]
    return np.asarray(np.exp(-np.exp(risk)[:, None] * at))
