"""Keep each client's own leaves of y (core/own_y.py) at the client, and let the client make the steps on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import optax

from fedbilevel.algorithms.parts.adaptive_steps import Sized, WithMeasured
from fedbilevel.algorithms.parts.layers import Asked, Inside, Kept, Layer
from fedbilevel.core.algorithm import Algorithm, methods_that, own_parts, takes_and_gives
from fedbilevel.core.client import Client
from fedbilevel.core.errors import UnsupportedError, refuse_together, require, unknown
from fedbilevel.core.facts import Allows, No, OwnParts
from fedbilevel.core.fed import Reply
from fedbilevel.core.own_y import OwnY, own_paths, parted_y, server_y
from fedbilevel.core.problem import Problem
from fedbilevel.core.tree import PyTree, is_none, join, move


class OwnLeaves(Layer):
    """Let every client keep its own leaves of y.

    A message has only the shared leaves of y, and the client adds its own leaves. The reply of a phase has entries for
    shared and for own leaves. The client takes a step on its own leaves along their entries, and does not send these
    entries. The same holds for other variables with the shape of y, such as v. `OwnParts.start_at_y` says which
    variables start at y0; all others start at 0.
    """

    kind, place, needs = "own_leaves", "kept", "own_y"
    cannot = "cannot leave parts of y to their clients (Bilevel.own)"

    def allows(self, inside: Allows, method: Algorithm) -> Allows:
        return inside._replace(submodels=No("leaves of y that are each client's own (Bilevel.own) are always whole"))

    def fits(self, method: Algorithm) -> None:
        """Refuse names in the method's `own_y` that are not those of phases, or of variables in messages."""
        declared, where = _parts_of(method), f"own_y of {method.label}"
        taken = {name for parts in declared.values() for name in parts.takes}
        wrong = [unknown(f"phase in {where}", phase, method.phases) for phase in declared if phase not in method.phases]
        for phase, parts in declared.items():
            names = [name for name, _ in parts.gives if name not in taken]
            wrong += [unknown(f"variable in {where}.{phase}", name, taken) for name in names]
        refuse_together(wrong)
        require("y" in taken, f"{method.label}.allows.own_y", sorted(declared), "declared for a phase that takes y")

    def check(self, method: Algorithm, problem: Problem, clients: Any, x: PyTree, y: PyTree) -> None:
        own_paths(problem.own, y)
        if not serves_mixed(method) and jax.tree.leaves(server_y(problem.own, y)):
            why = "its clients solve their own linear systems, which is exact only if they share no leaf of y"
            able = f"{methods_that(serves_mixed)}, and AFBO with hypergradient=fb.parts.SystemSteps()"
            raise UnsupportedError(
                f"{method.label} needs a Bilevel.own that is True for every leaf of y0: {why}; these methods solve "
                f"problems with shared and own leaves: {able}"
            )

    def client_slot(self, method: Algorithm, problem: Problem, x: PyTree, y: PyTree) -> OwnY:
        own = parted_y(problem.own, y)[1]
        return OwnY(
            {
                name: own if name in parts.start_at_y else optax.tree.zeros_like(own)
                for parts in _parts_of(method).values()
                for name in parts.takes
            }
        )

    def reply(self, asked: Asked, kept: Kept, client: Client, run: Inside) -> tuple[Reply, Kept]:
        takes, gives = takes_and_gives(asked.method.phases[asked.phase])
        parts = own_parts(asked.method, asked.phase)
        leaves, taken, given = dict(kept.leaves), iter(parts.takes), iter(parts.gives)

        def whole(kind: str, part: PyTree) -> PyTree:
            return join(part, leaves[next(taken)]) if kind == "y" else part

        def stepped(kind: str, part: PyTree) -> PyTree:
            if kind != "y":
                return part
            name, size = next(given)
            own = leaves[name]
            mine = jax.tree.map(lambda own, new: None if own is None else new, own, part, is_leaf=is_none)
            step = size(asked.method)  # None: the step is adapted, and the reply is already multiplied by it
            leaves[name] = move(own, -1 if step is None else -step, mine)
            return jax.tree.map(lambda own, new: new if own is None else None, own, part, is_leaf=is_none)

        sized = isinstance(asked.message, Sized)  # the layer of adapted steps, nearer to the phase, has added steps
        message = jax.tree.map(whole, takes, asked.message.message if sized else asked.message)
        reply = run(replace(asked, message=asked.message._replace(message=message) if sized else message), client)
        measured = isinstance(reply.update, WithMeasured)
        update = jax.tree.map(stepped, gives, reply.update.update if measured else reply.update)
        return reply._replace(update=reply.update._replace(update=update) if measured else update), OwnY(leaves)


def serves_mixed(method: Algorithm) -> bool:
    """Return whether a method is exact if some leaves of y are shared, and others are each client's own."""
    declared = method.allows.own_y
    return not isinstance(declared, No) and not any(parts.alone for parts in declared.values())


def _parts_of(method: Algorithm) -> Mapping[str, OwnParts]:
    """Return the method's declaration `own_y`, which `Layered` has found to be supported."""
    assert not isinstance(method.allows.own_y, No)
    return method.allows.own_y
