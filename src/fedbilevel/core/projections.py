"""Make projections onto convex sets for x: functions that return the point of a set that is nearest to x.

The formulas are those of Optax. This module adds checks of the arguments, balls around any point, and intersections of
two sets. If x is a model, the projection applies to its floating arrays, whose types are kept.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from optax import projections

from fedbilevel.core.errors import ConfigurationError, require, require_count
from fedbilevel.core.problem import Project
from fedbilevel.core.tree import PyTree, epsilon, is_floating, is_none, join, nonfinite_leaves, split
from fedbilevel.machinery.kept import compiled

__all__ = ["ball", "box", "half_space", "intersection", "simplex"]

POINTS = 20  # the number of random points around x0, and around 0, on which a projection is checked
ENTRIES = 10_000_000  # the largest number of entries of all these points together; a large x has fewer points
INEXACT = 1e-6  # the relative error that a user's projection may have, for example if it is iterative


def box(lower: Any, upper: Any) -> Project:
    """Return the projection onto a box, {x : lower ≤ x ≤ upper} for all entries.

    Args:
        lower, upper: numbers, or trees with the shapes of x. On a side with an infinite bound, x is not bounded.

    Raises:
        ConfigurationError: a bound is NaN or not a number, or the box is empty.
    """
    lows, highs = _numbers(lower), _numbers(upper)
    for name, bound, entries in (("lower", lower, lows), ("upper", upper, highs)):
        good = bool(entries) and not any(np.any(np.isnan(entry)) for entry in entries)
        require(good, f"box.{name}", bound, "a number, or a tree with the structure of x, without NaN")
    pairs = zip(lows, highs, strict=True) if len(lows) == len(highs) else product(lows, highs)
    crossed = any(np.any(low > high) for low, high in pairs)
    require(not crossed, "box.lower", lower, f"nowhere above upper = {upper}, so that the box is not empty")
    return _on_arrays(
        lambda x: projections.projection_box(x, _like(x, "box.lower", lower), _like(x, "box.upper", upper))
    )


def ball(radius: float, center: PyTree = 0.0) -> Project:
    """Return the projection onto a ball, {x : ‖x − center‖ ≤ radius}, with the norm over all entries of x.

    Args:
        radius: a positive number.
        center: a tree with the shapes of x, or one number for all entries.
    """
    _require_size("ball.radius", radius)
    middle = _numbers(center)
    require(bool(middle) and not nonfinite_leaves(middle), "ball.center", center, "finite")

    def project(x: PyTree) -> PyTree:
        middle = _like(x, "ball.center", center)
        return optax.tree.add(middle, projections.projection_l2_ball(optax.tree.sub(x, middle), radius))

    return _on_arrays(project)


def simplex(total: float = 1.0) -> Project:
    """Return the projection onto a simplex, {x : x ≥ 0, Σ x = total}, with the sum over all entries of x."""
    _require_size("simplex.total", total)
    return _on_arrays(lambda x: projections.projection_simplex(x, total))


def half_space(normal: PyTree, offset: float) -> Project:
    """Return the projection onto a half-space, {x : ⟨normal, x⟩ ≤ offset}.

    Args:
        normal: a tree with the shapes of x, or one number for all entries; not zero.
        offset: a number.
    """
    entries = _numbers(normal)
    some = any(np.any(entry) for entry in entries) and not nonfinite_leaves(entries)
    require(some, "half_space.normal", normal, "finite, and not all zero")
    require(_is_number(offset) and bool(np.isfinite(offset)), "half_space.offset", offset, "a finite number")
    return _on_arrays(lambda x: projections.projection_halfspace(x, _like(x, "half_space.normal", normal), offset))


def intersection(first: Project, second: Project, *, max_steps: int = 10_000) -> Project:
    """Return the projection onto the intersection of two convex sets, by Dykstra's algorithm.

    The algorithm ends when its corrections change by at most 10 ε·(1 + ‖x‖) in a step, where ε is the precision of x
    (the criterion of E. G. Birgin and M. Raydan, 2005). If it does not end within `max_steps`, for example because the
    sets have no common point, the result is NaN. The number of steps grows with the distance of x from the sets.
    Source: J. P. Boyle, R. L. Dykstra, "A Method for Finding Projections onto the Intersection of Convex Sets in
    Hilbert Spaces", 1986.

    Args:
        first, second: projections onto the two sets.
        max_steps: the largest number of steps.
    """
    for name, project in (("first", first), ("second", second)):
        require(callable(project), f"intersection.{name}", project, "a projection (x) -> the nearest point of a set")
    require_count("intersection.max_steps", max_steps)

    def both(x: PyTree) -> PyTree:
        small = 10 * epsilon(x) * (1 + optax.tree.norm(x))

        def unfinished(loop: tuple[Array, PyTree, PyTree, PyTree, Array]) -> Array:
            step, *_, change = loop
            return (step < max_steps) & (change > small)

        def again(loop: tuple[Array, PyTree, PyTree, PyTree, Array]) -> tuple[Array, PyTree, PyTree, PyTree, Array]:
            step, point, p, q, _ = loop
            toward = optax.tree.add(point, p)
            there = first(toward)
            new_p = optax.tree.sub(toward, there)
            toward = optax.tree.add(there, q)
            point = second(toward)
            new_q = optax.tree.sub(toward, point)
            moved = optax.tree.norm((optax.tree.sub(new_p, p), optax.tree.sub(new_q, q)))
            return step + 1, point, new_p, new_q, moved.astype(small.dtype)

        zero = optax.tree.zeros_like(x)
        start = jnp.zeros((), jnp.int32), x, zero, zero, jnp.full_like(small, jnp.inf)
        *_, point, _, _, change = lax.while_loop(unfinished, again, start)
        return jax.tree.map(lambda leaf: jnp.where(change <= small, leaf, jnp.nan), point)

    return _on_arrays(both)


def check_set(field: str, project: Project, x: PyTree, anywhere: bool = False) -> PyTree:
    """Refuse a function that is not a projection onto a convex set, and an x0 outside the set.

    Args:
        field: the name of the function in messages.
        project: the function.
        x: the starting point, x0.
        anywhere: whether x0 may be outside the set.

    Returns:
        Points of the set, as a tree whose leaves have a leading axis of points.
    """
    points = points_for(x)
    images = check_projection(field, project, x, points)
    start = as_rows(points)[0]  # x
    away = float(np.linalg.norm(as_rows(images)[0] - start))
    inside = anywhere or away <= INEXACT * (1 + float(np.linalg.norm(start)))
    require(inside, "x0", f"{away:.3g} away from the set", f"in the set, such as {field}(x0)")
    return images


def check_projection(field: str, project: Project, x: PyTree, points: PyTree) -> PyTree:
    """Refuse a function that is not a projection onto a convex set, by a check on `points`; return the points' images.

    The projection p = P(u) onto a convex set satisfies P(p) = p, and ⟨u − p, q − p⟩ ≤ 0 for all points q of the set. If
    the image of the first point is not finite, the set may be empty, and the function is refused. Other points whose
    images are not finite are left out, since an intersection may need too many steps for points far away.

    Args:
        field: the name of the function in messages.
        project: the function.
        x: a point, whose shapes and types the function must keep.
        points: points on which the function is checked, as a tree whose leaves have a leading axis of points.
    """
    shapes = [jax.eval_shape(function, x) for function in (lambda x: x, project)]
    mine, its = (jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree) for tree in shapes)
    require(mine == its, f"{field}(x0)", its, f"of the shapes and types of x0, {mine}")
    images = of_each(project, points)
    finite = np.all(np.isfinite(as_rows(images)), axis=1)
    if not finite[0]:
        message = f"{field}(x0) is not finite; the set may be empty, as for sets that do not meet"
        raise ConfigurationError(path=f"{field}(x0)", got="not finite", allowed="a point of X", message=message)
    points, images = (jax.tree.map(lambda leaf: leaf[finite], tree) for tree in (points, images))
    u, p, again = map(as_rows, (points, images, of_each(project, images)))
    scale = 1 + np.linalg.norm(u, axis=1)
    slack = max(INEXACT, 1e3 * epsilon(x)) * scale
    moved = np.linalg.norm(again - p, axis=1)
    if np.any(moved > slack):
        message = f"{field} is not a projection: a projected point moves by {moved.max():.3g} when projected again"
        raise ConfigurationError(
            path=field, got=float(moved.max()), allowed="0: a projected point stays", message=message
        )
    reach = (u - p) @ p.T - np.sum((u - p) * p, axis=1)[:, None]
    if np.any(reach > (slack * scale)[:, None]):
        message = f"{field} is not a projection onto a convex set: a projected point is not the nearest point of X"
        raise ConfigurationError(path=field, got="another point", allowed="the nearest point of X", message=message)
    return images


def acts_on_entries(project: Project, x: PyTree) -> bool:
    """Return whether a projection acts on every entry of x separately, as the projection onto a box does.

    Let a point have some entries of a point u and the other entries of a point w. If the projection acts on entries
    separately, then the image of this point has the same entries of the images of u and w. This is tested with points
    around x and around 0, each of which is mixed with the next one by a random choice of entries. The result is False
    for a function that raises an error; `check_set` reports this error.
    """
    points, rng = points_for(x), np.random.default_rng(0)
    chosen = jax.tree.map(lambda leaf: rng.random(leaf.shape) < 0.5, points)

    def mixed(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda some, leaf: np.where(some, leaf, np.roll(leaf, 1, axis=0)), chosen, tree)

    with suppress(Exception):
        got, expected = as_rows(of_each(project, mixed(points))), as_rows(mixed(of_each(project, points)))
        lengths = np.linalg.norm(as_rows(points), axis=1)
        scale = 1 + lengths + np.roll(lengths, 1)
        return bool(np.all(np.abs(got - expected) <= INEXACT * scale[:, None]))
    return False


def points_for(x: PyTree) -> PyTree:
    """Return the points on which a projection is tested: x, points around x, and points around 0."""
    size = sum(leaf.size for leaf in jax.tree.leaves(x))
    count = max(2, min(POINTS, ENTRIES // (2 * size)))
    around = [points_around(center, count) for center in (x, jax.tree.map(np.zeros_like, x))]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *around)


def points_around(x: PyTree, count: int) -> PyTree:
    """Return x, and `count` random points around x whose entries differ from those of x by about 0.1 to 1,000.

    The points are the same in every call. The leaves of the result have the shape (1 + count, ...).
    """
    leaves, structure = jax.tree.flatten(x)
    rng, away = np.random.default_rng(0), 10.0 ** (np.arange(count) % 5 - 1)

    def around(leaf: Any) -> np.ndarray:
        moves = rng.normal(size=(count, *np.shape(leaf))) * away.reshape(-1, *[1] * np.ndim(leaf))
        return (np.concatenate([np.zeros((1, *np.shape(leaf))), moves]) + np.asarray(leaf)).astype(leaf.dtype)

    return jax.tree.unflatten(structure, [around(leaf) for leaf in leaves])


def of_each(function: Callable[[PyTree], PyTree], points: PyTree) -> PyTree:
    """Apply a function to each point of a tree whose leaves have the shape (count, ...)."""
    return jax.tree.map(np.asarray, compiled(partial(lax.map, function), points)(points))


def as_rows(points: PyTree) -> np.ndarray:
    """Return points, given as leaves of shape (count, ...), as the rows of a matrix, in float64."""
    leaves = [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(points)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def _on_arrays(project: Project) -> Project:
    """Return the projection that applies `project` to the floating arrays of a model, and keeps their types."""

    def projected(x: PyTree) -> PyTree:
        variable, fixed = split(x)
        return join(jax.tree.map(lambda new, old: new.astype(old.dtype), project(variable), variable), fixed)

    return projected


def _numbers(tree: PyTree) -> list[np.ndarray]:
    """Return the leaves of a tree that are numbers or arrays of numbers."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_floating(leaf) or _is_whole(leaf)]


def _like(x: PyTree, field: str, given: Any) -> PyTree:
    """Return a tree with the shapes and types of x, to which the entries of `given` are broadcast."""
    if jax.tree_util.all_leaves([given]):
        given = jax.tree.map(lambda _, b=given: b, x, is_leaf=is_none)

    def fit(a: Array | None, b: Any) -> Array | None:
        return None if a is None else jnp.broadcast_to(jnp.asarray(b, a.dtype), a.shape)

    try:
        return jax.tree.map(fit, x, given, is_leaf=is_none)
    except (TypeError, ValueError) as error:
        allowed = "a number, or a tree with the structure of x"
        raise ConfigurationError(str(error), path=field, got=given, allowed=allowed) from error


def _is_whole(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole if dtype is None else bool(jnp.issubdtype(dtype, jnp.integer))


def _is_number(value: Any) -> bool:
    return np.ndim(value) == 0 and (is_floating(value) or _is_whole(value))


def _require_size(field: str, size: Any) -> None:
    require(_is_number(size) and 0 < size < np.inf, field, size, "positive and finite")
