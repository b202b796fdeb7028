"""Check a structure: the units of a group are interchangeable, so that permuting them must not change a loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.problem import Problem
from fedbilevel.core.submodel import UnitLayout
from fedbilevel.core.tree import PyTree, epsilon, near, split

# A sum of n terms in another order differs by about √n ε of the size of its terms; this is for n = 10⁴ and ten layers.
ROUNDING = 1000


def check_structure(
    problem: Problem, x: PyTree, y: PyTree, outer_batch: PyTree, inner_batch: PyTree, *, key: int = 0
) -> None:
    """Permute the units of each group, consistently over all axes that the structure names, and compare the losses.

    The losses must agree to 1000 ε of their size, where ε is the precision of the coarsest floating type among x, y and
    the loss: 1e-4 in float32, 2e-13 in float64. They are compared at a point near (x, y): every array is moved at
    random by a tenth of its root mean square, or by a tenth if it is 0, since permuting equal biases would show
    nothing. The size is the larger absolute value of the loss at (x, y) and at this point.

    Args:
        problem: a problem with a structure.
        x, y: as for `solve`; y is None for a `SingleLevel` problem.
        outer_batch, inner_batch: samples with a leading axis, as the losses take them.
        key: the seed of moves and permutations.

    Raises:
        ConfigurationError: the problem has no structure; the structure does not fit x and y; a loss is not finite; or a
            loss changes, and the message names the groups whose axes are incomplete or wrong.
    """
    structure = problem.structure
    if structure is None:
        raise ConfigurationError(path="problem.structure", got=None, allowed="a Structure, which is checked")
    (x, x_fixed), (y, y_fixed) = split(x), split(y)
    problem = problem.with_fixed(x_fixed, y_fixed)
    unit_layout = UnitLayout.of(structure, x, y)
    rng = np.random.default_rng(key)
    moved = near((x, y), rng)
    losses = {"outer": (jax.jit(problem.outer), outer_batch), "inner": (jax.jit(problem.inner), inner_batch)}
    before = {name: loss(*moved, batch) for name, (loss, batch) in losses.items()}
    size = {name: max(abs(float(before[name])), abs(float(loss(x, y, b)))) for name, (loss, b) in losses.items()}
    for name, value in size.items():
        require(np.isfinite(value), f"the {name} loss at (x, y) and near it", value, "finite")
    found = []
    for group, units in unit_layout.sizes.items():
        order = _derangement(units, rng)
        permuted = [_permuted(unit_layout, part, tree, group, order) for part, tree in zip("xy", moved, strict=True)]
        for name, (loss, batch) in losses.items():
            after = float(loss(*permuted, batch))
            if not abs(after - float(before[name])) <= ROUNDING * epsilon(x, y, before[name]) * size[name]:
                found.append(f"{group!r} ({name} loss {float(before[name]):.9g} became {after:.9g})")
    if found:
        message = "permuting units changes a loss, so that the axes of these groups are incomplete or wrong: "
        message += ", ".join(found)
        allowed = "groups whose units can be permuted"
        raise ConfigurationError(path="problem.structure", got=found, allowed=allowed, message=message)


def _derangement(units: int, rng: np.random.Generator) -> np.ndarray:
    """Return a random cyclic permutation of the units, which moves every unit unless there is only one."""
    order = rng.permutation(units)
    moved = np.empty(units, np.int64)
    moved[order] = np.roll(order, 1)
    return moved


def _permuted(unit_layout: UnitLayout, part: str, tree: PyTree, group: str, order: np.ndarray) -> PyTree:
    """Return `tree`, which is x or y, with the units of `group` in the order `order`."""
    leaves, shape = jax.tree.flatten(tree)
    for number, axes in enumerate(unit_layout.axes[part]):
        for place, axis in enumerate(axes):
            if axis.group == group:
                leaf = leaves[number]
                runs = leaf.reshape(*leaf.shape[:place], axis.times, len(order), *leaf.shape[place + 1 :])
                leaves[number] = jnp.take(runs, order, axis=place + 1).reshape(leaf.shape)
    return jax.tree.unflatten(shape, leaves)
