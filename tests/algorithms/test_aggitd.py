"""Does FBO-AggITD compute what its paper says, and is its hypergradient exact where it should be?

The problem is the quadratic task: heterogeneous, weighted, with cross terms of no symmetry.
"""

import agreement
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_losses import with_compiled_losses
from matrices import end_with_series, fedavg_on_y, hypergradient, inner_gradient, mean_matrices, members, outer_gradient

import fedbilevel as fb
from fedbilevel.algorithms import aggitd
from fedbilevel.tasks.quadratic import inner, outer, quadratic, solution
from refusals import refuses

AGREEMENT = {
    "AggITD, Q = 2, 3, 5": agreement.Case(
        fb.AggITD(sampling="random", inner=fb.parts.LocalSGD(rounds=7), batch_size=4, outer_lr=0.01),
        work=agreement.WORK,
        slow=True,
    ),
}
NEVER_LATE = {fb.AggITD: "belongs to another r"}

WORK = np.array([1, 3, 2])
N, LAMBDA, ALPHA = 3, 0.6, 0.2
X0, Y0 = np.linspace(-1, 1, 5), np.linspace(2, 0, 8)


def run(algorithm, task, rounds, problem=None, x0=X0, y0=Y0, engine=None, **options):
    engine, problem = engine or fb.Reference(), with_compiled_losses(problem or task.problem)
    return fb.solve(algorithm, problem, task.clients, x0, y0, rounds=rounds, engine=engine, **options)


def method(sampling=None, **inner):
    inner = fb.parts.LocalSGD(rounds=N, lr=LAMBDA, **inner)
    return fb.AggITD(inner=inner, outer_lr=ALPHA, sampling=sampling, batch_size=None)


def draw(monkeypatch, *lengths):
    """Make these the random numbers Q of the rounds that follow."""
    remaining = iter(lengths)
    monkeypatch.setattr(aggitd, "uniform_below", lambda key, bound: jnp.asarray(next(remaining)))


def linear_outer(x, y, batch):
    """Compute an outer loss that has the same ∇y F at every y."""
    mean = {name: leaf.mean(0) for name, leaf in batch.items()}
    return x @ mean["E"] @ y + mean["t"] @ y + 0.5 * x @ x


def unrolled(task, loss, x, y0):
    """Return d/dx F(x, y^N(x)) by differentiating through the N gradient steps from the fixed y0 to y^N(x)."""
    mean = mean_matrices(task)

    def value(x):
        y = y0
        for _ in range(N):
            y = y - LAMBDA * inner_gradient(mean, x, y)
        return sum(p * loss(x, y, {k: leaf[None] for k, leaf in f.items()}) for p, f, _ in members(task))

    return jax.grad(value)(x)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["linear in y", "from y*(x)"])
def test_equals_unrolling_where_it_should(case, monkeypatch):
    """The hypergradient equals unrolling if F is linear in y or y0 = y*(x).

    This holds for the series, and for the mean of the random estimate over Q = 0..N−1.
    """
    task = quadratic(clients=3, noise=0.0, samples=(5, 5))
    if case == "linear in y":
        loss, y0 = linear_outer, Y0
    else:
        mean = mean_matrices(task)
        loss, y0 = outer, np.linalg.solve(mean["A"], mean["B"] @ X0 + mean["c"])
    problem = fb.Bilevel(outer=loss, inner=inner)
    expected = X0 - ALPHA * unrolled(task, loss, X0, y0)
    series = run(method(local_steps=1), task, 1, problem, y0=y0)
    np.testing.assert_allclose(series.x, expected, rtol=1e-12, atol=1e-12)
    draw(monkeypatch, *range(N))
    ends = [run(method("random", local_steps=1), task, 1, problem, y0=y0).x for _ in range(N)]
    np.testing.assert_allclose(np.mean(ends, axis=0), expected, rtol=1e-12, atol=1e-12)
    assert np.std(ends, axis=0).max() > 1e-3


def written_out(task, lengths):
    """Run rounds of the equations in the module's docstring; `lengths` has each round's Q, or None for the series."""
    x, y = X0, Y0
    for length in lengths:
        r = np.zeros(8)
        for n in range(N):
            product = sum(p * g["A"] @ r for p, _, g in members(task))
            gradient = sum(p * outer_gradient(f, x, y) for p, f, _ in members(task))
            if length is None:
                r = r - LAMBDA * product + gradient
            else:
                r = gradient if n == length else r - LAMBDA * product if n > length else r
            y = fedavg_on_y(task, x, y, WORK, LAMBDA)
        v = (1 if length is None else N) * LAMBDA * r
        x = x - ALPHA * sum(p * hypergradient(f, g, x, y, v) for p, f, g in members(task))
    return x, y


def test_two_rounds_written_out(monkeypatch):
    """Two rounds equal the equations in NumPy, and their costs are those derived from the equations.

    A round has N exchanges with τ_i gradients each. ∇y f is asked once, in the series N times. Each exchange after Q
    has a product, and the last exchange has one gradient and one product.
    """
    task = quadratic(clients=3, noise=0.0, samples=(5, 5)).with_own(local_steps=WORK)
    lengths = (0, 1)
    draw(monkeypatch, *lengths)
    for sampling, qs in {"random": lengths, None: (None,) * 2}.items():
        result = run(method(sampling), task, 2)
        x, y = written_out(task, qs)
        np.testing.assert_allclose(result.x, x, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(result.y, y, rtol=1e-12, atol=1e-12)
        asked = 2 * 1 if sampling == "random" else 2 * N
        products = sum(N - 1 - q for q in lengths) if sampling == "random" else 2 * (N - 1)
        assert result.ledger.exchanges == 2 * (N + 1)
        assert result.ledger.gradients == 2 * N * int(WORK.sum()) + 3 * (asked + 2)
        assert result.ledger.hvps == 3 * (products + 2)


@pytest.mark.slow
def test_the_default_ends_at_the_solution():
    """The default ends where its truncated inverse puts it, which for this N is x* up to (1 − λμ)^N < 1e-7.

    The default is the series, here with τ = 1 and full batches. The paper's random length has the same mean, but a
    variance that grows with N.
    """
    task = quadratic(clients=4, condition=4, noise=0.0)
    terms = 70
    lowest = np.linalg.eigvalsh(mean_matrices(task)["A"])[0]
    assert (1 - lowest) ** terms < 1e-7
    inner = fb.parts.LocalSGD(rounds=terms, lr=1.0, local_steps=1)
    algorithm = fb.AggITD(inner=inner, outer_lr=0.1, batch_size=None)
    result, exact = run(algorithm, task, 500, engine=fb.Local()), solution(task.clients)
    np.testing.assert_allclose(result.x, end_with_series(task, 1.0, terms), rtol=0, atol=1e-10)
    assert np.linalg.norm(result.x - exact.x) < 1e-6 * np.linalg.norm(exact.x)
    assert np.linalg.norm(result.y - exact.y) < 1e-6 * np.linalg.norm(exact.y)


def test_sampling_is_known():
    with refuses("AggITD.sampling", "rando", near="random"):
        fb.AggITD(sampling="rando")
