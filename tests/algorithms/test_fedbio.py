"""Do FedBiO and FedBiOAcc compute what they say and end at x*?"""

import jax
import numpy as np
import pytest
from agreement import Case
from matrices import directions, members

import fedbilevel as fb
from fedbilevel.tasks.quadratic import quadratic, solution
from refusals import refuses

AGREEMENT = {
    "FedBiO": Case(fb.FedBiO(batch_size=None), work=(1, 4), slow=True),
    "FedBiOAcc": Case(fb.FedBiOAcc(local_steps=3, batch_size=4, horizon=5.0), slow=True),
}
NEVER_LATE = {fb.FedBiOAcc: "the same change would be added twice"}

WORK = np.array([1, 2, 3, 2])
LR = fb.XYV(x=0.05, y=0.3, v=0.2)


def run(algorithm, task, rounds, **options):
    return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds, **options)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.slow
def test_fedbio_is_simfbo_whose_server_takes_the_mean():
    """FedBiO is SimFBO with γ = η, plain coefficients and no ball: z − η Σ p̃_i q_i.

    This holds with mini-batches, cohorts and unequal work.
    """
    task = quadratic(clients=4).with_own(local_steps=WORK)
    common = {"batch_size": 2, "client_lr": LR, "independent_batches": True}
    fedbio = run(fb.FedBiO(**common), task, 3, cohort=3)
    simfbo = run(fb.SimFBO(server_lr=LR, **common), task, 3, cohort=3)
    np.testing.assert_allclose(flat(fedbio.state), flat(simfbo.state.iterate), rtol=1e-12, atol=1e-12)
    assert fedbio.ledger.exchanges == simfbo.ledger.exchanges == 3
    assert (fedbio.ledger.gradients, fedbio.ledger.hvps) == (simfbo.ledger.gradients, simfbo.ledger.hvps)
    assert fedbio.ledger.bytes_up == simfbo.ledger.bytes_up == 3 * 3 * (5 + 8 + 8) * 8


@pytest.mark.slow
def test_fedbioacc_reaches_the_closed_form():
    """With τ = 1, full batches and all clients, m is d from the first round on, and the steps lead to x* and y*."""
    task = quadratic(clients=4, condition=5)
    algorithm = fb.FedBiOAcc(local_steps=1, batch_size=None, client_lr=fb.XYV(0.02, 0.5, 0.5))
    result, exact = run(algorithm, task, 3_000), solution(task.clients)
    assert np.linalg.norm(result.x - exact.x) < 1e-6 * np.linalg.norm(exact.x)
    assert np.linalg.norm(result.y - exact.y) < 1e-6 * np.linalg.norm(exact.y)
    assert result.ledger.exchanges == 3_000


def test_fedbioacc_written_out():
    """Three rounds equal the recursion in NumPy, with unequal work and steps that fade.

    t counts τ steps in each round, where τ is the common number of local steps.
    """
    task = quadratic(clients=4, noise=0.0).with_own(local_steps=WORK)
    a, u, tau = 0.3, 7.0, 2
    algorithm = fb.FedBiOAcc(local_steps=tau, batch_size=None, client_lr=LR, forgetting=a, horizon=u)
    result = run(algorithm, task, 3)
    z, m = [np.zeros(5), np.zeros(8), np.zeros(8)], [np.zeros(5), np.zeros(8), np.zeros(8)]
    for round in range(3):
        end_z, end_m = [0, 0, 0], [0, 0, 0]
        for (p, f, g), work in zip(members(task), WORK, strict=True):
            own, momentum = z, m
            for k in range(work):
                fading = (1 + (round * tau + k) / u) ** (-1 / 3)
                new = [part - size * fading * d for part, size, d in zip(own, LR, momentum, strict=True)]
                kept = 0 if round == k == 0 else 1 - a * fading**2
                momentum = [
                    now + kept * (old - before)
                    for now, old, before in zip(directions(f, g, *new), momentum, directions(f, g, *own), strict=True)
                ]
                own = new
            end_z = [e + p * part for e, part in zip(end_z, own, strict=True)]
            end_m = [e + p * part for e, part in zip(end_m, momentum, strict=True)]
        z, m = end_z, end_m
    np.testing.assert_allclose(flat(result.state.iterate), np.concatenate(z), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(flat(result.state.momentum), np.concatenate(m), rtol=1e-12, atol=1e-12)
    assert int(result.state.steps) == 3 * tau
    assert result.ledger.exchanges == 3
    assert result.ledger.gradients == result.ledger.hvps == 3 * 2 * 2 * int(WORK.sum())
    assert result.ledger.bytes_up == 3 * 4 * 2 * 21 * 8
    assert result.ledger.bytes_down == 3 * 4 * (2 * 21 * 8 + 4)  # x, y, v, their momenta, and t


def test_forgetting_is_a_fraction():
    with refuses("FedBiOAcc.forgetting", 1.0, "0 and 1"):
        fb.FedBiOAcc(forgetting=1.0)
