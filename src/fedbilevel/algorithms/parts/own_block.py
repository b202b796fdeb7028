"""Split the outer variable x by client (core/local_x.py): every client keeps its block of x and steps on it itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from fedbilevel.algorithms.parts.layers import Asked, Inside, Kept, Layer
from fedbilevel.core.algorithm import Algorithm, takes_and_gives
from fedbilevel.core.client import Client, Clients
from fedbilevel.core.fed import Reply
from fedbilevel.core.local_x import LocalX, check_split, local_block
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, move


class OwnBlock(Layer):
    """Let every client keep its block of x.

    At the client, its block takes the place of x in messages. The client adds −lr·p_i·u to its block, where lr is the
    server's step size on x, p_i is the client's weight, and u is the part of the reply for x. The client does not send
    u.
    """

    kind, place, needs = "own_block", "kept", "local_x"
    cannot = "cannot leave x to its clients (Bilevel.local = 'x')"

    def check(self, method: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
        if isinstance(clients, Clients):
            check_split(clients, x)

    def client_slot(self, method: Algorithm, problem: Problem, x: PyTree, y: PyTree) -> LocalX:
        return LocalX(local_block(x))

    def reply(self, asked: Asked, kept: Kept, client: Client, run: Inside) -> tuple[Reply, Kept]:
        takes, gives = takes_and_gives(asked.method.phases[asked.phase])
        message = jax.tree.map(lambda kind, part: kept.x if kind == "x" else part, takes, asked.message)
        reply = run(replace(asked, message=message), client)
        block, lr = kept.x, asked.method.allows.local_x

        def without(kind: str, part: PyTree) -> PyTree:
            nonlocal block
            if kind != "x":
                return part
            block = move(block, -lr * client.weight, part)
            return None

        return reply._replace(update=jax.tree.map(without, gives, reply.update)), LocalX(block)
