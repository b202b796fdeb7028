"""The server's memory between asynchronous exchanges, by phase."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fedbilevel.engines.costs import Sums
from fedbilevel.engines.virtual_time.in_flight import InFlight
from fedbilevel.flower.server.replies import CheckedReply


class CountedReply(NamedTuple):
    """A reply that counts in an exchange."""

    client: int
    checked: CheckedReply
    asked: int  # exchange of its kind in which the client was asked


@dataclass
class PhaseQueues:
    """The exchanges so far of each phase that is asked by `Fed.first`, and replies that wait for its next exchange."""

    exchanges: Counter[str] = field(default_factory=Counter)  # of each kind so far
    since: defaultdict[str, defaultdict[int, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    """Phase -> client -> exchange of the phase in which it was last asked or, if that is later, replied."""
    kept: dict[str, list[CountedReply]] = field(default_factory=lambda: defaultdict(list))
    """Phase -> replies that came in while another phase was waited for."""
    resumed: dict[str, tuple[Sums, float]] = field(default_factory=dict)
    """Phase -> the weighted sums of kept replies that a checkpoint has, and their Σ p_i·asked; metrics are not kept."""

    @classmethod
    def of(cls, queues: InFlight | None) -> PhaseQueues:
        """The queues that a checkpoint has; empty ones for None."""
        if queues is None:
            return cls()
        exchanges = Counter({phase: int(lane.exchanges) for phase, lane in queues.lanes.items()})
        early = {phase: (lane.early, float(lane.early_asked)) for phase, lane in queues.lanes.items()}
        resumed = {phase: (sums, asked) for phase, (sums, asked) in early.items() if sums.responders > 0}
        lanes = cls(exchanges=exchanges, resumed=resumed)
        for phase, lane in queues.lanes.items():
            lanes.since[phase] |= dict(enumerate(lane.since.tolist()))
        return lanes

    def overdue(self, phase: str, clients: Iterable[int], working: Container[int], max_staleness: int) -> set[int]:
        """The clients that an exchange must wait for (see `Fed.first`); `working`: those at work on this phase."""
        ages = {client: self.exchanges[phase] - self.since[phase][client] for client in clients}
        return {c for c, age in ages.items() if age > max_staleness or (c in working and age == max_staleness)}
