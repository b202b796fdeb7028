"""What a client keeps between rounds, so that no message is ever applied twice."""

from __future__ import annotations

from typing import NamedTuple

from fedbilevel.core.tree import PyTree
from fedbilevel.flower.wire import Refusal


class Kept(NamedTuple):
    """A client's own state, tagged with the last message that changed it."""

    round: int
    exchange: int
    at_start: PyTree  # of that round
    before: PyTree  # that message
    now: PyTree


def states_for(kept: Kept | None, first: PyTree, round: int, exchange: int) -> tuple[PyTree, PyTree]:
    """The state at the start of `round` and the one that exchange `exchange` of it has to see.

    A message that comes again, or a round that a restarted server plays again, sees what it saw the first time.
    `first` is the state of a client that keeps nothing yet.

    Raises:
        Refusal: the round lies before the last one that was kept.
    """
    if kept is None:
        return first, first
    if round > kept.round:
        return kept.now, kept.now
    if round < kept.round:
        raise Refusal(f"this client's state is of round {kept.round}, and round {round} is over for it")
    if exchange > kept.exchange:
        return kept.at_start, kept.now
    return kept.at_start, kept.before if exchange == kept.exchange else kept.at_start
