"""Load labelled data sets by name: images by `load`, tables by `load_table`, patients of hospitals by `load_heart`."""

from __future__ import annotations

import importlib.util
import io
import math
import re
import struct
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data import files
from fedbilevel.data.files import SOURCES, DataError, Expanded, as_data_error, require, require_content, unknown_name
from fedbilevel.wording import missing

Images = NDArray[Any]
"""Images, or the rows of a table, along the first axis."""
Labels = NDArray[np.int32]
"""The class of each image, or of each row of a table: a number from 0 on."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels for training and for testing, in their published order.

    Args:
        name: the name of the data set.
        train_images, test_images: arrays of shape (n, height, width) or (n, height, width, channel), uint8 from 0 to
            255 or floats in [0, 1]. For a table, the shape is (n, features).
        train_labels, test_labels: the class of each image, int32 from 0 to classes − 1.
        classes: the number of classes.
        mean, std: the mean and the standard deviation of the training pixels, scaled to [0, 1]: a number per channel,
            or one number if images have no axis of channels. For a table, a number per feature.
    """

    name: str
    train_images: Images
    train_labels: Labels
    test_images: Images
    test_labels: Labels
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def standardised(self) -> Dataset:
        """Return this data set with standardised images, float32, by its own mean and standard deviation."""
        return replace(
            self,
            train_images=standardise(self.train_images, self.mean, self.std),
            test_images=standardise(self.test_images, self.mean, self.std),
        )


def standardise(images: Images, mean: float | Sequence[float], std: float | Sequence[float]) -> NDArray[np.float32]:
    """Return (pixel − mean)/std as float32 of the same shape. The pixels of uint8 images are divided by 255 first.

    Args:
        images: an array of shape (n, height, width) or (n, height, width, channel), uint8 from 0 to 255 or floats in
            [0, 1].
        mean, std: the mean and the standard deviation of pixels scaled to [0, 1]: a number, or a number for each entry
            of the last axis.

    Raises:
        DataError: the shapes do not fit, or an std is not positive.
    """
    centre, scale = np.atleast_1d(np.asarray(mean, np.float32)), np.atleast_1d(np.asarray(std, np.float32))
    fits = centre.shape == scale.shape and centre.ndim == 1 and centre.size in (1, images.shape[-1])
    allowed = f"a number, or a number for each channel of images of shape {images.shape}"
    require(fits, "the shapes of mean and std", (centre.shape, scale.shape), allowed)
    require(bool(np.all(scale > 0)), "std", std, "above zero in every entry")
    full = 255 if images.dtype == np.uint8 else 1
    out: NDArray[np.float32] = np.divide(images, full, dtype=np.float32, casting="same_kind", order="C")
    pixels = out.reshape(len(out), math.prod(out.shape[1:]))  # a view with long rows, for which NumPy is fast
    pixels -= np.resize(centre, pixels.shape[1])
    pixels /= np.resize(scale, pixels.shape[1])
    return out


# The mean and standard deviation of all pixels of the training images of `digits()`; tests compute them again.
DIGITS_MEAN, DIGITS_STD = 0.3051, 0.3762
DIGITS_FILE = "datasets/data/digits.csv.gz"  # the path inside the package scikit-learn
CIFAR_REPACKED = "cifar-10-binary.tar.xz"


def load(name: str, *, progress: files.Progress | None = None) -> Dataset:
    """Load the set of images called `name`: "digits", "mnist", "fashion-mnist" or "cifar-10".

    "digits" comes with scikit-learn and needs no file. The files of the other sets are looked for in
    `$FEDBILEVEL_DATA/<name>/`, then in the cache (`$XDG_CACHE_HOME/fedbilevel/data/<name>/`, by default below
    `~/.cache`). A missing file is downloaded into the cache. Every load checks sizes and SHA-256 checksums.

    Args:
        progress: called with (bytes done, bytes in all) during each download; None: a bar on standard error.

    Raises:
        DataError: the name is unknown, a file is damaged, a download fails, or scikit-learn is missing.
    """
    if name in TABLES:
        raise DataError(
            f'"{name}" is a table and not a set of images. The task regularization uses tables; in Python, load them '
            f"by load_table. Sets of images: {', '.join(sorted(LOADERS))}.",
            path="data set",
            got=name,
            allowed=sorted(LOADERS),
        )
    if name not in LOADERS:
        raise unknown_name("data set", name, LOADERS)
    return LOADERS[name](name, progress)


