"""Are the images and labels that `load` returns the published ones, and is anything else refused?"""

import gzip
import hashlib
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedbilevel import data
from fedbilevel.data import loaders
from fedbilevel.data.files import SOURCES, folders
from refusals import raises_with

real_files = pytest.mark.skipif("FEDBILEVEL_DATA" not in os.environ, reason="FEDBILEVEL_DATA is not set")


def squeezed(data: bytes) -> bytes:
    """Compress without the time of day, which would give a parametrised test another name in every process."""
    return gzip.compress(data, mtime=0)


def idx_bytes(array: np.ndarray) -> bytes:
    head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}i", *array.shape)
    return gzip.compress(head + array.tobytes(), mtime=0)


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Write a tiny "mnist" into a user's folder, and return its four arrays and its four paths."""
    rng = np.random.default_rng(0)
    shapes = ((6, 3, 2), (6,), (4, 3, 2), (4,))
    arrays = [rng.integers(0, 256 if len(shape) == 3 else 10, shape, np.uint8) for shape in shapes]
    folder = tmp_path / "own" / "mnist"
    folder.mkdir(parents=True)
    files, paths = [], []
    for file, array in zip(SOURCES["mnist"].files, arrays, strict=True):
        content = idx_bytes(array)
        paths.append(folder / file.name)
        paths[-1].write_bytes(content)
        files.append(replace(file, size=len(content), sha256=hashlib.sha256(content).hexdigest()))
    here = replace(SOURCES["mnist"], home="http://127.0.0.1:9/", files=tuple(files))
    monkeypatch.setitem(SOURCES, "mnist", here)
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return arrays, paths


def test_arrays_come_back_in_their_place_and_type(tiny):
    arrays, _ = tiny
    found = data.load("mnist")
    for got, expected in zip(
        (found.train_images, found.train_labels, found.test_images, found.test_labels), arrays, strict=True
    ):
        np.testing.assert_array_equal(got, expected)
    assert found.train_images.dtype == np.uint8
    assert found.train_labels.dtype == found.test_labels.dtype == np.int32
    assert (found.name, found.classes) == ("mnist", 10)


def test_the_cache_serves_what_the_own_folder_lacks_and_the_own_folder_goes_first(tiny):
    """A file is read from the user's folder if it is there, and else from the cache."""
    _, paths = tiny
    cache = folders("mnist")[-1]
    cache.mkdir(parents=True)
    (cache / paths[1].name).write_bytes(b"damaged, and not looked at")
    (cache / paths[0].name).write_bytes(paths[0].read_bytes())
    paths[0].unlink()
    assert len(data.load("mnist").train_labels) == 6


@pytest.mark.parametrize("which", range(4))
def test_a_truncated_or_altered_file_is_refused_with_its_path_and_what_was_expected(tiny, which):
    path = tiny[1][which]
    whole = path.read_bytes()
    altered = whole[:-1] + bytes([whole[-1] ^ 1])
    sums = [hashlib.sha256(content).hexdigest() for content in (altered, whole)]
    for content, words in ((whole[:-1], (f"{len(whole) - 1} bytes", str(len(whole)))), (altered, sums)):
        path.write_bytes(content)
        with pytest.raises(data.DataError) as error:
            data.load("mnist")
        assert all(word in str(error.value) for word in (str(path), *words))


GOOD = bytes((0, 0, 8, 1)) + struct.pack(">i", 3) + b"abc"


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"no gzip", None),
        (squeezed(GOOD)[:-3], None),
        (squeezed(b""), "the first bytes "),
        (squeezed(b"\0\0\x0d\x01" + GOOD[4:]), "the first bytes 00 00 0d 01"),
        (squeezed(GOOD + b"d"), "4 entries"),
        (squeezed(GOOD[:4] + struct.pack(">i", -3)), "0 entries"),
    ],
)
def test_a_file_that_is_not_idx_is_refused(content, got):
    with raises_with(data.DataError, path="file", got=got):
        loaders.parse_idx(content, 1, "file")


def test_repacked_cifar_is_read_with_channels_last(cifar_archive, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path))
    (tmp_path / "cifar-10").mkdir()
    (tmp_path / "cifar-10" / "cifar-10-binary.tar.xz").write_bytes(cifar_archive())
    found = data.load("cifar-10")
    row, column, channel = np.ogrid[:32, :32, :3]
    assert found.train_images.shape == (50, 32, 32, 3)
    np.testing.assert_array_equal(found.test_images[7], 64 * channel + 2 * row + column % 2)
    np.testing.assert_array_equal(found.train_labels, np.tile(np.arange(10), 5))
    assert found.test_labels.dtype == np.int32


@pytest.mark.parametrize(
    ("damage", "path", "got"),
    [
        ({"skip": "data_batch_3.bin"}, "file", "no data_batch_3.bin"),
        ({"extra": b"x"}, "file: data_batch_1.bin", "30,731 bytes"),
        ({"labels": bytes(range(1, 11))}, "file", f"{[0, *[5] * 10]} images per class"),
    ],
)
def test_a_cifar_archive_of_other_content_is_refused(cifar_archive, damage, path, got):
    with raises_with(data.DataError, path=path, got=got):
        loaders.parse_cifar(cifar_archive(**damage), "file")


