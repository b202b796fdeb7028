"""Are samples read correctly from the objects of other libraries, and does the call in a refusal solve the problem?

The packages are not dependencies. The tests of a package that is not installed are skipped.
"""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.core.errors import ConfigurationError
from refusals import ANY, refuses

SITES = ["b", "a", "b", "c", "a", "b", "c", "a", "a", "b", "c", "c"]
U = np.arange(24.0).reshape(12, 2) / 4
T = np.arange(12) % 3


def held(clients, key=None):
    """Return the samples of each client, of the leaf `key`."""
    rows = [clients.outer.row(i) for i in range(len(clients))]
    return [np.asarray(row if key is None else row[key]).tolist() for row in rows]


def at(values, site):
    return [value for value, its in zip(np.asarray(values).tolist(), SITES, strict=True) if its == site]


def said(given, **options):
    with pytest.raises(ConfigurationError) as raised:
        fb.Clients(given, **options)
    return str(raised.value)


def mended(given, **names):
    """Evaluate the expression that the refusal suggests, with these names, and return the clients that it makes."""
    code = said(given).rpartition(": ")[2]
    return fb.Clients(eval(code, names))


@pytest.fixture
def torch():
    pytest.importorskip("torch.utils.data")
    return pytest.importorskip("torch")


@pytest.fixture
def pd():
    return pytest.importorskip("pandas")


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


@pytest.fixture
def frame(pd):
    return pd.DataFrame({"u": U[:, 0], "site": SITES, "t": T})


@pytest.fixture
def hugging_face(datasets):
    return datasets.Dataset.from_dict({"u": U.tolist(), "t": T.tolist()})


def of_pairs(torch, length=3, item=lambda i: (np.full(2, float(i)), i % 2)):
    class Pairs(torch.utils.data.Dataset):
        def __len__(self):
            return length

        def __getitem__(self, i):
            return item(i)

    return Pairs()


def test_no_package_is_imported_for_arrays():
    program = "import numpy as np, sys, fedbilevel as fb; fb.Clients.split([np.ones((4, 1))] * 2, seed=0)"
    shown = subprocess.run([sys.executable, "-c", f"{program}; print(*sys.modules)"], capture_output=True, text=True)
    assert "fedbilevel.core.foreign" in shown.stdout.split()
    assert {"torch", "pandas", "polars", "datasets", "flwr_datasets"} & set(shown.stdout.split()) == set()


def test_torch_datasets_are_the_pytrees_of_their_items(torch):
    u, t = torch.tensor(U, requires_grad=True), torch.tensor(T)
    whole = torch.utils.data.TensorDataset(u, t)
    first, second = torch.utils.data.Subset(whole, [3, 1]), torch.utils.data.Subset(whole, torch.arange(4, 9))
    nested = torch.utils.data.Subset(first, [1])
    clients = fb.Clients([whole, first, second, nested])
    assert held(clients, 0) == [U.tolist(), U[[3, 1]].tolist(), U[4:9].tolist(), U[[1]].tolist()]
    assert held(clients, 1) == [T.tolist(), T[[3, 1]].tolist(), T[4:9].tolist(), T[[1]].tolist()]
    assert clients.outer.values[0].dtype == np.float64
    assert clients.outer.values[1].dtype == np.int64


def test_torch_datasets_of_ones_own_are_read_item_by_item(torch):
    clients = fb.Clients([of_pairs(torch), of_pairs(torch, 2)])
    assert held(clients, 0) == [[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], [[0.0, 0.0], [1.0, 1.0]]]
    assert held(clients, 1) == [[0, 1, 0], [0, 1]]
    named = fb.Clients([of_pairs(torch, item=lambda i: {"u": torch.full((2,), i), "t": {"a": 0.5 * i}})])
    assert held(named, "u") == [[[0, 0], [1, 1], [2, 2]]]
    assert named.outer.row(0)["t"]["a"].tolist() == [0.0, 0.5, 1.0]


