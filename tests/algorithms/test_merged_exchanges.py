"""Do merged exchanges give the numbers of single ones, and as few as docs/reference/algorithms/fednest.md says?

The quadratic has M unequal clients and weights. T, N and τ as in the papers; K products of conjugate gradient, as many
as y has dimensions. Float64 (tests/conftest.py).
"""

import jax.numpy as jnp
import numpy as np
import pytest
from compiled_losses import with_compiled_losses
from matrices import hypergradient, mean_matrices, members, outer_gradient

import fedbilevel as fb
from fedbilevel.algorithms.parts import hypergradients
from fedbilevel.diagnostics.check import sample
from fedbilevel.tasks.quadratic import quadratic, solution

M, T, N, K = 3, 2, 4, 3
WORK = np.array([1, 3, 2])
ONES = np.ones(M, int)
X0, Y0 = np.linspace(-1, 1, 5), np.linspace(2, 0, K)
STEPS = {"batch_size": None, "outer_lr": 0.2}


def neumann(sampling=None):
    return {"hypergradient": fb.parts.Implicit(solver=fb.parts.Neumann(terms=N, step=0.7, sampling=sampling))}


def on_y(method, **fields):
    kind = fb.parts.SVRG if method is fb.FedNest else fb.parts.LocalSGD
    return kind(**{"rounds": T, "lr": 0.6, **fields})


def solved(
    task, method, rounds, *, merged, cohort=None, engine=None, problem=None, start=(X0, Y0), inner=None, **fields
):
    algorithm = method(merged=merged, inner=on_y(method, **(inner or {})), **{**STEPS, **fields})
    problem = problem or task.problem
    if engine is None:
        engine, problem = fb.Reference(), with_compiled_losses(problem)
    return fb.solve(algorithm, problem, task.clients, *start, rounds=rounds, cohort=cohort, engine=engine)


def both(task, method, rounds, **fields):
    return (solved(task, method, rounds, merged=merged, **fields) for merged in (False, True))


def same_point(one, other):
    """Sums of a few dozen terms of size about 1, in another order: some 1e-14; 1e-12 leaves room."""
    for a, b in ((one.x, other.x), (one.y, other.y)):
        np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12)


SOLVER = fb.parts.CG(max_steps=K, tolerance=1e-10)
CG = {"hypergradient": fb.parts.Implicit(solver=SOLVER)}
LOCAL = {"hypergradient": fb.parts.LocalImplicit(solver=SOLVER)}
SERIES = neumann()
ONE = {"inner": {"local_steps": 1}}
CASES = {  # method, fields, local steps of the population, exchanges of a round: single, merged
    "cg": (fb.FedNest, {**CG, **ONE}, None, 2 * T + K + 3, T + K + 1),
    "cg, steps of each client": (fb.FedNest, {**CG, **ONE}, WORK, 2 * T + K + 3, 2 * T + K + 1),
    "cg, the population's one step": (fb.FedNest, {**CG, **ONE}, ONES, 2 * T + K + 3, 2 * T + K + 1),
    "cg, τ = 1 on y, 2 on x": (fb.FedNest, {**CG, **ONE, "outer_steps": 2}, None, 2 * T + K + 3, T + K + 2),
    "cg, steps on x": (fb.FedNest, {**CG, "outer_steps": 2}, WORK, 2 * T + K + 3, 2 * T + K + 2),
    "series": (fb.FedNest, SERIES, None, 2 * T + N + 2, 2 * T + N + 1),
    "local": (fb.FedNest, LOCAL, None, 2 * T + 2, 2 * T + 1),
    "SGD, cg": (fb.FedNestSGD, CG, WORK, T + K + 3, T + K + 1),
    "SGD, series": (fb.FedNestSGD, SERIES, WORK, T + N + 2, T + N + 1),
    "FedMBO, cg": (fb.FedMBO, CG, WORK, T + K + 2, T + K + 1),
}


SLOW = ("cg, the population's one step", "cg, steps on x", "series", "SGD, series")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES]
)
def test_the_same_numbers_in_fewer_exchanges(case):
    """Full batches, everyone. Gradients: merged, one pass for ∇x f and ∇y f. Products: K cross ones instead of one."""
    method, fields, work, many, few = CASES[case]
    task = quadratic(clients=M, dim_y=K, local_steps=work)
    single, merged = both(task, method, 1, **fields)
    same_point(single, merged)
    assert (single.ledger.exchanges, merged.ledger.exchanges) == (many, few)
    gathers = fields["hypergradient"] == CG["hypergradient"]
    assert single.ledger.gradients - merged.ledger.gradients == M * gathers
    assert merged.ledger.hvps - single.ledger.hvps == M * (K - 1) * gathers


