"""What a run has cost so far, in exact integers on the host."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedbilevel.core.card import Card, Shown, counted, listed
from fedbilevel.core.renames import with_names_of_today
from fedbilevel.engines.clock import TICK
from fedbilevel.engines.round_costs import PART, ExchangeKind, RoundCosts
from fedbilevel.quoting import printable, require_object

_KINDS = {
    "exchanges_by_phase": "an object of whole numbers by phase",
    "epsilon": "a number",
    "delta": "a number",
    "flops": "a whole number or null",
    "virtual": "true or false",
}


@dataclass(repr=False)
class Ledger(Shown):
    """Totals since round 0; resuming continues them.

    An exchange is one message to each client of the cohort and one reply from each. `bytes_down` counts the arrays sent
    to all clients that were asked, `bytes_up` those of the replies that counted. `gradients` and `hvps` (products of a
    vector with second derivatives) count evaluations on a batch, summed over clients; one of a head counts as much as
    one of a whole network. `flops` are the floating-point operations (see flops.count) behind the replies that
    counted, None where they are not known.
    """

    COLUMNS: ClassVar = ("exchanges", "bytes_down", "bytes_up", "gradients", "hvps", "flops", "time")

    rounds: int = 0
    exchanges: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    replies: int = 0
    gradients: int = 0
    hvps: int = 0
    exchanges_by_phase: dict[str, int] = field(default_factory=dict)
    epsilon: float = 0.0  # the most that a client says to have spent of its differential privacy, at `delta`
    delta: float = 0.0
    ticks: int = 0  # that exchanges took
    flops: int | None = None  # 0 where a count begins
    virtual: bool = field(default=True, compare=False)  # whether the time is a simulation's, or a real clock's

    @classmethod
    def of(cls, fields: Any) -> "Ledger":
        """The ledger whose fields JSON holds, under names of today or of earlier versions.

        Raises:
            ValueError: a field is not one of a ledger's, or has another type.
        """
        known = [one.name for one in dataclasses.fields(cls)]
        require_object(fields, f"the totals of a ledger ({', '.join(known[:2])}, …)")
        fields = with_names_of_today(fields)
        if odd := [name for name in fields if name not in known]:
            raise ValueError(f"{printable(odd[0], 50)!r} is no total of a ledger, which are: {', '.join(known)}")
        made = cls(**fields)
        for name, value in vars(made).items():
            if name == "exchanges_by_phase":
                fits = isinstance(value, dict) and all(type(count) is int for count in value.values())
            elif name in ("epsilon", "delta"):
                fits = type(value) in (int, float)
            elif name == "virtual":
                fits = type(value) is bool
            else:
                fits = type(value) is int or (name == "flops" and value is None)
            if not fits:
                kind = _KINDS.get(name, "a whole number")
                raise ValueError(f"{name} of the ledger is {printable(repr(value))}, not {kind}")
        return made

    def add(self, round_costs: RoundCosts, rounds: int, costs: Mapping[ExchangeKind, int | None] | None = None) -> None:
        """Add the costs of some rounds, leaves (rounds,) or scalars; `costs`: what a client's reply costs, in flops."""
        self.rounds += rounds
        for (phase, down, up), calls in round_costs.calls.items():
            count, asked, answered = (_total(number) for number in calls)
            self.exchanges += count
            self.bytes_down += asked * down
            self.bytes_up += answered * up
            self.replies += answered
            cost = (costs or {}).get((phase, down, up))
            self.flops = None if self.flops is None or cost is None else self.flops + answered * cost
            if count:
                self.exchanges_by_phase[phase] = self.exchanges_by_phase.get(phase, 0) + count
        if round_costs.privacy is not None:
            self.epsilon, self.delta = (
                max(self.epsilon, round_costs.privacy[0]),
                max(self.delta, round_costs.privacy[1]),
            )
        self.gradients += _total(round_costs.gradients)
        self.hvps += _total(round_costs.hvps)
        whole, rest = np.asarray(round_costs.time).reshape(-1, 2).sum(axis=0, dtype=np.int64)
        self.ticks += int(whole) * PART + int(rest)

    def card(self) -> Card:
        phases = [f"{name} {count:,}" for name, count in self.exchanges_by_phase.items()]
        work = [counted(self.gradients, "gradient"), counted(self.hvps, "hvp")]
        each = f"{self.gradients_per_client:.3g} and {self.hvps_per_client:.3g} of a client in an exchange"
        lines = {
            "exchanges": f"{self.exchanges:,}" + (f": {listed(phases)}" if phases else ""),
            "traffic": f"{self.bytes_down / 1e6:,.3f} MB down, {self.bytes_up / 1e6:,.3f} MB up, the whole cohort's",
            "work": f"{', '.join(work)}; {each}" + ("" if self.flops is None else f"; {self.flops / 1e9:,.3g} GFLOP"),
            "virtual time" if self.virtual else "time": f"{self.time:,.1f} seconds",
        }
        if self.delta:
            lines["privacy"] = f"ε = {self.epsilon:.4g} at δ = {self.delta:g}, the most that a client spent"
        return Card(f"Costs of {counted(self.rounds, 'round')}", lines)

    def in_short(self) -> str:
        """The most important ones in a line."""
        traffic = f"{(self.bytes_down + self.bytes_up) / 1e6:,.1f} MB"
        work = f"{counted(self.gradients, 'gradient')}, {counted(self.hvps, 'hvp')}"
        return f"{counted(self.exchanges, 'exchange')}, {traffic}, {work}"

    def columns(self) -> dict[str, float | int]:
        """Of a row of the history; what is not known is left out."""
        values = {name: getattr(self, name) for name in self.COLUMNS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def time(self) -> float:
        """Seconds that exchanges took: virtual ones of a simulation's clock, real ones of a federation."""
        return self.ticks * TICK

    @property
    def gradients_per_client(self) -> float:
        """Gradients of the average participant, per exchange that it answered."""
        return self.gradients / max(self.replies, 1)

    @property
    def hvps_per_client(self) -> float:
        """Hvps of the average participant, per exchange that it answered."""
        return self.hvps / max(self.replies, 1)


def _total(counts: object) -> int:
    return int(np.sum(np.asarray(counts), dtype=np.int64))
