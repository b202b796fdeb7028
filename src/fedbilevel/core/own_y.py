"""Divide the inner variable y into leaves that all clients share, and leaves that are each client's own.

y = (s, o_i), where s is shared, and o_i belongs to client i alone. (s*, o*)(x) minimise Σ p_i g_i(x, s, o_i) together,
and x minimises Φ(x) = Σ p_i f_i(x, s*, o_i*). With v = (v_s, v_i) for the adjoint, the conditions are

    Σ p_i ∇s g_i = 0                                      ∇o g_i = 0                                  for each i
    Σ p_i (∇²ss g_i v_s + ∇²so g_i v_i − ∇s f_i) = 0      ∇²os g_i v_s + ∇²oo g_i v_i − ∇o f_i = 0    for each i
    ∇Φ = Σ p_i (∇x f_i − ∇²xs g_i v_s − ∇²xo g_i v_i)

Each of these conditions is a mean over clients, or a condition of a single client, from which its weight p_i > 0 drops
out. So the directions that a client computes at (x, (s, o_i), (v_s, v_i)) need no change: their entries for x, s and
v_s are averaged, and the client makes steps along their entries for o_i and v_i. A client that is not asked keeps o_i
and v_i, and the fixed points stay the same.

Let L_i be the largest eigenvalue of ∇²yy g_i, let γ be the step size for s and v_s, and γ_i the step size for o_i and
v_i. Plain steps are stable if c < 2, where c is the largest of γ Σ p_i L_i and all γ_i L_i. Proof: for a vector
(u_s, u_1, …), let w_i = (√(p_i γ) u_s, √γ_i u_i). Then the quadratic form of the symmetrised operator is
Σ w_iᵀ ∇²yy g_i w_i ≤ Σ L_i ‖w_i‖² ≤ c ‖u‖².
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.tree import PyTree, is_table, join

IsOwn = Callable[[str], bool]
"""The path of a leaf of y, such as "head/weight" -> whether the leaf is each client's own."""


class OwnY(NamedTuple):
    """Hold the leaves of y, and of v, that a client keeps for itself."""

    leaves: dict[str, PyTree]  # for each variable, "y" first: its tree, with None in place of shared leaves


def path_of(path: tuple[jax.tree_util.KeyEntry, ...]) -> str:
    """Return a path as the text that `Bilevel.own` gets: "head/weight"; "" for a y that is a single array."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def parted_y(own: IsOwn | None, y: PyTree) -> tuple[PyTree, PyTree]:
    """Divide y into (shared leaves, own leaves): each of these trees has None where the other tree has a leaf."""
    if own is None:
        return y, jax.tree.map(lambda _: None, y)
    leaves, structure = jax.tree_util.tree_flatten_with_path(y)
    mine = [bool(own(path_of(path))) for path, _ in leaves]
    shared = [None if is_own else leaf for (_, leaf), is_own in zip(leaves, mine, strict=True)]
    kept = [leaf if is_own else None for (_, leaf), is_own in zip(leaves, mine, strict=True)]
    return jax.tree.unflatten(structure, shared), jax.tree.unflatten(structure, kept)


def server_y(own: IsOwn | None, y: PyTree) -> PyTree:
    """Return the part of y that the server holds: y, with None in place of the clients' own leaves."""
    return parted_y(own, y)[0]


def own_paths(own: IsOwn | None, y: PyTree) -> tuple[str, ...]:
    """List the paths of the leaves of y that are each client's own.

    Raises:
        ConfigurationError: `own` does not return a boolean, or no leaf is a client's own.
    """
    if own is None:
        return ()
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(y)]
    for path in paths:
        got = own(path)
        require(isinstance(got, bool), f"Bilevel.own({path!r})", got, "True or False")
    if not (found := tuple(path for path in paths if own(path))):
        named = ", ".join(map(repr, paths))
        raise ConfigurationError(f"Bilevel.own is True for no leaf of y0; the paths of its leaves are {named}")
    return found


def own_leaves(clients: PyTree) -> PyTree:
    """Return the own leaves of y from the clients' states, with a leading axis of M clients; None if no leaf is own."""
    nodes = jax.tree.leaves(clients, is_leaf=lambda node: isinstance(node, OwnY))
    return next((node.leaves["y"] for node in nodes if isinstance(node, OwnY)), None)


def gathered(y: PyTree, clients: PyTree) -> PyTree:
    """Return y with copies of all clients' own leaves, which have a leading axis of M; y itself if no leaf is own.

    Tables on disk are not copied: they change with the rounds that follow.
    """
    own = own_leaves(clients)
    if own is None:
        return y
    return join(y, jax.tree.map(lambda leaf: leaf if is_table(leaf) else jnp.copy(leaf), own))
