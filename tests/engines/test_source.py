"""Does a client get its own samples, whether they are on the device, in memory, or in a file on disk?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.client import Samples
from fedbilevel.core.ragged import Ragged
from fedbilevel.engines.engine import draw_cohort, round_keys
from fedbilevel.engines.local.fed import ProgramLayout
from fedbilevel.engines.local.samples import Resident, Streamed, is_memory_mapped
from refusals import refuses

OUTER, INNER = np.array([2, 5, 1, 3, 4, 2]), np.array([4, 1, 3, 2, 2, 6])
KEY = jax.random.key(5)
COHORT = 3
FRESH = 2
SPOILT = "Clients.inner['u']"


def loss(x, y, batch):
    return jnp.mean(jnp.cosh(batch["u"] @ y - batch["t"] * x)) + jnp.sum(y**2)


PROBLEM = fb.Bilevel(outer=loss, inner=loss)


def rows(sizes, seed):
    rng = np.random.default_rng(seed)
    return [{"u": rng.uniform(-1, 1, (n, 2)), "t": rng.integers(0, 3, n)} for n in sizes]


def population(**options):
    return fb.Clients(rows(OUTER, 0), rows(INNER, 1), weights=np.arange(1, 7), **options)


def layout(clients):
    return ProgramLayout(
        population=len(clients),
        cohort=fb.Cohort(COHORT),
        fresh=FRESH,
        outer_longest=int(OUTER.max()),
        outer_equal=False,
        inner_longest=int(INNER.max()),
        inner_equal=False,
        chunk=COHORT,
        axis=None,
        available=len(clients),
        available_population=len(clients),
        rounds_per_call=1,
    )


def window(data, rows, name, longest, at):
    """Return the samples of the client in a row of a table."""
    start, size = (jnp.asarray(getattr(rows, f"{name}_{what}")[at]) for what in ("start", "size"))
    return Samples(getattr(data, name), start, size, longest, False)


@pytest.mark.slow
def test_streamed_members_have_the_samples_of_resident_ones():
    clients = population()
    resident = Resident(clients, layout(clients), KEY, None, 1)
    streamed = Streamed(clients, layout(clients), KEY, None, 2)
    try:
        for round in range(3):
            all_data, table, none = resident.inputs(round)
            data, members, ids = streamed.inputs(round)
            assert none is None
            keys = round_keys(KEY, round)
            expected = [draw_cohort(k.cohort, 6, COHORT) for k in (keys, *map(keys.of_fresh, range(FRESH)))]
            assert ids.tolist() == np.array(expected).tolist()
            assert members.id.tolist() == ids.tolist()
            ids, members = jax.tree.map(np.ravel, (ids, members))
            for place, i in enumerate(ids.tolist()):
                for name in ("weight", "outer_size", "inner_size", "counts"):
                    mine, theirs = getattr(members, name), getattr(table, name)
                    assert mine is theirs is None or mine[place] == theirs[i]
                for name, longest in (("outer", 5), ("inner", 6)):
                    both = window(data, members, name, longest, place), window(all_data, table, name, longest, i)
                    for batch_size in (7, None):
                        draws = [samples.batch(jax.random.key(round), batch_size) for samples in both]
                        jax.tree.map(np.testing.assert_array_equal, *draws)
    finally:
        streamed.close()


def test_streaming_reads_ahead_and_takes_rounds_in_any_order():
    clients = population()
    streamed = Streamed(clients, layout(clients), KEY, None, prefetch=2)
    try:
        first = streamed.inputs(4)[2].tolist()  # a resumed run may begin with any round
        assert sorted(streamed.pending) == [5, 6]
        streamed.inputs(5)
        assert sorted(streamed.pending) == [6, 7]
        assert streamed.inputs(4)[2].tolist() == first
    finally:
        streamed.close()


def mapped(tmp_path, data, name, spoil=None):
    """Return the same samples in a file, with a NaN in the first sample of the client `spoil`."""

    def on_disk(leaf):
        path = tmp_path / f"{name}-{leaf.dtype}.npy"
        np.save(path, leaf)
        return np.load(path, mmap_mode="r")

    flat = Ragged.listed(name, data)
    if spoil is not None:
        flat.values["u"][flat.start[spoil], 1] = np.nan
    return Ragged(jax.tree.map(on_disk, flat.values), flat.start, flat.size)


def solve(clients, engine=None, rounds=3):
    algorithm = fb.SimFBO(local_steps=2, batch_size=4, client_lr=0.01, server_lr=0.05)
    return fb.solve(
        algorithm, PROBLEM, clients, jnp.ones(()), jnp.ones(2), rounds=rounds, cohort=COHORT, key=3, engine=engine
    )


def test_a_run_from_disk_has_the_numbers_of_one_from_memory(tmp_path):
    outer, inner = (mapped(tmp_path, rows(s, seed), str(seed)) for seed, s in enumerate((OUTER, INNER)))
    clients = fb.Clients(outer, inner, weights=np.arange(1, 7))
    assert is_memory_mapped(clients)
    assert not is_memory_mapped(population())
    got, expected = solve(clients), solve(population())
    np.testing.assert_allclose(got.x, expected.x, rtol=1e-12)  # 3 rounds of sums of at most 4 terms
    np.testing.assert_allclose(got.y, expected.y, rtol=1e-12)
    assert got.ledger == expected.ledger


def spoilt(tmp_path, client):
    return fb.Clients(rows(OUTER, 0), mapped(tmp_path, rows(INNER, 1), "inner", spoil=client))


def cohorts(rounds):
    """Return the clients that take part in each round of `solve`."""
    return [draw_cohort(round_keys(jax.random.key(3), r).cohort, 6, COHORT).tolist() for r in range(rounds)]


def test_a_nan_on_disk_is_found_when_it_is_read(tmp_path):
    """A NaN on disk is found when its client takes part.

    It is not found when the population is described, whose samples may be larger than memory, or in rounds of other
    clients.
    """
    early, later = cohorts(2), cohorts(9)
    unread = next(i for i in later[-1] if i not in early[0] + early[1])
    clients, engine = spoilt(tmp_path, unread), fb.Local(prefetch=1)
    solve(clients, engine, rounds=1)
    with refuses("", fact=f"of client {unread}", where=SPOILT):
        solve(clients, engine, rounds=9)


@pytest.mark.parametrize("engine", [fb.Local(stream=False), fb.Reference()], ids=["resident", "reference"])
def test_a_nan_on_disk_is_found_by_engines_that_do_not_stream(tmp_path, engine):
    clients = spoilt(tmp_path, cohorts(1)[0][0])
    with refuses("", fact="NaN", where=SPOILT):
        solve(clients, engine)
