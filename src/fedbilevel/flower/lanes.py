"""What a server remembers between asynchronous exchanges: `engines.desk`, where the clients are elsewhere."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from fedbilevel.engines.book import Sums
from fedbilevel.engines.desk import Desk
from fedbilevel.flower.counting import Counted


class Arrival(NamedTuple):
    """An answer that counts."""

    client: int
    counted: Counted
    asked: int  # exchange of its kind in which the client was asked


@dataclass
class Lanes:
    """A kind of question is a phase that is asked by `first`."""

    exchanges: Counter[str] = field(default_factory=Counter)  # of each kind so far
    asked: dict[int, int] = field(default_factory=dict)  # client -> exchange of its kind in which it was asked last
    kept: dict[str, list[Arrival]] = field(default_factory=lambda: defaultdict(list))
    """By kind: answers that came in while another kind was waited for."""
    resumed: dict[str, tuple[Sums, float]] = field(default_factory=dict)
    """By kind: such ones, from before the run was stopped, summed, and Σ p_i·asked of them. Without their metrics."""

    @classmethod
    def of(cls, desk: Desk | None) -> Lanes:
        """As a checkpoint has them."""
        if desk is None:
            return cls()
        exchanges = Counter({phase: int(lane.exchanges) for phase, lane in desk.lanes.items()})
        early = {phase: (lane.early, float(lane.early_asked)) for phase, lane in desk.lanes.items()}
        resumed = {phase: (sums, asked) for phase, (sums, asked) in early.items() if sums.responders > 0}
        return cls(exchanges=exchanges, resumed=resumed)
