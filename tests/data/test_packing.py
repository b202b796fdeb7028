"""Does a packed population, in memory or on disk, have each client's samples and nothing else?"""

import errno
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from fedbilevel import data
from refusals import raises_with

IMAGES = np.arange(7 * 4, dtype=np.float32).reshape(7, 2, 2)
LABELS = np.arange(7, dtype=np.int32) % 3
PARTS = [np.array([4, 1]), np.array([6]), np.array([0, 5, 3])]


def clients(packed):
    return (packed.client(i) for i in range(len(packed.size)))


@pytest.fixture
def packed():
    return data.pack(IMAGES, LABELS, PARTS)


@pytest.fixture
def folder(packed, tmp_path):
    return data.write_clients(tmp_path / "population", packed.size, clients(packed))


def test_client_rows_are_where_start_and_size_say(packed):
    assert packed.start.tolist() == [0, 2, 3]
    assert packed.size.tolist() == [2, 1, 3]
    for client, part in enumerate(PARTS):
        rows = slice(packed.start[client], packed.start[client] + packed.size[client])
        np.testing.assert_array_equal(packed.arrays["image"][rows], IMAGES[part])
        np.testing.assert_array_equal(packed.client(client)["label"], LABELS[part])
    assert packed.arrays["image"].dtype == np.float32
    assert len(packed.arrays["label"]) == 6  # row 2 belongs to no client


@pytest.mark.parametrize(
    ("arrays", "parts", "path", "got"),
    [
        ({"a": LABELS}, [], "the number of clients", 0),
        ({"a": LABELS}, [[0], []], "the number of samples of client 1", 0),
        ({"a": LABELS}, [[0], [7]], "the range of row indices of client 1", (7, 7)),
        ({"a": LABELS, "b": LABELS[1:]}, [[0]], "the shapes of arrays", {"a": (7,), "b": (6,)}),
        ({"a": np.array(3)}, [[0]], "the shapes of arrays", {"a": ()}),
    ],
)
def test_pack_refuses_what_is_no_population(arrays, parts, path, got):
    with raises_with(data.DataError, path=path, got=got):
        data.pack_arrays(arrays, [np.array(part, int) for part in parts])


def test_a_population_on_disk_comes_back_as_it_was(packed, folder):
    found = data.open_clients(folder)
    assert sorted(found.arrays) == ["image", "label"]
    np.testing.assert_array_equal(found.start, packed.start)
    np.testing.assert_array_equal(found.size, packed.size)
    for name, array in packed.arrays.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].dtype == array.dtype
        assert isinstance(found.arrays[name], np.memmap)
        np.testing.assert_array_equal(np.load(folder / f"{name}.npy"), array)  # the files are plain .npy files
    with pytest.raises(ValueError, match="read-only"):
        found.arrays["label"][0] = 1
    with raises_with(data.DataError, "exists", path=str(folder)):
        data.write_clients(folder, packed.size, clients(packed))
    np.save(folder / "size.npy", np.array([2, 1, 4]))
    sizes = "7, the sum of the sizes"
    with raises_with(data.DataError, path=str(folder), got="6 rows of 'image'", allowed=sizes):
        data.open_clients(folder)


@pytest.mark.parametrize("name", ["image.npy", "label.npy", "size.npy"])
@pytest.mark.parametrize("cut", [1, None])
def test_a_truncated_or_missing_file_is_refused_by_name(folder, name, cut):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-cut]) if cut else (folder / name).unlink()
    got = f"{len(content) - cut if cut else 0} bytes"
    with raises_with(data.DataError, path=str(folder / name), got=got, allowed=f"{len(content)}"):
        data.open_clients(folder)


def edit(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "file", "got", "fact"),
    [
        ({"version": 2}, "manifest.json", None, "'fedbilevel-clients' 2"),
        ({"arrays": 3}, "manifest.json", None, ""),
        ({"arrays": {"../label": {"shape": [6], "dtype": "<i4", "bytes": 152}}}, "manifest.json", None, "'../label'"),
        ({"arrays": {"label": {"shape": [7], "dtype": "<i4", "bytes": 152}}}, "label.npy", "[6] <i4", "[7] <i4"),
        ({"arrays": {"label": {"shape": [6], "dtype": "<i4", "bytes": 152}}, "size": 1}, "manifest.json", None, ""),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(folder, changes, file, got, fact):
    assert (folder / "label.npy").stat().st_size == 152
    edit(folder, **changes)
    with raises_with(data.DataError, fact, path=str(folder / file), got=got):
        data.open_clients(folder)


def test_a_folder_without_a_manifest_a_broken_one_and_altered_entries_are_refused(folder, tmp_path):
    with raises_with(data.DataError, path=str(tmp_path / "nothing" / "manifest.json")):
        data.open_clients(tmp_path / "nothing")
    content = (folder / "label.npy").read_bytes()
    (folder / "label.npy").write_bytes(b"x" + content[1:])
    with raises_with(data.DataError, path=str(folder / "label.npy"), got=None):
        data.open_clients(folder)
    (folder / "manifest.json").write_text("{")
    with raises_with(data.DataError, path=str(folder / "manifest.json"), got=None):
        data.open_clients(folder)


A = {"a": np.zeros((1, 2))}


@pytest.mark.parametrize(
    ("size", "given", "path", "fact"),
    [
        ([1, 1], [A], "the number of clients", "1; allowed: 2"),
        ([1], [A, A], "the layout of client 1", "no such client"),
        ([1, 2], [A, A], "the layout of client 1", "2 rows"),
        ([1, 1], [A, {"a": np.zeros((1, 3))}], "the layout of client 1", "(3,)"),
        ([1, 1], [A, {"b": np.zeros((1, 2))}], "the layout of client 1", "'b'"),
        ([1], [{"a": np.array([None])}], "the type of array 'a'", "object"),
        ([1], [{"../a": A["a"]}], "the type of array '../a'", "letters"),
        ([1], [{"size": A["a"]}], "the type of array 'size'", "other than 'size'"),
        ([1], [{}], "the layout of client 0", "{}"),
    ],
)
def test_a_client_that_does_not_fit_leaves_nothing(tmp_path, size, given, path, fact):
    with raises_with(data.DataError, fact, path=path):
        data.write_clients(tmp_path / "population", size, iter(given))
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_writer_leaves_nothing_and_is_not_hidden(tmp_path):
    def broken():
        yield A
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        data.write_clients(tmp_path / "population", [1, 1], broken())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("in the way")
    with raises_with(data.DataError, os.strerror(errno.ENOTDIR), path=str(tmp_path / "file" / "population")):
        data.write_clients(tmp_path / "file" / "population", [1], [A])


KILLED = """
import os, signal, sys
import numpy as np
from fedbilevel import data
def clients():
    yield {"a": np.zeros(1)}
    os.kill(os.getpid(), signal.SIGKILL)
data.write_clients(sys.argv[1], [1, 1], clients())
"""


def test_a_killed_writer_leaves_no_population(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "population")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "population").exists()
