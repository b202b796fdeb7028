"""Do clients that differ, from each other and between rounds, follow the papers' algorithms in τ_i, α_i and a_i?

The algorithms are written out in NumPy on the quadratic task, whose clients differ in everything and have unequal
weights.
"""

import agreement
import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.parts import CG, SVRG, Implicit, LocalImplicit, LocalSGD, Mixed, Neumann
from fedbilevel.tasks.quadratic import quadratic, solution
from fixed_steps import fixed
from refusals import raises_with, refuses
from representatives import slow_but

STEPS = [1, 2, 3, 5]
OPTIMIZERS = {"decay": [0.0, 0.6, 0.0, 0.5], "pull": [0.0, 0.0, 0.2, 0.1]}
"""Plain steps, heavy ball, FedProx, and both at once."""
OWN_OPTIMIZERS = {f"local_optimizer.{name}": numbers for name, numbers in OPTIMIZERS.items()}
EIGHT = {name: numbers * 2 for name, numbers in OWN_OPTIMIZERS.items()}
AGREEMENT = {
    "FedNest, clients' own steps on x": agreement.Case(
        fixed(fb.FedNest(hypergradient=Implicit(solver=CG(max_steps=2)), outer_steps=2, batch_size=4)),
        own={"outer_steps": (1, 4)},
        slow=True,
    ),
    "SimFBO, clients' own optimizers and step sizes, steps by round": agreement.Case(
        fixed(fb.SimFBO(local_optimizer=Mixed(), batch_size=4)),
        work=lambda round, client, key: 1 + (round + client) % 3,
        own=EIGHT | {"client_lr.y": (0.05, 0.1)},
        slow=True,
    ),
    "ShroFBO, a table of steps": agreement.Case(
        fixed(fb.ShroFBO(batch_size=4)), work=np.arange(16).reshape(2, 8) % 4 + 1, slow=True
    ),
}


@pytest.fixture(scope="module")
def task():
    return quadratic(clients=4, condition=5, samples=(3, 3))


def with_own(task, **own):
    clients = task.clients
    return fb.Clients(clients.outer, clients.inner, weights=clients.weights, **own)


def means(task):
    """Return each client's matrices of f, and those of g, as means over its samples."""
    rows = task.clients.outer, task.clients.inner
    return [[{k: m.mean(0) for k, m in of.row(i).items()} for i in range(len(task.clients))] for of in rows]


def test_fedout_is_algorithm_2_with_unequal_steps(task):
    """FedNest with unequal numbers of steps on x is Algorithm 2 (FedOut), written out in NumPy:

    x_{i,ν+1} = x_{i,ν} − (α/τ_i)[∇x f_i(x_{i,ν}) − ∇x f_i(x) + h],  x ← Σ p_i x_{i,τ_i},  where ∇x f_i = x + E_i y.
    """
    alpha, p, (f, g) = 0.3, task.clients.weights, means(task)
    method = fixed(
        fb.FedNest(
            inner=SVRG(local_steps=1, lr=0.1),
            hypergradient=Implicit(solver=CG(max_steps=16, tolerance=1e-13)),
            outer_lr=alpha,
            batch_size=None,
        )
    )
    own = with_own(task, own={"outer_steps": STEPS})
    result = fb.solve(method, task.problem, own, task.x0, task.y0, rounds=2)
    x, y = np.array(task.x0), np.array(task.y0)
    mean = lambda of, name: sum(w * client[name] for w, client in zip(p, of, strict=True))  # noqa: E731
    hessian, cross, linear = (mean(g, name) for name in "ABc")
    for _ in range(2):
        y = y - 0.1 * (hessian @ y - cross @ x - linear)
        f_y = sum(w * (c["D"] @ (y - c["t"]) + c["E"].T @ x) for w, c in zip(p, f, strict=True))
        v = np.linalg.solve(hessian, f_y)
        h = x + mean(f, "E") @ y + cross.T @ v  # ∇²xy g = −B
        ends = []
        for tau in STEPS:
            z = x
            for _ in range(tau):
                z = z - alpha / tau * (z - x + h)
            ends.append(z)
        x = sum(w * end for w, end in zip(p, ends, strict=True))
    np.testing.assert_allclose(result.x, x, rtol=1e-10)
    np.testing.assert_allclose(result.y, y, rtol=1e-10)
    assert not np.allclose(ends[0], ends[-1], rtol=1e-3)


@pytest.mark.slow
def test_what_unequal_steps_on_x_cost_is_counted_exactly(task):
    """The ledger counts unequal steps on x exactly.

    A corrected step costs two gradients, except for the first one, which is along h. A step of LFedNest costs one
    gradient and N products.
    """
    few, many = (with_own(task, own={"outer_steps": steps}) for steps in ([1] * len(STEPS), STEPS))
    phases = {}
    series, own_series = (kind(solver=Neumann(terms=2)) for kind in (Implicit, LocalImplicit))
    methods = fb.FedNest(hypergradient=series, batch_size=None), fb.LFedNest(hypergradient=own_series, batch_size=None)
    for method in map(fixed, methods):
        steps = [
            fb.solve(method, task.problem, c, task.x0, task.y0, rounds=1, engine=fb.Reference()).ledger
            for c in (few, many)
        ]
        phases[type(method)] = steps[1].gradients - steps[0].gradients, steps[1].hvps - steps[0].hvps
    more = sum(STEPS) - len(STEPS)
    assert phases[fb.FedNest] == (2 * more, 0)
    gradients, hvps = phases[fb.LFedNest]
    assert (gradients, hvps) == (more, 2 * more)


