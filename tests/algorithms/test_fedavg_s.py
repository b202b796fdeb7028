"""Where do FedAvg-S, FedNest and LFedNest end on a saddle, with unequal clients, weights and work?

f_i = ½ xᵀP_i x + xᵀC_i y − ½ yᵀA_i y + b_iᵀx + c_iᵀy with symmetric positive definite P_i, A_i and dense C_i: every
step is affine, and τ steps z ← z − S(M_i z + m_i) are z_i + (I − S M_i)^τ (z − z_i) with z_i = −M_i⁻¹m_i.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from agreement import MINIMAX, Case

import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic

AGREEMENT = {
    "FedAvg-S, minimax": Case(fb.FedAvgS(batch_size=None), work=(1, 4), problem=MINIMAX, slow=True),
}
LEARNS = {fb.FedAvgS: "fair_classification"}

DX, DY = 2, 3
ALPHA, BETA, ROUNDS = 0.1, 0.3, 600
WORK, OUTER_STEPS = np.array([1, 2, 4, 3]), 3


def loss(x, y, batch):
    m = {name: leaf.mean(0) for name, leaf in batch.items()}
    return 0.5 * x @ m["P"] @ x + x @ m["C"] @ y - 0.5 * y @ m["A"] @ y + m["b"] @ x + m["c"] @ y


def members():
    rng = np.random.default_rng(3)

    def definite(n):
        turn = np.linalg.qr(rng.normal(size=(n, n)))[0]
        return turn * np.geomspace(0.4, 1.5, n) @ turn.T

    return [
        {"P": definite(DX), "A": definite(DY), "C": rng.normal(size=(DX, DY)) / 2, "b": rng.normal(size=DX),
         "c": rng.normal(size=DY)} for _ in WORK
    ]  # fmt: skip


def population():
    data = [{name: leaf[None] for name, leaf in own.items()} for own in members()]
    return fb.Clients(outer=data, weights=[1.0, 2.0, 0.5, 1.5], local_steps=WORK)


def field(own):
    """(M, m): the direction of descent in x and ascent in y is −(M z + m)."""
    return np.block([[own["P"], own["C"]], [-own["C"].T, own["A"]]]), np.concatenate([own["b"], -own["c"]])


def saddle():
    both = [field(own) for own in members()]
    return np.linalg.solve(*(np.tensordot(population().weights, part, 1) * sign
                             for part, sign in zip(zip(*both, strict=True), (1, -1), strict=True)))  # fmt: skip


def after(matrix, step, tau):
    """W with the change of τ steps being −W (z − z_i)."""
    identity = np.eye(len(matrix))
    return identity - np.linalg.matrix_power(identity - step @ matrix / tau, tau)


@pytest.fixture(scope="module")
def ends():
    exact = saddle()

    def distance(x, y):
        return jnp.linalg.norm(jnp.concatenate([x, y]) - exact)

    methods = {
        "fedavg-s": fb.FedAvgS(outer_lr=ALPHA, inner_lr=BETA, batch_size=None),
        "fednest": fb.FedNest(
            inner=fb.parts.SVRG(rounds=2, lr=BETA), outer_lr=ALPHA, outer_steps=OUTER_STEPS, batch_size=None
        ),
        "lfednest": fb.LFedNest(
            inner=fb.parts.LocalSGD(rounds=2, lr=BETA), outer_lr=ALPHA, outer_steps=OUTER_STEPS, batch_size=None
        ),
    }
    return {
        name: fb.solve(
            method, fb.Minimax(loss), population(), np.ones(DX), np.ones(DY), rounds=ROUNDS, eval_every=50,
            metrics={"distance": distance},
        ) for name, method in methods.items()
    }  # fmt: skip


def test_fedavg_s_ends_at_its_own_fixed_point(ends):
    """Σ p_i (I − (I − S_i M_i)^τ_i) (z − z_i) = 0, S_i = diag(α, β)/τ_i."""
    steps = np.diag([ALPHA] * DX + [BETA] * DY)
    left, right = 0, 0
    for p, own, tau in zip(population().weights, members(), WORK, strict=True):
        matrix, offset = field(own)
        w = p * after(matrix, steps, tau)
        left, right = left + w, right - w @ np.linalg.solve(matrix, offset)
    expected = np.linalg.solve(left, right)
    end = np.concatenate([ends["fedavg-s"].x, ends["fedavg-s"].y])
    np.testing.assert_allclose(end, expected, rtol=0, atol=1e-10)
    assert np.linalg.norm(expected - saddle()) > 1e-2


def test_fednest_ends_at_the_saddle_linearly(ends):
    """The error falls by the same factor in every 50 rounds, once the slowest mode is alone, down to rounding."""
    distances = np.array(ends["fednest"].history["distance"])
    assert distances[-1] < 1e-12
    falling = distances[distances > 1e-10]
    rates = falling[1:] / falling[:-1]
    assert len(rates) >= 3
    assert np.all(rates < 0.2)


def test_lfednest_ends_at_its_own_fixed_point(ends):
    """FedAvg alternating on y, then on x: at rest both of Σ p_i W_i^y (y − y_i(x)) and Σ p_i W_i^x (x − x_i(y)) vanish,
    with A_i y_i(x) = C_iᵀx + c_i and P_i x_i(y) = −(C_i y + b_i)."""
    left, right = np.zeros((DX + DY, DX + DY)), np.zeros(DX + DY)
    for p, own, tau in zip(population().weights, members(), WORK, strict=True):
        on_x = p * after(own["P"], ALPHA * np.eye(DX), OUTER_STEPS)
        on_y = p * after(own["A"], BETA * np.eye(DY), tau)
        inverse_p, inverse_a = np.linalg.inv(own["P"]), np.linalg.inv(own["A"])
        left += np.block([[on_x, on_x @ inverse_p @ own["C"]], [-on_y @ inverse_a @ own["C"].T, on_y]])
        right += np.concatenate([-on_x @ inverse_p @ own["b"], on_y @ inverse_a @ own["c"]])
    expected = np.linalg.solve(left, right)
    end = np.concatenate([ends["lfednest"].x, ends["lfednest"].y])
    np.testing.assert_allclose(end, expected, rtol=0, atol=1e-10)
    assert np.linalg.norm(expected - saddle()) > 1e-2


def test_costs(ends):
    """FedAvg-S: one gradient in (x, y) per step. FedNest: 2T + 2, as there is no system to solve; LFedNest: T + 1."""
    assert ends["fedavg-s"].ledger.exchanges == ROUNDS
    assert ends["fedavg-s"].ledger.gradients == ROUNDS * int(WORK.sum())
    assert ends["fedavg-s"].ledger.bytes_up == ROUNDS * len(WORK) * (DX + DY) * 8
    assert ends["fednest"].ledger.exchanges == ROUNDS * 6
    assert ends["lfednest"].ledger.exchanges == ROUNDS * 3


def test_other_problems_are_refused():
    task = quadratic(clients=2)
    with pytest.raises(
        fb.errors.ConfigurationError, match=r"FedAvgS solves Minimax problems, not Bilevel; .*FedNest.*SimFBO"
    ):
        fb.solve(fb.FedAvgS(), task.problem, task.clients, task.x0, task.y0, rounds=1)
