"""Does AFBO compute what its paper says, with the last replies of all clients, and end at its closed form?

The problem is the quadratic task: heterogeneous, weighted, with full batches unless a test says otherwise.
"""

import warnings
from dataclasses import replace

import agreement
import jax
import numpy as np
import pytest
from alone import client_alone
from events import afbo
from matrices import end_of_own, hypergradient, members, neumann, outer_gradient

import fedbilevel as fb
from fedbilevel.core.hyperparameters import at, halved
from fedbilevel.tasks.quadratic import quadratic, solution
from refusals import ANY, raises_with, refuses
from representatives import slow_but

AGREEMENT = {
    "AFBO, local": agreement.Case(
        fb.Asynchronous(
            fb.AFBO(
                batch_size=4,
                inner=fb.parts.MeanGradient(rounds=2),
                hypergradient=fb.parts.LocalImplicit(
                    solver=fb.parts.Neumann(terms=[2, 3, 1, 4, 2, 1, 3, 5], sampling="random")
                ),
            ),
            wait_for=2,
            delay_penalty=0.1,
        ),
        work=(1, 2),
        clock=fb.Clock(spread=0.7, stragglers=2),
        slow=True,
    ),
    "AFBO, global": agreement.Case(
        fb.Asynchronous(
            fb.AFBO(batch_size=4, inner=fb.parts.MeanGradient(rounds=2), hypergradient=fb.parts.SystemSteps()),
            wait_for=3,
            max_staleness=2,
        ),
        work=agreement.WORK,
        clock=fb.Clock(network=[1.0, 2.0, 0.5, 0.7, 3.0, 1.0, 1.0, 9.0], drift=0.5, period=4.0, availability=0.6),
        slow=True,
    ),
    "AFBO, E and β by inner round": agreement.Case(
        fb.Asynchronous(
            fb.AFBO(batch_size=4, inner=fb.parts.MeanGradient(rounds=2, lr=(0.5, 0.2))), wait_for=3, max_staleness=2
        ),
        work=np.random.default_rng(0).integers(1, 5, (2, 2, 8)),
        own={"inner.client_lr": lambda round, client, key, k: 0.01 * (1 + k) + 0.1 * jax.random.uniform(key)},
        clock=fb.Clock(spread=0.7, stragglers=2),
        slow=True,
    ),
    "AFBO, β by both": agreement.Case(
        fb.Asynchronous(
            fb.AFBO(
                batch_size=4,
                inner=fb.parts.MeanGradient(
                    rounds=lambda t: 1 + t % 2, local_steps=2, lr=lambda t, k: 0.5 / (1 + t + 2 * k)
                ),
            ),
            wait_for=3,
        ),
        clock=fb.Clock(spread=0.7),
        slow=True,
    ),
    "AFBO, arrivals drawn": agreement.Case(
        fb.Asynchronous(fb.AFBO(batch_size=4, hypergradient=fb.parts.SystemSteps()), wait_for=1),
        clock=fb.Clock(arrivals=lambda exchange, client, key: jax.random.bernoulli(key, 0.6)),
        slow=True,
    ),
    "AFBO, waiting for all": agreement.Case(
        fb.AFBO(
            batch_size=4,
            inner=fb.parts.MeanGradient(local_steps=2),
            hypergradient=fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=2)),
        ),
        slow=True,
    ),
}

WORK = np.array([1, 2, 3, 1, 2])
TIMES = (1.0137, 1.7291, 0.6113, 7.3471, 2.1193)  # seconds from request to reply
BY_K = np.random.default_rng(0).integers(1, 4, (12, 2, 5))  # E_i^{t,k}
ARRIVALS = np.random.default_rng(1).random((7, 5)) < 0.4  # of 7 exchanges, after which the schedule begins again
ARRIVALS[0] = False
STEP = 0.6  # the step of the Neumann series
TERMS = (4, 1, 7, 2, 3)  # N_i


