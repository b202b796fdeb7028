"""Are steps on x those of an optimizer of Optax, with every method?"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed
from refusals import refuses
from representatives import slow_but


@pytest.fixture(scope="module")
def task():
    return quadratic(clients=4, condition=5, noise=0.0, samples=(3, 3))


def run(algorithm, task, rounds, **options):
    return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds, **options)


PLAIN = [fixed(method(batch_size=None)) for method in (fb.SimFBO, fb.FedNest, fb.FedBiO, fb.AggITD)]


@pytest.mark.parametrize("method", slow_but(PLAIN[0], of=PLAIN), ids=lambda method: method.name)
def test_plain_descent_of_rate_1_is_the_method_itself(method, task):
    engine = fb.Reference()
    plain, wrapped = (
        run(one, task, 3, engine=engine) for one in (method, fb.OuterOptimizer(method, optimizer=optax.sgd(1.0)))
    )
    np.testing.assert_allclose(wrapped.x, plain.x, rtol=1e-12)
    np.testing.assert_allclose(wrapped.y, plain.y, rtol=1e-12)
    assert wrapped.ledger == plain.ledger


def test_momentum_is_the_sum_written_out(task):
    """With momentum, x moves by the sum x_{k+1} = x_k − m_k with m_k = 0.9 m_{k−1} + α h(x_k, y_k).

    FedNest's h depends on x and y alone. Full batches draw nothing, so that each round is that of a run from
    (x_k, y_k).
    """
    series = fb.parts.Implicit(solver=fb.parts.Neumann(terms=2))
    method, engine = fixed(fb.FedNest(batch_size=None, hypergradient=series)), fb.Reference()
    x, y, m = np.asarray(task.x0), np.asarray(task.y0), 0.0
    for _ in range(4):
        one = fb.solve(method, task.problem, task.clients, jnp.asarray(x), jnp.asarray(y), rounds=1, engine=engine)
        m = 0.9 * m + (x - np.asarray(one.x))
        x, y = x - m, np.asarray(one.y)
    wrapped = run(fb.OuterOptimizer(method, optimizer=optax.sgd(1.0, momentum=0.9)), task, 4, engine=engine)
    np.testing.assert_allclose(wrapped.x, x, rtol=1e-11)


@pytest.mark.slow
def test_adam_takes_the_direction_alone(task):
    """Adam uses only the direction of the method's step on x, not its length.

    Adam's first step is its rate in each entry, up to its ε over the slope.
    """
    engine = fb.Reference()
    for outer_lr in (1e-3, 1.0):
        method = fb.OuterOptimizer(fixed(fb.FedNest(batch_size=None, outer_lr=outer_lr)), optimizer=optax.adam(0.05))
        step = np.abs(run(method, task, 1, engine=engine).x - task.x0)
        np.testing.assert_allclose(step, 0.05, rtol=1e-2)


@pytest.mark.parametrize("optimizer", [optax.contrib.dog(1.0), optax.contrib.prodigy(1.0)], ids=["dog", "prodigy"])
@pytest.mark.slow
@pytest.mark.parametrize("method", [fb.SimFBO, fb.FedNest])
def test_optimizers_that_find_their_step_wait_for_a_hypergradient(method, optimizer, task):
    """Optimizers that find their own step get no gradient before the method has a hypergradient.

    Without given steps, the first round measures and does not move x. `prodigy` would make NaN of a gradient of 0.
    """
    wrapped = fb.OuterOptimizer(method(batch_size=None), optimizer=optimizer)
    np.testing.assert_array_equal(run(wrapped, task, 1).x, task.x0)
    assert 0 < np.linalg.norm(run(wrapped, task, 30).x - task.x0) < np.inf


def test_it_resumes_projects_and_waits_for_nobody(task, tmp_path):
    method = fb.OuterOptimizer(fixed(fb.SimFBO(batch_size=None, server_lr=0.2)), optimizer=optax.adam(0.1))
    engine = fb.Reference()
    whole = run(method, task, 6, engine=engine)
    run(method, task, 3, engine=engine, checkpoint=tmp_path / "run.npz")
    again = run(method, task, 6, engine=engine, checkpoint=tmp_path / "run.npz", resume=True)
    np.testing.assert_array_equal(again.x, whole.x)
    inside = task.problem.with_x_in(fb.projections.box(-0.15, 0.15))
    boxed = fb.solve(method, inside, task.clients, task.x0, task.y0, rounds=6, engine=engine)
    assert np.max(np.abs(boxed.x)) == 0.15 < np.max(np.abs(whole.x))
    late = run(fb.Asynchronous(method, wait_for=4), task, 6, engine=engine)
    np.testing.assert_allclose(late.x, whole.x, rtol=1e-10)


def test_what_is_no_optimizer_is_refused():
    with refuses("OuterOptimizer.optimizer", "adam", "optax.adam"):
        fb.OuterOptimizer(fixed(fb.SimFBO()), optimizer="adam")
