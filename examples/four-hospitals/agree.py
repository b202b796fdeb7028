"""What each hospital tells of its columns, from its own folder, and what comes of the four texts together.

Between machines each hospital does the first part for itself, and sends its told.json by any channel; whoever has the
four, in any order, gets the same columns.json, to the bit.
"""

from pathlib import Path

from problem import CATEGORICAL, HOSPITALS, read

from fedbilevel.estimators import Preparer

DATA = Path(__file__).parent / "data"


def main() -> None:
    told = [DATA / name / "told.json" for name in HOSPITALS]
    for file in told:
        patients, _ = read(file.parent / "patients.csv")
        Preparer(categorical=CATEGORICAL).fit(patients).save(file)
        print(file.relative_to(DATA), file.read_text(), sep="\n")  # to be read before it is sent
    Preparer.load(*told).save(DATA / "columns.json")
    print("columns.json", (DATA / "columns.json").read_text(), sep="\n")


if __name__ == "__main__":
    main()
