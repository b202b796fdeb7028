"""Is every cohort a uniform draw without replacement, in each of the three ways of drawing it?"""

from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from matrices import hypergradient, inner_gradient, members, outer_gradient
from two_phase import TwoPhase

import fedbilevel as fb
from fedbilevel.engines import engine
from fedbilevel.engines.engine import draw_cohort, round_keys
from fedbilevel.tasks.quadratic import quadratic
from refusals import refuses
from representatives import slow_but

DRAWS = 20_000
TASK = quadratic(clients=3, samples=(5, 5))


def draw(path, population, size, monkeypatch, count=DRAWS):
    """Draw many cohorts, by Floyd's algorithm or by a permutation, whatever their size is."""
    monkeypatch.setattr(engine, "FLOYD_LIMIT", {"floyd": 2048, "permutation": 0}[path])
    # not compiled, so that it is not the program of the other way
    one = partial(draw_cohort.__wrapped__, population=population, size=size)
    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(jax.jit(jax.vmap(lambda key: one(key)))(keys))


@pytest.mark.parametrize("path", ["floyd", "permutation"])
@pytest.mark.parametrize(("population", "size"), [(6, 3), (5, 1), (5, 4)])
def test_every_subset_is_equally_likely(path, population, size, monkeypatch):
    """All subsets are equally likely: χ² over k subsets has the mean k − 1 and the variance 2(k − 1).

    The test allows five standard deviations.
    """
    drawn = np.sort(draw(path, population, size, monkeypatch), axis=1)
    subsets = list(combinations(range(population), size))
    index = {subset: i for i, subset in enumerate(subsets)}
    counts = np.bincount([index[tuple(row)] for row in drawn.tolist()], minlength=len(subsets))
    expected = DRAWS / len(subsets)
    freedom = len(subsets) - 1
    assert ((counts - expected) ** 2 / expected).sum() <= freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("population", "size"),
    [(1, 1), (10, 9), (2**31 - 1, 20), (4000, 3000), (3000, 3000)],
)
def test_a_cohort_has_distinct_valid_clients(population, size):
    ids = np.asarray(draw_cohort(jax.random.key(3), population, size))
    assert ids.dtype == np.int32
    assert ids.shape == (size,)
    assert len(np.unique(ids)) == size
    assert ids.min() >= 0
    assert ids.max() < population
    assert size < population or ids.tolist() == list(range(population))  # if all clients take part, they are in order


def test_large_cohorts_are_permutations_and_small_ones_are_not():
    def sorts(size):
        return " sort[" in str(jax.make_jaxpr(lambda key: draw_cohort(key, 5000, size))(jax.random.key(0)))

    assert not sorts(engine.FLOYD_LIMIT)
    assert sorts(engine.FLOYD_LIMIT + 1)


def arrays(jaxpr):
    """Yield the size of every value that a program computes, also in inner programs."""
    for equation in jaxpr.eqns:
        yield from (int(np.prod(v.aval.shape)) for v in equation.outvars if hasattr(v.aval, "shape"))
        for inner in jaxprs_in_params(equation.params):
            yield from arrays(inner)


def test_the_cost_of_small_cohorts_does_not_grow_with_the_population():
    def cost(population):
        program = jax.make_jaxpr(lambda key: draw_cohort(key, population, 10))(jax.random.key(0))
        return sorted(arrays(program.jaxpr))

    small, large = cost(100), cost(10**9)
    assert small == large
    assert max(large) == 10


def test_the_key_decides():
    keys = jax.random.split(jax.random.key(0), 20)
    cohorts = [tuple(draw_cohort(key, 1000, 10).tolist()) for key in keys]
    assert cohorts == [tuple(draw_cohort(key, 1000, 10).tolist()) for key in keys]
    assert len(set(cohorts)) == 20


def test_rounds_have_streams_of_their_own():
    key = jax.random.key(7)
    streams = [tuple(jax.random.key_data(k).tolist()) for r in range(5) for k in round_keys(key, r)[:3]]
    assert len(set(streams)) == 15
    again = jax.jit(round_keys)(key, jnp.asarray(3))
    assert [tuple(jax.random.key_data(k).tolist()) for k in again[:3]] == streams[9:12]


POPULATION, SIZE = 5, 3
VALUES = np.array([1.0, -2.0, 0.5, 3.0, -1.0])
WEIGHTS = np.array([1.0, 2.0, 3.0, 1.0, 2.0]) / 9
LINEAR = fb.SingleLevel(lambda x, batch: x * jnp.mean(batch["u"]))
DRAWN_AGAIN = fb.Cohort(SIZE, replacement=True)


def step(cohort, engine=None, key=0, rows=VALUES[:, None], batch_size=None, **options):
    """Make a FedAvg round with a step of size 1 from 0: x = −Σ (M/P) p_i u_i over the draws."""
    clients = fb.Clients({"u": rows}, weights=WEIGHTS[: len(rows)])
    method = fb.FedAvg(local_steps=1, lr=1.0, batch_size=batch_size)
    return fb.solve(method, LINEAR, clients, jnp.zeros(()), rounds=1, cohort=cohort, key=key, engine=engine, **options)


