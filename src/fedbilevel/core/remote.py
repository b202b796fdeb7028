"""Clients somewhere else, as a server knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fedbilevel.core.card import Card, Shown, counted, listed, named_shape
from fedbilevel.core.client import Clients, checked_capacity, checked_local_steps, checked_weights, terms_in_words
from fedbilevel.core.errors import require_count
from fedbilevel.core.tree import PyTree


@dataclass(frozen=True, init=False, repr=False)
class RemoteClients(Shown):
    """A population whose samples are out of reach: how many clients, and what one sample looks like.

    Args:
        count: M, the number of clients.
        outer: an example of a client's samples of the outer loss: a pytree with leaves (any number, ...), of which
            only shapes and dtypes are looked at.
        inner: an example of a client's samples of the inner loss, in the same form; None where both losses read the
            same samples.
        weights: p_i > 0, (M,), normalised to sum 1; None gives 1/M each.
        local_steps: how many local steps a client makes: None (the algorithm's own number), (M,) integers, or
            (low, high): drawn uniformly, both included, for each client and round.
        capacity: (M,) the share of the model's units that each client can hold, above 0 and up to 1; None: all.
    """

    outer: PyTree
    inner: PyTree
    weights: np.ndarray
    local_steps: np.ndarray | tuple[int, int] | None
    capacity: np.ndarray | None

    def __init__(
        self,
        count: int,
        outer: PyTree,
        inner: PyTree = None,
        *,
        weights: Any = None,
        local_steps: Any = None,
        capacity: Any = None,
    ) -> None:
        require_count("RemoteClients.count", count)
        example = jax.tree.map(_one_sample, outer)
        object.__setattr__(self, "outer", example)
        object.__setattr__(self, "inner", example if inner is None else jax.tree.map(_one_sample, inner))
        object.__setattr__(self, "weights", checked_weights("RemoteClients.weights", weights, count))
        object.__setattr__(self, "local_steps", checked_local_steps("RemoteClients.local_steps", local_steps, count))
        object.__setattr__(self, "capacity", checked_capacity("RemoteClients.capacity", capacity, count))

    @classmethod
    def of(cls, clients: Clients) -> RemoteClients:
        """A `RemoteClients` with the count, shapes, weights, local steps and capacities of simulated clients."""
        outer, inner = clients.examples()
        one = clients.inner is clients.outer
        known = {"local_steps": clients.local_steps, "capacity": clients.capacity}
        made = cls(len(clients), outer, None if one else inner, **known)
        object.__setattr__(made, "weights", clients.weights)  # to the last bit
        return made

    def __len__(self) -> int:
        return len(self.weights)

    def card(self) -> Card:
        examples = {"outer samples": _in_words(self.outer), "inner samples": _in_words(self.inner)}
        return Card(f"{counted(len(self), 'client')}, elsewhere", examples | terms_in_words(self))

    def examples(self) -> tuple[PyTree, PyTree]:
        """One sample's shapes for each loss, leaves (1, ...)."""
        return self.outer, self.inner


def _in_words(example: PyTree) -> str:
    leaves = jax.tree_util.tree_leaves_with_path(example)
    return f"each {listed([named_shape(path, leaf, axes_left_out=1) for path, leaf in leaves])}"


def _one_sample(leaf: Any) -> jax.ShapeDtypeStruct:
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return jax.ShapeDtypeStruct((1, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype))
