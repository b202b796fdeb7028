"""Determine which process has which clients, and at which place of the program each member of a cohort runs.

Tables with a row per client are read and updated in place, a block of rows at a time.
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
    """Divide clients into contiguous ranges, one for each process, whose sizes differ by at most one.

    A cohort is drawn from all clients, so the number of its members in a process is random. Each device therefore has
    places for the largest possible number. Members fill the first places, and chunks of empty places are skipped.
    """

    population: int
    processes: int
    mine: int  # the number of this process, 0 … processes − 1
    devices: int  # the number of devices of each process

    def __post_init__(self) -> None:
        enough = self.processes <= self.population
        require(enough, "processes", self.processes, f"at most {self.population}, the number of clients")

    @cached_property
    def bounds(self) -> np.ndarray:
        """Return int64 bounds of shape (processes + 1,): process p has the clients bounds[p] … bounds[p + 1] − 1."""
        return np.arange(self.processes + 1, dtype=np.int64) * self.population // self.processes

    @property
    def largest(self) -> int:
        """Return the number of clients in the largest share."""
        return -(-self.population // self.processes)

    def owner(self, ids: Any) -> Any:
        """Return, for each client in `ids`, the number of the process that has it."""
        own = np if isinstance(ids, np.ndarray) else jnp
        return own.searchsorted(own.asarray(self.bounds[1:]), ids, side="right")

    def ranks(self, ids: Any) -> Any:
        """Return, for each member of the cohort `ids`, how many members before it are in the same process: (P,)."""
        own = np if isinstance(ids, np.ndarray) else jnp
        owner = self.owner(ids)
        order = own.argsort(owner, stable=True)
        return own.argsort(order) - own.searchsorted(owner[order], owner, side="left")

    def places(self, cohort: int, chunk: int) -> int:
        """Return the number of places of each device: enough for every cohort, and a multiple of the chunk."""
        most = -(-min(cohort, self.largest) // self.devices)
        return -(-most // chunk) * chunk

    def place(self, ids: Array, places: int) -> tuple[Array, Array, Array]:
        """Distribute a cohort's members over the devices of the processes that have them.

        Returns:
            where: the place of each member, counted over all processes and devices, as an array of shape (P,).
            member: the index into `ids` of the member at each place, as an array of shape (processes·devices·places,).
                For an empty place it is the index of any member of the same process, so that its samples are at hand,
                or 0 if the process has no member.
            taken: whether a place has a member of the cohort, in the same shape as `member`; False for empty places.
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
        """Return the samples of this process, one after another, and the place at which those of each client begin.

        Returns:
            values: the samples, with leaves of shape (longest, ...), where `longest` is the largest number of samples
                of any process; a process with fewer samples has padding at the end.
            start: the place at which each client's samples begin, as int64 of shape (M,).
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
    """Describe to which clients the rows of this device's tables belong; a table has leaves of shape (rows, ...).

    The cost of an operation depends on the number of chosen rows, not on the size of the table.
    """

    size: int  # the number of rows of this device
    first: Array | int  # the client of the first row
    block: int  # the number of rows that are vectorised together
    axis: Any  # the axes of the mesh, or None

    def here(self, chosen: Array) -> Array:
        """Return this device's part of a choice among all clients. Padding rows are never chosen.

        `chosen` has an entry for each client, and the result an entry for each of this device's rows.
        """
        short = jnp.shape(chosen)[0]
        ids = self.first + jnp.arange(self.size)
        return jnp.where(ids < short, jnp.asarray(chosen)[jnp.minimum(ids, short - 1)], 0).astype(chosen.dtype)

    def update(self, chosen: Array, respond: Callable[[Any, Any], Any], members: Any, tables: Any) -> Any:
        """Replace the chosen rows of tables (a, b) by `respond`(member, b's row) -> (a's new row, b's new row)."""

        def step(places: Array, tables: Any) -> Any:
            # The compiler writes in place only if the old table cannot be read later. Therefore rows are read in a
            # separate loop, which cannot be fused with their use, and the written values depend on what was read.
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
        """Return the sum of the rows that `who` chooses, and the sum of weight·asked over their clients.

        `asked` and `who` are arrays of shape (M,). This method is a `SumRows` of in_flight.py.
        """
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
        """Repeat carry ← step(places, carry) over all chosen rows, a block of `block` places at a time.

        A last block that is not full is filled up with the place `size`, which has no row.
        """
        padded = -(-self.size // self.block) * self.block
        places = jnp.nonzero(chosen, size=padded, fill_value=self.size)[0]
        many = jnp.sum(chosen, dtype=jnp.int32)

        def body(loop: tuple[Array, Any]) -> tuple[Array, Any]:
            done, carry = loop
            return done + self.block, step(lax.dynamic_slice_in_dim(places, done, self.block), carry)

        return lax.while_loop(lambda loop: loop[0] < many, body, (jnp.zeros((), jnp.int32), carry))[1]


def _taken(tree: PyTree, places: Array) -> PyTree:
    """Take rows of all leaves; a place beyond the end takes the last row."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).at[places].get(mode="clip", wrap_negative_indices=False), tree)


def vectorised(function: Callable[[Any, Any], Any], member: Any, state: Any) -> Any:
    """Apply a function (member, state) to each row of the members and of the states.

    A single row is passed without a batch axis, since the compiler does not recognise matrix products with such an
    axis.
    """
    if jax.tree.leaves(member)[0].shape[0] == 1:
        return jax.tree.map(lambda a: a[None], function(*jax.tree.map(lambda a: a[0], (member, state))))
    return jax.vmap(function)(member, state)
