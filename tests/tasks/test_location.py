"""The location task draws its balls as described, its metrics are those of NumPy, and its solution is optimal."""

import jax
import numpy as np
import pytest
from scipy.optimize import nnls

from fedbilevel.tasks import location
from fedbilevel.tasks.location import COMMON, HALF_WIDTH, nearest_in_all
from refusals import refuses

SEEDS = range(3)


def balls(task):
    """Return the centers (m, n) and the radii (m,) of the balls of all clients."""
    rows = [task.clients.inner.row(i) for i in range(len(task.clients))]
    return tuple(np.concatenate([row[name] for row in rows]) for name in ("center", "radius"))


def anchor_of(task):
    """Return the anchor a, from H = ½‖x − a‖²: for a unit vector e, H(0) − H(e) + ½ = a·e."""
    preference = lambda x: float(task.problem.outer(x, None, None))  # noqa: E731
    units = np.eye(len(task.x0))
    return np.array([preference(np.zeros(len(units))) - preference(unit) + 0.5 for unit in units])


def solution_of(task):
    return nearest_in_all(anchor_of(task), *balls(task))


@pytest.mark.parametrize("dim", [2, 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_solution_is_in_all_balls_and_the_anchor_in_the_cone_of_their_normals(dim, seed):
    """The solution x is the projection of the anchor a onto the intersection of the balls.

    This holds if x is in all balls, and a − x = Σ μ_j (x − c_j) with μ ≥ 0, over the balls that have x on their
    boundary.
    """
    task = location(dim=dim, seed=seed)
    anchor, (centers, radii) = anchor_of(task), balls(task)
    x = nearest_in_all(anchor, centers, radii)
    slack = radii - np.linalg.norm(x - centers, axis=1)
    assert np.min(slack) > -1e-10
    active = slack < 1e-9
    assert 1 <= np.sum(active) <= dim
    assert nnls((x - centers[active]).T, anchor - x)[1] < 1e-9
    assert np.max(np.abs(x)) < HALF_WIDTH
    assert float(task.metrics["error"](x, None)) < 1e-9


def test_one_ball_and_balls_that_do_not_cut():
    """An anchor outside a ball is projected onto its sphere, and an anchor inside stays where it is.

    A second ball that contains the first one changes nothing. The projection of (5, 3) onto the sphere around (1, 0)
    with radius 2.5 is (1, 0) + 2.5·(0.8, 0.6).
    """
    center, far = np.array([[1.0, 0.0]]), np.array([5.0, 3.0])
    np.testing.assert_allclose(nearest_in_all(far, center, np.array([2.5])), [1 + 2.5 * 0.8, 2.5 * 0.6], atol=1e-12)
    np.testing.assert_array_equal(nearest_in_all(np.array([1.0, 1.0]), center, np.array([2.5])), [1.0, 1.0])
    both, radii = np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([2.5, 9.0])
    np.testing.assert_allclose(nearest_in_all(far, both, radii), [3.0, 1.5], atol=1e-12)


@pytest.mark.parametrize("dim", [1, 2, 30])
def test_overlapping_balls_have_a_ball_around_the_origin_in_common(dim):
    task = location(dim=dim, targets=50, seed=3)
    centers, radii = balls(task)
    assert np.all(radii - np.linalg.norm(centers, axis=1) >= COMMON - 1e-12)
    assert np.max(np.abs(anchor_of(task))) == pytest.approx(HALF_WIDTH, abs=1e-9)
    assert np.any(np.linalg.norm(anchor_of(task) - centers, axis=1) > radii)


def test_metrics_are_those_of_the_formulas():
    task = location(dim=3, targets=11, clients=4, seed=5)
    centers, radii = balls(task)
    x, y = np.random.default_rng(0).uniform(-10, 10, (2, 3))
    found = {name: float(metric(x, y)) for name, metric in task.metrics.items()}
    outside = np.maximum(np.linalg.norm(x - centers, axis=1) - radii, 0)
    expected = {
        "error": np.linalg.norm(x - solution_of(task)),
        "average_error": np.linalg.norm(y - solution_of(task)),
        "mean_distance": np.mean(outside),
        "preference": np.sum((x - anchor_of(task)) ** 2) / 2,
    }
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-9)


def test_every_ball_counts_alike_whoever_has_it():
    """Every ball counts equally, whichever client has it.

    F, the mean over clients with weights p_i of each client's mean, is the mean over all balls, although clients have
    different numbers of balls.
    """
    task = location(dim=2, targets=11, clients=4)
    sizes = task.clients.inner.size
    assert sorted(sizes) == [2, 3, 3, 3]
    np.testing.assert_allclose(task.clients.weights, sizes / 11)
    x = np.array([9.0, -9.0])
    rows = [task.clients.inner.row(i) for i in range(4)]
    weighted = sum(
        p * float(task.problem.inner(x, None, row)) for p, row in zip(task.clients.weights, rows, strict=True)
    )
    assert weighted == pytest.approx(float(task.metrics["mean_distance"](x, None)), rel=1e-12)


def test_scattered_is_the_papers_draw_and_comes_again_with_its_seed():
    """The layout "scattered" draws as the paper does, and the same seed draws the same task.

    Centers, anchor and start are uniform on X, and radii on (0, 1). The means of 20,000 coordinates and of 5,000 radii
    are within five standard errors.
    """
    task, again, other = (location(dim=4, targets=5000, layout="scattered", seed=seed) for seed in (2, 2, 3))
    centers, radii = balls(task)
    assert np.max(np.abs(np.concatenate([centers, [task.x0], [anchor_of(task)]]))) <= HALF_WIDTH
    assert 0 < np.min(radii) < np.max(radii) < 1
    assert abs(np.mean(centers)) < 5 * (20 / np.sqrt(12)) / np.sqrt(20_000)
    assert abs(np.mean(radii) - 0.5) < 5 * (1 / np.sqrt(12)) / np.sqrt(5000)
    for mine, its in zip((*balls(task), task.x0), (*balls(again), again.x0), strict=True):
        np.testing.assert_array_equal(mine, its)
    assert not np.array_equal(centers, balls(other)[0])
    assert list(task.metrics) == ["mean_distance", "preference"]


@pytest.mark.parametrize("layout", ["overlapping", "scattered"])
def test_the_subgradient_of_a_distance_is_finite_everywhere(layout):
    """The subgradient of the distance is 0 in the center of a ball and just inside its sphere.

    Outside the ball it is the unit vector away from the center.
    """
    task = location(dim=2, targets=1, clients=1, layout=layout)
    center, radius = (array[0] for array in balls(task))
    one = task.clients.inner.row(0)
    slope = lambda x: np.asarray(jax.grad(task.problem.inner, 0)(x, None, one))  # noqa: E731
    np.testing.assert_array_equal(slope(center), [0, 0])
    np.testing.assert_array_equal(slope(center + np.array([0, radius * (1 - 1e-12)])), [0, 0])
    np.testing.assert_allclose(slope(center + np.array([3 * radius, 4 * radius])), [0.6, 0.8], rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"layout": "scatterd"}, ("layout", "scatterd", "", "scattered")),
        ({"clients": 41}, ("clients", 41, "1 to 40")),
        ({"dim": 0}, ("dim", 0)),
    ],
)
def test_wrong_options_are_named(options, refusal):
    with refuses(*refusal):
        location(**options)
