"""Define submodels of single weights: a client holds the weights of largest magnitude, and the others are 0.

The method is FIARSE (Wu et al., NeurIPS 2024, arXiv:2407.19389, algorithm 1).

A capacity is a share of the weights. With units, by contrast, a client holds a weight only if it holds the units at
both ends, so that its share of the weights of a deep network is about the square of its capacity. A client holds the
weights whose magnitude is at least a threshold θ; there is one threshold for all of x and one for all of y. On a
single-level problem this is one threshold for the whole model, as in the paper by default; its variant has a threshold
for each layer. For x, a client gets the vector of the weights that it holds, a bit for each weight of the whole x that
says whether the client holds this weight, and θ. It gets the same for y. It replies with vectors of the weights that it
holds. Bytes are counted for what is sent. Operations are those of the whole model, since zeros do not make a dense
product faster.

On a single-level problem, the gradient of a client is the threshold-controlled biased gradient of the paper (TCB-GD):

    ∇f(w ⊙ m) ⊙ m ⊙ (1 + 2|w|θ/(|w| + θ)²)    with    m = 1 where |w| ≥ θ, else 0

Here w are the weights in the local step, so that a weight that falls below θ is left out for the rest of the round. On
other problems, the gradient is that of the masked loss, and m does not change during a round: the biased gradient has
no Hessian, which descent on x needs.

There are three differences from the paper:

- Means are weighted by p_i over the clients that were sent a weight. The paper's program gives the same weight to all
  clients whose weight has moved.
- Arrays that the structure never cuts are whole, and those of a normalisation are masked. The paper masks all arrays
  except those of a normalisation.
- A client of capacity 1 takes plain steps. In the paper its θ is the least magnitude of all weights.
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
    """Hold a layout with the groups x and y, whose units are the entries of all arrays that can be cut.

    A client's part of x is a dict, and so is its part of y. Its entry "held" is a vector with the weights that the
    client holds, and "whole" is a list of the arrays that are never cut.
    """

    like: Mapping[str, PyTree]  # the shapes and dtypes of "x" and of "y"
    masked: Mapping[str, tuple[bool, ...]]  # for each leaf of "x" and of "y", whether it can be cut
    biased: bool  # whether gradients are the biased gradients of TCB-GD

    @classmethod
    def over(cls, unit_layout: UnitLayout, x: PyTree, y: PyTree, pruned: Pruned, *, biased: bool) -> WeightLayout:
        """Return the layout of all weights in the arrays that `unit_layout` can cut; `pruned` is "x", "y" or "both"."""
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
        """Return the magnitudes of the weights of "x" and of "y", each as an array of shape (weights,)."""
        trees = {"x": x, "y": y}
        return {part: jnp.abs(self._vector(part, trees[part])) for part in self.sizes}

    def whole(self, kind: str, part: PyTree, places: Array) -> PyTree:
        """Return the whole x, or y, with a client's weights at their places and zeros elsewhere."""
        vector = jnp.zeros(self.sizes[kind], part["held"].dtype)
        vector = vector.at[places].set(part["held"], unique_indices=True, indices_are_sorted=True)
        leaves, others, start = [], iter(part["whole"]), 0
        for like, cut in zip(jax.tree.leaves(self.like[kind]), self.masked[kind], strict=True):
            leaf = vector[start : start + like.size].reshape(like.shape).astype(like.dtype) if cut else next(others)
            leaves.append(leaf)
            start += like.size if cut else 0
        return jax.tree.unflatten(jax.tree.structure(self.like[kind]), leaves)

    def _lacks(self, kind: str, units: Units) -> bool:
        """Return whether a client that holds only these units lacks some of the weights of parts of this kind."""
        return kind in self.sizes and units[kind].places.shape[0] < self.sizes[kind]

    def _vector(self, kind: str, part: PyTree) -> Array:
        """Return all weights of a part that can be cut, as one vector."""
        pairs = zip(jax.tree.leaves(part), self.masked[kind], strict=True)
        return jnp.concatenate([jnp.ravel(leaf) for leaf, cut in pairs if cut])

    def _never_cut(self, kind: str, part: PyTree) -> list[Any]:
        return [leaf for leaf, cut in zip(jax.tree.leaves(part), self.masked[kind], strict=True) if not cut]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedWeights:
    """Hold a message to a client that has only some weights, together with the places of these weights."""

    content: PyTree
    bits: Mapping[str, Array]  # for "x" and "y": a boolean for each weight, True if the client holds this weight
    least: Mapping[str, Array]  # for "x" and "y": θ, the least magnitude of the held weights at the start of the round
    layout: WeightLayout = field(metadata={"static": True})

    def on_whole_models(self, problem: Problem) -> Problem:
        """Return the problem whose losses take a client's parts of x and y, and evaluate the whole model with them."""
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
    """Return the weights, with 0 for those below the threshold `least`, and with the biased derivatives of FIARSE."""
    size = jnp.abs(weights)
    keep, total = size >= least, size + least
    slope = keep * (1 + 2 * size * least / jnp.where(total > 0, total, 1) ** 2)
    return lax.stop_gradient(keep * weights) + lax.stop_gradient(slope) * (weights - lax.stop_gradient(weights))
