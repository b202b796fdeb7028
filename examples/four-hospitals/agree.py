"""What each hospital tells of its columns, from its own file, and what comes of the four texts together.

Between machines each hospital does the first part for itself, and sends its text by any channel; whoever has the four,
in any order, gets the same columns.json, to the bit.
"""

import tomllib
from pathlib import Path

import pandas as pd

from fedbilevel.estimators import Preparer

HERE = Path(__file__).parent
TASK = tomllib.loads((HERE / "spec.toml").read_text())["task"]


def main() -> None:
    told = [HERE / "data" / f"{name}.json" for name in TASK["sites"]]
    for file in told:
        patients = pd.read_csv(file.with_suffix(".csv"), na_values="?")
        Preparer(categorical=[*TASK["categorical"], TASK["target"]]).fit(patients).save(file)
        print(file.name, file.read_text(), sep="\n")  # to be read before it is sent
    agreed = HERE / "data" / "columns.json"
    Preparer.load(*told).save(agreed)
    print(agreed.name, agreed.read_text(), sep="\n")


if __name__ == "__main__":
    main()
