"""Does `Asynchronous` leave a method as it is if no reply is late, and refuse methods that cannot be late?"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import Case, cases, listed
from matrices import members

import fedbilevel as fb
from fedbilevel import authoring
from fedbilevel.algorithms.parts.memory import DELAY_PENALTY
from fedbilevel.experiments import configure
from fedbilevel.experiments.runner import task_of
from fedbilevel.tasks.quadratic import quadratic
from fixed_steps import fixed
from refusals import ANY, refuses
from representatives import slow_but

WORK = np.array([1, 2, 3, 1])
METHODS = {type(case.algorithm): case for case in reversed(cases().values()) if case.algorithm.allows.late}
"""The first case of each method that can be late."""
LOCAL = fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=2, step=0.1))
WITH_FIELDS = {
    fb.FedNest: Case(fixed(fb.FedNest(batch_size=None, hypergradient=LOCAL, outer_steps=2))),
    fb.FedNestSGD: Case(fixed(fb.FedNestSGD(batch_size=None, hypergradient=LOCAL, outer_steps=2))),
    fb.LFedNest: Case(fixed(fb.LFedNest(batch_size=None, hypergradient=LOCAL))),
    fb.RAFBO: Case(fixed(fb.RAFBO(batch_size=None, hypergradient=fb.parts.PrintedSlopes(perturbation=1.0)))),
}
"""Methods that can be late only with other fields than the defaults, or that compile faster with other fields."""
QUICK = (fb.FedAvg,)
"""A method whose program is small. The phases of the others are similar, or other tests make them late."""


def outcome(algorithm, problem, rounds=4):
    task = quadratic(clients=4, dim_x=2, dim_y=3, samples=(3, 3))
    clients, y0 = task.clients, task.y0
    work = (
        None if isinstance(problem, fb.SimpleBilevel) else WORK
    )  # IRG and its relatives make no local steps, or all of theirs
    inner = {} if isinstance(problem, fb.Minimax) else {"inner": clients.inner}
    clients = fb.Clients(clients.outer, weights=clients.weights, local_steps=work, **inner)
    if isinstance(problem, fb.SingleLevel | fb.SimpleBilevel):
        y0 = None
    return fb.solve(
        algorithm, problem or task.problem, clients, task.x0 + 0.1, y0, rounds=rounds, engine=fb.Reference()
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=cls.__name__, marks=[] if cls in QUICK else [pytest.mark.slow])
        for cls, case in (METHODS | WITH_FIELDS).items()
    ],
)
def test_waiting_for_everyone_is_the_method_itself(case):
    """If the server waits for all clients, the wrapped method computes the same numbers as the method alone.

    All clients have then replied to the present message, and the sum of the differences from their last replies gives
    the mean of the new replies.
    """
    algorithm, problem = fixed(case.algorithm), case.problem
    plain, late = outcome(algorithm, problem), outcome(fb.Asynchronous(algorithm, wait_for=4), problem)
    for one, other in zip(*(jax.tree.leaves((result.x, result.y)) for result in (plain, late)), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-12)
    assert float(jnp.linalg.norm(late.x - 0.1)) > 1e-3
    for replies in late.state.slots["memory"].values():
        assert float(replies.delay) == pytest.approx(0, abs=1e-12)
    assert late.ledger.bytes_down == plain.ledger.bytes_down + 4 * plain.ledger.replies  # the number of the exchange
    assert late.ledger.bytes_up == plain.ledger.bytes_up + 2 * 8 * plain.ledger.replies  # the two numbers of the memory


def test_every_method_that_can_be_late_is_here():
    able = {cls for cls in authoring.ALGORITHMS.values() if cls().allows.late}
    assert able == METHODS.keys()


@pytest.mark.parametrize("name", [name for name, cls in authoring.ALGORITHMS.items() if not cls().allows.late])
def test_why_a_method_cannot_be_late_is_said(name):
    cls = authoring.ALGORITHMS[name]
    with pytest.raises(fb.errors.ConfigurationError) as error:
        fb.Asynchronous(cls(), wait_for=2)
    reason = listed("NEVER_LATE").get(cls, "it does not say which of its phases may be late")
    said = f"{cls.__name__} cannot be Asynchronous: .*{reason}.*; these methods can: AFBO, F2SA, FISM, FedAvg, "
    assert re.match(said, str(error.value))


@pytest.mark.slow
def test_late_replies_leave_fedlin_its_fixed_point():
    """Late replies leave FedLin's fixed point where it is; FedAvg with as many local steps ends elsewhere.

    With f_i = a_i (x − c_i)²/2, the mean gradient is 0 at x* = Σ p a c / Σ p a, and so is every corrected step. Late
    replies therefore change the way of x, but not its end.
    """
    a, c, weights = np.array([1.0, 2.0, 4.0]), np.array([-1.0, 3.0, 0.5]), np.array([0.5, 0.2, 0.3])
    clients = fb.Clients([{"a": a[i : i + 1], "c": c[i : i + 1]} for i in range(3)], weights=weights)
    problem = fb.SingleLevel(lambda x, batch: jnp.mean(batch["a"] * (x - batch["c"]) ** 2) / 2)
    late = fb.Asynchronous(fb.FedLin(outer_lr=0.1, local_steps=4, batch_size=None), wait_for=1, delay_penalty=0)
    engine = fb.Local(clock=fb.Clock(network=(1.0, 2.0, 5.0)))
    result = fb.solve(late, problem, clients, jnp.zeros(()), None, rounds=600, engine=engine)
    assert result.history["staleness"][-1] > 0.5
    moves = 1 - (1 - 0.1 / 4 * a) ** 4  # the share of the way to c that FedAvg's local steps make
    star, fedavg = (np.sum(weights * by * c) / np.sum(weights * by) for by in (a, moves))
    assert abs(float(result.x) - star) < 1e-9 < abs(fedavg - star)


@pytest.mark.slow
def test_the_penalty_divides_the_step_by_one_and_the_delay():
    """With a delay penalty, the second step is shorter by the factor 1/(1 + penalty · mean age).

    From x = y = 0, where ∇y g_i = −c_i, the first step is γ times the mean of c_i over the two clients that have
    replied.

    The first exchange ends at 2 s. Client 2, which was asked in it, replies at 2.5 s, and client 0 again at 3 s. The
    second mean has a reply of client 0 of age 0, and replies of clients 1 and 2 of age 1. Client 3 is in no mean and
    has no age.
    """
    task = quadratic(clients=4, dim_x=2, dim_y=3, samples=(2, 4))
    steps = fixed(fb.SimFBO(batch_size=None, local_steps=1, server_lr=0.2))
    given = task.problem, task.clients, task.x0, task.y0

    def y_after(rounds, penalty):
        engine = fb.Local(clock=fb.Clock(network=(1.0, 2.0, 2.5, 9.0)))
        method = fb.Asynchronous(steps, wait_for=2, delay_penalty=penalty)
        return np.asarray(fb.solve(method, *given, rounds=rounds, engine=engine).y)

    first, p = members(task)[:2], np.asarray(task.clients.weights)
    mean = sum(p * g["c"] for p, _, g in first) / sum(p for p, *_ in first)
    one = y_after(1, 3.0)
    np.testing.assert_allclose(one, 0.2 * mean, rtol=1e-12)
    age = (p[1] + p[2]) / p[:3].sum()
    np.testing.assert_allclose(y_after(2, 3.0) - one, (y_after(2, 0.0) - one) / (1 + 3.0 * age), rtol=1e-6)


@pytest.mark.parametrize(
    "shares", [[0, 1], [0.5, 0.5], [0.2] * 5, [0.75, 0, 0, 0.25], [0, 0, 0, 1], [0.5, *[0] * 9, 0.5]]
)
def test_steps_that_are_stable_without_delays_are_stable_with_them(shares):
    """A step that is stable without delays stays stable with them if it is divided by 1 + 2·mean delay.

    Without delays, a step a is stable for a < 2. With the shares w_d of replies that are d exchanges old, all roots of
    z^{D+1} − z^D + a Σ w_d z^{D−d} lie in the unit disc for a = 1.99/(1 + 2·mean delay). If all replies are one
    exchange old, a = 1 is the limit.
    """
    most, mean = len(shares) - 1, np.dot(shares, range(len(shares)))

    def largest_root(a):
        return max(abs(np.roots(np.append([1.0, -1.0], np.zeros(most)) + a * np.append([0.0], shares))))

    assert largest_root(1.99 / (1 + DELAY_PENALTY * mean)) < 1
    if shares == [0, 1]:
        assert largest_root(1) == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_late_replies_do_not_make_the_steps_of_a_preset_diverge(dies):
    """The steps of a preset, divided by the delay penalty, do not diverge with late replies.

    Four clients reply in pairs, and the last client may fall silent for ever after 50 exchanges. The steps of the
    preset were chosen for exchanges that wait for all clients, and are twice as long as late replies allow: undivided,
    they raise the loss a hundredfold and more.
    """
    at = np.arange(200)[:, None]
    table = (np.arange(4) // 2 == at % 2) & ~((np.arange(4) == 3) & (at > 50) & dies)
    spec = configure(task="quadratic", algorithm="simfbo", settings=["task.clients=4"])
    task, method = task_of(spec), spec.algorithm.value
    given = task.problem, task.clients, task.x0, task.y0

    def errors(**late):
        engine = fb.Local(clock=fb.Clock(arrivals=table))
        method_late = fb.Asynchronous(method, wait_for=1, **late)
        run = fb.solve(method_late, *given, rounds=200, eval_every=50, metrics=task.metrics, engine=engine)
        return run.history["relative_error"], run.remarks

    with pytest.warns(fb.errors.NumericalWarning, match="diverges"):
        assert errors(delay_penalty=0.0)[0][-1] > 5
    divided, remarks = errors()
    assert np.argmax(divided) == 0
    assert divided[-1] < 0.7
    assert any("stopped replying" in remark for remark in remarks) == dies


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (
            lambda: fb.Asynchronous(fb.Asynchronous(fixed(fb.SimFBO()), wait_for=2), wait_for=2),
            ("", ANY, "SimFBO, 'late': Asynchronous and Asynchronous"),
        ),
        (lambda: fb.Asynchronous(fb.FISM(tolerance=1e-3), wait_for=2), ("", ANY, "FISM cannot be Asynchronous")),
        (
            lambda: fb.Submodels(fb.ADBO()),
            ("", ANY, "ADBO cannot be given Submodels"),
        ),
        (lambda: fb.Submodels(fb.IRG()), ("", ANY, "IRG cannot be given Submodels")),
        (
            lambda: fb.Submodels(fixed(fb.FedNest(hypergradient=fb.parts.Implicit(solver=fb.parts.CG())))),
            ("", ANY, "these methods can: AFBO, AggITD, CorrectedFBO, "),
        ),
        (lambda: fb.Asynchronous("simfbo", wait_for=2), ("Asynchronous(…)", "simfbo")),
        (
            lambda: fb.Asynchronous(fixed(fb.SimFBO()), wait_for=2, delay_penalty=-1.0),
            ("Asynchronous.delay_penalty", -1.0, "at least 0"),
        ),
        (
            lambda: fb.Asynchronous(fixed(fb.SimFBO()), wait_for=2, delay_penalty=float("nan")),
            ("Asynchronous.delay_penalty", float("nan"), "at least 0"),
        ),
    ],
)
def test_what_cannot_be(make, refusal):
    with refuses(*refusal):
        make()


def test_what_is_said_of_it_is_said_of_the_method():
    """The wrapper reports the label, phases and fields of the method inside, except for what it decides itself.

    The same holds for a subclass of `Asynchronous`.
    """

    class Slower(fb.Asynchronous):
        """The same wrapper under another name."""

    inside = fixed(fb.AFBO(hypergradient=fb.parts.LocalImplicit(solver=fb.parts.CG()), batch_size=7))
    for wrapped in (fb.Asynchronous(inside, wait_for=2), Slower(inside, wait_for=2)):
        assert (wrapped.label, wrapped.phases, wrapped.batch_size) == ("AFBO", inside.phases, 7)
        assert (wrapped.asks.asynchronous, wrapped.asks.cohorts, wrapped.asks.first) == (True, False, 2)


@pytest.mark.parametrize(
    ("bound", "times"), slow_but((2, [0, 1, 2, 10]), of=[(None, [0, 1, 2, 3]), (2, [0, 1, 2, 10])])
)
def test_an_exchange_waits_for_a_client_that_was_asked_long_ago(bound, times):
    """Messages take 1, 1 and 10, and an exchange ends with the first two replies, which is after 1.

    The third client is asked in exchange 0. With a bound of 2, exchange 2 waits for its reply, which arrives at 10.
    """
    task = quadratic(clients=3, samples=(3, 3))
    late = fb.Asynchronous(fixed(fb.SimFBO(batch_size=None)), wait_for=2, max_staleness=bound)
    engine = fb.Local(clock=fb.Clock(network=[1, 1, 10]))
    run = fb.solve(late, task.problem, task.clients, task.x0, task.y0, rounds=3, eval_every=1, engine=engine)
    assert list(run.history["time"]) == times
