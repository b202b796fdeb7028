"""A look at X and H of a simple bilevel problem, on some points: is the one projected on, the other strongly convex?"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from fedbilevel.core.errors import ConfigurationError, require
from fedbilevel.core.kept import compiled
from fedbilevel.core.problem import Project, SimpleBilevel
from fedbilevel.core.tree import PyTree, epsilon

INEXACT = 1e-6  # relative; what users' own projections may err by, where they are iterative


def check_projection(field: str, project: Project, x: PyTree, points: PyTree) -> PyTree:
    """Refuse what is no projection onto a convex set, as seen on `points`, leaves (count, ...); their images.

    Nearest points p of u have P(p) = p, and ⟨u − p, q − p⟩ ≤ 0 for all points q of the set. The first point must have
    one, or X is empty. Others without one are left out: far away an intersection may take too many steps.
    """
    shapes = [jax.eval_shape(function, x) for function in (lambda x: x, project)]
    mine, its = (jax.tree.map(lambda a: (a.shape, str(a.dtype)), tree) for tree in shapes)
    require(mine == its, f"{field}: what it makes of x0", its, f"of x0's shapes and types, {mine}")
    images = of_each(project, points)
    found = np.all(np.isfinite(as_rows(images)), axis=1)
    if not found[0]:
        raise ConfigurationError(f"{field}: what it makes of x0 is not finite; X may be empty (disjoint sets?)")
    points, images = (jax.tree.map(lambda leaf: leaf[found], tree) for tree in (points, images))
    u, p, again = map(as_rows, (points, images, of_each(project, images)))
    scale = 1 + np.linalg.norm(u, axis=1)
    slack = max(INEXACT, 1e3 * epsilon(x)) * scale
    moved = np.linalg.norm(again - p, axis=1)
    if np.any(moved > slack):
        raise ConfigurationError(f"{field} leaves X: a projected point moves by {moved.max():.3g} when projected again")
    reach = (u - p) @ p.T - np.sum((u - p) * p, axis=1)[:, None]
    if np.any(reach > (slack * scale)[:, None]):
        raise ConfigurationError(
            f"{field} is no projection onto a convex set: another point of X is nearer to what was projected"
        )
    return images


def points_around(x: PyTree, count: int) -> PyTree:
    """x and `count` random points, at distances from a tenth to 1,000 from it in every entry; always the same ones."""
    leaves, structure = jax.tree.flatten(x)
    rng, away = np.random.default_rng(0), 10.0 ** (np.arange(count) % 5 - 1)

    def around(leaf: Any) -> np.ndarray:
        moves = rng.normal(size=(count, *np.shape(leaf))) * away.reshape(-1, *[1] * np.ndim(leaf))
        return (np.concatenate([np.zeros((1, *np.shape(leaf))), moves]) + np.asarray(leaf)).astype(leaf.dtype)

    return jax.tree.unflatten(structure, [around(leaf) for leaf in leaves])


def of_each(function: Callable[[PyTree], PyTree], points: PyTree) -> PyTree:
    """function(point) of each, leaves (count, ...)."""
    return jax.tree.map(np.asarray, compiled(partial(lax.map, function), points)(points))


def as_rows(points: PyTree) -> np.ndarray:
    """Points with leaves (count, ...) as rows, float64."""
    leaves = [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(points)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def strong_convexity(problem: SimpleBilevel, points: PyTree) -> float:
    """The claimed μ after a look at H between points, leaves (count, ...), or the least curvature that these show.

    Between u and v that is 2 (H(v) − H(u) − ⟨𝓗(u), v − u⟩)/‖v − u‖², known up to rounding.
    """
    values, slopes = of_each(problem.preference, points)
    h, v, s = np.asarray(values).astype(np.float64), as_rows(points), as_rows(slopes)
    finite = bool(np.all(np.isfinite(h)) and np.all(np.isfinite(s)))
    require(finite, "SimpleBilevel.outer", "NaN or infinite at a point of X", "finite there, and its gradient too")
    pairs = [_curvatures(h, v, s, u, epsilon(points)) for u in range(len(h))]
    curvature, doubt = np.concatenate(pairs, axis=1)
    if not curvature.size:
        return problem.strong_convexity or 0.0  # X is a point
    claimed, certain = problem.strong_convexity, float(np.max(curvature - doubt))
    if claimed is not None:
        least = float(np.min(curvature + doubt))
        _require_convex(least >= claimed * (1 - INEXACT), f"strongly convex with μ = {claimed:g}", least)
        return claimed
    seen = doubt <= 0.1 * certain  # the curvatures of other pairs are lost in rounding
    _require_convex(bool(np.any(seen)), "seen to be strongly convex in this precision", certain)
    least = float(np.min(curvature[seen]))
    _require_convex(bool(np.all(curvature[seen] > doubt[seen])), "strongly convex", least)
    return least


def _curvatures(h: np.ndarray, v: np.ndarray, slopes: np.ndarray, u: int, precision: float) -> np.ndarray:
    """Curvature from point u to those apart from it, and how much of that rounding may be: (2, others)."""
    away = v - v[u]
    square, rise = np.sum(away**2, axis=1) / 2, away @ slopes[u]
    size = np.abs(h) + np.abs(h[u]) + np.linalg.norm(slopes[u]) * np.sqrt(2 * square)
    apart = square > 1e-12 * (1 + np.sum(v**2, axis=1))
    found = np.stack([h - h[u] - rise, 1e2 * precision * size])
    return found[:, apart] / square[apart]


def _require_convex(convex: bool, what: str, curvature: float) -> None:
    if not convex:
        raise ConfigurationError(
            f"SimpleBilevel.outer is not {what}: between two points of X its curvature is {curvature:.3g}; a little "
            "of ½‖x‖² added makes it so, and chooses among its minimisers; strong_convexity says what is known of it"
        )
