"""`load_heart`: patients of four hospitals and whether their heart is diseased, one file for each hospital."""

import math
import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbilevel.data import files
from fedbilevel.data.files import SOURCES
from fedbilevel.data.reading import DataError, unknown_name
from fedbilevel.wording import missing

NAME = "heart"
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
    file = next(file for file in SOURCES[NAME].files if file.name == f"processed.{hospital}.data")
    path = files.local(NAME, file.name)  # someone's copy may write missing values otherwise: its patients are counted
    content = files.read_bytes(path) if path else files.read(NAME, file, progress)
    return _parsed(content, str(path or file.name), HOSPITALS[hospital])


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


def _parsed(content: bytes, where: str, known: Counts) -> Patients:
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
