"""Do methods find an x with a part that all clients share, and a part for each client, which only its losses read?

The closed form: x = (s, u_1, …, u_M), g_i = ½ yᵀA_i y − yᵀ(B_i s + b_i u_i + c_i) and
f_i = ½‖y − t_i‖² + ½‖s‖² + ½u_i²/p_i. With e_i the i-th unit vector and B̃_i = (B_i, b_i e_iᵀ), the means are

    G = ½ yᵀA y − yᵀ(B x + c),   F = ½ Σ p_i ‖y − t_i‖² + ½‖x‖²,   B = Σ p_i B̃_i
    x* = (I + KᵀK)⁻¹ Kᵀ(t − k),   K = A⁻¹B,   k = A⁻¹c,   t = Σ p_i t_i
"""

import jax.numpy as jnp
import numpy as np
import pytest
from test_meha import rest

import fedbilevel as fb

DIM_S, DIM_Y, WEIGHTS = 2, 4, np.array([0.2, 0.3, 0.5])
CLIENTS = len(WEIGHTS)


def drawn():
    random = np.random.default_rng(7)
    found = []
    for i in range(CLIENTS):
        q = np.linalg.qr(random.normal(size=(DIM_Y, DIM_Y)))[0]
        shapes = {"B": (DIM_Y, DIM_S), "b": (DIM_Y,), "c": (DIM_Y,), "t": (DIM_Y,)}
        parts = {name: random.normal(size=shape)[None] for name, shape in shapes.items()}
        matrix = (q @ np.diag(random.uniform(1, 4, DIM_Y)) @ q.T)[None]
        found.append(parts | {"A": matrix, "number": np.array([i]), "p": WEIGHTS[i : i + 1]})
    return found


SAMPLES = drawn()
START = {"own": np.full(CLIENTS, 0.3), "shared": np.full(DIM_S, -0.2)}


def outer(x, y, batch):
    """Return f_i of a client's only sample; only the entry u_i of the client is read."""
    own = x["own"][batch["number"]] ** 2 / batch["p"]
    return jnp.mean(jnp.sum((y - batch["t"]) ** 2, 1) + own) / 2 + x["shared"] @ x["shared"] / 2


def inner(x, y, batch):
    pull = batch["B"] @ x["shared"] + batch["b"] * x["own"][batch["number"]][:, None] + batch["c"]
    return jnp.mean(jnp.einsum("a,nab,b->n", y, batch["A"], y) / 2 - pull @ y)


def means():
    """Return A, B, c of G, and D = I, E = 0 and Dt of F, with x in the order (s, u)."""
    m = {name: sum(p * one[name][0] for p, one in zip(WEIGHTS, SAMPLES, strict=True)) for name in ("A", "c", "t")}
    own = np.stack([p * one["b"][0] for p, one in zip(WEIGHTS, SAMPLES, strict=True)], axis=1)
    whole = np.hstack([sum(p * one["B"][0] for p, one in zip(WEIGHTS, SAMPLES, strict=True)), own])
    return m | {"B": whole, "D": np.eye(DIM_Y), "E": np.zeros((DIM_S + CLIENTS, DIM_Y)), "Dt": m["t"]}


def solution():
    m = means()
    jacobian, offset = np.linalg.solve(m["A"], m["B"]), np.linalg.solve(m["A"], m["c"])
    x = np.linalg.solve(np.eye(DIM_S + CLIENTS) + jacobian.T @ jacobian, jacobian.T @ (m["t"] - offset))
    return x, jacobian @ x + offset


ONE_STEP = {"batch_size": None, "local_steps": 1, "client_lr": 0.05, "server_lr": fb.XYV(0.1, 0.3, 0.3)}
TWENTY = {"batch_size": None, "local_steps": 20, "client_lr": 0.02, "server_lr": fb.XYV(0.005, 0.015, 0.015)}


@pytest.mark.parametrize(
    ("method", "tolerance"),
    [
        (fb.F2SA(multiplier=1e4, **ONE_STEP), 1e-6),
        pytest.param(
            *(fb.MEHA(penalty=10.0, **ONE_STEP | {"server_lr": fb.XYV(0.02, 0.3, 0.3)}), 1e-10),
            marks=pytest.mark.slow,
        ),
        pytest.param(fb.CorrectedFBO(**TWENTY), 1e-10, marks=pytest.mark.slow),
    ],
    ids=lambda of: getattr(of, "label", ""),
)
def test_shared_and_own_entries_of_x_end_at_the_solution(method, tolerance):
    """Shared and own entries of x end at x*, and MEHA's at the solution of its saddle problem with c = 10 and σ = 1.

    F2SA has the error 1/λ² = 1e-8 times a constant of the problem. CorrectedFBO ends at x* with 20 local steps.
    Entries u_i differ, since each client has its own b_i.
    """
    problem = fb.Bilevel(outer, inner)
    clients = fb.Clients(SAMPLES, weights=WEIGHTS)
    result = fb.solve(method, problem, clients, START, np.zeros(DIM_Y), rounds=4_000)
    x, y = rest(means(), 10.0, 1.0)[:2] if isinstance(method, fb.MEHA) else solution()
    np.testing.assert_allclose(np.concatenate([result.x["shared"], result.x["own"]]), x, atol=tolerance)
    np.testing.assert_allclose(result.y, y, atol=tolerance)
    assert np.ptp(x[DIM_S:]) > 0.01