def test_what_a_class_of_ones_own_does_to_an_item_is_done(torch):
    class Numbered(torch.utils.data.TensorDataset):
        def __getitem__(self, i):
            return super().__getitem__(i)[0] + i

    class Negative(torch.utils.data.Subset):
        def __getitem__(self, i):
            return -super().__getitem__(i)[0]

        def __getitems__(self, places):  # PyTorch needs both methods
            return [self[i] for i in places]

    numbered = Numbered(torch.tensor(U))
    negative = Negative(torch.utils.data.TensorDataset(torch.tensor(U)), [2, 0])
    clients = fb.Clients([numbered, torch.utils.data.Subset(numbered, [1]), negative])
    assert held(clients) == [(U + np.arange(12)[:, None]).tolist(), (U[[1]] + 1).tolist(), (-U[[2, 0]]).tolist()]


def test_a_dataset_as_a_part_of_a_clients_samples_is_refused(torch):
    part = torch.utils.data.Subset(torch.utils.data.TensorDataset(torch.tensor(U)), [0, 1])
    for given in ([part, part], {"u": {"v": part}}):
        assert "of client 0 is a Subset; a table or dataset must be all samples of a client" in said([given])


def test_a_split_of_a_torch_dataset_is_a_list_of_clients(torch):
    whole = torch.utils.data.TensorDataset(torch.tensor(U), torch.tensor(T))
    parts = torch.utils.data.random_split(whole, [5, 7], torch.Generator().manual_seed(1))
    assert held(fb.Clients(parts), 1) == [T[part.indices].tolist() for part in parts]
    assert sorted(map(len, held(mended(whole, torch=torch, dataset=whole), 1))) == [1] * 8 + [2] * 2


