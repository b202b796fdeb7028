"""An outer variable that is split by client: every client keeps its own block and steps it by itself.

x has one block per client, its leaves (M, ...), and a client's losses read its own block alone, which they are given as
(1, ...). The gradient of Σ p_i f_i in block i is p_i times the client's own one, so the server's step on block i is one
that the client can make: neither x nor a gradient in x needs to be in any message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require
from fedbilevel.core.tree import PyTree

if TYPE_CHECKING:
    from fedbilevel.core.problem import Problem


class LocalX(NamedTuple):
    """What a client keeps where x is split by client."""

    x: PyTree  # its block, leaves (1, ...)


def server_x(problem: Problem, x: PyTree) -> PyTree:
    """The part of x that the server holds: None where every client keeps a block of its own, else x."""
    return None if problem.local == "x" else x


def local_block(x: PyTree) -> PyTree:
    """Leaves (1, ...): the block that every client starts with."""
    return jax.tree.map(lambda leaf: leaf[:1], x)


def gather_x(clients: PyTree) -> PyTree:
    """x, leaves (M, ...), from all that the clients keep, where each has a block."""
    nodes = jax.tree.leaves(clients, is_leaf=lambda node: isinstance(node, LocalX))
    (blocks,) = (node.x for node in nodes if isinstance(node, LocalX))
    return jax.tree.map(lambda leaf: leaf[:, 0], blocks)


def check_split(clients: Clients, x: PyTree) -> None:
    """Refuse an x that is not split by client, and blocks that differ: each client starts with what they share."""
    shapes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(x)}
    leading = f"where every leaf of x0 has a leading axis of {len(clients)}, the clients"
    require(shapes == {(len(clients),)}, "Bilevel.local", "x", f"given {leading}")
    same = all(bool(jnp.all(leaf == leaf[:1])) for leaf in jax.tree.leaves(x))
    require(same, "Bilevel.local", "x", "given where x0 is the same for every client: all start with the same block")
