"""A bound on the norm of updates, from the norms of other updates of the same phase: nobody has to give a number.

In each exchange, with ‖·‖ the Euclidean norm of a whole update, an answer u counts if

    ‖u‖ ≤ max(norm_factor · median of the ‖u_j‖ here,  norm_factor · median over earlier exchanges of the phase,
              message_factor · ‖message‖)

Norms of 0 are left out of both medians: an update may rightly be 0 for most and not for one. The first median is of
what has come in, u included, where that is FEWEST or more; the second of the medians of the last WINDOW exchanges of
this process. Where neither is known nothing is refused. The message's norm is there for updates that are rounding
errors for most: what is no longer than some times the point itself cannot spoil it for good. Its factor is a small one,
or one lie, which makes the next message longer, would make room for a larger one.

norm_factor is for what would end a run, and has to let pass whatever honest clients send. Labels dealt by Dirichlet's
0.05, digits, a client's own hypergradients (LFedNest): the longest was 1,020 times the median.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from fedbilevel.flower.server.terms import Terms
from fedbilevel.flower.wire.layout import Refusal

FEWEST = 3
"""Norms of which the median is that of an honest client if one of them is not."""
WINDOW = 100  # exchanges of a phase

log = logging.getLogger("fedbilevel.server")


class NormBounds:
    """Bounds on the norms of updates, phase by phase.

    Args:
        terms: their norm_factor and message_factor are used here; norm_bound is not.
    """

    def __init__(self, terms: Terms) -> None:
        self.factor, self.of_message = terms.norm_factor, terms.message_factor
        self.past: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self.warned = False  # that nothing is known of some update

    def check(self, phase: str, norm: float, here: Sequence[float], message: Callable[[], float]) -> None:
        """Refuse an update that is out of proportion.

        Args:
            norm: its own.
            here: the norms of all that came in, this one among them.
            message: the norm of what the client was sent; asked for only where it matters.

        Raises:
            Refusal: it is.
        """
        if self.factor is None or norm == 0:
            return
        usual = self.usual(phase, here)
        if usual is None:
            self.warn(phase, here)
        elif norm > self.factor * usual and norm > (bound := max(self.factor * usual, self.of_message * message())):
            text = f"its update has a norm of {norm:.3g}, where {usual:.3g} is usual and {bound:.3g} the bound"
            raise Refusal(f"{text} (norm_factor = {self.factor:g}, message_factor = {self.of_message:g})")

    def usual(self, phase: str, here: Sequence[float]) -> float | None:
        """The larger one of the two medians, if any is known."""
        some, past = [norm for norm in here if norm > 0], self.past[phase]
        known = [statistics.median_low(some)] if len(some) >= FEWEST else []
        return max([*known, *([statistics.median_low(past)] if past else [])], default=None)

    def note(self, phase: str, accepted: Sequence[float]) -> None:
        """Remember an exchange by the answers that counted."""
        if some := [norm for norm in accepted if norm > 0]:
            self.past[phase].append(statistics.median_low(some))

    def warn(self, phase: str, here: Sequence[float]) -> None:
        """Say, once, that an update counts whatever its norm."""
        if not self.warned:
            some = sum(norm > 0 for norm in here)
            log.warning(
                "phase %s: %d of %d answers %s not 0, where %d are needed to tell whether one is out of proportion, "
                "and no earlier exchange tells it. Each counts; a number for norm_bound would be a bound here, too",
                *(phase, some, len(here), "is" if some == 1 else "are", FEWEST),
            )
            self.warned = True


def ratios(norms: dict[int, float]) -> dict[int, float]:
    """How many times as long as usual each client's update is, among those of one exchange."""
    some = [norm for norm in norms.values() if norm > 0]
    usual = statistics.median_low(some) if some else math.inf
    return {client: norm / usual for client, norm in norms.items()}
