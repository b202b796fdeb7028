"""Do the partitions agree with those that flwr-datasets publishes? Runs where that package is installed."""

import numpy as np
import pytest

from fedbilevel import data

pytestmark = pytest.mark.slow

# Sorted, because the oracle takes classes in order of appearance; unequal classes, so that sizes tell them
# apart.
LABELS = np.repeat(np.arange(5), [300, 200, 500, 120, 80])


def oracle(partitioner) -> list[np.ndarray]:
    """The row numbers that a flwr-datasets partitioner gives to each of its clients."""
    datasets = pytest.importorskip("datasets")
    partitioner.dataset = datasets.Dataset.from_dict({"label": LABELS, "row": np.arange(len(LABELS))})
    clients = partitioner.num_partitions
    return [np.array(partitioner.load_partition(client)["row"], int) for client in range(clients)]


def table(parts) -> np.ndarray:
    return np.array([np.bincount(LABELS[part], minlength=5) for part in parts])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_gives_the_same_counts_from_the_same_numbers(alpha, seed):
    published = pytest.importorskip("flwr_datasets.partitioner")
    expected = oracle(
        published.DirichletPartitioner(8, "label", alpha=alpha, min_partition_size=0, self_balancing=False, seed=seed)
    )
    found = data.dirichlet(LABELS, 8, alpha=alpha, minimum=0, seed=np.random.default_rng(seed))
    # The same Generator draws the same proportions; the oracle cuts down to whole samples, we round: each of
    # the two edges of a share differs by at most one sample, in the same direction.
    assert np.abs(table(found) - table(expected)).max() <= 1


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("per_client", [1, 2, 3])
def test_shards_gives_the_same_clients_from_the_same_numbers(per_client, seed):
    published = pytest.importorskip("flwr_datasets.partitioner")
    clients = 20  # 1,200 samples: the shards are equal
    expected = oracle(published.ShardPartitioner(clients, "label", num_shards_per_partition=per_client, seed=seed))
    found = data.shards(LABELS, clients, per_client=per_client, seed=np.random.default_rng(seed))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))


def test_iid_gives_clients_of_the_same_sizes():
    published = pytest.importorskip("flwr_datasets.partitioner")
    expected = oracle(published.IidPartitioner(7))
    assert sorted(map(len, data.iid(LABELS, 7, seed=0))) == sorted(map(len, expected))
