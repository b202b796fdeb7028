"""Define the sections of a spec besides [task], [algorithm] and [clients]: their fields, defaults and checks.

Two sections have classes that are also used without a spec: [submodels] has `UnitPolicy`, and [clock] has `Clock`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedbilevel.algorithms.parts.memory import DELAY_PENALTY
from fedbilevel.algorithms.parts.robust import CentredClipping, Krum, Median, TrimmedMean
from fedbilevel.algorithms.parts.top_k import TopK
from fedbilevel.core.config import config, positive_integer
from fedbilevel.core.errors import ConfigurationError, is_number, require
from fedbilevel.core.privacy import Privacy, positive_below
from fedbilevel.core.submodel import UnitPolicy
from fedbilevel.core.tables import plain
from fedbilevel.engines.virtual_time import Clock


@config
class AsynchronousPlan:
    """The section [asynchronous]: whether exchanges end with the first replies, by some fields of `Asynchronous`.

    Args:
        wait_for: the number of replies for which an exchange waits; None: it waits for all replies.
        max_staleness, delay_penalty: see `fedbilevel.Asynchronous`.
    """

    wait_for: int | None = None
    max_staleness: int | None = None
    delay_penalty: float = DELAY_PENALTY

    def validate(self) -> None:
        if self.wait_for is None:
            allowed = "left out without asynchronous.wait_for, since then all replies are awaited"
            for name, default in (("max_staleness", None), ("delay_penalty", DELAY_PENALTY)):
                got = getattr(self, name)
                require(not got or got == default, f"asynchronous.{name}", got, allowed)


@config
class LayersPlan:
    """The section [layers]: how clients shorten their replies, and what the server takes in place of their mean.

    Args:
        compression: the part of each reply that is sent, {name = "top_k", share = 0.1}; None: whole replies.
        rule: a robust rule in place of the mean of replies, such as {name = "krum", bad = 1}; None: the mean.
    """

    compression: TopK | None = None
    rule: TrimmedMean | Median | Krum | CentredClipping | None = None


@config
class PrivacyPlan:
    """The section [privacy]: whether simulated clients reply under differential privacy, by some fields of `Privacy`.

    Args:
        clip, noise_multiplier, delta: see `fedbilevel.Privacy`. Give all of them or none; with none, replies are exact.
        budget: the largest ε that a client may spend. The run ends before a round in which a client would exceed it.
    """

    clip: float | None = positive_below(math.inf, default=None)
    noise_multiplier: float | None = positive_below(math.inf, default=None)
    delta: float | None = positive_below(1.0, default=None)
    budget: float | None = positive_below(math.inf, default=None)

    def validate(self) -> None:
        given = [name for name, value in plain(self).items() if value is not None]
        for name in ("clip", "noise_multiplier", "delta"):
            require(not given or name in given, f"privacy.{name}", None, f"given with privacy.{given and given[0]}")

    @property
    def terms(self) -> Privacy | None:
        """Return the terms of privacy of each client; None if replies are exact."""
        return None if self.clip is None else Privacy(**plain(self))


BUDGETS = ("exchanges", "bytes", "evaluations", "time")


def _budget(unit: str) -> Any:
    """Return a dataclass field for a positive number of a unit. Its default is None."""

    def prepare(name: str, value: Any) -> Any:
        require(value is None or (is_number(value) and value > 0), name, value, f"a positive number of {unit}")
        return value

    return field(default=None, metadata={"prepare": prepare})


@config
class RunPlan:
    """The section [run]: the length of a run, its cohort, and what is measured and written during the run.

    Args:
        rounds: the total number of rounds; None if there is a budget.
        exchanges: a budget in place of rounds. The run ends at the first row with at least this number of exchanges.
        bytes: a budget in place of rounds: the bytes of all messages, down and up, to and from all clients.
        evaluations: a budget in place of rounds: the batch gradients and hvps of all clients.
        time: a budget in place of rounds, in seconds of the clock.
        cohort: the number of clients per round; None: all clients.
        replacement: whether cohorts are drawn with replacement: a client may then take part several times in a round.
        pooled: whether a single client gets all samples; a warning says if this changes the problem that is solved.
        seed: the seed of the draws of cohorts and mini-batches (the task has a seed of its own).
        eval_every: the number of rounds between two rows of the history; None, with a budget: about fifty rows are
            made.
        checkpoint_every: the number of rounds between checkpoints. None: about one checkpoint per second, fewer if
            writing takes long; in a federation one per round.
        metrics_per_client: whether each row also has the task's metrics of single clients, such as the accuracy of the
            model on each client's own samples. The history gets their mean by the clients' weights (NAME.mean), their
            worst and best values, and their deciles. A federation whose server measures no metrics itself always
            measures them.
        best_by, on_divergence: see `fedbilevel.solve`.
        x_bounds: [low, high], the bounds of every entry of x; or a table with such a pair for some parts of x, by name.
            None: the bounds of the task.
    """

    rounds: int | None = positive_integer(default=300, optional=True)
    exchanges: int | None = positive_integer(default=None, optional=True)
    bytes: float | None = _budget("bytes")
    evaluations: float | None = _budget("gradients and hvps")
    time: float | None = _budget("seconds")
    cohort: int | None = positive_integer(default=None, optional=True)
    replacement: bool = False
    pooled: bool = False
    seed: int = 0
    eval_every: int | None = positive_integer(default=10, optional=True)
    checkpoint_every: int | None = positive_integer(default=None, optional=True)
    metrics_per_client: bool = False
    best_by: str | None = None
    on_divergence: Literal["stop", "shrink"] | None = None
    x_bounds: Sequence[float] | Mapping[str, Any] | None = None

    def validate(self) -> None:
        lengths = {name: getattr(self, name) for name in ("rounds", *BUDGETS)}
        given = [f"{name} = {value}" for name, value in lengths.items() if value is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise ConfigurationError(
                "a run ends after a number of rounds, exchanges, bytes, evaluations or seconds of the clock: "
                f"give one, not {got}"
            )
        allowed = f"a positive integer, unless run.{', run.'.join(BUDGETS[:-1])} or run.{BUDGETS[-1]} is given"
        require(self.rounds is None or self.eval_every is not None, "run.eval_every", None, allowed)
        drawn = not self.replacement or self.cohort is not None
        require(drawn, "run.replacement", True, "false without run.cohort, since then all clients take part")
        require(not self.pooled or self.cohort in (None, 1), "run.cohort", self.cohort, "none or 1 with run.pooled")
        bounds = {} if self.x_bounds is None else self.x_bounds
        for name, pair in (bounds if isinstance(bounds, Mapping) else {"": bounds}).items():
            listed = isinstance(pair, list | tuple) and len(pair) == 2 and all(map(is_number, pair))
            path = f"run.x_bounds.{name}".rstrip(".")
            require(listed and pair[0] < pair[1], path, pair, "[low, high], two numbers with low < high")

    @property
    def budget(self) -> tuple[str, float]:
        """Return the kind of the run's budget, which is "rounds" or one of BUDGETS, and its amount."""
        return next((name, value) for name in ("rounds", *BUDGETS) if (value := getattr(self, name)) is not None)


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The section [engine]: the engine of a simulation, by some fields of `fedbilevel.Local`, which describes them."""

    chunk: int | None = None
    devices: int | None = None
    stream: bool | None = None


PLANS: dict[str, Any] = {
    "asynchronous": AsynchronousPlan,
    "submodels": UnitPolicy,
    "layers": LayersPlan,
    "privacy": PrivacyPlan,
    "run": RunPlan,
    "engine": EnginePlan,
    "clock": Clock,
}
"""The class of each section, in the order of a spec."""
