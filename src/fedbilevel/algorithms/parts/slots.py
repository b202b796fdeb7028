"""Hold the states of layers together with the state of their method, on the server and at each client.

Each layer that has a state has a slot. If no layer has a state, the method's own state stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from fedbilevel.core.tree import PyTree

Slots = dict[str, Any]
"""The kind of a layer -> its state."""


class LayeredState(NamedTuple):
    """Hold the server's state if layers have a state on the server: the method's own, and the layers'."""

    inside: Any
    slots: Slots

    @property
    def x(self) -> PyTree:
        return self.inside.x

    @property
    def y(self) -> PyTree:
        return self.inside.y


class At(NamedTuple):
    """Hold the point at which the hypergradient is estimated, in place of the server's state."""

    x: PyTree
    y: PyTree


class LayeredClient(NamedTuple):
    """Hold a client's state if layers have a state at clients: the method's own, and the layers'."""

    inside: PyTree
    slots: Slots


def server_parts(state: Any) -> LayeredState:
    """Return the method's state and the layers' slots on the server."""
    return state if isinstance(state, LayeredState) else LayeredState(state, {})


def client_parts(state: PyTree) -> LayeredClient:
    """Return the method's state and the layers' slots at a client."""
    return state if isinstance(state, LayeredClient) else LayeredClient(state, {})


def with_slot(slots: Slots, kind: str, slot: Any) -> Slots:
    """Return the slots with `slot` as the state of the layer of this kind; if `slot` is None, they do not change."""
    return slots if slot is None else {**slots, kind: slot}


def only_slots(state: PyTree, kinds: Iterable[str]) -> PyTree:
    """Return a client's state with only the slots of layers of these kinds, and without the state of the method."""
    slots = client_parts(state).slots
    return LayeredClient(None, {kind: slots[kind] for kind in kinds if kind in slots})


def slots_of(tree: PyTree, kind: str) -> list[Any]:
    """Return the states of all layers of a kind in a tree of states of the server or of clients."""
    is_slots = lambda node: isinstance(node, LayeredState | LayeredClient)  # noqa: E731
    nodes = [node for node in jax.tree.leaves(tree, is_leaf=is_slots) if is_slots(node)]
    return [node.slots[kind] for node in nodes if kind in node.slots]
