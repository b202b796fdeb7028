"""Do projections give the nearest point, on trees and in x's own type, and are other functions refused?"""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from fedbilevel import projections
from fedbilevel.core.projections import check_projection, points_around
from refusals import ANY, refuses

RNG = np.random.default_rng(0)
POINTS = [2 * RNG.normal(size=6) for _ in range(8)]
CENTER, NORMAL = RNG.normal(size=6), RNG.normal(size=6)
LOWER, UPPER = -RNG.uniform(0.1, 1, 6), RNG.uniform(0.1, 1, 6)


def tree(row):
    return {"a": jnp.asarray(row[:2]), "b": [jnp.asarray(row[2:]).reshape(2, 2)]}


def row(point):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(point)])


def nearest_in_simplex(u, total):
    """Return the nearest candidate: for each support S, u_S shifted to the sum `total`, if it is not negative."""
    candidates = []
    for size in range(1, len(u) + 1):
        for support in map(list, combinations(range(len(u)), size)):
            p = np.zeros(len(u))
            p[support] = u[support] + (total - u[support].sum()) / size
            if np.all(p >= 0):
                candidates.append(p)
    return min(candidates, key=lambda p: np.linalg.norm(p - u))


def nearest_in_both(u, normal, offset):
    """Project onto a box and a half-space: clip(u − t·normal) with the least t ≥ 0 that is in the half-space.

    t is the multiplier of the condition of optimality. ⟨normal, ·⟩ falls with t, so that bisection finds t.
    """
    at = lambda t: np.clip(u - t * normal, LOWER, UPPER)  # noqa: E731
    if normal @ at(0.0) <= offset:
        return at(0.0)
    return at(optimize.brentq(lambda t: normal @ at(t) - offset, 0.0, 1e3, xtol=1e-15))


