"""Does x stay in the set that a problem has for it, with every method that keeps x on the server?"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.authoring import Algorithm
from fedbilevel.core.algorithm import ALGORITHMS
from fedbilevel.core.problem import Bilevel, Compositional, Minimax, SingleLevel
from fedbilevel.core.projections import acts_on_entries
from fedbilevel.errors import UnsupportedError
from fixed_steps import fixed
from refusals import ANY, raises_with, refuses
from representatives import slow_but

CENTERS = jnp.array([[1.0, -2.0, 0.5], [3.0, 0.0, 0.0], [0.0, -1.0, 1.0]])
TARGETS = jnp.array([[4.0, 1.0, 2.0], [2.0, -3.0, 0.0], [0.0, -1.0, -2.0]])
WEIGHTS = np.array([0.5, 0.3, 0.2])
BEST = WEIGHTS @ np.asarray(TARGETS - CENTERS)
"""x* without a set; in a convex set, x* is the point nearest to it.

g_i = ½‖y − x − b_i‖² has y* = x + b̄. With f_i = ½‖y − t_i‖², Φ is ½‖x + b̄ − t̄‖² plus a constant, so that
x* = t̄ − b̄. All Hessians are the identity, so that neither drift nor clients' own hypergradients move the end of any
method.
"""
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


def test_engines_and_wrappers_agree():
    """Engines agree to 1e-12; if all three replies are waited for, `Asynchronous` is the method itself."""
    inside = problem(SETS["box"][0]), population(), jnp.zeros(3), jnp.zeros(3)
    method, engine = fb.SimFBO(local_steps=2, batch_size=None, server_lr=0.2), fb.Reference()
    found = [
        fb.solve(one, *inside, rounds=8, engine=engine).x
        for one, engine in ((method, engine), (method, fb.Local()), (fb.Asynchronous(method, wait_for=3), engine))
    ]
    np.testing.assert_allclose(found[1:], [found[0]] * 2, atol=1e-12)
    assert np.max(found[0]) == 0.7  # x is at a bound


@pytest.mark.parametrize(
    ("made", "start", "limit"),
    [
        pytest.param(
            Minimax(lambda x, y, batch: jnp.sum(x * y - y**2 / 2) - jnp.sum(x)),
            jnp.ones(3),
            0.5,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Compositional(lambda y, batch: jnp.sum(y**2) / 2 - jnp.sum(y), lambda x, batch: x),
            jnp.ones(3),
            0.5,
            marks=pytest.mark.slow,
        ),
        (SingleLevel(lambda x, batch: jnp.sum((x - 1) ** 2) / 2), None, 0.5),
    ],
    ids=["Minimax", "Compositional", "SingleLevel"],
)
def test_other_kinds_of_problem(made, start, limit):
    """x ends at the bound of the box in other kinds of problem.

    Each problem is ½‖x‖² − Σ x or ½‖x − 1‖² in x. Its minimiser is 1, outside of the box, whose bound is ½.
    """
    method = fb.FedAvg(batch_size=None) if start is None else fb.FedNest(batch_size=None)
    clients = population() if isinstance(made, Compositional) else fb.Clients(population().outer, weights=WEIGHTS)
    inside = made.with_x_in(fb.projections.box(-limit, limit))
    result = fb.solve(method, inside, clients, jnp.zeros(3), start, rounds=300)
    np.testing.assert_allclose(result.x, limit, atol=1e-12)


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"project_x": lambda x: 2 * x}, ("Bilevel.project_x", ANY, "0: ")),
        ({"project_x": lambda x: x[:2]}, ("Bilevel.project_x(x0)", ((2,), "float64"), "(3,)")),
    ],
)
def test_what_is_no_projection_is_refused(changed, refusal):
    with refuses(*refusal):
        fb.solve(fb.SimFBO(), problem(**changed), population(), jnp.ones(3), jnp.zeros(3), rounds=1)


def test_refusals_name_what_to_mend():
    box = problem(SETS["box"][0])
    with refuses("x0", fact="Bilevel.project_x(x0)"):
        fb.solve(fb.SimFBO(), box, population(), -2 * jnp.ones(3), jnp.zeros(3), rounds=1)
    with raises_with(UnsupportedError, "ADBO cannot keep x in a set (project_x)") as refused:
        fb.solve(fb.ADBO(), box, population(), jnp.zeros(3), jnp.zeros(3), rounds=1)
    assert "SimFBO" in str(refused.value)  # the methods that can
    with refuses("Bilevel.project_x", ANY, "local = 'x'"):
        fb.Bilevel(box.outer, box.inner, local="x", project_x=box.project_x)


class Computed(Algorithm):
    """A method whose state does not contain x, but computes x from another leaf."""

    class State(NamedTuple):
        half: Any
        y: Any

        @property
        def x(self):
            return 2 * self.half

    def init(self, x, y):
        return self.State(x / 2, y)

    def round(self, fed, state, key):
        return state


def test_a_state_whose_x_is_computed_is_refused():
    with raises_with(UnsupportedError, "project_x", where="Computed"):
        fb.solve(Computed(), problem(SETS["box"][0]), population(), jnp.zeros(3), jnp.zeros(3), rounds=1)


DRAWN = {"fedex"}
"""Methods whose x is one of some draws."""


def able():
    made = [cls() for cls in ALGORITHMS.values() if Bilevel in cls.solves and cls.__module__.startswith("fedbilevel.")]
    return [method for method in made if method.allows.project_x and method.name not in DRAWN]


@pytest.mark.parametrize("kind", slow_but("ball", of=["box", "ball"]))
@pytest.mark.parametrize("method", slow_but(fb.SimFBO(), of=able()), ids=lambda method: method.name)
def test_every_method_ends_at_the_sets_nearest_point(method, kind):
    project, nearest = SETS[kind]
    changed = {"batch_size": None} if "batch_size" in vars(method) else {}
    method = type(method)(**changed)
    result = fb.solve(method, problem(project), population(), jnp.zeros(3), jnp.zeros(3), rounds=2000)
    assert np.linalg.norm(nearest(BEST) - BEST) > 0.1  # otherwise the set would make no difference
    np.testing.assert_allclose(result.x, nearest(BEST), atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETS)
def test_the_projected_gradient_vanishes_at_the_sets_nearest_point_and_there_alone(kind):
    """At the set's nearest point the projected gradient x − P(x − ∇Φ) is 0, and ∇Φ is not; elsewhere neither is 0."""
    project, nearest = SETS[kind]
    for x, least, most in ((nearest(BEST), 0.0, 1e-6), (nearest(BEST) * 0.5, 1e-2, 10.0)):
        report = fb.check_hypergradient(problem(project), population(), jnp.asarray(x), jnp.zeros(3))
        (note,) = (note for note in report.notes if note.startswith("projected gradient"))
        assert least <= float(note.split(": ")[1].split(";")[0]) <= most
        assert np.linalg.norm(report.hypergradient) > 0.1


