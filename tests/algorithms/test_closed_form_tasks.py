"""Do the methods for compositional and minimax problems end where the tasks' closed forms say?

Clients and weights are unequal, so that a biased method ends at another point, which has a closed form as well.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks import saddle
from fedbilevel.tasks.compositional import compositional, solution
from fedbilevel.tasks.saddle import solution as saddle_point
from limit_points import alternating_point, local_point

ALPHA, BETA, INNER_STEPS, OUTER_STEPS = 0.1, 0.8, 4, 3


def run(algorithm, task, rounds, **options):
    return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds, **options)


def relative_error(found, exact):
    return np.linalg.norm(np.asarray(found) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("method", "end", "exchanges"),
    [
        # 2 exchanges on y, ∇y F, h, and the step on x; none for a system, since H = I
        pytest.param(fb.FedNest, solution, 5, id="fednest"),
        pytest.param(fb.LFedNest, local_point, 2, id="lfednest"),
    ],
)
def test_compositional(method, end, exchanges):
    """FedNest ends at the solution and the other method at its own closed form, which is more than 5 % away.

    With T = 1, β = 1 and τ = 1, y is R(x) = mean_i r_i(x).
    """
    task, rounds = compositional(), 150
    inner = {fb.FedNest: fb.parts.SVRG, fb.LFedNest: fb.parts.LocalSGD}[method](rounds=1, lr=1.0, local_steps=1)
    algorithm = method(inner=inner, outer_lr=0.4, batch_size=None)
    result = run(algorithm, task, rounds)
    assert relative_error(result.x, end(task.clients)) < 1e-8
    assert relative_error(local_point(task.clients), solution(task.clients)) > 0.05
    assert result.ledger.exchanges == exchanges * rounds


@pytest.fixture(scope="module")
def hard():
    return saddle(clients=10, dim=4, ridge=2.0, general=True, centred=False, weighted=True)


COMMON = {"outer_lr": ALPHA, "batch_size": None}
ON_Y = {"lr": BETA, "local_steps": INNER_STEPS}


def round_matrix(clients):
    """Return the matrix by which FedNest's round multiplies the distance e from the saddle point.

    A client with curvature C_i makes τ corrected steps along q, which move y by −C_i⁻¹ (I − (I − β/τ C_i)^τ) q. Then it
    does the same on x, at the new y. Here q = C̄ e_y + Ā e_x and h = λP̄ e_x − Āᵀe_y.
    """
    rows = [{name: a[0] for name, a in clients.outer.row(i).items()} for i in range(len(clients))]

    def mean(function):
        return sum(p * function(row) for p, row in zip(clients.weights, rows, strict=True))

    def pull(curve, lr, tau):
        return np.diag(mean(lambda row: (1 - (1 - lr / tau * row[curve]) ** tau) / row[curve]))

    a, p, c = mean(lambda row: row["A"]), np.diag(mean(lambda row: row["P"])), np.diag(mean(lambda row: row["C"]))
    one, none = np.eye(len(a)), np.zeros_like(a)
    on_y, on_x = pull("C", BETA, INNER_STEPS), pull("P", ALPHA, OUTER_STEPS)
    y_moves = np.block([[one, none], [-on_y @ a, one - on_y @ c]])
    x_moves = np.block([[one - on_x @ p, on_x @ a.T], [none, one]])
    return x_moves @ y_moves


def test_fednest_reaches_the_saddle_linearly(hard):
    """FedNest's error on a saddle falls at the rate of the round's matrix, stretch by stretch, down to rounding.

    Over a stretch of 15 rounds, the ratio of the errors settles at the 15th power of the matrix's largest eigenvalue,
    0.054.
    """
    exact, stretch = np.concatenate(saddle_point(hard.clients)), 15
    distance = lambda x, y: jnp.linalg.norm(jnp.concatenate([x, y]) - exact)  # noqa: E731
    algorithm = fb.FedNest(inner=fb.parts.SVRG(**ON_Y), outer_steps=OUTER_STEPS, **COMMON)
    result = run(algorithm, hard, 12 * stretch, eval_every=stretch, metrics={"distance": distance})
    found = result.history["distance"]
    over_a_stretch = np.linalg.matrix_power(round_matrix(hard.clients), stretch)
    ends, error = [], np.concatenate([hard.x0, hard.y0]) - exact
    for _ in found:
        ends.append(np.linalg.norm(error))
        error = over_a_stretch @ error
    np.testing.assert_allclose(found, ends, rtol=1e-9, atol=1e-13)
    falling = found[found > 1e-9]
    ratio = np.abs(np.linalg.eigvals(over_a_stretch)).max()
    assert len(falling) > 5
    np.testing.assert_allclose(falling[4:] / falling[3:-1], ratio, rtol=0.03)
    assert found[-1] < 1e-12
    assert result.ledger.exchanges == 12 * stretch * (2 + 2)  # 2T + 2, since there is no system to solve


@pytest.mark.slow
def test_lfednest_ends_beside_the_saddle(hard):
    algorithm = fb.LFedNest(inner=fb.parts.LocalSGD(rounds=2, **ON_Y), outer_steps=OUTER_STEPS, **COMMON)
    result, exact = run(algorithm, hard, 400), saddle_point(hard.clients)
    point = alternating_point(hard.clients, (OUTER_STEPS, INNER_STEPS), ALPHA, BETA)
    np.testing.assert_allclose(result.x, point.x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.y, point.y, rtol=0, atol=1e-12)
    assert relative_error(point.x, exact.x) > 0.01
    assert result.ledger.exchanges == 400 * (2 + 1)  # T + 1
