"""Heart disease in four hospitals: every method on the same splits, its steps chosen on held-out training patients.

    FEDBILEVEL_DATA=FOLDER .venv/bin/python benchmarks/hospitals.py play --out DIR [--splits 0,1,2,3,4]
    FEDBILEVEL_DATA=FOLDER .venv/bin/python benchmarks/hospitals.py keep --out DIR
    .venv/bin/python benchmarks/hospitals.py table

`play` makes, for each split and method, the sweep of nine trials that is in METHODS (`fedbilevel sweep` with
task.holdout=0.25, by validation_loss), and the chosen spec's run on all training patients (`fedbilevel run`); what is
finished is not made again. Nothing is chosen with patients that are test patients of the same split. `keep` writes
the test accuracies of the finished splits to benchmarks/hospitals.json. From that file `table` prints each method's
accuracy in each hospital beside FLamby's, and paired differences to FedAvg with 95 % intervals.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.stats import t as student

from fedbilevel.cli import main as fedbilevel
from fedbilevel.data import load_heart
from fedbilevel.data.loaders import FLAMBY as FLAMBY_SEED
from fedbilevel.data.loaders import TRAINING, stratified

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
TRAINED, TESTED = (199, 172, 30, 85), (104, 89, 16, 45)
RIDGES = ["--grid", "task.ridge=0.0003,0.003,0.03"]
FEDAVG = ["--algorithm", "fedavg", "--set", "task.tuned=false", "--grid", "lr=0.06,0.2,0.4", *RIDGES]
FEDLIN = ["--algorithm", "fedlin", "--set", "task.tuned=false", "--grid", "outer_lr=0.3,1,2", *RIDGES]
METHODS: dict[str, list[str]] = {
    "FedAvg": FEDAVG,
    "FedLin": FEDLIN,
    "pooled": [*FEDAVG, "--set", "run.pooled=true"],
    **{f"alone-{one}": [*FEDAVG, "--set", f'task.only=["{one}"]'] for one in HOSPITALS},
    "SimFBO": ["--algorithm", "simfbo", "--grid", "server_lr.x=1,3,10", *RIDGES],
    "FedBiO": ["--algorithm", "fedbio", "--grid", "client_lr.x=0.2,0.6,2", *RIDGES],
    "FedNest": ["--algorithm", "fednest", "--grid", "outer_lr=1,3,10", *RIDGES],
    "FedAvg, one intercept": [*FEDAVG, "--set", "task.offsets=false"],
    "SimFBO, one intercept": [
        *("--algorithm", "simfbo", "--set", "task.offsets=false"),
        *("--grid", "server_lr.x=1,3,10", *RIDGES),
    ],
}
FLAMBY = {  # published means of five training seeds on one split
    "pooled": (0.783, 0.764, 0.750, 0.644),
    "alone": (0.746, 0.746, 0.725, 0.702),
    "FedAvg": (0.731, 0.719, 0.650, 0.640),
    "FedAdam": (0.752, 0.746, 0.738, 0.667),
    "FedYogi": (0.760, 0.753, 0.738, 0.676),
}
FEDERATED = ("FedAvg", "FedAdam", "FedYogi")
KEPT = Path(__file__).with_name("hospitals.json")


def done(*arguments: str) -> None:
    if code := fedbilevel(arguments):
        raise SystemExit(f"fedbilevel {' '.join(arguments)} ended with {code}")


def play(out: Path, splits: Sequence[int]) -> None:
    """One sweep and one run for each split and method."""
    for split in splits:
        for name, options in METHODS.items():
            place = out / f"split-{split}" / name.replace(", ", "-").replace(" ", "-")
            if (place / "run" / "summary.json").is_file():
                continue
            seeds, sweep = ["--seeds", str(split), "--quiet"], place / "sweep"
            selecting = ["--set", "task.holdout=0.25", "--select", "validation_loss"]
            done("sweep", "hospitals", *options, *selecting, *seeds, "--out", str(sweep))
            done(
                *("run", "--spec", str(sweep / "chosen.toml"), "--set", "task.holdout=0"),
                *("--set", f"task.seed={split}", "--set", f"run.seed={split}", "--quiet", "--out", str(place / "run")),
            )


def accuracies(out: Path) -> tuple[list[int], dict[str, np.ndarray]]:
    """The splits that are finished, and (splits, hospitals) of each method; the four alone are one method."""
    splits = sorted(int(place.name.removeprefix("split-")) for place in out.glob("split-*"))
    found: dict[str, list[list[float]]] = {}
    kept = []
    for split in splits:
        rows = {}
        for name in METHODS:
            place = out / f"split-{split}" / name.replace(", ", "-").replace(" ", "-") / "run"
            if (place / "summary.json").is_file():
                rows[name] = last_row(place)
        if len(rows) < len(METHODS):
            continue
        kept.append(split)
        for name, row in rows.items():
            if not name.startswith("alone-"):
                found.setdefault(name, []).append([row[f"test_accuracy.{one}"] for one in HOSPITALS])
        found.setdefault("alone", []).append([rows[f"alone-{one}"][f"test_accuracy.{one}"] for one in HOSPITALS])
        found.setdefault("majority", []).append([majority(one, split) for one in HOSPITALS])
    return kept, {name: np.array(rows) for name, rows in found.items()}


def majority(hospital: str, split: int) -> float:
    """The test accuracy of saying of everyone what most of that hospital's training patients are."""
    labels = load_heart(hospital).labels
    training, test = stratified(labels, TRAINING, FLAMBY_SEED + split)
    return float(np.mean(labels[test] == (np.mean(labels[training]) > 0.5)))


