"""Is every cohort a uniform draw without replacement, by each of the three ways of drawing it?"""

from functools import partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from fedbilevel.engines import engine
from fedbilevel.engines.engine import draw_cohort, round_keys

DRAWS = 20_000


def draw(path, population, size, monkeypatch, count=DRAWS):
    """Many cohorts, drawn by Floyd's algorithm or by a permutation whatever their size."""
    monkeypatch.setattr(engine, "FLOYD_LIMIT", {"floyd": 2048, "permutation": 0}[path])
    one = partial(draw_cohort.__wrapped__, population=population, size=size)  # uncompiled, hence not of the other path
    keys = jax.random.split(jax.random.key(0), count)
    return np.asarray(jax.jit(jax.vmap(lambda key: one(key)))(keys))


@pytest.mark.parametrize("path", ["floyd", "permutation"])
@pytest.mark.parametrize(("population", "size"), [(6, 3), (5, 1), (5, 4)])
def test_every_subset_is_equally_likely(path, population, size, monkeypatch):
    """χ² over the subsets: mean k − 1, variance 2(k − 1); five standard errors."""
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
    assert size < population or ids.tolist() == list(range(population))  # everyone comes in order


def test_large_cohorts_are_permutations_and_small_ones_are_not():
    def sorts(size):
        return " sort[" in str(jax.make_jaxpr(lambda key: draw_cohort(key, 5000, size))(jax.random.key(0)))

    assert not sorts(engine.FLOYD_LIMIT)
    assert sorts(engine.FLOYD_LIMIT + 1)


def arrays(jaxpr):
    """Sizes of every value that a program computes, inner programs included."""
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
