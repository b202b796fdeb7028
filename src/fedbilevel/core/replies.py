"""What parts of an update are, for clients whose replies are clipped and noised: see docs/explanation/privacy.md.

Without privacy the marks change nothing. Both sides have them from the algorithm's own code, and the contract of a
federation shows them as parts of the paths; no message decides what a client noises.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.core.tree import PyTree


class Public(NamedTuple):
    """A part of an update that says nothing of the client's data: it is sent as it is, neither clipped nor noised.

    Only for what would be the same with any other data, of any number of samples: counts that the server's messages and
    the algorithm's fields determine.

    Args:
        public: the part of the update, a pytree.
    """

    public: Any


class Withheld(NamedTuple):
    """A part of an update that tells of the data, and that noise would make useless: under privacy zeros are sent.

    For diagnostics of which 0 means that nothing was met; a method must not rely on them to be right.

    Args:
        withheld: the part of the update, a pytree.
    """

    withheld: Any


class LastReply(NamedTuple):
    """A client's own last reply to a phase, which it keeps. Under privacy that is what it sent."""

    update: PyTree
    exchange: Array  # of that phase, in which it was asked for; -1 before the first

    @classmethod
    def none(cls, like: PyTree) -> "LastReply":
        """Before the first, of an update with the shapes of `like`."""
        return cls(jax.tree.map(jnp.zeros_like, like), jnp.asarray(-1, jnp.int32))


class ReplyDelta(NamedTuple):
    """What a client sends in place of a reply: the difference to its last one. The server adds the sums up.

    `joins` and `exchanges` are public: the server knows whose replies have counted and what it asked when.
    """

    update: PyTree  # u − the last u; under privacy u is clipped and noised first, so that noise does not add up
    joins: Public  # 1 in the first reply, then 0
    exchanges: Public  # t − the last t

    @classmethod
    def since(cls, last: LastReply, update: PyTree, exchange: Array) -> tuple["ReplyDelta", LastReply]:
        """From the last reply to this one, asked for in that exchange, and what to keep now."""
        joins, exchanges = (last.exchange < 0).astype(float), (exchange - last.exchange).astype(float)
        change = optax.tree.sub(update, last.update)
        return cls(change, Public(joins), Public(exchanges)), LastReply(update, exchange)
