"""A polytope a_l·x + Σ p_i b_il·y_i + c_l·z + κ_l ≤ 0, l = 1..L, that stands for one convex constraint h ≤ ε.

A plane is h's linearisation at a point: below h, so that it cuts off no point where h ≤ ε. The server keeps a_l, c_l,
κ_l and the multipliers λ_l; each client keeps its own b_il, and the server knows the sums Σ p_i b_il·y_i alone.

Planes have slots, one more than planes are kept, so that a new plane always finds a slot that was free since the last
plane came: a late reply, computed with the earlier planes, then has no value for the new plane's slot.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedbilevel.core.tree import PyTree

FREE = -1


class Cut(NamedTuple):
    """What a plane is made of: h ≤ ε linearised at (x, {y_i}, z)."""

    height: Array  # h at that point
    outer: PyTree  # a = ∂h/∂x
    consensus: PyTree  # c = ∂h/∂z
    inner: Array  # Σ p_i b_i·y_i


class Planes(NamedTuple):
    """The server's side. Tables have a leading axis of slots; what stands in a free slot counts for nothing."""

    serial: Array  # (slots,) a number of its own for each plane ever made, or FREE
    outer: PyTree  # a_l, like x
    consensus: PyTree  # c_l, like z
    start: Array  # (slots,) the mean of b_il·y_i when the plane was made
    changes: Array  # (slots,) Σ p_i b_il·(y_i − y_i then), of the replies so far; of ADBO, whose clients send changes
    inner: Array  # (slots,) the mean of b_il·y_i, as the server knows it
    offset: Array  # (slots,) κ_l
    length: Array  # (slots,) n_l, the squared length of (b_l, c_l), weighted; 1 in slots never used
    multiplier: Array  # (slots,) λ_l ≥ 0, and 0 in free slots

    @classmethod
    def none(cls, x: PyTree, y: PyTree, capacity: int) -> Planes:
        """Begin without planes, with room for so many."""
        slots = capacity + 1
        zero = jnp.zeros(slots)
        return cls(
            serial=jnp.full(slots, FREE, jnp.int32),
            outer=empty(x, slots),
            consensus=empty(y, slots),
            start=zero,
            changes=zero,
            inner=zero,
            offset=zero,
            length=jnp.ones(slots),
            multiplier=zero,
        )

    @property
    def active(self) -> Array:
        """(slots,) which slots hold a plane."""
        return self.serial != FREE

    def values(self, x: PyTree, z: PyTree) -> Array:
        """Return the left-hand sides, (slots,); 0 in free slots."""
        total = products(self.outer, x) + self.inner + products(self.consensus, z) + self.offset
        return jnp.where(self.active, total, 0)

    def free_slot(self) -> Array:
        """Find the index of the first free slot, which the next plane takes."""
        return jnp.argmax(~self.active)

    def ascended(self, x: PyTree, z: PyTree, size: Array | float, damping: Array | float) -> Planes:
        """Take a step on all multipliers: λ_l ← max(0, λ_l + size·[value_l/n_l − damping·λ_l])."""
        direction = self.values(x, z) / self.length - damping * self.multiplier
        return self._replace(multiplier=jnp.maximum(self.multiplier + size * direction, 0))

    def with_cut(self, cut: Cut, tolerance: Array | float, x: PyTree, z: PyTree, serial: Array) -> Planes:
        """Put the cut into a free slot; κ makes its value at the point of the cut h − ε. Its multiplier is 0."""
        slot = self.free_slot()
        flat = optax.tree.vdot(cut.outer, x) + cut.inner + optax.tree.vdot(cut.consensus, z)
        return Planes(
            serial=self.serial.at[slot].set(serial),
            outer=put(self.outer, slot, cut.outer),
            consensus=put(self.consensus, slot, cut.consensus),
            start=self.start.at[slot].set(cut.inner),
            changes=self.changes.at[slot].set(0),
            inner=self.inner.at[slot].set(cut.inner),
            offset=self.offset.at[slot].set(cut.height - tolerance - flat),
            length=self.length.at[slot].set(4 * jnp.maximum(cut.height, tolerance)),
            multiplier=self.multiplier.at[slot].set(0),
        )

    def without_idle(self, newest: Array) -> Planes:
        """Drop planes whose multiplier is 0, but for the newest; and if no slot is free then, the oldest."""
        kept = self.active & ((self.serial == self.serial[newest]) | (self.multiplier > 0))
        kept &= ~(jnp.all(kept) & (self.serial == jnp.min(self.serial)))
        return self._replace(
            serial=jnp.where(kept, self.serial, FREE),
            inner=jnp.where(kept, self.inner, 0),
            multiplier=jnp.where(kept, self.multiplier, 0),
        )


def empty(tree: PyTree, rows: int) -> PyTree:
    """Make a table of zeros, whose rows are like `tree`."""
    return jax.tree.map(lambda leaf: jnp.zeros((rows, *jnp.shape(leaf)), leaf.dtype), tree)


def put(table: PyTree, row: Array, tree: PyTree) -> PyTree:
    """Return the table with that row replaced."""
    return jax.tree.map(lambda rows, leaf: rows.at[row].set(leaf.astype(rows.dtype)), table, tree)


def row(table: PyTree, index: Array) -> PyTree:
    """Return a row of a table."""
    return jax.tree.map(lambda rows: rows[index], table)


def products(table: PyTree, tree: PyTree) -> Array:
    """Return the inner product of each row with `tree`, (rows,)."""
    parts = jax.tree.map(lambda rows, leaf: jnp.tensordot(rows, leaf, leaf.ndim), table, tree)
    return jax.tree.reduce(jnp.add, parts)


def combined(weights: Array, table: PyTree) -> PyTree:
    """Return Σ_l weights_l · row l."""
    return jax.tree.map(lambda rows: jnp.tensordot(weights.astype(rows.dtype), rows, 1), table)