def test_a_truncated_cifar_archive_is_refused(cifar_archive):
    whole = cifar_archive()
    for end in (0, 10, len(whole) // 2, len(whole) - 40):
        with raises_with(data.DataError, path="file") as error:
            loaders.parse_cifar(whole[:end], "file")
        assert error.value.got is None or error.value.got.startswith("no data_batch_1.bin")


def test_digits_are_all_there_split_by_class_and_always_the_same():
    digits, again = data.load("digits"), data.load("digits")
    assert digits.train_images.shape == (1442, 8, 8)
    assert digits.test_images.shape == (355, 8, 8)
    # A fifth of each class, rounded down, is for testing.
    for label in range(10):
        train, test = np.sum(digits.train_labels == label), np.sum(digits.test_labels == label)
        assert test == (train + test) // 5
    np.testing.assert_array_equal(digits.test_images, again.test_images)
    pixels = digits.train_images.astype(np.float64)  # the constants have four digits
    assert (pixels.mean(), pixels.std()) == pytest.approx((*digits.mean, *digits.std), abs=0.5e-4)
    whole = pytest.importorskip("sklearn.datasets").load_digits()
    both = np.concatenate([digits.train_images, digits.test_images]).reshape(-1, 64) * 16
    assert sorted(map(tuple, both)) == sorted(map(tuple, whole.data))
    assert both.min() == 0
    assert both.max() == 16
    labels = {tuple(image): label for image, label in zip(whole.data, whole.target, strict=True)}
    for image, label in zip(digits.test_images, digits.test_labels, strict=True):
        assert labels[tuple(image.ravel() * 16)] == label
    for label in range(10):  # every fifth image of a class, in the order of scikit-learn
        tested = digits.test_images[digits.test_labels == label].reshape(-1, 64) * 16
        np.testing.assert_array_equal(tested, whole.data[whole.target == label][4::5])


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with raises_with(data.DataError, 'pip install ".[cli]"', path=""):
        data.load("digits")


def test_digits_are_the_same_through_scikit_learn_itself(monkeypatch):
    direct = data.load("digits")
    monkeypatch.setattr(loaders, "DIGITS_FILE", "nowhere.csv.gz")
    imported = data.load("digits")
    for field in ("train_images", "train_labels", "test_images", "test_labels"):
        np.testing.assert_array_equal(getattr(direct, field), getattr(imported, field))


def test_standardise_is_the_formula_for_bytes_floats_and_channels():
    grey = np.arange(12, dtype=np.uint8).reshape(1, 3, 4)
    eps = np.finfo(np.float32).eps  # three roundings of numbers below 10
    np.testing.assert_allclose(data.standardise(grey, 0.1, 0.5), (grey / 255 - 0.1) / 0.5, atol=3 * eps)
    np.testing.assert_allclose(data.standardise(grey / 255.0, 0.1, 0.5), (grey / 255 - 0.1) / 0.5, atol=3 * eps)
    colour = np.full((1, 2, 2, 3), 255, np.uint8)
    out = data.standardise(colour, (0, 0.5, 1), (0.1, 0.25, 1))
    assert out.dtype == np.float32
    np.testing.assert_allclose(out[0, 1, 0], [10, 2, 0], rtol=3 * eps)
    assert colour.min() == 255  # the argument is unchanged


SHAPES, STD = "the shapes of mean and std", "std"


@pytest.mark.parametrize(
    ("mean", "std", "path"),
    [
        ((0, 0), (1, 1), SHAPES),
        (0, (1, 1, 1), SHAPES),
        (0, 0, STD),
        (np.zeros(3), (1, -1, 1), STD),
        (0, np.nan, STD),
    ],
)
def test_standardise_refuses_what_does_not_fit(mean, std, path):
    with raises_with(data.DataError, path=path):
        data.standardise(np.zeros((1, 2, 2, 3), np.uint8), mean, std)


@real_files
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", pytest.param("cifar-10", marks=pytest.mark.slow)])
def test_the_real_files_have_the_published_sizes_and_constants(name):
    if not (Path(os.environ["FEDBILEVEL_DATA"]) / name).is_dir():
        pytest.skip(f"no folder {name}")
    found = data.load(name)
    train = 50_000 if name == "cifar-10" else 60_000
    assert (len(found.train_images), len(found.test_images)) == (train, 10_000)
    assert (len(found.train_labels), len(found.test_labels)) == (train, 10_000)
    assert set(found.train_labels) == set(found.test_labels) == set(range(10))
    # The moments follow exactly from the histogram of each channel. The constants have four digits.
    channels = np.moveaxis(found.train_images, -1, 0) if len(found.mean) > 1 else found.train_images[None]
    for pixels, mean, std in zip(channels, found.mean, found.std, strict=True):
        share = np.bincount(pixels.ravel(), minlength=256) / pixels.size
        value = np.arange(256) / 255
        exact = share @ value
        assert abs(exact - mean) <= 0.5e-4
        # 1e-6 more, since a repacked CIFAR-10 may have some images encoded anew; 0.2435 is published for 0.24348.
        assert abs(np.sqrt(share @ (value - exact) ** 2) - std) <= 0.5e-4 + 1e-6
