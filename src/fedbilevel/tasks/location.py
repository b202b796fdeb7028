"""Location: among all points with the least mean distance to some balls, find the point nearest to an anchor.

The task is from "Federated Incremental Subgradient Method for Convex Bilevel Optimization Problems" (Boontawee et al.
2025), section III.B. With balls of center c_j and radius r_j, and an anchor a in R^n, minimise H among the minimisers
of F in X:

    F(x) = mean_j max(‖x − c_j‖ − r_j, 0)        H(x) = ½‖x − a‖²        X = [−10, 10]ⁿ

- Layout "scattered", as in the paper: c_j, a and the start are uniform on X, and r_j is uniform on (0, 1). F usually
  has a single minimiser, so that H does not matter.
- Layout "overlapping": all balls contain a ball around the origin. The loss F is 0 on the intersection of the balls,
  and the solution is the projection of the anchor onto this intersection. The solution is a mean of the anchor and of
  centers, and so it is in X.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.core import projections
from fedbilevel.core.client import Clients
from fedbilevel.core.errors import ConfigurationError, require, require_count, unknown
from fedbilevel.core.metrics import Metric
from fedbilevel.core.problem import SimpleBilevel
from fedbilevel.data import iid
from fedbilevel.tasks.task import Floats, Task, require_memory

HALF_WIDTH = 10.0
LAYOUTS = ("overlapping", "scattered")
COMMON = 2.0  # the radius of a ball around the origin that all overlapping balls contain


def location(
    *,
    dim: int = 2,
    targets: int = 40,
    clients: int = 8,
    layout: str = "overlapping",
    seed: int = 0,
) -> Task:
    """Draw balls, an anchor and a start, and deal the balls out to clients. All balls have the same weight.

    The metrics are F ("mean_distance") and H ("preference"). For overlapping balls, they are also the distances of x
    ("error") and of the average iterate ("average_error") from the solution.

    Args:
        dim: the dimension n of x.
        targets: the number of balls.
        clients: the number of clients, at most the number of balls.
        layout: "overlapping", where all balls have points in common and the solution is known; or "scattered", as in
            the paper.
        seed: the seed of the draw.
    """
    require_count("dim", dim)
    require_count("targets", targets)
    if layout not in LAYOUTS:
        raise unknown("layout", layout, LAYOUTS)
    require_memory(dim, targets=targets)
    require(1 <= clients <= targets, "clients", clients, f"1 to {targets}, the number of targets")
    rng = np.random.default_rng(seed)
    anchor, start = rng.uniform(-HALF_WIDTH, HALF_WIDTH, (2, dim))
    if layout == "scattered":
        centers, radii = rng.uniform(-HALF_WIDTH, HALF_WIDTH, (targets, dim)), rng.uniform(0, 1, targets)
    else:
        away = rng.normal(size=(targets, dim))
        distance = rng.uniform(0.2, 0.9, targets) * HALF_WIDTH
        centers = away / np.linalg.norm(away, axis=1, keepdims=True) * distance[:, None]
        radii = distance + COMMON * rng.uniform(1.0, 1.5, targets)
        anchor *= HALF_WIDTH / np.max(np.abs(anchor))  # to the boundary of X, which is outside the intersection
    every = {"center": centers, "radius": radii}
    dealt = iid(np.zeros(targets, np.int32), clients, seed=seed)
    parts = [{name: array[part] for name, array in every.items()} for part in dealt]

    def preference(x: Array) -> Array:
        return jnp.sum((x - anchor) ** 2) / 2

    metrics: dict[str, Callable[[Array, Array], Array]] = {
        "mean_distance": lambda x, y: distances(x, every),
        "preference": Metric(lambda x, y: preference(x), None),
    }
    if layout == "overlapping":
        solution = nearest_in_all(anchor, centers, radii)
        metrics = {
            "error": lambda x, y: jnp.linalg.norm(x - solution),
            "average_error": lambda x, y: jnp.linalg.norm(y - solution),
            **metrics,
        }
    return Task(
        name="location",
        problem=SimpleBilevel(preference, distances, projections.box(-HALF_WIDTH, HALF_WIDTH), strong_convexity=1.0),
        clients=Clients(parts, weights="size"),
        x0=jnp.asarray(start),
        y0=None,
        metrics=metrics,
    )


def distances(x: Array, batch: Any) -> Array:
    """Return the mean distance from x to the balls of a batch. The subgradient on and inside a ball is 0."""
    square = jnp.sum((x - batch["center"]) ** 2, axis=-1)
    outside = square > batch["radius"] ** 2
    gap = jnp.sqrt(jnp.where(outside, square, 1)) - batch["radius"]  # 1 keeps the derivative finite inside a ball
    return jnp.mean(jnp.where(outside, gap, 0))


def nearest_in_all(point: Floats, centers: Floats, radii: Floats) -> Floats:
    """Return the projection of `point` onto the intersection of all balls, which must not be empty.

    The method projects onto the intersection of a few balls. If the result is outside other balls, the farthest of
    these is added to the few, and so on.
    """
    x, cutting = point, list[int]()
    while True:
        beyond = np.linalg.norm(x - centers, axis=1) - radii
        beyond[cutting] = 0.0  # x is inside these balls, up to rounding
        if np.max(beyond) <= 0:
            return x
        cutting.append(int(np.argmax(beyond)))
        x = _nearest_in_few(point, centers[cutting], radii[cutting])


def _nearest_in_few(point: Floats, centers: Floats, radii: Floats, rounds: int = 100_000) -> Floats:
    """Project onto the intersection by Dykstra's algorithm, until the corrections of all balls no longer change."""
    x, corrections = point, np.zeros_like(centers)
    for _ in range(rounds):
        before = corrections.copy()
        for j, (center, radius) in enumerate(zip(centers, radii, strict=True)):
            toward = x + corrections[j]
            away = toward - center
            x = center + away * min(1.0, radius / max(float(np.linalg.norm(away)), 1e-300))
            corrections[j] = toward - x
        if np.linalg.norm(corrections - before) <= 1e-13 * (1 + np.linalg.norm(point)):
            return x
    raise ConfigurationError(
        f"the projection of the point {point} onto the intersection of the balls was not found in {rounds:,} "
        "iterations: use another seed, or fewer targets"
    )
