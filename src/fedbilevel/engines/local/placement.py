"""Where clients lie: which process holds which of them, where in the program each member of a cohort is played, and the
rows of tables, one per client, that are read and written where they lie, a block of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedbilevel.core.errors import require
from fedbilevel.core.ragged import Ragged
from fedbilevel.core.tree import PyTree


@dataclass(frozen=True)
class Shares:
    """Clients in contiguous ranges, one for each process, of sizes that differ by one at most.

    A cohort is drawn from all clients, so how many of its members a process holds is random. Each device therefore
    has places for as many as there can be, the filled ones first; chunks of empty places are skipped.
    """

    population: int
    processes: int
    mine: int  # the number of this process
    devices: int  # of each process

    def __post_init__(self) -> None:
        enough = self.processes <= self.population
        require(enough, "processes", self.processes, f"at most {self.population}, the number of clients")

    @cached_property
    def bounds(self) -> np.ndarray:
        """Process p holds the clients bounds[p] … bounds[p + 1] − 1; (processes + 1,) int64."""
        return np.arange(self.processes + 1, dtype=np.int64) * self.population // self.processes

    @property
    def largest(self) -> int:
        """The number of clients in the largest share."""
        return -(-self.population // self.processes)

    def owner(self, ids: Any) -> Any:
        """Find the process that holds each client; (P,) -> (P,)."""
        own = np if isinstance(ids, np.ndarray) else jnp
        return own.searchsorted(own.asarray(self.bounds[1:]), ids, side="right")

    def ranks(self, ids: Any) -> Any:
        """Count, for each member of the cohort `ids`, the members before it that the same process holds; (P,)."""
        own = np if isinstance(ids, np.ndarray) else jnp
        owner = self.owner(ids)
        order = own.argsort(owner, stable=True)
        return own.argsort(order) - own.searchsorted(owner[order], owner, side="left")

    def places(self, cohort: int, chunk: int) -> int:
        """Count the places of each device: enough for every cohort, a multiple of the chunk."""
        most = -(-min(cohort, self.largest) // self.devices)
        return -(-most // chunk) * chunk

    def place(self, ids: Array, places: int) -> tuple[Array, Array, Array]:
        """Deal out a cohort's members to the devices of the process that holds them.

        Returns:
            where: (P,) the place of each member, counted over all processes and devices.
            member: (processes·devices·places,) the index into `ids` of who is there; in empty places a member that the
                same process holds, so that it has its samples. Where a process holds nobody it is member 0.
            taken: whether a place is filled by its own member; same shape.
        """
        owner, rank = self.owner(ids), self.ranks(ids)
        where = (owner * self.devices + rank % self.devices) * places + rank // self.devices
        index = jnp.arange(len(ids))
        total = self.processes * self.devices * places
        taken = jnp.zeros(total, bool).at[where].set(True)
        first_of = jnp.where(rank == 0, owner, self.processes)
        first = jnp.zeros(self.processes, index.dtype).at[first_of].set(index, mode="drop")
        member = jnp.repeat(first, self.devices * places).at[where].set(index)
        return where, member, taken

    def own_rows(self, rows: Ragged) -> tuple[PyTree, np.ndarray]:
        """Take this process's samples, flat, and say where each client's window begins among those of its own process.

        Returns:
            values: leaves (longest, ...), longest being the largest number of samples of any process.
            start: (M,) int64.
        """
        ends = np.concatenate([[0], np.cumsum(rows.size)])
        start = ends[:-1] - ends[self.bounds[self.owner(np.arange(self.population))]]
        longest = int(np.diff(ends[self.bounds]).max())
        own = slice(*self.bounds[self.mine : self.mine + 2])
        mine = Ragged(rows.values, rows.start[own], rows.size[own]).joined().values

        def padded(leaf: np.ndarray) -> np.ndarray:
            return np.concatenate([leaf, np.zeros((longest - len(leaf), *leaf.shape[1:]), leaf.dtype)])

        return jax.tree.map(padded, mine), start


class DeviceRows(NamedTuple):
    """Where tables with leaves (rows, ...) stand among all clients.

    What is done costs as much as the rows that are chosen, however many there are.
    """

    size: int  # rows of this device
    first: Array | int  # the client of the first of them
    block: int  # rows vectorised together
    axis: Any  # of the mesh, or None

    def here(self, chosen: Array) -> Array:
        """Take this device's part, (rows,), of a choice (M,) of clients; padding is never chosen."""
        short = jnp.shape(chosen)[0]
        ids = self.first + jnp.arange(self.size)
        return jnp.where(ids < short, jnp.asarray(chosen)[jnp.minimum(ids, short - 1)], 0).astype(chosen.dtype)

    def update(self, chosen: Array, respond: Callable[[Any, Any], Any], members: Any, tables: Any) -> Any:
        """Replace the chosen rows of tables (a, b) by `respond`(member, b's row) -> (a's new row, b's new row)."""

        def step(places: Array, tables: Any) -> Any:
            # The compiler writes in place only if nothing may still read the table after that: hence a loop of its own
            # for reading, which cannot melt into what uses the rows, and writing what depends on them.
            before = lax.map(partial(_taken, tables[1]), places)
            replies, after = vectorised(respond, _taken(members, places), before)
            real = places < self.size
            after = jax.tree.map(lambda a, b: jnp.where(real.reshape(-1, *[1] * (a.ndim - 1)), a, b), after, before)
            return jax.tree.map(
                lambda table, rows: table.at[places].set(rows, mode="drop", wrap_negative_indices=False),
                tables,
                (replies, after),
            )

        return self._blocks(chosen, step, tables)

    def total(self, table: PyTree, asked: Array, who: Array) -> tuple[PyTree, Array]:
        """Sum the rows of the clients `who` (M,), and weight·asked over them: see `in_flight.SumRows`."""
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
        """Repeat carry ← step(places (block,), carry) until all chosen rows were places; other places are `size`."""
        padded = -(-self.size // self.block) * self.block
        places = jnp.nonzero(chosen, size=padded, fill_value=self.size)[0]
        many = jnp.sum(chosen, dtype=jnp.int32)

        def body(loop: tuple[Array, Any]) -> tuple[Array, Any]:
            done, carry = loop
            return done + self.block, step(lax.dynamic_slice_in_dim(places, done, self.block), carry)

        return lax.while_loop(lambda loop: loop[0] < many, body, (jnp.zeros((), jnp.int32), carry))[1]


def _taken(tree: PyTree, places: Array) -> PyTree:
    """Take rows of all leaves; where there is no row at a place, some row."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).at[places].get(mode="clip", wrap_negative_indices=False), tree)


def vectorised(function: Callable[[Any, Any], Any], member: Any, state: Any) -> Any:
    """Apply a function (member, state) to the rows of both.

    A single row goes without a batch axis, which would only hide matrix products from the compiler.
    """
    if jax.tree.leaves(member)[0].shape[0] == 1:
        return jax.tree.map(lambda a: a[None], function(*jax.tree.map(lambda a: a[0], (member, state))))
    return jax.vmap(function)(member, state)
