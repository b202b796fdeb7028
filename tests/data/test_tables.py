"""Are tables read as their files have them, and files with other content refused?"""

import bz2
import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from fedbilevel import data
from fedbilevel.data import loaders
from refusals import raises_with

LINES = b"+1 1:0.5 3:-2\n-1.0 2:1e-3 \n-1\n+1 3:4\n"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Return the folder of data, and expect four rows of three features in a9a, two of them positive."""
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("libsvm", "covtype"):
        (tmp_path / name).mkdir()
    monkeypatch.setitem(loaders.LIBSVM, "a9a", loaders.Published(3, (4, 2), (4, 2)))
    return tmp_path


def covertype_lines(rows):
    return b"".join(b",".join(b"%d" % n for n in row) + b"\n" for row in rows)


def test_libsvm_files_are_read(folder):
    (folder / "libsvm" / "a9a.bz2").write_bytes(bz2.compress(LINES))
    (folder / "libsvm" / "a9a.t.bz2").write_bytes(bz2.compress(LINES.replace(b"3:4", b"2:4")))
    found = data.load_table("a9a")
    rows = np.array([[0.5, 0, -2], [0, 1e-3, 0], [0, 0, 0], [0, 0, 4]], np.float32)
    np.testing.assert_array_equal(found.train_images, rows)
    np.testing.assert_array_equal(found.test_images[3], [0, 4, 0])
    np.testing.assert_array_equal(found.train_labels, [1, 0, 0, 1])
    assert (found.classes, found.train_labels.dtype) == (2, np.int32)
    scaled = found.standardised().train_images
    np.testing.assert_allclose(scaled.mean(0), 0, atol=1e-6)  # float32
    np.testing.assert_allclose(scaled.std(0), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (bz2.compress(LINES)[:-4], None),
        (bz2.compress(b"\n" + LINES.replace(b"1e-3", b"one")), None),
        (bz2.compress(LINES.replace(b"1e-3", b"1e400")), "a value that is not finite in float32"),
        (bz2.compress(LINES.replace(b"2:1e-3", b"1.5:2")), None),
        (bz2.compress(LINES.replace(b"-1\n", b"nan\n")), "4 rows, 2 with the label 1 and 1 with the label -1"),
        (bz2.compress(LINES.replace(b"3:-2", b"2:1 3:1 3:2")), None),
        (bz2.compress(LINES + b"-1 1:1\n"), "5 rows, 2 with the label 1 and 3 with the label -1"),
        (bz2.compress(LINES.replace(b"-1\n", b"1\n")), "4 rows, 3 with the label 1 and 1 with the label -1"),
        (bz2.compress(LINES.replace(b"3:4", b"4:4")), None),
    ],
)
def test_other_content_is_refused(folder, content, got):
    """A file of other content is refused; `got` is None if the file is not in libsvm's format."""
    (folder / "libsvm" / "a9a.bz2").write_bytes(content)
    with raises_with(data.DataError, path=str(folder / "libsvm" / "a9a.bz2"), got=got):
        data.load_table("a9a")


def test_every_fifth_row_of_covertype_is_for_testing(folder):
    rows = np.random.default_rng(0).integers(-5, 9000, size=(21, 55))
    rows[:, 53] = 1
    rows[:, -1] = np.arange(21) % 7 + 1
    (folder / "covtype" / "covtype.subset.data.gz").write_bytes(gzip.compress(covertype_lines(rows)))
    found = data.load_table("covtype")
    np.testing.assert_array_equal(found.test_images, rows[4::5, :-1])
    np.testing.assert_array_equal(found.test_labels, rows[4::5, -1] - 1)
    np.testing.assert_array_equal(found.train_images[:5], rows[[0, 1, 2, 3, 5], :-1])
    assert (found.classes, len(found.train_labels)) == (7, 17)
    np.testing.assert_array_equal(found.standardised().train_images[:, 53], 0)  # this column is constant
    whole = rows[:, :54]
    (folder / "covtype" / "covtype.data.gz").write_bytes(gzip.compress(covertype_lines(whole)))
    path = str(folder / "covtype" / "covtype.data.gz")
    with raises_with(data.DataError, "expected 55", path=path, got="54 columns"):
        data.load_table("covtype")
    (folder / "covtype" / "covtype.data.gz").write_bytes(gzip.compress(b"1,2\n3"))
    with raises_with(data.DataError, path=path, got=None):
        data.load_table("covtype")


def test_missing_files_and_unknown_names(folder):
    """An error says where a missing file was looked for, and which names are known."""
    with raises_with(data.DataError, "FEDBILEVEL_DATA=FOLDER", path="ijcnn1.bz2") as error:
        data.load_table("ijcnn1")
    assert str(folder / "libsvm") in str(error.value)
    with raises_with(data.DataError, path="table", got="ijcnn", allowed=["a9a", "covtype", "ijcnn1"], near="ijcnn1"):
        data.load_table("ijcnn")


@pytest.mark.skipif("FEDBILEVEL_DATA" not in os.environ, reason="FEDBILEVEL_DATA is not set")
@pytest.mark.parametrize("name", ["a9a", "ijcnn1"])
def test_the_real_files_are_whole(name):
    if not (Path(os.environ["FEDBILEVEL_DATA"]) / "libsvm").is_dir():
        pytest.skip("no folder libsvm")
    found = data.load_table(name)
    assert len(found.train_images) == {"a9a": 32_561, "ijcnn1": 49_990}[name]
    assert np.isfinite(found.standardised().test_images).all()