@pytest.mark.slow
def test_theorem_2_with_mixed_optimizers(task):
    """With mixed optimizers, SimFBO solves the problem with weights p_i‖a_i‖₁, and ShroFBO the problem with weights
    p_i.

    The local steps are so short that drift vanishes. The a_i are written out in NumPy.
    """
    norms = []
    for tau, mu, alpha in zip(STEPS, *OPTIMIZERS.values(), strict=True):
        q = m = 0.0
        for _ in range(tau):  # all directions are 1
            m = mu * m + 1
            q = (1 - alpha) * q + m
        norms.append(q)
    assert norms[1] == pytest.approx(sum((1 - 0.6**k) / 0.4 for k in (1, 2)))  # closed form for heavy ball
    assert norms[2] == pytest.approx(sum(0.8**k for k in range(3)))  # closed form for FedProx
    own = with_own(task, local_steps=STEPS, own=OWN_OPTIMIZERS)
    w = task.clients.weights * np.array(norms)
    reweighted, posed = solution(task.clients, w / w.sum()).x, solution(task.clients).x
    assert np.linalg.norm(reweighted - posed) > 1e-2 * np.linalg.norm(posed)
    server = fb.XYV(*(lr / max(norms) for lr in (0.04, 1.0, 1.0)))
    for method, limit in ((fb.SimFBO, reweighted), (fb.ShroFBO, posed)):
        algorithm = method(batch_size=None, client_lr=1e-13, server_lr=server, local_optimizer=Mixed())
        found = fb.solve(algorithm, task.problem, own, task.x0, task.y0, rounds=1_600).x
        assert np.linalg.norm(found - limit) < 1e-8 * np.linalg.norm(limit)


def test_step_sizes_of_clients_are_those_of_their_own_loops(task):
    """With two local steps in AFBO, each client steps on y with its own step size."""
    _, g = means(task)
    lr, x, y = [0.01, 0.05, 0.1, 0.2], np.array(task.x0), np.array(task.y0)
    method = fixed(fb.AFBO(inner=fb.parts.MeanGradient(local_steps=2, lr=1.0), batch_size=None))
    own = with_own(task, own={"inner.client_lr": lr})
    found = fb.solve(method, task.problem, own, x, y, rounds=1, engine=fb.Reference()).y
    change = 0
    for p, eta, c in zip(task.clients.weights, lr, g, strict=True):
        gradient = lambda y, c=c: c["A"] @ y - c["B"] @ x - c["c"]  # noqa: E731
        change = change + p * (gradient(y) + gradient(y - eta * gradient(y))) / 2
    np.testing.assert_allclose(found, y - change, rtol=1e-12)


def test_a_table_of_steps_is_followed_round_by_round(task):
    """In a table of local steps, each round uses its row: two rounds equal two runs of one round with one row each."""
    method = fb.FedAvg(lr=0.1, batch_size=None)
    problem = fb.SingleLevel(lambda x, batch: task.problem.outer(x, task.y0, batch))
    table = np.array([STEPS, STEPS[::-1]])

    def after(x, steps, rounds):
        clients = fb.Clients(task.clients.outer, weights=task.clients.weights, local_steps=steps)
        return fb.solve(method, problem, clients, x, rounds=rounds)

    both = after(task.x0, table, 2)
    first = after(task.x0, table[0], 1)
    second = after(first.x, table[1], 1)
    np.testing.assert_allclose(both.x, second.x, rtol=1e-12)
    assert both.ledger.gradients == first.ledger.gradients + second.ledger.gradients


def test_a_resumed_run_draws_the_same_numbers(task, tmp_path):
    own = with_own(task, local_steps=(1, 4), own={"client_lr.x": lambda r, c, key: 0.1 * jax.random.uniform(key)})
    arguments = fixed(fb.SimFBO(batch_size=4)), task.problem, own, task.x0, task.y0
    engine = fb.Reference()
    whole = fb.solve(*arguments, rounds=4, engine=engine)
    for rounds in (2, 4):
        resumed = fb.solve(*arguments, rounds=rounds, engine=engine, checkpoint=tmp_path / "c.npz", resume="auto")
    np.testing.assert_array_equal(resumed.x, whole.x)
    other = with_own(task, local_steps=(1, 4), own={"client_lr.x": lambda r, c, key: 0.2 * jax.random.uniform(key)})
    with raises_with(fb.errors.CheckpointError, differences={"clients' rule for client_lr.x": None}):
        fb.solve(*arguments[:2], other, *arguments[3:], rounds=7, checkpoint=tmp_path / "c.npz", resume=True)