OFFSET = float(NORMAL @ np.clip(-0.5 * NORMAL, LOWER, UPPER))  # so that the two sets meet, and the plane cuts the box
BOX, HALF = projections.box(tree(LOWER), tree(UPPER)), projections.half_space(tree(NORMAL), OFFSET)
CASES = {
    "box, two numbers": (projections.box(-0.5, 1), lambda u: np.minimum(np.maximum(u, -0.5), 1)),
    "box, trees": (BOX, lambda u: np.minimum(np.maximum(u, LOWER), UPPER)),
    "box, a number and a tree": (projections.box(-np.inf, tree(UPPER)), lambda u: np.minimum(u, UPPER)),
    "ball": (projections.ball(0.7), lambda u: u * min(1, 0.7 / np.linalg.norm(u))),
    "ball elsewhere": (
        projections.ball(2, tree(CENTER)),
        lambda u: CENTER + (u - CENTER) * min(1, 2 / np.linalg.norm(u - CENTER)),
    ),
    "simplex": (projections.simplex(1.5), lambda u: nearest_in_simplex(u, 1.5)),
    "half-space": (HALF, lambda u: u - max(0.0, NORMAL @ u - OFFSET) / (NORMAL @ NORMAL) * NORMAL),
    "half-space and box": (projections.intersection(HALF, BOX), lambda u: nearest_in_both(u, NORMAL, OFFSET)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_nearest_point(case):
    """Projections give the nearest point to 1e-12.

    Sums have six terms of size 1. Dykstra's corrections settle to 10 ε. The rest of the linear convergence is below
    1e-12 for these two sets, whose normals are far from parallel.
    """
    project, nearest = CASES[case]
    compiled, moved = jax.jit(project), 0
    for u in POINTS:
        point = compiled(tree(u))
        assert jax.tree.structure(point) == jax.tree.structure(tree(u))
        np.testing.assert_allclose(row(point), nearest(u), rtol=0, atol=1e-12)
        moved += np.linalg.norm(row(point) - u) > 0.1
    assert moved >= 2


def test_two_balls_with_one_point_in_common():
    """If the balls around (±1, 0) with radius 1 touch only in 0, Dykstra's algorithm is slow, and ends with NaN."""
    touching = projections.intersection(
        projections.ball(1.0, np.array([1.0, 0])), projections.ball(1.0, np.array([-1.0, 0])), max_steps=50
    )
    assert np.all(np.isnan(touching(jnp.array([0.3, 2.0]))))
    overlapping = projections.intersection(
        projections.ball(1.25, np.array([1.0, 0])), projections.ball(1.25, np.array([-1.0, 0]))
    )  # their circles meet in (0, ±0.75), the nearest points to the far (0, ±2)
    np.testing.assert_allclose(overlapping(jnp.array([0.0, 2.0])), [0, 0.75], rtol=0, atol=1e-10)


def test_types_stay():
    """A projection keeps the type of x, although bounds are in float64."""
    x = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree(POINTS[0]))
    every = jax.jit(lambda x: {case: project(x) for case, (project, _) in CASES.items()})(x)
    for case, (_, nearest) in CASES.items():
        assert {leaf.dtype for leaf in jax.tree.leaves(every[case])} == {jnp.dtype("float32")}
        np.testing.assert_allclose(row(every[case]), nearest(POINTS[0]), rtol=0, atol=1e-5, err_msg=case)


def test_models_are_projected_by_their_arrays():
    x = {"w": jnp.array([3.0, 4.0]), "count": 3, "activation": jnp.tanh, "nothing": None}
    for given, expected in (
        (projections.box(0, 1), [1, 1]),
        (projections.box({**x, "w": np.array([0, 0])}, {**x, "w": np.array([1, 5])}), [1, 4]),
        (projections.ball(1.0), [0.6, 0.8]),
        (projections.ball(1.0, {**x, "w": np.array([3.0, 2.0])}), [3, 3]),
        (projections.simplex(), [0, 1]),
        (projections.half_space(1, 1), [0, 1]),
        (projections.intersection(projections.box(0, 1), projections.half_space(1, 1)), [0, 1]),
    ):
        point = given(x)
        np.testing.assert_allclose(point["w"], expected, rtol=0, atol=1e-12)
        assert (point["count"], point["activation"], point["nothing"]) == (3, jnp.tanh, None)


REFUSED = {
    "crossed bounds": (lambda: projections.box(1.0, 0.0), ("box.lower", 1.0, "upper = 0.0")),
    "a tree above a number": (lambda: projections.box({"a": np.array([0.0, 3])}, 2), ("box.lower", ANY, "upper = 2")),
    "NaN in a bound": (lambda: projections.box(0.0, np.nan), ("box.upper", np.nan)),
    "bounds of another tree": (
        lambda: projections.box({"c": 0.0}, 1)(tree(POINTS[0])),
        ("box.lower", {"c": 0.0}),
    ),
    "bounds of a tree for an array": (
        lambda: projections.box({"a": -6}, 2)(np.zeros(2)),
        ("box.lower", {"a": -6}),
    ),
    "a ball of radius 0": (lambda: projections.ball(0.0), ("ball.radius", 0.0)),
    "a center that is none": (
        lambda: projections.ball(1.0, np.array([np.nan, 0])),
        ("ball.center", np.array([np.nan, 0])),
    ),
    "a half-space without normal": (
        lambda: projections.half_space(np.zeros(3), 1.0),
        ("half_space.normal", np.zeros(3)),
    ),
    "a half-space nowhere": (lambda: projections.half_space(np.ones(3), np.nan), ("half_space.offset", np.nan)),
    "an intersection with a number": (lambda: projections.intersection(BOX, 2), ("intersection.second", 2)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sets_that_are_none(case):
    make, refusal = REFUSED[case]
    with refuses(*refusal):
        make()


MOVES_AGAIN = ("X", ANY, "0: ")
NOT_NEAREST = ("X", "another point", "nearest")
LIARS = {
    "scales": (lambda x: x / 2, MOVES_AGAIN),
    "leaves X": (lambda x: jnp.clip(x, -1, 1) + 0.1, MOVES_AGAIN),
    "normalises": (lambda x: x / jnp.linalg.norm(x), NOT_NEAREST),
    "radially onto a box": (
        lambda x: x / jnp.maximum(1, jnp.max(jnp.abs(x))),
        NOT_NEAREST,
    ),
    "rounds": (jnp.round, NOT_NEAREST),
    "disjoint sets": (
        projections.intersection(projections.box(1, 2), projections.half_space(1, 1), max_steps=100),
        ("X(x0)", "not finite"),
    ),
    "changes the shape": (lambda x: x[:1], ("X(x0)", ((1,), "float64"))),
    "changes the type": (lambda x: jnp.clip(x, -1, 1).astype(jnp.float32), ("X(x0)", ((6,), "float32"))),
    "changes the tree": (lambda x: {"x": x}, ("X(x0)", {"x": ((6,), "float64")})),
}


@pytest.mark.parametrize("case", LIARS)
def test_what_is_no_projection(case):
    project, refusal = LIARS[case]
    x = jnp.asarray(POINTS[0])
    x = project(x) if refusal is NOT_NEAREST else x  # these functions have points that they do not move
    with refuses(*refusal):
        check_projection("X", project, x, jnp.concatenate([points_around(x, 20), points_around(0 * x, 20)]))


@pytest.mark.parametrize(
    ("case", "dtype"),
    [("ball elsewhere", "float32"), ("simplex", "float32"), ("simplex", "float64"), ("half-space and box", "float64")],
)
def test_true_projections_pass(case, dtype):
    """True projections pass the check, which returns the images of the points."""
    x = CASES[case][0](jax.tree.map(lambda leaf: leaf.astype(dtype), tree(POINTS[0])))
    points = points_around(x, 20)
    images = check_projection("X", CASES[case][0], x, points)
    u, p = (row(jax.tree.map(lambda leaf: leaf[2], part)) for part in (points, images))
    np.testing.assert_allclose(p, CASES[case][1](u), rtol=0, atol=1e-10 if dtype == "float64" else 1e-3)
