"""Write a CSV file for each of four hospitals, and one with test patients, from UCI's heart disease data.

The data (Janosi, Steinbrunn, Pfisterer, Detrano, 1988, CC BY 4.0) are downloaded if they are
neither in $FEDBILEVEL_DATA nor in the cache. A
third of each hospital's patients are test patients.
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd

from fedbilevel import data

HERE = Path(__file__).parent
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = "age,sex,cp,trestbps,chol,fbs,restecg,thalach,exang,oldpeak,slope,ca,thal,num"
WORDS = {
    "sex": {0: "f", 1: "m"},
    "slope": {1: "up", 2: "flat", 3: "down"},
    "thal": {3: "normal", 6: "fixed", 7: "reversible"},
}


def source(name: str) -> Path:
    """Return the path of a hospital's file from UCI."""
    data.load_heart(name)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbilevel" / "data"
    places = (Path(os.environ.get("FEDBILEVEL_DATA") or cache), cache)
    return next(file for place in places if (file := place / "heart" / f"processed.{name}.data").is_file())


def main() -> None:
    held_out = []
    for name in HOSPITALS:
        frame = pd.read_csv(source(name), names=COLUMNS.split(","), na_values="?")
        frame["chol"] = frame["chol"].replace(0, np.nan)  # nobody's cholesterol is 0: it was not measured
        for column, words in WORDS.items():
            frame[column] = frame[column].map(words)
        frame["disease"] = (frame.pop("num") > 0).astype(int)
        own = frame.sample(frac=2 / 3, random_state=0)
        held_out.append(frame.drop(own.index).assign(site=name))
        write(HERE / "data" / f"{name}.csv", own)
    write(HERE / "data" / "test.csv", pd.concat(held_out))


def write(path: Path, frame: pd.DataFrame) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path, index=False, na_rep="?")
    print(path.relative_to(HERE), len(frame))


if __name__ == "__main__":
    main()
