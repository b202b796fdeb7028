"""Hold the samples of all clients: on the device, or on the host, from which each round's cohort is copied in advance.

If they are on the host, the clients' states are also there (core/on_disk.py): the program gets the states of the
round's cohort, and the host stores the new states after the round.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedbilevel.core.client import Clients
from fedbilevel.core.errors import ConfigurationError
from fedbilevel.core.on_disk import let_go
from fedbilevel.core.ragged import Ragged, check_finite
from fedbilevel.core.tree import PyTree
from fedbilevel.engines.engine import Cohorts, round_keys
from fedbilevel.engines.local.fed import HOST, Members, ProgramLayout, SampleArrays

SMALL = 2**24  # if all samples have fewer bytes, their number is padded to a power of two

RoundInputs = tuple[SampleArrays, Members, Array | None]


class Resident:
    """Keep all samples on the device; the compiled program draws the cohorts."""

    rounds_per_call = 1024  # the largest number of rounds in one call of the program, which stores the costs of each
    states_on_disk = False

    def __init__(self, clients: Clients, layout: ProgramLayout, key: Array, mesh: Mesh | None, prefetch: int) -> None:
        outer, outer_start = self.hold("outer", clients.outer, layout, mesh)
        same = clients.inner is clients.outer
        inner, inner_start = (outer, outer_start) if same else self.hold("inner", clients.inner, layout, mesh)
        every = np.arange(len(clients), dtype=np.int32)
        table = replicate(members(clients, every, every, outer_start, inner_start), mesh)
        self.round: RoundInputs = (SampleArrays(outer, inner), table, None)

    def hold(self, name: str, rows: Ragged, layout: ProgramLayout, mesh: Mesh | None) -> tuple[PyTree, np.ndarray]:
        """Copy all samples, or this process's share, to the device; return them, and where each client's begin."""
        values, start = layout.shares.own_rows(rows) if layout.shares else (rows.values, rows.start)
        if int(np.max(start + rows.size)) >= 2**31:  # any client may have the last samples
            raise ConfigurationError(f"Clients.{name} has more than 2³¹ samples; use Local(stream=True)")
        mapped = [isinstance(leaf, np.memmap) for leaf in jax.tree.leaves(rows.values)]
        here = True if layout.shares is None else layout.shares.owner(np.arange(len(start))) == layout.shares.mine
        held = Ragged(values, start, np.where(here, rows.size, 0))
        for (path, leaf), unseen in zip(jax.tree_util.tree_leaves_with_path(values), mapped, strict=True):
            if unseen:  # memory-mapped; arrays in memory were checked when the population was made
                check_finite(f"Clients.{name}{jax.tree_util.keystr(path)}", leaf, held.place)
        return (share(values, mesh) if layout.shares else replicate(in_place(in_powers(values), mesh), mesh)), start

    def inputs(self, round: int) -> RoundInputs:
        return self.round

    def close(self) -> None:
        pass


def in_powers(values: PyTree) -> PyTree:
    """Pad small arrays (n, ...) with zeros until n is a power of two: populations of similar n share a program."""
    rows = len(jax.tree.leaves(values)[0])
    missing = 2 ** (rows - 1).bit_length() - rows
    if not missing or sum(leaf.nbytes for leaf in jax.tree.leaves(values)) > SMALL:
        return values
    return jax.tree.map(lambda leaf: np.concatenate([leaf, np.zeros((missing, *leaf.shape[1:]), leaf.dtype)]), values)


def in_place(values: PyTree, mesh: Mesh | None) -> PyTree:
    """Put arrays where all devices of a CPU can read them, so that each device needs no copy."""
    several = mesh is not None and jax.default_backend() == "cpu"
    return jax.tree.map(np.asarray, jax.device_put(values)) if several else values


class Streamed:
    """Keep samples on the host; a thread draws and gathers the next cohorts while the device computes."""

    rounds_per_call = 1

    def __init__(self, clients: Clients, layout: ProgramLayout, key: Array, mesh: Mesh | None, prefetch: int) -> None:
        self.clients, self.layout, self.mesh, self.prefetch = clients, layout, mesh, prefetch
        self.key, self.states_on_disk = key, layout.shares is None
        self.x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64  # may hold for the caller's thread only
        for name, longest in (("outer", layout.outer_longest), ("inner", layout.inner_longest)):
            if layout.cohort.size * (1 + layout.fresh) * longest >= 2**31:
                raise ConfigurationError(
                    f"a cohort of {layout.cohort.size} with {longest} {name} samples each is too large"
                )
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="fedbilevel-prefetch")
        self.pending: dict[int, Future[RoundInputs]] = {}

    def inputs(self, round: int) -> RoundInputs:
        for ahead in range(round, round + 1 + self.prefetch):
            if ahead not in self.pending:
                self.pending[ahead] = self.thread.submit(self.gather, ahead)
        return self.pending.pop(round).result()

    def gather(self, round: int) -> RoundInputs:
        """Draw the cohorts of a round and copy their samples, padded to the longest client, to the device."""
        clients, layout = self.clients, self.layout
        with jax.enable_x64(self.x64):
            ids = self.cohorts(round)
            flat = ids.ravel()
            here, place = self.places(ids)
            outer = padded("outer", clients.outer, here, layout.outer_longest)
            same = clients.inner is clients.outer
            inner = outer if same else padded("inner", clients.inner, here, layout.inner_longest)
            starts = place * layout.outer_longest, place * layout.inner_longest
            table = members(clients, flat, flat if layout.shares else np.arange(flat.size), *starts)
            table = jax.tree.map(lambda column: column.reshape(ids.shape), table)
            table, device_ids = replicate((table, ids), self.mesh)
            let_go((clients.outer.values, clients.inner.values))
            data = SampleArrays(outer, inner)
            data = share(data, self.mesh) if layout.shares else replicate(data, self.mesh)
        return data, table, device_ids

    def places(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which client's samples this process puts at which place of its array of samples.

        Returns:
            Two arrays. The first has an entry for each place of this process: the id of the client whose samples are at
            this place, or −1 if the place is empty. The second has an entry for each client in `ids`: the place of the
            client's samples, in the process that has them.
        """
        shares, flat = self.layout.shares, ids.ravel()
        if shares is None:
            return flat, np.arange(flat.size, dtype=np.int64)
        each = min(self.layout.cohort.size, shares.largest)
        place = np.concatenate([number * each + shares.ranks(cohort) for number, cohort in enumerate(ids)])
        own = shares.owner(flat) == shares.mine
        here = np.full(len(ids) * each, -1, flat.dtype)
        here[place[own]] = flat[own]
        return here, place

    def cohorts(self, round: int) -> np.ndarray:
        """Draw the clients of the round's own and fresh cohorts. Return their ids as an array (1 + fresh, clients)."""
        own = Cohorts(self.layout.cohort, len(self.clients), self.clients.own, round_keys(self.key, round))
        return np.stack([cohorts.ids() for cohorts in (own, *map(own.fresh, range(self.layout.fresh)))])

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)


