"""Do FedNest and its relatives compute what the paper says, and end where closed forms say?

The quadratic task is heterogeneous and weighted, and its cross terms have no symmetry. Float64 is on (conftest.py).
"""

from dataclasses import replace
from typing import NamedTuple

import agreement
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrices import end_of_own, hypergradient, inner_gradient, mean_matrices, members, neumann, outer_gradient

import fedbilevel as fb
from fedbilevel.authoring import Findings
from fedbilevel.tasks.quadratic import quadratic, solution
from fixed_steps import fixed
from refusals import ANY, raises_with, refuses
from representatives import slow_but

AGREEMENT = {
    "FedNest, random lengths, fresh cohorts": agreement.Case(
        fixed(
            fb.FedNest(
                hypergradient=fb.parts.Implicit(solver=fb.parts.Neumann(terms=2, sampling="random")),
                batch_size=4,
                outer_steps=2,
            )
        ),
        work=agreement.WORK,
        own={"outer_steps": (1, 4)},
    ),
    "FedNest-SGD, conjugate gradient": agreement.Case(
        fixed(fb.FedNestSGD(hypergradient=fb.parts.Implicit(solver=fb.parts.CG(max_steps=4)), batch_size=None)),
        slow=True,
    ),
    "LFedNest, random lengths": agreement.Case(
        fixed(
            fb.LFedNest(
                inner=fb.parts.LocalSGD(lr=0.1),
                hypergradient=fb.parts.LocalImplicit(solver=fb.parts.Neumann(sampling="random")),
                batch_size=4,
            )
        ),
        work=(1, 4),
        slow=True,
    ),
    "LFedNest, SVRG": agreement.Case(
        fixed(fb.LFedNest(inner=fb.parts.SVRG(rounds=2, lr=0.1), batch_size=4, outer_steps=2)),
        work=agreement.WORK,
        slow=True,
    ),
    "LFedNest, joint": agreement.Case(fixed(fb.LFedNest(batch_size=4, joint=True)), work=agreement.WORK, slow=True),
    "LFedNest, SVRG, joint": agreement.Case(
        fixed(fb.LFedNest(inner=fb.parts.SVRG(lr=0.1), batch_size=4, joint=True)), work=(1, 4), slow=True
    ),
}
NEVER_LATE = {
    fb.FedNest: "an earlier reply belongs to another vector",
    fb.FedNestSGD: "an earlier reply belongs to another vector",
}

WORK = np.array([1, 2, 3, 4, 1, 2, 3, 4])
STEPS = {"outer_lr": 0.2, "batch_size": None}


def run(algorithm, task, rounds, **options):
    return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds, **options)


def relative_error(x, exact):
    return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))


LONG, CG = (
    fb.parts.Implicit(solver=fb.parts.Neumann(terms=120, step=1.0)),
    fb.parts.Implicit(solver=fb.parts.CG(tolerance=1e-10)),
)
THRICE = fb.parts.SVRG(rounds=3, local_steps=3, lr=1.0)
EXACT = {
    "series": fixed(fb.FedNest(inner=THRICE, hypergradient=LONG, outer_steps=2, **STEPS)),
    "cg": fixed(fb.FedNest(inner=THRICE, hypergradient=CG, outer_steps=2, **STEPS)),
    "SGD, τ = 1": fixed(
        fb.FedNestSGD(inner=fb.parts.LocalSGD(rounds=3, local_steps=1, lr=1.0), hypergradient=CG, **STEPS)
    ),
}


@pytest.fixture(scope="module")
def task():
    return quadratic(clients=8, condition=5, samples=(4, 4)).with_own(local_steps=WORK)


