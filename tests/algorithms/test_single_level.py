"""Do FedLin and FedAvg end where their mathematics says, on least squares with unequal clients and unequal work?

With f_i(x) = ½ mean_n (a_n·x − b_n)², ∇f_i = P_i x − q_i. τ steps of size s from x end at
x_i + (I − s P_i)^τ (x − x_i), where x_i is the client's own minimiser.
"""

import agreement
import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic
from refusals import refuses

AGREEMENT = {
    "FedLin, single level": agreement.Case(
        fb.FedLin(batch_size=4), work=agreement.WORK, problem=agreement.SINGLE_LEVEL, slow=True
    ),
    "FedAvg, single level": agreement.Case(
        fb.FedAvg(batch_size=None), work=(1, 4), problem=agreement.SINGLE_LEVEL, slow=True
    ),
    "FedAvg, arrivals drawn": agreement.Case(
        fb.Asynchronous(fb.FedAvg(batch_size=4), wait_for=1),
        problem=agreement.SINGLE_LEVEL,
        clock=fb.Clock(arrivals=lambda exchange, client, key: jax.random.bernoulli(key, 0.6)),
    ),
}
LEARNS = {fb.FedAvg: "classification", fb.FedLin: "classification"}

DIM, LR, STEP, ROUNDS = 3, 0.4, 0.15, 2_000
WORK = np.array([1, 2, 3, 5])


def loss(x, batch):
    return 0.5 * ((batch["a"] @ x - batch["b"]) ** 2).mean()


PROBLEM = fb.SingleLevel(loss)


def population():
    rng = np.random.default_rng(0)
    sizes = (4, 7, 5, 6)
    data = [{"a": rng.normal(size=(n, DIM)), "b": rng.normal(size=n)} for n in sizes]
    clients = fb.Clients(outer=data, weights=[1.0, 2.0, 0.5, 1.5], local_steps=WORK)
    p = [(d["a"].T @ d["a"] / len(d["b"]), d["a"].T @ d["b"] / len(d["b"])) for d in data]
    return clients, *zip(*p, strict=True)


def solve_weighted(w, matrices, points):
    """Return the z with Σ w_i W_i (z − z_i) = 0."""
    left = sum(w_i * matrix for w_i, matrix in zip(w, matrices, strict=True))
    return np.linalg.solve(left, sum(w_i * m @ z for w_i, m, z in zip(w, matrices, points, strict=True)))


@pytest.fixture(scope="module")
def ends():
    """Return for each method x after one round, and the result of all rounds, both from x = 1."""
    clients, *_ = population()

    def play(method, **options):
        return fb.solve(method, PROBLEM, clients, np.ones(DIM), **options)

    methods = fb.FedLin(outer_lr=LR, batch_size=None), fb.FedAvg(lr=STEP, batch_size=None)
    return {type(method): (play(method, rounds=1).x, play(method, rounds=ROUNDS)) for method in methods}


def test_fedlin_ends_at_the_solution(ends):
    clients, hessians, q = population()
    exact = np.linalg.solve(np.tensordot(clients.weights, hessians, 1), np.tensordot(clients.weights, q, 1))
    np.testing.assert_allclose(ends[fb.FedLin][1].x, exact, rtol=0, atol=1e-10)


def test_fedavg_ends_at_its_own_fixed_point(ends):
    """FedAvg ends where Σ p_i (I − (I − sP_i)^τ_i) (x − x_i) = 0, which is not x*."""
    clients, hessians, q = population()
    own = [np.linalg.solve(h, r) for h, r in zip(hessians, q, strict=True)]
    progress = [
        np.eye(DIM) - np.linalg.matrix_power(np.eye(DIM) - STEP * h, tau) for h, tau in zip(hessians, WORK, strict=True)
    ]
    expected, exact = (solve_weighted(clients.weights, m, own) for m in (progress, hessians))
    np.testing.assert_allclose(ends[fb.FedAvg][1].x, expected, rtol=0, atol=1e-8)
    assert np.linalg.norm(expected - exact) > 1e-2 * np.linalg.norm(exact)


@pytest.mark.parametrize("method", [fb.FedLin, fb.FedAvg])
def test_a_round_written_out(ends, method):
    clients, hessians, q = population()
    start = np.ones(DIM)
    gradients = [h @ start - r for h, r in zip(hessians, q, strict=True)]
    mean = np.tensordot(clients.weights, gradients, 1)
    end = np.zeros(DIM)
    for p, h, r, own, tau in zip(clients.weights, hessians, q, gradients, WORK, strict=True):
        x = start
        for _ in range(tau):
            corrected = h @ x - r - own + mean
            x = x - (LR / tau * corrected if method is fb.FedLin else STEP * (h @ x - r))
        end = end + p * x
    np.testing.assert_allclose(ends[method][0], end, rtol=1e-12, atol=1e-12)


def test_costs(ends):
    """FedLin costs one gradient for q, and two for each local step except the first; FedAvg one for each local step."""
    fedlin, fedavg = (ends[cls][1].ledger for cls in (fb.FedLin, fb.FedAvg))
    assert (fedlin.exchanges, fedavg.exchanges) == (2 * ROUNDS, ROUNDS)
    assert fedlin.gradients == ROUNDS * int(np.sum(2 * WORK - 1))
    assert fedavg.gradients == ROUNDS * int(WORK.sum())
    assert fedlin.bytes_up == 2 * ROUNDS * len(WORK) * DIM * 8
    assert fedavg.bytes_up == ROUNDS * len(WORK) * DIM * 8


def test_refusals_name_who_can():
    task = quadratic(clients=2)
    with refuses("problem", "Bilevel", "a SingleLevel problem; Bilevel problems are solved by ADBO, "):
        fb.solve(fb.FedLin(), task.problem, task.clients, task.x0, task.y0, rounds=1)
    clients, *_ = population()
    with refuses("problem", "SingleLevel", "a Bilevel problem; SingleLevel problems are solved by FedAvg, FedLin"):
        fb.solve(fb.SimFBO(), PROBLEM, clients, np.ones(DIM), rounds=1)
