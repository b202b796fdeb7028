"""Is every sample used once, and does each partition follow its definition?"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel import data
from fedbilevel.data import clients as all_clients
from refusals import raises_with

LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 100))
OPTIONS = {"dirichlet": {"alpha": 0.5}, "iid": {}, "one_label": {}, "quantity": {"alpha": 0.5}, "shards": {}}


def make(name, labels=LABELS, clients=20, seed=0, **options):
    return data.partition(name, labels, clients, seed=seed, **{**OPTIONS[name], **options})


def same(a, b):
    return all(np.array_equal(i, j) for i, j in zip(a, b, strict=True))


def test_every_partition_is_tested():
    assert sorted(OPTIONS) == sorted(data.PARTITIONS)


@given(
    name=st.sampled_from(sorted(OPTIONS)),
    counts=st.lists(st.integers(16, 40), min_size=1, max_size=6),
    clients=st.integers(1, 8),
    seed=st.integers(0, 2**70),
)
@settings(max_examples=200, deadline=None)
def test_every_sample_belongs_to_exactly_one_client(name, counts, clients, seed):
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)) * 3 - 1, counts))
    if name == "one_label":
        clients = max(clients, len(counts))
    skewed = name in ("dirichlet", "quantity")
    parts = make(name, labels, clients, seed, **({"minimum": 0} if skewed else {}))
    assert len(parts) == clients
    assert skewed or min(map(len, parts)) >= 1
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    enough = [part for part in parts if len(part) > 1]
    for inner, outer, part in zip(*data.split(enough, seed=seed), enough, strict=True):
        assert len(inner)
        assert len(outer)
        np.testing.assert_array_equal(np.sort(np.concatenate([inner, outer])), np.sort(part))


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_seed_decides_and_nothing_else(name):
    before = np.random.get_state()[1].copy()  # noqa: NPY002 - the global state must not change
    assert same(make(name, seed=3), make(name, seed=3))
    assert not same(make(name, seed=3), make(name, seed=4))
    rng = np.random.default_rng(3)
    first, second = make(name, seed=rng), make(name, seed=rng)
    assert not same(first, second)
    assert same(first, make(name, seed=np.random.default_rng(3)))
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_order_within_a_client_is_shuffled(name):
    for part in make(name, clients=10):
        if len(part) > 10:  # of more than 10! orders, the sorted one does not occur
            assert not np.all(np.diff(part) > 0)


def test_iid_and_one_label_sizes_are_equal_to_within_one():
    """The sizes of clients differ by at most one, for iid among all, and for one_label among those of a label.

    Each of 7 clients has 142 or 143 of the 1000 samples. Of 23 clients, three share the 100 samples of label 0, 1 or 2,
    so that the first of them has 34, and two share those of any other label, so that each has 50.
    """
    assert sorted({len(part) for part in make("iid", clients=7)}) == [142, 143]
    parts = make("one_label", clients=23)
    assert [set(LABELS[part]) for part in parts] == [{k % 10} for k in range(23)]
    assert [len(part) for part in parts[:3]] == [34, 34, 34]
    assert sorted(len(parts[k]) for k in (3, 13)) == [50, 50]


def test_iid_gives_each_client_the_same_chance_of_each_sample():
    draws, clients = 2000, 4
    labels = np.zeros(10, int)
    held = np.array([[np.isin(np.arange(10), part) for part in make("iid", labels, clients, s)] for s in range(draws)])
    expected = np.array([3, 3, 2, 2])[:, None] / 10  # sizes 3, 3, 2, 2
    error = np.sqrt(expected * (1 - expected) / draws)
    assert np.all(np.abs(held.mean(0) - expected) <= 5 * error)  # in 40 cells, one seed in 40,000 exceeds this


def test_shards_are_runs_of_the_sorted_labels():
    parts = make("shards", clients=20, per_client=2)
    rank = np.empty(1000, int)
    rank[np.argsort(LABELS, kind="stable")] = np.arange(1000)
    # There are 40 shards of 25 samples. Each client has exactly two complete shards, and no shard has two clients.
    shards = [np.unique(rank[part] // 25, return_counts=True) for part in parts]
    assert all(len(which) == 2 and counts.tolist() == [25, 25] for which, counts in shards)
    assert sorted(np.concatenate([which for which, _ in shards])) == list(range(40))


def test_shards_are_drawn_at_random():
    # Each label has 4 of the 40 shards, so that the two shards of client 0 have one label with probability 3/39.
    draws, chance = 2000, 3 / 39
    one = [len(set(LABELS[make("shards", seed=s)[0]])) == 1 for s in range(draws)]
    assert abs(np.mean(one) - chance) <= 5 * np.sqrt(chance * (1 - chance) / draws)


def beta_moments(a: float, b: float) -> tuple[float, float, float]:
    """Return the mean, the variance and the fourth central moment of Beta(a, b)."""
    s = a + b
    variance = a * b / (s**2 * (s + 1))
    excess = 6 * ((a - b) ** 2 * (s + 1) - a * b * (s + 2)) / (a * b * (s + 2) * (s + 3))
    return a / s, variance, (3 + excess) * variance**2


@pytest.mark.parametrize("alpha", [0.1, 5.0])
@pytest.mark.parametrize("name", ["dirichlet", "quantity"])
def test_shares_have_the_moments_of_the_dirichlet_law(name, alpha):
    """A client's share has the mean and the variance of Beta(α, (M − 1)α).

    This is the law of one share if the shares of M clients have a Dirichlet law with parameter α.
    """
    clients, draws, each = 5, 400, 1000
    labels = np.repeat(np.arange(10), each) if name == "dirichlet" else np.zeros(each, int)
    shares = []
    for seed in range(draws):
        part = make(name, labels, clients, seed, alpha=alpha, minimum=0)[seed % clients]
        shares.append(np.bincount(labels[part], minlength=labels[-1] + 1) / each)
    found = np.concatenate(shares)  # one client of each draw: independent numbers
    mean, variance, fourth = beta_moments(alpha, (clients - 1) * alpha)
    assert mean == pytest.approx(1 / clients, rel=1e-15)
    assert variance == pytest.approx(mean * (1 - mean) / (clients * alpha + 1), rel=1e-15)
    # The bound is five standard errors, and some more for rounding: both ends of a share move it by at most 1/each.
    n = found.size
    assert abs(found.mean() - mean) <= 5 * np.sqrt(variance / n) + 1 / each
    spread = np.mean((found - mean) ** 2)
    assert abs(spread - variance) <= 5 * np.sqrt((fourth - variance**2) / n) + 2 / each * np.sqrt(variance)


def test_minimum_is_kept_by_redrawing_and_refused_when_hopeless(monkeypatch):
    """Shares are drawn again until each client has the minimum number of samples, up to a bound on the draws."""
    plain = make("dirichlet", clients=10, alpha=0.1, minimum=0, seed=5)
    assert min(map(len, plain)) < 20
    kept = make("dirichlet", clients=10, alpha=0.1, minimum=20, seed=5)
    assert min(map(len, kept)) >= 20
    assert min(len(part) for part in make("quantity", clients=10, minimum=20)) >= 20
    with raises_with(data.DataError, "50 clients left a client with fewer than minimum = 1", path="alpha", got=1e-6):
        make("dirichlet", clients=50, alpha=1e-6)
    monkeypatch.setattr(all_clients, "ATTEMPTS", 1)
    assert len(make("quantity", clients=10, minimum=0)) == 10  # a first draw is always made


@pytest.mark.parametrize(
    ("name", "options", "path", "got", "fact"),
    [
        ("iid", {"clients": 1001}, "clients", 1001, "1 to 1000"),
        ("iid", {"seed": None}, "seed", None, "an int from 0 on"),
        ("iid", {"labels": np.zeros((2, 2), int)}, "the layout of labels", "int64[2, 2]", "a single axis"),
        ("shards", {"clients": 501}, "per_client", 2, "1 to 1 for 501 clients"),
        ("dirichlet", {"alpha": 0}, "alpha", 0, "above 0"),
        ("dirichlet", {"alpha": "x"}, "alpha", "x", "a number"),
        ("dirichlet", {"minimum": 1.5}, "minimum", 1.5, "a whole number"),
        ("quantity", {"alpha": np.inf}, "alpha", np.inf, "up to 1e9"),
        ("dirichlet", {"minimum": 51}, "minimum", 51, "0 to 50"),
        ("one_label", {"clients": 9}, "clients", 9, "at least 10"),
        ("one_label", {"labels": [0, 1, 1, 1], "clients": 3}, "clients", 3, "the 1 samples of label 0"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_named(name, options, path, got, fact):
    with raises_with(data.DataError, path=path, got=got) as error:
        make(name, **options)
    assert fact in error.value.allowed


def test_an_unknown_partition_and_a_missing_option_are_named():
    names = ["dirichlet", "iid", "one_label", "quantity", "shards"]
    with raises_with(data.DataError, path="partition", got="dirichlett", allowed=names, near="dirichlet"):
        data.partition("dirichlett", LABELS, 10, seed=0)
    with raises_with(data.DataError, path="option of partition 'dirichlet'", got="alhpa", near="alpha"):
        make("dirichlet", alhpa=1)
    with raises_with(data.DataError, "--set 'partition_options={alpha=0.5}'", path="alpha", got=None):
        data.partition("dirichlet", LABELS, 10, seed=0)


@pytest.mark.parametrize(
    ("held", "fraction", "training"), [(10, 0.5, 5), (10, 0.8, 8), (3, 0.01, 1), (3, 0.99, 2), (2, 0.5, 1)]
)
def test_split_gives_the_fraction_and_never_an_empty_side(held, fraction, training):
    (inner,), (outer,) = data.split([np.arange(held)], fraction, seed=0)
    assert (len(inner), len(outer)) == (training, held - training)


@pytest.mark.parametrize(
    ("sizes", "fraction", "path"),
    [([5], 0, "fraction"), ([5], np.nan, "fraction"), ([5, 1], 0.5, "the number of samples of client 1")],
)
def test_a_split_that_cannot_be_is_refused(sizes, fraction, path):
    with raises_with(data.DataError, path=path):
        data.split(list(map(np.arange, sizes)), fraction, seed=0)


def test_split_is_random_and_independent_of_a_partition_with_the_same_seed():
    part = np.arange(1000)
    (inner,), _ = data.split([part], seed=0)
    assert not np.array_equal(np.sort(inner), part[:500])
    assert not np.array_equal(inner, make("iid", np.zeros(1000, int), 1)[0][:500])
    assert same(data.split([part], seed=0)[0], [inner])


def test_clients_of_equal_size_are_split_by_draws_of_their_own():
    (first, second), _ = data.split([np.arange(100), np.arange(100)], seed=0)
    assert set(first) != set(second)


def test_the_stratum_of_an_owner_is_the_largest_of_its_samples():
    """An owner has the largest stratum of its samples, in whatever order they come, and each sample has its owner."""
    owners = np.array(["b", "a", "c", "a", "b"])
    strata, owner = all_clients.strata_of(owners, np.array([0, 2, 0, 1, 1]))
    assert strata.tolist() == [2, 1, 0]  # a, b, c
    assert strata[owner].tolist() == [1, 2, 0, 2, 1]


@pytest.mark.parametrize("seed", range(4))
def test_folds_have_as_many_samples_of_each_class(seed):
    """Three folds have equally many samples of each class, here of 100 and 70, and in total, up to one sample."""
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1], [100, 70]))
    fold = all_clients.dealt(labels, 3, np.random.default_rng(seed))
    for kind in (0, 1):
        assert np.ptp(np.bincount(fold[labels == kind], minlength=3)) <= 1
    assert np.ptp(np.bincount(fold)) <= 1


@pytest.mark.parametrize(("samples", "fraction", "training"), [(7, 0.5, 4), (5, 0.38, 2), (5, 0.1, 1), (5, 0.95, 4)])
def test_the_share_of_training_samples_is_rounded_and_neither_none_nor_all(samples, fraction, training):
    inner, outer = data.split([np.arange(samples)], fraction, seed=0)
    assert (len(inner[0]), len(outer[0])) == (training, samples - training)
