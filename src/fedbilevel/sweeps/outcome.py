"""What came of a sweep: its points in order, the best of them, and what it cost in all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedbilevel.core.card import Card, Shown, counted, shortened
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.metrics import text
from fedbilevel.engines.history import data_frame
from fedbilevel.sweeps.picture import sweep_figure
from fedbilevel.sweeps.plan import Job, Plan, Standing, TrialOutcome, measured_on_test, spent, standing


@dataclass(repr=False)
class Sweep(Shown):
    """A sweep that has come to its end.

    Attributes:
        plan: what was tried.
        outcomes: of every job, the rungs before the last included.
        made: what was made of each point, such as its algorithm; an error where the point was refused.
    """

    plan: Plan
    outcomes: Mapping[Job, TrialOutcome]
    made: Sequence[Any] = field(default_factory=list)

    @property
    def standings(self) -> list[Standing]:
        """The points, best first; those that came further before the others, those that failed last."""
        found = [standing(self.plan, number, self.outcomes) for number in range(len(self.plan.points))]
        sign = -1 if self.larger_is_better else 1

        def key(one: Standing) -> tuple[bool, int, float, int]:
            return one.mean is None, -one.rung, sign * (one.mean or 0.0), one.number

        return sorted(found, key=key)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One table row for each point, best first: the swept fields, the metric's mean over the seeds, its sample
        standard deviation "sd", the mean "rounds" and "exchanges", and "error", empty unless the point failed."""
        return [
            {
                **one.values,
                self.plan.select: one.mean,
                "sd": one.sd,
                "rounds": one.cost("rounds"),
                "exchanges": one.cost("exchanges"),
                "error": one.error,
            }
            for one in self.standings
        ]

    @property
    def winner(self) -> Standing | None:
        """The best point; None where all failed."""
        first = self.standings[0]
        return first if first.mean is not None else None

    @property
    def best(self) -> dict[str, Any]:
        """The values of the best point.

        Raises:
            ConfigurationError: every point failed.
        """
        return dict(self._winner().values)

    @property
    def algorithm(self) -> Any:
        """The algorithm with the values of the best point.

        Raises:
            ConfigurationError: every point failed.
        """
        return self.made[self._winner().number]

    def _winner(self) -> Standing:
        if self.winner is None:
            raise ConfigurationError(f"none of {counted(len(self.plan.points), 'point')} is best, since all failed")
        return self.winner

    @property
    def larger_is_better(self) -> bool:
        """Whether a larger value of the metric is better."""
        return any(one.larger_is_better for one in self.outcomes.values())

    @property
    def trials(self) -> int:
        """How many runs were begun: points times seeds, those that failed included."""
        return len({(job.point, job.seed) for job in self.outcomes})

    @property
    def failed(self) -> int:
        return len({(job.point, job.seed) for job, one in self.outcomes.items() if one.error})

    def spent(self, name: str) -> float:
        """One of COSTS, as a sum over all trials."""
        return sum(spent(self.outcomes[job], name) for job in self.last_jobs)

    @property
    def last_jobs(self) -> list[Job]:
        """Each trial at the last rung that it reached, by point and seed."""
        last = {(job.point, job.seed): job for job in sorted(self.outcomes, key=lambda job: job.rung)}
        return [last[trial] for trial in sorted(last)]

    @property
    def chosen_on(self) -> str:
        """The metric that chose, which way is better, and a warning where it was measured on test data."""
        way = "larger" if self.larger_is_better else "smaller"
        return f"{self.plan.select}, {way} is better{', SELECTED ON TEST DATA' * measured_on_test(self.plan.select)}"

    @property
    def effort(self) -> str:
        """The number of trials and what they cost, in a sentence that papers can quote."""
        points, seeds = len(self.plan.points), len(self.plan.seeds)
        halved = f", of which one in {self.plan.halving} goes on at each rung" if self.plan.halving else ""
        made = f"{counted(points, 'point')} × {counted(seeds, 'seed')}{halved}"
        failed = f", {self.failed:,} failed" if self.failed else ""
        in_all = f"in all {self.spent('rounds'):,.0f} rounds, {self.spent('exchanges'):,.0f} exchanges"
        return f"{counted(self.trials, 'trial')} ({made}){failed}; {in_all}"

    def card(self) -> Card:
        select, best = self.plan.select, self.winner
        spread = f" ± {text(select, best.sd)} over the seeds" if best and best.sd is not None else ""
        lines = {
            "best": best.in_words if best else "none: every point failed",
            select: f"{text(select, best.mean)}{spread}" if best else "–",
            "chosen on": self.chosen_on,
            "trials": self.effort,
            "more": "rows, best, algorithm, to_pandas(), plot()",
        }
        return Card(f"Sweep over {', '.join(self.plan.fields)}", lines)

    def _title(self) -> str:
        best = f"best: {self.winner.in_words}" if self.winner else "every point failed"
        return f"{shortened(best, 90)}\n{counted(self.trials, 'trial')}, {self.chosen_on}"

    def to_pandas(self) -> Any:
        """A pandas.DataFrame of `rows`.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        return data_frame(self.rows)

    def plot(self, size: tuple[float, float] | None = None) -> Any:
        """Draw the metric against the swept fields; the Matplotlib figure, of `size` (width, height) in inches.

        One field gives a line with the spread over seeds, two give a map of colours, more a panel each.

        Raises:
            ConfigurationError: Matplotlib is not installed.
        """
        return sweep_figure(self.plan, self.standings, self._title(), size, larger=self.larger_is_better)
