"""Going back: a round whose result nobody can compute with is played again, without the client that stood out in it.

What shows it: after a round that counted, most of those who are asked next say that numbers are not finite, and too few
answer; or the sum of finite answers is not finite itself. The server then goes back to where that round began, leaves
out the client whose update was the longest in proportion to the others of its exchange, and plays it again, MOST times
at most before the run ends. The state that it went back to is then what is saved.

Not undone: rounds of asynchronous methods; the round before one of which clients have already changed what they keep
(they can go back by one round alone); one that was played before the server was restarted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fedbilevel.core.errors import ExchangeError, NonFiniteError
from fedbilevel.engines.engine import Carry
from fedbilevel.flower.norms import ratios

if TYPE_CHECKING:
    from fedbilevel.flower.engine import FlowerRun

MOST = 3

log = logging.getLogger("fedbilevel.server")


class SpoiledError(ExchangeError):
    """Most of those who were asked met numbers that are not finite: that speaks of the state, not of them.

    Args:
        exchange: the number of the exchange within its round.
        carry: the last state that nothing is known against, if another than that of the round.
    """

    def __init__(self, text: str, exchange: int, carry: Any = None) -> None:
        super().__init__(text)
        self.exchange, self.carry = exchange, carry


class Played(NamedTuple):
    """A round that was begun."""

    carry: Carry  # where it began
    asked: set[int]  # its cohort
    ratios: dict[int, float]  # of each client that counted: its longest update, in units of what was usual


class Undoing:
    """The round that is played and the one before it, and who must not take part when they are played again."""

    def __init__(self, run: FlowerRun) -> None:
        self.run = run
        self.last: Played | None = None
        self.now: Played | None = None
        self.without: dict[int, set[int]] = {}  # round -> clients
        self.times = 0  # that a round was undone since the run last got on

    def begin(self, carry: Carry, asked: Iterable[int]) -> None:
        """Note that a round begins."""
        self.now = Played(carry, set(asked), {})

    def hear(self, norms: dict[int, float]) -> None:
        """Note the answers of an exchange, by their norms."""
        if self.now is not None:
            for client, ratio in ratios(norms).items():
                self.now.ratios[client] = max(ratio, self.now.ratios.get(client, 0.0))

    def end(self) -> None:
        """Note that the round counts."""
        self.last = self.now

    def back(self, error: SpoiledError | NonFiniteError) -> Carry:
        """Where to go on from.

        Raises:
            SpoiledError, NonFiniteError: nowhere, the error that came or, with the last good state, one like it.
        """
        spoiled = isinstance(error, SpoiledError)
        played = self.last if spoiled else self.now
        gone = self.run.contract.state is not None and isinstance(error, SpoiledError) and error.exchange > 0
        if played is None or gone or self.run.algorithm.asynchronous:
            raise error
        round = int(played.carry.round)
        without = self.without.setdefault(round, set())
        left = {client: ratio for client, ratio in played.ratios.items() if client not in without}
        enough = len(played.asked - without) - 1 >= self.run.terms.needed(len(played.asked))
        if not left or not enough or self.times == MOST:
            tried = f" also without {named(sorted(without))}" if without else ""
            text = f"{error}; round {round}{tried} leads there, and the state before it is the last good one"
            raise SpoiledError(text, 0, played.carry) if spoiled else NonFiniteError(text)
        out = max(left, key=lambda client: (left[client], -client))
        self.times += 1
        without.add(out)
        self.run.rests.failed(out, round + spoiled)
        text = (
            "round %d is undone (%s) and played again without client %d, whose update was %.3g times as long as usual"
        )
        log.warning(text, round, error, out, left[out])
        self.run.exchange_log.note({"round": round, "undone": str(error), "without": sorted(without)})
        return played.carry


def named(clients: Sequence[int]) -> str:
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"