NOTHING = {
    "FedMBO, series": (fb.FedMBO, SERIES),
    "FedMBO, random": (fb.FedMBO, neumann("random")),
    "FedNest": (fb.FedNest, {**SERIES, "outer_steps": 2}),
    "FedNestSGD": (fb.FedNestSGD, {**LOCAL, "outer_steps": 2, "inner": fb.parts.LocalSGD(local_steps=1)}),
}


@pytest.mark.parametrize("case", NOTHING)
def test_refused_where_no_exchange_goes(case):
    method, fields = NOTHING[case]
    method(**fields)
    with pytest.raises(
        fb.errors.ConfigurationError, match=rf"^{method.__name__}.merged = True .*False: .* no exchange"
    ):
        method(merged=True, **fields)


def test_costs_of_a_round_of_conjugate_gradient():
    """A client's gradients: T of q and 2(τ_i − 1) of its steps, T times, and one of f; K products of each kind."""
    ledger = solved(quadratic(clients=M, dim_y=K, local_steps=WORK), fb.FedNest, 1, merged=True, **CG).ledger
    assert ledger.gradients == T * (M + 2 * int((WORK - 1).sum())) + M
    assert ledger.hvps == 2 * K * M
    assert ledger.exchanges_by_phase == {
        "inner.gradient": T,
        "inner.corrected_descent": T,
        "hypergradient.outer_gradients": 1,
        "hypergradient.both_products": K,
    }


@pytest.mark.parametrize("case", [pytest.param("random, drawn samples", marks=pytest.mark.slow), "cg, full batches"])
def test_a_cohort_gets_the_same_numbers_too(case):
    """Neumann products, and all that conjugate gradient asks on full batches, see what single exchanges see: the same
    estimate, with its expectation."""
    fields = {**neumann("random"), "batch_size": 2} if case.startswith("random") else CG
    task = quadratic(clients=M, dim_y=K, local_steps=WORK)
    single, merged = both(task, fb.FedNest, 3, cohort=2, **fields)
    same_point(single, merged)
    products = single.ledger.exchanges_by_phase.get("hypergradient.hessian_product", 0)
    assert single.ledger.exchanges == 3 * (2 * T + 3) + products
    last = 2 if case.startswith("random") else 1  # ∇y F and h, or what comes with ∇y F
    assert merged.ledger.exchanges == 3 * (2 * T + last) + merged.ledger.exchanges_by_phase.get(
        "hypergradient.both_products", products
    )


def test_products_of_lengths_that_nobody_drew_are_not_asked_for(monkeypatch):
    """Of N'_i = 1, 0, 1 the longest is 1: one product in place of N − 1."""
    lengths = iter((1, 0, 1) * 2)
    monkeypatch.setattr(hypergradients, "uniform_below", lambda key, bound: jnp.asarray(next(lengths)))
    single, merged = both(quadratic(clients=M, dim_y=K), fb.FedMBO, 1, **neumann("random_per_client"))
    same_point(single, merged)
    assert (single.ledger.exchanges, merged.ledger.exchanges) == (T + N + 1, T + 1 + 2)
    assert single.ledger.hvps - merged.ledger.hvps == M * (N - 2)


