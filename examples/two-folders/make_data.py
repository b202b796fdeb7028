"""Write CSV files for two hospitals, and a test set, from scikit-learn's diabetes data.

The hospital in the folder north has the younger patients, and the hospital in south the older ones. Source of the data:
Efron et al., Annals of Statistics 32(2), 2004.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_diabetes

HERE = Path(__file__).parent


def main() -> None:
    data = load_diabetes(scaled=True)
    target = (data.target - data.target.mean()) / data.target.std()
    rows = np.column_stack([data.data * np.sqrt(len(target)), target])  # columns of variance 1
    rows = np.random.default_rng(0).permutation(rows)
    rest, test = rows[:360], rows[360:]
    older = rest[:, 0] > np.median(rest[:, 0])
    header = ",".join([*data.feature_names, "progression"])
    for name, part in (("north", rest[~older]), ("south", rest[older])):
        split = len(part) * 2 // 3
        for kind, some in (("train", part[:split]), ("validation", part[split:])):
            write(HERE / "data" / name / f"{kind}.csv", some, header)
    write(HERE / "data" / "test.csv", test, header)


def write(path: Path, rows: np.ndarray, header: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savetxt(path, rows, "%.6f", ",", header=header, comments="")
    print(path.relative_to(HERE), len(rows))


if __name__ == "__main__":
    main()
