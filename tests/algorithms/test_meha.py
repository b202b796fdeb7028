"""Is MEHA at rest where the derivatives of its saddle problem are 0, and stable if g is not convex in y?"""

import warnings

import agreement
import numpy as np
import pytest
from compiled_losses import with_compiled_losses
from matrices import inner_gradient, mean_matrices, outer_gradient

import fedbilevel as fb
from fedbilevel.core.tree import XYV
from fedbilevel.tasks.quadratic import quadratic, solution
from fixed_steps import fixed
from refusals import refuses

AGREEMENT = {
    "MEHA, mini-batches": agreement.Case(
        fixed(fb.MEHA(local_steps=2, batch_size=4, penalty=20.0, proximity=0.5)), work=agreement.WORK, slow=True
    ),
}
SMALL = {"clients": 4, "condition": 5, "samples": (2, 2)}  # small, as the tests make thousands of rounds
ONE_STEP = {"local_steps": 1, "batch_size": None, "client_lr": 1.0}


def rest(m, c, sigma):
    """Return the (x, y, θ) where the three derivatives of Σ p_i ψ_i are 0, by solving the linear system

    x + E y − c Bᵀ(y − θ) = 0,  Eᵀx + D y − Dt + c [A y − B x − c_g − (y − θ)/σ] = 0,  A θ − B x − c_g + (θ − y)/σ = 0.
    """
    a, b, d, e = m["A"], m["B"], m["D"], m["E"]
    pull, dim_y, dim_x = np.eye(len(a)) / sigma, *b.shape
    rows = [
        [np.eye(dim_x), e - c * b.T, c * b.T],
        [e.T - c * b, d + c * (a - pull), c * pull],
        [-b, -pull, a + pull],
    ]
    right = np.concatenate([np.zeros(dim_x), m["Dt"] + c * m["c"], m["c"]])
    return np.split(np.linalg.solve(np.block(rows), right), [dim_x, dim_x + dim_y])


def run(task, method, rounds, problem=None, clients=None, engine=None, **options):
    problem = with_compiled_losses(problem or task.problem)
    return fb.solve(method, problem, clients or task.clients, task.x0, task.y0, rounds=rounds, engine=engine, **options)


