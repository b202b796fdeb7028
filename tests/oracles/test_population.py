"""Do the population's sums equal those of a loop over clients?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core.client import Clients
from fedbilevel.core.problem import Bilevel
from fedbilevel.core.ragged import Ragged
from fedbilevel.oracles import population as module
from fedbilevel.oracles.population import Population, chosen
from refusals import refuses

EPS = np.finfo(np.float64).eps
SIZES = {"outer": (3, 1, 7, 4), "inner": (9, 2, 5, 6)}
WEIGHTS = np.array([0.1, 0.4, 0.2, 0.3])


@pytest.fixture(scope="module")
def clients():
    rng = np.random.default_rng(1)
    draw = lambda n: {"u": rng.normal(size=(n, 4)), "t": rng.normal(size=n)}  # noqa: E731
    return Clients(**{name: [draw(n) for n in sizes] for name, sizes in SIZES.items()}, weights=WEIGHTS)


NAMES = ("outer", "inner")


CHUNKS = [pytest.param(256, id="one chunk", marks=pytest.mark.slow), pytest.param(5, id="chunks with padding")]


@pytest.fixture(scope="module", params=CHUNKS)
def sums(request, instance, clients):
    """Return all functions of the population, and those of clients 2 and 0 alone."""
    before, module.CHUNK = module.CHUNK, request.param
    try:
        population = Population.of(instance.problem, clients)
        single = Population.each(instance.problem, clients, [2, 0])
    finally:
        module.CHUNK = before

    def fast(population, x, y, v):
        totals = [getattr(population, name) for name in NAMES]
        return [(t.value(x, y), t.gradients(x, y), t.products(x, y, v), t.hess_v(x, y, v)) for t in totals]

    point = instance.iterate
    return jax.jit(fast)(population, *point), jax.jit(jax.vmap(fast, (0, None, None, None)))(single, *point)


@pytest.fixture(scope="module")
def loops(instance, clients):
    """Return the same numbers by a loop over clients: for all of them, and for clients 2 and 0 alone."""

    def slow(ids, weights, x, y, v):
        def mean(name):
            loss, rows = getattr(instance.problem, name), getattr(clients, name)
            return lambda x, y: sum(p * loss(x, y, rows.row(i)) for i, p in zip(ids, weights, strict=True))

        def second(f):
            zero = jax.tree.map(jnp.zeros_like, x)
            return jax.jvp(jax.grad(f, (0, 1)), (x, y), (zero, v))[1]

        found = [(f, second(f)) for f in map(mean, NAMES)]
        return [(f(x, y), jax.grad(f, (0, 1))(x, y), products, products[1]) for f, products in found]

    parts = [(range(4), WEIGHTS), ([2], [1.0]), ([0], [1.0])]
    everyone, *alone = jax.jit(lambda *point: [slow(*part, *point) for part in parts])(*instance.iterate)
    return everyone, alone


def close(a, b):
    """Compare up to rounding: sums of order one have at most 22 terms, through three layers."""
    same = jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1, np.abs(b).max())), a, b
    )
    assert len(jax.tree.leaves(same)) == 0


def test_sums_are_those_of_a_loop_over_clients(sums, loops):
    close(sums[0], loops[0])


def test_single_clients_are_themselves(sums, loops):
    for place in range(2):
        close(jax.tree.map(lambda leaf, place=place: leaf[place], sums[1]), loops[1][place])


def test_one_program_serves_other_data(instance, clients):
    """The data are arguments of a program: what was compiled contains no sample of a population."""
    x, y, _ = instance.iterate
    population = Population.of(instance.problem, clients)
    text = str(jax.make_jaxpr(lambda p, x, y: p.inner.value(x, y))(population, x, y).consts)
    assert text == "[]"


@pytest.mark.parametrize(("limit", "kept"), [(20, [8, 10, 2]), (13, [5, 7, 1])])  # of 40, 50 and 10 samples
def test_a_subsample_keeps_the_weights_of_clients(limit, kept):
    rows = Ragged({"u": np.arange(100.0)}, np.array([40, 0, 90]), np.array([50, 40, 10]))
    p = np.array([0.5, 0.3, 0.2])
    index, weights = chosen(rows, np.arange(3), p, limit)
    owner = np.searchsorted([40, 90, 100], index, side="right")  # by the place in the flat array: row 1, row 0, row 2
    held = [weights[owner == k].sum() for k in (1, 0, 2)]
    np.testing.assert_allclose(held, p, rtol=4 * EPS)
    assert np.bincount(owner, minlength=3).tolist() == kept
    assert len(set(index.tolist())) == limit


def test_without_a_limit_every_sample_counts_p_over_n():
    rows = Ragged({"u": np.arange(10.0)}, np.array([4, 0]), np.array([6, 4]))
    index, weights = chosen(rows, np.arange(2), np.array([0.9, 0.1]), None)
    assert index.tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    np.testing.assert_allclose(weights, [0.15] * 6 + [0.025] * 4, rtol=4 * EPS)


def test_a_memory_map_is_read_only_where_a_sample_is_taken(tmp_path):
    """A memory map is read only where a sample is taken.

    All other rows are NaN, so that reading more would be refused, or would make the sums NaN.
    """
    path = tmp_path / "u.npy"
    stored = np.lib.format.open_memmap(path, mode="w+", dtype=np.float64, shape=(1000, 2))
    stored[:] = np.nan
    taken = np.arange(10) * 1000 // 10
    stored[taken] = 1.0
    stored.flush()
    rows = Ragged({"u": np.load(path, mmap_mode="r")}, np.array([0, 400]), np.array([400, 600]))
    population_of = Clients(outer=rows, inner=rows)
    problem = Bilevel(lambda x, y, b: jnp.mean(b["u"]) * x * y, lambda x, y, b: jnp.mean(b["u"]) * y**2)
    some = Population.of(problem, population_of, max_samples=10)
    assert float(some.outer.value(2.0, 3.0)) == pytest.approx(6.0, rel=1e-15)
    assert some.counts == (10, 10)
    with refuses("", fact="NaN or infinity, first in sample 1 of client 0", where="samples['u']"):
        Population.of(problem, population_of)
