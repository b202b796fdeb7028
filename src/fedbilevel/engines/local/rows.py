"""Some rows of large tables, one per client: read and written where they lie, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedbilevel.core.tree import PyTree


class DeviceRows(NamedTuple):
    """Where tables with leaves (rows, ...) stand among all clients.

    What is done costs as much as the rows that are chosen, however many there are.
    """

    size: int  # rows of this device
    first: Array | int  # the client of the first of them
    block: int  # rows vectorised together
    axis: Any  # of the mesh, or None

    def here(self, chosen: Array) -> Array:
        """(rows,) this device's part of a choice (M,) of clients; padding is never chosen."""
        short = jnp.shape(chosen)[0]
        ids = self.first + jnp.arange(self.size)
        return jnp.where(ids < short, jnp.asarray(chosen)[jnp.minimum(ids, short - 1)], 0).astype(chosen.dtype)

    def update(self, chosen: Array, one: Callable[[Any, Any], tuple[Any, Any]], members: Any, tables: Any) -> Any:
        """(a, b) with the chosen rows replaced by `one`(member, b's row) -> (a's new row, b's new row)."""

        def step(places: Array, tables: Any) -> Any:
            # The compiler writes in place only if nothing may still read the table after that: hence a loop of its own
            # for reading, which cannot melt into what uses the rows, and writing what depends on them.
            read = lambda place: jax.tree.map(lambda leaf: leaf.at[place].get(mode="clip"), tables[1])  # noqa: E731
            before = lax.map(read, places)
            replies, after = _vectorised(one, _taken(members, places), before)
            real = places < self.size
            after = jax.tree.map(lambda a, b: jnp.where(real.reshape(-1, *[1] * (a.ndim - 1)), a, b), after, before)
            return jax.tree.map(lambda table, rows: table.at[places].set(rows, mode="drop"), tables, (replies, after))

        return self._blocks(chosen, step, tables)

    def total(self, table: PyTree, asked: Array, who: Array) -> tuple[PyTree, Array]:
        """Σ of the rows of the clients `who` (M,), and of weight·asked: see `in_flight.SumRows`."""
        asked, chosen = self.here(asked), self.here(who)

        def step(places: Array, total: tuple[PyTree, Array]) -> tuple[PyTree, Array]:
            rows, when = _taken((table, asked), places)
            real = places < self.size

            def summed(leaf: Array) -> Array:
                kept = jnp.where(real.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, 0)
                return jnp.sum(kept, axis=0, dtype=leaf.dtype)

            return jax.tree.map(lambda sum_, leaf: sum_ + summed(leaf), total, (rows, rows.weight * when))

        none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), (table, table.weight))
        sums: tuple[PyTree, Array] = self._blocks(chosen, step, none)
        return lax.psum(sums, self.axis) if self.axis else sums

    def _blocks(self, chosen: Array, step: Callable[[Array, Any], Any], carry: Any) -> Any:
        """carry ← step(places (block,), carry) until every chosen row was among the places; others are `size`."""
        padded = -(-self.size // self.block) * self.block
        places = jnp.nonzero(chosen, size=padded, fill_value=self.size)[0]
        many = jnp.sum(chosen, dtype=jnp.int32)

        def body(loop: tuple[Array, Any]) -> tuple[Array, Any]:
            done, carry = loop
            return done + self.block, step(lax.dynamic_slice_in_dim(places, done, self.block), carry)

        return lax.while_loop(lambda loop: loop[0] < many, body, (jnp.zeros((), jnp.int32), carry))[1]


def _taken(tree: PyTree, places: Array) -> PyTree:
    """DeviceRows of all leaves; where there is none of that place, some row."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).at[places].get(mode="clip"), tree)


def _vectorised(one: Callable[[Any, Any], Any], member: Any, state: Any) -> Any:
    if (
        jax.tree.leaves(member)[0].shape[0] == 1
    ):  # a batch axis of one would only hide matrix products from the compiler
        return jax.tree.map(lambda a: a[None], one(*jax.tree.map(lambda a: a[0], (member, state))))
    return jax.vmap(one)(member, state)
