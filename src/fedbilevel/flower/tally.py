"""How many questions a client has answered, in all and in the round at hand."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tally:
    """Counts of a client's questions, whatever the run and whoever asks.

    Args:
        total: questions since the client began to count.
        run: the run of the last question.
        round: the largest round of that run that was asked about.
        in_round: questions since that round began; one about an earlier round counts here too, so that going back and
            forth between rounds gains nothing.
    """

    total: int = 0
    run: str = ""
    round: int = -1
    in_round: int = 0

    def __post_init__(self) -> None:
        kinds = [type(self.total), type(self.run), type(self.round), type(self.in_round)]
        if kinds != [int, str, int, int]:
            raise TypeError(f"{self} is no count of questions")

    def next(self, run: str, round: int) -> Tally:
        """The counts with one more question."""
        if run != self.run or round > self.round:
            return Tally(self.total + 1, run, round, 1)
        return replace(self, total=self.total + 1, in_round=self.in_round + 1)