def last_row(run: Path) -> dict[str, float]:
    """The last row of a run's history."""
    return json.loads((run / "history.jsonl").read_text().splitlines()[-1])


def interval(values: np.ndarray, shared: float = 0.0) -> np.ndarray:
    """Half the 95 % Student interval of the mean over splits, (hospitals,).

    shared: the test patients over the training patients. Splits of the same patients are not independent: with it the
    variance of the mean is s²(1/J + shared), Nadeau and Bengio's (Machine Learning 52, 2003), in place of s²/J.
    """
    count = len(values)
    return student.ppf(0.975, count - 1) * values.std(0, ddof=1) * np.sqrt(1 / count + shared)


def keep(out: Path) -> None:
    """Write what the splits gave: by method, a row of accuracies for each split, in the order of the hospitals."""
    splits, found = accuracies(out)
    rows = {name: [[round(value, 6) for value in row] for row in of.tolist()] for name, of in found.items()}
    lines = ",\n".join(f'    "{name}": {json.dumps(row)}' for name, row in rows.items())
    head = f'{{\n  "hospitals": {json.dumps(HOSPITALS)},\n  "splits": {splits},\n'
    KEPT.write_text(f'{head}  "test_accuracy": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")


def table() -> None:
    """Print everything as tables in Markdown."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    splits, found = kept["splits"], {name: np.array(rows) for name, rows in kept["test_accuracy"].items()}
    print(f"splits {splits}\n\n| test accuracy | {' | '.join(HOSPITALS)} |\n|---|---:|---:|---:|---:|")
    for name, published in FLAMBY.items():
        print(f"| FLamby: {name} | " + " | ".join(f"{value:.3f}" for value in published) + " |")
    for name, rows in found.items():
        cells = zip(rows.mean(0), interval(rows), strict=True)
        print(f"| {name} | " + " | ".join(f"{mean:.3f} ± {half:.3f}" for mean, half in cells) + " |")
    shared = np.array(TESTED) / np.array(TRAINED)
    best = np.max([FLAMBY[name] for name in FEDERATED], axis=0)
    compared("paired difference to FedAvg", {name: rows - found["FedAvg"] for name, rows in found.items()}, shared)
    compared("above FLamby's best federated", {name: rows - best for name, rows in found.items()}, shared)
    if 0 in splits:
        print(f"\n| on FLamby's own split | {' | '.join(HOSPITALS)} |\n|---|---:|---:|---:|---:|")
        for name, rows in found.items():
            print(f"| {name} | " + " | ".join(f"{value:.3f}" for value in rows[splits.index(0)]) + " |")


def compared(title: str, changes: dict[str, np.ndarray], shared: np.ndarray) -> None:
    """Print mean differences, each with the half of both intervals."""
    print(f"\n| {title} | {' | '.join(HOSPITALS)} |\n|---|---:|---:|---:|---:|")
    for name, change in changes.items():
        cells = zip(change.mean(0), interval(change), interval(change, shared), strict=True)
        print(f"| {name} | " + " | ".join(f"{mean:+.3f} ± {a:.3f} ({b:.3f})" for mean, a, b in cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("play", "keep", "table"))
    parser.add_argument("--out", type=Path, help="of play and keep: the folder of the runs")
    parser.add_argument("--splits", default="0,1,2,3,4")
    options = parser.parse_args()
    if options.what == "table":
        table()
    elif options.out is None:
        parser.error(f"{options.what} needs --out DIR")
    elif options.what == "play":
        play(options.out, [int(one) for one in options.splits.split(",")])
    else:
        keep(options.out)


if __name__ == "__main__":
    main()
