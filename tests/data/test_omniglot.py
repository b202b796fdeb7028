"""Are characters read as the archives have them, are generated ones the same everywhere, are other files refused?"""

import hashlib
import io
import os
import zipfile

import numpy as np
import pytest

from fedbilevel import data
from fedbilevel.data import characters
from fedbilevel.data.files import folders
from refusals import raises_with

real_files = pytest.mark.skipif("FEDBILEVEL_DATA" not in os.environ, reason="FEDBILEVEL_DATA is not set")
BACKGROUND, EVALUATION = "images_background.zip", "images_evaluation.zip"


def png(ink: np.ndarray) -> bytes:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.fromarray(np.where(ink, 0, 255).astype(np.uint8)).convert("1").save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Write archives of 2 and 1 alphabets, with 2 characters each and 2 drawings of each. Return folder and ink."""
    monkeypatch.setattr(characters, "PUBLISHED", {BACKGROUND: (2, 4), EVALUATION: (1, 2)})
    monkeypatch.setattr(characters, "DRAWINGS", 2)
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "own" / "omniglot"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    inks = {}
    for name, alphabets in ((BACKGROUND, ("Aleph", "Beta")), (EVALUATION, ("Gimel",))):
        ink = rng.random((2 * len(alphabets), 2, 105, 105)) < 0.2
        places = [(alphabet, number) for alphabet in alphabets for number in (1, 2)]
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr(f"{name[:-4]}/", "")
            for (alphabet, number), drawings in reversed(list(zip(places, ink, strict=True))):  # in reverse order
                for drawing, one in enumerate(drawings):
                    path = f"{name[:-4]}/{alphabet}/character{number:02d}/0709_{drawing + 1:02d}.png"
                    archive.writestr(path, png(one))
        inks[name] = ink
    return folder, inks


def by_area(ink: np.ndarray) -> np.ndarray:
    """Scale a drawing of 105×105 pixels to 28×28 by areas.

    Each pixel is cut into 4×4 pieces, and 15×15 pieces make a new pixel, as 105·4 = 28·15.
    """
    pieces = np.repeat(np.repeat(ink, 4, axis=0), 4, axis=1).reshape(28, 15, 28, 15)
    share = pieces.sum(axis=(1, 3), dtype=np.int64)
    return np.floor(255 * share / 225 + 0.5).astype(np.uint8)


def test_images_are_the_archives_averaged_over_areas_in_alphabetical_order(tiny) -> None:
    _, inks = tiny
    found = data.load_characters("omniglot")
    for drawings, name in ((found.train, BACKGROUND), (found.test, EVALUATION)):
        expected = np.stack([[by_area(one) for one in character] for character in inks[name]])
        np.testing.assert_array_equal(drawings.images, expected)
        assert drawings.images.dtype == np.uint8
    assert found.train.alphabets == ("Aleph", "Beta")
    np.testing.assert_array_equal(found.train.alphabet, [0, 0, 1, 1])
    assert found.train.alphabet.dtype == np.int32


def test_what_was_decoded_is_kept_under_the_checksum_of_its_archive(tiny, monkeypatch) -> None:
    folder, _ = tiny
    first = data.load_characters("omniglot")
    kept = sorted(path.name for path in folders("omniglot")[-1].iterdir())
    sums = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (BACKGROUND, EVALUATION)]
    assert kept == sorted(f"{checksum}-28.npy" for checksum in sums)
    monkeypatch.delattr(characters, "_ink")  # nothing is decoded again
    again = data.load_characters("omniglot")
    np.testing.assert_array_equal(first.train.images, again.train.images)
    damaged = folders("omniglot")[-1] / kept[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with raises_with(data.DataError, "delete the file", path=str(damaged), got=None):
        data.load_characters("omniglot")


def test_archives_with_other_content_are_refused(tiny, monkeypatch) -> None:
    folder, _ = tiny
    monkeypatch.setattr(characters, "PUBLISHED", {BACKGROUND: (30, 964), EVALUATION: (1, 2)})
    with raises_with(data.DataError, path=str(folder / BACKGROUND)) as error:
        data.load_characters("omniglot")
    assert error.value.got.startswith("4 characters of 2 alphabets")
    assert error.value.allowed.startswith("964 characters of 30 alphabets")
    (folder / BACKGROUND).write_bytes(b"no archive")
    with raises_with(data.DataError, "zip archive", path=str(folder / BACKGROUND), got=None):
        data.load_characters("omniglot")


@pytest.mark.parametrize(("content", "got"), [(b"no image", None), (None, "(105, 104) pixels")])
def test_an_image_that_is_none_is_refused_by_name(tiny, monkeypatch, content, got) -> None:
    folder, _ = tiny
    monkeypatch.setattr(characters, "PUBLISHED", {BACKGROUND: (1, 1), EVALUATION: (1, 2)})
    monkeypatch.setattr(characters, "DRAWINGS", 1)
    with zipfile.ZipFile(folder / BACKGROUND, "w") as archive:
        archive.writestr("images_background/Aleph/character01/0709_01.png", content or png(np.zeros((105, 104), bool)))
    image = f"images_background/Aleph/character01/0709_01.png in {folder / BACKGROUND}"
    with raises_with(data.DataError, path=image, got=got):
        data.load_characters("omniglot")


def test_a_missing_library_is_named_with_the_command_that_installs_it(tiny, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises_with(data.DataError, 'pip install ".[cli]"', path=""):
        data.load_characters("omniglot")


@pytest.mark.slow  # 32,460 images are decoded
@real_files
def test_the_real_set_is_the_published_one(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = data.load_characters("omniglot")
    assert found.train.images.shape == (964, 20, 28, 28)
    assert found.test.images.shape == (659, 20, 28, 28)
    assert (len(found.train.alphabets), len(found.test.alphabets)) == (30, 20)
    assert {"Greek", "Futurama", "Braille"} < set(found.train.alphabets)
    assert not set(found.train.alphabets) & set(found.test.alphabets)
    pixels = found.train.images / 255
    assert (found.mean, found.std) == (round(pixels.mean(), 4), round(pixels.std(), 4))


@pytest.fixture(scope="module")
def made():
    return data.load_characters("strokes")


def test_the_generated_set_is_the_same_everywhere(made) -> None:
    assert made.train.images.shape == (200, 20, 28, 28)
    assert made.test.images.shape == (100, 20, 28, 28)
    content = made.train.images.tobytes() + made.test.images.tobytes()
    assert hashlib.sha256(content).hexdigest() == "7fb6ebeb91bfc3b3fc81a78f73e4e51eb15af873fb6c395f930d1fc7ef829054"
    pixels = made.train.images / 255
    assert (made.mean, made.std) == (round(pixels.mean(), 4), round(pixels.std(), 4))
    np.testing.assert_array_equal(np.bincount(made.train.alphabet), np.full(10, 20))


def test_alphabets_are_dealt_out_whole_and_all() -> None:
    alphabet = np.repeat(np.arange(7, dtype=np.int32), [1, 2, 3, 4, 5, 6, 7])
    held = characters.by_alphabet(alphabet, 3, seed=0)
    np.testing.assert_array_equal(np.sort(np.concatenate(held)), np.arange(28))
    owners = [set(alphabet[own]) for own in held]
    assert sorted(map(len, owners)) == [2, 2, 3]
    assert sum(map(len, owners)) == 7
    assert owners != [set(alphabet[own]) for own in characters.by_alphabet(alphabet, 3, seed=1)]
    with raises_with(data.DataError, path="clients", got=8, allowed="1 to 7, the number of alphabets"):
        characters.by_alphabet(alphabet, 8, seed=0)