@pytest.mark.parametrize("name", slow_but("cg", of=sorted(EXACT)))
def test_reaches_the_closed_form(name, task):
    """FedNest and its relatives end at the solution, also with unequal local work.

    The steps β/τ_i and the correction leave x* where it is. The series leaves (1 − 1/κ)^120 < 1e-11.
    """
    task = quadratic(clients=8, condition=5) if name.startswith("SGD") else task
    result = run(EXACT[name], task, 120)
    exact = solution(task.clients)
    assert relative_error(result.x, exact.x) < 1e-6
    assert relative_error(result.y, exact.y) < 1e-6


def end_of_own_at(task, beta):
    """Return the x with Σ p_i h_i(x, y_i) = 0, where y_i is y*(x) − β ∇y g_i; the sum is affine in x."""
    m = mean_matrices(task)

    def slope(x):
        y, total = np.linalg.solve(m["A"], m["B"] @ x + m["c"]), 0
        for p, f, g in members(task):
            own = y - beta * inner_gradient(g, x, y)
            total = total + p * hypergradient(f, g, x, own, np.linalg.solve(g["A"], outer_gradient(f, x, own)))
        return total

    at_zero = slope(np.zeros(5))
    return np.linalg.solve(np.stack([slope(e) - at_zero for e in np.eye(5)], axis=1), -at_zero)


SVRG3 = fb.parts.SVRG(local_steps=3, lr=1.0)
SGD1 = fb.parts.LocalSGD(local_steps=1, lr=1.0)
LIGHT = {
    "LFedNest": (fb.LFedNest, {"inner": replace(SGD1, rounds=5)}, 0),
    "FedNest, local": (fb.FedNest, {"inner": replace(SVRG3, rounds=5)}, 0),
    "LFedNest, SVRG": (fb.LFedNest, {"inner": replace(SVRG3, rounds=5)}, 0),
    "LFedNest, SVRG, joint": (fb.LFedNest, {"inner": SVRG3, "joint": True}, 0),
    "LFedNest, joint": (fb.LFedNest, {"inner": SGD1, "joint": True}, 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIGHT)
def test_local_hypergradients_end_where_their_mean_vanishes(name):
    """Methods with clients' own hypergradients end where the mean of these is 0, which is not x*.

    SVRG's steps are 0 at y*(x), so that all clients are there, for any τ. After one plain step β = 1 they are not.
    """
    task, (method, fields, beta) = quadratic(condition=5, noise=0.0), LIGHT[name]
    local = fb.parts.LocalImplicit(solver=fb.parts.CG(tolerance=1e-12))
    result = run(method(hypergradient=local, **fields, **STEPS), task, 120)
    predicted = end_of_own_at(task, beta)
    assert relative_error(result.x, predicted) < 1e-6
    assert relative_error(solution(task.clients).x, predicted) > 0.1  # another point than x*
    assert (relative_error(end_of_own(task), predicted) < 1e-12) == (beta == 0)
    assert beta == 0 or relative_error(end_of_own(task), predicted) > 0.1


@pytest.mark.parametrize(
    ("inner", "joint", "exchanges"),
    [
        pytest.param(fb.parts.LocalSGD, False, 2 + 1, marks=pytest.mark.slow),
        (fb.parts.SVRG, False, 2 * 2 + 1),
        (fb.parts.LocalSGD, True, 1),
        pytest.param(fb.parts.SVRG, True, 2, marks=pytest.mark.slow),
    ],
)
def test_light_variants_equal_their_equations_written_out(inner, joint, exchanges, task):
    """Three rounds equal the equations in NumPy: clients differ in data, weights and work on y.

    Each client makes two steps on x along its own h_i.
    """
    beta, alpha, s, terms, rounds = 0.6, 0.3, 0.7, 4, 1 if joint else 2
    algorithm = fixed(
        fb.LFedNest(
            inner=inner(rounds=rounds, local_steps=3, lr=beta),
            hypergradient=fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=terms, step=s)),
            outer_lr=alpha,
            outer_steps=2,
            joint=joint,
            batch_size=None,
        )
    )
    m = mean_matrices(task)
    x, y = np.zeros(5), np.zeros(8)
    for _ in range(3):
        for _ in range(rounds):
            ends = []
            for (_, _, g), tau in zip(members(task), WORK, strict=True):
                z = y
                correction = inner_gradient(m, x, y) - inner_gradient(g, x, y) if inner is fb.parts.SVRG else 0
                for _ in range(tau):
                    z = z - beta / tau * (inner_gradient(g, x, z) + correction)
                ends.append(z)
            y = sum(p * end for (p, _, _), end in zip(members(task), ends, strict=True))
        change = 0
        for (p, f, g), end in zip(members(task), ends, strict=True):
            z, at = x, end if joint else y
            for _ in range(2):
                v = neumann(g["A"], s, terms) @ outer_gradient(f, z, at)
                z = z - alpha / 2 * hypergradient(f, g, z, at, v)
            change = change + p * (z - x)
        x = x + change
    result = run(algorithm, task, 3, engine=fb.Reference())
    np.testing.assert_allclose(result.x, x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.y, y, rtol=1e-12, atol=1e-12)
    assert result.ledger.exchanges == 3 * exchanges
    assert set(algorithm.allows.late) == set(result.ledger.exchanges_by_phase)


