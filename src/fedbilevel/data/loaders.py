"""Labelled data sets by their names: `load` for images, `load_table` for rows of numbers, `load_heart` for patients of
four hospitals, `standardise` for pixels; the formats of their files."""

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
from fedbilevel.data.files import SOURCES, DataError, Expanded, as_data_error, unknown_name
from fedbilevel.wording import missing

Images = NDArray[Any]
Labels = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Hold images and labels, in the order and the split that their makers published.

    train_images, test_images: (n, height, width) or (n, height, width, channel); uint8 in 0..255, or float in [0, 1].
    train_labels, test_labels: (n,) int32 in 0..classes - 1. mean, std: of the training pixels scaled to [0, 1], a
    number per channel, or a single number where there is no axis of channels.
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
        """Return this data set with both image arrays as `standardise(images, self.mean, self.std)`, float32."""
        return replace(
            self,
            train_images=standardise(self.train_images, self.mean, self.std),
            test_images=standardise(self.test_images, self.mean, self.std),
        )


def standardise(images: Images, mean: float | Sequence[float], std: float | Sequence[float]) -> NDArray[np.float32]:
    """Compute (pixel - mean) / std, per channel, with the pixels of uint8 images first divided by 255.

    images: (n, height, width[, channel]), uint8 in 0..255 or float in [0, 1]. mean, std: a single number, or a number
    per channel (the last axis), in units of the [0, 1] scale. Returns float32 of the same shape. DataError if the
    shapes do not fit or an std is not positive.
    """
    centre, scale = np.atleast_1d(np.asarray(mean, np.float32)), np.atleast_1d(np.asarray(std, np.float32))
    if centre.shape != scale.shape or centre.ndim != 1 or centre.size not in (1, images.shape[-1]):
        raise DataError(
            f"mean and std have shapes {centre.shape} and {scale.shape}; allowed: a number, or a number for each "
            f"channel of images of shape {images.shape}."
        )
    if not np.all(scale > 0):
        raise DataError(f"std is {std}; every entry must be above zero.")
    full = 255 if images.dtype == np.uint8 else 1
    out: NDArray[np.float32] = np.divide(images, full, dtype=np.float32, casting="same_kind", order="C")
    pixels = out.reshape(len(out), math.prod(out.shape[1:]))  # a view, whose long rows are quick to go through
    pixels -= np.resize(centre, pixels.shape[1])
    pixels /= np.resize(scale, pixels.shape[1])
    return out


# Mean and standard deviation of the training images of `digits()` (all pixels together), as for MNIST; the
# tests derive them again.
DIGITS_MEAN, DIGITS_STD = 0.3051, 0.3762
DIGITS_FILE = "datasets/data/digits.csv.gz"  # inside scikit-learn
CIFAR_REPACKED = "cifar-10-binary.tar.xz"


def load(name: str, *, progress: files.Progress | None = None) -> Dataset:
    """Load the data set called `name`: "digits", "mnist", "fashion-mnist" or "cifar-10".

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
    """Load scikit-learn's 1,797 handwritten digits, (n, 8, 8) float32 in [0, 1].

    The set has no published split: in each class here, every fifth image in scikit-learn's order is a test
    image. No random number is drawn, so the split is always the same; the same 13 writers are on both sides.
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
    """Read pixels (1797, 64) and labels (1797,) from scikit-learn's file: importing scikit-learn would take seconds."""
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
    """Load MNIST or Fashion-MNIST: (n, 28, 28) uint8, 60,000 for training and 10,000 for testing.

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
    """Load CIFAR-10 (Krizhevsky 2009): (n, 32, 32, 3) uint8, 50,000 + 10,000.

    From the official `cifar-10-binary.tar.gz`; else from a local `cifar-10-binary.tar.xz` that someone packed in the
    same layout: as it has no published checksum, its sizes and class counts are checked.
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
CIFAR_LIMIT = 200_000_000  # bytes; expanded, the official archive has 184 MB
IDX_LIMIT = 100_000_000  # bytes; the longest of the published files has 47 MB


