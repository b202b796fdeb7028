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
from typing import Any, NamedTuple

from fedbilevel.core.errors import ExchangeError, NonFiniteError
from fedbilevel.engines.engine import Carry
from fedbilevel.flower.server.exchange_log import ExchangeLog
from fedbilevel.flower.server.norm_bounds import ratios
from fedbilevel.flower.server.terms import Backoff, Terms

MOST = 3

log = logging.getLogger("fedbilevel.server")


class CorruptedStateError(ExchangeError):
    """Most clients of an exchange met numbers that are not finite, so that the state, not a client, must be at fault.

    Args:
        exchange: the number of the exchange within its round.
        carry: the last state that nothing is known against, if another than that of the round.
    """

    def __init__(self, text: str, exchange: int, carry: Any = None) -> None:
        super().__init__(text)
        self.exchange, self.carry = exchange, carry


class RoundSnapshot(NamedTuple):
    """Where a round began, and what its replies were like."""

    carry: Carry  # where it began
    asked: set[int]  # its cohort
    ratios: dict[int, float]  # of each client that counted: its longest update, in units of what was usual


class Rollback:
    """Repeats a round whose result is not finite, without the client whose update was the longest.

    It remembers the current round and the one before it, and which clients are left out when these are repeated.

    Args:
        stateful: whether clients keep a state between rounds, which goes back by one round alone.
        asynchronous: whether the algorithm is asynchronous; no round of it is repeated.
    """

    def __init__(
        self, terms: Terms, backoff: Backoff, exchange_log: ExchangeLog, *, stateful: bool, asynchronous: bool
    ) -> None:
        self.terms, self.backoff, self.exchange_log = terms, backoff, exchange_log
        self.stateful, self.asynchronous = stateful, asynchronous
        self.last: RoundSnapshot | None = None
        self.now: RoundSnapshot | None = None
        self.without: dict[int, set[int]] = {}  # round -> clients
        self.times = 0  # that a round was undone since the run last got on

    def begin(self, carry: Carry, asked: Iterable[int]) -> None:
        """Note that a round begins."""
        self.now = RoundSnapshot(carry, set(asked), {})

    def hear(self, norms: dict[int, float]) -> None:
        """Note the answers of an exchange, by their norms."""
        if self.now is not None:
            for client, ratio in ratios(norms).items():
                self.now.ratios[client] = max(ratio, self.now.ratios.get(client, 0.0))

    def end(self) -> None:
        """Note that the round counts."""
        self.last = self.now

    def back(self, error: CorruptedStateError | NonFiniteError) -> Carry:
        """The carry to go on from.

        Raises:
            CorruptedStateError, NonFiniteError: no round can be repeated. It is `error`, or one with the last good
                state.
        """
        spoiled = isinstance(error, CorruptedStateError)
        played = self.last if spoiled else self.now
        gone = self.stateful and isinstance(error, CorruptedStateError) and error.exchange > 0
        if played is None or gone or self.asynchronous:
            raise error
        round = int(played.carry.round)
        without = self.without.setdefault(round, set())
        left = {client: ratio for client, ratio in played.ratios.items() if client not in without}
        enough = len(played.asked - without) - 1 >= self.terms.needed(len(played.asked))
        if not left or not enough or self.times == MOST:
            tried = f" also without {named(sorted(without))}" if without else ""
            text = f"{error}; round {round}{tried} leads there, and the state before it is the last good one"
            raise CorruptedStateError(text, 0, played.carry) if spoiled else NonFiniteError(text)
        out = max(left, key=lambda client: (left[client], -client))
        self.times += 1
        without.add(out)
        self.backoff.failed(out, round + spoiled)
        text = (
            "round %d is undone (%s) and played again without client %d, whose update was %.3g times as long as usual"
        )
        log.warning(text, round, error, out, left[out])
        self.exchange_log.note({"round": round, "undone": str(error), "without": sorted(without)})
        return played.carry


def named(clients: Sequence[int]) -> str:
    return f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"
