"""Is a problem whose x cannot move by derivatives named as one, for the reason that holds, and no other problem?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fedbilevel as fb
import hospital_files
from fedbilevel.core.problem import why_it_vanishes
from fedbilevel.core.tree import split
from fedbilevel.tasks import TASKS

BATCH = jax.ShapeDtypeStruct((1, 2), jnp.float32)
X = Y = jnp.ones(2)


def ridge(x, y, batch):
    return jnp.mean((batch @ y - 1) ** 2) + jnp.sum(jnp.exp(x) * y**2)


def fit(x, y, batch):
    return jnp.mean((batch @ y) ** 2)


def of_x(x, y, batch):
    return jnp.mean(batch) * jnp.sum(x**2)


def stopped(x, y, batch):
    return ridge(lax.stop_gradient(x), y, batch)


def rounded(x, y, batch):
    return ridge(jnp.round(x), y, batch)


def in_a_loop(x, y, batch):
    def step(carry, xi):
        return carry + lax.stop_gradient(xi) * jnp.sum(y**2), None

    return lax.scan(step, 0.0, x)[0]


@jax.custom_vjp
def square(a):
    return a**2


square.defvjp(lambda a: (a**2, a), lambda a, g: (2 * a * g,))


def both(x, y, batch):
    return fit(x, y, batch) + of_x(x, y, batch)


def simple(outer, inner, **more):
    return fb.SimpleBilevel(outer, inner, fb.projections.ball(1.0), **more)


NO_X, NEITHER = "the outer loss has no derivative in x, and the inner", "the outer loss has a derivative neither in x"
LOSS = "the loss has no derivative in x"
VANISHES = {
    "inner without x": (fb.Bilevel(fit, fit), NO_X),
    "outer without either": (fb.Bilevel(lambda x, y, b: b.mean(), ridge), NEITHER),
    "stop_gradient": (fb.Bilevel(fit, stopped), NO_X),
    "round": (fb.Bilevel(fit, rounded), NO_X),
    "stop_gradient in a loop": (fb.Bilevel(fit, in_a_loop), NO_X),
    "a sum of parts": (fb.Bilevel(fit, both), NO_X),
    "minimax without x": (fb.Minimax(lambda x, y, b: -fit(x, y, b)), LOSS),
    "composition without x": (
        fb.Compositional(lambda y, b: fit(None, y, b), lambda x, b: jnp.mean(b, 0)),
        NO_X,
    ),
    "single level without x": (fb.SingleLevel(lambda x, b: b.mean()), LOSS),
    "simple without x": (simple(lambda x: jnp.ones(()), lambda x, b: b.mean()), "no loss has a derivative in x"),
}
SOUND = {
    "inner without x, outer with": fb.Bilevel(both, fit),
    "outer without y": fb.Bilevel(of_x, ridge),
    "x in the inner loss alone": fb.Bilevel(fit, ridge),
    "custom derivatives": fb.Bilevel(fit, lambda x, y, b: fit(x, y, b) + jnp.sum(square(x * y))),
    "in a loop": fb.Bilevel(fit, lambda x, y, b: lax.fori_loop(0, 3, lambda i, a: a + x @ y**2, 0.0)),
    "half of x stopped": fb.Bilevel(fit, lambda x, y, b: ridge(x.at[0].set(lax.stop_gradient(x[0])), y, b)),
    "composition": fb.Compositional(lambda y, b: fit(None, y, b), lambda x, b: x * jnp.mean(b, 0)),
    "single level": fb.SingleLevel(lambda x, b: of_x(x, None, b)),
    "own subgradient": simple(lambda x: jnp.ones(()), lambda x, b: of_x(x, None, b), subgradient=lambda x: x),
}


def y_of(problem):
    return None if isinstance(problem, fb.SingleLevel | fb.SimpleBilevel) else Y


@pytest.mark.parametrize("case", VANISHES)
def test_why_x_cannot_move_is_said(case):
    problem, expected = VANISHES[case]
    assert why_it_vanishes(problem, X, y_of(problem), BATCH, BATCH).startswith(expected)


@pytest.mark.parametrize("case", SOUND)
def test_nothing_is_said_of_a_problem_whose_x_moves(case):
    assert why_it_vanishes(SOUND[case], X, y_of(SOUND[case]), BATCH, BATCH) is None


OWN = [*sorted(set(TASKS) - {"few_shot"}), pytest.param("few_shot", marks=pytest.mark.slow)]  # downloaded characters


@pytest.mark.parametrize("name", OWN)
def test_nothing_is_said_of_the_librarys_own_tasks(name, tmp_path, monkeypatch):
    if name == "hospitals":
        hospital_files.write(tmp_path, monkeypatch)
    task = TASKS[name]()
    (x, x_fixed), (y, y_fixed) = split(task.x0), split(task.y0)
    assert why_it_vanishes(task.problem.with_fixed(x_fixed, y_fixed), x, y, *task.clients.examples()) is None


@pytest.mark.parametrize("case", ["stop_gradient", "a sum of parts"])
def test_solve_says_it_at_the_users_line_and_x_stays(case):
    """The claim itself: after rounds of a method that goes by derivatives x has not moved by a bit."""
    samples = [np.ones((3, 2), np.float32)] * 2
    with pytest.warns(fb.errors.InfluenceWarning, match="will not move") as caught:
        result = fb.solve(fb.SimFBO(), VANISHES[case][0], fb.Clients(samples, samples), X, Y, rounds=3)
    assert caught[0].filename == __file__
    assert np.array_equal(result.x, X)
