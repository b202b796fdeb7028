"""Do FedBiO and FedBiOAcc compute what they say, end at x*, and is the noise of the momenta as small as derived?"""

import jax
import numpy as np
import pytest
from agreement import Case
from matrices import directions, members

import fedbilevel as fb
from fedbilevel.engines.engine import first_carry
from fedbilevel.tasks.quadratic import quadratic, solution

AGREEMENT = {
    "FedBiO": Case(fb.FedBiO(batch_size=None), work=(1, 4), slow=True),
    "FedBiOAcc": Case(fb.FedBiOAcc(local_steps=3, batch_size=4, horizon=5.0), slow=True),
}
NEVER_LATE = {fb.FedBiOAcc: "would add the same change again"}

WORK = np.array([1, 2, 3, 2])
LR = fb.XYV(x=0.05, y=0.3, v=0.2)


def run(algorithm, task, rounds, **options):
    return fb.solve(algorithm, task.problem, task.clients, task.x0, task.y0, rounds=rounds, **options)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_fedbio_is_simfbo_whose_server_takes_the_mean():
    """γ = η, plain coefficients, no ball: z − η Σ p̃_i q_i, mini-batches, cohorts and unequal work included."""
    task = quadratic(clients=4, local_steps=WORK)
    common = {"batch_size": 2, "client_lr": LR, "independent_batches": True}
    fedbio = run(fb.FedBiO(**common), task, 3, cohort=3)
    simfbo = run(fb.SimFBO(server_lr=LR, **common), task, 3, cohort=3)
    np.testing.assert_allclose(flat(fedbio.state), flat(simfbo.state.iterate), rtol=1e-12, atol=1e-12)
    assert fedbio.ledger.exchanges == simfbo.ledger.exchanges == 3
    assert (fedbio.ledger.gradients, fedbio.ledger.hvps) == (simfbo.ledger.gradients, simfbo.ledger.hvps)
    assert fedbio.ledger.bytes_up == simfbo.ledger.bytes_up == 3 * 3 * (5 + 8 + 8) * 8


@pytest.mark.parametrize("method", [fb.FedBiO, fb.FedBiOAcc])
def test_reaches_the_closed_form(method):
    """τ = 1, full batches, everyone: gradient steps on all three. (m equals d from the first round on.)"""
    task = quadratic(clients=4, condition=5)
    algorithm = method(local_steps=1, batch_size=None, client_lr=fb.XYV(0.02, 0.5, 0.5))
    result, exact = run(algorithm, task, 3_000), solution(task.clients)
    assert np.linalg.norm(result.x - exact.x) < 1e-6 * np.linalg.norm(exact.x)
    assert np.linalg.norm(result.y - exact.y) < 1e-6 * np.linalg.norm(exact.y)
    assert result.ledger.exchanges == 3_000


def test_fedbioacc_written_out():
    """Three rounds of the recursion in NumPy: unequal work, fading steps, t over rounds counted by the common τ."""
    task = quadratic(clients=4, local_steps=WORK, noise=0.0)
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
    assert result.ledger.bytes_down == 3 * 4 * (2 * 21 * 8 + 4)  # and t


@pytest.mark.slow
def test_the_momentum_has_less_noise():
    """E‖m − ∇‖² = a/(2 − a) E‖d − ∇‖², a sixth at a = 0.3, within five standard errors.

    Only c and t scatter between samples, so the noise ξ of d = ∇ + ξ does not depend on z and m's error follows
    e ← (1 − a) e + a ξ, whose variance is a²/(1 − (1 − a)²) of ξ's. With Σ = Σ p_i² Cov_i / B the covariance of ξ, the
    mean of ‖e‖² over n rounds has, for near-Gaussian e with correlation ρ = 1 − a from round to round, the relative
    standard error √(2 tr Σ²/n · (1 + ρ²)/(1 − ρ²)) / tr Σ.
    """
    a, batch, n = 0.3, 2, 1_500
    task = quadratic(clients=4, noise=1.0, samples=(5, 9))
    algorithm = fb.FedBiOAcc(local_steps=1, batch_size=batch, client_lr=fb.XYV(0.01, 0.2, 0.2), forgetting=a)
    carry = first_carry(algorithm, task.problem, task.clients, task.x0, task.y0)
    run = fb.Local().start(algorithm, task.problem, task.clients, 4, jax.random.key(5), carry)
    truth = mean_directions(task)
    errors = []
    for round in range(n + 20):
        carry = run.advance(carry, 1).carry
        if round >= 20:  # (1 − a)^20 = 8e-4 of the first momentum is left
            errors.append(np.array(flat(carry.state.momentum)) - truth(*map(np.array, carry.state.iterate)))
    run.close()
    covariance = noise_covariance(task, batch)
    expected = a / (2 - a) * np.trace(covariance)
    correlation = (1 - a) ** 2
    spread = np.sqrt(2 * np.sum(covariance**2) / n * (1 + correlation) / (1 - correlation)) / np.trace(covariance)
    assert 5 * spread < 0.25
    assert np.mean(np.sum(np.square(errors), axis=1)) == pytest.approx(expected, rel=5 * spread)


def rows(task):
    for i, p in enumerate(task.clients.weights):
        yield p, task.clients.outer.row(i), task.clients.inner.row(i)


def mean_directions(task):
    """The true directions; within a client the samples differ in c and t alone."""

    def truth(x, y, v):
        total = 0
        for p, f, g in rows(task):
            own_f = {"D": f["D"][0], "E": f["E"][0], "t": f["t"].mean(0)}
            own_g = {"A": g["A"][0], "B": g["B"][0], "c": g["c"].mean(0)}
            total = total + p * np.concatenate(directions(own_f, own_g, x, y, v))
        return total

    return truth


def noise_covariance(task, batch):
    """Of the mean over clients of batches: −c in y's direction, D t in v's, none in x's."""
    total = np.zeros((21, 21))
    for p, f, g in rows(task):
        total[5:13, 5:13] += p**2 / batch * np.cov(g["c"].T, bias=True)
        total[13:, 13:] += p**2 / batch * np.cov((f["t"] @ f["D"][0]).T, bias=True)
    return total


@pytest.mark.parametrize("wrong", [0.0, 1.0, -0.1])
def test_forgetting_is_a_fraction(wrong):
    with pytest.raises(fb.errors.ConfigurationError, match=r"FedBiOAcc.forgetting .* strictly between 0 and 1"):
        fb.FedBiOAcc(forgetting=wrong)
