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


Tag = tuple[int, int]
"""(round, exchange) of an answer."""


def states_for(kept: Kept | None, first: PyTree, round: int, counted: Tag) -> tuple[PyTree, PyTree]:
    """The state at the start of `round`, and the one that its next message has to see.

    That is the state after the client's last answer that counted, which the server names in `counted`; (-1, -1) where
    none has. An answer that was lost, late or refused leaves no trace, a message that comes again sees what it saw the
    first time, and so does a round that a restarted server plays again. `first` is the state of a client that keeps
    nothing yet.

    Raises:
        Refusal: the round lies before the last one that was kept.
    """
    if kept is None:
        return first, first
    if round < kept.round:
        raise Refusal(f"this client's state is of round {kept.round}, and round {round} is over for it")
    if (kept.round, kept.exchange) <= counted:
        state = kept.now
    else:  # that answer did not count; those of its round before it may have
        state = kept.before if counted >= (kept.round, 0) else kept.at_start
    return kept.at_start if round == kept.round else state, state
