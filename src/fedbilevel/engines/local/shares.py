"""Which process holds which clients, and where in the program each member of a cohort is played."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.client import Ragged
from fedbilevel.core.errors import require
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
        """The process that holds each client; (P,) -> (P,)."""
        own = np if isinstance(ids, np.ndarray) else jnp
        return own.searchsorted(own.asarray(self.bounds[1:]), ids, side="right")

    def ranks(self, ids: Any) -> Any:
        """How many members of the cohort `ids` that stand before each one are held by the same process; (P,)."""
        own = np if isinstance(ids, np.ndarray) else jnp
        owner = self.owner(ids)
        order = own.argsort(owner, stable=True)
        return own.argsort(order) - own.searchsorted(owner[order], owner, side="left")

    def places(self, cohort: int, chunk: int) -> int:
        """Places of each device: enough for every cohort, a multiple of the chunk."""
        most = -(-min(cohort, self.largest) // self.devices)
        return -(-most // chunk) * chunk

    def place(self, ids: Array, places: int) -> tuple[Array, Array, Array]:
        """Where a cohort's members go: dealt out to the devices of the process that holds them.

        Returns:
            where: (P,) the place of each member, counted over all processes and devices.
            member: (processes·devices·places,) the index into `ids` of who is there; in empty places one that the
                same process holds, so that it has its samples. Where a process holds nobody it is member 0.
            taken: whether it is one of the first kind; same shape.
        """
        owner, rank = self.owner(ids), self.ranks(ids)
        where = (owner * self.devices + rank % self.devices) * places + rank // self.devices
        index = jnp.arange(len(ids))
        total = self.processes * self.devices * places
        taken = jnp.zeros(total, bool).at[where].set(True)
        first = (
            jnp.zeros(self.processes, index.dtype)
            .at[jnp.where(rank == 0, owner, self.processes)]
            .set(index, mode="drop")
        )
        member = jnp.repeat(first, self.devices * places).at[where].set(index)
        return where, member, taken

    def own_rows(self, rows: Ragged) -> tuple[PyTree, np.ndarray]:
        """This process's samples, flat, and where each client's window begins among those of its own process.

        Returns:
            values: leaves (longest, ...), longest being the largest number of samples of any process.
            start: (M,) int64.
        """
        ends = np.concatenate([[0], np.cumsum(rows.size)])
        clients = np.arange(self.population)
        start = ends[:-1] - ends[self.bounds[self.owner(clients)]]
        longest = int(np.diff(ends[self.bounds]).max())
        own = slice(*self.bounds[self.mine : self.mine + 2])
        mine = Ragged(rows.values, rows.start[own], rows.size[own]).joined().values

        def padded(leaf: np.ndarray) -> np.ndarray:
            return np.concatenate([leaf, np.zeros((longest - len(leaf), *leaf.shape[1:]), leaf.dtype)])

        return jax.tree.map(padded, mine), start
