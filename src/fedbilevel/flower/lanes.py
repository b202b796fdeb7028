"""What a server remembers between asynchronous exchanges: `engines.queues`, where the clients are elsewhere."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fedbilevel.engines.costs import Sums
from fedbilevel.engines.virtual_time.in_flight import InFlight
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
    since: defaultdict[str, defaultdict[int, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    """By kind: client -> exchange of it in which it was last asked or, if that is later, handed in."""
    kept: dict[str, list[Arrival]] = field(default_factory=lambda: defaultdict(list))
    """By kind: answers that came in while another kind was waited for."""
    resumed: dict[str, tuple[Sums, float]] = field(default_factory=dict)
    """By kind: such ones, from before the run was stopped, summed, and Σ p_i·asked of them. Without their metrics."""

    @classmethod
    def of(cls, queues: InFlight | None) -> Lanes:
        """As a checkpoint has them."""
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
        """Whom an exchange waits for in any case: see `Fed.first`; `working` are those at work on this phase."""
        ages = {client: self.exchanges[phase] - self.since[phase][client] for client in clients}
        return {c for c, age in ages.items() if age > max_staleness or (c in working and age == max_staleness)}