KINDS = {
    "minimax": (fb.Minimax(lambda x, y, batch: jnp.mean(batch["a"]) * x @ y - y @ y + x @ x), 2 * T + 1),
    "compositional": (fb.Compositional(lambda y, batch: y @ y, lambda x, batch: x * jnp.mean(batch["a"])), 2 * T + 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_problems_without_a_system(kind):
    """2T + 2 and 2T + 3 in single exchanges; x takes one step, which needs none."""
    problem, few = KINDS[kind]
    task = quadratic(clients=M, dim_y=K)
    task = type(task)(task.name, problem, fb.Clients({"a": np.array([[1.0], [2.0], [4.0]])}), task.x0, task.y0, {})
    single, merged = both(task, fb.FedNest, 1, start=(jnp.ones(2), jnp.ones(2)), inner={"local_steps": 2}, **CG)
    same_point(single, merged)
    assert (single.ledger.exchanges, merged.ledger.exchanges) == (few + 1, few)


def test_cohorts_leave_the_mean_of_merged_products_where_it_is():
    """∇x F + B̄ᵀ s Σ_{n<N} (I − sĀ)ⁿ ∇y F, cohorts of 2 out of 6 and as many lengths, whose longest is below N − 1 with
    probability (1 − 1/N)² = 9/16."""
    task, s = quadratic(clients=6, dim_y=K, heterogeneity=2.0, noise=0.0), 0.9
    draws = 12_000
    mean = mean_matrices(task)
    b = sum(p * outer_gradient(f, X0, Y0) for p, f, _ in members(task))
    v = s * sum(np.linalg.matrix_power(np.eye(K) - s * mean["A"], n) @ b for n in range(N))
    expected = sum(p * hypergradient(f, g, X0, Y0, v) for p, f, g in members(task))
    solver = fb.parts.Neumann(terms=N, step=s, sampling="random_per_client")
    method = fb.FedMBO(merged=True, hypergradient=fb.parts.Implicit(solver=solver), batch_size=2)
    drawn = sample(method, task.problem, task.clients, X0, Y0, draws=draws, cohort=2, engine=None, key=0)
    assert np.linalg.norm(drawn.mean - expected) < 4 * drawn.standard_error < np.linalg.norm(expected) / 8
    chance = np.diff((np.arange(N + 1) / N) ** 2)  # of each longest length
    longest, square = chance @ np.arange(N), chance @ np.arange(N) ** 2
    assert abs(drawn.exchanges - 2 - longest) < 5 * np.sqrt((square - longest**2) / draws)


def test_the_cross_product_is_drawn_apart_from_the_system():
    """g = a (½y² − xy), a = 1 or 3, one draw of it a product: h = ∇x F + E[a] E[1/a] = 4/3, where one draw for both
    would give E[a/a] = 1. Conjugate gradient in one dimension is exact after one product."""
    problem = fb.Bilevel(lambda x, y, batch: y, lambda x, y, batch: jnp.mean(batch) * (0.5 * y**2 - x * y))
    clients = fb.Clients(np.array([[1.0, 3.0]]), np.array([[1.0, 3.0]]))
    method = fb.FedNest(hypergradient=fb.parts.Implicit(solver=fb.parts.CG()), merged=True, batch_size=1)
    drawn = sample(method, problem, clients, jnp.asarray(0.5), jnp.asarray(0.2), draws=4000, cohort=None, engine=None,
                   key=0)  # fmt: skip
    assert abs(drawn.mean - 4 / 3) < 5 * drawn.standard_error < 1 / 6
    assert drawn.exchanges == 2


def test_reaches_the_closed_form():
    """Unequal weights, data and work. K ≤ dim y = 8 products a round and no exchange that brings h, or drift of x."""
    task = quadratic(clients=8, condition=5, local_steps=np.array([1, 2, 3, 4, 1, 2, 3, 4]))
    fields = {
        "inner": {"rounds": 3, "lr": 1.0},
        "hypergradient": fb.parts.Implicit(solver=fb.parts.CG(tolerance=1e-10)),
    }
    start = (task.x0, task.y0)
    result = solved(task, fb.FedNest, 300, merged=True, engine=fb.Local(), start=start, **fields)
    exact = solution(task.clients)
    assert np.linalg.norm(result.x - exact.x) < 1e-6 * np.linalg.norm(exact.x)
    assert np.linalg.norm(result.y - exact.y) < 1e-6 * np.linalg.norm(exact.y)
    products = result.ledger.exchanges_by_phase["hypergradient.both_products"]
    assert result.ledger.exchanges == 300 * (2 * 3 + 1) + products
    assert products <= 300 * 9


def test_negative_curvature_stops_a_merged_run_too():
    """Where conjugate gradient finds vᵀHv < 0, ∇²xy G·v is not defined either; x has not moved."""

    def inner(x, y, batch):
        return jnp.mean(batch["a"]) * jnp.vdot(x, y) + 0.5 * (y[0] ** 2 - y[1] ** 2)

    problem = fb.Bilevel(lambda x, y, batch: jnp.sum((y - jnp.mean(batch["a"])) ** 2) + jnp.sum(x), inner)
    clients = fb.Clients({"a": np.ones((2, 3))})
    hypergradient = fb.parts.Implicit(solver=fb.parts.CG())
    algorithm = fb.FedNest(inner=fb.parts.SVRG(lr=0.1), hypergradient=hypergradient, merged=True, batch_size=None)
    with pytest.raises(fb.errors.NumericalError, match=r"round 0 or soon after: negative curvature .* not positive"):
        fb.solve(algorithm, problem, clients, jnp.ones(2), jnp.zeros(2), rounds=1, engine=fb.Reference())