def method(hypergradient, outer_lr=0.05, **inner):
    inner = fb.parts.MeanGradient(**{"client_lr": 0.2, "rounds": 2, "lr": 0.7, **inner})
    return fb.AFBO(batch_size=None, inner=inner, hypergradient=hypergradient, outer_lr=outer_lr)


def beta_by_both(t, k):
    """Return a β_{t,k} that is not a product of a function of t and a function of k."""
    return 0.8 / (1 + t + 2 * k)


def series(terms=4, **fields):
    return fb.parts.LocalImplicit(solver=fb.parts.Neumann(**{"terms": terms, "step": STEP, **fields}))


LOCAL, GLOBAL = method(series()), method(fb.parts.SystemSteps(lr=0.4))
CASES = {  # the algorithm, the clients that are never there, then perhaps E and the arrivals
    "local": (fb.Asynchronous(LOCAL, wait_for=2), ()),
    "local, each its own N_i": (fb.Asynchronous(method(series(TERMS)), wait_for=2), ()),
    "global, penalty, bounded": (fb.Asynchronous(GLOBAL, wait_for=1, max_staleness=3, delay_penalty=0.5), ()),
    "global, one never there": (fb.Asynchronous(GLOBAL, wait_for=2), (4,)),
    "local, waiting for all": (LOCAL, ()),
    "local, all are first": (fb.Asynchronous(LOCAL, wait_for=5), ()),
    "global, waiting for all": (GLOBAL, ()),
    "global, K = 1, by a schedule": (
        fb.Asynchronous(method(fb.parts.SystemSteps(lr=0.4), rounds=1), wait_for=1),
        (),
        WORK,
        ARRIVALS,
    ),
    "local, E and β by k": (fb.Asynchronous(method(series(), lr=(0.7, 0.3)), wait_for=2), (), BY_K),
    "local, E by k, β by t and k": (fb.Asynchronous(method(series(), lr=beta_by_both), wait_for=2), (), BY_K),
    "global, E and β by k, by a schedule": (
        fb.Asynchronous(method(fb.parts.SystemSteps(lr=0.4), lr=(0.7, 0.3)), wait_for=1, delay_penalty=0.1),
        (),
        BY_K,
        ARRIVALS,
    ),
}


@pytest.fixture(scope="module")
def task(alike):
    return alike.with_own(local_steps=WORK)


def run(algorithm, task, rounds, **options):
    return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds, **options)


def clock(absent=(), **options):
    return fb.Clock(network=TIMES, availability=[0.0 if i in absent else 1.0 for i in range(len(TIMES))], **options)


@pytest.mark.parametrize("name", slow_but("local, each its own N_i", "global, E and β by k, by a schedule", of=CASES))
def test_equals_the_events_written_out(name, task):
    """Twelve rounds have the iterates, delays and times of the simulation in tests/algorithms/events.py."""
    algorithm, absent, work, arrivals = (*CASES[name], *(WORK, None)[len(CASES[name]) - 2 :])
    there = clock(absent) if arrivals is None else fb.Clock(arrivals=arrivals, network=TIMES[0])
    own = fb.Clients(task.clients.outer, task.clients.inner, weights=task.clients.weights, local_steps=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fb.errors.AbsenceWarning)
        result = run(algorithm, replace(task, clients=own), 12, engine=fb.Local(clock=there), eval_every=1)
    n = algorithm.asks.first or len(TIMES)
    inside = algorithm.algorithm if algorithm.asks.asynchronous else algorithm
    state = result.state.inside if algorithm.asks.asynchronous else result.state
    (x, y, v), told = afbo(task, algorithm, 12, n, TIMES, work, absent, arrivals)
    np.testing.assert_allclose(result.x, x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.y, y, rtol=1e-12, atol=1e-12)
    if isinstance(inside.hypergradient, fb.parts.SystemSteps):
        np.testing.assert_allclose(state.v, v, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.history["time"][1:], told[:, 2], rtol=1e-9)  # times are sums of ticks
    if algorithm.asks.asynchronous:
        delays = np.stack([result.history[f"delay.{phase}"][1:] for phase in inside.allows.late], axis=1)
        np.testing.assert_allclose(delays, told[:, :2], rtol=1e-12, atol=1e-12)
        assert n == len(TIMES) or np.max(delays) > 1
    else:
        assert not any(name.startswith("delay") for name in result.history.rows[-1])
    # the last reply of a client that is never there grows older by 1 in each exchange; all other ages are bounded
    if absent:
        assert delays[-1, 1] - delays[-7, 1] == pytest.approx(6 * sum(task.clients.weights[i] for i in absent), abs=1.5)


