"""How a point of a sweep did, over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from fedbilevel.engines.budget import cost
from fedbilevel.sweeps.plan import Job, Plan, PointValues, TrialOutcome, require_known

COSTS = ("rounds", "exchanges", "bytes", "gradients", "hvps", "time")


@dataclass(frozen=True)
class Standing:
    """How a point did.

    Attributes:
        number: of the point, from 0.
        values: of the swept fields.
        outcomes: by seed.
        rung: the last rung at which all its seeds were played.
        mean, sd: of the metric over the seeds; None where a seed failed, sd also where there is but one.
        error: why it failed, and with which seed where there are several.
    """

    number: int
    values: PointValues
    outcomes: Mapping[int, TrialOutcome]
    rung: int
    mean: float | None
    sd: float | None
    error: str

    @property
    def in_words(self) -> str:
        """The values, as "server_lr.x = 0.1, local_steps = 5"."""
        return ", ".join(f"{name} = {value}" for name, value in self.values.items())

    def cost(self, name: str) -> float:
        """One of COSTS, as a mean over the seeds."""
        return statistics.fmean(spent(one, name) for one in self.outcomes.values())


def standing(plan: Plan, number: int, outcomes: Mapping[Job, TrialOutcome]) -> Standing:
    """How a point did at the last rung at which all its seeds were played."""
    jobs = [[Job(number, seed, rung) for seed in plan.seeds] for rung in range(len(plan.rungs))]
    rung, last = max((rung, row) for rung, row in enumerate(jobs) if all(job in outcomes for job in row))
    found = {job.seed: outcomes[job] for job in last}
    errors = {seed: one.error for seed, one in found.items() if one.error}
    if not errors:
        for one in found.values():
            require_known(plan.select, one.row)
    values = [one.row[plan.select] for one in found.values()] if not errors else []
    mean = statistics.fmean(values) if values else None
    sd = statistics.stdev(values) if len(values) > 1 else None
    several = len(plan.seeds) > 1
    texts = list(dict.fromkeys(errors.values()))
    seeds = f"seed{'s' * (len(errors) > 1)} {', '.join(map(str, errors))}: " if several else ""
    error = f"{seeds}{texts[0]}" if texts else ""
    return Standing(number, plan.points[number], found, rung, mean, sd, error)


def spent(outcome: TrialOutcome, name: str) -> float:
    """One of COSTS, of a trial; 0 where it failed before its first row."""
    return cost(dict(outcome.row), name) if outcome.row else 0.0