@pytest.mark.parametrize(
    ("method", "inner"),
    slow_but((fb.FedNest, fb.parts.SVRG), of=[(fb.FedNest, fb.parts.SVRG), (fb.FedNestSGD, fb.parts.LocalSGD)]),
)
def test_equals_algorithms_1_to_4_written_out(method, inner, task):
    """Three epochs equal the equations in NumPy, with matrices in place of differentiation and the series for v.

    Each client makes its own number τ_i of steps on y. FedNest-SGD makes them along ∇y g_i, without the correction.
    """
    rounds, outer, terms, beta, alpha, s = 3, 2, 5, 0.6, 0.3, 0.7
    solver = fb.parts.Neumann(terms=terms, step=s)
    algorithm = method(
        inner=inner(rounds=rounds, local_steps=3, lr=beta),
        hypergradient=fb.parts.Implicit(solver=solver),
        outer_lr=alpha,
        outer_steps=outer,
        batch_size=None,
    )
    m = mean_matrices(task)
    x, y = np.zeros(5), np.zeros(8)
    for _ in range(3):
        for _ in range(rounds):
            q, change = inner_gradient(m, x, y), 0
            for (p, _, g), tau in zip(members(task), WORK, strict=True):
                z, shared = y, q - inner_gradient(g, x, y) if method is fb.FedNest else 0
                for _ in range(tau):
                    z = z - beta / tau * (inner_gradient(g, x, z) + shared)
                change = change + p * (z - y)
            y = y + change
        v = neumann(m["A"], s, terms) @ (m["D"] @ y - m["Dt"] + m["E"].T @ x)
        h = hypergradient(m, m, x, y, v)
        z = x
        for _ in range(outer):  # ∇x f_i = ρx + E_i y with ρ = 1 for all clients, so that all have the same correction
            z = z - alpha / outer * ((z - x) + h)
        x = z
    result = run(algorithm, task, 3, engine=fb.Reference())
    np.testing.assert_allclose(result.x, x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.y, y, rtol=1e-12, atol=1e-12)


class Sums(NamedTuple):
    x: jax.Array
    y: jax.Array
    total: jax.Array
    squares: jax.Array


class Draws(fb.FedNest):
    """Draw FedNest's hypergradient at the start again and again, and keep the sum and the sum of squares."""

    def init(self, x, y):
        return Sums(x, y, jnp.zeros_like(x), jnp.zeros_like(x))

    def findings(self, state):
        return Findings()

    def round(self, fed, state, key):
        h = self.hypergradient_at(fed, state.x, state.y, key)
        return state._replace(total=state.total + h, squares=state.squares + h**2)


