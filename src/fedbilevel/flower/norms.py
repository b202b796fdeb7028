"""How long an update may be, by what others of its kind are like: a bound that needs no number from anybody.

In each exchange, with ‖·‖ the Euclidean norm of a whole update, an answer u counts if

    ‖u‖ ≤ max(factor · median of the ‖u_j‖ here,  factor · median over earlier exchanges of the phase,  10 · ‖message‖)

Norms of 0 are left out of both medians: an update may rightly be 0 for most and not for one. The first median is of
what has come in, u included, where that is FEWEST or more; the second of the medians of the last WINDOW exchanges of
this process. Where neither is known nothing is refused. The message's norm is there for updates that are rounding
errors for most: what is no longer than some times the point itself cannot spoil it for good. It has a small factor of
its own, or one lie, which makes the next message longer, would make room for a larger one.

The factor is for what would end a run, and has to let pass whatever honest clients send. Labels dealt by Dirichlet's
0.05, digits, a client's own hypergradients (LFedNest): the longest was 1,020 times the median.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from fedbilevel.flower.wire import Refusal

FEWEST = 3
"""Norms of which the median is that of an honest client if one of them is not."""
WINDOW = 100  # exchanges of a phase
OF_MESSAGE = 10.0  # how many times as long as the message an update may be

log = logging.getLogger("fedbilevel.server")


class Norms:
    """What norms are usual, phase by phase.

    Args:
        factor: None refuses nothing.
    """

    def __init__(self, factor: float | None) -> None:
        self.factor = factor
        self.past: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self.told = False  # that nothing is known of some answer

    def check(self, phase: str, norm: float, here: Sequence[float], message: Callable[[], float]) -> None:
        """Refuse an update that is out of proportion.

        Args:
            norm: its own.
            here: the norms of all that came in, this one among them.
            message: the norm of what the client was sent; asked for only where it matters.

        Raises:
            Refusal: it is.
        """
        if self.factor is None:
            return
        usual = self.usual(phase, here)
        if usual is None:
            self.tell(phase, len(here))
        elif norm > self.factor * usual and norm > (bound := max(self.factor * usual, OF_MESSAGE * message())):
            text = f"its update has a norm of {norm:.3g}, where {usual:.3g} is usual"
            raise Refusal(f"{text} and {bound:.3g} the bound (norm_factor = {self.factor:g})")

    def usual(self, phase: str, here: Sequence[float]) -> float | None:
        """The larger one of the two medians, if any is known."""
        some, past = [norm for norm in here if norm > 0], self.past[phase]
        known = [statistics.median_low(some)] if len(some) >= FEWEST else []
        return max([*known, *([statistics.median_low(past)] if past else [])], default=None)

    def note(self, phase: str, accepted: Sequence[float]) -> None:
        """Remember an exchange by the answers that counted."""
        if some := [norm for norm in accepted if norm > 0]:
            self.past[phase].append(statistics.median_low(some))

    def tell(self, phase: str, answers: int) -> None:
        """Say, once, that an answer counts whatever its norm."""
        if not self.told:
            log.warning(
                "phase %s: %d answers, and none before: fewer than %d, so that nothing tells whether one is out of "
                "proportion. It counts; a number for norm_bound would be a bound here, too",
                *(phase, answers, FEWEST),
            )
            self.told = True


def ratios(norms: dict[int, float]) -> dict[int, float]:
    """How many times as long as usual each client's update is, among those of one exchange."""
    some = [norm for norm in norms.values() if norm > 0]
    usual = statistics.median_low(some) if some else math.inf
    return {client: norm / usual for client, norm in norms.items()}