@pytest.mark.parametrize("engine", [fb.Reference(), fb.Local(), fb.Local(chunk=2, devices=2), fb.Local(stream=True)])
def test_draws_with_replacement_are_replies_of_their_own(engine):
    """With replacement the mean is over the draws, and a client that is drawn twice counts twice, also in bytes."""
    for key in range(3):
        ids = np.asarray(DRAWN_AGAIN.draw(round_keys(jax.random.key(key), 0).cohort, POPULATION))
        result = step(DRAWN_AGAIN, engine, key)
        expected = -POPULATION / SIZE * np.sum(WEIGHTS[ids] * VALUES[ids])
        assert float(result.x) == pytest.approx(expected, rel=1e-12)
        assert result.ledger.gradients == SIZE
    assert len(set(ids.tolist())) < SIZE  # the last of the three keys draws a client twice


def test_with_replacement_the_variance_is_that_of_independent_draws():
    """With replacement the variance of a mean is that of independent draws.

    For z_i = M p_i u_i, uniform over clients and with variance s², it is s²/P with replacement, and
    s²/P·(M − P)/(M − 1) without. The mean of the squares of n draws has a standard deviation of at most (max
    |z − μ|)²/√n; five of these are allowed.
    """
    z, count = POPULATION * WEIGHTS * VALUES, 60_000
    keys = jax.random.split(jax.random.key(0), count)
    for cohort, shrink in ((DRAWN_AGAIN, 1.0), (fb.Cohort(SIZE), (POPULATION - SIZE) / (POPULATION - 1))):
        ids = np.asarray(jax.vmap(lambda key, cohort=cohort: cohort.draw(key, POPULATION))(keys))
        means = z[ids].mean(1)
        spread = 5 * np.max(np.abs(z - z.mean())) ** 2 / np.sqrt(count)
        assert abs(means.mean() - z.mean()) < 5 * np.sqrt(z.var() / SIZE / count)
        assert abs(np.mean((means - z.mean()) ** 2) - z.var() / SIZE * shrink) < spread
        assert spread < 0.2 * z.var() / SIZE


@pytest.mark.parametrize("engine", [fb.Reference(), fb.Local()])
def test_each_draw_has_its_own_batch(engine):
    """Each draw of a client has its own batch: one client, drawn three times, takes three different samples."""
    rows = 2.0 ** np.arange(40)[None]
    cohort = fb.Cohort(3, replacement=True)
    drawn = -3 * float(step(cohort, engine, rows=rows, batch_size=1).x)  # a sum of three powers of two
    assert bin(round(drawn)).count("1") == 3
    assert float(step(cohort, fb.Local(), rows=rows, batch_size=1).x) == -drawn / 3


@pytest.mark.parametrize(
    "engine", slow_but(fb.Reference(), of=[fb.Reference(), fb.Local(), fb.Local(chunk=2, devices=2)])
)
def test_fresh_cohorts_are_drawn_with_replacement_too(engine):
    """Fresh cohorts are drawn with replacement, too: FedNest's round equals one from NumPy's matrices.

    Each cohort has 5 draws from 3 clients, so that some client is in it twice. From 0, y = −β q, v = s Σ_{n<2}
    (I − sH₁)ⁿ b and x = −α h. The round's own cohort gives q, and fresh cohorts give b, H₁ and h.
    """
    again, s, beta, alpha = fb.Cohort(5, replacement=True), 0.5, 0.6, 0.3
    inner, solver = fb.parts.SVRG(rounds=1, local_steps=1, lr=beta), fb.parts.Neumann(terms=2, step=s)
    method = fb.FedNest(
        inner=inner, hypergradient=fb.parts.Implicit(solver=solver), outer_lr=alpha, outer_steps=1, batch_size=None
    )
    found = fb.solve(method, TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=1, cohort=again, key=1, engine=engine)
    keys, clients, x = round_keys(jax.random.key(1), 0), members(TASK), np.zeros(5)
    cohorts = [again.draw(k.cohort, 3).tolist() for k in (keys, *map(keys.of_fresh, range(3)))]
    mean = lambda ids, of: sum(3 / 5 * clients[i][0] * of(*clients[i][1:]) for i in ids)  # noqa: E731
    y = -beta * mean(cohorts[0], lambda f, g: inner_gradient(g, x, 0 * TASK.y0))
    b = mean(cohorts[1], lambda f, g: outer_gradient(f, x, y))
    v = 2 * s * b - s * s * mean(cohorts[2], lambda f, g: g["A"] @ b)
    h = mean(cohorts[3], lambda f, g: hypergradient(f, g, x, y, v))
    np.testing.assert_allclose(found.y, y, rtol=1e-12)
    np.testing.assert_allclose(found.x, -alpha * h, rtol=1e-12)
    assert len({tuple(sorted(ids)) for ids in cohorts}) == 4


def test_clients_that_keep_something_are_not_drawn_twice():
    again = fb.Cohort(2, replacement=True)
    with refuses("Cohort.replacement", True, "False if clients keep a state"):
        fb.solve(TwoPhase(), TASK.problem, TASK.clients, TASK.x0, TASK.y0, rounds=1, cohort=again)
    with refuses("cohort", 6, "1 to 5"):
        step(6)
    with refuses("Cohort.replacement", "no", "True or False"):
        step(fb.Cohort(2, replacement="no"))
    assert float(step(fb.Cohort(6, replacement=True)).x) != 0