def deviation(fresh, sampling, draws=24_000, terms=6, step=1.5):
    """Return the distance of the mean of all draws from ∇x F + B̄ᵀ s Σ_{n<N} (I − sĀ)ⁿ ∇y F.

    It is that of the farthest entry, in standard errors. Cohorts are 2 of 6 unequal clients, and mini-batches have 2
    samples.
    """
    task = quadratic(clients=6, heterogeneity=2.0, samples=(5, 5))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=5), rng.normal(size=8)
    m = mean_matrices(task)
    expected = hypergradient(m, m, x, y, neumann(m["A"], step, terms) @ (m["D"] @ y - m["Dt"] + m["E"].T @ x))
    solver = fb.parts.Neumann(terms=terms, step=step, sampling=sampling)
    algorithm = fixed(Draws(hypergradient=fb.parts.Implicit(solver=solver, fresh_cohorts=fresh), batch_size=2))
    state = fb.solve(
        algorithm, task.problem, task.clients, jnp.asarray(x), jnp.asarray(y), rounds=draws, cohort=2
    ).state
    mean = np.asarray(state.total) / draws
    error = np.sqrt((np.asarray(state.squares) / draws - mean**2) / draws)
    return np.max(np.abs(mean - expected) / error)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["random_per_client", "random", None])
def test_in_expectation_the_product_is_the_truncated_neumann_inverse(sampling):
    """With fresh cohorts, the hypergradient is the truncated Neumann series in expectation (Lemma 2.2).

    If one cohort computed all factors, a product would have another expectation. The test would also detect a smaller
    mistake: that all products with the Hessian share a cohort, while ∇y F and the last product have cohorts of their
    own. The mean is then off by 7 to 11 standard errors. This is why the test has many products, a long step and 24,000
    draws.
    """
    assert deviation(True, sampling) < 5
    if sampling is None:
        assert deviation(False, sampling) > 10


APART = {"a": np.repeat(np.array([3.0, -1.0, 2.0])[:, None], 2, axis=1)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "counts"),
    [
        (fb.Minimax(lambda x, y, batch: jnp.mean(batch["a"]) * x @ y - y @ y + x @ x), {"gradients": 1, "hvps": 0}),
        (
            fb.Compositional(lambda y, batch: y @ y, lambda x, batch: x * jnp.mean(batch["a"])),
            {"gradients": 2, "hvps": 1},
        ),
    ],
)
def test_what_hypergradients_cost_a_client_where_no_system_is_solved(problem, counts):
    """If no system is solved, a local hypergradient takes as many products as a global one.

    A client that computes its hypergradient alone has both gradients of f from one pass.
    """
    start = (jnp.ones(2), jnp.ones(2))
    twice, local = fb.parts.LocalSGD(local_steps=2), fb.parts.LocalImplicit()
    for algorithm in (
        fixed(fb.FedNestSGD(inner=twice)),
        fixed(fb.FedNestSGD(inner=twice, hypergradient=local)),
        fixed(fb.LFedNest(inner=twice)),
    ):
        ledger = fb.solve(algorithm, problem, fb.Clients(APART), *start, rounds=1, engine=fb.Reference()).ledger
        inner = 2 * 3  # FedAvg's gradients on y, in two local steps of three clients
        gradients = counts["gradients"] if isinstance(algorithm.hypergradient, fb.parts.Implicit) else 1
        assert ((ledger.gradients - inner) / 3, ledger.hvps / 3) == (gradients, counts["hvps"])


def test_exchanges_are_those_of_the_paper():
    """A round has 2T + N' + 3 exchanges, and every N' from 0 to N − 1 occurs in 40 rounds.

    The chance that one of them is missing is 0.4 %.
    """
    rounds, inner, terms = 40, 3, 6
    hypergradient = fb.parts.Implicit(solver=fb.parts.Neumann(terms=terms, sampling="random"))
    algorithm = fixed(fb.FedNest(inner=fb.parts.SVRG(rounds=inner), hypergradient=hypergradient))
    result = run(algorithm, quadratic(clients=4, samples=(5, 5)), rounds, eval_every=1)
    lengths = np.diff(result.history["exchanges"]) - (2 * inner + 3)
    assert set(lengths.tolist()) == set(range(terms))
    assert result.ledger.exchanges_by_phase["hypergradient.hessian_product"] == lengths.sum()