def test_torch_items_that_make_no_array_are_refused(torch):
    ragged = of_pairs(torch, item=lambda i: (np.ones(1 + i // 2), "ab"[i % 2]))
    assert "client 0, a Pairs, cannot become arrays: item[0] has shape (1,) in one sample and (2,) in" in said([ragged])
    assert "Clients.outer[1] of client 0: it holds strings" in said(
        [of_pairs(torch, item=lambda i: (1.0, "ab"[i % 2]))]
    )
    assert "a Pairs, cannot become arrays" in said([of_pairs(torch, item=lambda i: 1.0 if i else {"u": 1.0})])
    assert "client 0 is a Tensor, which NumPy cannot convert" in said([torch.ones(3, 1, dtype=torch.bfloat16)])


def test_loaders_and_streams_of_torch_are_refused_with_what_they_read(torch):
    whole = torch.utils.data.TensorDataset(torch.tensor(U), torch.tensor(T))
    loader = torch.utils.data.DataLoader(whole, batch_size=4)
    code = said([loader]).rpartition(": ")[2]
    assert held(fb.Clients([eval(code, {"loader": loader})]), 1) == [T.tolist()]

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(1.5, 1), (2.5, 0)])

    code = said([Stream()]).rpartition(": ")[2]
    assert held(fb.Clients([eval(code, {"torch": torch, "dataset": Stream()})]), 0) == [[1.5, 2.5]]


def test_hugging_faces_datasets_are_dicts_of_columns_in_their_own_format(hugging_face):
    one, other = hugging_face.select(range(5)), hugging_face.select([7, 5])
    clients = fb.Clients([one, other])
    assert held(clients, "u") == [U[:5].tolist(), U[[7, 5]].tolist()]
    assert held(clients, "t") == [T[:5].tolist(), T[[7, 5]].tolist()]
    assert clients.outer.values["u"].dtype == np.float64
    assert held(fb.Clients([one.with_format("numpy")]), "u") == [U[:5].tolist()]
    doubled = one.with_transform(lambda rows: {"v": [2 * t for t in rows["t"]]})
    assert held(fb.Clients([doubled]), "v") == [(2 * T[:5]).tolist()]


@pytest.mark.parametrize("format", ["torch", "pandas", "numpy"])
def test_other_formats_of_hugging_face(format, hugging_face):
    pytest.importorskip(format)
    given = hugging_face.remove_columns("u").with_format(format)
    assert held(fb.Clients([given]), "t") == [T.tolist()]


def test_images_of_hugging_face_are_arrays(datasets):
    pytest.importorskip("PIL")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    given = datasets.Dataset.from_dict({"image": list(pixels), "label": ["b", "a"]}, features=features)
    clients = fb.Clients([given])
    assert held(clients, "image") == [pixels.tolist()]
    assert clients.outer.values["image"].dtype == np.uint8
    assert held(clients, "label") == [[1, 0]]


def test_one_dataset_of_hugging_face_is_divided_by_the_call_that_is_said(hugging_face, datasets):
    assert sorted(map(len, held(mended(hugging_face, dataset=hugging_face), "t"))) == [1] * 8 + [2] * 2
    by_name = datasets.DatasetDict({"a": hugging_face, "b": hugging_face.select([0])})
    assert held(mended(by_name, data=by_name), "t") == [T.tolist(), [0]]
    stream = hugging_face.to_iterable_dataset()
    code = said([stream]).rpartition(": ")[2]
    assert held(fb.Clients([eval(code, {"datasets": datasets, "dataset": stream})]), "t") == [T.tolist()]


def test_words_in_a_dataset_of_hugging_face_are_encoded_by_the_call_that_is_said(datasets):
    dataset = datasets.Dataset.from_dict({"site": SITES, "t": T.tolist()})
    text = said([dataset])
    assert text.startswith("Clients.outer['site'] of client 0: it holds strings; encode them as integers")
    names = {"dataset": dataset}
    exec(text.rpartition(": ")[2], names)
    codes = [sorted(set(SITES)).index(site) for site in SITES]
    assert held(fb.Clients([names["dataset"]]), "site") == [codes]
    missing = datasets.Dataset.from_dict({"t": [1, None]})
    assert "Clients.outer['t'] of client 0: it holds Python objects" in said([missing])
    ragged = datasets.Dataset.from_dict({"u": [[1.0], [1.0, 2.0]]})
    assert "cannot become arrays: u has shape (1,) in one sample and (2,) in another: pad the samples" in said([ragged])


def test_partitions_of_flwr_datasets_are_taken(hugging_face, datasets, tmp_path, monkeypatch):
    flwr_datasets = pytest.importorskip("flwr_datasets")
    from flwr_datasets.partitioner import IidPartitioner, NaturalIdPartitioner

    iid = IidPartitioner(num_partitions=3)
    iid.dataset = hugging_face
    assert held(fb.Clients(iid), "t") == [list(iid.load_partition(i)["t"]) for i in range(3)]
    natural = NaturalIdPartitioner(partition_by="site")
    natural.dataset = datasets.Dataset.from_dict({"site": T.tolist(), "u": U.tolist()})
    assert held(fb.Clients(natural), "u") == [U[site == T].tolist() for site in (0, 1, 2)]

    # otherwise flwr-datasets would report its use
    monkeypatch.setattr("flwr_datasets.federated_dataset.event", lambda *_: None)
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(["t", *map(str, T)]))
    options = {"dataset": "csv", "data_files": {"train": str(file), "test": str(file)}, "shuffle": False}
    options |= {"cache_dir": str(tmp_path / "cache")}
    one = flwr_datasets.FederatedDataset(partitioners={"train": 2}, **options)
    assert held(fb.Clients(one), "t") == [list(one.load_partition(i)["t"]) for i in range(2)]
    both = flwr_datasets.FederatedDataset(partitioners={"train": 2, "test": 3}, **options)
    text = said(both)
    code = text.rpartition(": ")[2]
    assert len(fb.Clients(eval(code, {"fds": both}))) == 2