def parse_idx(content: bytes, ndim: int, where: str | Path) -> NDArray[np.uint8]:
    """Parse the array in a gzipped IDX file of unsigned bytes.

    IDX: two zero bytes, the type (8: unsigned byte), the number of axes, each length as a big-endian int32,
    the entries. ndim: the number of axes it must have. where: the name of the file in errors. Returns uint8, read-only.
    DataError if it cannot be unpacked, or if its magic, axes or length are wrong.
    """
    with as_data_error(where, "is not a whole gzip file"):
        raw = Expanded(content, "gzip", IDX_LIMIT, where).read()
    magic, start = bytes((0, 0, 8, ndim)), 4 + 4 * ndim
    if raw[:4] != magic or len(raw) < start:
        raise DataError(
            f"{where} starts with {raw[:4].hex(' ')}, expected {magic.hex(' ')} (IDX, {ndim} axes of bytes)."
        )
    shape = struct.unpack(f">{ndim}i", raw[4:start])
    expected = math.prod(shape)
    if min(shape) < 0 or len(raw) - start != expected:
        raise DataError(f"{where} holds {len(raw) - start:,} entries, expected {expected:,} for its shape {shape}.")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def parse_cifar(
    content: bytes, where: str | Path
) -> tuple[tuple[NDArray[np.uint8], NDArray[np.int32]], tuple[NDArray[np.uint8], NDArray[np.int32]]]:
    """Parse (images, labels) of the 50,000 training and of the 10,000 test records of a CIFAR-10 binary archive.

    Images (n, 32, 32, 3) uint8, labels (n,) int32. Compressed by gzip or xz. Nothing is unpacked to disk. DataError
    if the archive is damaged or expands to more than CIFAR_LIMIT bytes, a batch has another size, or the classes
    are not equally frequent.
    """
    form = "gzip" if content[:2] == b"\x1f\x8b" else "xz"
    with (
        as_data_error(where, "is not a whole tar archive"),
        tarfile.open(fileobj=Expanded(content, form, CIFAR_LIMIT, where), mode="r|") as archive,  # type: ignore[call-overload]
    ):
        batches = _batches(archive, where)
    train, test = ([batches[name] for name in names] for names in (CIFAR_TRAIN, CIFAR_TEST))
    return _records(train, where), _records(test, where)


def _batches(archive: tarfile.TarFile, where: str | Path) -> dict[str, bytes]:
    # One pass in file order: asking for members by name would unpack a compressed archive once per member.
    batches = {}
    for member in archive:
        folder, _, name = member.name.rpartition("/")
        if folder != "cifar-10-batches-bin" or name not in CIFAR_TRAIN + CIFAR_TEST:
            continue
        stream = archive.extractfile(member) if member.size == BATCH * RECORD else None
        if stream is None:
            raise DataError(f"{where}: {name} has {member.size:,} bytes, expected {BATCH * RECORD:,}.")
        batches[name] = stream.read()
    lacking = set(CIFAR_TRAIN + CIFAR_TEST) - set(batches)
    if lacking:
        raise DataError(f"{where} lacks {', '.join(sorted(lacking))} in cifar-10-batches-bin.")
    return batches