def saddle_in_y():
    """Return a problem whose g has one positive and one negative curvature in y, its clients, and a start."""

    def inner(x, y, batch):
        return jnp.mean(batch["a"]) * jnp.vdot(x, y) + 0.5 * (y[0] ** 2 - y[1] ** 2)

    problem = fb.Bilevel(lambda x, y, batch: jnp.sum((y - jnp.mean(batch["a"])) ** 2) + jnp.sum(x), inner)
    return problem, fb.Clients({"a": np.ones((4, 3))}), jnp.ones(2), jnp.zeros(2)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        (fb.FedNestSGD, fb.parts.Implicit(solver=fb.parts.Neumann(terms=3, step=0.2))),
        (fb.FedNestSGD, fb.parts.Implicit(solver=fb.parts.Neumann(step=0.2, sampling="random_per_client"))),
        (fb.LFedNest, fb.parts.LocalImplicit(solver=fb.parts.Neumann(terms=3, step=0.2))),
        pytest.param(
            *(fb.LFedNest, fb.parts.LocalImplicit(solver=fb.parts.CG(max_steps=2))),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_hypergradient_of_all_samples(method, part):
    """With `all_samples` a method with batches makes the same step on x as a method without; y does not move.

    ∇y f, ∇²yy g and ∇²xy g all differ between samples, so that each of them would show a batch of a single sample.
    """
    rng = np.random.default_rng(5)
    samples = [{"a": rng.uniform(1, 2, size=n), "c": rng.normal(size=n)} for n in (4, 4)]

    def inner(x, y, batch):
        return 0.5 * jnp.mean(batch["a"]) * y**2 - jnp.mean(batch["a"] * batch["c"]) * x * y

    problem = fb.Bilevel(lambda x, y, batch: 0.5 * jnp.mean((y - batch["c"]) ** 2), inner)
    clients = fb.Clients(samples, samples, weights=[1.0, 3.0])

    def x_after(batch_size, all_samples):
        estimate = replace(part, all_samples=all_samples)
        still = fb.parts.LocalSGD(lr=1e-30)
        algorithm = method(inner=still, hypergradient=estimate, outer_lr=1.0, batch_size=batch_size)
        return float(fb.solve(algorithm, problem, clients, 0.7, 0.4, rounds=1, engine=fb.Reference()).x)

    whole = x_after(None, False)
    assert x_after(1, True) == pytest.approx(whole, rel=1e-12)
    assert abs(x_after(1, False) - whole) > 1e-3


def test_a_round_on_all_samples():
    """With `all_samples` in both parts, batches play no role in a round with one local step on y and two on x.

    The correction of the only step on y is 0, and q is the gradient of all samples. The curvature of f in x differs
    between samples, so that the second step on x would show a batch of a single sample.
    """
    task = quadratic(clients=2, samples=(4, 4), noise=0.5)

    def outer(x, y, batch):
        return task.problem.outer(x, y, batch) + jnp.mean(batch["t"] ** 2) * jnp.sum(x**2)

    problem = fb.Bilevel(outer, task.problem.inner)

    def ends(batch_size, on_y, on_x):
        inner = fb.parts.SVRG(local_steps=1, lr=0.1, all_samples=on_y)
        series = fb.parts.Implicit(solver=fb.parts.Neumann(terms=3, step=0.1), all_samples=on_x)
        method = fb.FedNest(inner=inner, hypergradient=series, outer_lr=0.1, outer_steps=2, batch_size=batch_size)
        end = fb.solve(method, problem, task.clients, task.x0, task.y0, rounds=1, engine=fb.Reference())
        return np.concatenate([end.x, end.y])

    whole = ends(None, False, False)
    np.testing.assert_allclose(ends(1, True, True), whole, rtol=1e-12)
    assert all(np.abs(ends(1, *one) - whole).max() > 1e-3 for one in ((True, False), (False, True)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [fb.parts.Implicit, fb.parts.LocalImplicit])
def test_conjugate_gradient_stops_the_run_at_negative_curvature(kind):
    """The error comes before x has moved, and says what to do."""
    algorithm = fixed(
        fb.FedNest(inner=fb.parts.SVRG(lr=0.1), hypergradient=kind(solver=fb.parts.CG()), batch_size=None)
    )
    with raises_with(fb.errors.NumericalError, "negative curvature", round=0):
        fb.solve(algorithm, *saddle_in_y(), rounds=3)


@pytest.mark.slow
@pytest.mark.checked
@pytest.mark.parametrize(
    "algorithm",
    [
        fixed(fb.FedNest(inner=fb.parts.SVRG(lr=0.1))),
        fixed(fb.LFedNest(inner=fb.parts.LocalSGD(lr=0.1))),
        fixed(fb.AggITD(inner=fb.parts.LocalSGD(rounds=5, lr=0.1))),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_a_start_at_negative_curvature_is_warned_of(algorithm):
    with pytest.warns(fb.errors.NumericalWarning, match=r"negative eigenvalue, at most -1\b"):
        fb.solve(algorithm, *saddle_in_y(), rounds=1)


@pytest.mark.filterwarnings("ignore::fedbilevel.errors.InfluenceWarning")
def test_a_sum_reports_negative_curvature_that_it_passed():
    """Negative curvature that a series met in one round is reported at the end of the run, although the run goes on.

    ∇²yy g = −1 for x in (−½, 0). The constant outer slope takes x along ½, 0.1, −0.3, −0.7, so that only round 2 meets
    it.
    """

    def inner(x, y, batch):
        return 0.5 * jnp.where((x > -0.5) & (x < 0), -1.0, 1.0) * y**2

    problem = fb.Bilevel(lambda x, y, batch: jnp.mean(batch["a"]) * (x + y), inner)
    clients = fb.Clients({"a": np.ones((2, 3))})
    hypergradient = fb.parts.Implicit(solver=fb.parts.Neumann(terms=3))
    algorithm = fixed(
        fb.FedNest(inner=fb.parts.SVRG(lr=0.1), hypergradient=hypergradient, outer_lr=0.4, batch_size=None)
    )
    with pytest.warns(fb.errors.NumericalWarning, match="negative curvature at product 0"):
        result = fb.solve(algorithm, problem, clients, jnp.asarray(0.5), jnp.asarray(0.1), rounds=4)
    assert int(result.state.info.negative_curvature) == 0


@pytest.mark.slow
def test_conjugate_gradient_that_runs_out_of_iterations_says_so():
    task = quadratic(clients=3, condition=100.0, samples=(5, 5))
    algorithm = fixed(
        fb.FedNest(hypergradient=fb.parts.Implicit(solver=fb.parts.CG(max_steps=2, tolerance=1e-8)), batch_size=None)
    )
    with pytest.warns(fb.errors.NumericalWarning, match=r"relative residual .*max_steps = 2"):
        residual = float(run(algorithm, task, 1).state.info.residual)
    assert 1e-8 < residual < 1


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (lambda: fixed(fb.FedNest(inverse="cg")), ("field of FedNest", "inverse", "", "inner")),
        (
            lambda: fixed(fb.FedNest(hypergradient="local")),
            ("FedNest.hypergradient", "local", "LocalImplicit"),
        ),
        (
            lambda: fixed(fb.LFedNest(hypergradient=fb.parts.Implicit())),
            ("LFedNest.hypergradient", ANY, "LocalImplicit"),
        ),
        (
            lambda: fixed(fb.FedMBO(hypergradient=fb.parts.LocalImplicit())),
            ("FedMBO.hypergradient", ANY, "Implicit"),
        ),
        (
            lambda: fixed(fb.LFedNest(inner=fb.parts.SVRG(rounds=2), joint=True)),
            ("LFedNest.inner.rounds", 2, "joint = True"),
        ),
        (lambda: fixed(fb.FedNest(inner=fb.parts.LocalSGD())), ("FedNest.inner", ANY, "SVRG")),
        (lambda: fb.parts.Implicit(solver=fb.parts.Plain()), ("Implicit.solver", ANY, "Neumann")),
        (lambda: fb.parts.Neumann(sampling="randm"), ("Neumann.sampling", "randm", "", "random")),
        (
            lambda: fb.parts.LocalImplicit(solver=fb.parts.Neumann(sampling="random_per_client")),
            ("LocalImplicit.solver.sampling", "random_per_client"),
        ),
    ],
)
def test_fields_that_are_refused(make, refusal):
    with refuses(*refusal):
        make()


def test_a_neumann_step_at_which_products_grow_is_refused_with_the_estimated_bound():
    task = quadratic(heterogeneity=0.0, samples=(5, 5))  # so that the largest eigenvalue of every A_i is 1
    with refuses("Neumann.step", 2.1, "below 2/ℓ = 2: "):
        run(fixed(fb.FedNest(hypergradient=fb.parts.Implicit(solver=fb.parts.Neumann(step=2.1)))), task, 1)


@pytest.mark.slow
def test_local_steps_are_checked_against_the_clients_own_hessians():
    """A step of clients' own series is checked against each client's Hessian, a common step against the mean.

    The Hessians are diag(8, 0, …), diag(0, 8, …), …: the largest eigenvalue of their mean is 2, and that of each is 8.
    """
    rows = np.diag([8.0] * 4)[:, None, :] * np.ones((4, 2, 1))
    problem = fb.Bilevel(
        lambda x, y, batch: jnp.sum(y) + x @ x, lambda x, y, batch: 0.5 * jnp.mean(batch["d"] @ y**2) - x @ y
    )
    start, solver = (jnp.ones(4), jnp.ones(4)), fb.parts.Neumann(step=0.4)
    local = fixed(fb.LFedNest(hypergradient=fb.parts.LocalImplicit(solver=solver)))
    with refuses("Neumann.step", 0.4, "ℓ = 8"):
        fb.solve(local, problem, fb.Clients({"d": rows}), *start, rounds=1)
    shared = fixed(fb.FedNestSGD(hypergradient=fb.parts.Implicit(solver=solver)))
    fb.solve(shared, problem, fb.Clients({"d": rows}), *start, rounds=1)
    with refuses("AggITD.inner.lr", 1.1, "below 2/ℓ = 1: "):
        fb.solve(
            fixed(fb.AggITD(inner=fb.parts.LocalSGD(rounds=5, lr=1.1))),
            problem,
            fb.Clients({"d": rows}),
            *start,
            rounds=1,
        )


@pytest.mark.slow
@pytest.mark.parametrize(("method", "inner"), [(fb.FedNest, fb.parts.SVRG), (fb.FedMBO, fb.parts.LocalSGD)])
def test_the_servers_step_on_y_multiplies_the_mean_change(method, inner):
    """One full-batch local step of β/2, doubled by the server, equals one local step of β."""
    task = quadratic(clients=4, samples=(3, 6))

    def solved(**fields):
        hypergradient = fb.parts.Implicit(solver=fb.parts.Neumann(terms=2))
        algorithm = method(inner=inner(local_steps=1, **fields), hypergradient=hypergradient, batch_size=None)
        return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=2, key=1)

    halved, whole = solved(lr=0.05, server_lr=2.0), solved(lr=0.1)
    np.testing.assert_allclose(halved.y, whole.y, rtol=1e-12)
    np.testing.assert_allclose(halved.x, whole.x, rtol=1e-12)
