"""A client's state between rounds, saved in such a way that no message is ever applied twice."""

from __future__ import annotations

from typing import NamedTuple

from fedbilevel.core.tree import PyTree
from fedbilevel.flower.wire.layout import Refusal

Tag = tuple[int, int]
"""(round, exchange) of an answer; (-1, -1) before the first."""


class SavedState(NamedTuple):
    """A client's own state, tagged with the last message that changed it."""

    round: int
    exchange: int
    counted: Tag  # which answer `before` is the state after
    at_start: PyTree  # of that message's round, as the server had it: what was under way then had not counted
    before: PyTree  # that message
    now: PyTree

    def after(self, tag: Tag) -> PyTree:
        """The state after the client's last answer up to the one with this tag, or else the oldest state."""
        if (self.round, self.exchange) <= tag:
            return self.now
        return self.before if self.counted <= tag else self.at_start


def states_for(kept: SavedState | None, first: PyTree, round: int, counted: Tag, settled: Tag) -> tuple[PyTree, PyTree]:
    """The state from which the round is played again, should it be, and the one that its next message has to see.

    They are those after the client's last answers that counted when the round began and that count by now, which the
    server names in `settled` and `counted`. An answer that was lost, late or refused leaves no trace, a message that
    comes again sees what it saw the first time, and so does a round that a restarted server plays again. `first` is
    the state of a client that keeps nothing yet.

    Raises:
        Refusal: the round lies before the last one that was kept.
    """
    if kept is None:
        return first, first
    if round < kept.round:
        raise Refusal(f"this client's state is of round {kept.round}, and round {round} is over for it")
    return kept.after(settled), kept.after(counted)