def test_a_frame_is_grouped_by_the_call_that_is_said(frame):
    clients = mended(frame, frame=frame)  # sites are in the order of pandas, without their own column
    assert clients.outer.values.keys() == {"u", "t"}
    assert held(clients, "u") == [at(U[:, 0], site) for site in "abc"]
    assert held(clients, "t") == [at(T, site) for site in "abc"]
    assert held(fb.Clients(frame.groupby("site")["u"])) == [at(U[:, 0], site) for site in "abc"]
    alike = tuple(frame[["u", "t"]] for _ in range(2))
    assert held(mended(alike, data=alike), "t") == [T.tolist()] * 2
    by_name = dict(list(frame[["t", "u"]].groupby("t")))
    assert held(mended(by_name, data=by_name), "u") == [U[t == T, 0].tolist() for t in (0, 1, 2)]
    pairs = list(frame.groupby("t")[["u"]])
    assert held(mended(pairs, data=pairs), "u") == [U[t == T, 0].tolist() for t in (0, 1, 2)]


def test_rows_without_a_group_are_not_lost(pd):
    frame = pd.DataFrame({"site": [1.0, np.nan, 2.0, np.nan], "u": [1.0, 2.0, 3.0, 4.0]})
    assert "groups without 2 of the rows" in said(frame.groupby("site"))
    assert held(fb.Clients(frame.groupby("site", dropna=False)), "u") == [[1.0], [3.0], [2.0, 4.0]]


@pytest.mark.parametrize("kind", ["str", "object", "category"])
def test_words_in_a_frame_are_encoded_by_the_call_that_is_said(kind, frame):
    frame["site"] = frame["site"].astype(kind)
    text = said(frame.groupby("t"))
    assert text.startswith("Clients.outer['site'] of client 0: it holds strings; encode them as integers, the same for")
    exec(text.rpartition(": ")[2], {"frame": frame})
    codes = np.array([sorted(set(SITES)).index(site) for site in SITES])
    assert held(fb.Clients(frame.groupby("t")), "site") == [codes[t == T].tolist() for t in (0, 1, 2)]


def test_what_is_missing_in_a_frame_is_refused(pd):
    for column in ([1.0, np.nan], pd.array([1, None], dtype="Int64")):
        assert "Clients.outer['u']: it holds NaN or infinity, first in sample 1" in said([pd.DataFrame({"u": column})])


def test_frames_of_polars():
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"u": U[:, 0], "site": SITES, "t": T})
    clients = mended(frame, frame=frame)  # sites are in the order in which they appear
    assert held(clients, "u") == [at(U[:, 0], site) for site in "bac"]
    text = said(frame.partition_by("t"))
    names = {"frame": frame}
    exec(text.rpartition(": ")[2], names)
    assert held(fb.Clients([names["frame"]]), "site") == [[1 + "abc".index(site) for site in SITES]]


def test_clients_may_come_from_an_iterator():
    assert held(fb.Clients(np.full((n, 1), n) for n in (1, 2))) == [[[1]], [[2], [2]]]


def test_a_dataset_is_known_by_its_class_of_a_loaded_module_alone(monkeypatch):
    class Dataset(list):
        pass

    module = ModuleType("datasets")
    monkeypatch.setitem(sys.modules, "datasets", module)
    assert held(fb.Clients([Dataset([np.ones(1)])])) == [[[1.0]]]  # before the module has such a class
    module.Dataset = Dataset
    assert "Clients.outer: it is one Dataset for all clients; divide it among the clients: [dataset.shard(" in said(
        Dataset()
    )


def test_items_are_stacked_and_what_reads_or_streams_them_is_refused_without_torch(monkeypatch):
    module = ModuleType("torch.utils.data")
    kinds = ("Dataset", "IterableDataset", "TensorDataset", "Subset")
    for name in kinds:
        setattr(module, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, "torch.utils.data", module)
    torch = SimpleNamespace(utils=SimpleNamespace(data=module))
    clients = fb.Clients([of_pairs(torch), of_pairs(torch, 2)])
    assert held(clients, 0) == [[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], [[0.0, 0.0], [1.0, 1.0]]]
    assert held(clients, 1) == [[0, 1, 0], [0, 1]]
    assert said(of_pairs(torch)).endswith(
        "is one Pairs for all clients; divide it among the clients: torch.utils.data.random_split(dataset, [0.1] * 10)"
    )
    assert said([module.IterableDataset()]).endswith(
        "without a length; read it first: torch.utils.data.default_collate(list(dataset))"
    )
    loader = SimpleNamespace(dataset=of_pairs(torch), collate_fn=None)
    assert held(fb.Clients([eval(said([loader]).rpartition(": ")[2], {"loader": loader})]), 1) == [[0, 1, 0]]


