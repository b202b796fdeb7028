"""Let clients keep the outer variable x, if it has a block for each client.

The leaves of x have the shape (M, ...), with a block for each of M clients. A client's losses read only the client's
own block, and get it with leaves of shape (1, ...). The gradient of Σ p_i f_i in block i is p_i times the gradient of
client i. So the client can make the server's step on block i by itself, and no message needs to contain x or a gradient
in x.
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
    """Hold the block of x that a client keeps."""

    x: PyTree  # the block, with leaves of shape (1, ...)


def server_x(problem: Problem, x: PyTree) -> PyTree:
    """Return the part of x that the server holds: None if clients keep their blocks of x, and otherwise x."""
    return None if problem.local == "x" else x


def local_block(x: PyTree) -> PyTree:
    """Return a client's part of the starting x, which is the same for every client, with leaves of shape (1, ...)."""
    return jax.tree.map(lambda leaf: leaf[:1], x)


def gather_x(clients: PyTree) -> PyTree:
    """Return x, with leaves of shape (M, ...), from the blocks in the clients' states."""
    nodes = jax.tree.leaves(clients, is_leaf=lambda node: isinstance(node, LocalX))
    (blocks,) = (node.x for node in nodes if isinstance(node, LocalX))
    return jax.tree.map(lambda leaf: leaf[:, 0], blocks)


def check_split(clients: Clients, x: PyTree) -> None:
    """Refuse an x without a block for each client, and an x whose blocks differ.

    All clients start with the same block.
    """
    shapes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(x)}
    leading = f"a leading axis of length {len(clients)}, the number of clients"
    require(shapes == {(len(clients),)}, "Bilevel.local", "x", f"used only if every leaf of x0 has {leading}")
    same = all(bool(jnp.all(leaf == leaf[:1])) for leaf in jax.tree.leaves(x))
    require(
        same,
        "Bilevel.local",
        "x",
        "used only if all blocks of x0 are equal, since all clients start with the same block",
    )
