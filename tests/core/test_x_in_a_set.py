"""x stays in the set that a problem has for it, with every method that has x on the server."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.algorithm import ALGORITHMS
from fedbilevel.core.problem import Bilevel, Compositional, Minimax, SingleLevel
from fedbilevel.errors import ConfigurationError

CENTERS = jnp.array([[1.0, -2.0, 0.5], [3.0, 0.0, 0.0], [0.0, -1.0, 1.0]])
TARGETS = jnp.array([[4.0, 1.0, 2.0], [2.0, -3.0, 0.0], [0.0, -1.0, -2.0]])
WEIGHTS = np.array([0.5, 0.3, 0.2])
BEST = WEIGHTS @ np.asarray(TARGETS - CENTERS)
"""g_i = ½‖y − x − b_i‖² has y* = x + b̄, f_i = ½‖y − t_i‖² then Φ = ½‖x + b̄ − t̄‖² + a constant: x* = t̄ − b̄ = (1, .1, −.2)
up to what the weights make of it, and in a convex set the point nearest to x*. All Hessians are the identity, so that
no method is off by drift or by clients' own hypergradients."""
SETS = {
    "box": (fb.projections.box(-0.1, jnp.array([0.7, 5.0, 0.1])), lambda x: np.clip(x, -0.1, [0.7, 5.0, 0.1])),
    "ball": (fb.projections.ball(0.5), lambda x: x * min(1, 0.5 / np.linalg.norm(x))),
}


def problem(project_x=None):
    return fb.Bilevel(
        lambda x, y, batch: jnp.mean(jnp.sum((y - batch["target"]) ** 2, axis=1)) / 2,
        lambda x, y, batch: jnp.mean(jnp.sum((y - x - batch["center"]) ** 2, axis=1)) / 2,
        project_x=project_x,
    )


def population():
    outer = [{"target": np.asarray(row)[None]} for row in TARGETS]
    return fb.Clients(outer, [{"center": np.asarray(row)[None]} for row in CENTERS], weights=WEIGHTS)


def able():
    made = [cls() for cls in ALGORITHMS.values() if Bilevel in cls.solves and cls.__module__.startswith("fedbilevel.")]
    return [method for method in made if method.allows.project_x]


@pytest.mark.parametrize("kind", SETS)
@pytest.mark.parametrize("method", able(), ids=lambda method: method.name)
def test_every_method_ends_at_the_sets_nearest_point(method, kind):
    project, nearest = SETS[kind]
    changed = {"batch_size": None} if "batch_size" in vars(method) else {}
    method = type(method)(**changed)
    result = fb.solve(method, problem(project), population(), jnp.zeros(3), jnp.zeros(3), rounds=2000)
    assert np.linalg.norm(nearest(BEST) - BEST) > 0.1  # the set does matter
    np.testing.assert_allclose(result.x, nearest(BEST), atol=2e-4)
