"""Does the wrapper leave the method inside as it is, where nobody is late, and refuse those that cannot be late?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import cases

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.tasks.quadratic import quadratic

WORK = np.array([1, 2, 3, 1])
METHODS = {type(case.algorithm): case for case in reversed(cases().values()) if case.algorithm.asynchronous_phases}
"""The first case of each method that can be late."""


def outcome(algorithm, problem, rounds=4):
    task = quadratic(clients=4, dim_x=2, dim_y=3, samples=(2, 4), local_steps=WORK)
    clients, y0 = task.clients, task.y0
    if isinstance(problem, fb.Minimax):
        clients = fb.Clients(clients.outer, weights=clients.weights, local_steps=WORK)
    if isinstance(problem, fb.SingleLevel | fb.SimpleBilevel):
        y0 = None
    result = fb.solve(algorithm, problem or task.problem, clients, task.x0 + 0.1, y0, rounds=rounds)
    return jax.tree.leaves((result.x, result.y)), result


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=cls.__name__, marks=[pytest.mark.slow] if cls in (fb.FISM, fb.ShroFBO) else [])
        for cls, case in METHODS.items()  # tests of these two make them late
    ],
)
def test_waiting_for_everyone_is_the_method_itself(case):
    """All have replied to this very message: sums of differences to the last replies give the mean of the replies."""
    algorithm, problem = case.algorithm, case.problem
    plain, _ = outcome(algorithm, problem)
    wrapped, result = outcome(fb.Asynchronous(algorithm, wait_for=4), problem)
    for one, other in zip(plain, wrapped, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-12)
    assert float(jnp.linalg.norm(result.x - 0.1)) > 1e-3
    for replies in result.state.replies.values():
        assert float(replies.delay) == pytest.approx(0, abs=1e-12)


def test_every_method_that_can_be_late_is_here():
    able = {cls for cls in authoring.ALGORITHMS.values() if cls().asynchronous_phases}
    assert able == METHODS.keys()


def test_the_penalty_divides_the_step_by_one_and_the_delay():
    """Two of four clients have replied to the first exchange of SimFBO, so that the mean delay is the weight of the
    others, 1 − p; one step of the server is then 1/(1 + c(1 − p)) of that without a penalty."""
    task = quadratic(clients=4, dim_x=2, dim_y=3, samples=(2, 4))
    steps, clock = fb.SimFBO(batch_size=None, local_steps=1), fb.Clock(network=(1.0, 2.0, 3.0, 4.0))

    def moved(c):
        algorithm = fb.Asynchronous(steps, wait_for=2, delay_penalty=c)
        given = task.problem, task.clients, task.x0, task.y0
        return fb.solve(algorithm, *given, rounds=1, engine=fb.Local(clock=clock)).y - task.y0

    missing = float(sum(task.clients.weights[2:]))
    np.testing.assert_allclose(moved(3.0) * (1 + 3.0 * missing), moved(0.0), rtol=1e-12)
    assert np.linalg.norm(moved(0.0)) > 1e-3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: fb.Asynchronous(fb.FedNest(), wait_for=2),
            "FedNest cannot be Asynchronous: it declares no asynchronous_phases, phases whose replies may be late",
        ),
        (
            lambda: fb.Asynchronous(fb.Asynchronous(fb.SimFBO(), wait_for=2), wait_for=2),
            "SimFBO cannot be Asynchronous",
        ),
        (lambda: fb.Asynchronous(fb.ADBO(), wait_for=2), "ADBO cannot be Asynchronous"),
        (lambda: fb.Asynchronous("simfbo", wait_for=2), "an instance of a subclass of Algorithm"),
        (
            lambda: fb.Asynchronous(fb.SimFBO(), wait_for=0),
            "wait_for = 0 is not allowed: it must be a positive integer",
        ),
        (lambda: fb.Asynchronous(fb.SimFBO(), wait_for=2, max_staleness=0), "max_staleness = 0"),
        (lambda: fb.Asynchronous(fb.SimFBO(), wait_for=2, delay_penalty=-1.0), "delay_penalty = -1.0 is not allowed"),
        (lambda: fb.Asynchronous(fb.SimFBO(), wait_for=2, delay_penalty=float("nan")), "delay_penalty = nan"),
        (lambda: fb.SimFBO(own_x=True), "it is now local of the problem, Bilevel(outer, inner, local='x')"),
        (lambda: fb.Asynchronous(fb.SimFBO(), waitfor=2), "did you mean 'wait_for'"),
        (
            lambda: fb.ShroFBO(coefficients=fb.parts.Plain()),
            "field of ShroFBO 'coefficients': it is now local_optimizer",
        ),
        (lambda: fb.SimFBO(first=2), "field of SimFBO 'first': it is now wait_for, of the wrapper Asynchronous"),
    ],
)
def test_what_cannot_be(make, words):
    with pytest.raises(fb.errors.ConfigurationError) as error:
        make()
    assert words in str(error.value)


def test_what_is_said_of_it_is_said_of_the_method():
    inside = fb.AFBO(hypergradient=fb.parts.LocalImplicit(solver=fb.parts.CG()))
    wrapped = fb.Asynchronous(inside, wait_for=2)
    assert (wrapped.label, wrapped.phases) == ("AFBO", inside.phases)
    assert (wrapped.asynchronous, wrapped.needs_everyone, wrapped.waits_for) == (True, True, 2)


def test_a_wrapper_below_another_keeps_its_hooks():
    """What `Asynchronous` says itself is not asked of the method inside, in a subclass either."""

    class Slower(fb.Asynchronous):
        """The same under another name."""

    inside = fb.SimFBO(batch_size=7)
    assert Slower(inside, wait_for=2).waits_for == 2
    assert Slower(inside, wait_for=2).asynchronous
    assert (Slower(inside, wait_for=2).label, Slower(inside, wait_for=2).batch_size) == ("SimFBO", 7)