CLIPPED = fb.projections.box(-1, 1)
COUPLED = {
    "ball": fb.projections.ball(0.5),
    "simplex": fb.projections.simplex(),
    "half-space": fb.projections.half_space(np.ones(4), 0.5),
    "box and ball": fb.projections.intersection(CLIPPED, fb.projections.ball(0.5)),
}


@pytest.mark.parametrize("project", COUPLED.values(), ids=COUPLED)
def test_a_projection_that_couples_entries_is_found(project):
    assert not acts_on_entries(project, np.zeros(4))


@pytest.mark.parametrize("project", [CLIPPED, lambda x: jnp.maximum(x, 0), lambda x: jnp.clip(x, jnp.arange(4.0), 9)])
def test_a_projection_that_acts_on_each_entry_is_found(project):
    assert acts_on_entries(project, np.zeros(4))


@pytest.mark.parametrize(
    ("optimizer", "kind"), [(optax.sgd(0.3), "ball"), pytest.param(optax.adam(0.01), "box", marks=pytest.mark.slow)]
)
def test_an_optimizer_of_x_ends_at_the_sets_nearest_point(optimizer, kind):
    method = fb.OuterOptimizer(fixed(fb.SimFBO(batch_size=None)), optimizer=optimizer)
    result = fb.solve(method, problem(SETS[kind][0]), population(), jnp.zeros(3), jnp.zeros(3), rounds=2000)
    np.testing.assert_allclose(result.x, SETS[kind][1](BEST), atol=2e-4)


