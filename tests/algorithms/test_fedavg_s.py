"""Where does FedAvg-S end on a saddle, with unequal clients, weights and work?

With f_i = ½ xᵀP_i x + xᵀC_i y − ½ yᵀA_i y + b_iᵀx + c_iᵀy, symmetric positive definite P_i and A_i and dense C_i, every
step is affine. τ steps z ← z − S(M_i z + m_i) lead to z_i + (I − S M_i)^τ (z − z_i), where z_i = −M_i⁻¹m_i.
"""

import numpy as np
import pytest
from agreement import MINIMAX, Case

import fedbilevel as fb

AGREEMENT = {
    "FedAvg-S, minimax": Case(fb.FedAvgS(batch_size=None), work=(1, 4), problem=MINIMAX, slow=True),
}
LEARNS = {fb.FedAvgS: "fair_classification"}

DX, DY = 2, 3
ALPHA, BETA, ROUNDS = 0.1, 0.3, 600
WORK = np.array([1, 2, 4, 3])


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
    """Return (M, m), where −(M z + m) is the direction of descent in x and of ascent in y."""
    return np.block([[own["P"], own["C"]], [-own["C"].T, own["A"]]]), np.concatenate([own["b"], -own["c"]])


def saddle():
    both = [field(own) for own in members()]
    return np.linalg.solve(*(np.tensordot(population().weights, part, 1) * sign
                             for part, sign in zip(zip(*both, strict=True), (1, -1), strict=True)))  # fmt: skip


@pytest.fixture(scope="module")
def end():
    method = fb.FedAvgS(outer_lr=ALPHA, inner_lr=BETA, batch_size=None)
    return fb.solve(method, fb.Minimax(loss), population(), np.ones(DX), np.ones(DY), rounds=ROUNDS)


def test_it_ends_at_its_own_fixed_point(end):
    """FedAvg-S ends where Σ p_i (I − (I − S_i M_i)^τ_i) (z − z_i) = 0, S_i = diag(α, β)/τ_i, and not at the saddle."""
    steps = np.diag([ALPHA] * DX + [BETA] * DY)
    left, right = 0, 0
    for p, own, tau in zip(population().weights, members(), WORK, strict=True):
        matrix, offset = field(own)
        identity = np.eye(DX + DY)
        w = p * (identity - np.linalg.matrix_power(identity - steps @ matrix / tau, tau))
        left, right = left + w, right - w @ np.linalg.solve(matrix, offset)
    expected = np.linalg.solve(left, right)
    np.testing.assert_allclose(np.concatenate([end.x, end.y]), expected, rtol=0, atol=1e-10)
    assert np.linalg.norm(expected - saddle()) > 1e-2


def test_costs(end):
    """Each local step costs one gradient in (x, y), and a reply has x and y."""
    assert end.ledger.exchanges == ROUNDS
    assert end.ledger.gradients == ROUNDS * int(WORK.sum())
    assert end.ledger.bytes_up == ROUNDS * len(WORK) * (DX + DY) * 8