@pytest.mark.slow
def test_local_steps_by_inner_round_are_counted_exactly(task):
    """The ledger counts the local steps of each inner round; no other cost depends on them."""
    steps, spent = [np.ones_like(BY_K), BY_K], []
    for work in steps:
        clients = fb.Clients(task.clients.outer, task.clients.inner, local_steps=work)
        spent.append(run(LOCAL, replace(task, clients=clients), 12).ledger.gradients)
    assert spent[1] - spent[0] == BY_K.sum() - BY_K.size


@pytest.fixture(scope="module")
def alike():
    """Return the task with one local step for each client, so that no client drifts."""
    return quadratic(clients=5, dim_x=3, dim_y=4, condition=5, noise=0.0, samples=(3, 3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["global", "local"])
def test_ends_at_its_closed_form(kind, alike):
    """Late replies do not move the point of rest, since there all last replies are those of this point.

    With "global" it is x*. With "local" it is not x*, but the x with Σ p_i [x + E_i y + B_iᵀP_i(D_i(y − t_i) + E_iᵀx)]
    = 0, where P_i is the series of A_i with N_i terms, at y = Ā⁻¹(B̄x + c̄).

    The clients' times vary from exchange to exchange. With fixed times, a client's replies could always arrive during
    inner exchanges, so that it would never be asked for a hypergradient.
    """
    hypergradient_by = fb.parts.SystemSteps(lr=0.05) if kind == "global" else series(TERMS)
    algorithm = method(hypergradient_by, lr=0.1, outer_lr=0.01, local_steps=1)
    end = run(
        fb.Asynchronous(algorithm, wait_for=2, delay_penalty=0), alike, 12_000, engine=fb.Local(clock=clock(spread=0.5))
    )
    exact = solution(alike.clients).x
    if kind == "local":
        biased = end_of_own(alike, lambda i, hessian: neumann(hessian, STEP, TERMS[i]))
        assert np.linalg.norm(biased - exact) > 0.05 * np.linalg.norm(exact)
        exact = biased
    assert np.linalg.norm(end.x - exact) < 1e-9 * np.linalg.norm(exact)


def test_the_random_length_gives_the_series_on_average(task):
    """The mean of APHE's H_i over 20,000 keys is the series s Σ_{k<N_i} (I − sA)^k ∇y f, within five standard errors.

    This holds in every coordinate, for N_i = 4 and 7. A product that always has N_i factors would give another vector,
    and so would the N_i of another client.
    """
    algorithm, s = method(series(TERMS, sampling="random")), STEP
    x, y = np.array([0.3, -1.0, 0.5]), np.array([1.0, 0.2, -0.7, 0.4])

    @jax.jit
    def directions(rows, id, keys):
        client = client_alone(task.problem, *rows, id)
        return jax.vmap(lambda key: algorithm.hypergradient.local_hypergradient(client, (x, y), key))(keys)

    for i, other in ((0, 7), (2, 4)):
        rows = [jax.tree.map(lambda a: a[:2], part.row(i)) for part in (task.clients.outer, task.clients.inner)]
        replies = directions(rows, i, jax.random.split(jax.random.key(i), 20_000))
        drawn, spent = np.asarray(replies.update[0]), np.asarray(replies.hvps)
        _, f, g = members(task)[i]
        b = outer_gradient(f, x, y)

        def by(terms, f=f, g=g, b=b):
            return hypergradient(f, g, x, y, neumann(g["A"], s, terms) @ b)

        errors = drawn.std(0, ddof=1) / np.sqrt(len(drawn))
        assert np.all(np.abs(drawn.mean(0) - by(TERMS[i])) < 5 * errors)
        assert np.any(np.abs(drawn.mean(0) - by(other)) > 10 * errors)
        last = TERMS[i] * (by(TERMS[i] + 1) - by(TERMS[i])) + hypergradient(f, g, x, y, 0 * b)
        assert np.any(np.abs(drawn.mean(0) - last) > 50 * errors)
        assert set(spent) == set(range(1, TERMS[i] + 1))  # N' products with the Hessian, and one with ∇²xy g


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (
            lambda: fb.AFBO(hypergradient=fb.parts.Implicit()),
            ("AFBO.hypergradient", ANY, "LocalImplicit(…) or SystemSteps(…)"),
        ),
        (
            lambda: fb.parts.MeanGradient(rounds=2, lr=[0.1, 0.2, 0.3]),
            ("MeanGradient.lr", (0.1, 0.2, 0.3), "2 numbers"),
        ),
        (lambda: fb.parts.MeanGradient(rounds=2, lr=[0.1, 0]), ("MeanGradient.lr[1]", 0)),
        (lambda: fb.parts.MeanGradient(rounds=lambda t: 1, lr=[0.1]), ("MeanGradient.lr", (0.1,), "`rounds`")),
        (
            lambda: fb.parts.MeanGradient(lr=lambda t, k, e: 0.1),
            ("MeanGradient.lr", ANY, "(round, k)"),
        ),
        (lambda: fb.parts.MeanGradient(lr=lambda t, k: [0.1, 0.2]), ("MeanGradient.lr", ANY, "(round, k)")),
        (lambda: fb.AFBO(outer_lr=lambda t, k: 0.1), ("AFBO.outer_lr",)),
        (lambda: series([3, 0]), ("Neumann.terms", [3, 0])),
        (lambda: series([]), ("Neumann.terms", [])),
        (
            lambda: fb.parts.Implicit(solver=fb.parts.Neumann(terms=[3, 2])),
            ("Implicit.solver.terms", (3, 2), "LocalImplicit"),
        ),
    ],
)
def test_wrong_fields(make, refusal):
    with refuses(*refusal):
        make()