def distance(got, exact):
    return float(np.linalg.norm(np.asarray(got) - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("penalty", [1.0, 10.0])
def test_it_ends_where_the_derivatives_of_the_saddle_problem_are_0(penalty):
    """MEHA ends where the derivatives of the saddle problem are 0.

    Clients differ in all matrices and in their weights, and B is not square. At these penalties, x* is far away. At
    both penalties a round multiplies the slowest error by at most 0.98, so that 3,000 rounds leave less than 1e-14.
    """
    task = quadratic(**SMALL)
    method = fb.MEHA(**ONE_STEP, server_lr=XYV(0.02, 0.4, 0.4), penalty=penalty)
    result = run(task, method, 3_000)
    x, y, theta = rest(mean_matrices(task), penalty, 1.0)
    assert distance(x, solution(task.clients).x) > 0.1
    for got, exact in zip(result.state.iterate, (x, y, theta), strict=True):
        assert distance(got, exact) < 1e-10


def test_the_distance_from_the_solution_falls_with_the_penalty():
    """In the closed form, x_c − x* is O(1/c), and c(θ − y) tends to SimFBO's v."""
    task = quadratic(**SMALL)
    exact = solution(task.clients)
    ends = {c: rest(mean_matrices(task), c, 1.0) for c in (1e3, 1e4, 1e5)}
    for of in (lambda c, x, y, theta: distance(x, exact.x), lambda c, x, y, theta: distance(c * (theta - y), exact.v)):
        slopes = np.diff(np.log10([of(c, *end) for c, end in ends.items()]))
        np.testing.assert_allclose(slopes, -1, atol=0.01)


@pytest.mark.parametrize("independent", [False, True])
def test_a_step_written_out(independent):
    """Two rounds of one client equal the definition, with full batches, so that draws do not differ."""
    task, c, sigma, lr = quadratic(clients=1, noise=0.0), 4.0, 0.3, XYV(0.02, 0.3, 0.1)
    f, g = ({name: leaf[0] for name, leaf in rows.row(0).items()} for rows in (task.clients.outer, task.clients.inner))
    x, y, theta = (np.asarray(part, float) for part in (task.x0, task.y0, task.y0))
    for _ in range(2):
        pull = (theta - y) / sigma
        d_x = x + f["E"] @ y - c * g["B"].T @ (y - theta)
        d_y = (outer_gradient(f, x, y) / c + inner_gradient(g, x, y) + pull) / 4
        d_theta = inner_gradient(g, x, theta) + pull
        x, y, theta = x - lr.x * d_x, y - lr.y * d_y, theta - lr.v * d_theta
    method = fb.MEHA(**ONE_STEP, server_lr=lr, penalty=c, proximity=sigma, independent_batches=independent)
    result = run(task, method, 2, engine=fb.Reference())
    for got, expected in zip(result.state.iterate, (x, y, theta), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
    assert (result.ledger.gradients, result.ledger.hvps) == (2 * (9 if independent else 3), 0)


@pytest.mark.slow
def test_what_a_round_costs():
    """A message and a reply have x and two trees like y, in float64; each local step costs three gradients."""
    task = quadratic(clients=6)
    method = fb.MEHA(local_steps=4, batch_size=2, server_lr=0.1)
    ledger = run(task, method, 3, cohort=2).ledger
    floats = len(task.x0) + 2 * len(task.y0)
    assert ledger.exchanges_by_phase == {"local_updates": 3}
    assert ledger.bytes_up == ledger.bytes_down == 3 * 2 * floats * 8
    assert (ledger.gradients, ledger.hvps) == (3 * 2 * 4 * 3, 0)


def bent(task, curvature, moved=1):
    """Return the problem with the `moved` least eigenvalues of G's Hessian at `curvature`, and its matrices."""
    m = mean_matrices(task)
    values, vectors = np.linalg.eigh(m["A"])
    change = (vectors[:, :moved] * (curvature - values[:moved])) @ vectors[:, :moved].T
    shifted = task.problem.inner

    def inner(x, y, batch):
        return shifted(x, y, batch) + y @ change @ y / 2

    return fb.Bilevel(task.problem.outer, inner), m | {"A": m["A"] + change}


@pytest.mark.checked
def test_it_is_stable_where_g_curves_downwards():
    """If g curves downwards, x, y and θ still end where the derivatives of the saddle problem are 0.

    G then has no minimum, but a stationary point. σ = 1 is just below 1/(2ρ) = 1/0.98. The same steps diverge if y is
    as fast as θ, and with σ above 0.6/ρ.
    """
    task = quadratic(**SMALL)
    problem, m = bent(task, -0.49)
    end = rest(m, 10.0, 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run(task, fb.MEHA(**ONE_STEP, server_lr=XYV(0.005, 0.4, 0.4), penalty=10.0), 6_000, problem=problem)
    assert not [str(one.message) for one in caught if "eigenvalue" in str(one.message)]  # MEHA needs no convex g
    for got, exact in zip(result.state.iterate, end, strict=True):
        assert distance(got, exact) < 1e-10
    for pace, sigma in ((4, 1.0), (1, 0.7 / 0.49)):
        unstable = fb.MEHA(**ONE_STEP, server_lr=XYV(0.005, 0.4 * pace, 0.4), penalty=10.0, proximity=sigma)
        assert np.linalg.norm(run(task, unstable, 500, problem=problem).y) > 10 * np.linalg.norm(end[1])


@pytest.mark.parametrize(
    ("method", "moved", "words", "others"),
    [
        (fb.MEHA(**ONE_STEP, server_lr=0.4, proximity=3.0), 1, "use fb.MEHA with a proximity below 1.02", "ridge"),
        pytest.param(
            *(fb.MEHA(**ONE_STEP, server_lr=XYV(0.1, 50.0, 50.0)), 1, "lower client_lr or server_lr", "fb.MEHA"),
            marks=pytest.mark.slow,
        ),
        (fb.MEHA(**ONE_STEP, server_lr=XYV(0.1, 50.0, 50.0)), None, "lower client_lr or server_lr", "fb.MEHA"),
        pytest.param(
            *(fb.SimFBO(**ONE_STEP, server_lr=0.4), 1, "Add a ridge", "no step size helps with this proximity"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_why_a_run_diverges_where_g_curves_downwards(method, moved, words, others):
    """The reason that a diverging run gives fits the cause.

    The least curvature is −0.49, in one direction or in all. It is too low for σ = 3, but not for σ = 1, with which
    steps of 50 are too long.
    """
    task = quadratic(condition=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run(task, method, 1_500, problem=bent(task, -0.49, moved)[0])
            reasons = []
        except fb.errors.NonFiniteError as error:
            reasons = [str(error)]
    reasons += [text for text in map(str, (one.message for one in caught)) if "the run diverges" in text]
    assert reasons
    assert all(words in text for text in reasons), reasons
    assert not any(others in text for text in reasons), reasons


def test_steps_that_adapt_follow_the_curvature_of_the_envelope():
    """Steps that adapt follow the curvature 1/σ of the envelope.

    1/σ = 20 is 30 times G's largest curvature L, so that steps of 1/L on θ would diverge. The history has the largest
    curvature of g + f/4 (since c = 1) in addition to 1/σ.
    """
    task = quadratic(**SMALL)
    result = run(task, fb.MEHA(local_steps=1, batch_size=None, penalty=1.0, proximity=0.05), 2_000)
    m = mean_matrices(task)
    largest = np.linalg.eigvalsh(m["A"] + m["D"] / 4)[-1]
    assert 20 + 0.9 * largest < result.history["curvature"][-1] < 20 + 2 * largest
    assert "halvings" not in result.history.rows[-1]
    for got, exact in zip((result.x, result.y), rest(mean_matrices(task), 1.0, 0.05)[:2], strict=True):
        assert distance(got, exact) < 1e-6


@pytest.mark.parametrize("times", [100.0, 1000.0])
def test_steps_that_adapt_follow_the_curvature_of_f_too(times):
    """Steps that adapt follow the curvature of f.

    Here f is multiplied by `times`, and the penalty is the default, so that steps of 1/(L + 1/σ) on y would diverge.
    The run ends where a run with the original f and a penalty divided by `times` would end.
    """
    task = quadratic(**SMALL)
    steep = fb.Bilevel(lambda x, y, batch: batch["times"][0] * task.problem.outer(x, y, batch), task.problem.inner)
    rows = [task.clients.outer.row(i) | {"times": np.full(2, times)} for i in range(len(task.clients))]
    clients = fb.Clients(rows, task.clients.inner, weights=task.clients.weights)
    result = run(task, fb.MEHA(local_steps=1, batch_size=None), 1_000, problem=steep, clients=clients)
    assert "halvings" not in result.history.rows[-1]
    for got, exact in zip((result.x, result.y), rest(mean_matrices(task), 3 / times, 1.0)[:2], strict=True):
        assert distance(got, exact) < 1e-6


def test_steps_that_adapt_leave_a_point_where_the_losses_have_no_curvature():
    """Steps that adapt leave a point at which the losses have no curvature.

    f does not depend on y, and g is linear at y = 0, so that only 1/σ bounds the steps. The minimum of g is at y = x.
    After 300 rounds x has not wholly returned to the minimum of f, 1: 4e-4 remain.
    """

    def inner(x, y, batch):
        return 0 * batch.sum() + (y**4 / 4 - y * x**3).sum()

    problem = fb.Bilevel(lambda x, y, batch: ((x - 1) ** 2).sum() + 0 * batch.sum(), inner)
    clients = fb.Clients([np.zeros((2, 1))] * 2)
    result = fb.solve(fb.MEHA(local_steps=1, batch_size=None), problem, clients, np.ones(2), np.zeros(2), rounds=300)
    assert min(result.history["curvature"][1:]) >= 1
    np.testing.assert_allclose(result.y, 1, atol=1e-2)


@pytest.mark.parametrize("weight", [np.inf, np.nan])
@pytest.mark.parametrize("name", ["penalty", "proximity"])
def test_a_weight_that_is_not_finite_is_refused(name, weight):
    with refuses(f"MEHA.{name}", weight, "finite"):
        fb.MEHA(**{name: weight})
    assert callable(getattr(fb.MEHA(**{name: lambda round: 1.0 + round}), name).function)
