"""Is a problem that is not simple bilevel refused by name, before anything runs, and may x be a model?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.parts.iterative_regularization import strong_convexity
from fedbilevel.core.projections import points_around
from refusals import ANY, refuses

ROWS = [np.array([[1.0, 2.0], [0.5, -1.0]]), np.array([[0.0, 1.0]])]
BOX = fb.projections.box(-1.0, 1.0)


def half_square(x):
    return jnp.vdot(x, x) / 2


def loss(x, batch):
    return jnp.mean((batch @ x - 1) ** 2)


def problem(outer=half_square, inner=loss, project=BOX, **more):
    return fb.SimpleBilevel(outer, inner, project, **more)


def solved(algorithm=None, *, given=None, clients=None, y0=None, **changes):
    clients = clients or fb.Clients(ROWS)
    given = given or problem(**changes)
    return fb.solve(algorithm or fb.FISM(), given, clients, jnp.zeros(2), y0, rounds=1)


MADE = {
    "a misspelt field": (
        lambda: fb.FISM(regularisation=0.1),
        ("field of FISM", "regularisation", "", "regularization"),
    ),
    "a ≤ ½": (lambda: fb.FISM(lr_decay=0.5), ("FISM.lr_decay", 0.5, "above ½")),
    "b ≥ a": (
        lambda: fb.IRG(lr_decay=0.6, regularization_decay=0.6),
        ("IRG.regularization_decay", 0.6, "lr_decay = 0.6"),
    ),
    "a + b ≥ 1": (
        lambda: fb.IRIG(lr_decay=0.7, regularization_decay=0.3),
        ("IRIG.lr_decay + regularization_decay", 1.0, "below 1"),
    ),
    "b ≤ 0": (lambda: fb.FISM(regularization_decay=0.0), ("FISM.regularization_decay", 0.0, "λ_k")),
    "a tolerance of 1": (lambda: fb.FISM(tolerance=1.0), ("FISM.tolerance", 1.0, "0 and 1")),
    "a tolerance and late replies": (
        lambda: fb.Asynchronous(fb.FISM(tolerance=1e-3), wait_for=2),
        ("", ANY, "FISM cannot be Asynchronous"),
    ),
    "refresh": (lambda: fb.FISM(refresh=1), ("FISM.refresh", 1, "False")),
    "steps of constant size that decay": (lambda: fb.BiFISTA(lr_decay=0.6), ("field of BiFISTA", "lr_decay")),
    "small momentum": (lambda: fb.BiFISTA(momentum=3.0), ("BiFISTA.momentum", 3.0, "above 3")),
    "H that is none": (lambda: problem(outer=3), ("SimpleBilevel.outer", 3)),
    "X that is none": (lambda: problem(project=None), ("SimpleBilevel.project", None)),
    "μ = 0": (lambda: problem(strong_convexity=0.0), ("SimpleBilevel.strong_convexity", 0.0)),
}
SOLVED = {
    "γ₁λ₁μ > 2": (
        lambda: solved(fb.FISM(lr=3.0, regularization=1.0)),
        ("FISM: lr·regularization·μ", ANY, "at most 2"),
    ),
    "H linear": (lambda: solved(outer=jnp.sum), ("SimpleBilevel.outer", ANY, "strongly convex")),
    "H less convex": (
        lambda: solved(outer=lambda x: half_square(x) / 2, strong_convexity=1.0),
        ("SimpleBilevel.outer", ANY, "μ = 1"),
    ),
    "H's kink of no slope": (
        lambda: solved(outer=lambda x: half_square(x) + jnp.sqrt(jnp.sum(x))),
        ("SimpleBilevel.outer", ANY, "finite there"),
    ),
    "H of many values": (lambda: solved(outer=lambda x: x), ("", ANY, "(2,)", "", "the outer loss")),
    "X scaled": (lambda: solved(project=lambda x: x / 2), ("SimpleBilevel.project", ANY, "0: ")),
    "X not convex": (
        lambda: solved(project=lambda x: x / jnp.linalg.norm(x + 1e-9)),
        ("SimpleBilevel.project", "another point", "nearest"),
    ),
    "X empty": (
        lambda: solved(
            project=fb.projections.intersection(fb.projections.box(1, 2), fb.projections.half_space(1, 1), max_steps=50)
        ),
        ("SimpleBilevel.project(x0)", "not finite"),
    ),
    "H unknown": (lambda: solved(outer=None), ("SimpleBilevel.outer", None, "(x)")),
    "y0": (lambda: solved(y0=jnp.zeros(2)), ("y0", ANY, "SimpleBilevel")),
    "IR-IG of two": (lambda: solved(fb.IRIG()), ("IRIG: clients", 2, "clients.pooled()")),
    "another problem": (
        lambda: solved(given=fb.Bilevel(lambda x, y, batch: loss(y, batch), lambda x, y, batch: loss(y, batch))),
        ("problem", "Bilevel", "a SimpleBilevel problem"),
    ),
}


@pytest.mark.parametrize("case", MADE)
def test_refused_when_made(case):
    make, refusal = MADE[case]
    with refuses(*refusal):
        make()


@pytest.mark.parametrize("case", SOLVED)
def test_refused_before_it_runs(case, monkeypatch):
    """The refusal comes before a program is compiled for rounds: the engine is never started."""
    start, refusal = SOLVED[case]
    monkeypatch.setattr(fb.Local, "start", None)
    with refuses(*refusal):
        start()


CONVEX = {
    "½ x'Ax": (lambda x: (x[0] ** 2 + 4 * x[1] ** 2) / 2, 1.0, 4.0),
    "the norm too": (lambda x: jnp.sum(jnp.abs(x)) + 0.3 * half_square(x), 0.3, 0.3),
}


@pytest.mark.parametrize("case", CONVEX)
def test_what_points_show_of_strong_convexity(case):
    """The estimate of strong convexity is between μ and the steepest curvature of H.

    The least curvature between points is at least μ. It is at most the largest eigenvalue, or μ if some two points lie
    in one orthant, where ‖x‖₁ is linear. Points that are very close are not used: between x + 10⁻⁷ and x, the
    difference of H has no correct digit left.
    """
    outer, least, most = CONVEX[case]
    points = points_around(jnp.zeros(2), 20)
    points = jnp.concatenate([points, points + 1e-7])
    found = strong_convexity(problem(outer), points)
    assert least * (1 - 1e-6) <= found <= most * (1 + 1e-6)
    assert strong_convexity(problem(outer, strong_convexity=least / 2), points) == least / 2
    assert strong_convexity(problem(outer), jnp.ones((5, 2))) == 0  # X is a point


@pytest.mark.slow
def test_an_intersection_as_x():
    """If X is an intersection, projected points come in almost equal pairs; they are no evidence against H."""
    project = fb.projections.intersection(fb.projections.box(-1, 1), fb.projections.half_space(1, 0.5))
    given, clients, x = problem(project=project), fb.Clients([np.ones((1, 10))]), jnp.zeros(10)
    with refuses("FISM: lr·regularization·μ", fact="at most 2") as error:
        fb.solve(fb.FISM(lr=2.25, regularization=1.0), given, clients, x, rounds=1)
    assert error.value.got == pytest.approx(2.25)
    algorithm = fb.FISM(lr=1.9, regularization=1.0)
    assert fb.solve(algorithm, given, clients, x, rounds=1, engine=fb.Reference()).round == 1


def test_float32_and_models():
    """The arrays of a model are projected in float32 while float64 is on, and the average is a model, too.

    The model has an activation and a count. By hand: f = ‖w − b‖², w ← clip(w − γ(2(w − b) + λw)) from 1.5, where
    b₀ = 2 takes w to the bound.
    """
    model = {"w": jnp.full(2, 1.5, jnp.float32), "activation": jnp.tanh, "power": 2}
    sample = np.array([2.0, 1.0], np.float32)

    def fit(x, batch):
        assert x["activation"] is jnp.tanh
        return jnp.mean(jnp.sum((x["w"] - batch) ** x["power"], axis=1))

    given = problem(lambda x: jnp.sum(x["w"] ** x["power"]) / 2, fit, fb.projections.box(-1.6, 1.6))
    algorithm = fb.FISM(lr=0.25, regularization=0.2, tolerance=1e-6)
    result = fb.solve(algorithm, given, fb.Clients([sample[None]]), model, rounds=2)
    w, total, steps = np.full(2, 1.5), 0.0, 0.0
    for k in (1, 2):
        gamma, penalty = 0.25 / k**0.6, 0.2 / k**0.35
        total, steps = total + gamma * w, steps + gamma
        w = np.clip(w - gamma * (2 * (w - sample) + penalty * w), -1.6, 1.6)
    assert w[0] == 1.6
    np.testing.assert_allclose(result.x["w"], w, rtol=1e-6)
    np.testing.assert_allclose(result.y["w"], total / steps, rtol=1e-6)
    for point in (result.x, result.y):
        assert point["w"].dtype == jnp.float32
        assert (point["activation"], point["power"]) == (jnp.tanh, 2)
    assert jax.tree.structure(result.x) == jax.tree.structure(result.y) == jax.tree.structure(model)