@pytest.mark.parametrize(
    ("algorithm", "refusal"),
    [
        (method(series((4, 1))), ("Neumann.terms", (4, 1), "5 clients")),
        (method(series(step=5.0)), ("Neumann.step", 5.0)),  # products would grow
        (fb.Asynchronous(LOCAL, wait_for=6), ("Asynchronous.wait_for", 6, "at most 5")),
    ],
)
def test_what_does_not_fit_the_clients(algorithm, refusal, task):
    with refuses(*refusal):
        run(algorithm, task, 1)


@pytest.mark.parametrize("engine", [fb.Local, fb.Reference])
@pytest.mark.parametrize(
    ("algorithm", "refusal"),
    [
        (fb.Asynchronous(GLOBAL, wait_for=2), ("wait_for", 2, "1 with Clock.arrivals")),
        (fb.Asynchronous(GLOBAL, wait_for=1, max_staleness=3), ("max_staleness", 3, "None with Clock.arrivals")),
        (GLOBAL, ("Clock.arrivals", "a schedule", "Asynchronous")),
        (fb.ADBO(wait_for=1), ("Clock.arrivals", "a schedule", "phase")),
    ],
)
def test_a_schedule_of_arrivals_refuses_what_contradicts_it(engine, algorithm, refusal, alike):
    with refuses(*refusal):
        run(algorithm, alike, 1, engine=engine(clock=fb.Clock(arrivals=ARRIVALS)))


