"""Define submodels: a client of small capacity holds some units of a model, in arrays that are physically smaller.

A unit can be left out of a model as a whole: a hidden neuron, or a channel, with all its weights. A `Structure` says
which axes of the arrays of x and y run over the units of a group. A policy chooses the units that a client holds:

importance   The units whose weights have the largest sum of squares (RABO).
weights      Not units, but the single weights of largest magnitude; the others are 0. (FIARSE: Wu et al., NeurIPS 2024;
             core/weights.py lists the differences.)
static       The first units, always the same. (HeteroFL: Diao, Ding, Tarokh, ICLR 2021, without its division of
             features by the capacity, its static batch normalisation and its masked cross-entropy.)
rolling      A window that moves on by one unit each round and wraps around. (FedRolex: Alam et al., NeurIPS 2022. Its
             program has the three additions that `static` leaves out.)
random       Units that each client draws anew in each round; with `fixed`, once.
covered      One of the segments into which the units of a group are divided, each as long as a client can hold. The
             segments are dealt out evenly to the clients of a capacity, so that the least coverage of a unit is as
             large as possible. In each round they are dealt out anew, and separately for each group. So over many
             rounds, every weight that connects units of two groups is held by some client. With `fixed`, the segments
             are dealt out only once. We chose this policy for OAP (Zhou et al., NeurIPS 2023), whose theorems hold for
             arbitrary masks and depend on the least coverage; its experiments have other masks.

Numbers of units are rounded to the nearest whole number, whereas HeteroFL and FedRolex round up. Means are weighted by
p_i, whereas HeteroFL gives all clients the same weight.

All methods except ADBO, SDBO, FedEx, FISM, IR-IG, IRG and BiFISTA support these policies: `Submodels(method,
policy=…)`, or --set submodels.policy=…; see docs/how-to/submodels.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core.config import config, static
from fedbilevel.core.errors import ConfigurationError, require, require_count, unknown
from fedbilevel.core.tree import PyTree

WHOLE, NUMBER = "whole", "number"
Pruned = Literal["both", "x", "y"]
Units = Mapping[str, Any]
"""The units that a client holds, by group: an array of ascending indices; for the policy "weights", `HeldWeights`."""
Policy = Literal["importance", "weights", "static", "rolling", "random", "covered"]


@dataclass(frozen=True, eq=False)
class Structure:
    """Declare which axes of the arrays of x and y run over the units of a group.

    For a dense layer and the head on it, x = {"weight": "_ hidden", "bias": "hidden"} and
    y = {"weight": "hidden _", "bias": "_"}. Here the group "hidden" has axes in x and in y.

    Args:
        x: a tree with the structure of x that has a string for each array. The string has a word for each axis: "_" for
            an axis that is never cut, the name of a group for an axis with one entry per unit, or "49*name" for an axis
            with 49 entries per unit, such as a flattened (49, units). None: x is never cut.
        y: the same for the arrays of y; None: y is never cut.
    """

    x: PyTree = None
    y: PyTree = None


class ClientSlot(NamedTuple):
    """Identify a client and a round for which units are chosen."""

    round: Array | int
    key: Array  # the key of the run
    id: Array | int
    rank: Array | int  # the client's number among the clients of its capacity
    peers: int  # the number of clients of its capacity


class HeldWeights(NamedTuple):
    """Hold the places of the weights of x, or of y, that a client has."""

    places: Array  # ascending indices among all weights that can be cut, as an array of shape (kept,)
    least: Array  # the least magnitude of these weights


class Axis(NamedTuple):
    """Describe an axis of an array, which runs `times` times over all units of `group`.

    An axis whose group is "" is never cut.
    """

    group: str
    times: int


@dataclass(frozen=True, eq=False)
class UnitLayout:
    """Hold a structure that was checked against x and y."""

    sizes: Mapping[str, int]  # the number of units of each group that may be cut
    axes: Mapping[str, tuple[tuple[Axis, ...], ...]]  # the axes of each leaf of "x" and of "y"
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]  # the shape of each leaf of "x" and of "y"

    @classmethod
    def of(cls, structure: Structure, x: PyTree, y: PyTree, pruned: Pruned = "both") -> UnitLayout:
        """Check a structure against x and y, and return its layout.

        With `pruned` = "x", groups that have axes in y are never cut; with "y", groups that have axes in x are never
        cut.

        Raises:
            ConfigurationError: the axes of an array disagree with the structure or with another array; the message
                names the array.
        """
        sizes: dict[str, tuple[int, str]] = {}
        touched: dict[str, set[str]] = {}
        axes, shapes = {}, {}
        for part, tree, words in (("x", x, structure.x), ("y", y, structure.y)):
            leaves = jax.tree_util.tree_leaves_with_path(tree)
            said = _words(part, tree, words)
            shapes[part] = tuple(tuple(np.shape(leaf)) for _, leaf in leaves)
            axes[part] = tuple(
                tuple(_axes(f"Structure.{part}{jax.tree_util.keystr(path)}", word, np.shape(leaf), sizes))
                for (path, leaf), word in zip(leaves, said, strict=True)
            )
            for group in {axis.group for of_leaf in axes[part] for axis in of_leaf if axis.group}:
                touched.setdefault(group, set()).add(part)
        allowed = {"both": ({"x"}, {"y"}, {"x", "y"}), "x": ({"x"},), "y": ({"y"},)}[pruned]
        return cls({group: sizes[group][0] for group in sorted(touched) if touched[group] in allowed}, axes, shapes)

    def kept(self, capacity: float) -> dict[str, int]:
        """Return the number of units of each group that a client of a capacity holds, rounded to the nearest.

        Raises:
            ConfigurationError: the capacity leaves a group without units.
        """
        kept = {group: math.floor(capacity * size + 0.5) for group, size in self.sizes.items()}
        for group, count in kept.items():
            size = self.sizes[group]
            if count == 0:
                message = (
                    f"capacity {capacity:g} leaves group {group!r} with none of its {size} units: use a capacity of at "
                    f"least {0.5 / size:.3g}, or a wider layer"
                )
                allowed = f"at least {0.5 / size:.3g}, for the {size} units of group {group!r}"
                raise ConfigurationError(path="capacity", got=capacity, allowed=allowed, message=message)
        return kept

    def shapes_of(self, kept: Mapping[str, int]) -> Units:
        """Return the shapes of `Units` for a client that holds `kept` units of each group."""
        return {group: jax.ShapeDtypeStruct((count,), jnp.int32) for group, count in kept.items()}

    def sent(self, kinds: PyTree, message: PyTree, units: Units) -> PyTree:
        """Return a message cut to a client's units, together with all information that the client needs about them."""
        return self.cut(kinds, message, units)

    def cut(self, kinds: PyTree, tree: PyTree, units: Units) -> PyTree:
        """Return the submodel's part of a tree: its arrays, with only the entries of a client's units.

        Args:
            kinds: the kind of each part of `tree`: "x" or "y" for a part with the structure of x or of y, and "whole"
                or "number" for a part that is never cut. A kind applies to the whole subtree at its place.
            tree: a message, or any other tree of whole arrays.
            units: the client's units, by group.
        """
        return jax.tree.map(lambda kind, part: self._each(kind, part, units, self._cut), kinds, tree)

    def put(self, kinds: PyTree, tree: PyTree, units: Units) -> PyTree:
        """Undo `cut`: return whole arrays, with zeros outside the submodel."""
        return jax.tree.map(lambda kind, part: self._each(kind, part, units, self._put), kinds, tree)

    def held(self, kinds: PyTree, tree: PyTree, units: Units, amount: Array) -> PyTree:
        """Return whole arrays, in the shapes of `tree`, with the number `amount` inside the submodel and 0 outside."""

        def fill(leaf: Any, axes: tuple[Axis, ...], shape: tuple[int, ...], units: Units) -> Array:
            full = jnp.asarray(amount, leaf.dtype)
            for place, axis in enumerate(axes):
                if axis.group in self.sizes:
                    mask = jnp.zeros(self.sizes[axis.group], leaf.dtype).at[units[axis.group]].set(1)
                    full = full * jnp.tile(mask, axis.times).reshape(-1, *[1] * (len(axes) - place - 1))
            return jnp.broadcast_to(full, shape)

        return jax.tree.map(lambda kind, part: self._each(kind, part, units, fill, amount), kinds, tree)

    def importance(self, x: PyTree, y: PyTree) -> dict[str, Array]:
        """Return the sum of squares of each unit's weights, as an array of shape (units,) for each group."""
        total = {group: jnp.zeros(size) for group, size in self.sizes.items()}
        for part, tree in (("x", x), ("y", y)):
            for leaf, axes in zip(jax.tree.leaves(tree), self.axes[part], strict=True):
                for place, (group, times) in enumerate(axes):
                    if group in self.sizes:
                        others = tuple(other for other in range(len(axes)) if other != place)
                        squares = jnp.sum(jnp.square(leaf), axis=others).reshape(times, -1).sum(axis=0)
                        total[group] = total[group] + squares.astype(total[group].dtype)
        return total

    def _each(self, kind: str, part: PyTree, units: Units, change: Any, whole: Any = None) -> PyTree:
        """Apply `change` to each leaf of a part of this kind.

        A part of a kind that is never cut is returned unchanged; if `whole` is given, each of its entries becomes
        `whole`.
        """
        if kind in (WHOLE, NUMBER):
            return part if whole is None else jax.tree.map(lambda leaf: jnp.full(leaf.shape, whole, leaf.dtype), part)
        leaves, tree = jax.tree.flatten(part)
        if not leaves:
            return part
        pairs = zip(leaves, self.axes[kind], self.shapes[kind], strict=True)
        return jax.tree.unflatten(tree, [change(leaf, axes, shape, units) for leaf, axes, shape in pairs])

    def _cut(self, leaf: Array, axes: tuple[Axis, ...], shape: tuple[int, ...], units: Units) -> Array:
        for place, axis in enumerate(axes):
            if axis.group in self.sizes:
                chosen = _entries(units[axis.group], self.sizes[axis.group], axis.times)
                leaf = jnp.take(leaf, chosen, axis=place, mode="clip", unique_indices=True, indices_are_sorted=True)
        return leaf

    def _put(self, leaf: Array, axes: tuple[Axis, ...], shape: tuple[int, ...], units: Units) -> Array:
        for place, axis in enumerate(axes):
            if axis.group in self.sizes:
                size, kept = self.sizes[axis.group] * axis.times, leaf.shape[place]
                chosen = _entries(units[axis.group], self.sizes[axis.group], axis.times)
                source = jnp.full(size, kept, jnp.int32).at[chosen].set(jnp.arange(kept, dtype=jnp.int32))
                padding = [(0, int(other == place)) for other in range(leaf.ndim)]
                # units that the client does not hold get the entry of the padding, which is 0
                leaf = jnp.take(jnp.pad(leaf, padding), source, axis=place, mode="clip")
        return leaf


