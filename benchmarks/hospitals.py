"""Heart disease in four hospitals: all methods on the same splits, with steps chosen on held-out training patients.

The accuracies of five splits are in hospitals.json. From this file the tables are printed: the accuracy of each method
in each hospital, and paired differences to FedAvg with 95 % intervals.

With --folder, the runs are made in this folder, which then contains a hospitals.json of its own, from which the tables
are printed. Finished runs are not made again.
For each split and method, there is a sweep of the nine trials in METHODS (`fedbilevel sweep` with task.holdout=0.25, by
validation_loss), and then a run of the chosen spec on all training patients (`fedbilevel run`). No choice uses test
patients of the same split. The patients' files are read from $FEDBILEVEL_DATA.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import estimate, head, interval, row
from fedbilevel.cli import main as fedbilevel
from fedbilevel.data import load_heart
from fedbilevel.data.loaders import FLAMBY, HOSPITALS, TRAINING, stratified

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
KEPT = Path(__file__).with_suffix(".json")


def command(*arguments: str) -> None:
    if code := fedbilevel(arguments):
        raise SystemExit(f"fedbilevel {' '.join(arguments)} ended with {code}")


def run_of(name: str, split: int, folder: Path) -> dict[str, float]:
    """Return the last row of a method's run. If the run is not in the folder, it is made."""
    place = folder / f"split-{split}" / name.replace(", ", "-").replace(" ", "-")
    run, sweep = place / "run", place / "sweep"
    if not (run / "summary.json").is_file():
        selecting = ["--set", "task.holdout=0.25", "--select", "validation_loss", "--seeds", str(split)]
        command("sweep", "hospitals", *METHODS[name], *selecting, "--quiet", "--out", str(sweep))
        whole = ["task.holdout=0", f"task.seed={split}", f"run.seed={split}"]
        settings = [word for setting in whole for word in ("--set", setting)]
        command("run", "--spec", str(sweep / "chosen.toml"), *settings, "--quiet", "--out", str(run))
    return json.loads((run / "history.jsonl").read_text().splitlines()[-1])


def accuracies(folder: Path, splits: Sequence[int]) -> dict[str, list[list[float]]]:
    """Return the test accuracies of each method: a row for each split, in the order of the hospitals.

    The four methods that each train in a single hospital become one method, "alone". Its accuracy in a hospital is that
    of the model that was trained there. "majority" is a constant prediction: the label that most training patients of
    the hospital have.
    """
    found: dict[str, list[list[float]]] = {}
    for split in splits:
        last = {name: run_of(name, split, folder) for name in METHODS}
        for name in [name for name in METHODS if not name.startswith("alone-")]:
            found.setdefault(name, []).append([last[name][f"test_accuracy.{one}"] for one in HOSPITALS])
        found.setdefault("alone", []).append([last[f"alone-{one}"][f"test_accuracy.{one}"] for one in HOSPITALS])
        constant = []
        for hospital in HOSPITALS:
            labels = load_heart(hospital).labels
            training, test = stratified(labels, TRAINING, FLAMBY + split)
            constant.append(float(np.mean(labels[test] == (np.mean(labels[training]) > 0.5))))
        found.setdefault("majority", []).append(constant)
    return found


def main(folder: str = "", splits: tuple[int, ...] = (0, 1, 2, 3, 4)) -> None:
    file = Path(folder, KEPT.name) if folder else KEPT
    if folder:
        made = {"splits": splits, "hospitals": HOSPITALS, "test_accuracy": accuracies(Path(folder), splits)}
        file.write_text(json.dumps(made, indent=1), encoding="utf-8")
    kept = json.loads(file.read_text(encoding="utf-8"))
    splits, found = kept["splits"], {name: np.array(rows) for name, rows in kept["test_accuracy"].items()}
    print(f"splits {', '.join(map(str, splits))}")
    head("test accuracy", *HOSPITALS)
    for name, rows in found.items():
        row(name, *(estimate(values, form=".3f") for values in rows.T))
    shared = np.array(TESTED) / np.array(TRAINED)
    head("paired difference to FedAvg", *HOSPITALS)
    for name, rows in found.items():
        change = rows - found["FedAvg"]
        wider = interval(change, shared)
        row(name, *(f"{estimate(of, form='+.3f')} ({b:.3f})" for of, b in zip(change.T, wider, strict=True)))
