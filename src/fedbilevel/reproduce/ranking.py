"""A leaderboard: methods ranked in every panel at every budget, by what they have when they have spent so much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbilevel.engines.curves import costs_of
from fedbilevel.engines.history import History, Row
from fedbilevel.engines.result import Callback, Result
from fedbilevel.reproduce.claims import UNITS, Runs, interval, larger_is_better, mean_in_words
from fedbilevel.reproduce.entry import Entry

Budgets = Mapping[str, float]


def ends_after(budgets: Budgets) -> Callback:
    """A callback that ends a run at the first row by which all budgets are spent."""

    def check(result: Result, row: Row | None) -> str | None:
        return "all budgets are spent" if row is not None and spent(row, budgets) else None

    return check


def spent(row: Row, budgets: Budgets) -> bool:
    """Whether all budgets are spent."""
    costs = costs_of(row)
    return all(costs[name] >= amount for name, amount in budgets.items())


def reading_at(history: History, metric: str, cost: str, amount: float) -> float:
    """The metric in the last row that cost no more."""
    return float([row[metric] for row in history.rows if costs_of(row)[cost] <= amount][-1])


def ranks(entry: Entry, runs: Runs) -> dict[str, dict[str, dict[str, Any]]]:
    """By panel, budget and method: the rank, and the metric of each seed; {} for an entry that is no leaderboard."""
    return {
        panel: {
            cost: _places(entry, panel, cost, amount, runs[panel])
            for cost, amount in entry.panels[panel].budgets.items()
        }
        for panel in (runs if entry.ranked else ())
    }


def _places(
    entry: Entry, panel: str, cost: str, amount: float, runs: Mapping[str, Sequence[History | None]]
) -> dict[str, Any]:
    """Of each method: its rank, and its place by its mean alone. One that fails with some seed has neither."""
    metric = entry.measured_in(panel)
    whole = {name: [one for one in side if one is not None] for name, side in runs.items()}
    read = {
        name: [reading_at(one, metric, cost, amount) for one in side] if len(side) == len(runs[name]) else []
        for name, side in whole.items()
    }
    larger = next((larger_is_better(one, metric) for side in whole.values() for one in side), True)
    placed = ranked({name: values for name, values in read.items() if values}, larger, entry.panels[panel].log)
    means = {name: float(np.mean(values)) for name, values in read.items() if values}
    sign = 1 if larger else -1
    return {
        name: {
            "rank": placed.get(name),
            "place": 1 + sum(sign * other > sign * means[name] for other in means.values()) if values else None,
            "values": values,
            "mean": means.get(name),
            "sd": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        }
        for name, values in read.items()
    }


def ranked(values: Mapping[str, Sequence[float]], larger: bool, log: bool) -> dict[str, int]:
    """The rank of each method: one more than the number of methods that are better than it for sure.

    One is better for sure if the confidence interval of the difference, paired by seed, lies above 0. So methods that
    cannot be told apart from the best share rank 1.

    Args:
        values: by method, of each seed.
        larger: larger values are better.
        log: differences are those of logarithms; where some value is not above 0, of the values.
    """
    log = log and all(value > 0 for side in values.values() for value in side)
    scale = math.log10 if log else float
    sign = 1 if larger else -1
    scaled = {name: np.array([sign * scale(value) for value in side]) for name, side in values.items()}

    def surely(better: np.ndarray, than: np.ndarray) -> bool:
        mean, half = interval((better - than).tolist())
        return mean - half > 0

    return {name: 1 + sum(surely(other, one) for other in scaled.values()) for name, one in scaled.items()}


Ranks = Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]
"""What an outcome keeps: by panel, cost and method."""


def budget_in_words(cost: str, amount: float) -> str:
    """ "100 exchanges", "0.7 MB"."""
    return f"{amount:,g} {UNITS.get(cost, cost)}"


def place_in_words(metric: str, place: Mapping[str, Any]) -> str:
    """A method's rank, with mean and standard deviation of its metric: "1 (93.20 ± 0.4 %)"."""
    return "failed" if place["rank"] is None else f"{place['rank']} ({mean_in_words(metric, place)})"


def overview(ranks: Ranks) -> dict[str, list[str]]:
    """A table by columns: methods, each one's mean place and how often it is level with the best, and in each panel its
    ranks at the budgets.

    In order of the mean place, that by the mean of the metric: a method that scatters is level with all others, and not
    well placed. One that fails has the last place. Those that play fewer panels stand below the others.
    """
    tables = [at for of in ranks.values() for at in of.values()]
    own = {name: [at[name] for at in tables if name in at] for name in _methods(ranks)}
    place = {name: float(np.mean([at[name]["place"] or len(at) for at in tables if name in at])) for name in own}
    order = sorted(own, key=lambda name: (-len(own[name]), place[name]))
    return {
        "method": order,
        "mean place": [f"{place[name]:.1f}" for name in order],
        "level with the best": [f"{sum(one['rank'] == 1 for one in own[name])} of {len(own[name])}" for name in order],
        **{panel: [_in_a_cell(of, name) for name in order] for panel, of in ranks.items()},
    }


def told_apart(ranks: Ranks) -> list[tuple[str, str, list[str], int]]:
    """Of each panel and cost: the methods that share rank 1, and how many have a rank."""
    return [
        (
            panel,
            cost,
            [name for name, one in at.items() if one["rank"] == 1],
            sum(one["rank"] is not None for one in at.values()),
        )
        for panel, of in ranks.items()
        for cost, at in of.items()
    ]


def _methods(ranks: Ranks) -> list[str]:
    return list(dict.fromkeys(name for of in ranks.values() for at in of.values() for name in at))


def _in_a_cell(of: Mapping[str, Mapping[str, Mapping[str, Any]]], name: str) -> str:
    if not all(name in at for at in of.values()):
        return ""
    return " ".join("–" if at[name]["rank"] is None else str(at[name]["rank"]) for at in of.values())
