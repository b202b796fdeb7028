"""Omniglot: 1,623 characters of 50 alphabets, each drawn once by 20 people.

Brenden M. Lake, Ruslan Salakhutdinov, Joshua B. Tenenbaum. "Human-level concept learning through probabilistic program
induction". Science 350, 2015.
"""

import hashlib
import importlib.util
import io
import zipfile
from itertools import groupby
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data import files
from fedbilevel.data.drawings import SIDE, Drawings
from fedbilevel.data.errors import DataError
from fedbilevel.data.reading import as_data_error, mapped
from fedbilevel.data.sources import SOURCES
from fedbilevel.extras import missing
from fedbilevel.quoting import in_a_line, printable

NAME = "omniglot"
DRAWINGS, EDGE = 20, 105
LARGEST = 100_000  # bytes of an image file; drawings of the published archives have a few hundred
ENCRYPTED = 0x1  # of a zip entry's flags
PUBLISHED = {"images_background.zip": (30, 964), "images_evaluation.zip": (20, 659)}  # alphabets, characters
MEAN, STD = SOURCES[NAME].mean[0], SOURCES[NAME].std[0]


def read(progress: files.Progress | None = None) -> tuple[Drawings, Drawings]:
    """The background set, 964 characters of 30 alphabets, and the evaluation set, 659 of 20: for training and testing.

    Images are averaged over areas from 105×105 down to 28×28. From `images_background.zip` and `images_evaluation.zip`
    below `$FEDBILEVEL_DATA/omniglot` or in the cache, else downloaded. A re-packed archive with the same paths inside
    is accepted too: alphabets, characters and drawings are counted in any. The small images are kept in the cache under
    the checksum of their archive, as decoding takes seconds.
    """
    background, evaluation = (_read(file.name, progress) for file in SOURCES[NAME].files)
    return background, evaluation


def _read(filename: str, progress: files.Progress | None) -> Drawings:
    path = files.local(NAME, filename)
    official = next(file for file in SOURCES[NAME].files if file.name == filename)
    content = files.read_bytes(path) if path else files.read(NAME, official, progress)
    where = str(path or files.folders(NAME)[-1] / filename)
    with as_data_error(where, "is no zip archive, or a damaged one (delete it and fetch it again)"):
        archive = zipfile.ZipFile(io.BytesIO(content))
    names = _names(archive, where, *PUBLISHED[filename])
    images = _kept(archive, names, hashlib.sha256(content).hexdigest(), where)
    alphabets, alphabet = np.unique([PurePosixPath(name).parts[1] for name in names[::DRAWINGS]], return_inverse=True)
    return Drawings(images, alphabet.astype(np.int32), tuple(alphabets.tolist()))


def _names(archive: zipfile.ZipFile, where: str, alphabets: int, characters: int) -> list[str]:
    """The images by alphabet, character and drawing; their paths are SET/ALPHABET/CHARACTER/DRAWING.png."""
    names = sorted(name for name in archive.namelist() if name.endswith(".png") and name.count("/") == 3)
    counts = [len(list(drawings)) for _, drawings in groupby(names, key=lambda name: PurePosixPath(name).parent)]
    found = len({PurePosixPath(name).parts[1] for name in names}), len(counts), {*counts}
    if found != (alphabets, characters, {DRAWINGS}):
        raise DataError(
            f"{where} has {found[1]} characters of {found[0]} alphabets, with {sorted(found[2])} drawings each; "
            f"expected {characters} of {alphabets}, with {DRAWINGS} each."
        )
    return names


def _kept(archive: zipfile.ZipFile, names: list[str], checksum: str, where: str) -> NDArray[np.uint8]:
    """The small images, (characters, DRAWINGS, SIDE, SIDE): from the cache, else decoded and put there."""
    cache = files.folders(NAME)[-1] / f"{checksum}-{SIDE}.npy"
    shape = (len(names) // DRAWINGS, DRAWINGS, SIDE, SIDE)
    if cache.is_file():
        images: NDArray[np.uint8] = mapped(cache, "cannot be read (delete it, and it is made again)")
        if images.shape != shape or images.dtype != np.uint8:
            raise DataError(f"{cache} has {images.dtype} of shape {images.shape}: delete it, and it is made again.")
        return np.array(images)
    images = shrunk(np.stack([_ink(*_png(archive, name, where)) for name in names])).reshape(shape)
    _keep(cache, images)
    return images


def _keep(cache: Path, images: NDArray[np.uint8]) -> None:
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with files.appearing(cache) as part, open(part, "xb") as out:
            np.save(out, images, allow_pickle=False)
    except OSError as error:
        raise DataError(
            f"{cache} cannot be written ({in_a_line(error)}): point XDG_CACHE_HOME to a folder that can."
        ) from error


def _png(archive: zipfile.ZipFile, name: str, where: str) -> tuple[bytes, str]:
    """One image file, and its name for errors. Of the methods of compression, stored and deflated are bounded."""
    place, entry = f"{printable(name)} in {where}", archive.getinfo(name)
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & ENCRYPTED:
        raise DataError(f"{place} is encrypted, or compressed in a rare way; expected one that is stored or deflated.")
    if entry.file_size > LARGEST:
        raise DataError(f"{place} has {entry.file_size:,} bytes; expected at most {LARGEST:,}.")
    with as_data_error(place, "cannot be unpacked"), archive.open(entry) as file:
        return file.read(LARGEST), place  # read() without a number expands more than the entry says


def _ink(png: bytes, where: str) -> NDArray[np.bool_]:
    """(EDGE, EDGE): where a drawing is black."""
    if importlib.util.find_spec("PIL") is None:
        raise DataError(f"Decoding Omniglot needs {missing('Pillow', 'cli')}.")
    from PIL import Image

    with as_data_error(where, "is no PNG image"), Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        if image.size != (EDGE, EDGE):  # known before any pixel is decoded
            raise DataError(f"{where} has {image.size[::-1]} pixels; expected {(EDGE, EDGE)}.")
        pixels: NDArray[np.bool_] = np.asarray(image.convert("1"))
    return ~pixels


def shrunk(ink: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """(n, EDGE, EDGE) → (n, SIDE, SIDE): 255 times the share of its area that is inked, to the nearest."""
    unit = np.gcd(EDGE, SIDE)  # 105 and 28 small edges are both whole numbers of pieces of 1/4 pixel
    pieces = np.arange(EDGE * SIDE // unit)
    overlap = np.zeros((SIDE, EDGE), np.float32)
    np.add.at(overlap, (pieces * unit // EDGE, pieces * unit // SIDE), 1)
    small = overlap @ ink.astype(np.float32) @ overlap.T  # whole numbers up to 15², exact in float32
    area = (EDGE // unit) ** 2
    return ((510 * small.astype(np.int64) + area) // (2 * area)).astype(np.uint8)
