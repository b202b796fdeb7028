"""Write files like those of the four hospitals, with patients that are made up, and by default with fewer of them."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from fedbilevel.data import loaders

# the numbers of complete rows and of diseased patients among them
SIZES = {"cleveland": (40, 18), "hungarian": (30, 11), "switzerland": (16, 15), "va": (24, 17)}
MISSING = {"cleveland": "?", "hungarian": "NaN", "switzerland": "?", "va": "NaN"}
INCOMPLETE = 2  # the number of patients with missing values, at the end of each hospital's file
FEWER = {name: loaders.Counts(count + INCOMPLETE, count, diseased) for name, (count, diseased) in SIZES.items()}


def lines(hospital: str, known: loaders.Counts | None = None) -> list[str]:
    """Return the lines of a hospital's file.

    Diseased patients are older, more often of sex 1, and more often have chest pain of type 4. The slope is missing in
    all lines, as it is in most lines of the real files.
    """
    rng = np.random.default_rng(sorted(SIZES).index(hospital))
    patients, count, diseased = known or FEWER[hospital]
    sick = rng.permutation(np.arange(count) < diseased).tolist() + [True] * (patients - count)
    out = []
    for number, ill in enumerate(sick):
        age, pressure, rate = rng.normal([50 + 8 * ill, 130, 150 - 20 * ill], [8, 15, 20]).round()
        other = MISSING[hospital] if number >= count else f"{rng.normal(230, 40):.0f}"
        sex, pain, ecg = rng.random() < 0.5 + 0.3 * ill, 4 if rng.random() < 0.5 * ill else number % 4 + 1, number % 3
        angina, peak = rng.random() < 0.2 + 0.5 * ill, rng.gamma(1 + ill)
        kept = f"{age},{sex:d},{pain},{pressure},{other},{number % 7 == 0:d},{ecg},{rate},{angina:d},{peak:.1f}"
        out.append(f"{kept},{MISSING[hospital]},{number % 4},3,{rng.integers(1, 5) if ill else 0}")
    return out


def write(folder: Path, patch: pytest.MonkeyPatch, counts: Mapping[str, loaders.Counts] = FEWER) -> None:
    """Write the four files into FOLDER/heart, and let the loader search FOLDER and expect the counts of these files."""
    (folder / "heart").mkdir()
    for hospital, known in counts.items():
        text = "\n".join(lines(hospital, known)) + "\n"
        (folder / "heart" / f"processed.{hospital}.data").write_text(text)
        patch.setitem(loaders.HOSPITALS, hospital, known)
    patch.setenv("FEDBILEVEL_DATA", str(folder))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
