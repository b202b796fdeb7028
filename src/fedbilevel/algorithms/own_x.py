"""An outer variable that is split by client: every client keeps its own block, and steps it by itself.

x has one block per client, its leaves (M, ...), and a client's losses read its own block alone (and take that alone,
too, as (1, ...)). The gradient of Σ p_i f_i in block i is p_i times the client's own one, so the server's step of block
i is one that the client can take: neither x nor a gradient in x needs to be in any message.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import require
from fedbilevel.core.tree import PyTree, move


def own_block(x: PyTree) -> PyTree:
    """Leaves (1, ...): the block that every client starts with."""
    return jax.tree.map(lambda leaf: leaf[:1], x)


def stepped(block: PyTree, lr: Any, weight: Array, gradient: PyTree) -> PyTree:
    """A client's block after the step that a server would make with it: of size lr, on the weighted loss p_i f_i."""
    return move(block, -lr * weight, gradient)


def together(blocks: PyTree) -> PyTree:
    """x, from the blocks that clients keep: leaves (M, 1, ...) to (M, ...)."""
    return jax.tree.map(lambda leaf: leaf[:, 0], blocks)


def check_own_x(field: str, clients: Clients, x: PyTree) -> None:
    """Refuse an x that is not split by client, and blocks that differ: each client starts with what they share."""
    shapes = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(x)}
    split = shapes == {(len(clients),)}
    require(split, field, True, f"False, unless all leaves of x0 have a leading axis of {len(clients)}, the clients")
    same = all(bool(jnp.all(leaf == leaf[:1])) for leaf in jax.tree.leaves(x))
    require(same, field, True, "False, unless x0 is the same for every client: all start with the same block")
