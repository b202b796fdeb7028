"""`load`: a data set by its name."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedbilevel.data import files, formats
from fedbilevel.data.dataset import Dataset
from fedbilevel.data.errors import DataError, unknown_name
from fedbilevel.data.sources import SOURCES
from fedbilevel.data.tables import TABLES
from fedbilevel.extras import missing

# Mean and standard deviation of the training images of `digits()` (all pixels together), as for MNIST; the
# tests derive them again.
DIGITS_MEAN, DIGITS_STD = 0.3051, 0.3762
DIGITS_FILE = "datasets/data/digits.csv.gz"  # inside scikit-learn
CIFAR_REPACKED = "cifar-10-binary.tar.xz"


def load(name: str, *, progress: files.Progress | None = None) -> Dataset:
    """The data set called `name`: "digits", "mnist", "fashion-mnist" or "cifar-10".

    "digits" comes with scikit-learn and needs no file. The files of the others are looked for in
    `$FEDBILEVEL_DATA/<name>/`, then in the cache (`$XDG_CACHE_HOME/fedbilevel/data/<name>/`, by default below
    `~/.cache`); what is in neither is downloaded from its public home into the cache. Sizes and sha256 are
    checked on every load.

    progress: called with (bytes done, bytes in all) during each download; default: a bar on standard error.
    DataError if the name is unknown, a file is damaged, a download fails, or scikit-learn is missing.
    """
    if name in TABLES:
        raise DataError(
            f'"{name}" is a table, not an image set: it is for the task regularization, and in Python for load_table '
            f"(image sets: {', '.join(sorted(LOADERS))})."
        )
    if name not in LOADERS:
        raise unknown_name("data set", name, LOADERS)
    return LOADERS[name](name, progress)


def digits(name: str = "digits", progress: files.Progress | None = None) -> Dataset:
    """scikit-learn's 1,797 handwritten digits, (n, 8, 8) float32 in [0, 1].

    The set has no published split: in each class here, every fifth image in scikit-learn's order is a test
    image. No random numbers, so the same for every version and seed; the same 13 writers are on both sides.
    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998.
    """
    pixels, target = _digits_table()
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)  # pixels count 0..16
    labels = target.astype(np.int32)
    test = np.zeros(len(labels), bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return Dataset(name, images[~test], labels[~test], images[test], labels[test], 10, (DIGITS_MEAN,), (DIGITS_STD,))


def _digits_table() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (1797, 64) and labels (1797,), from scikit-learn's file: importing scikit-learn would take seconds."""
    found = importlib.util.find_spec("sklearn")
    if found is None:
        raise DataError(f'The data set "digits" needs {missing("scikit-learn", "cli")}.')
    for folder in found.submodule_search_locations or []:
        if (file := Path(folder, DIGITS_FILE)).is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits  # a version that keeps the file elsewhere

    bunch = load_digits()
    return bunch.data, bunch.target


def idx(name: str, progress: files.Progress | None) -> Dataset:
    """MNIST or Fashion-MNIST: (n, 28, 28) uint8, 60,000 for training and 10,000 for testing.

    Sources: LeCun, Cortes, Burges 1998; Xiao, Rasul, Vollgraf, arXiv:1708.07747.
    """
    source = SOURCES[name]
    arrays = [
        formats.parse_idx(files.read(name, file, progress), ndim, f"{name}/{file.name}")
        for file, ndim in zip(source.files, (3, 1, 3, 1), strict=True)
    ]
    return Dataset(
        name=name,
        train_images=arrays[0],
        train_labels=arrays[1].astype(np.int32),
        test_images=arrays[2],
        test_labels=arrays[3].astype(np.int32),
        classes=10,
        mean=source.mean,
        std=source.std,
    )


def cifar(name: str, progress: files.Progress | None) -> Dataset:
    """CIFAR-10 (Krizhevsky 2009): (n, 32, 32, 3) uint8, 50,000 + 10,000.

    From the official `cifar-10-binary.tar.gz`; else from a local `cifar-10-binary.tar.xz`, someone's
    re-packing of the same layout, of which sizes and class counts are checked, as it has no published
    checksum.
    """
    source = SOURCES[name]
    (official,) = source.files
    repacked = None if files.local(name, official.name) else files.local(name, CIFAR_REPACKED)
    content = files.read_bytes(repacked) if repacked else files.read(name, official, progress)
    train, test = formats.parse_cifar(content, repacked or f"{name}/{official.name}")
    return Dataset(name, *train, *test, 10, source.mean, source.std)


LOADERS: dict[str, Callable[[str, files.Progress | None], Dataset]] = {
    "cifar-10": cifar,
    "digits": digits,
    "fashion-mnist": idx,
    "mnist": idx,
}
