"""What a sweep tries, how it chooses, and how a point did: points, seeds, the metric, and the rungs of the budget."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedbilevel.core.errors import ConfigurationError, FedbilevelError, is_count, require, unknown
from fedbilevel.engines.checkpoint import exist
from fedbilevel.engines.history import History, Row
from fedbilevel.engines.result import Result, cost, last_row

T = TypeVar("T")
PointValues = Mapping[str, Any]
"""The values of the swept fields, by their dotted paths, as JSON can hold them."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is tried, and how the best is chosen.

    Args:
        points: each is played with every seed.
        seeds: all different.
        select: the column of the history whose last value decides, as a mean over the seeds.
        on_test: whether `select` may be measured on test data.
        halving: None plays every point to its end. A number k plays all points for a part of the budget, the best k-th
            of them for k times as much, and so on; the last rung is the whole budget.
    """

    points: Sequence[PointValues]
    seeds: Sequence[int]
    select: str
    on_test: bool = False
    halving: int | None = None

    def __post_init__(self) -> None:
        require(bool(self.points), "points", list(self.points), "one or more")
        require_seeds(self.seeds)
        if self.halving is not None:
            fits = is_count(self.halving) and self.halving >= 2
            require(fits, "halving", self.halving, "a whole number of at least 2: of so many points one goes on")
            fewer = f"at most {len(self.points)}, the number of points"
            require(self.halving <= len(self.points), "halving", self.halving, fewer)

    @property
    def rungs(self) -> list[float]:
        """The shares of the budget at which points are compared; the last is 1."""
        if self.halving is None:
            return [1.0]
        count = round_down_log(len(self.points), self.halving)
        return [float(self.halving) ** (rung - count) for rung in range(count + 1)]

    @property
    def fields(self) -> list[str]:
        return list(dict.fromkeys(name for point in self.points for name in point))


def require_seeds(seeds: Sequence[int]) -> None:
    """Refuse no seeds, one that is given twice, and what is no seed."""
    fits = not isinstance(seeds, str) and len(seeds) > 0
    fits = fits and all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds) and len(set(seeds)) == len(seeds)
    require(fits, "seeds", seeds, "one or more whole numbers, all different")


def round_down_log(number: int, base: int) -> int:
    """The largest k with base^k <= number, without the error of a floating logarithm."""
    power = 0
    while base ** (power + 1) <= number:
        power += 1
    return power


def product(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values of some fields; the last field changes first.

    Raises:
        ConfigurationError: there are no fields, a field has no values, or one twice.
    """
    require(bool(axes), "grid", dict(axes), "one field or more, with their values")
    for name, values in axes.items():
        some = isinstance(values, Collection) and not isinstance(values, str | Mapping) and len(values) > 0
        require(some, f"grid of {name}", values, "a list of one value or more")
        plain = [value.tolist() if hasattr(value, "tolist") else value for value in values]  # NumPy's and JAX's
        for i, value in enumerate(plain):
            if any(value is other or (value == other) is True for other in plain[:i]):
                raise ConfigurationError(f"grid of {name}: {value!r} is there twice")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def require_apart(paths: Mapping[str, str]) -> None:
    """Refuse names of swept fields, in their order, with their full paths, of which one replaces another's values."""
    for (name, path), (other, there) in itertools.combinations(paths.items(), 2):
        if path == there:
            raise ConfigurationError(f"{name} and {other} are one field: name it once, with all its values")
        if path.startswith(f"{there}."):
            raise ConfigurationError(
                f"{name} is a part of {other}, whose values would replace its own: name {other} first, or one of them"
            )


def made(points: Sequence[PointValues], make: Callable[[PointValues], T]) -> list[T | FedbilevelError]:
    """What `make` gives for each point, or the error with which it refuses the point.

    Raises:
        ConfigurationError: a value is refused in every point that has it: a slip, rather than an unlucky combination.
    """
    out: list[T | FedbilevelError] = []
    for point in points:
        try:
            out.append(make(point))
        except ConfigurationError as error:
            out.append(error)
    for name, value in dict.fromkeys((name, repr(value)) for point in points for name, value in point.items()):
        of_value = [one for one, point in zip(out, points, strict=True) if repr(point.get(name)) == value]
        if all(isinstance(one, FedbilevelError) for one in of_value):
            raise next(one for one in of_value if isinstance(one, FedbilevelError))
    return out


ORDINARY = re.compile(
    "(at|con|de|pro)test|testament|testimon.*|testost.*|"
    "(brigh|fas|fit|flat|grea|hot|la|ligh|nea|quie|shor|sligh|smar|sof|stric|tigh)test"
)
"""Words with "test" in them that say nothing of test data."""


def measured_on_test(metric: str) -> bool:
    """Whether a metric's name says that it is measured on test data: a word of it begins or ends with "test", as in
    test_accuracy, testAccuracy, acc_on_tests, test2, and is no ordinary word such as "fastest"."""
    words = [word.lower().removesuffix("s") for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", metric)]
    return any(word.startswith("test") or word.endswith("test") for word in words if not ORDINARY.fullmatch(word))


def require_holdout(select: str, on_test: bool, advice: str) -> None:
    """Refuse to choose by test data, unless that is said explicitly; `advice` says what to do."""
    if measured_on_test(select) and not on_test:
        raise ConfigurationError(
            f"{select} is measured on test data: chosen by it, a setting looks better than it is. {advice}"
        )


def require_known(select: str, metrics: Collection[str]) -> None:
    """Refuse a metric that is not measured."""
    if select not in metrics:
        raise unknown("metric to select on", select, metrics)


@dataclass(frozen=True)
class Job:
    """A point with a seed, to be played up to a rung."""

    point: int
    seed: int
    rung: int


@dataclass(frozen=True)
class TrialOutcome:
    """What came of a job.

    Attributes:
        row: the last row of its history; empty where it failed before its first.
        larger_is_better: of the metric that is selected on.
        error: why it failed; empty where it did not.
    """

    row: Mapping[str, float] = field(default_factory=dict)
    larger_is_better: bool = False
    error: str = ""

    @classmethod
    def of(cls, history: History, select: str) -> TrialOutcome:
        """The outcome of a run that came to its end, without the seconds of this machine, which differ each time.

        Where the metric is NaN or infinite, that is a failure.
        """
        require_known(select, history.rows[-1])
        row = {name: value for name, value in history.rows[-1].items() if name != "seconds"}
        error = "" if math.isfinite(row[select]) else f"{select} is {row[select]}"
        return cls(row, history.larger_is_better(select), error)

    @classmethod
    def failed(cls, error: Exception, row: Row) -> TrialOutcome:
        """The outcome of a run that failed after this row of its history, which says what it had cost by then."""
        return cls({name: value for name, value in row.items() if name != "seconds"}, error=str(error))


class LastRow:
    """A callback that knows the last row of a trial: of the run itself, and before it has one, of the checkpoint from
    which it goes on.

    When a checkpoint is written depends on the clock, and rows do not: so neither does what a failed trial has cost.

    Attributes:
        row: empty before the first.
    """

    def __init__(self, checkpoint: Path | None) -> None:
        self.row: Row = last_row(checkpoint) if checkpoint is not None and exist(checkpoint) else {}

    def __call__(self, result: Result, row: Row | None) -> None:
        self.row = row or self.row


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
