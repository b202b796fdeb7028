"""The server's rules: when an exchange counts, and when a client that failed is asked again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedbilevel.core.errors import require, require_count

LONGEST_REST = 32  # rounds


@dataclass(frozen=True, kw_only=True)
class Terms:
    """When an exchange counts.

    Args:
        quorum: the share of a cohort that must answer, 0 < quorum ≤ 1.
        deadline: seconds that a client has for an answer, the way there and back included.
        attempts: how often those who have not answered are asked, before the run stops below its quorum.
        join: seconds to wait for clients that are not online, at the start and before another attempt.
        norm_factor: how many times as long as usual an update may be (see norm_bounds.py); None sets no such bound.
        message_factor: how many times as long as the message that was sent an update may be in any case but that of
            norm_bound: what norm_factor would refuse counts up to there.
        norm_bound: the largest Euclidean norm that an update may have, in any case; None sets no bound.
        poll: seconds between two looks for answers, at most.
    """

    quorum: float = 0.5
    deadline: float = 120.0
    attempts: int = 3
    join: float = 60.0
    norm_factor: float | None = 1e4
    message_factor: float = 10.0
    norm_bound: float | None = None
    poll: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.quorum <= 1, "Terms.quorum", self.quorum, "above 0 and at most 1")
        require_count("Terms.attempts", self.attempts)
        for name in ("deadline", "join", "poll"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"Terms.{name}", value, "a positive number of seconds")
        factor, bound = self.norm_factor, self.norm_bound
        require(factor is None or 1 <= factor < math.inf, "Terms.norm_factor", factor, "1 or more, or None")
        of_message = self.message_factor
        positive = isinstance(of_message, int | float) and 0 < of_message < math.inf
        require(positive, "Terms.message_factor", of_message, "a positive number")
        require(bound is None or 0 < bound < math.inf, "Terms.norm_bound", bound, "positive, or None")

    def needed(self, cohort: int) -> int:
        """How many answers an exchange needs."""
        return max(1, math.ceil(self.quorum * cohort - 1e-9))


class Backoff:
    """Exponential backoff: a client that fails in round t is asked again in t + 1, then, should it fail once more, 2
    rounds after that, then 4, …, at most LONGEST_REST, until it answers."""

    def __init__(self) -> None:
        self.until: dict[int, tuple[int, int]] = {}  # client -> (first round it is asked again, failures in a row)

    def resting(self, client: int, round: int) -> bool:
        return client in self.until and round < self.until[client][0]

    def failed(self, client: int, round: int) -> None:
        back, failures = self.until.get(client, (0, 0))
        if round >= back:  # several failures in one round are one
            rest = min(2**failures, LONGEST_REST)
            self.until[client] = (round + rest, failures + 1)

    def answered(self, client: int) -> None:
        self.until.pop(client, None)
