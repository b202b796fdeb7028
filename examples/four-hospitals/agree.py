"""Write what each hospital sends about its columns, and make the list of columns from these four texts.

If the hospitals have machines of their own, each makes its text from its own file, and sends the text in any way.
Everyone who has the four texts gets the same columns.json to the bit, whatever their order.
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
