"""Noised replies that clients send as differences from their last one.

The difference of two noised answers is sent, not the noised difference of two answers: what the server has added up is
then each client's last answer with the noise of one, however many there were. All that leaves the client, and all that
it keeps, is made of answers that were clipped and noised, so that nothing more is spent.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from fedbilevel.core.answers import LastReply, ReplyDelta
from fedbilevel.core.tree import PyTree


def is_kept(part: object) -> bool:
    return isinstance(part, LastReply)


def without_answers(state: PyTree) -> PyTree:
    """The state as a phase has to see it, for its change to be the answer itself: the last ones are 0."""

    def emptied(part: Any) -> Any:
        return part._replace(update=jax.tree.map(np.zeros_like, part.update)) if is_kept(part) else part

    return jax.tree.map(emptied, state, is_leaf=is_kept)


def released(sent: PyTree, before: PyTree, after: PyTree) -> tuple[PyTree, PyTree]:
    """The update to send and the state to keep.

    Args:
        sent: the update, noised; a `ReplyDelta` has the reply itself.
        before: what the client kept, or None.
        after: what the phase, called with `without_answers(before)`, would keep.
    """
    if not isinstance(sent, ReplyDelta):
        return sent, after
    last: list[Any] = []

    def renewed(old: Any, new: Any) -> Any:
        if not is_kept(old):
            return new
        if int(new.exchange) == int(old.exchange):  # of another kind of answer
            return old
        last.append(old.update)
        return new._replace(update=sent.update)

    kept = jax.tree.map(renewed, before, after, is_leaf=is_kept)
    (old,) = last
    return sent._replace(update=optax.tree.sub(sent.update, jax.tree.map(np.asarray, old))), kept
