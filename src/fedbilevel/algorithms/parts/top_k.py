"""Top-k: clients send the largest entries of their replies, and a memory makes up for the rest (EF21).

With C(v) the k largest entries of v, client i keeps g_i. When it is asked, and its reply is u_i, it sends

    c_i = C(u_i − g_i),   g_i ← g_i + c_i             and the server adds up   G ← G + Σ p_i c_i

so that G = Σ p_i g_i, whose mean the method gets. A cohort changes the g_i of its members alone. As replies settle, so
do the g_i, and G comes to their exact mean, however few entries are sent. Without the memory, the mean of the C(u_i) is
off wherever the limits of clients' replies are not 0, that is, wherever clients differ.

g_i is made of earlier replies. Therefore top-k is for phases whose replies may be late (`Allows.late`) alone. Replies
to other phases are sent whole, and so are marked parts.

Source: P. Richtárik, I. Sokolov and I. Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster
Error Feedback", NeurIPS 2021.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from fedbilevel.algorithms.parts.layers import Ask, Asked, Inside, Kept, Layer
from fedbilevel.algorithms.parts.wrappers import template
from fedbilevel.core.algorithm import Algorithm, takes_and_gives
from fedbilevel.core.client import Client
from fedbilevel.core.config import static
from fedbilevel.core.errors import require
from fedbilevel.core.fed import Coded, Public, Reply, Total, decoded
from fedbilevel.core.local_x import server_x
from fedbilevel.core.privacy import is_marked, private_part
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, join


class Memory(NamedTuple):
    """What is kept for a phase: g_i at a client, G at the server."""

    update: PyTree
    weight: Array  # at a client 1 once it has replied; at the server Σ p_i over those that have


@dataclass(frozen=True)
class Scatter:
    """Put entries at their places, and 0 elsewhere; places beyond the end are left out, since a site can send any."""

    unravel: Callable[[Array], PyTree]
    size: int

    def __call__(self, wire: tuple[Array, Array]) -> PyTree:
        values, places = wire
        zeros = jnp.zeros(self.size, values.dtype)
        return self.unravel(zeros.at[places].set(values, mode="drop", wrap_negative_indices=False))


class TopK(Layer):
    """Let clients send the largest entries of what has changed in their replies.

    Args:
        share: the share of a reply's entries that are sent.
        remember: whether clients and server keep what has been sent; without it methods stall where clients differ.
    """

    kind, place, needs, cannot = "top_k", "coded", "late", "cannot send differences to earlier replies (TopK)"

    share: float = static(default=0.1)
    remember: bool = static(default=True)

    def validate(self) -> None:
        require(0 < self.share <= 1, "TopK.share", self.share, "above 0, at most 1")

    def server_slot(self, method: Algorithm, x: PyTree, y: PyTree) -> PyTree:
        phases = {name: takes_and_gives(method.phases[name])[1] for name in method.allows.late or ()}
        return {name: Memory(template(gives, x, y), jnp.zeros(())) for name, gives in phases.items()}

    def client_slot(self, method: Algorithm, problem: Problem, x: PyTree, y: PyTree) -> PyTree:
        return self.server_slot(method, server_x(problem, x), y)

    def exchange(self, asked: Asked, kept: Kept, ask: Ask) -> tuple[Total, Kept]:
        total = ask(asked)
        if asked.fresh is not None or asked.phase not in kept:
            return total, kept
        (private, marked), joins = total.update
        change = join(private, marked)
        if not self.remember:
            return total._replace(update=change), kept
        before = kept[asked.phase]
        now = Memory(optax.tree.add(before.update, change), before.weight + joins.public)
        return Total(now.update, now.weight, now.weight, 1), {**kept, asked.phase: now}

    def reply(self, asked: Asked, kept: Kept, client: Client, run: Inside) -> tuple[Reply, Kept]:
        reply = run(client, asked.message)
        if kept is None or asked.phase not in kept:
            return reply, kept
        before = kept[asked.phase]
        change = optax.tree.sub(reply.update, before.update) if self.remember else reply.update
        marked = jax.tree.map(lambda part: part if is_marked(part) else None, change, is_leaf=is_marked)
        code = self.coded(private_part(change))
        now = Memory(optax.tree.add(before.update, join(decoded(code), marked)), jnp.ones_like(before.weight))
        sent = (code, marked), Public(now.weight - before.weight)
        return reply._replace(update=sent), {**kept, asked.phase: now} if self.remember else kept

    def coded(self, tree: PyTree) -> Coded:
        """Take the largest entries of a tree, and their places."""
        vector, unravel = ravel_pytree(tree)
        _, places = jax.lax.top_k(jnp.abs(vector), math.ceil(self.share * vector.size))
        return Coded((vector[places], places.astype(jnp.int32)), Scatter(unravel, vector.size))