class Partitioner:
    """A stand-in for a partitioner of flwr-datasets, with what the library uses of it.

    NumPy's arrays serve as data sets.
    """

    num_partitions = 2

    def load_partition(self, i):
        return np.full(i + 1, 5.0 * i)


class Federated:
    """A stand-in for a FederatedDataset, with what the library uses of it."""

    def __init__(self, *splits):
        self.splits = splits

    @property
    def partitioners(self):
        return {split: Partitioner() for split in self.splits}


def test_partitioners_are_known_by_what_they_do():
    assert held(fb.Clients(Partitioner())) == held(fb.Clients(Federated("train"))) == [[0.0], [5.0, 5.0]]
    code = said(fds := Federated("train", "test")).rpartition(": ")[2]
    assert held(fb.Clients(eval(code, {"fds": fds}))) == [[0.0], [5.0, 5.0]]


def test_inner_samples_alone_are_refused_with_what_to_call():
    samples = [np.arange(5.0), np.arange(3.0)]
    with refuses("Clients.outer", None) as raised:
        fb.Clients(inner=samples)
    text = str(raised.value)
    calls = [text[text.index(start) :].partition(")")[0] + ")" for start in ("fb.Clients(", "fb.Clients.split(")]
    one, two = (eval(call, {"fb": fb, "samples": samples}) for call in calls)
    assert one.inner is one.outer
    assert (two.inner.size.tolist(), two.outer.size.tolist()) == ([4, 2], [1, 1])


def test_split_gives_each_sample_to_one_side():
    """A split gives each sample to one side: of 10, 4 and 2 samples, a share of 0.7 is 7, 3 (of 2.8) and 1 (of 1.4)."""
    samples = [100.0 * n + np.arange(n) for n in (10, 4, 2)]
    clients = fb.Clients.split(samples, 0.7, seed=3, weights="size")
    assert clients.inner.size.tolist() == [7, 3, 1]
    for i, own in enumerate(samples):
        both = np.concatenate([clients.inner.row(i), clients.outer.row(i)])
        assert sorted(both) == own.tolist()
    assert clients.weights == pytest.approx(np.array([7, 3, 1]) / 11)
    again, other = (fb.Clients.split(samples, 0.7, seed=seed) for seed in (3, 4))
    np.testing.assert_array_equal(again.inner.values, clients.inner.values)
    assert again.inner.values.tolist() != other.inner.values.tolist()


def test_split_draws_uniformly():
    """A split draws uniformly: of 4 samples of 3000 clients, each is the one held out with probability 1/4."""
    clients = fb.Clients.split(np.tile(np.arange(4), (3000, 1)), 0.75, seed=0)
    counts = np.bincount(np.asarray(clients.outer.values))
    assert np.all(np.abs(counts / 3000 - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 3000))


@pytest.mark.parametrize(("fraction", "sizes"), [(0.01, [1, 1]), (0.99, [2, 8])])
def test_both_sides_of_a_split_have_a_sample(fraction, sizes):
    assert fb.Clients.split([np.ones(3), np.ones(9)], fraction, seed=0).inner.size.tolist() == sizes


@pytest.mark.parametrize(
    ("samples", "options", "refusal"),
    [
        ([np.ones(3), np.ones(1)], {"seed": 0}, ("", ANY, "Clients.split: client 1 ")),
        ([np.ones(3)], {"seed": 0, "fraction": 1.0}, ("fraction", 1.0, "0 and 1")),
        ([np.ones(3)], {"seed": -1}, ("seed", -1, "from 0")),
        ([np.array(["a", "b"])], {"seed": 0}, ("", ANY, "strings", "", "Clients.samples of client 0")),
    ],
)
def test_what_split_cannot_divide_is_refused(samples, options, refusal):
    with refuses(*refusal):
        fb.Clients.split(samples, **options)
