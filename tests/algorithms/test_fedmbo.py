"""Does FedMBO compute what its paper says, and do clients' own random lengths have the derived mean and variance?"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import Case
from compiled_losses import with_compiled_losses
from matrices import end_with_series, fedavg_on_y, hypergradient, mean_matrices, members, outer_gradient

import fedbilevel as fb
from fedbilevel.algorithms.parts import hypergradients, linear_solvers
from fedbilevel.tasks.quadratic import quadratic

AGREEMENT = {
    "FedMBO, fresh cohorts": Case(
        fb.FedMBO(
            inner=fb.parts.LocalSGD(local_steps=2, rounds=2),
            hypergradient=fb.parts.Implicit(solver=fb.parts.Neumann(terms=3, sampling="random_per_client")),
            batch_size=4,
        ),
        slow=True,
    ),
}
NEVER_LATE = {fb.FedMBO: "an earlier reply belongs to another vector"}

WORK = np.array([1, 3, 2])
BETA, ALPHA, S = 0.6, 0.2, 0.7
X0, Y0 = np.linspace(-1, 1, 5), np.linspace(2, 0, 8)


def run(algorithm, task, rounds, engine=None):
    engine, problem = engine or fb.Reference(), with_compiled_losses(task.problem)
    return fb.solve(algorithm, problem, task.clients, X0, Y0, rounds=rounds, engine=engine)


def method(terms, sampling="random_per_client", **inner):
    solver, inner = fb.parts.Neumann(terms=terms, step=S, sampling=sampling), fb.parts.LocalSGD(lr=BETA, **inner)
    return fb.FedMBO(inner=inner, hypergradient=fb.parts.Implicit(solver=solver), outer_lr=ALPHA, batch_size=None)


def draw(monkeypatch, *lengths):
    """Make these the next random lengths: for the clients in order or, if one length is for all, for the server."""
    remaining = iter(lengths)
    for module in (hypergradients, linear_solvers):
        monkeypatch.setattr(module, "uniform_below", lambda key, bound: jnp.asarray(next(remaining)))


def test_a_round_written_out(monkeypatch):
    """A round has T = 2 rounds on y, v = Σ p_i N s (I − sH)^{N'_i} ∇y f_i, one step on x, and T + N + 1 exchanges."""
    task = quadratic(clients=3, noise=0.0).with_own(local_steps=WORK)
    terms, lengths = 3, (2, 0, 1)
    draw(monkeypatch, *lengths)
    result = run(method(terms, rounds=2), task, 1)
    y = Y0
    for _ in range(2):
        y = fedavg_on_y(task, X0, y, WORK, BETA)
    shrink = np.eye(8) - S * mean_matrices(task)["A"]
    v = sum(
        p * terms * S * np.linalg.matrix_power(shrink, n) @ outer_gradient(f, X0, y)
        for n, (p, f, _) in zip(lengths, members(task), strict=True)
    )
    x = X0 - ALPHA * sum(p * hypergradient(f, g, X0, y, v) for p, f, g in members(task))
    np.testing.assert_allclose(result.x, x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(result.y, y, rtol=1e-12, atol=1e-12)
    assert result.ledger.exchanges == 2 + terms + 1
    assert result.ledger.gradients == 2 * int(WORK.sum()) + 3 + 3
    assert result.ledger.hvps == 3 * (terms - 1) + 3


@pytest.mark.slow
def test_lengths_of_their_own_average_out(monkeypatch):
    """Over all draws of (N'_1, .., N'_M), which are equally likely, the mean is the series, also if clients differ.

    If clients are alike, the variance is Σ p_i² times the variance with one length for all.
    """
    terms = 2
    for heterogeneity in (1.0, 0.0):
        task = quadratic(clients=2, noise=0.0, heterogeneity=heterogeneity)
        every = list(itertools.product(range(terms), repeat=2))
        draw(monkeypatch, *itertools.chain(*every))
        own = [run(method(terms, local_steps=1), task, 1).x for _ in every]
        series = run(method(terms, sampling=None, local_steps=1), task, 1)
        np.testing.assert_allclose(np.mean(own, axis=0), series.x, rtol=1e-12, atol=1e-12)
    draw(monkeypatch, *range(terms))
    common = [run(method(terms, sampling="random", local_steps=1), task, 1).x for _ in range(terms)]
    share = np.sum(task.clients.weights**2)
    np.testing.assert_allclose(np.var(own, axis=0), share * np.var(common, axis=0), rtol=1e-10)
    assert np.var(common, axis=0).max() > 1e-4


@pytest.mark.slow
def test_the_series_ends_where_its_truncated_inverse_puts_it():
    task = quadratic(clients=4, condition=4, noise=0.0)
    terms = 10
    algorithm = fb.FedMBO(
        inner=fb.parts.LocalSGD(rounds=3, local_steps=1, lr=1.0),
        hypergradient=fb.parts.Implicit(solver=fb.parts.Neumann(terms=terms, step=1.0)),
        outer_lr=0.05,
        batch_size=None,
    )
    result = run(algorithm, task, 1_000, fb.Local())
    np.testing.assert_allclose(result.x, end_with_series(task, 1.0, terms), rtol=0, atol=1e-10)
    assert result.ledger.exchanges == 1_000 * (3 + terms + 1)


def test_a_client_draws_its_length_apart_from_its_samples():
    """A client draws its length and its samples with different keys.

    For g = ½y² − xy and f = y, h = v = N s (1 − s)^N', which shows N'. With one key, N' would be the sample's place
    modulo N in each of 12 rounds. With different keys this has a chance of 4⁻¹².
    """
    terms, step, places, ends = 4, 0.5, [], [0.0]

    def outer(x, y, batch):
        jax.debug.callback(lambda place: places.append(int(place[0])), batch["place"])
        return y + 0.0 * jnp.mean(batch["place"])

    problem = fb.Bilevel(outer, lambda x, y, batch: 0.5 * y**2 - x * y + 0.0 * jnp.mean(batch["place"]))
    rows = {"place": np.arange(32)[None]}
    solver = fb.parts.Neumann(terms=terms, step=step, sampling="random_per_client")
    inner = fb.parts.LocalSGD(local_steps=1)
    algorithm = fb.FedMBO(inner=inner, hypergradient=fb.parts.Implicit(solver=solver), outer_lr=1.0, batch_size=1)
    watch = {"eval_every": 1, "callbacks": [lambda result, row: ends.append(float(result.x))]}
    clients = fb.Clients(rows, dict(rows))
    fb.solve(algorithm, problem, clients, jnp.zeros(()), jnp.zeros(()), rounds=12, engine=fb.Reference(), **watch)
    jax.effects_barrier()
    lengths = np.log(-np.diff(ends[1:]) / (terms * step)) / np.log(1 - step)
    np.testing.assert_allclose(lengths, np.round(lengths), atol=1e-9)
    drawn = np.array(places[-2 * 12 :: 2])  # f is drawn twice in each round; this is the draw for ∇y f
    assert set(np.round(lengths).astype(int)) == set(range(terms))
    assert np.any(drawn % terms != np.round(lengths))