def _entries(units: Array, size: int, times: int) -> Array:
    """Return the indices of units along an axis that has `times` runs over all `size` units."""
    if times == 1:
        return units
    return (jnp.arange(times, dtype=units.dtype)[:, None] * size + units).reshape(-1)


def _words(part: str, tree: PyTree, words: PyTree) -> list[str]:
    """Return the string of a structure for each leaf of `tree`; it says which axes of the leaf run over units."""
    leaves, shape = jax.tree.flatten(tree)
    if words is None:
        return [" ".join("_" * np.ndim(leaf)) for leaf in leaves]
    strings, strings_shape = jax.tree.flatten(words)
    if strings_shape != shape:  # type: ignore[operator]
        mine, theirs = (
            {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(given)}
            for given in (tree, words)
        )
        lacks = f"it lacks {sorted(mine - theirs)} and has {sorted(theirs - mine)}" if mine != theirs else str(shape)
        raise ConfigurationError(f"Structure.{part} is not a tree with the structure of {part}: {lacks}")
    return strings


def _axes(name: str, word: object, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]) -> Iterator[Axis]:
    """Yield the axes that a structure's string, `word`, describes for the array called `name`.

    `sizes` gets the number of units of each new group, and the name of the array that has it first.
    """
    require(isinstance(word, str), name, word, 'a string with a word for each axis, e.g. "_ hidden"')
    words = str(word).split()
    require(len(words) == len(shape), name, word, f"of {len(shape)} words, one for each axis of {shape}")
    for place, (text, length) in enumerate(zip(words, shape, strict=True)):
        if text == "_":
            yield Axis("", 1)
            continue
        count, star, group = text.rpartition("*")
        fits = group.isidentifier() and (not star or (count.isdigit() and int(count) >= 1))
        require(fits, name, word, 'made of "_", names of groups, and names with a factor such as "49*name"')
        times = int(count) if star else 1
        require(
            length % times == 0, f"{name}, axis {place}", word, f"a factor that divides the axis's {length} entries"
        )
        units, where = sizes.setdefault(group, (length // times, name))
        if units != length // times:
            raise ConfigurationError(
                f"{name}, axis {place}: {length // times} units of group {group!r}, but {where} has {units}"
            )
        yield Axis(group, times)


@config
class UnitPolicy:
    """Choose the units (neurons or channels) that clients of limited capacity hold; without capacities, do nothing.

    Args:
        policy: the units that a client holds: "importance": those of largest weights; "weights": the largest single
            weights of all units; "static": the first units; "rolling": a window that moves on by one unit each round;
            "random": units that each client draws; "covered": segments of units that are dealt out so that as many
            clients as possible hold each unit.
        pruned: the variable whose units may be left out: "x", "y" or "both". With "x", groups of units that also have
            axes in y are never cut.
        fixed: whether "random" and "covered" choose the same units in every round.
        min_coverage: for "covered": each segment except one goes to this number of clients of a capacity. The remaining
            segment goes to all other clients of this capacity. None: segments are dealt evenly.
    """

    policy: Policy = static(default="importance")
    pruned: Pruned = static(default="both")
    fixed: bool = static(default=False)
    min_coverage: int | None = static(default=None)

    def validate(self) -> None:
        """Refuse unknown choices, and choices that do not go together."""
        for field, allowed in {"policy": get_args(Policy), "pruned": get_args(Pruned)}.items():
            if (got := {"policy": self.policy, "pruned": self.pruned}[field]) not in allowed:
                raise unknown(f"Submodels.{field}", got, allowed)
        drawn = self.policy in ("random", "covered")
        require(drawn or not self.fixed, "Submodels.fixed", True, f"False with policy = {self.policy!r}")
        require_count("Submodels.min_coverage", self.min_coverage, optional=True)
        given = self.min_coverage is not None
        require(
            self.policy == "covered" or not given,
            "Submodels.min_coverage",
            self.min_coverage,
            f"None with policy = {self.policy!r}",
        )

    @property
    def alike(self) -> bool:
        """Return whether all clients of the same capacity hold the same units."""
        return self.policy in ("importance", "weights", "static", "rolling")

    def units(
        self, unit_layout: UnitLayout, kept: Mapping[str, int], importance: Mapping[str, Array], holder: ClientSlot
    ) -> Units:
        """Return the units that a client holds; `kept` has the number of units in each group."""
        key = holder.key if self.fixed else jax.random.fold_in(holder.key, holder.round)
        chosen: dict[str, Any] = {}
        for number, (group, count) in enumerate(sorted(kept.items())):
            own_key, size = jax.random.fold_in(key, number), unit_layout.sizes[group]
            if self.policy in ("importance", "weights"):
                some = jnp.argsort(-importance[group], stable=True)[:count]
            elif self.policy == "static":
                some = jnp.arange(count)
            elif self.policy == "rolling":
                some = (jnp.arange(count) + holder.round) % size
            elif self.policy == "random":
                some = jax.random.permutation(jax.random.fold_in(own_key, holder.id), size)[:count]
            else:
                some = self.segment(size, count, own_key, holder)
            chosen[group] = jnp.sort(some.astype(jnp.int32))
            if self.policy == "weights":
                chosen[group] = HeldWeights(chosen[group], importance[group][some[-1]])
        return chosen

    def segment(self, size: int, count: int, key: Array, holder: ClientSlot) -> Array:
        """Return the segment of `count` units that a client gets in a group of `size` units.

        There are ⌈size/count⌉ segments. The last segment may overlap the segment before it.
        """
        segments = -(-size // count)
        dealt = holder.rank % segments
        if self.min_coverage is not None and segments > 1:
            enough = self.min_coverage * segments <= holder.peers
            allowed = f"at most {holder.peers // segments}: {holder.peers} clients share {segments} segments"
            require(enough, "Submodels.min_coverage", self.min_coverage, allowed)
            dealt = jnp.where(holder.rank < self.min_coverage * segments, dealt, 0)
        first = (dealt + jax.random.randint(key, (), 0, segments)) % segments * count
        return jnp.minimum(first, size - count) + jnp.arange(count)