def members(
    clients: Clients, ids: np.ndarray, states: np.ndarray, outer_start: np.ndarray, inner_start: np.ndarray
) -> Members:
    """Make the table of the clients `ids`.

    Args:
        clients: the population.
        ids: the ids of the clients.
        states: for each client, the row of its state in the program's table of states.
        outer_start, inner_start: for each client, the place at which its samples begin.
    """
    return Members(
        id=ids.astype(np.int32),
        state=states.astype(np.int32),
        weight=np.asarray(clients.weights[ids], jnp.result_type(float)),
        outer_start=outer_start.astype(np.int32),
        outer_size=clients.outer.size[ids].astype(np.int32),
        inner_start=inner_start.astype(np.int32),
        inner_size=clients.inner.size[ids].astype(np.int32),
        counts=None,
    )


def padded(name: str, rows: Ragged, ids: np.ndarray, longest: int) -> PyTree:
    """Gather the samples of the clients `ids` one after another, with leaves of shape (len(ids)·longest, ...).

    Each client's samples are padded with zeros to `longest`; an id of −1 gets only zeros.
    """

    def gather(path: Any, leaf: np.ndarray) -> np.ndarray:
        out = np.zeros((len(ids), longest, *leaf.shape[1:]), leaf.dtype)
        for place, i in enumerate(ids):
            if i < 0:
                continue
            start, size = int(rows.start[i]), int(rows.size[i])
            out[place, :size] = leaf[start : start + size]
        flat = out.reshape(-1, *leaf.shape[1:])
        check_finite(f"Clients.{name}{jax.tree_util.keystr(path)}", flat, of_whom)
        return flat

    def of_whom(i: int) -> str:
        return f"in sample {i % longest} of client {ids[i // longest]}"

    return jax.tree_util.tree_map_with_path(gather, rows.values)


def is_memory_mapped(clients: Clients) -> bool:
    leaves = jax.tree.leaves((clients.outer.values, clients.inner.values))
    return any(isinstance(leaf, np.memmap) for leaf in leaves)


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Put arrays on the device, or a copy on every device of a mesh, which may span several processes."""
    if mesh is None or not mesh.is_multi_process:
        return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()) if mesh else None)
    everywhere = NamedSharding(mesh, PartitionSpec())

    def copy(leaf: Any) -> Array:
        if isinstance(leaf, Array) and not leaf.is_fully_addressable:
            return leaf  # an array of several processes is on every device already
        if isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(copy(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        value = _canonical(leaf)
        return jax.make_array_from_callback(value.shape, everywhere, lambda index: value[index])

    return jax.tree.map(copy, tree)


def share(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """Put this process's arrays on its own devices; leaves (n, ...) of all processes form leaves (processes·n, ...)."""
    assert mesh is not None
    apart = NamedSharding(mesh, PartitionSpec(HOST))
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(apart, _canonical(leaf)), tree)


def local(tree: PyTree) -> PyTree:
    """Turn arrays of several devices or processes into ordinary arrays on this process's first device."""

    def first(a: Any) -> Any:
        if not isinstance(a, Array) or len(a.sharding.device_set) == 1:
            return a
        parted = a.is_fully_addressable and not a.is_fully_replicated
        return jax.device_put(a, jax.local_devices()[0]) if parted else a.addressable_data(0)

    return jax.tree.map(first, tree)


def _canonical(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