def digits(name: str = "digits", progress: files.Progress | None = None) -> Dataset:
    """Load scikit-learn's 1,797 handwritten digits: images of 8×8 float32 numbers in [0, 1].

    The set has no published split into training and test images. Here, every fifth image of each class in
    scikit-learn's order is a test image, so the split is always the same. The same 13 people wrote the training and the
    test images. Source: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
    Repository, 1998.
    """
    pixels, target = _digits_table()
    images = (pixels / 16).astype(np.float32).reshape(-1, 8, 8)  # pixels are whole numbers from 0 to 16
    labels = target.astype(np.int32)
    test = np.zeros(len(labels), bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return Dataset(name, images[~test], labels[~test], images[test], labels[test], 10, (DIGITS_MEAN,), (DIGITS_STD,))


def _digits_table() -> tuple[np.ndarray, np.ndarray]:
    """Read 1,797 rows of 64 pixels, and 1,797 labels, from scikit-learn's file.

    scikit-learn itself is not imported, since this would take seconds.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None:
        raise DataError(f'The data set "digits" needs {missing("scikit-learn", "cli")}.')
    for folder in spec.submodule_search_locations or []:
        if (file := Path(folder, DIGITS_FILE)).is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits  # for versions of scikit-learn that have the file elsewhere

    bunch = load_digits()
    return bunch.data, bunch.target


def idx(name: str, progress: files.Progress | None) -> Dataset:
    """Load MNIST or Fashion-MNIST: 60,000 images for training and 10,000 for testing, of 28×28 uint8 numbers.

    Sources: LeCun, Cortes, Burges 1998; Xiao, Rasul, Vollgraf, arXiv:1708.07747.
    """
    source = SOURCES[name]
    images, labels, test_images, test_labels = (
        parse_idx(files.read(name, file, progress), ndim, f"{name}/{file.name}")
        for file, ndim in zip(source.files, (3, 1, 3, 1), strict=True)
    )
    train, test = (images, labels.astype(np.int32)), (test_images, test_labels.astype(np.int32))
    return Dataset(name, *train, *test, 10, source.mean, source.std)


def cifar(name: str, progress: files.Progress | None) -> Dataset:
    """Load CIFAR-10: 50,000 images for training and 10,000 for testing, of 32×32×3 uint8 numbers.

    The file is the official `cifar-10-binary.tar.gz`, or a local `cifar-10-binary.tar.xz` with the same files inside.
    The local file has no published checksum, so sizes and class counts are checked instead. Source: Krizhevsky 2009.
    """
    source = SOURCES[name]
    (official,) = source.files
    repacked = None if files.local(name, official.name) else files.local(name, CIFAR_REPACKED)
    content = files.read_bytes(repacked) if repacked else files.read(name, official, progress)
    train, test = parse_cifar(content, repacked or f"{name}/{official.name}")
    return Dataset(name, *train, *test, 10, source.mean, source.std)


BATCH, SIDE, CHANNELS = 10_000, 32, 3
RECORD = 1 + CHANNELS * SIDE * SIDE  # one label byte, then the planes R, G, B
CIFAR_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR_TEST = ("test_batch.bin",)
CIFAR_LIMIT = 200_000_000  # the largest expanded size in bytes; the official archive expands to 184 MB
IDX_LIMIT = 100_000_000  # the largest expanded size in bytes; the longest published file expands to 47 MB


def parse_idx(content: bytes, ndim: int, where: str | Path) -> NDArray[np.uint8]:
    """Parse a gzipped IDX file of unsigned bytes to a read-only uint8 array.

    An IDX file has two zero bytes, the type of entries (8 for unsigned bytes), the number of axes, the length of each
    axis as a big-endian int32, and the entries.

    Args:
        content: the bytes of the file.
        ndim: the number of axes that the array must have.
        where: the name of the file in errors.

    Raises:
        DataError: the file cannot be unpacked, or its first bytes, axes or length are wrong.
    """
    with as_data_error(where, "is not a complete gzip file"):
        raw = Expanded(content, "gzip", IDX_LIMIT, where).read()
    magic, start = bytes((0, 0, 8, ndim)), 4 + 4 * ndim
    first, idx = f"the first bytes {raw[:4].hex(' ')}", f"{magic.hex(' ')} (IDX, bytes in {ndim} axes)"
    require_content(raw[:4] == magic and len(raw) >= start, where, first, idx)
    shape = struct.unpack(f">{ndim}i", raw[4:start])
    expected = math.prod(shape)
    fits = min(shape) >= 0 and len(raw) - start == expected
    require_content(fits, where, f"{len(raw) - start:,} entries", f"{expected:,} for its shape {shape}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def parse_cifar(
    content: bytes, where: str | Path
) -> tuple[tuple[NDArray[np.uint8], NDArray[np.int32]], tuple[NDArray[np.uint8], NDArray[np.int32]]]:
    """Parse a CIFAR-10 binary archive to (images, labels) of 50,000 training and of 10,000 test records.

    Images are uint8 of shape (n, 32, 32, 3), and labels int32 of shape (n,). Nothing is unpacked to disk.

    Args:
        content: the bytes of a tar archive, compressed by gzip or xz.
        where: the name of the file in errors.

    Raises:
        DataError: the archive is damaged or expands to more than CIFAR_LIMIT bytes, a batch is missing or has a wrong
            size, or the classes are not equally frequent.
    """
    form = "gzip" if content[:2] == b"\x1f\x8b" else "xz"
    with (
        as_data_error(where, "is not a complete tar archive"),
        tarfile.open(fileobj=Expanded(content, form, CIFAR_LIMIT, where), mode="r|") as archive,  # type: ignore[call-overload]
    ):
        batches = _batches(archive, where)
    train, test = ([batches[name] for name in names] for names in (CIFAR_TRAIN, CIFAR_TEST))
    return _records(train, where), _records(test, where)


def _batches(archive: tarfile.TarFile, where: str | Path) -> dict[str, bytes]:
    # One pass reads all members in file order; reading members by name would expand the archive once per member.
    batches = {}
    for member in archive:
        folder, _, name = member.name.rpartition("/")
        if folder != "cifar-10-batches-bin" or name not in CIFAR_TRAIN + CIFAR_TEST:
            continue
        stream = archive.extractfile(member) if member.size == BATCH * RECORD else None
        require_content(stream is not None, f"{where}: {name}", f"{member.size:,} bytes", f"{BATCH * RECORD:,}")
        assert stream is not None
        batches[name] = stream.read()
    lacking = ", ".join(sorted(set(CIFAR_TRAIN + CIFAR_TEST) - set(batches)))
    require_content(not lacking, where, f"no {lacking}", "all batches in cifar-10-batches-bin")
    return batches


def _records(batches: list[bytes], where: str | Path) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    records = np.frombuffer(b"".join(batches), np.uint8).reshape(-1, RECORD)
    labels = records[:, 0].astype(np.int32)
    # The published classes are equally frequent. This is checked, since an archive that was packed again has no known
    # checksum.
    counts = np.bincount(labels, minlength=10)
    fits = not np.any(counts != len(labels) // 10)
    found, expected = f"{counts.tolist()} images per class", f"{len(labels) // 10:,} of each of 10 classes"
    require_content(fits, where, found, expected)
    planes = records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


LOADERS: dict[str, Callable[[str, files.Progress | None], Dataset]] = {
    "cifar-10": cifar,
    "digits": digits,
    "fashion-mnist": idx,
    "mnist": idx,
}


COVERTYPE_COLUMNS = 55  # 54 features and the label
COVERTYPE_LIMIT = 100_000_000  # the largest expanded size in bytes; all rows expand to 75 MB
LIBSVM_PAIR = 32  # the largest number of characters of a pair index:value; the published files have up to 12
LARGEST = float(np.finfo(np.float32).max)
Rows = tuple[NDArray[np.float32], NDArray[np.int32]]


class Published(NamedTuple):
    """The published sizes of a data set of libsvm's collection, which are checked in place of a checksum."""

    features: int
    train: tuple[int, int]  # the numbers of rows and of positive rows
    test: tuple[int, int]


LIBSVM = {
    "a9a": Published(123, (32_561, 7_841), (16_281, 3_846)),
    "ijcnn1": Published(22, (49_990, 4_853), (91_701, 8_712)),
}


def load_table(name: str) -> Dataset:
    """Load the table called `name`: "covtype" (7 classes), "a9a" or "ijcnn1" (2 classes each).

    The fields for images contain the rows: `train_images` is a float32 array of shape (n, features), with the published
    values. `mean` and `std` have an entry for each feature, computed from the training rows, and `standardised()` uses
    them. The std of a constant feature is 1. Nothing is downloaded: files are looked for in `$FEDBILEVEL_DATA` and in
    the cache.

    Raises:
        DataError: the name is unknown, a file is missing, or its content is not the published one.
    """
    if name not in TABLES:
        raise unknown_name("table", name, TABLES)
    train, test, classes = TABLES[name](name)
    rows = train[0].astype(np.float64)
    std = rows.std(0)
    spread = np.where(std > 0, std, 1)
    return Dataset(name, *train, *test, classes, tuple(rows.mean(0).tolist()), tuple(spread.tolist()))


def covtype(name: str) -> tuple[Rows, Rows, int]:
    """Load Covertype: 54 features of a patch of forest, and the kind of its trees, one of 7.

    The file is `covtype.data.gz` with 581,012 rows, or `covtype.subset.data.gz` with a subset of them. The published
    split is not random, so every fifth row is a test row instead. Source: Blackard, Dean 1998.
    """
    path = _first_existing(name, "covtype.data.gz", "covtype.subset.data.gz")
    with as_data_error(path, "is not a gzipped table of integers, separated by commas"):
        text = Expanded(files.read_bytes(path), "gzip", COVERTYPE_LIMIT, path).read()
        table = np.loadtxt(io.BytesIO(text), np.int32, delimiter=",", ndmin=2, comments=None)
    label = table[:, -1] - 1
    fits = table.shape[1] == COVERTYPE_COLUMNS and set(np.unique(label)) == set(range(7))
    expected = f"{COVERTYPE_COLUMNS}, with the classes 1 to 7 in the last"
    require_content(fits, path, f"{table.shape[1]} columns", expected)
    rows = table[:, :-1].astype(np.float32)
    test = np.arange(len(label)) % 5 == 4
    return (rows[~test], label[~test]), (rows[test], label[test]), 7


def libsvm(name: str) -> tuple[Rows, Rows, int]:
    """Load a9a (the census data Adult, in Platt's encoding) or ijcnn1 (Prokhorov 2001), with their published split.

    The files are `libsvm/<name>.bz2` for training and `libsvm/<name>.t.bz2` for testing. The positive class is 1, and
    the other class is 0.
    """
    published = LIBSVM[name]
    train, test = (
        parse_libsvm(_first_existing("libsvm", f"{name}{end}.bz2"), published.features, *counts)
        for end, counts in (("", published.train), (".t", published.test))
    )
    return train, test, 2


def parse_libsvm(path: Path, features: int, count: int, positive: int) -> Rows:
    """Parse rows (count, features) and labels 0 or 1 from a bz2 file in libsvm's format.

    Args:
        path: the file.
        features: the number of features.
        count: the number of rows that the file must have.
        positive: the number of positive rows that it must have.

    Raises:
        DataError: scikit-learn is missing or refuses the file, a label is not 1 or -1, a value is not finite in
            float32, or the number of rows or of positive rows is wrong.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise DataError(f"Reading libsvm's format needs {missing('scikit-learn', 'cli')}.")
    from sklearn.datasets import load_svmlight_file

    limit = count * (features + 1) * LIBSVM_PAIR
    with as_data_error(path, "is not a bz2 file in libsvm's format"):
        text = Expanded(files.read_bytes(path), "bz2", limit, path).read()
        ends = text.count(b"\n")
        # if lines are very short, parsed rows would take a hundred times the size of the file
        require_content(ends <= 2 * count, path, f"{ends:,} lines", f"{count:,}")
        table, label = load_svmlight_file(io.BytesIO(text), n_features=features, zero_based=False)
    counts = table.shape[0], int((label == 1).sum()), int((label == -1).sum())
    found = f"{counts[0]:,} rows, {counts[1]:,} with the label 1 and {counts[2]:,} with the label -1"
    expected = f"{count:,}, {positive:,} and {count - positive:,}"
    require_content(counts == (count, positive, count - positive), path, found, expected)
    rows = table.toarray()
    finite = bool((np.abs(rows) <= LARGEST).all())
    require_content(finite, path, "a value that is not finite in float32", "finite numbers")
    return rows.astype(np.float32), (label > 0).astype(np.int32)


def _first_existing(folder: str, *names: str) -> Path:
    """Return the first of these files that exists; raise DataError if none exists."""
    paths = [path for name in names if (path := files.local(folder, name))]
    if not paths:
        places = " or ".join(str(place) for place in files.folders(folder))
        raise DataError(
            f"{' or '.join(names)} is not in {places}, and is not downloaded. Put the file there; or put it at "
            f"FOLDER/{folder}/{names[0]}, and set FEDBILEVEL_DATA=FOLDER.",
            path=names[0],
        )
    return paths[0]


TABLES: dict[str, Callable[[str], tuple[Rows, Rows, int]]] = {"a9a": libsvm, "covtype": covtype, "ijcnn1": libsvm}


COLUMNS = 14  # age, sex, cp, trestbps, chol, fbs, restecg, thalach, exang, oldpeak, slope, ca, thal, num
KEPT, CHEST_PAIN, ECG, DISEASE = [0, 1, 3, 4, 5, 7, 8, 9], 2, 6, 13
NUMBER = re.compile(rb"\s*(\?|nan|[+-]?(\d+(\.\d*)?|\.\d+))\s*", re.IGNORECASE)
TRAINING = 0.66  # the share of each hospital's patients that are training patients
FLAMBY = 43  # the random_state of the split that FLamby publishes


class Patients(NamedTuple):
    """The patients of a hospital who have no missing values in the used columns, in the order of the file."""

    rows: NDArray[np.float32]  # 13 columns: those in KEPT as published, then cp_2, cp_3, cp_4, restecg_1, restecg_2
    labels: NDArray[np.int32]  # 1 for a patient with heart disease, else 0


class Counts(NamedTuple):
    """The numbers of patients that the file of a hospital must have."""

    patients: int
    complete: int  # patients without missing values in the used columns
    diseased: int  # complete patients with heart disease


HOSPITALS = {
    "cleveland": Counts(303, 303, 139),
    "hungarian": Counts(294, 261, 98),
    "switzerland": Counts(123, 46, 45),
    "va": Counts(200, 130, 101),
}


def load_heart(hospital: str, *, progress: files.Progress | None = None) -> Patients:
    """Load the patients of "cleveland", "hungarian", "switzerland" or "va" (Long Beach), prepared as in FLamby.

    The columns slope, ca and thal are dropped, because three hospitals hardly recorded them. Then rows with a missing
    value are dropped. Chest pain and ECG become indicators of all levels but the first. The label is 1 if num > 0.

    The file `processed.<hospital>.data` is looked for in `$FEDBILEVEL_DATA/heart/`, then in the cache, and otherwise
    downloaded into the cache. Files of other hospitals are not read. Source: Janosi, Steinbrunn, Pfisterer, Detrano,
    "Heart Disease", UCI Machine Learning Repository, 1988, CC BY 4.0.

    Args:
        progress: called with (bytes done, bytes in all) during a download; None: a bar on standard error.

    Raises:
        DataError: the name is unknown, a download fails, or the content of the file is not as published.
    """
    if hospital not in HOSPITALS:
        raise unknown_name("hospital", hospital, HOSPITALS)
    file = next(file for file in SOURCES["heart"].files if file.name == f"processed.{hospital}.data")
    # a local copy may write missing values differently, so patients are counted in place of a checksum
    path = files.local("heart", file.name)
    content = files.read_bytes(path) if path else files.read("heart", file, progress)
    return _patients(content, str(path or file.name), HOSPITALS[hospital])


def stratified(labels: NDArray[np.int32], share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Divide rows at random into (chosen, rest), with a `share` of each class in `chosen`. Return the rows' numbers.

    Neither part is empty. The draw is scikit-learn's `train_test_split`; with share = TRAINING and seed = FLAMBY it
    gives the parts of FLamby. If a class has two rows or fewer, the division ignores classes: of 46 patients in
    Switzerland only 1 is healthy.

    Args:
        labels: the class of each row, 0 or 1.
    """
    try:
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise DataError(f"Dividing patients needs {missing('scikit-learn', 'cli')}.") from error
    count = len(labels)
    size = min(max(int(share * count), 1), count - 1)
    both = np.bincount(labels, minlength=2).min() > 2 and min(size, count - size) > 1
    sizes = {"train_size": size, "test_size": count - size, "random_state": seed}
    chosen, rest = train_test_split(np.arange(count), **sizes, stratify=labels if both else None)
    return chosen, rest


def _patients(content: bytes, where: str, expected: Counts) -> Patients:
    lines = [line for line in content.splitlines() if line.strip()]
    one_each = f"{expected.patients:,}, one per patient"
    require_content(len(lines) == expected.patients, where, f"{len(lines):,} lines", one_each)
    for number, line in enumerate(lines, 1):
        entries = line.split(b",")
        fits = len(entries) == COLUMNS and all(map(NUMBER.fullmatch, entries))
        numbers = f"{COLUMNS} numbers, separated by commas, with ? or NaN for a missing number"
        require_content(fits, f"{where}, line {number}", "other content", numbers)
    table = np.array([[math.nan if b"?" in entry else float(entry) for entry in line.split(b",")] for line in lines])
    table = table[~np.isnan(table[:, [*KEPT, CHEST_PAIN, ECG, DISEASE]]).any(1)]
    labels = (table[:, DISEASE] > 0).astype(np.int32)
    found = f"{len(labels)} patients without a missing value, {labels.sum()} of them with heart disease"
    fits = (len(labels), int(labels.sum())) == (expected.complete, expected.diseased)
    require_content(fits, where, found, f"{expected.complete} and {expected.diseased}")
    indicators = [table[:, CHEST_PAIN] == level for level in (2, 3, 4)] + [table[:, ECG] == level for level in (1, 2)]
    return Patients(np.column_stack([table[:, KEPT], *indicators]).astype(np.float32), labels)
