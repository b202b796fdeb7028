"""The closed forms of the saddle point problem agree with its loss, and with FedAvg that is run to its end."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.tasks import saddle
from fedbilevel.tasks.saddle import loss, solution
from limit_points import alternating_point, fedavg_point
from refusals import refuses

HARD = {"clients": 6, "dim": 3, "ridge": 2.0, "centred": False, "weighted": True, "general": True}
gradients = jax.jit(jax.grad(loss, (0, 1)))


@pytest.fixture(scope="module")
def hard():
    return saddle(**HARD)


def played(clients, rounds, alpha, beta):
    """Run `rounds` rounds, in which every client moves its own copy of the average, and return the last average."""
    x = y = np.zeros(3)
    rows = [clients.outer.row(i) for i in range(len(clients))]
    for _ in range(rounds):
        x, y = simultaneous(x, y, rows, clients.weights, alpha, beta)
    return x, y


def simultaneous(x, y, rows, weights, alpha, beta, tau=4):
    ends = []
    for row in rows:
        own_x, own_y = x, y
        for _ in range(tau):
            dx, dy = gradients(own_x, own_y, row)
            own_x, own_y = own_x - alpha / tau * dx, own_y + beta / tau * dy
        ends.append((own_x, own_y))
    return tuple(np.tensordot(weights, np.array(part), 1) for part in zip(*ends, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"centred": False}, {"weighted": True}, HARD, {**HARD, "samples": 4, "noise": 3.0}]
)
def test_both_gradients_vanish_at_the_solution(options):
    task = saddle(**{"clients": 6, "dim": 3, **options})
    for weights in (task.clients.weights, np.arange(1, 7) / 21):
        exact = solution(task.clients, weights)
        size = len(task.clients.outer.row(0)["b"])
        each = {name: a.reshape(6, size, *a.shape[1:]) for name, a in task.clients.outer.values.items()}
        whole = {name: np.tensordot(weights, a.mean(1), 1)[None] for name, a in each.items()}
        for part in gradients(exact.x, exact.y, whole):
            np.testing.assert_allclose(part, 0, atol=1e-13)


def test_samples_scatter_about_what_the_client_has_without_them():
    """Noisy samples of a client have as their mean the value that it has without noise, for the same seed.

    The mean of 4,000 samples is within four standard errors of it. The metric `squared_gradient` is that of
    Φ(x) = max over y of F(x, y). By Danskin's theorem, ∇Φ(x) is the gradient of F in x at y*(x).
    """
    plain, noisy = (saddle(**HARD, **more) for more in ({}, {"samples": 4_000, "noise": 2.0}))
    b = noisy.clients.outer.row(3)["b"]
    np.testing.assert_array_equal(noisy.x0, plain.x0)
    np.testing.assert_allclose(b.mean(0), plain.clients.outer.row(3)["b"][0], atol=4 * 2.0 / 4_000**0.5)
    np.testing.assert_allclose(b.std(0), 2.0, rtol=4 / 8_000**0.5)
    weights, values = plain.clients.weights, plain.clients.outer.values
    mean = {name: np.tensordot(weights, a, 1)[None] for name, a in values.items()}
    x = np.array([0.3, -1.2, 0.7])
    slope = gradients(x, (mean["b"][0] - mean["A"][0] @ x) / mean["C"][0], mean)[0]
    assert float(plain.metrics["squared_gradient"](x, None)) == pytest.approx(float(slope @ slope), rel=1e-12)


def test_it_is_the_papers_problem():
    """The loss of a client is that of the paper, with the paper's distributions of t_i and b, and the solution is 0.

    t_i lies in (0, 0.1), and b has mean 0. The start is not the solution.
    """
    task = saddle(spread=2.0)
    x, y = np.asarray(task.x0), np.asarray(task.y0)
    values = task.clients.outer.values
    for i in (0, 17):
        row = task.clients.outer.row(i)
        t, b = row["A"][0, 0, 0], row["b"][0]
        np.testing.assert_array_equal(row["A"][0], t * np.eye(10))
        by_hand = -(y @ y / 2 - b @ y + t * y @ x) + 10 / 2 * x @ x
        assert float(task.problem.outer(x, y, row)) == pytest.approx(by_hand, rel=1e-13)
        assert float(task.problem.inner(x, y, row)) == pytest.approx(-by_hand, rel=1e-13)
    assert 0 < values["A"][:, 0, 0].min() < 0.01 < 0.09 < values["A"][:, 0, 0].max() < 0.1
    np.testing.assert_allclose(values["b"].mean(0), 0, atol=1e-15)
    assert values["b"].std() == pytest.approx(2.0, rel=4 / np.sqrt(2 * 1000))  # four standard errors of a deviation
    np.testing.assert_allclose(solution(task.clients), 0, atol=1e-15)
    assert task.metrics["x_distance"](x, y) == pytest.approx(x @ x)
    assert "relative_error" not in task.metrics


def test_the_linear_term_matters(hard):
    """If b is not centred, the solution is far from 0, at which a method would end that ignores b."""
    zero = jnp.zeros(3)
    exact = solution(hard.clients)
    assert float(hard.metrics["relative_error"](zero, zero)) == pytest.approx(1)
    assert float(hard.metrics["relative_error"](exact.x, exact.y)) == pytest.approx(0, abs=1e-15)
    assert np.linalg.norm(exact.x) > 0.1


def test_where_averaging_ends(hard):
    """Simultaneous averaging ends at the closed form of its limit, which is not the solution.

    A round leaves about a third of the distance to the limit, so that after 80 rounds only rounding errors are left.
    """
    found = fedavg_point(hard.clients, 4, 0.4, 0.8)
    x, y = played(hard.clients, 80, 0.4, 0.8)
    np.testing.assert_allclose(x, found.x, atol=1e-13)
    np.testing.assert_allclose(y, found.y, atol=1e-13)
    exact = solution(hard.clients)
    assert np.linalg.norm(found.x - exact.x) > 0.02 * np.linalg.norm(exact.x)


def test_one_step_or_one_client_is_free_of_bias(hard):
    """With one step in a round, or with one client, averaging ends at the solution."""
    exact = solution(hard.clients)
    np.testing.assert_allclose(fedavg_point(hard.clients, 1, 0.4, 0.8), exact, atol=1e-13)
    np.testing.assert_allclose(alternating_point(hard.clients, (1, 1), 0.4, 0.8), exact, atol=1e-13)
    alone = saddle(**{**HARD, "clients": 1}).clients
    np.testing.assert_allclose(fedavg_point(alone, 5, 0.4, 0.8), solution(alone), atol=1e-13)


def test_equal_curvature_is_kind_to_alternation_alone():
    """If all clients have the paper's curvature C_i = P_i = I, alternating averages end at the solution.

    They do so also if b is not centred. Simultaneous averages end elsewhere.
    """
    clients = saddle(clients=6, dim=3, centred=False, weighted=True).clients
    exact = solution(clients)
    np.testing.assert_allclose(alternating_point(clients, (3, 5), 0.1, 0.8), exact, rtol=1e-12)
    off = fedavg_point(clients, 5, 0.1, 0.8)
    assert np.linalg.norm(off.x - exact.x) > 1e-3 * np.linalg.norm(exact.x)


@pytest.mark.parametrize(
    ("field", "value"), [("ridge", 0.0), ("spread", -1.0), ("dim", 0), ("clients", 0), ("noise", -1.0), ("samples", 0)]
)
def test_wrong_options_are_named(field, value):
    with refuses(field, value):
        saddle(**{field: value})
