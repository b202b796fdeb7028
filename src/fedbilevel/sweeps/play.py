"""The order in which a sweep plays its jobs: rung by rung, and in a rung one seed after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fedbilevel.sweeps.journal import Journal
from fedbilevel.sweeps.outcome import Sweep
from fedbilevel.sweeps.plan import Job, Plan, TrialOutcome
from fedbilevel.sweeps.standing import standing

PlayJobs = Callable[[Sequence[Job]], Iterable[tuple[Job, TrialOutcome]]]
"""Plays jobs of one rung, in any order, and hands out each outcome as soon as it is known: one job after the other, or
several in one program."""


def play(plan: Plan, run: PlayJobs, journal: Journal) -> Sweep:
    """Bring every job of a sweep to its end; those whose outcome is in the journal are not played again."""
    going = list(range(len(plan.points)))
    for rung in range(len(plan.rungs)):
        jobs = [Job(point, seed, rung) for seed in plan.seeds for point in going]
        for job, outcome in run([job for job in jobs if job not in journal.outcomes]):
            journal.append(job, outcome)
        going = best(plan, going, journal)
    return Sweep(plan, journal.outcomes)


def best(plan: Plan, points: Sequence[int], journal: Journal) -> list[int]:
    """The points that go on: one in `plan.halving` of them, the best; one at least, none where all failed."""
    found = [standing(plan, point, journal.outcomes) for point in points]
    scores = {one.number: one.mean for one in found if one.mean is not None}
    larger = Sweep(plan, journal.outcomes).larger_is_better
    ordered = sorted(scores, key=lambda point: scores[point], reverse=larger)
    return ordered[: max(1, len(points) // (plan.halving or 1))]