@pytest.mark.filterwarnings("error::fedbilevel.errors.AbsenceWarning")  # an error, so that nothing is compiled after it
def test_who_never_arrives_is_named(alike):
    never = np.ones((2, 5), bool)
    never[:, 1] = False
    method = fb.Asynchronous(GLOBAL, wait_for=1)
    with pytest.raises(fb.errors.AbsenceWarning, match=r"Clock\.arrivals.* \[1\] "):
        run(method, alike, 1, engine=fb.Local(clock=fb.Clock(arrivals=never)))
    with refuses("Clock.arrivals", fact="True"):
        run(method, alike, 1, engine=fb.Local(clock=fb.Clock(arrivals=~np.ones((2, 5), bool))))
    with refuses("Clock.arrivals", ANY, "(exchange, client, key)"):
        fb.Clock(arrivals=lambda exchange, client, key, k: True)


@pytest.mark.slow
def test_steps_by_round_and_inner_round_are_those_of_rounds_with_each(task):
    """Schedules of η_t, and of β_{t,k} for each k, are read in each round.

    Three rounds equal three runs of one round with the schedules' numbers.
    """
    by_both = method(series(), lambda round: 0.05 + 0.1 * round, lr=(0.7, lambda round: 0.1 + 0.2 * round))
    engine = fb.Reference()
    at_once = run(by_both, task, 3, engine=engine)
    x, y = task.x0, task.y0
    for t in range(3):
        same = method(series(), 0.05 + 0.1 * t, lr=(0.7, 0.1 + 0.2 * t))
        one = run(same, replace(task, x0=x, y0=y), 1, engine=engine)
        x, y = one.x, one.y
    np.testing.assert_allclose(at_once.y, y, rtol=1e-12)
    np.testing.assert_allclose(at_once.x, x, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("client_lr", [0.2, None])
def test_a_rule_of_round_and_inner_round_gives_what_its_numbers_give(client_lr, task):
    """A function of t and k can give β_{t,k}, if the number of inner rounds K^t changes from round to round.

    Three rounds equal three runs of one round with the function's numbers. If the client's step is None, it is a
    twentieth of β_{t,0}.
    """
    by_both = method(series(), rounds=lambda t: 1 + t, lr=beta_by_both, client_lr=client_lr)
    engine = fb.Reference()
    at_once = run(by_both, task, 3, engine=engine)
    x, y = task.x0, task.y0
    for t in range(3):
        betas = [beta_by_both(t, k) for k in range(1 + t)]
        own = client_lr or betas[0] / 20
        same = method(series(), rounds=1 + t, lr=betas, client_lr=own)
        one = run(same, replace(task, x0=x, y0=y), 1, engine=engine)
        x, y = one.x, one.y
    np.testing.assert_allclose(at_once.y, y, rtol=1e-12)
    np.testing.assert_allclose(at_once.x, x, rtol=1e-12)
    alike = replace(by_both, inner=replace(by_both.inner, lr=lambda t: beta_by_both(t, 0)))
    by_round = run(alike, task, 3, engine=engine)
    assert np.linalg.norm(by_round.y - y) > 1e-3  # the result does depend on k


@pytest.mark.slow
def test_a_rule_of_round_and_inner_round_is_part_of_a_run_and_can_be_halved(task, tmp_path):
    """A resumed run must have the same values of β_{t,k}, also those beyond k = 0, and `halved` halves all of them."""
    kept = tmp_path / "c.npz"
    run(method(series(), lr=beta_by_both), task, 1, checkpoint=kept)
    with raises_with(fb.errors.CheckpointError, path=kept, differences={"schedule inner.lr": None}):
        run(method(series(), lr=lambda t, k: 0.8 / (1 + t + 3 * k)), task, 2, checkpoint=kept, resume=True)
    half = at(halved(method(series(), lr=beta_by_both)), 3).inner.lr
    assert [half.function(k) for k in range(3)] == [beta_by_both(3, k) / 2 for k in range(3)]