def test_an_optimizer_with_a_step_for_each_entry_needs_a_box():
    """Adam on x needs a box: on the ball it would end at (.32, .32, .22), but the nearest point is (.44, .22, .06)."""
    method = fb.OuterOptimizer(fixed(fb.SimFBO(batch_size=None)), optimizer=optax.adam(0.01))
    with refuses("OuterOptimizer.optimizer", fact="optax.sgd"):
        fb.solve(method, problem(SETS["ball"][0]), population(), jnp.zeros(3), jnp.zeros(3), rounds=1)


CURVATURES, CENTRE, RADIUS = np.array([1.0, 0.25, 0.05]), np.array([1.0, 1.0, 1.0]), 0.5


def nearest_by_curvature():
    """Return the minimum of Φ(x) = ½ Σ h_l (x_l − c_l)² in the ball ‖x‖ ≤ r, where ‖c‖ > r.

    The gradient of Φ + ½μ(‖x‖² − r²) is 0: h_l (x_l − c_l) + μ x_l = 0, so that x_l = h_l c_l/(h_l + μ). The norm of x
    falls from ‖c‖ to 0 as μ > 0 grows, and bisection finds the μ at which it is r.
    """
    low, high = 0.0, 1e3
    for _ in range(200):
        middle = (low + high) / 2
        point = CURVATURES * CENTRE / (CURVATURES + middle)
        low, high = (middle, high) if np.linalg.norm(point) > RADIUS else (low, middle)
    return point


def curved(project):
    """Return a problem with Φ(x) = ½ Σ h_l (x_l − c_l)², its clients and a start.

    The inner loss ½‖y − x‖² has y* = x, so that Φ(x) is the outer loss ½ Σ h_l (y_l − c_l)² at y = x.
    """
    problem = fb.Bilevel(
        lambda x, y, batch: jnp.mean(batch["one"]) * jnp.sum(CURVATURES * (y - CENTRE) ** 2) / 2,
        lambda x, y, batch: jnp.mean(batch["one"]) * jnp.sum((y - x) ** 2) / 2,
        project_x=project,
    )
    one = [{"one": np.ones(1)}]
    return problem, fb.Clients(one, one), jnp.zeros(3), jnp.zeros(3)


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(1.0), pytest.param(optax.sgd(1.0, momentum=0.5), marks=pytest.mark.slow)],
    ids=["sgd", "momentum"],
)
def test_a_server_optimizer_along_the_gradient_ends_at_the_minimum_in_a_ball(optimizer):
    # with one local step there is no drift
    given = {"batch_size": None, "local_steps": 1, "client_lr": 1.0, "server_lr": 0.3}
    method = fb.SimFBO(**given, server_optimizer=optimizer)
    result = fb.solve(method, *curved(fb.projections.ball(RADIUS)), rounds=1000)
    np.testing.assert_allclose(result.x, nearest_by_curvature(), atol=1e-6)


@pytest.mark.parametrize("method", slow_but(fb.SimFBO, of=[fb.SimFBO, fb.ShroFBO, fb.F2SA, fb.MEHA, fb.CorrectedFBO]))
def test_a_server_optimizer_with_a_step_for_each_entry_needs_a_box(method):
    """An optimizer on the server with a step for each entry, such as Adam, is refused unless the set is a box.

    Adam's steps have nearly the same size in all entries, and all entries of x are below those of c. x would end where
    (1, 1, 1) is normal to the ball, at r/√3 (1, 1, 1) = (.29, .29, .29). The minimum is (.47, .18, .04).
    """
    np.testing.assert_allclose(nearest_by_curvature(), [0.465, 0.179, 0.042], atol=1e-3)
    made = method(server_optimizer=optax.adam(1.0))
    warmed = method(server_optimizer=optax.adam(optax.linear_schedule(0.0, 1.0, 10)))
    clipped = method(server_optimizer=optax.chain(optax.clip(1.0), optax.sgd(1.0)))
    for refused in (made, warmed, clipped):
        with refuses(f"{method.__name__}.server_optimizer", fact="optax.sgd"):
            fb.solve(refused, *curved(fb.projections.ball(RADIUS)), rounds=1)
    fb.solve(made, *curved(SETS["box"][0]), rounds=1)
