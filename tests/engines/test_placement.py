"""Does one process own each client, and does each member of a cohort have one place in the process of its owner?"""

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.core.ragged import Ragged
from fedbilevel.engines.local.placement import Shares
from refusals import refuses
from representatives import slow_but


@pytest.mark.parametrize(
    ("population", "processes", "devices"), slow_but((7, 3, 2), of=[(8, 2, 1), (7, 3, 2), (5, 5, 1)])
)
@pytest.mark.parametrize("chunk", slow_but(3, of=[1, 3]))
def test_every_member_of_a_cohort_has_one_place_with_its_owner(population, processes, devices, chunk):
    shares = Shares(population, processes, 0, devices)
    owners = np.repeat(np.arange(processes), np.diff(shares.bounds))
    assert np.ptp(np.bincount(owners)) <= 1
    np.testing.assert_array_equal(shares.owner(np.arange(population)), owners)
    rng = np.random.default_rng(0)
    for cohort in {1, (population + 1) // 2, population}:
        ids = rng.permutation(population)[:cohort]
        places = shares.places(cohort, chunk)
        where, member, taken = map(np.asarray, shares.place(jnp.asarray(ids), places))
        assert len(set(where.tolist())) == cohort
        assert taken.sum() == cohort
        assert taken[where].all()
        np.testing.assert_array_equal(member[where], np.arange(cohort))
        by_process = np.arange(len(member)) // (devices * places)
        np.testing.assert_array_equal(by_process[where], owners[ids])
        held = np.isin(by_process, owners[ids])  # no client runs in other places
        np.testing.assert_array_equal(owners[ids][member[held]], by_process[held])
        on_device = taken.reshape(-1, places)  # filled places come first, and the devices of a process share evenly
        assert (np.diff(on_device.astype(int), axis=1) <= 0).all()
        assert (np.ptp(on_device.sum(1).reshape(processes, devices), axis=1) <= 1).all()


def test_a_share_holds_the_samples_of_its_clients_only():
    sizes = [2, 5, 1, 3, 4]
    rows = Ragged.listed("inner", [np.arange(10 * i, 10 * i + n) for i, n in enumerate(sizes)])
    shares = [Shares(5, 2, mine, 1) for mine in range(2)]  # clients 0 and 1, and clients 2, 3 and 4
    held = [one.own_rows(rows) for one in shares]
    assert held[0][0].tolist() == [0, 1, 10, 11, 12, 13, 14, 0]
    assert held[1][0].tolist() == [20, 30, 31, 32, 40, 41, 42, 43]
    for _, begin in held:
        assert begin.tolist() == [0, 2, 0, 1, 4]


def test_more_processes_than_clients_are_refused():
    with refuses("processes", 4, "at most 3"):
        Shares(3, 4, 0, 1)
