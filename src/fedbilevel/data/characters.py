"""Load sets of handwritten characters for few-shot learning: Omniglot, or generated strokes."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data import files
from fedbilevel.data.clients import Indices, Seed, generator, iid
from fedbilevel.data.files import (
    SOURCES,
    DataError,
    as_data_error,
    mapped,
    require,
    require_content,
    unknown_name,
)
from fedbilevel.wording import in_a_line, missing, printable

SIDE = 28  # the number of pixels along an image's edge


@dataclass(frozen=True, eq=False)
class Drawings:
    """Several drawings of each character.

    Args:
        images: uint8 of shape (characters, drawings, 28, 28), with 255 for ink and 0 for paper.
        alphabet: the index of each character's alphabet in `alphabets`, as int32.
        alphabets: the names of the alphabets.
    """

    images: NDArray[np.uint8]
    alphabet: NDArray[np.int32]
    alphabets: tuple[str, ...]


STROKES_MEAN, STROKES_STD = 0.1158, 0.2889  # mean and standard deviation of the training pixels of `strokes()`
PIXELS = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Characters:
    """Characters for training, and characters of other alphabets for testing.

    Args:
        name: the name of the set.
        train: the characters for training.
        test: the characters for testing.
        mean: the mean of the training pixels, scaled to [0, 1].
        std: the standard deviation of the training pixels, scaled to [0, 1].
    """

    name: str
    train: Drawings
    test: Drawings
    mean: float
    std: float


def load_characters(name: str, *, progress: files.Progress | None = None) -> Characters:
    """Load the set of characters called `name`: "omniglot", or "strokes", which is generated and needs no file.

    The files of Omniglot are looked for in `$FEDBILEVEL_DATA/omniglot/`, then in the cache
    (`$XDG_CACHE_HOME/fedbilevel/data/omniglot/`, by default below `~/.cache`). If they are in neither, they are
    downloaded into the cache.

    Args:
        progress: a function that is called with (bytes done, bytes in all) during each download; None: a bar is shown
            on standard error.

    Raises:
        DataError: the name is unknown, a file is damaged, a download fails, or Pillow is missing.
    """
    if name not in CHARACTERS:
        raise unknown_name("set of characters", name, CHARACTERS)
    return CHARACTERS[name](progress)


def by_alphabet(alphabet: NDArray[np.integer], clients: int, *, seed: Seed) -> list[Indices]:
    """Deal whole alphabets out to clients at random, and return the indices of each client's characters.

    The clients' numbers of alphabets differ by at most 1. The characters of a client are in random order.

    Args:
        alphabet: the number of each character's alphabet.
        clients: the number of clients.
        seed: the seed, or a NumPy Generator.

    Raises:
        DataError: there are more clients than alphabets.
    """
    alphabets = np.unique(alphabet)
    require(1 <= clients <= len(alphabets), "clients", clients, f"1 to {len(alphabets)}, the number of alphabets")
    rng = generator(seed, 7)
    dealt = iid(alphabets, clients, seed=rng)
    return [rng.permutation(np.flatnonzero(np.isin(alphabet, alphabets[part]))) for part in dealt]


def strokes(
    *, alphabets: tuple[int, int] = (10, 5), characters: int = 20, drawings: int = 20, seed: int = 0
) -> Characters:
    """Generate characters of two to four strokes, each a quadratic curve, in about a second.

    All strokes of an alphabet start and end at six common points, and are about equally bent, slanted and thick. Each
    drawing of a character moves the points of its strokes a little, then turns, scales, shears and shifts the
    character. A seed gives the same pixels on every machine.

    Args:
        alphabets: the number of alphabets for training, and for testing.
        characters: the number of characters of each alphabet.
        drawings: the number of drawings of each character.
        seed: the seed of all random numbers.
    """
    rng = np.random.default_rng([seed, 2])
    train, test = (
        Drawings(
            np.concatenate([_alphabet(rng, characters, drawings) for _ in range(count)]),
            np.repeat(np.arange(count, dtype=np.int32), characters),
            tuple(f"{part} {number + 1}" for number in range(count)),
        )
        for part, count in zip(("training", "test"), alphabets, strict=True)
    )
    return Characters("strokes", train, test, STROKES_MEAN, STROKES_STD)


def _alphabet(rng: np.random.Generator, characters: int, drawings: int) -> NDArray[np.uint8]:
    """Generate the drawings of an alphabet, as an array of shape (characters, drawings, SIDE, SIDE).

    All draws are uniform, and IEEE 754 defines the rounding of all operations, so that every machine gets the same
    pixels.
    """
    grid = np.stack(np.meshgrid([-0.6, 0, 0.6], [-0.6, 0, 0.6]), axis=-1).reshape(9, 2)  # the image covers [−1, 1]²
    points = (grid + rng.uniform(-0.15, 0.15, grid.shape))[rng.permutation(9)[:6]]
    bend, slant = rng.uniform(0.1, 0.7), rng.uniform(-0.3, 0.3)
    pen = rng.uniform(0.06, 0.1)  # half the width of a line
    fewest = int(rng.integers(2, 4))
    images = []
    for _ in range(characters):
        count = fewest + int(rng.integers(0, 2))
        ends = points[[rng.permutation(6)[:2] for _ in range(count)]]  # of shape (count, 2, 2)
        ends = ends + rng.uniform(-0.1, 0.1, ends.shape)
        middle = (ends[:, 0] + ends[:, 1]) / 2 + bend * rng.uniform(-1, 1, (count, 2))
        curves = np.stack([ends[:, 0], middle, ends[:, 1]], axis=1)
        images.append(_drawn(rng, curves, slant, pen, drawings))
    return np.stack(images)


def _drawn(rng: np.random.Generator, curves: PIXELS, slant: float, pen: float, drawings: int) -> NDArray[np.uint8]:
    """Draw a character `drawings` times. The result has the shape (drawings, SIDE, SIDE).

    Args:
        curves: the three control points of each stroke, as an array of shape (count, 3, 2).
        slant: the shear of all drawings.
        pen: half the width of a line.
    """
    moved = curves + rng.uniform(-0.09, 0.09, (drawings, *curves.shape))
    matrix = np.array([[1.0, slant], [0.0, 1.0]]) + rng.uniform(-0.2, 0.2, (drawings, 2, 2))
    shift = rng.uniform(-0.12, 0.12, (drawings, 2))
    x, y = (
        matrix[:, row, 0, None, None] * moved[..., 0]
        + matrix[:, row, 1, None, None] * moved[..., 1]
        + shift[:, row, None, None]
        for row in (0, 1)
    )  # x and y have the shape (drawings, count, 3)
    time = np.arange(17) / 16
    bernstein = np.stack([(1 - time) * (1 - time), 2 * time * (1 - time), time * time])  # of shape (3, 17)
    along = [sum(bernstein[k] * part[..., k, None] for k in range(3)).reshape(drawings, -1) for part in (x, y)]
    centre = (2 * np.arange(SIDE) + 1) / SIDE - 1
    squares = [(centre - part[..., None]) ** 2 for part in along]  # of shape (drawings, points, SIDE)
    nearest = np.full((drawings, SIDE, SIDE), np.inf)
    for column, row in zip(squares[0].swapaxes(0, 1), squares[1].swapaxes(0, 1), strict=True):
        np.minimum(nearest, row[:, :, None] + column[:, None, :], out=nearest)
    width = pen * rng.uniform(0.8, 1.2, (drawings, 1, 1))
    ink = np.clip((width - np.sqrt(nearest)) * SIDE / 2 + 0.5, 0, 1)  # a pixel's edge is 2/SIDE long
    return np.rint(255 * ink).astype(np.uint8)


NAME = "omniglot"
DRAWINGS, EDGE = 20, 105
LARGEST = 100_000  # the largest number of bytes of an image file; images of the published archives have a few hundred
ENCRYPTED = 0x1  # the bit for encryption in the flags of a zip entry
PUBLISHED = {"images_background.zip": (30, 964), "images_evaluation.zip": (20, 659)}  # numbers of alphabets, characters


def read_omniglot(progress: files.Progress | None = None) -> Characters:
    """Read Omniglot, with 964 characters of 30 alphabets for training and 659 characters of 20 others for testing.

    The training characters are Omniglot's background set, in `images_background.zip`, and the test characters its
    evaluation set, in `images_evaluation.zip`. Both archives are looked for in `$FEDBILEVEL_DATA/omniglot` and in the
    cache, and otherwise downloaded. A local archive may have been packed again if the paths inside are the same; so its
    alphabets, characters and drawings are counted in place of a checksum. Images of 105×105 pixels are averaged over
    areas to 28×28. Decoding takes seconds, so the small images are stored in the cache under the checksum of their
    archive.

    Brenden M. Lake, Ruslan Salakhutdinov, Joshua B. Tenenbaum. "Human-level concept learning through probabilistic
    program induction". Science 350, 2015.
    """
    source = SOURCES[NAME]
    background, evaluation = (_read_archive(file, progress) for file in source.files)
    return Characters(NAME, background, evaluation, source.mean[0], source.std[0])


def _read_archive(file: files.File, progress: files.Progress | None) -> Drawings:
    path = files.local(NAME, file.name)
    content = files.read_bytes(path) if path else files.read(NAME, file, progress)
    where = str(path or files.folders(NAME)[-1] / file.name)
    with as_data_error(where, "is not a zip archive, or is damaged (delete it and download it again)"):
        archive = zipfile.ZipFile(io.BytesIO(content))
    names = _names(archive, where, *PUBLISHED[file.name])
    images = _small_images(archive, names, hashlib.sha256(content).hexdigest(), where)
    alphabets, alphabet = np.unique([PurePosixPath(name).parts[1] for name in names[::DRAWINGS]], return_inverse=True)
    return Drawings(images, alphabet.astype(np.int32), tuple(alphabets.tolist()))


def _names(archive: zipfile.ZipFile, where: str, alphabets: int, characters: int) -> list[str]:
    """Return the paths SET/ALPHABET/CHARACTER/DRAWING.png of all images, sorted by alphabet, character and drawing."""
    names = sorted(name for name in archive.namelist() if name.endswith(".png") and name.count("/") == 3)
    counts = [len(list(drawings)) for _, drawings in groupby(names, key=lambda name: PurePosixPath(name).parent)]
    folders = {PurePosixPath(name).parts[1] for name in names}
    fits = (len(folders), len(counts), {*counts}) == (alphabets, characters, {DRAWINGS})
    found = f"{len(counts)} characters of {len(folders)} alphabets, with {sorted({*counts})} drawings each"
    expected = f"{characters} characters of {alphabets} alphabets, with {DRAWINGS} drawings each"
    require_content(fits, where, found, expected)
    return names


def _small_images(archive: zipfile.ZipFile, names: list[str], checksum: str, where: str) -> NDArray[np.uint8]:
    """Return the small images, as an array of shape (characters, DRAWINGS, SIDE, SIDE).

    They are read from the cache. If the cache does not have them, they are decoded and stored there.
    """
    cache = files.folders(NAME)[-1] / f"{checksum}-{SIDE}.npy"
    shape = (len(names) // DRAWINGS, DRAWINGS, SIDE, SIDE)
    if cache.is_file():
        images: NDArray[np.uint8] = mapped(cache, "cannot be read (delete the file, and it is made again)")
        fits = images.shape == shape and images.dtype == np.uint8
        found, expected = f"{images.dtype} of shape {images.shape}", f"uint8 of shape {shape}"
        require_content(fits, cache, found, expected, "delete the file, and it is made again")
        return np.array(images)
    images = shrunk(np.stack([_ink(*_png(archive, name, where)) for name in names])).reshape(shape)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with files.appearing(cache) as part, open(part, "xb") as out:
            np.save(out, images, allow_pickle=False)
    except OSError as error:
        text = f"{cache} cannot be written ({in_a_line(error)}): set XDG_CACHE_HOME to a folder that is writable."
        raise DataError(text, path=cache) from error
    return images


def _png(archive: zipfile.ZipFile, name: str, where: str) -> tuple[bytes, str]:
    """Return the bytes of an image file, and its name for errors.

    Files must be stored or compressed by deflate, since the expanded size cannot be bounded for other compressions.
    """
    place, entry = f"{printable(name)} in {where}", archive.getinfo(name)
    plain = entry.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) and not entry.flag_bits & ENCRYPTED
    require_content(plain, place, "an encryption or a rare compression", "a stored or deflated file")
    require_content(entry.file_size <= LARGEST, place, f"{entry.file_size:,} bytes", f"at most {LARGEST:,}")
    with as_data_error(place, "cannot be unpacked"), archive.open(entry) as file:
        return file.read(LARGEST), place  # read() without a number may expand more than the entry's file_size


def _ink(png: bytes, where: str) -> NDArray[np.bool_]:
    """Decode a drawing to (EDGE, EDGE) booleans, True where the image is black."""
    if importlib.util.find_spec("PIL") is None:
        raise DataError(f"Decoding Omniglot needs {missing('Pillow', 'cli')}.")
    from PIL import Image

    with as_data_error(where, "is not a PNG image"), Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        fits = image.size == (EDGE, EDGE)  # the size comes from the header, before any pixel is decoded
        require_content(fits, where, f"{image.size[::-1]} pixels", f"{(EDGE, EDGE)}")
        pixels: NDArray[np.bool_] = np.asarray(image.convert("1"))
    return ~pixels


def shrunk(ink: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Shrink (n, EDGE, EDGE) to (n, SIDE, SIDE): each pixel is 255 times the inked share of its area, rounded."""
    unit = np.gcd(EDGE, SIDE)  # 7: an edge of 420 pieces has 105 large pixels of 4 pieces, or 28 small ones of 15
    pieces = np.arange(EDGE * SIDE // unit)
    overlap = np.zeros((SIDE, EDGE), np.float32)
    np.add.at(overlap, (pieces * unit // EDGE, pieces * unit // SIDE), 1)
    small = overlap @ ink.astype(np.float32) @ overlap.T  # whole numbers up to 15², exact in float32
    area = (EDGE // unit) ** 2
    return ((510 * small.astype(np.int64) + area) // (2 * area)).astype(np.uint8)


CHARACTERS: dict[str, Callable[[Any], Characters]] = {
    "omniglot": read_omniglot,
    "strokes": lambda progress: strokes(),
}