def test_local_sgd_and_svrg_take_clients_local_steps(task):
    """Both kinds of inner rounds on y take τ_i from `local_steps`, whatever the numbers of steps on x are."""
    for inner, each in ((LocalSGD(), 1), (SVRG(), 2)):
        series = Implicit(solver=Neumann(terms=1))
        kind = fb.FedNest if each == 2 else fb.FedNestSGD
        method = fixed(kind(inner=inner, hypergradient=series, batch_size=None))
        few, many = (
            fb.solve(
                method, task.problem, with_own(task, local_steps=n), task.x0, task.y0, rounds=1, engine=fb.Reference()
            ).ledger.gradients
            for n in (2, 5)
        )
        assert many - few == 3 * each * len(task.clients)


@pytest.mark.parametrize("engine", slow_but(fb.Reference(), of=[fb.Reference(), fb.Local(), fb.Local(devices=2)]))
def test_inner_rounds_by_round_are_those_of_runs_with_each_number(task, engine):
    """AFBO's number of inner rounds, K^t, may change from round to round.

    Two rounds with 1 and 2 inner rounds equal two runs of one round with these numbers.
    """
    constant = lambda count: fixed(fb.AFBO(inner=fb.parts.MeanGradient(rounds=count, lr=0.2), batch_size=None))  # noqa: E731
    found = fb.solve(constant(lambda k: 1 + k), task.problem, task.clients, task.x0, task.y0, rounds=2, engine=engine)
    x, y = task.x0, task.y0
    for count in (1, 2):
        step = fb.solve(constant(count), task.problem, task.clients, x, y, rounds=1, engine=fb.Reference())
        x, y = step.x, step.y
    np.testing.assert_allclose(found.x, x, rtol=1e-12)
    np.testing.assert_allclose(found.y, y, rtol=1e-12)
    assert found.ledger.exchanges == (1 + 2) + 2


@pytest.mark.slow
def test_inner_rounds_are_whole_numbers_and_a_schedule_is_part_of_a_run(task, tmp_path):
    with refuses("LocalSGD.rounds"):
        LocalSGD(rounds=lambda k: 0.5 * k)
    with refuses("AggITD.inner.rounds"):
        fixed(fb.AggITD(inner=LocalSGD(rounds=lambda k: 1 + k)))
    run = lambda rule, **more: fb.solve(  # noqa: E731
        fixed(fb.FedNest(inner=SVRG(rounds=rule), batch_size=None)),
        task.problem,
        task.clients,
        task.x0,
        task.y0,
        **more,
    )
    run(lambda k: 1 + k, rounds=1, checkpoint=tmp_path / "c.npz")
    with raises_with(fb.errors.CheckpointError, differences={"schedule inner.rounds": None}):
        run(lambda k: 2 + k, rounds=2, checkpoint=tmp_path / "c.npz", resume=True)


@pytest.mark.slow
def test_steps_by_round_are_those_of_runs_with_each(task):
    """Two rounds with α and β given by round equal two runs of one round, each with the values of its round."""
    start = task.problem, task.clients, task.x0, task.y0
    by_round = lambda a, b: lambda k: jax.numpy.where(k < 1, a, b)  # noqa: E731
    method = lambda alpha, beta: fixed(fb.FedNest(inner=SVRG(lr=beta), outer_lr=alpha, batch_size=None))  # noqa: E731
    engine = fb.Reference()
    both = fb.solve(method(by_round(0.1, 0.3), by_round(0.4, 0.05)), *start, rounds=2, engine=engine)
    x, y = task.x0, task.y0
    for alpha, beta in ((0.1, 0.4), (0.3, 0.05)):
        step = fb.solve(method(alpha, beta), task.problem, task.clients, x, y, rounds=1, engine=engine)
        x, y = step.x, step.y
    np.testing.assert_allclose(both.x, x, rtol=1e-12)
    np.testing.assert_allclose(both.y, y, rtol=1e-12)


@pytest.mark.slow
def test_each_schedule_of_a_count_has_its_own_program(task):
    """A function that gives a count has a compiled program of its own.

    If a value that the function reads has changed, a new program is compiled.
    """
    count = [1]

    def ran(rule):
        hypergradient = LocalImplicit(solver=Neumann(terms=1))
        method = fixed(fb.FedNestSGD(inner=LocalSGD(rounds=rule), hypergradient=hypergradient, batch_size=None))
        return fb.solve(method, task.problem, task.clients, task.x0, task.y0, rounds=2).ledger.exchanges

    reads = lambda k: jax.numpy.asarray(count[0])  # noqa: E731
    found = [ran(lambda k: 1 + 0 * k), ran(lambda k: 3 + 0 * k), ran(reads)]
    count[0] = 4
    assert np.diff([*found, ran(reads)]).tolist() == [2 * 2, -2 * 2, 2 * 3]


def test_pooled_clients_keep_single_numbers_and_refuse_others(task):
    pooled = with_own(task, local_steps=2, own={"client_lr.x": 0.5}).pooled()
    assert [float(pooled.own[name].values) for name in ("local_steps", "client_lr.x")] == [2, 0.5]
    with refuses("Clients.own", ["local_steps"]):
        with_own(task, local_steps=STEPS).pooled()