def _records(batches: list[bytes], where: str | Path) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    records = np.frombuffer(b"".join(batches), np.uint8).reshape(-1, RECORD)
    labels = records[:, 0].astype(np.int32)
    # The published sets are exactly balanced: a re-packed archive without a known checksum must be too.
    counts = np.bincount(labels, minlength=10)
    if np.any(counts != len(labels) // 10):
        raise DataError(
            f"{where} has {counts.tolist()} images per class, expected {len(labels) // 10:,} of each of 10."
        )
    planes = records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


LOADERS: dict[str, Callable[[str, files.Progress | None], Dataset]] = {
    "cifar-10": cifar,
    "digits": digits,
    "fashion-mnist": idx,
    "mnist": idx,
}


COVERTYPE_COLUMNS = 55  # 54 features and the label
COVERTYPE_LIMIT = 100_000_000  # bytes; expanded, all of its rows have 75 MB
LIBSVM_PAIR = 32  # characters of a pair index:value, at most; the published files have up to 12
LARGEST = float(np.finfo(np.float32).max)
Rows = tuple[NDArray[np.float32], NDArray[np.int32]]


class Published(NamedTuple):
    """Give the sizes that a set of libsvm's collection must have; these sets have no published checksums."""

    features: int
    train: tuple[int, int]  # rows, and those of them that are positive
    test: tuple[int, int]


LIBSVM = {
    "a9a": Published(123, (32_561, 7_841), (16_281, 3_846)),
    "ijcnn1": Published(22, (49_990, 4_853), (91_701, 8_712)),
}


def load_table(name: str) -> Dataset:
    """Load the table called `name`: "covtype" (7 classes), "a9a" or "ijcnn1" (2 classes each).

    Its rows stand in the place of images: `train_images` is (n, features) float32, as published; `mean` and `std` have
    an entry per feature, of the training rows (std 1 for a feature that never varies), so that `standardised()` works
    as for images. Nothing is downloaded: files are looked for in `$FEDBILEVEL_DATA` and in the cache.

    DataError if the name is unknown, or a file is missing or has other content than it should.
    """
    if name not in TABLES:
        raise unknown_name("table", name, TABLES)
    train, test, classes = TABLES[name](name)
    rows = train[0].astype(np.float64)
    std = rows.std(0)
    spread = np.where(std > 0, std, 1)
    return Dataset(name, *train, *test, classes, tuple(rows.mean(0).tolist()), tuple(spread.tolist()))


def covtype(name: str) -> tuple[Rows, Rows, int]:
    """Load Covertype (Blackard, Dean 1998): 54 features of a patch of forest, and which of 7 trees grows on it.

    From `covtype.data.gz`, 581,012 rows, or from `covtype.subset.data.gz`, some of these rows in any order. There is no
    published split into halves that are alike: every fifth row is a test row.
    """
    path = _found(name, "covtype.data.gz", "covtype.subset.data.gz")
    with as_data_error(path, "is not a gzipped table of integers, separated by commas"):
        text = Expanded(files.read_bytes(path), "gzip", COVERTYPE_LIMIT, path).read()
        table = np.loadtxt(io.BytesIO(text), np.int32, delimiter=",", ndmin=2, comments=None)
    label = table[:, -1] - 1
    if table.shape[1] != COVERTYPE_COLUMNS or set(np.unique(label)) != set(range(7)):
        raise DataError(f"{path} has {table.shape[1]} columns; expected {COVERTYPE_COLUMNS}, the last a class, 1 to 7.")
    rows = table[:, :-1].astype(np.float32)
    test = np.arange(len(label)) % 5 == 4
    return (rows[~test], label[~test]), (rows[test], label[test]), 7


def libsvm(name: str) -> tuple[Rows, Rows, int]:
    """Load a9a (the census data Adult, in Platt's encoding) or ijcnn1 (Prokhorov 2001), with their published split.

    From `libsvm/<name>.bz2` and `libsvm/<name>.t.bz2`. The positive class is 1.
    """
    known = LIBSVM[name]
    train, test = (
        parse_libsvm(_found("libsvm", f"{name}{end}.bz2"), known.features, *counts)
        for end, counts in (("", known.train), (".t", known.test))
    )
    return train, test, 2


def parse_libsvm(path: Path, features: int, count: int, positive: int) -> Rows:
    """Parse rows (count, features) and labels 0 or 1 of a bz2 file in libsvm's format, with scikit-learn.

    DataError where scikit-learn is missing or refuses the file, a label is not 1 or -1, a value is not finite in
    float32, or the number of rows or of positive rows is not the expected number.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise DataError(f"Reading libsvm's format needs {missing('scikit-learn', 'cli')}.")
    from sklearn.datasets import load_svmlight_file

    limit = count * (features + 1) * LIBSVM_PAIR
    with as_data_error(path, "is not a bz2 file in libsvm's format"):
        text = Expanded(files.read_bytes(path), "bz2", limit, path).read()
        ends = text.count(b"\n")
        if ends > 2 * count:  # read as rows, lines of a byte would take a hundred times their size
            raise DataError(f"{path} has {ends:,} lines; expected {count:,}.")
        table, label = load_svmlight_file(io.BytesIO(text), n_features=features, zero_based=False)
    found = table.shape[0], int((label == 1).sum()), int((label == -1).sum())
    if found != (count, positive, count - positive):
        raise DataError(
            f"{path} has {found[0]:,} rows, of them {found[1]:,} with the label 1 and {found[2]:,} with -1; expected "
            f"{count:,}, {positive:,} and {count - positive:,}."
        )
    rows = table.toarray()
    if not (np.abs(rows) <= LARGEST).all():
        raise DataError(f"{path} has a value that is not finite in float32.")
    return rows.astype(np.float32), (label > 0).astype(np.int32)


def _found(folder: str, *names: str) -> Path:
    """Find the first of these files that exists. DataError where none does."""
    paths = [path for name in names if (path := files.local(folder, name))]
    if not paths:
        places = " or ".join(str(place) for place in files.folders(folder))
        raise DataError(
            f"{' or '.join(names)} is not in {places}. Nothing is downloaded: put it there, or at "
            f"FOLDER/{folder}/{names[0]}, and set FEDBILEVEL_DATA=FOLDER."
        )
    return paths[0]


TABLES: dict[str, Callable[[str], tuple[Rows, Rows, int]]] = {"a9a": libsvm, "covtype": covtype, "ijcnn1": libsvm}


COLUMNS = 14  # age, sex, cp, trestbps, chol, fbs, restecg, thalach, exang, oldpeak, slope, ca, thal, num
KEPT, CHEST_PAIN, ECG, DISEASE = [0, 1, 3, 4, 5, 7, 8, 9], 2, 6, 13
NUMBER = re.compile(rb"\s*(\?|nan|[+-]?(\d+(\.\d*)?|\.\d+))\s*", re.IGNORECASE)
TRAINING = 0.66  # of each hospital's patients
FLAMBY = 43  # random_state of the split that FLamby publishes


class Patients(NamedTuple):
    """Hold the patients of a hospital who miss no kept column, in the order of its file."""

    rows: NDArray[np.float32]  # (n, 13), as published: KEPT, cp_2, cp_3, cp_4, restecg_1, restecg_2
    labels: NDArray[np.int32]  # (n,), 1 where there is a disease


class Counts(NamedTuple):
    """Count what a hospital's file must hold."""

    patients: int
    complete: int  # those of whom no kept column is missing
    diseased: int  # of these


HOSPITALS = {
    "cleveland": Counts(303, 303, 139),
    "hungarian": Counts(294, 261, 98),
    "switzerland": Counts(123, 46, 45),
    "va": Counts(200, 130, 101),
}


def load_heart(hospital: str, *, progress: files.Progress | None = None) -> Patients:
    """Load the patients of "cleveland", "hungarian", "switzerland" or "va" (Long Beach), prepared as FLamby does.

    The columns slope, ca and thal, which three hospitals hardly recorded, are dropped, then rows with a missing value;
    chest pain and ECG become indicators without their first level; the label is num > 0. The file
    `processed.<hospital>.data` is looked for in `$FEDBILEVEL_DATA/heart/`, then in the cache, and else downloaded into
    it; no other hospital's file is touched. Source: Janosi, Steinbrunn, Pfisterer, Detrano, Heart Disease, UCI Machine
    Learning Repository, 1988, CC BY 4.0.

    DataError if the name is unknown, a download fails, or the file does not hold what it should.
    """
    if hospital not in HOSPITALS:
        raise unknown_name("hospital", hospital, HOSPITALS)
    file = next(file for file in SOURCES["heart"].files if file.name == f"processed.{hospital}.data")
    # someone's copy may write missing values otherwise: its patients are counted
    path = files.local("heart", file.name)
    content = files.read_bytes(path) if path else files.read("heart", file, progress)
    return _patients(content, str(path or file.name), HOSPITALS[hospital])


def stratified(labels: NDArray[np.int32], share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw row numbers (chosen, rest): a random `share` of all rows, and as nearly as possible of both classes.

    Neither part is empty. The draw is scikit-learn's train_test_split; with TRAINING and seed = FLAMBY the parts are
    those of FLamby. Classes are not regarded where a class has two members or fewer (of Switzerland's 46 patients only
    1 is healthy).
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


def _patients(content: bytes, where: str, known: Counts) -> Patients:
    lines = [line for line in content.splitlines() if line.strip()]
    if len(lines) != known.patients:
        raise DataError(f"{where} has {len(lines):,} patients; expected {known.patients:,}, a line each.")
    for number, line in enumerate(lines, 1):
        entries = line.split(b",")
        if len(entries) != COLUMNS or not all(map(NUMBER.fullmatch, entries)):
            raise DataError(
                f"{where}, line {number}: expected {COLUMNS} numbers, commas between, ? or NaN for a missing number."
            )
    table = np.array([[math.nan if b"?" in entry else float(entry) for entry in line.split(b",")] for line in lines])
    table = table[~np.isnan(table[:, [*KEPT, CHEST_PAIN, ECG, DISEASE]]).any(1)]
    labels = (table[:, DISEASE] > 0).astype(np.int32)
    found = len(labels), int(labels.sum())
    if found != (known.complete, known.diseased):
        raise DataError(
            f"{where} has {found[0]} patients without a missing value, {found[1]} of them diseased; expected "
            f"{known.complete} and {known.diseased}."
        )
    indicators = [table[:, CHEST_PAIN] == level for level in (2, 3, 4)] + [table[:, ECG] == level for level in (1, 2)]
    return Patients(np.column_stack([table[:, KEPT], *indicators]).astype(np.float32), labels)
