"""Do asynchronous SimFBO and ShroFBO use the last replies of all clients, and end where the synchronous methods do?"""

import numpy as np
import pytest
from agreement import Case
from events import simfbo

import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic, solution
from representatives import slow_but

AGREEMENT = {
    "asynchronous SimFBO": Case(
        fb.Asynchronous(fb.SimFBO(batch_size=4, local_steps=2), wait_for=1),
        clock=fb.Clock(spread=0.3, stragglers=3, slowdown=20.0),
        slow=True,
    ),
    "asynchronous ShroFBO, one never there": Case(
        fb.Asynchronous(fb.ShroFBO(batch_size=4), wait_for=3),
        work=(1, 2),
        clock=fb.Clock(compute=0.1, drift=1.0, period=2.0, availability=[1.0, 1.0, 0.0, 1.0, 0.5, 1.0, 1.0, 1.0]),
        slow=True,
    ),
}

WORK = np.array([1, 2, 3, 1, 2])
CLOCK = fb.Clock(network=(1.0137, 1.7291, 0.6113, 7.3471, 2.1193))
STEPS = {"client_lr": fb.XYV(0.05, 0.2, 0.1), "server_lr": fb.XYV(0.02, 0.2, 0.15), "batch_size": None}


def drawn(**options):
    return quadratic(clients=5, dim_x=3, dim_y=4, condition=5, noise=0.0, samples=(2, 4), **options)


def run(algorithm, task, rounds, clock=CLOCK):
    return fb.solve(
        algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds, engine=fb.Local(clock=clock)
    )


@pytest.mark.parametrize("method", slow_but(fb.SimFBO, of=[fb.SimFBO, fb.ShroFBO]))
def test_equals_the_events_written_out(method):
    """Fifteen rounds equal the simulation in tests/algorithms/events.py, with unequal work."""
    task, algorithm = (
        drawn().with_own(local_steps=WORK),
        fb.Asynchronous(method(**STEPS), wait_for=2, delay_penalty=0.0),
    )
    result = run(algorithm, task, 15)
    wanted, told = simfbo(task, algorithm.algorithm, 15, 2, CLOCK.network, WORK, robust=method is fb.ShroFBO)
    for found, exact in zip(result.state.inside.iterate, wanted, strict=True):
        np.testing.assert_allclose(found, exact, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.history["delay"][-1], told[-1, 0], rtol=1e-12)
    np.testing.assert_allclose(result.history["time"][-1], told[-1, 1], rtol=1e-9)
    assert told[-1, 0] > 1


@pytest.mark.slow
def test_reaches_the_solution_from_late_replies():
    """With one local step each, late replies do not move the end, since at rest all last replies are those of x*."""
    task = drawn()
    simfbo = fb.SimFBO(local_steps=1, client_lr=1.0, batch_size=None, server_lr=fb.XYV(0.004, 0.06, 0.06))
    algorithm = fb.Asynchronous(simfbo, wait_for=2, delay_penalty=0.0)
    end = run(algorithm, task, 10_000, fb.Clock(spread=0.5, stragglers=1, slowdown=4.0))
    exact = solution(task.clients)
    assert np.linalg.norm(end.x - exact.x) < 1e-9 * np.linalg.norm(exact.x)
    assert np.linalg.norm(end.state.inside.iterate.v - exact.v) < 1e-9 * np.linalg.norm(exact.v)
