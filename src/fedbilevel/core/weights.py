"""Submodels weight by weight: of all that can be cut a client holds the weights of largest magnitude, the others being
zero for it (FIARSE: Wu et al., NeurIPS 2024, arXiv:2407.19389, algorithm 1).

A capacity is a share of the weights, where with units, of which both ends of a weight must be held, it is about its
square in deep networks. The threshold θ is that of all of x together, and of all of y: on a single-level problem the
whole model's, which is the paper's default (a layer's own is its variant). What a client gets of x is the vector of the
weights that it holds, with a bit for each weight of the whole, held or not, and θ; it replies with such a vector. Bytes
count these. Operations are those of the whole model, since zeros make no dense product faster.

On a single-level problem a client's gradient is the paper's threshold-controlled biased one (TCB-GD),

    ∇f(w ⊙ m) ⊙ m ⊙ (1 + 2|w|θ/(|w| + θ)²)    with    m = 1 where |w| ≥ θ, w being that of the local step

so that a weight which falls below θ stays out for the rest of the round. On other problems it is that of the masked
loss, and m is the round's: the biased gradient has no Hessian, and descent on x needs one.

What departs: means are by p_i over those who were sent a weight, where the paper's program counts all alike whose
weight has moved; arrays that the structure never cuts are whole and a normalisation's are masked, where the paper masks
all but these; a client of capacity 1 takes plain steps, where the paper's θ is the least magnitude of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedbilevel.core.problem import Loss, Problem
from fedbilevel.core.submodel import HeldWeights, Pruned, UnitLayout, Units
from fedbilevel.core.tree import PyTree


@dataclass(frozen=True, eq=False)
class WeightLayout(UnitLayout):
    """A layout whose groups are x and y, and whose units are the entries of all arrays there that can be cut.

    Of x a client has {"held": (kept,), "whole": [the arrays that are never cut]}, and so of y.
    """

    like: Mapping[str, PyTree]  # "x", "y" -> its shapes and dtypes
    masked: Mapping[str, tuple[bool, ...]]  # "x", "y" -> of each leaf, whether it can be cut
    biased: bool  # whether gradients are TCB-GD's

    @classmethod
    def over(cls, unit_layout: UnitLayout, x: PyTree, y: PyTree, pruned: Pruned, *, biased: bool) -> WeightLayout:
        """Lay out the weights of all arrays that `unit_layout` can cut, of `pruned` alone: they have no partners."""
        like = dict(zip("xy", jax.eval_shape(lambda *trees: trees, x, y), strict=True))
        masked = {
            part: tuple(
                pruned in ("both", part) and any(axis.group in unit_layout.sizes for axis in of_leaf)
                for of_leaf in of_part
            )
            for part, of_part in unit_layout.axes.items()
        }
        sizes = {
            part: sum(leaf.size for leaf, cut in zip(jax.tree.leaves(like[part]), masked[part], strict=True) if cut)
            for part in like
            if any(masked[part])
        }
        return cls(sizes, unit_layout.axes, unit_layout.shapes, like, masked, biased)

    def shapes_of(self, kept: Mapping[str, int]) -> Units:
        least: Any = jax.ShapeDtypeStruct((), jnp.result_type(float))
        return {part: HeldWeights(places, least) for part, places in super().shapes_of(kept).items()}

    def sent(self, kinds: PyTree, message: PyTree, units: Units) -> PyTree:
        lacking = {part: units[part] for part in self.sizes if self._lacks(part, units)}
        if not lacking:
            return message
        flags = {part: jnp.zeros(self.sizes[part], bool).at[held.places].set(True) for part, held in lacking.items()}
        least = {part: held.least for part, held in lacking.items()}
        return PlacedWeights(self.cut(kinds, message, units), jax.tree.map(jnp.packbits, flags), least, self)

    def cut(self, kinds: PyTree, tree: PyTree, units: Units) -> PyTree:
        def change(kind: str, part: PyTree) -> PyTree:
            if not self._lacks(kind, units):
                return part
            places = units[kind].places
            held = jnp.take(self._vector(kind, part), places, mode="clip", unique_indices=True, indices_are_sorted=True)
            return {"held": held, "whole": self._never_cut(kind, part)}

        return jax.tree.map(change, kinds, tree)

    def put(self, kinds: PyTree, tree: PyTree, units: Units) -> PyTree:
        def change(kind: str, part: PyTree) -> PyTree:
            return self.whole(kind, part, units[kind].places) if self._lacks(kind, units) else part

        return jax.tree.map(change, kinds, tree)

    def held(self, kinds: PyTree, tree: PyTree, units: Units, amount: Array) -> PyTree:
        def filled(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.full(leaf.shape, amount, leaf.dtype), tree)

        def fill(kind: str, part: PyTree) -> PyTree:
            if not self._lacks(kind, units):
                return filled(part)
            places, others = units[kind].places, filled(self._never_cut(kind, self.like[kind]))
            return self.whole(kind, {"held": jnp.full(places.shape, amount), "whole": others}, places)

        return jax.tree.map(fill, kinds, tree)

    def importance(self, x: PyTree, y: PyTree) -> dict[str, Array]:
        """Return by part, (weights,), the magnitudes."""
        trees = {"x": x, "y": y}
        return {part: jnp.abs(self._vector(part, trees[part])) for part in self.sizes}

    def whole(self, kind: str, part: PyTree, places: Array) -> PyTree:
        """Put what a client has of x, or of y, at its places in the whole, with zeros elsewhere."""
        vector = jnp.zeros(self.sizes[kind], part["held"].dtype)
        vector = vector.at[places].set(part["held"], unique_indices=True, indices_are_sorted=True)
        leaves, others, start = [], iter(part["whole"]), 0
        for like, cut in zip(jax.tree.leaves(self.like[kind]), self.masked[kind], strict=True):
            own = vector[start : start + like.size].reshape(like.shape).astype(like.dtype) if cut else next(others)
            leaves.append(own)
            start += like.size if cut else 0
        return jax.tree.unflatten(jax.tree.structure(self.like[kind]), leaves)

    def _lacks(self, kind: str, units: Units) -> bool:
        """Whether a client with these units lacks some of a part of that kind."""
        return kind in self.sizes and units[kind].places.shape[0] < self.sizes[kind]

    def _vector(self, kind: str, part: PyTree) -> Array:
        """Join all weights of a part that can be cut."""
        pairs = zip(jax.tree.leaves(part), self.masked[kind], strict=True)
        return jnp.concatenate([jnp.ravel(leaf) for leaf, cut in pairs if cut])

    def _never_cut(self, kind: str, part: PyTree) -> list[Any]:
        return [leaf for leaf, cut in zip(jax.tree.leaves(part), self.masked[kind], strict=True) if not cut]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedWeights:
    """A message to a client that holds some weights, with all that it has to know of their places."""

    content: PyTree
    bits: Mapping[str, Array]  # "x", "y" -> eight flags to a byte: which weights of the whole it holds
    least: Mapping[str, Array]  # "x", "y" -> θ, the least magnitude of these as the round begins
    layout: WeightLayout = field(metadata={"static": True})

    def on_whole_models(self, problem: Problem) -> Problem:
        """Make the problem, in what a client has of x and y, whose losses are those of the whole model."""
        layout, sizes = self.layout, self.layout.sizes

        def whole(kind: str, part: PyTree) -> PyTree:
            if kind not in self.bits:
                return part
            held = part["held"]
            flags = jnp.unpackbits(self.bits[kind], count=sizes[kind])
            if layout.biased:
                part = {**part, "held": controlled(held, self.least[kind].astype(held.dtype))}
            return layout.whole(kind, part, jnp.nonzero(flags, size=held.shape[0])[0])

        def change(loss: Loss) -> Loss:
            return lambda x, y, batch: loss(whole("x", x), whole("y", y), batch)

        return problem.with_losses(change)


def controlled(weights: Array, least: Array) -> Array:
    """Return the weights with 0 for those below the threshold, and the slopes of TCB-GD."""
    size = jnp.abs(weights)
    keep, total = size >= least, size + least
    slope = keep * (1 + 2 * size * least / jnp.where(total > 0, total, 1) ** 2)
    return lax.stop_gradient(keep * weights) + lax.stop_gradient(slope) * (weights - lax.stop_gradient(weights))
